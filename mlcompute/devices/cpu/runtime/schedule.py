"""Which entries of a program threads share, which one thread runs alone, and where all wait for each other.

A barrier takes longer than many a small kernel. Between kernels that the first thread runs alone none is needed, so a
chain of small ones is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.compiler.program import Program
from mlcompute.devices.cpu.runtime.entry import Entry, KernelCall
from mlcompute.devices.cpu.runtime.threads import ALONE, WAIT, machine_slices
from mlcompute.ops.op import Value

#: What a call touches: is it written, its first and last byte, rows that threads own (0: any) and their bytes.
_Touch = tuple[bool, int, int, int, int]
#: So many estimated nanoseconds of work are worth waking one more thread for.
WORTH_SHARING = 15_000.0
#: A barrier is cheaper than looking through more than this many of them.
_MOST_TOUCHED = 512


def useful_threads(cost: float, threads: int) -> int:
    """How many of the threads run a program of so many estimated nanoseconds.

    Many kernels cut their work into `machine_slices()` parts. Of 16, thirteen threads have up to two each, as eight
    have: where not all threads are worth waking, no more are than shorten that.
    """
    worth = 1 + int(cost / WORTH_SHARING)
    if worth >= threads:
        return threads
    parts = max(threads, machine_slices())
    return -(-parts // -(-parts // worth))


def schedule(calls: Sequence[KernelCall], program: Program, threads: int) -> list[int]:
    """For every call, whether threads wait before it (`WAIT`) and whether only the first runs it (`ALONE`)."""
    touches = _touches(calls, threads)
    waits = _barriers(calls, touches, program, [False] * len(calls))
    if threads == 1:
        return [WAIT * wait for wait in waits]
    alone = _small_chains(calls, waits, threads)
    if any(alone):
        waits = _barriers(calls, touches, program, alone)
    return [WAIT * wait + ALONE * single for wait, single in zip(waits, alone, strict=True)]


def barrier_cost(threads: int) -> float:
    """Nanoseconds until all threads have met, about."""
    return 250.0 + 20.0 * threads


def _small_chains(calls: Sequence[KernelCall], waits: Sequence[bool], threads: int) -> list[bool]:
    """Calls in a row that one thread runs sooner than all threads that wait for each other between them."""
    barrier, lost = barrier_cost(threads), 1.0 - 1.0 / threads
    costs = [call.entry.cost for call in calls]
    alone = [False] * len(calls)
    begin = 0
    while begin < len(calls):
        end = begin
        # To share a call takes a barrier before it, and mostly another one behind it.
        while end < len(calls) and costs[end] * lost < 1.5 * barrier:
            end += 1
        if end - begin > 1:
            inside = sum(waits[begin + 1 : end])
            # Others wait before and after the chain, also where they did not have to.
            added = (begin > 0 and not waits[begin]) + (end < len(calls) and not waits[end])
            if (inside - added) * barrier > lost * sum(costs[begin:end]):
                alone[begin:end] = [True] * (end - begin)
        begin = end + 1
    return alone


def _barriers(
    calls: Sequence[KernelCall], touches: Sequence[_Touches], program: Program, alone: Sequence[bool]
) -> list[bool]:
    """Before which calls all threads must synchronize: where one may touch memory another has not finished with."""
    waits: list[bool] = []
    failures = [False, False]  # may a call have failed since the last barrier: a shared one, one that is alone
    shared, own = _Touched(program), _Touched(program)  # what was touched since then by shared calls, by those alone
    for call, mine, single in zip(calls, touches, alone, strict=True):
        # No parameter or state is changed before it is known that every kernel before it succeeded. The first thread
        # knows about those it ran alone.
        unknown = failures[0] or (failures[1] and not single)
        wait = (
            (unknown and not call.step.op.is_pure)
            or (shared.count > 0 and shared.conflicts(call, mine, by_rows=not single))
            or (not single and own.count > 0 and own.conflicts(call, mine, by_rows=False))
            or shared.count + own.count > _MOST_TOUCHED
        )
        waits.append(wait)
        if wait:
            shared.clear()
            own.clear()
            failures = [False, False]
        (own if single else shared).add(call, mine)
        if call.status is not None:
            failures[single] = True
    return waits


class _Touches(NamedTuple):
    """What calls of an entry touch, by the numbers of its bases.

    parts      base, is it written, rows that threads own, bytes, offset in the base (-1: all of it)
    bases      every base once
    anywhere   bases of which any thread may write any part
    """

    parts: list[tuple[int, bool, int, int, int]]
    bases: list[int]
    anywhere: list[int]


def _touches(calls: Sequence[KernelCall], threads: int) -> list[_Touches]:
    """What each call touches; calls of one entry share it."""
    entries: dict[Entry, _Touches] = {}
    for entry in dict.fromkeys([call.entry for call in calls]):
        parts = []
        for base, written, rows, rows_for, offset, nbytes, is_array in entry.layout.touches:
            own = rows if rows_for in (0, threads) and (is_array or offset == 0) else 0
            parts.append((base, written, own, nbytes, offset if is_array else -1))
        bases = list(dict.fromkeys(part[0] for part in parts))
        anywhere = [base for base, written, own, _, offset in parts if written and not own and offset < 0]
        entries[entry] = _Touches(parts, bases, anywhere)
    return [entries[call.entry] for call in calls]


class _Touched:
    """What calls have touched since the last barrier. It is looked at only as closely as the next call asks for."""

    def __init__(self, program: Program) -> None:
        self._placements = program.plan.placements
        #: How many pieces of memory.
        self.count = 0
        self._new: list[tuple[KernelCall, _Touches]] = []
        #: Bases that were written: whoever touches one of them must wait. Most calls read what the one before wrote.
        self._written: set[Value] = set()
        self._seen: list[tuple[KernelCall, _Touches]] = []
        #: What calls touched in the arena, and outside of it, where bases have nothing in common, by base.
        self._inside: list[_Touch] = []
        self._outside: dict[int, list[_Touch]] = {}

    def clear(self) -> None:
        """All threads have met."""
        if self.count:
            self.count = 0
            self._new, self._seen = [], []
            self._written.clear()
            self._inside.clear()
            self._outside.clear()

    def add(self, call: KernelCall, touches: _Touches) -> None:
        """Remember what one more call touches."""
        self.count += len(touches.parts)
        self._new.append((call, touches))

    def conflicts(self, call: KernelCall, touches: _Touches, by_rows: bool) -> bool:
        """Do calls touch the same bytes, one of them writing? `by_rows`: other than each thread in rows of its own."""
        bases, before = call.bases, self._written
        for one, others in self._new:
            for number in others.anywhere:
                before.add(one.bases[number])
        self._seen += self._new
        self._new = []
        for number in touches.bases:
            if bases[number] in before:
                return True
        for one, others in self._seen:
            for touch in self._ranges(one, others):
                (self._inside if touch[1] >= 0 else self._outside.setdefault(touch[1], [])).append(touch)
        self._seen = []
        for written, begin, end, rows, nbytes in self._ranges(call, touches):
            near = self._inside if begin >= 0 else self._outside.get(begin, ())
            for was_written, other_begin, other_end, other_rows, other_nbytes in near:
                if (written or was_written) and begin < other_end and other_begin < end:
                    # Threads that share the same rows of the same bytes only touch their own work.
                    own = rows and rows == other_rows and begin == other_begin and nbytes == other_nbytes
                    if not (by_rows and own):
                        return True
        return False

    def _ranges(self, call: KernelCall, touches: _Touches) -> list[_Touch]:
        """What a call touches in the arena, or (as a made-up range) in a base of its own."""
        found: list[_Touch] = []
        for number, written, own, nbytes, offset in touches.parts:
            base = call.bases[number]
            place = self._placements.get(base)
            if place is None:
                begin, end = -1 - base.index, -base.index
            elif offset < 0:
                begin, end = place.offset, place.offset + place.nbytes
            else:
                begin, end = place.offset + offset, place.offset + offset + nbytes
            found.append((written, begin, end, own, nbytes))
        return found
