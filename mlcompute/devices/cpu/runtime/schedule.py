"""Which entries of a program threads share, which one thread runs alone, and where all wait for each other.

A barrier takes longer than many a small kernel. Between kernels that the first thread runs alone none is needed, so a
chain of small ones is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

from mlcompute.devices.cpu.runtime.calls import Calls, Memory
from mlcompute.devices.cpu.runtime.threads import (
    ALONE,
    CLAIMS,
    TURN_CLAIM,
    TURN_PIECES,
    WAIT,
    machine_slices,
    planned_threads,
)
from mlcompute.ops.op import Array

#: So many estimated nanoseconds of work are worth waking one more thread for.
WORTH_SHARING = 15_000.0
#: A barrier is cheaper than looking through more than this many of them.
_MOST_TOUCHED = 512
#: What so many calls touch is made into tuples together.
_BLOCK = 1024
#: Of neighbouring calls, so many operands of each are compared for all of them at once.
_FIRST_PARTS = 6
#: Estimated nanoseconds of a piece into which the work of a thread is cut. Who takes over a piece finds nothing of it
#: in its cache: of fewer threads than these one is rarely slow enough for that to pay.
_PIECE, _FEWEST_THREADS = 10_000.0, 4


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


def schedule(calls: Calls, memory: Memory, can_fail: Array, threads: int) -> Array:
    """For every call: do threads wait before it (`WAIT`), does one run it (`ALONE`), and in how many pieces?

    can_fail   of every call
    """
    if len(calls) == 0:
        return np.zeros(0, np.int64)
    touches = _Touches.of(calls, memory, threads)
    certain, alone = _next_to_each_other(touches), np.zeros(len(calls), np.bool_)
    if threads > 1:
        # Most barriers are between neighbours. Where these are enough to leave all small chains to one thread, nobody
        # need know the others between its calls.
        costs = calls.costs()
        chains = _small_chains(costs, certain, threads)
        if chains is None:
            waits = _barriers(calls, touches, certain, can_fail, alone)
            chains = _small_chains(costs, waits, threads, exact=True)
        assert chains is not None
        alone = chains
    certain[1:] &= ~(alone[1:] & alone[:-1])
    waits = _barriers(calls, touches, certain, can_fail, alone)
    return np.where(waits, WAIT, 0) | np.where(alone, ALONE, 0) | _pieces(calls, touches, waits, alone, threads)


def _pieces(calls: Calls, touches: _Touches, waits: Array, alone: Array, threads: int) -> Array:
    """What is added to the turns of calls whose work is cut into pieces.

    Any thread may run any piece, so such a call may touch nothing that another one between the same barriers does.
    """
    found = np.zeros(len(calls), np.int64)
    if not _FEWEST_THREADS <= threads <= planned_threads():  # more have no memory of their own
        return found
    most = np.array([entry.most_pieces if entry.in_pieces else 1 for entry in calls.entries], np.int64)[calls.which]
    pieces = np.minimum(calls.costs() / threads / _PIECE, most).astype(np.int64)
    barriers = [0, *np.flatnonzero(waits).tolist(), len(calls)]
    wanted = np.flatnonzero((pieces > 1) & ~alone)
    claims, pieces_of = dict.fromkeys(barriers, 0), _Pieces(touches)
    for call, place in zip(wanted.tolist(), np.searchsorted(barriers, wanted, "right").tolist(), strict=True):
        begin, end = barriers[place - 1], barriers[place]
        others = _Touched(piece for other in range(begin, end) if other != call for piece in pieces_of[other])
        if claims[begin] < CLAIMS and not others.conflict(pieces_of[call], by_rows=False):
            found[call] = int(pieces[call]) << TURN_PIECES | claims[begin] << TURN_CLAIM
            claims[begin] += 1
    return found


def barrier_cost(threads: int) -> float:
    """Nanoseconds until all threads have met, about."""
    return 250.0 + 20.0 * threads


def _small_chains(costs: Array, waits: Array, threads: int, *, exact: bool = False) -> Array | None:
    """Calls in a row that one thread runs sooner than all threads that wait for each other between them.

    exact   are these all barriers? If not, None where more of them could change the answer
    """
    barrier, lost = barrier_cost(threads), 1.0 - 1.0 / threads
    alone = np.zeros(len(costs), np.bool_)
    # To share a call takes a barrier before it, and mostly another one behind it.
    small = np.concatenate([[False], costs * lost < 1.5 * barrier, [False]])
    edges = np.flatnonzero(small[1:] != small[:-1]).tolist()
    waited, spent = (np.concatenate([[0], np.cumsum(some)]).tolist() for some in (waits, costs))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if end - begin > 1:
            inside = waited[end] - waited[begin + 1]
            # Others wait before and after the chain, also where they did not have to.
            added = (begin > 0 and not waits[begin]) + (end < len(costs) and not waits[end])
            if (inside - added) * barrier > lost * (spent[end] - spent[begin]):
                alone[begin:end] = True
            elif not exact:
                return None
    return alone


#: Is it written, from which byte on, to which, rows, bytes: see `_Touches`.
_Piece: TypeAlias = tuple[bool, int, int, int, int]


class _Touches(NamedTuple):
    """What calls touch, one piece of memory after the other.

    begin     of each call: its first piece; one more at the end
    written   is a piece written?
    start, stop   its bytes in the arena; outside of it, where bases have nothing in common, a made-up range
    rows      that threads own in it (0: any thread touches anything)
    nbytes    of the operand: threads that share the same rows of as many bytes only touch their own
    """

    begin: Array
    written: Array
    start: Array
    stop: Array
    rows: Array
    nbytes: Array

    @classmethod
    def of(cls, calls: Calls, memory: Memory, threads: int) -> _Touches:
        """What calls touch where there are so many threads."""
        counts = np.array([len(entry.layout.touches) for entry in calls.entries], np.int64)[calls.which]
        begin = np.concatenate([[0], np.cumsum(counts)])
        made = cls(begin, np.zeros(begin[-1], np.bool_), *np.zeros((4, begin[-1]), np.int64))
        for entry, called, bases in calls.by_entry():
            for number, (base, written, rows, rows_for, offset, nbytes, is_array) in enumerate(entry.layout.touches):
                at, own = begin[called] + number, bases[:, base]
                lies = memory.offset[own]
                start = lies + offset if is_array else lies
                stop = start + nbytes if is_array else lies + memory.nbytes[own]
                made.written[at] = written
                made.start[at] = np.where(lies < 0, -1 - own, start)
                made.stop[at] = np.where(lies < 0, -own, stop)
                made.rows[at] = rows if rows_for in (0, threads) and (is_array or offset == 0) else 0
                made.nbytes[at] = nbytes
        return made

    def part(self, number: int) -> tuple[Array, ...]:
        """One piece of every call; an empty one where a call has not so many."""
        at = np.minimum(self.begin[:-1] + number, max(len(self.written) - 1, 0))
        there = self.begin[:-1] + number < self.begin[1:]
        written, start, stop, rows, nbytes = (some[at] for some in self[1:])
        return written & there, np.where(there, start, 0), np.where(there, stop, 0), rows, nbytes


class _Pieces:
    """What single calls touch, as tuples. They are made for many calls at once, where one of them is asked for."""

    def __init__(self, touches: _Touches) -> None:
        self._touches = touches
        #: Number of the block -> where the pieces of each of its calls begin, and all its pieces.
        self._blocks: dict[int, tuple[list[int], list[_Piece]]] = {}

    def __getitem__(self, call: int) -> list[_Piece]:
        number, place = divmod(call, _BLOCK)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._block(number * _BLOCK)
        begins, pieces = block
        return pieces[begins[place] : begins[place + 1]]

    def _block(self, first: int) -> tuple[list[int], list[_Piece]]:
        begins = self._touches.begin[first : first + _BLOCK + 1]
        part = slice(begins[0], begins[-1])
        pieces = list(zip(*[some[part].tolist() for some in self._touches[1:]], strict=True))
        return (begins - begins[0]).tolist(), pieces


def _next_to_each_other(touches: _Touches) -> Array:
    """Calls that must wait for the one before them, by the first pieces of memory that both touch."""
    waits = np.zeros(len(touches.begin) - 1, np.bool_)
    most = min(_FIRST_PARTS, int(np.diff(touches.begin).max(initial=0)))
    parts = [touches.part(number) for number in range(most)] if len(touches.written) else []
    for written, start, stop, rows, nbytes in parts:
        for was_written, other_start, other_stop, other_rows, other_nbytes in parts:
            found = (written[1:] | was_written[:-1]) & (start[1:] < other_stop[:-1]) & (other_start[:-1] < stop[1:])
            own = (rows[1:] != 0) & (rows[1:] == other_rows[:-1]) & (start[1:] == other_start[:-1])
            waits[1:] |= found & ~(own & (nbytes[1:] == other_nbytes[:-1]))
    return waits


def _barriers(calls: Calls, touches: _Touches, certain: Array, can_fail: Array, alone: Array) -> Array:
    """Before which calls all threads must synchronize: where one may touch memory another has not finished with.

    certain   calls of which that is known
    """
    numbers = np.arange(len(certain))
    last = np.maximum.accumulate(np.where(certain, numbers, 0))
    shared_before, failing_before, failing_alone_before = (
        np.concatenate([[0], np.cumsum(some)]) for some in (~alone, can_fail & ~alone, can_fail & alone)
    )
    # A call that the first thread runs alone, after others like it, has nobody to wait for.
    open_ = np.flatnonzero(~certain & ~(alone & (shared_before[:-1] == shared_before[last])) & (numbers > 0))
    waits, touched = certain.tolist(), touches.begin.tolist()
    is_alone, failing, failing_alone = (some.tolist() for some in (alone, failing_before, failing_alone_before))
    begin = end = 0  # the calls that have been looked at since the last barrier
    pieces, shared, own = _Pieces(touches), _Touched(), _Touched()
    for call, after in zip(open_.tolist(), last[open_].tolist(), strict=True):
        if after > begin:
            begin = end = after
            shared.clear()
            own.clear()
        single = is_alone[call]
        # No parameter or state is changed before it is known that every kernel before it succeeded. The first thread
        # knows about those it ran alone.
        unknown = failing[call] > failing[begin] or (not single and failing_alone[call] > failing_alone[begin])
        wait = unknown and not calls.steps[call].op.is_pure
        wait = wait or touched[call] - touched[begin] > _MOST_TOUCHED
        if not wait:
            for before in range(end, call):
                (own if is_alone[before] else shared).add(pieces[before])
            end, mine = call, pieces[call]
            wait = shared.conflict(mine, by_rows=not single) or (not single and own.conflict(mine, by_rows=False))
        if wait:
            waits[call] = True
            begin = end = call
            shared.clear()
            own.clear()
    return np.array(waits, np.bool_)


class _Touched:
    """What calls between two barriers touch: of very many updates, say, each of which has memory of its own.

    What is read and what is written are apart, as what is only read does not conflict with what is only read. So is
    what lies outside of the arena, by where it lies: two such pieces are the same or have nothing in common.
    """

    def __init__(self, pieces: Iterable[_Piece] = ()) -> None:
        self._read: list[_Piece] = []
        self._written: list[_Piece] = []
        self._read_outside: dict[int, list[_Piece]] = {}
        self._written_outside: dict[int, list[_Piece]] = {}
        self.add(pieces)

    def add(self, pieces: Iterable[_Piece]) -> None:
        for piece in pieces:
            start = piece[1]
            if start >= 0:
                (self._written if piece[0] else self._read).append(piece)
            else:
                outside = self._written_outside if piece[0] else self._read_outside
                known = outside.get(start)
                if known is None:
                    outside[start] = [piece]
                elif piece not in known:
                    known.append(piece)

    def clear(self) -> None:
        """There was a barrier."""
        for pieces in (self._read, self._written, self._read_outside, self._written_outside):
            if pieces:
                pieces.clear()

    def conflict(self, mine: Iterable[_Piece], *, by_rows: bool) -> bool:
        """Does a call touch the same bytes, one of both writing? `by_rows`: other than each thread in its own rows."""
        for written, start, stop, rows, nbytes in mine:
            others: Iterable[_Piece]
            if start >= 0:
                others = (*self._written, *self._read) if written else self._written
            else:
                others = self._written_outside.get(start, ())
                if written:
                    others = (*others, *self._read_outside.get(start, ()))
            for _, other_start, other_stop, other_rows, other_nbytes in others:
                if start < other_stop and other_start < stop:
                    # Threads that share the same rows of the same bytes only touch their own work.
                    own = rows and rows == other_rows and start == other_start and nbytes == other_nbytes
                    if not (by_rows and own):
                        return True
        return False
