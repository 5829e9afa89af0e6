"""assign_offsets: blocks of memory with a first and a last step become offsets in a small arena."""

from __future__ import annotations

import bisect

#: Arena offsets are multiples of a cache line, so that vector loads never straddle two for no reason.
ALIGNMENT = 64
#: The second, slower way is tried only for so many blocks, and only where the first wastes more than this share.
MOST_SORTED_BLOCKS = 1000
WASTE = 0.02


class Block:
    """Memory that is needed from one step to another; a value, or several that take it over from each other."""

    __slots__ = ("first", "last", "nbytes", "offset", "size")

    def __init__(self, nbytes: int, first: int, last: int) -> None:
        self.nbytes = nbytes
        self.size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        self.first = first
        self.last = last
        self.offset = 0


def assign_offsets(blocks: list[Block], reuse: bool = True) -> None:
    """Set the offsets of all blocks, which come in the order of their first steps."""
    if not reuse:
        end = 0
        for block in blocks:
            block.offset, end = end, end + block.size
        return
    end, busiest = _in_order(blocks)
    if end <= busiest * (1 + WASTE) or len(blocks) > MOST_SORTED_BLOCKS:
        return
    offsets = [block.offset for block in blocks]
    if _by_size(blocks) > end:
        for block, offset in zip(blocks, offsets, strict=True):
            block.offset = offset


def _in_order(blocks: list[Block]) -> tuple[int, int]:
    """Step by step, each block into the smallest gap that holds it. Gives the arena's size and the most in use."""
    free = _FreeList()
    ending: dict[int, list[Block]] = {}  # by the last step
    used = busiest = now = 0
    for block in blocks:
        first, last, size = block.first, block.last, block.size
        while now < first:
            for gone in ending.pop(now, ()):
                free.give_back(gone.offset, gone.size)
                used -= gone.size
            now += 1
        block.offset = free.take(size)
        if last in ending:
            ending[last].append(block)
        else:
            ending[last] = [block]
        used += size
        if used > busiest:
            busiest = used
    return free.end, busiest


def _by_size(blocks: list[Block]) -> int:
    """The largest first, each into the lowest gap that is free all the time it is needed. Gives the arena's size."""
    placed: list[Block] = []
    end = 0
    for block in sorted(blocks, key=lambda block: -block.size):
        offset = 0
        for other in placed:  # in the order of their offsets
            if other.first <= block.last and block.first <= other.last:
                if other.offset >= offset + block.size:
                    break
                offset = max(offset, other.offset + other.size)
        block.offset = offset
        bisect.insort(placed, block, key=lambda block: block.offset)
        end = max(end, offset + block.size)
    return end


class _FreeList:
    """Gaps in the arena: best fit, neighbours merged. Every operation is logarithmic in the number of gaps."""

    def __init__(self) -> None:
        self.end = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        position = bisect.bisect_left(self._by_size, (size, -1))
        if position < len(self._by_size):
            gap, start = self._by_size.pop(position)
            position = bisect.bisect_left(self._starts, start)
            del self._starts[position], self._sizes[start]
            if gap > size:
                self._insert(position, start + size, gap - size)
        elif self._starts and self._starts[-1] + self._sizes[self._starts[-1]] == self.end:
            start, _ = self._remove(-1)
            self.end = start + size
        else:
            start = self.end
            self.end += size
        return start

    def give_back(self, start: int, size: int) -> None:
        starts = self._starts
        position = bisect.bisect_left(starts, start)
        if position < len(starts) and starts[position] == start + size:
            size += self._remove(position)[1]
        if position > 0 and starts[position - 1] + self._sizes[starts[position - 1]] == start:
            position -= 1
            start, before = self._remove(position)
            size += before
        self._insert(position, start, size)

    def _insert(self, position: int, start: int, size: int) -> None:
        self._starts.insert(position, start)
        self._sizes[start] = size
        bisect.insort(self._by_size, (size, start))

    def _remove(self, position: int) -> tuple[int, int]:
        start = self._starts.pop(position)
        size = self._sizes.pop(start)
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        return start, size
