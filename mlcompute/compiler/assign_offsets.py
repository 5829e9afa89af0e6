"""assign_offsets: blocks of memory with a first and a last step become offsets in a small arena."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from operator import attrgetter

#: Arena offsets are multiples of a cache line, so that vector loads never straddle two for no reason.
ALIGNMENT = 64
#: By size, which is slower, is tried only for so many blocks. An arena is small enough that is larger by this share
#: than what is in use at a time.
MOST_SORTED_BLOCKS = 1000
WASTE = 0.02
#: Bytes from which on it matters who has written a block before, and of how many such blocks and gaps that is known.
_LARGE, _REMEMBERED = 1 << 16, 32


@dataclass(slots=True)
class Placement:
    """Where memory lies in the arena, and from which step to which it must stay."""

    offset: int
    nbytes: int
    first: int
    last: int


def assign_offsets(blocks: list[Placement], reuse: bool = True, guard: int = 0, owns_rows: bool = False) -> None:
    """Set the offsets of all blocks, which come in the order of their first steps.

    guard       bytes that stay free after each of them
    owns_rows   of arenas about as small, take one in which large blocks lie where blocks of the same size lay. Threads
                that share a block by its rows then find what they write in their own caches; elsewhere it comes from
                another's: seen to take a sixth of a step where cores are far from each other
    """
    different = {block.nbytes for block in blocks}
    sizes = {nbytes: -(-(nbytes + guard) // ALIGNMENT) * ALIGNMENT or ALIGNMENT for nbytes in different}
    if not reuse:
        end = 0
        for block in blocks:
            block.offset, end = end, end + sizes[block.nbytes]
        return
    busiest = _most_in_use(blocks, sizes)
    found: list[tuple[int, bool, list[int]]] = []
    for way in (_in_order, _by_size) if len(blocks) <= MOST_SORTED_BLOCKS else (_in_order,):
        for again in (True, False) if owns_rows and max(different, default=0) >= _LARGE else (False,):
            end = way(blocks, sizes, again)
            if end <= busiest * (1 + WASTE) and not found:
                return
            found.append((end, again, [block.offset for block in blocks]))
        if found[-1][0] <= busiest * (1 + WASTE):
            break
    least = min(end for end, _, _ in found)
    offsets = next(offsets for end, again, offsets in found if end <= least * (1 + WASTE * again))
    for block, offset in zip(blocks, offsets, strict=True):
        block.offset = offset


def _most_in_use(blocks: list[Placement], sizes: dict[int, int]) -> int:
    """Bytes that are in use at a time, at the most: no arena is smaller."""
    used = busiest = 0
    ending = iter(sorted(blocks, key=attrgetter("last")))
    gone = next(ending, None)
    for block in blocks:
        while gone is not None and gone.last < block.first:  # it has begun: no block ends before it begins
            used -= sizes[gone.nbytes]
            gone = next(ending, None)
        used += sizes[block.nbytes]
        busiest = max(busiest, used)
    return busiest


def _in_order(blocks: list[Placement], sizes: dict[int, int], again: bool) -> int:
    """Step by step, each block into the smallest gap that holds it. Gives the arena's size.

    again   large ones where one of their size lay, if they can: the one that was given back last
    """
    free = _FreeList()
    take, give_back = free.take, free.give_back
    before: dict[int, list[int]] = {}
    ending = iter(sorted(blocks, key=attrgetter("last")))  # those that end together, in the order they begin
    gone = next(ending, None)
    for block in blocks:
        while gone is not None and gone.last < block.first:
            size = sizes[gone.nbytes]
            give_back(gone.offset, size)
            if again and size >= _LARGE:
                before.setdefault(size, []).append(gone.offset)
            gone = next(ending, None)
        size = sizes[block.nbytes]
        found = free.take_again(size, before[size]) if size in before else None
        block.offset = take(size) if found is None else found
    return free.end


def _by_size(blocks: list[Placement], sizes: dict[int, int], again: bool) -> int:
    """The largest first, each into the lowest gap that is free all the time it is needed. Gives the arena's size.

    again   large ones where one of their size lies at other times, if they can
    """
    placed: list[Placement] = []
    before: dict[int, list[int]] = {}
    end = 0
    for block in sorted(blocks, key=lambda block: -sizes[block.nbytes]):
        offset, size = 0, sizes[block.nbytes]
        alive = [other for other in placed if other.first <= block.last and block.first <= other.last]
        for other in alive:  # in the order of their offsets
            if other.offset >= offset + size:
                break
            offset = max(offset, other.offset + sizes[other.nbytes])
        for place in before.get(size, ()) if again and size >= _LARGE else ():
            if all(place >= other.offset + sizes[other.nbytes] or other.offset >= place + size for other in alive):
                offset = place
                break
        block.offset = offset
        bisect.insort(placed, block, key=lambda block: block.offset)
        known = before.setdefault(size, [])
        if offset not in known and len(known) < _REMEMBERED:
            known.append(offset)
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

    def take_again(self, size: int, offsets: list[int]) -> int | None:
        """One of the offsets where there is a gap now: the last of these, which is taken off the list."""
        by_size = self._by_size
        first = bisect.bisect_left(by_size, (size, -1))
        gaps = by_size[first : first + _REMEMBERED]
        for place in range(len(offsets) - 1, max(-1, len(offsets) - 1 - _REMEMBERED), -1):
            offset = offsets[place]
            for gap, start in gaps:
                stop = start + gap
                if start <= offset and offset + size <= stop:
                    del offsets[place]
                    self._remove(start, stop)
                    del self._stops[start], self._starts[stop]
                    for left, right in ((start, offset), (offset + size, stop)):
                        if left < right:
                            self._stops[left], self._starts[right] = right, left
                            bisect.insort(by_size, (right - left, left))
                    return offset
        return None

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
