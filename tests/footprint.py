"""What a process holds: memory, objects, open files. For tests that ask whether something grows."""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")
#: Resident memory and open files are read from /proc; elsewhere they count as 0, and only objects are compared.
IS_KNOWN = (_PROCESS / "statm").exists()


@dataclass(frozen=True)
class Footprint:
    """What a process holds at one moment, and the difference of two moments.

    blocks       pieces of memory Python's own allocator has handed out: every small object is at least one
    resident     bytes of memory the operating system has given to the process
    descriptors  open files, sockets and pipes
    """

    blocks: int
    resident: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Footprint:
        """After the cyclic collector has run."""
        gc.collect()
        resident = descriptors = 0
        if IS_KNOWN:
            resident = int((_PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            descriptors = len(os.listdir(_PROCESS / "fd"))
        return cls(sys.getallocatedblocks(), resident, descriptors, threading.active_count())

    def __sub__(self, before: Footprint) -> Footprint:
        return Footprint(
            self.blocks - before.blocks,
            self.resident - before.resident,
            self.descriptors - before.descriptors,
            self.threads - before.threads,
        )
