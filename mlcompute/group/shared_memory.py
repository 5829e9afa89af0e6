"""Memory that the processes of one machine share: each makes a part, and all map the parts of all.

It has no name in any file system: it is gone with the last process that maps it, however that one ends.
"""

from __future__ import annotations

import json
import mmap
import os
import platform

import numpy as np

from mlcompute.group.exchange import Array, Exchange, Kind

#: Bytes before the part itself: there its maker leaves a mark, which only memory of the same machine shows.
_HEAD = 4096
_MARK = 16


def share(exchange: Exchange, nbytes: int) -> list[Array] | None:
    """The parts of all processes, by rank, this one's of so many bytes; None where some cannot map them. Collective.

    MLCOMPUTE_SHARED_MEMORY=0 says no on a process, and so for all.
    """
    made = _made(nbytes) if _is_ordered() and os.environ.get("MLCOMPUTE_SHARED_MEMORY", "1") != "0" else None
    descriptor, mark, mine = made if made is not None else (-1, b"", np.empty(0, np.uint8))
    try:
        said = json.dumps([os.getpid(), descriptor, mark.hex()]).encode()
        parts: list[Array] | None = []
        for rank, one in enumerate(exchange.gather_bytes(Kind.COMPILE, said)):
            part = mine if rank == exchange.rank else _mapped(*json.loads(one))
            if parts is not None and part is not None and made is not None:
                parts.append(part)
            else:
                parts = None
        agreed = exchange.gather_bytes(Kind.COMPILE, b"0" if parts is None else b"1")
        return parts if b"0" not in agreed else None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_ordered() -> bool:
    """Do other processors see writes in the order they were made? Whoever waits for a word relies on it."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _made(nbytes: int) -> tuple[int, bytes, Array] | None:
    """(file descriptor, mark, memory); None where the system has none."""
    try:
        descriptor = os.memfd_create("mlcompute")
    except (AttributeError, OSError):
        return None
    try:
        os.truncate(descriptor, _HEAD + nbytes)
        memory = np.frombuffer(mmap.mmap(descriptor, _HEAD + nbytes), np.uint8)
    except OSError:
        os.close(descriptor)
        return None
    mark = os.urandom(_MARK)
    memory[:_MARK] = np.frombuffer(mark, np.uint8)
    return descriptor, mark, memory[_HEAD:]


def _mapped(process: int, descriptor: int, mark: str) -> Array | None:
    """The memory of another process; None where it is on another machine, or closed to this one."""
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    except (OSError, ValueError):
        return None
    return memory[_HEAD:] if memory[:_MARK].tobytes().hex() == mark else None
