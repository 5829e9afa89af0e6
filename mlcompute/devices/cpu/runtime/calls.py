"""The kernel calls of a program as arrays: a large program has few entries and very many calls.

Memory has a number: the index of the value that owns it. Workspaces have negative ones, which count from the end of a
table, so that tables by number need no other key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.ops.op import Array, Step, Value

#: What is smaller is not worth writing in another way for others to read.
_FEW_BYTES = 1 << 14


def numbers_of(values: Sequence[Value]) -> Array:
    """The numbers of the memory that some values own."""
    return np.array([value.index for value in values], np.int64)


class Memory:
    """Where memory lies, by its number.

    offset   in the arena; -1: elsewhere
    nbytes   in the arena
    """

    def __init__(self, plan: MemoryPlan, numbers: Array) -> None:
        """`numbers`: all that will be asked about."""
        places = plan.placements
        own = numbers_of(list(places))
        asked = np.concatenate([numbers, own, [0]])
        size = 1 + int(asked.max()) - int(asked.min())  # workspaces lie behind the values
        self.offset, self.nbytes = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        self.offset[own] = [place.offset for place in places.values()]
        self.nbytes[own] = [place.nbytes for place in places.values()]

    def table(self) -> Array:
        """False for all memory."""
        return np.zeros(len(self.offset), np.bool_)


#: Entries, the numbers of their calls, and (calls, bases) the memory of their bases.
ByEntry = list[tuple[Entry, Array, Array]]


class Calls:
    """Calls of entries, in order.

    entries  every entry once
    places   of each entry: which values of a step are its bases
    steps    of each call
    which    of each call: the number of its entry
    first    of each call: where the values of its step begin
    memory   the numbers of the memory that those values lie in
    phases   of each call: the number of its phase
    """

    def __init__(
        self,
        entries: list[Entry],
        places: list[list[int]],
        steps: list[Step],
        which: Array,
        first: Array,
        memory: Array,
        phases: Array,
    ) -> None:
        self.entries, self.places, self.steps = entries, places, steps
        self.which, self.first, self.memory, self.phases = which, first, memory, phases

    def __len__(self) -> int:
        return len(self.steps)

    def by_entry(self) -> ByEntry:
        """Entries that are called, the numbers of their calls, and (calls, bases) the memory of their bases."""
        order = np.argsort(self.which, kind="stable")
        ends = np.cumsum(np.bincount(self.which, minlength=len(self.entries))).tolist()
        found: ByEntry = []
        begin = 0
        for entry, places, end in zip(self.entries, self.places, ends, strict=True):
            if end > begin:
                rows = order[begin:end]
                bases = self.memory[self.first[rows][:, None] + np.array(places, np.int64)]
                found.append((entry, rows, bases))
            begin = end
        return found

    def only(self, rows: Array) -> Calls:
        """Some of the calls."""
        steps = self.steps
        chosen = steps if len(rows) == len(steps) else [steps[row] for row in rows.tolist()]
        which, first, phases = self.which[rows], self.first[rows], self.phases[rows]
        return Calls(self.entries, self.places, chosen, which, first, self.memory, phases)

    def costs(self) -> Array:
        """Estimated nanoseconds of each call on one thread."""
        return np.array([entry.cost for entry in self.entries], np.float64)[self.which]

    def writes_for_others(self, memory: Memory) -> Array:
        """Which calls write what other threads than those that write it read: weights, above all."""
        shared = memory.table()
        by_entry = self.by_entry()
        for entry, _, bases in by_entry:
            own = entry.own_reads | entry.by_row if entry.rows else entry.own_reads
            shared[bases[:, [base for number, base in enumerate(entry.layout.reads) if number not in own]]] = True
        found = np.zeros(len(self), np.bool_)
        for entry, rows, bases in by_entry:
            written = entry.layout.touches[len(entry.reads) : len(entry.reads) + len(entry.writes)]
            large = [each.base for each in written if each.nbytes >= _FEW_BYTES]
            if large:
                found[rows] = shared[bases[:, large]].any(axis=1)
        return found

    def needed(self, read: Array, memory: Memory) -> Array:
        """Which calls do more than to write results that are never read: a step may return more than is used.

        read   by the number of memory: what others than the calls read. It becomes what is read at all
        """
        by_entry = self.by_entry()
        for entry, _, bases in by_entry:
            read[bases[:, entry.layout.reads]] = True
        read |= memory.offset < 0
        needed = np.ones(len(self), np.bool_)
        for entry, rows, bases in by_entry:
            if entry.writes:
                needed[rows] = read[bases[:, entry.layout.writes]].any(axis=1)
        return needed
