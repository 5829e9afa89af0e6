"""Memory of NumPy arrays, for native code."""

from __future__ import annotations

import ctypes
from typing import Any

from mlcompute.ops.op import Array

#: The smallest page an operating system hands out.
_PAGE = 4096
#: Pages that are worth a thread.
_PAGES_PER_THREAD = 4096
_address_of = ctypes.addressof
_from_buffer: Any = ctypes.c_char.from_buffer


def address_of(array: Array) -> int:
    """Where a contiguous array lies; a step asks it of every input, and both of NumPy's own ways take a microsecond."""
    try:
        return _address_of(_from_buffer(array))
    except (TypeError, ValueError, BufferError):  # read-only, empty, or of a type that buffers have no name for
        address: int = array.__array_interface__["data"][0]
        return address


def touch(zeros: Array, threads: int) -> None:
    """Have the operating system supply the memory of an array of zeros now, and not when it is first written."""
    pages = zeros[::_PAGE]
    parts = min(threads, len(pages) // _PAGES_PER_THREAD)
    if parts < 2:
        pages[...] = 0
        return
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and small programs do without it

    share = -(-len(pages) // parts)
    with ThreadPoolExecutor(parts) as pool:  # NumPy lets other threads run while it writes
        list(pool.map(lambda first: pages[first : first + share].fill(0), range(0, len(pages), share)))
