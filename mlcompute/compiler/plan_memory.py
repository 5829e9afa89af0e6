"""plan_memory: lifetimes of values become offsets in one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler.assign_offsets import Placement, assign_offsets
from mlcompute.compiler.index import views_of
from mlcompute.ops.op import Kind, Step, Value

if TYPE_CHECKING:
    from mlcompute.compiler.context import Context
    from mlcompute.compiler.program import Program


#: Bytes of a value that is small.
_SMALL = 1 << 20
#: Bytes that a large matmul reads and writes.
LARGE_MATMUL = 1 << 22
_MATMULS = (
    "matmul", "matmul_epilogue", "matmul_relu", "matmul_gelu", "matmul_relu_gradient", "matmul_gelu_gradient",
    "matmul_bias_gradient",
)  # fmt: skip


@dataclass(eq=False)
class MemoryPlan:
    """Where every value of a program lies.

    placements  temporaries with memory of their own in the arena
    views       values that show another value's memory and need none -> the value that has it
    workspaces  step -> memory it needs only while it runs; placed like a value
    constants   those that are read
    nbytes      size of the arena
    """

    placements: dict[Value, Placement] = field(default_factory=dict)
    views: dict[Value, Value] = field(default_factory=dict)
    workspaces: dict[Step, Value] = field(default_factory=dict)
    constants: set[Value] = field(default_factory=set)
    nbytes: int = 0

    def base(self, value: Value) -> Value:
        """The value whose memory a value shows; itself when it has its own."""
        return self.views.get(value, value)

    def __str__(self) -> str:
        lines = [f"arena of {self.nbytes} bytes, {len(self.placements)} values"]
        for value, place in sorted(self.placements.items(), key=lambda item: (item[1].offset, item[1].first)):
            lines.append(
                f"  @{place.offset:<10} {place.nbytes:>10} bytes   steps {place.first}-{place.last}   {value!r}"
            )
        return "\n".join(lines)


def plan_memory(steps: list[Step], context: Context) -> list[Step]:
    """Where every value lies; a smaller batch lies where the full one does."""
    program, workspace, traits = context.program, context.engine.workspace, context.engine.traits
    program.steps, program.kept = steps, set(context.kept)
    program.plan = plan_like(context.like, program, workspace) or planned(
        steps,
        context.kept,
        rerunnable=program.runs_in_phases,
        workspace=workspace,
        reuse_delay=traits.reuse_delay,
        matmul_reuse_delay=traits.matmul_reuse_delay,
        owns_rows=traits.owns_rows,
        views=context.index(steps).views,
    )
    return steps


def planned(
    steps: list[Step],
    keep: Iterable[Value] = (),
    *,
    rerunnable: bool = False,
    reuse: bool = True,
    guard: int = 0,
    workspace: Callable[[Step], int] | None = None,
    reuse_delay: int = 0,
    matmul_reuse_delay: int = 0,
    owns_rows: bool = False,
    views: dict[Value, Value] | None = None,
) -> MemoryPlan:
    """Assign arena offsets.

    keep        values that must stay readable after the last step
    rerunnable  phases may be run apart and again: what one phase hands to another stays to the end
    reuse       False gives every value memory of its own (for comparison in tests)
    guard       unused bytes after every value (tests watch them for stray writes)
    reuse_delay   steps after its last use that the memory of a small value is not used again (`Traits.reuse_delay`)
    matmul_reuse_delay   the same of memory that a large matmul uses last (`Traits.matmul_reuse_delay`)
    owns_rows   large values lie where values of their size lay, if they can (`Traits.owns_rows`)
    views       `views_of(steps)`, where that is known
    """
    plan = MemoryPlan(views=views_of(steps) if views is None else views)
    lifetimes = _Lifetimes(steps, plan, workspace, takes_over=reuse and not guard, owns_rows=owns_rows)
    blocks = lifetimes.found(keep, rerunnable)
    ends = [block.last for block in blocks]
    if reuse_delay or matmul_reuse_delay:
        matmuls = {index for index, step in enumerate(steps) if matmul_reuse_delay and _is_large_matmul(step)}
        for block in blocks:
            block.last += matmul_reuse_delay if block.last in matmuls else reuse_delay if block.nbytes <= _SMALL else 0
    assign_offsets(blocks, reuse, guard, owns_rows)
    for block, end in zip(blocks, ends, strict=True):
        block.last = end
    lifetimes.place()
    plan.nbytes = max((block.offset + block.nbytes + guard for block in blocks), default=0)
    return plan


class _Lifetimes:
    """One loop from the last step to the first: a value is needed from its producer to its last reader.

    takes_over   results of elementwise ops may lie where an input lay that nobody needs any more
    owns_rows    of several such inputs, the one that was made last: whoever made its rows has them in its cache, while
                 an older one, as an activation is for the gradient, has mostly been read by others, too
    """

    def __init__(
        self,
        steps: list[Step],
        plan: MemoryPlan,
        workspace: Callable[[Step], int] | None,
        *,
        takes_over: bool,
        owns_rows: bool,
    ) -> None:
        self.steps, self.plan, self.workspace = steps, plan, workspace
        self.takes_over, self.owns_rows = takes_over, owns_rows
        self.values: list[Value] = []  # what needs memory, from the last to the first, and where it will lie
        self.places: list[Placement] = []
        #: Where values lie that take over memory from each other, and the block of memory that is.
        self.parts: list[tuple[Placement, Placement]] = []

    def found(self, keep: Iterable[Value], rerunnable: bool) -> list[Placement]:
        """Blocks of memory, a value's or that of several, in the order of their first steps."""
        steps, views, constants, workspace = self.steps, self.plan.views, self.plan.constants, self.workspace
        values, places, parts = self.values, self.places, self.parts
        blocks: list[Placement] = []
        workspaces: dict[Kind, int] = {}
        taken: dict[Value, Placement] = {}  # value whose memory goes on as another one's -> the block
        # The last step that reads a value; views prolong what they show. Behind all steps: it is never given back.
        last = {views.get(value, value): len(steps) for value in keep}
        if rerunnable:
            last.update(dict.fromkeys(_between_phases(steps, views), len(steps)))
        for index in range(len(steps) - 1, -1, -1):
            step = steps[index]
            op, results = step.op, step.results
            if op.is_view and results[0] in views:
                base = views[results[0]]
                last.setdefault(base, index)
                if base.kind == "constant":
                    constants.add(base)
                continue
            kind = step.kind
            needed = workspaces.get(kind) if kind is not None else None
            if needed is None:
                needed = workspace(step) if workspace is not None else 0
                if kind is not None:
                    workspaces[kind] = needed
            if needed:
                values.append(self.plan.workspaces.setdefault(step, _workspace(step, index, needed)))
                places.append(Placement(0, needed, index, index))
                blocks.append(places[-1])
            # What reads the results is known already.
            can_be_in_place = op.elementwise and results and self.takes_over
            in_place = _in_place(step, last, views, self.owns_rows) if can_be_in_place else None
            for value in results if len(results) == 1 else reversed(results):
                if value.kind != "temporary":
                    continue
                place = block = Placement(0, prod(value.shape) * value.dtype.itemsize, index, last.get(value, index))
                values.append(value)
                places.append(place)
                if taken and value in taken:
                    block = taken.pop(value)
                    block.first = index
                    parts.append((place, block))
                if in_place and value in in_place:
                    if block is place:
                        block = Placement(0, place.nbytes, index, place.last)
                        parts.append((place, block))
                    taken[in_place[value]] = block  # as many bytes as the result has
                else:
                    blocks.append(block)
            for value in step.inputs:
                if value.kind == "temporary":
                    if value in views:
                        value = views[value]
                    if value not in last:
                        last[value] = index
                elif value.kind == "constant":
                    constants.add(value)
        if taken:  # memory of values that no step makes
            blocks += taken.values()
            blocks.sort(key=lambda block: -block.first)
        blocks.reverse()
        return blocks

    def place(self) -> None:
        """Tell the plan where values lie, in the order of their making, once blocks have their offsets."""
        for place, block in self.parts:
            place.offset = block.offset
        self.plan.placements = dict(zip(reversed(self.values), reversed(self.places), strict=True))


