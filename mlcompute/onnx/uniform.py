"""Weights whose memory is made when somebody first looks at them: one number repeated, and copies of others."""

from __future__ import annotations

import numpy as np

from mlcompute.ops.op import Array
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import TensorState
from mlcompute.tensor import Tensor
from mlcompute.tensor_descriptor import TensorDescriptor


class _CopiedState(TensorState):
    """Its storage is made when it is first asked for.

    numbers  what it will be filled with, as long as nothing else was made of it
    """

    def __init__(self, descriptor: TensorDescriptor, numbers: Array) -> None:
        self._descriptor = descriptor
        self._made: Storage | None = None
        self.numbers: Array | None = numbers

    @property
    def storage(self) -> Storage | None:  # an attribute of other tensors' states
        """The values."""
        if self.numbers is not None:
            self.storage = Storage(np.full(self._descriptor.shape, self.numbers, self._descriptor.data_type.numpy))
        return self._made

    @storage.setter
    def storage(self, storage: Storage | None) -> None:
        self._made, self.numbers = storage, None

    @property
    def keeps_data(self) -> bool:
        """It does, made or not."""
        return self.numbers is not None or self._made is not None


class CopiedTensor(Tensor):
    """A tensor that copies its numbers when its data is first asked for; from then on a tensor like any other.

    A file may store a layer once and mean a dozen; importing it must not take a dozen times the memory. The numbers
    copied must not change in between.
    """

    def __init__(self, descriptor: TensorDescriptor, numbers: Array) -> None:
        super().__init__(descriptor)
        self._state: _CopiedState = _CopiedState(descriptor, numbers)

    @property
    def numbers(self) -> Array | None:
        """What it will be filled with, as long as nothing else was made of it."""
        numbers = self._state.numbers
        return None if numbers is None else np.asarray(numbers, self.descriptor.data_type.numpy)


class UniformTensor(CopiedTensor):
    """A tensor filled with one number.

    Models may say "a weight of a gigabyte, all 0.02" in a few bytes; importing them must not take the gigabyte.
    """
