"""Copies between pinned host memory and the device by a kernel: in a captured graph it is cheaper than a copy node.

The device reads and writes pinned memory by itself. A node for the copy engine makes the engines wait for each other,
which takes longer than to move so few bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

_THREADS = 256
_SOURCE = """
extern "C" __global__ void KERNEL(const WORD* source, WORD* target, int count) {
    for (int number = blockIdx.x * blockDim.x + threadIdx.x; number < count; number += gridDim.x * blockDim.x)
        target[number] = source[number];
}
"""


class PinnedCopy:
    """A copy of some bytes, a multiple of 4, from one fixed address to another."""

    def __init__(self, engine: Cuda, source: int, target: int, nbytes: int) -> None:
        wide = not (source | target | nbytes) % 16
        count = nbytes // (16 if wide else 4)
        assert nbytes % 4 == 0
        self._driver = engine.driver
        self._function = engine.driver.functions([_SOURCE.replace("WORD", "uint4" if wide else "unsigned")])[0]
        self._values = np.array([source, target, count], np.uint64)
        first = self._values.ctypes.data
        self._parameters = np.array([first, first + 8, first + 16], np.uint64)
        self._grid = (max(1, min(engine.driver.multiprocessors, -(-count // _THREADS))), 1, 1)

    def enqueue(self, stream: int) -> None:
        """Enqueue the copy."""
        parameters = int(self._parameters.ctypes.data)
        self._driver.launch(self._function, self._grid, (_THREADS, 1, 1), 0, stream, parameters)
