"""The result of one run, which stays that run's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlcompute.runtime.tensor_state import TensorState, state_of
from mlcompute.tensor import Tensor, tensor_ids
from mlcompute.tensor_data import Array, ArrayLike

if TYPE_CHECKING:
    from mlcompute.runtime.last_run import LastRun


class ResultState(TensorState):
    """Where the values of one run lie.

    of      the graph's own tensor
    keeper  knows the memory in which the result still lies
    """

    #: The values in memory of their own, or a function that returns them; None while the graph holds them.
    kept: Array | Callable[[], Array] | None = None

    def __init__(self, tensor: Tensor, keeper: weakref.ref[LastRun]) -> None:
        self.of, self._keeper = tensor, keeper

    def values(self, tensor: Tensor | None = None) -> Array | None:
        """The values of the run."""
        keeper = self._keeper()
        if self.kept is None and keeper is not None:
            keeper.keep_result(self)
        if callable(self.kept):
            self.kept = self.kept()
        return self.kept

    def copied(self) -> TensorState:
        self.values()
        return super().copied()


class RunResult(Tensor):
    """What one run gave. Its values are that run's, whatever runs later; the graph's own tensor has the latest run's.

    They lie in the graph's memory until they are first read, or until another run is about to overwrite them and
    somebody still holds the result: then they are copied out. A result nobody looks at costs no copy.
    """

    #: The graph's own tensor.
    of: Tensor

    def __init__(self, state: ResultState) -> None:
        # A copy of its facts: building a tensor from arguments would cost a small step ten microseconds.
        facts = state.of.__dict__.copy()
        facts["_tensor_id"], facts["_state"], facts["of"] = next(tensor_ids), state, state.of
        self.__dict__ = facts
        graphs = state_of(state.of)
        state.producer, state.graph_reference, state.device = graphs.producer, graphs.graph_reference, graphs.device
        state.feature_axis, state.varies = graphs.feature_axis, graphs.varies

    if TYPE_CHECKING:  # a result has values

        @property
        def data(self) -> Array: ...
        @data.setter
        def data(self, values: ArrayLike) -> None: ...
