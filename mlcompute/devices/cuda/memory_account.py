"""What a process takes of a GPU's memory, and for what: buffers to the byte, the rest by what the driver has left."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from mlcompute.devices.device import DeviceMemory

#: The driver gives large pieces of memory in multiples of so many bytes.
_GRAIN = 2 << 20


class MemoryAccount:
    """Counts for one device.

    free   asks the driver how many bytes are free
    """

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._sizes: dict[int, int] = {}
        self._buffers, self._grains = 0, 0
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def allocated(self, address: int, nbytes: int) -> None:
        """A buffer was made."""
        with self._lock:
            self._sizes[address] = nbytes
            self._buffers += nbytes
            self._grains += _rounded(nbytes)

    def freed(self, address: int) -> None:
        """A buffer was given back."""
        with self._lock:
            nbytes = self._sizes.pop(address, 0)
            self._buffers -= nbytes
            self._grains -= _rounded(nbytes)

    @contextlib.contextmanager
    def taking(self, what: str) -> Iterator[None]:
        """What becomes less meanwhile, and is neither a buffer nor counted inside, is taken by this."""
        before = self._unexplained()
        try:
            yield
        finally:
            self._taken[what] += self._unexplained() - before

    def _unexplained(self) -> int:
        return -self._free() - self._grains - sum(self._taken.values())

    def state(self, total: int) -> DeviceMemory:
        """All of it now."""
        free = self._free()
        named = {what: max(0, self._taken[what]) for what in ("libraries", "kernels", "graphs")}
        other = max(0, total - free - self._buffers - sum(named.values()))
        return DeviceMemory(total, free, self._buffers, other=other, **named)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN if nbytes >= _GRAIN // 2 else nbytes
