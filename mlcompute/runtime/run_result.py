"""The result of one run, which stays that run's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlcompute.tensor import Tensor, tensor_ids
from mlcompute.tensor_data import Array, ArrayLike


class Keeper(Protocol):
    """Whoever knows the memory in which the result still lies."""

    def keep_result(self) -> None:
        """Give the result memory of its own: `RunResult.keep`."""


class RunResult(Tensor):
    """What one run gave. Its values are that run's, whatever runs later; the graph's own tensor has the latest run's.

    They lie in the graph's memory until they are first read, or until another run is about to overwrite them and
    somebody still holds the result: then they are copied out. A result nobody looks at costs no copy.
    """

    #: The graph's own tensor.
    of: Tensor
    _keeper: weakref.ref[Keeper]
    _kept: Array | Callable[[], Array] | None

    def __init__(self, tensor: Tensor, keeper: weakref.ref[Keeper]) -> None:
        # A copy of its facts: building a tensor from arguments would cost a small step ten microseconds.
        facts = tensor.__dict__.copy()
        facts["_tensor_id"], facts["residents"] = next(tensor_ids), None
        facts["of"], facts["_keeper"], facts["_kept"] = tensor, keeper, None
        self.__dict__ = facts

    if TYPE_CHECKING:  # a result has values

        @property
        def data(self) -> Array: ...
        @data.setter
        def data(self, values: ArrayLike) -> None: ...

    @property
    def is_kept(self) -> bool:
        """Are the values in memory of their own?"""
        return self._kept is not None

    def keep(self, values: Array | Callable[[], Array] | None) -> None:
        """Here are the values, in memory that nobody else writes, or a way to get them."""
        self._kept = values

    def current_values(self) -> Array | None:
        keeper = self._keeper()
        if self._kept is None and keeper is not None:
            keeper.keep_result()
        if callable(self._kept):
            self._kept = self._kept()
        return self._kept
