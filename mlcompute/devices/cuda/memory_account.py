"""Memory use of a process on a GPU, by purpose: buffers to the byte, the rest by the free memory the driver reports."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from mlcompute.devices.device import DeviceMemory

#: The driver gives large pieces of memory in multiples of so many bytes.
_GRAIN = 2 << 20


class MemoryAccount:
    """Counts for one device.

    free   asks the driver how many bytes are free

    Destructors free buffers, on any thread and in the middle of anything, also of `allocated`: there is neither a lock
    nor a sum here, a buffer is one entry of a dictionary.
    """

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._sizes: dict[int, int] = {}
        self._taken: Counter[str] = Counter()

    def allocated(self, address: int, nbytes: int) -> None:
        """A buffer was made."""
        self._sizes[address] = nbytes

    def freed(self, address: int) -> None:
        """A buffer was given back."""
        self._sizes.pop(address, None)

    @contextlib.contextmanager
    def taking(self, what: str) -> Iterator[None]:
        """What becomes less meanwhile, and is neither a buffer nor counted inside, is taken by this."""
        before = self._unexplained()
        try:
            yield
        finally:
            self._taken[what] += self._unexplained() - before

    def _unexplained(self) -> int:
        return -self._free() - sum(map(_rounded, list(self._sizes.values()))) - sum(self._taken.values())

    def state(self, total: int) -> DeviceMemory:
        """All of it now."""
        free, buffers = self._free(), sum(list(self._sizes.values()))
        named = {what: max(0, self._taken[what]) for what in ("libraries", "kernels", "graphs")}
        other = max(0, total - free - buffers - sum(named.values()))
        return DeviceMemory(total, free, buffers, other=other, **named)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN if nbytes >= _GRAIN // 2 else nbytes
