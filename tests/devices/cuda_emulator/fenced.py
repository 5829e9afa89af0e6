"""Memory between pages that nobody may touch: whoever goes beyond it ends the process, and does not spoil others."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque

import numpy as np

PAGE = mmap.PAGESIZE
_PATTERN = 0xA5
_protect = ctypes.CDLL(None).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def forbid(address: int, nbytes: int) -> None:
    """Whoever touches these pages ends the process."""
    failed = _protect(address, nbytes, 0)
    assert not failed, "mprotect was refused"


class Pages:
    """Zeros at `address`, the beginning of a page. Only what is used is resident."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = int(self.bytes.ctypes.data)


#: What was given back last: nobody may touch it any more, and nobody gets memory there.
_given_back: deque[Fenced] = deque(maxlen=1000)


class Fenced:
    """So many bytes at `address`: as close to the page behind them as a multiple of `alignment` can be."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        self.nbytes = nbytes
        taken = -(-max(nbytes, 1) // alignment) * alignment
        end = PAGE + -(-taken // PAGE) * PAGE
        self._pages = pages = Pages(end + PAGE)
        self.address = pages.address + end - taken
        self._beside = pages.bytes[PAGE : end - taken], pages.bytes[end - taken + nbytes : end]
        for part in self._beside:
            part[:] = _PATTERN
        forbid(pages.address, PAGE)
        forbid(pages.address + end, PAGE)

    def spoil(self) -> None:
        """Whoever reads before something was written reads nonsense."""
        ctypes.memset(self.address, _PATTERN, self.nbytes)

    def give_back(self) -> None:
        """Nobody may touch it from now on."""
        for part, where in zip(self._beside, ("before", "behind"), strict=True):
            assert (part == _PATTERN).all(), f"memory {where} an allocation was written"
        forbid(self._pages.address, len(self._pages.map))
        self._pages.map.madvise(mmap.MADV_DONTNEED)
        _given_back.append(self)
