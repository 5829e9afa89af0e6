"""Which entries of a program threads share, which one thread runs alone, and where all wait for each other.

A barrier takes longer than many a small kernel. Between kernels that the first thread runs alone none is needed, so a
chain of small ones is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.compiler.program import Program
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import ALONE, WAIT
from mlcompute.devices.loop_nest import Operand

#: What an entry touches: operand, whether it is written, rows threads own (0: any), first and last byte.
_Touch = tuple[Operand, bool, int, int, int]
#: A barrier is cheaper than looking through more than this many of them.
_MOST_TOUCHED = 512


def schedule(entries: Sequence[Entry], program: Program, threads: int) -> list[int]:
    """For every entry, whether threads wait before it (`WAIT`) and whether only the first runs it (`ALONE`)."""
    touches = [_touches(entry, program, threads) for entry in entries]
    waits = _barriers(entries, touches, [False] * len(entries))
    if threads == 1:
        return [WAIT * wait for wait in waits]
    alone = _small_chains(entries, waits, threads)
    if any(alone):
        waits = _barriers(entries, touches, alone)
    return [WAIT * wait + ALONE * single for wait, single in zip(waits, alone, strict=True)]


def barrier_cost(threads: int) -> float:
    """Nanoseconds until all threads have met, about."""
    return 250.0 + 20.0 * threads


def _small_chains(entries: Sequence[Entry], waits: Sequence[bool], threads: int) -> list[bool]:
    """Entries in a row that one thread runs sooner than all threads that wait for each other between them."""
    barrier, lost = barrier_cost(threads), 1.0 - 1.0 / threads
    alone = [False] * len(entries)
    begin = 0
    while begin < len(entries):
        end = begin
        # To share an entry takes a barrier before it, and mostly another one behind it.
        while end < len(entries) and entries[end].cost * lost < 1.5 * barrier:
            end += 1
        if end - begin > 1:
            inside = sum(waits[begin + 1 : end])
            # Others wait before and after the chain, also where they did not have to.
            added = (begin > 0 and not waits[begin]) + (end < len(entries) and not waits[end])
            if (inside - added) * barrier > lost * sum(entry.cost for entry in entries[begin:end]):
                alone[begin:end] = [True] * (end - begin)
        begin = end + 1
    return alone


def _barriers(entries: Sequence[Entry], touches: Sequence[list[_Touch]], alone: Sequence[bool]) -> list[bool]:
    """Before which entries all threads must synchronize: where one may touch memory another has not finished with."""
    waits: list[bool] = []
    failures = [False, False]  # may an entry have failed since the last barrier: a shared one, one that is alone
    touched: tuple[list[_Touch], list[_Touch]] = ([], [])  # since then, by shared entries and by those alone
    for entry, mine, single in zip(entries, touches, alone, strict=True):
        # No parameter or state is changed before it is known that every kernel before it succeeded. The first thread
        # knows about those it ran alone.
        unknown = failures[0] or (failures[1] and not single)
        meets = _overlaps if single else _conflicts
        wait = (
            (unknown and not entry.step.op.is_pure)
            or any(meets(new, old) for new in mine for old in touched[0])
            or (not single and any(_overlaps(new, old) for new in mine for old in touched[1]))
            or len(touched[0]) + len(touched[1]) > _MOST_TOUCHED
        )
        waits.append(wait)
        if wait:
            touched, failures = ([], []), [False, False]
        touched[single].extend(mine)
        failures[single] |= entry.status is not None
    return waits


def _touches(entry: Entry, program: Program, threads: int) -> list[_Touch]:
    found: list[_Touch] = []
    for number, operand in enumerate([*entry.reads, *entry.writes, *entry.scratch]):
        rows = entry.rows if number in entry.by_row and entry.rows_for in (0, threads) else 0
        found.append((operand, number >= len(entry.reads), rows, *_range(operand, program)))
    return found


def _range(operand: Operand, program: Program) -> tuple[int, int]:
    """Bytes an operand may touch: in the arena, or (as a made-up range) in a base of its own."""
    placement = program.plan.placements.get(operand.base)
    if placement is not None:
        return placement.offset, placement.offset + placement.nbytes
    return -1 - operand.base.index, -operand.base.index


def _overlaps(new: _Touch, old: _Touch) -> bool:
    """Do two entries touch the same bytes, one of them writing?"""
    _, written, _, begin, end = new
    _, was_written, _, other_begin, other_end = old
    return (written or was_written) and begin < other_end and other_begin < end


def _conflicts(new: _Touch, old: _Touch) -> bool:
    """Do they, other than each thread in rows of its own?"""
    if not _overlaps(new, old):
        return False
    operand, _, rows, begin, _ = new
    other, _, other_rows, other_begin, _ = old
    # Threads that share the same rows of the same bytes only touch their own work.
    same_bytes = begin == other_begin and operand.offset == other.offset == 0
    same_width = operand.size * operand.dtype.itemsize == other.size * other.dtype.itemsize
    return not (rows and rows == other_rows and same_bytes and same_width)
