"""Tensors among other libraries' arrays: DLPack, `__array__` and the buffer protocol, without copies on the CPU."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.ops.op import Array


class Exchanged:
    """Something with `data` that other libraries read in place: np.asarray(t), torch.from_dlpack(t), memoryview(t).

    Parameters hand out their live memory: what another library writes there is what the next run reads. Results hand
    out a copy of the last run's values.
    """

    label: str

    @property
    @abstractmethod
    def data(self) -> Array | None:
        """The values, or None."""

    def _shared(self) -> Array:
        data = self.data
        if data is None:
            raise DataError(f"Tensor '{self.label}' has no data", fix="run a graph that computes it, or give it data")
        return data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self._shared()
        wanted = array.dtype if dtype is None else np.dtype(dtype)
        if wanted == array.dtype:
            return array.copy() if copy else array
        if copy is False:
            raise ValueError(f"Tensor '{self.label}' is {array.dtype}; as {wanted} it needs a copy")
        return array.astype(wanted)

    def __dlpack__(self, **options: Any) -> Any:
        return self._shared().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._shared().__dlpack_device__()
        return int(kind), int(number)

    def __buffer__(self, flags: int) -> memoryview:  # asked from Python 3.12 on; before, use memoryview(tensor.data)
        return self._shared().data
