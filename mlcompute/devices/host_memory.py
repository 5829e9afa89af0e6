"""Memory that the host and a device share: engines on the CPU compute where the caller's arrays lie."""

from __future__ import annotations

import numpy as np

from mlcompute.devices.aligned_memory import aligned_zeros
from mlcompute.devices.device import Buffer
from mlcompute.ops.op import Array


class HostBuffer(Buffer):
    """A NumPy array as a buffer; nothing is ever copied to use it."""

    __slots__ = ("__weakref__", "host")

    def __init__(self, array: Array) -> None:
        self.host: Array = array

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def write(self, array: Array, offset: int = 0) -> None:
        _bytes(self.host)[offset : offset + array.nbytes] = _bytes(np.ascontiguousarray(array))

    def read(self, out: Array, offset: int = 0) -> None:
        np.copyto(out, _bytes(self.host)[offset : offset + out.nbytes].view(out.dtype).reshape(out.shape))


def allocate(nbytes: int) -> HostBuffer:
    """Zeros that begin at a cache line."""
    return HostBuffer(aligned_zeros(nbytes))


def _bytes(array: Array) -> Array:
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat
