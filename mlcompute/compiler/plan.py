"""plan: lifetimes of values become offsets in one arena. A pure function of the steps."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlcompute.ops.op import Step, Value

if TYPE_CHECKING:
    from mlcompute.compiler.program import Program

#: Arena offsets are multiples of a cache line, so that vector loads never straddle two for no reason.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an arena value lies and from which step to which it must stay."""

    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(eq=False)
class MemoryPlan:
    """Where every value of a program lies.

    placements  temporaries with memory of their own in the arena
    views       values that show another value's memory and need none
    nbytes      size of the arena
    """

    placements: dict[Value, Placement] = field(default_factory=dict)
    views: dict[Value, Value] = field(default_factory=dict)
    nbytes: int = 0

    def base(self, value: Value) -> Value:
        """The value whose memory a value shows; itself when it has its own."""
        while value in self.views:
            value = self.views[value]
        return value

    def __str__(self) -> str:
        lines = [f"arena of {self.nbytes} bytes, {len(self.placements)} values"]
        for value, place in sorted(self.placements.items(), key=lambda item: (item[1].offset, item[1].first)):
            lines.append(
                f"  @{place.offset:<10} {place.nbytes:>10} bytes   steps {place.first}-{place.last}   {value!r}"
            )
        return "\n".join(lines)


def plan_memory(
    steps: list[Step], keep: Iterable[Value] = (), *, rerunnable: bool = False, reuse: bool = True, guard: int = 0
) -> MemoryPlan:
    """Assign arena offsets.

    keep        values that must stay readable after the last step
    rerunnable  phases may be run apart and again: what one phase hands to another stays to the end
    reuse       False gives every value memory of its own (for comparison in tests)
    guard       unused bytes after every value (tests watch them for stray writes)
    """
    plan = MemoryPlan(views=_views(steps))
    first, last = _lifetimes(steps, plan, frozenset(keep), rerunnable)
    dying: dict[int, list[Value]] = {}
    for value, end in last.items():
        dying.setdefault(end, []).append(value)
    free = _FreeList()
    for index, step in enumerate(steps):
        taken_over = _in_place(step, index, plan, first, last) if reuse and not guard else None
        for value in step.results:
            if value not in first or value in plan.placements:
                continue
            if taken_over is not None:
                place = plan.placements[taken_over]
                plan.placements[taken_over] = Placement(place.offset, place.nbytes, place.first, index)
                plan.placements[value] = Placement(place.offset, value.nbytes, index, last[value])
                free.transfer(taken_over, value)
                taken_over = None
                continue
            offset = free.take(value, value.nbytes + guard)
            plan.placements[value] = Placement(offset, value.nbytes, index, last[value])
        if reuse:
            for value in dying.get(index, ()):
                free.give_back(value)
    plan.nbytes = max((place.offset + place.nbytes + guard for place in plan.placements.values()), default=0)
    return plan


def plan_like(like: Program | None, program: Program) -> MemoryPlan | None:
    """The plan of the same program for a larger batch, with this program's sizes; None when their steps differ.

    Whatever fits for more samples fits for fewer, so a smaller batch needs no memory of its own.
    """
    if like is None or len(like.steps) != len(program.steps):
        return None
    plan = MemoryPlan(views=_views(program.steps), nbytes=like.plan.nbytes)
    same: dict[Value, Value] = {}
    for old, new in zip(like.steps, program.steps, strict=True):
        if old.op is not new.op or len(old.results) != len(new.results):
            return None
        if any(a.kind != b.kind or same.get(a, b) is not b for a, b in zip(old.inputs, new.inputs, strict=True)):
            return None
        for large, small in zip(old.results, new.results, strict=True):
            same[large] = small
            place = like.plan.placements.get(large)
            if (place is None) != (small in plan.views) or small.nbytes > large.nbytes:
                return None
            if place is not None:
                plan.placements[small] = Placement(place.offset, small.nbytes, place.first, place.last)
    return plan


def _views(steps: list[Step]) -> dict[Value, Value]:
    """Results of view ops that need no memory: all but reshapes of values that do not lie in row-major order."""
    views: dict[Value, Value] = {}
    scattered: set[Value] = set()
    for step in steps:
        if not step.op.is_view:
            continue
        source, result = step.inputs[0], step.results[0]
        if step.op.name == "reshape":
            if source in scattered:
                continue
        elif source in scattered or step.op.name != "slice" or not _is_leading(step):
            scattered.add(result)
        views[result] = source
    return views


def _is_leading(step: Step) -> bool:
    """Does a slice keep the whole of every axis but the first, without gaps?"""
    a, shape = step.attributes, step.inputs[0].shape
    return all(k == 1 for k in a["stride"]) and all(
        s == 0 and e == extent for s, e, extent in zip(a["start"][1:], a["end"][1:], shape[1:], strict=True)
    )


def _lifetimes(
    steps: list[Step], plan: MemoryPlan, keep: AbstractSet[Value], rerunnable: bool
) -> tuple[dict[Value, int], dict[Value, int]]:
    """First and last step at which each arena value must exist; views prolong what they show."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    phase: dict[Value, str] = {}
    end = len(steps)  # past the last step: never given back, never taken over
    for index, step in enumerate(steps):
        for value in step.inputs:
            base = plan.base(value)
            if base in first:
                crosses = rerunnable and phase[base] != step.phase
                last[base] = end if crosses else max(last[base], index)
        for value in step.results:
            if value not in plan.views:
                first[value] = last[value] = index
                phase[value] = step.phase
    for value in keep:
        base = plan.base(value)
        if base in first:
            last[base] = end
    return first, last


def _in_place(
    step: Step, index: int, plan: MemoryPlan, first: dict[Value, int], last: dict[Value, int]
) -> Value | None:
    """An input that dies here and whose memory the result may take over, element by element."""
    if not step.op.elementwise or len(step.results) != 1:
        return None
    result = step.results[0]
    if result.nbytes == 0:
        return None
    for value in step.inputs:
        # Seen through another view of the same memory, elements would not line up.
        shared = sum(plan.base(other) is value for other in step.inputs)
        fits = value.shape == result.shape and value.nbytes == result.nbytes
        if fits and value in first and value not in plan.views and last[value] == index and shared == 1:
            return value
    return None


class _FreeList:
    """Gaps in the arena: best fit, neighbours merged. Every operation is logarithmic in the number of gaps."""

    def __init__(self) -> None:
        self.end = 0
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []
        self.held: dict[Value, tuple[int, int]] = {}

    def take(self, value: Value, nbytes: int) -> int:
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        position = bisect.bisect_left(self.by_size, (size, -1))
        if position < len(self.by_size):
            gap, start = self.by_size[position]
            self._remove(start)
            if gap > size:
                self._insert(start + size, gap - size)
        elif self.starts and self.starts[-1] + self.sizes[self.starts[-1]] == self.end:
            start = self.starts[-1]
            self._remove(start)
            self.end = start + size
        else:
            start = self.end
            self.end += size
        self.held[value] = (start, size)
        return start

    def transfer(self, value: Value, to: Value) -> None:
        self.held[to] = self.held.pop(value)

    def give_back(self, value: Value) -> None:
        if value not in self.held:
            return
        start, size = self.held.pop(value)
        position = bisect.bisect_left(self.starts, start)
        if position < len(self.starts) and self.starts[position] == start + size:
            after = self.starts[position]
            size += self.sizes[after]
            self._remove(after)
        if position > 0 and self.starts[position - 1] + self.sizes[self.starts[position - 1]] == start:
            before = self.starts[position - 1]
            size += self.sizes[before]
            self._remove(before)
            start = before
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self.starts, start)
        self.sizes[start] = size
        bisect.insort(self.by_size, (size, start))

    def _remove(self, start: int) -> None:
        size = self.sizes.pop(start)
        self.starts.pop(bisect.bisect_left(self.starts, start))
        self.by_size.pop(bisect.bisect_left(self.by_size, (size, start)))
