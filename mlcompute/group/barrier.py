"""Barriers between processes of one machine, in shared memory instead of messages.

Each process has two slots, used in turn, and writes its own only: a number that rises with every barrier, what it is
for, and two numbers for the others. Nobody comes to the barrier after the next before all have read this one's words.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from mlcompute.group.exchange import Array, Exchange, Kind

#: Bytes of shared memory that every process gives for it.
BARRIER_BYTES = 128
#: Looks at the others' slots before this process asks whether they are still there.
_SPINS = 2000


class Barrier:
    """A barrier of all processes of a machine, used again and again.

    memory   of each process, by rank: BARRIER_BYTES that were 0 at first
    """

    def __init__(self, exchange: Exchange, memory: Mapping[int, Array]) -> None:
        self._exchange, self._number = exchange, 0
        # Plain integers are read much faster through a memoryview than through an array.
        slots = {rank: part[:BARRIER_BYTES].view(np.int64).data for rank, part in memory.items()}
        self._mine, self._size = slots.pop(exchange.rank), exchange.size
        self._others = list(slots.items())

    def wait(self, kind: Kind, *, same: int = 0, word: int = 0, patience: float = 0.0) -> list[int]:
        """Return when all processes have called it; the `word` of every process, by rank (see `Exchange.alltoall`)."""
        self._exchange.expect_usable()
        self._number = number = self._number + 1
        at, mine = 8 * (number % 2), self._mine
        mine[at + 1], mine[at + 2], mine[at + 3] = kind, same, word
        mine[at] = number  # last: whoever sees it finds the others
        words = [word] * self._size
        for rank, slot in self._others:
            if slot[at] != number:
                self._wait_for(slot, at, kind, patience)
            if slot[at + 1] != kind or slot[at + 2] != same:
                self._exchange.refuse(rank, kind, Kind(slot[at + 1]), same, slot[at + 2])
            words[rank] = slot[at + 3]
        return words

    def _wait_for(self, slot: memoryview, at: int, kind: Kind, patience: float) -> None:
        """Return when a process has come; raise where one is gone, or does something else."""
        number, begun, asked = self._number, time.monotonic() + patience, 0
        for _ in range(_SPINS):
            if slot[at] == number:
                return
        slots = dict(self._others)
        while slot[at] != number:
            asked += 1  # from 1 on: sleeps begin short
            waiting = [rank for rank, other in self._others if other[at] != number]
            self._exchange.expect_alive(kind, waiting, lambda peer: slots[peer][at] != number, begun, asked)
