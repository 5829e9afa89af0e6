"""assign_offsets: blocks of memory with a first and a last step become offsets in a small arena."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from operator import attrgetter

#: Arena offsets are multiples of a cache line, so that vector loads never straddle two for no reason.
ALIGNMENT = 64
#: The second, slower way is tried only for so many blocks, and only where the first wastes more than this share.
MOST_SORTED_BLOCKS = 1000
WASTE = 0.02


@dataclass(slots=True)
class Placement:
    """Where memory lies in the arena, and from which step to which it must stay."""

    offset: int
    nbytes: int
    first: int
    last: int


def assign_offsets(blocks: list[Placement], reuse: bool = True, guard: int = 0) -> None:
    """Set the offsets of all blocks, which come in the order of their first steps.

    guard   bytes that stay free after each of them
    """
    different = {block.nbytes for block in blocks}
    sizes = {nbytes: -(-(nbytes + guard) // ALIGNMENT) * ALIGNMENT or ALIGNMENT for nbytes in different}
    if not reuse:
        end = 0
        for block in blocks:
            block.offset, end = end, end + sizes[block.nbytes]
        return
    end, busiest = _in_order(blocks, sizes)
    if end <= busiest * (1 + WASTE) or len(blocks) > MOST_SORTED_BLOCKS:
        return
    offsets = [block.offset for block in blocks]
    if _by_size(blocks, sizes) > end:
        for block, offset in zip(blocks, offsets, strict=True):
            block.offset = offset


def _in_order(blocks: list[Placement], sizes: dict[int, int]) -> tuple[int, int]:
    """Step by step, each block into the smallest gap that holds it. Gives the arena's size and the most in use."""
    free = _FreeList()
    take, give_back = free.take, free.give_back
    ending = iter(sorted(blocks, key=attrgetter("last")))  # those that end together, in the order they begin
    used = busiest = 0
    gone = next(ending, None)
    for block in blocks:
        while gone is not None and gone.last < block.first:  # it has begun: no block ends before it begins
            size = sizes[gone.nbytes]
            give_back(gone.offset, size)
            used -= size
            gone = next(ending, None)
        size = sizes[block.nbytes]
        block.offset = take(size)
        used += size
        if used > busiest:
            busiest = used
    return free.end, busiest


def _by_size(blocks: list[Placement], sizes: dict[int, int]) -> int:
    """The largest first, each into the lowest gap that is free all the time it is needed. Gives the arena's size."""
    placed: list[Placement] = []
    end = 0
    for block in sorted(blocks, key=lambda block: -sizes[block.nbytes]):
        offset, size = 0, sizes[block.nbytes]
        for other in placed:  # in the order of their offsets
            if other.first <= block.last and block.first <= other.last:
                if other.offset >= offset + size:
                    break
                offset = max(offset, other.offset + sizes[other.nbytes])
        block.offset = offset
        bisect.insort(placed, block, key=lambda block: block.offset)
        end = max(end, offset + size)
    return end


class _FreeList:
    """Gaps in the arena: best fit, neighbours merged. Every operation is logarithmic in the number of gaps."""

    def __init__(self) -> None:
        self.end = 0
        #: Where gaps begin -> where they end, and back.
        self._stops: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        by_size = self._by_size
        position = bisect.bisect_left(by_size, (size, -1))
        if position < len(by_size):
            gap, start = by_size.pop(position)
            stop = self._stops.pop(start)
            if gap > size:
                self._stops[start + size], self._starts[stop] = stop, start + size
                bisect.insort(by_size, (gap - size, start + size))
            else:
                del self._starts[stop]
        elif self.end in self._starts:
            start = self._starts.pop(self.end)
            self._remove(start, self._stops.pop(start))
            self.end = start + size
        else:
            start = self.end
            self.end += size
        return start

    def give_back(self, start: int, size: int) -> None:
        stop = start + size
        if stop in self._stops:
            after = self._stops.pop(stop)
            self._remove(stop, after)
            stop = after
        if start in self._starts:
            before = self._starts.pop(start)
            self._remove(before, start)
            start = before
        self._stops[start], self._starts[stop] = stop, start
        bisect.insort(self._by_size, (stop - start, start))

    def _remove(self, start: int, stop: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (stop - start, start))]