def _is_large_matmul(step: Step) -> bool:
    is_matmul = step.op.name in _MATMULS
    return is_matmul and sum(value.nbytes for value in (*step.inputs, *step.results)) >= LARGE_MATMUL


def _workspace(step: Step, index: int, nbytes: int) -> Value:
    return Value(step.inputs[0].trace, -1 - index, (nbytes,), np.dtype(np.uint8), "temporary", "workspace")


def plan_like(
    like: Program | None, program: Program, workspace: Callable[[Step], int] | None = None
) -> MemoryPlan | None:
    """The plan of the same program for a larger batch, with this program's sizes; None when their steps differ.

    Whatever fits for more samples fits for fewer, so a smaller batch needs no memory of its own.
    """
    if like is None or len(like.steps) != len(program.steps):
        return None
    plan = MemoryPlan(views=views_of(program.steps), nbytes=like.plan.nbytes)
    same: dict[Value, Value] = {}
    for index, (old, new) in enumerate(zip(like.steps, program.steps, strict=True)):
        if (old.op, old.phase) != (new.op, new.phase):
            return None
        if len(old.inputs) != len(new.inputs) or len(old.results) != len(new.results):
            return None
        plan.constants.update([value for value in new.inputs if value.kind == "constant"])
        for large, small in zip(old.inputs, new.inputs, strict=True):
            if large.kind != small.kind or same.setdefault(large, small) is not small:
                return None
            # Memory is taken over in place where shapes agree; they may not when only one of them has a batch axis.
            place = like.plan.placements.get(large)
            if place is not None and place.last == index and old.op.elementwise:
                for before, result in zip(old.results, new.results, strict=True):
                    after = like.plan.placements.get(before)
                    if after is not None and after.offset == place.offset and small.shape != result.shape:
                        return None
        needed = workspace(new) if workspace is not None else 0
        if needed:
            buffer = like.plan.workspaces.get(old)
            if buffer is None or buffer.nbytes < needed:
                return None
            place = like.plan.placements[buffer]
            plan.workspaces[new] = _workspace(new, place.first, needed)
            plan.placements[plan.workspaces[new]] = Placement(place.offset, needed, place.first, place.last)
        for large, small in zip(old.results, new.results, strict=True):
            same[large] = small
            place = like.plan.placements.get(large)
            if (place is None) != (small in plan.views) or small.nbytes > large.nbytes:
                return None
            if place is not None:
                plan.placements[small] = Placement(place.offset, small.nbytes, place.first, place.last)
            elif same.get(like.plan.base(large), plan.base(small)) is not plan.base(small):
                return None
    stays = {plan.base(same[value]) for value in like.kept if value in same}
    return plan if all(plan.base(value) in stays for value in program.kept if value.kind == "temporary") else None


