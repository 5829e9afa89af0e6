"""The result of one run, which stays that run's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mlcompute.tensor import Tensor, tensor_ids
from mlcompute.tensor_data import Array, ArrayLike


class Keeper(Protocol):
    """Whoever knows the memory in which the result still lies."""

    def keep_result(self) -> None:
        """Give the result memory of its own: `RunResult.kept`."""


class RunResult(Tensor):
    """What one run gave. Its values are that run's, whatever runs later; the graph's own tensor has the latest run's.

    They lie in the graph's memory until they are first read, or until another run is about to overwrite them and
    somebody still holds the result: then they are copied out. A result nobody looks at costs no copy.
    """

    #: The graph's own tensor.
    of: Tensor
    _keeper: weakref.ref[Keeper]
    #: The values, in memory that nobody else writes, or a way to get them; None while they lie in the graph's.
    kept: Array | Callable[[], Array] | None

    def __init__(self, tensor: Tensor, keeper: weakref.ref[Keeper]) -> None:
        self.of, self._keeper, self.kept = tensor, keeper, None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What else a tensor has is copied when somebody first asks for it: most results are only read."""
            known = self.__dict__
            if "_descriptor" not in known and "of" in known:
                facts = {**known["of"].__dict__, "_tensor_id": next(tensor_ids), "residents": None}
                self.__dict__ = {**facts, **known}
                return getattr(self, name)
            return super().__getattr__(name)

    if TYPE_CHECKING:  # a result has values

        @property
        def data(self) -> Array: ...
        @data.setter
        def data(self, values: ArrayLike) -> None: ...

    def current_values(self) -> Array | None:
        keeper = self._keeper()
        if self.kept is None and keeper is not None:
            keeper.keep_result()
        if callable(self.kept):
            self.kept = self.kept()
        return self.kept
