"""Optimizer state: buffers per parameter, the caller's or the graph's own, and the number of the next update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mlcompute.errors import DataError
from mlcompute.ops.op import Array
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.tensor import Tensor


class OptimizerState:
    """What one optimizer remembers about the parameters of one graph."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        #: Number of the next update; advances when an update has succeeded.
        self.time_step: int = getattr(optimizer, "time_step", 1)
        self._buffers: dict[Tensor, list[Array]] = {}

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Buffers for every parameter: the caller's, those from before, or zeros."""
        parameters = list(parameters)
        for tensor in parameters:
            if tensor._optimizer_data_is_callers:
                self.check(tensor, tensor._optimizer_data)
        for tensor in parameters:
            if tensor._optimizer_data_is_callers:
                self._buffers[tensor] = tensor._optimizer_data
            elif tensor not in self._buffers:
                descriptor = tensor.state_descriptor
                shape, dtype = descriptor.shape, descriptor.data_type.numpy
                self._buffers[tensor] = [np.zeros(shape, dtype) for _ in self.optimizer.state_names]
            tensor._optimizer_data = self._buffers[tensor]

    def check(self, tensor: Tensor, buffers: Sequence[object]) -> None:
        """Refuse another number of buffers than the optimizer has states."""
        names = self.optimizer.state_names
        if len(buffers) != len(names):
            raise DataError(
                f"optimizer data of '{tensor.label}': {len(buffers)} buffers were given, "
                f"{type(self.optimizer).__name__} has {len(names)} states",
                expected=", ".join(names) or "none",
            )

    def rebound(self, tensor: Tensor) -> None:
        """The caller has supplied other buffers for a tensor."""
        if tensor in self._buffers and tensor._optimizer_data_is_callers:
            self.check(tensor, tensor._optimizer_data)
            self._buffers[tensor] = tensor._optimizer_data

    def of(self, tensor: Tensor) -> list[Array]:
        """The buffers of a parameter, in layout order."""
        return self._buffers[tensor]

    def nbytes(self, parameters: Iterable[Tensor]) -> int:
        """Bytes the state of these parameters takes."""
        return sum(buffer.nbytes for tensor in parameters for buffer in self._buffers.get(tensor, ()))

    def retire(self) -> None:
        """Another optimizer takes over: its state starts from zero, also where the caller had supplied buffers."""
        for tensor, buffers in self._buffers.items():
            if tensor._optimizer_data is buffers:
                tensor._optimizer_data, tensor._optimizer_data_is_callers = [], False

    def advance(self) -> None:
        """One update of all parameters has succeeded."""
        self.time_step += 1
        self.optimizer._advance(self.time_step)