def _between_phases(steps: list[Step], views: dict[Value, Value]) -> list[Value]:
    """What one phase hands to another."""
    phases: dict[Value, str] = {}
    found: list[Value] = []
    for step in steps:
        for value in step.inputs:
            base = views.get(value, value)
            if phases.get(base, step.phase) != step.phase:
                found.append(base)
        for value in step.results:
            if value.kind == "temporary" and value not in views:
                phases[value] = step.phase
    return found


def _in_place(step: Step, last: Mapping[Value, int], views: dict[Value, Value], youngest: bool) -> dict[Value, Value]:
    """Results -> inputs that nobody reads later and whose memory they may take over, element by element.

    youngest   the one made last comes first, else they come as the step has them
    """
    taken: dict[Value, Value] = {}
    free: list[Value] = []
    viewed: list[Value] = []  # what is read through a view, too, is read where elements do not line up
    for value in step.inputs:
        if value in views:
            viewed.append(views[value])
        elif value not in last and value.kind == "temporary" and value not in free:
            free.append(value)
    if not free:
        return taken
    if youngest:
        free.sort(key=lambda value: -value.index)
    for result in step.results:
        for value in free:
            lines_up = value.shape == result.shape and value.dtype.itemsize == result.dtype.itemsize
            if lines_up and value not in viewed and result.size:
                taken[result] = value
                free.remove(value)
                break
    return taken
