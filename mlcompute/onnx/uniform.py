"""Weights whose memory is made when somebody first looks at them: one number repeated, and copies of others."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.ops.op import Array
from mlcompute.runtime.storage import Storage
from mlcompute.tensor import Tensor
from mlcompute.tensor_descriptor import TensorDescriptor


class CopiedTensor(Tensor):
    """A tensor that copies its numbers when its data is first asked for; from then on a tensor like any other.

    A file may store a layer once and mean a dozen; importing it must not take a dozen times the memory. The numbers
    copied must not change in between.
    """

    def __init__(self, descriptor: TensorDescriptor, numbers: Array) -> None:
        self._made: Storage | None = None
        self._numbers: Any = numbers
        super().__init__(descriptor)
        self._is_open = True

    #: Until it is made or replaced; while the tensor is being built, it has no data.
    _is_open = False

    @property
    def numbers(self) -> Array | None:
        """What it will be filled with, as long as nothing else was made of it."""
        return np.asarray(self._numbers, self.descriptor.data_type.numpy) if self._is_open else None

    @property
    def storage(self) -> Storage | None:  # an attribute of other tensors
        """The values, made when they are first asked for."""
        if self._is_open:
            array: Array = np.full(self.descriptor.shape, self._numbers, self.descriptor.data_type.numpy)
            self.storage = Storage(array)
        return self._made

    @storage.setter
    def storage(self, storage: Storage | None) -> None:
        self._made = storage
        if self._is_open:
            self._is_open, self._numbers = False, None

    @property
    def keeps_data(self) -> bool:
        """It does, made or not."""
        return self._is_open or self._made is not None


class UniformTensor(CopiedTensor):
    """A tensor filled with one number.

    Models may say "a weight of a gigabyte, all 0.02" in a few bytes; importing them must not take the gigabyte.
    """
