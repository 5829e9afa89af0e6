"""UniformTensor: a weight that is one number repeated, and takes no memory before somebody looks at it."""

from __future__ import annotations

import numpy as np

from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor
from mlcompute.tensor_descriptor import TensorDescriptor


class UniformTensor(Tensor):
    """A tensor filled with one number when its data is first asked for; from then on a tensor like any other.

    Models may say "a weight of a gigabyte, all 0.02" in a few bytes; importing them must not take the gigabyte.
    """

    def __init__(self, descriptor: TensorDescriptor, number: float) -> None:
        self._made: Array | None = None
        self._number = number
        super().__init__(descriptor)
        self._is_open = True

    #: Until it is made or replaced; while the tensor is being built, it has no data.
    _is_open = False

    @property
    def number(self) -> Array | None:
        """The number, as an array without axes, as long as nothing else was made of it."""
        return np.asarray(self._number, self.descriptor.data_type.numpy) if self._is_open else None

    @property
    def _host(self) -> Array | None:
        if self._is_open:
            self._host = np.full(self.descriptor.shape, self._number, self.descriptor.data_type.numpy)
        return self._made

    @_host.setter
    def _host(self, array: Array | None) -> None:
        self._made, self._is_open = array, False
