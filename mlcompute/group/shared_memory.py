"""Memory that the processes of one machine share: each makes a part, and all of them map it.

It has no name in any file system: it is gone with the last process that maps it, however that one ends.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlcompute.group.exchange import Array, Exchange, Kind

#: Bytes before the part itself: there its maker leaves a mark, which only memory of the same machine shows.
_HEAD = 4096
_MARK = 16


def share(exchange: Exchange, nbytes: int) -> dict[int, Array]:
    """The parts of all processes of this machine, by rank, each of the bytes it asked for. Collective.

    Empty everywhere unless each machine has as many processes as the others, more than one, with neighbouring ranks.
    MLCOMPUTE_SHARED_MEMORY=0 says no on a process, and so for all; 2 or more takes so many neighbours for a machine.
    """
    told = os.environ.get("MLCOMPUTE_SHARED_MEMORY", "1")
    neighbours = int(told) if told.isdigit() else 1
    made = _made(nbytes) if _is_ordered() and neighbours > 0 else None
    descriptor, mark, mine = made if made is not None else (-1, b"", np.empty(0, np.uint8))
    try:
        said = json.dumps([_boot(), os.getpid(), descriptor, mark.hex()]).encode()
        parts = {exchange.rank: mine}
        for rank, one in enumerate(exchange.gather_bytes(Kind.COMPILE, said)):
            is_near = neighbours < 2 or rank // neighbours == exchange.rank // neighbours
            part = _mapped(*json.loads(one)) if rank != exchange.rank and made is not None and is_near else None
            if part is not None:
                parts[rank] = part
        ranks = exchange.gather_bytes(Kind.COMPILE, json.dumps(sorted(parts)).encode())
        return dict(sorted(parts.items())) if _are_machines([json.loads(one) for one in ranks]) else {}
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _are_machines(shared: Sequence[Sequence[int]]) -> bool:
    """Does every machine have the same number of processes, with consecutive ranks?"""
    count = len(shared[0])
    firsts = (rank - rank % count for rank in range(len(shared)))
    return count > 1 and all(
        ranks == list(range(first, first + count)) for ranks, first in zip(shared, firsts, strict=True)
    )


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


def _boot() -> str:
    """Identifies this machine since it was started: a process id means another process on another machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _mapped(boot: str, process: int, descriptor: int, mark: str) -> Array | None:
    """The memory of another process; None where it is on another machine, or closed to this one."""
    if boot != _boot() or descriptor < 0:
        return None
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    except (OSError, ValueError):
        return None
    return memory[_HEAD:] if memory[:_MARK].tobytes().hex() == mark else None
