"""Copies between pinned host memory and the device by a kernel: in a captured graph it is cheaper than a copy node.

The device reads and writes pinned memory by itself. A node for the copy engine makes the engines wait for each other,
which takes longer than to move so few bytes. What is to be copied, or set to zero, at one time is one launch. The first
one of a run tells the host how many runs came before it, which are over then: asking the driver takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

_THREADS = 256
#: Copies of one launch at most.
_MOST = 4
_PARAMETERS = ", ".join(f"const unsigned* from{k}, unsigned* to{k}, int count{k}" for k in range(_MOST))
_COPIES = "\n".join(
    f"    for (int at = first; at < count{k}; at += apart) to{k}[at] = from{k} ? from{k}[at] : 0u;"
    for k in range(_MOST)
)
_SOURCE = f"""
extern "C" __global__ void KERNEL(const uint4* from, uint4* to, int count, {_PARAMETERS},
                                  unsigned long long* begun, volatile unsigned long long* told) {{
    if (begun && blockIdx.x == gridDim.x - 1) {{  // a block of its own: no copy waits for this
        if (threadIdx.x == 0) {{
            const unsigned long long before = *begun;
            __threadfence_system();  // what they have sent can be seen before the count
            *told = before;
            *begun = before + 1;
        }}
        return;
    }}
    const int first = blockIdx.x * blockDim.x + threadIdx.x, apart = (gridDim.x - (begun != 0)) * blockDim.x;
    for (int at = first; at < count; at += apart) to[at] = from[at];
{_COPIES}
}}
"""


class Copy(NamedTuple):
    """A copy of some bytes, a multiple of 4, from one fixed address to another; zeros from nowhere."""

    source: int
    target: int
    nbytes: int

    @property
    def is_wide(self) -> bool:
        """Can it go in steps of 16 bytes?"""
        return bool(self.source) and not (self.source | self.target | self.nbytes) % 16


class PinnedCopies:
    """Some copies in one launch.

    begins   are they the first of a run, which is counted then?
    """

    def __init__(self, engine: Cuda, copies: Sequence[Copy], *, begins: bool) -> None:
        wide = max((copy for copy in copies if copy.is_wide), key=lambda copy: copy.nbytes, default=None)
        narrow = [copy for copy in copies if copy is not wide]
        assert len(narrow) <= _MOST
        assert not any(copy.nbytes % 4 for copy in copies)
        self._driver = engine.driver
        self._function = engine.driver.functions([_SOURCE])[0]
        values = [*(wide or (0, 0, 0))]
        values[2] //= 16
        for copy in (*narrow, *[Copy(0, 0, 0)] * (_MOST - len(narrow))):
            values += [copy.source, copy.target, copy.nbytes // 4]
        most = max(values[2::3])
        values += engine.progress.addresses if begins else (0, 0)
        self._values = np.array(values, np.uint64)
        self._parameters = self._values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        self._grid = (max(1, min(engine.driver.multiprocessors, -(-most // _THREADS))) + begins, 1, 1)

    def enqueue(self, stream: int) -> None:
        """Enqueue them."""
        parameters = int(self._parameters.ctypes.data)
        self._driver.launch(self._function, self._grid, (_THREADS, 1, 1), 0, stream, parameters)
