"""plan_memory: lifetimes of values become offsets in one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlcompute.compiler.assign_offsets import Block, assign_offsets
from mlcompute.compiler.index import views_of
from mlcompute.ops.op import Shape, Step, Value

if TYPE_CHECKING:
    from mlcompute.compiler.context import Context
    from mlcompute.compiler.program import Program


#: Bytes of a value that is small.
_SMALL = 1 << 20
#: Bytes that a large product reads and writes.
LARGE_PRODUCT = 1 << 22
_PRODUCTS = (
    "matmul", "matmul_epilogue", "matmul_relu", "matmul_gelu", "matmul_relu_gradient", "matmul_gelu_gradient",
    "matmul_bias_gradient",
)  # fmt: skip


class Placement(NamedTuple):
    """Where an arena value lies and from which step to which it must stay."""

    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(eq=False)
class MemoryPlan:
    """Where every value of a program lies.

    placements  temporaries with memory of their own in the arena
    views       values that show another value's memory and need none -> the value that has it
    workspaces  step -> memory it needs only while it runs; placed like a value
    nbytes      size of the arena
    """

    placements: dict[Value, Placement] = field(default_factory=dict)
    views: dict[Value, Value] = field(default_factory=dict)
    workspaces: dict[Step, Value] = field(default_factory=dict)
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
        lingers=traits.lingers,
        products_linger=traits.products_linger,
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
    lingers: int = 0,
    products_linger: int = 0,
    views: dict[Value, Value] | None = None,
) -> MemoryPlan:
    """Assign arena offsets.

    keep        values that must stay readable after the last step
    rerunnable  phases may be run apart and again: what one phase hands to another stays to the end
    reuse       False gives every value memory of its own (for comparison in tests)
    guard       unused bytes after every value (tests watch them for stray writes)
    lingers     steps after its last use that the memory of a small value is not used again (`Traits.lingers`)
    products_linger   the same of memory that a large matmul uses last (`Traits.products_linger`)
    views       `views_of(steps)`, where that is known
    """
    plan = MemoryPlan(views=views_of(steps) if views is None else views)
    blocks, placed = _Lifetimes(steps, plan, guard, workspace, takes_over=reuse and not guard).found(keep, rerunnable)
    if lingers or products_linger:
        products = {index for index, step in enumerate(steps) if products_linger and _is_large_product(step)}
        for block in blocks:
            block.last += products_linger if block.last in products else lingers if block.nbytes <= _SMALL else 0
    assign_offsets(blocks, reuse)
    plan.placements = {
        value: Placement(block.offset, nbytes, first, last) for value, block, nbytes, first, last in placed
    }
    plan.nbytes = max((block.offset + block.nbytes for block in blocks), default=0)
    return plan


#: A value, the block it lies in, its bytes, its first and its last step.
_Placed = tuple[Value, Block, int, int, int]


class _Lifetimes:
    """One walk from the last step to the first: a value is needed from its making to what reads it last.

    takes_over   results of elementwise ops may lie where an input lay that nobody needs any more
    """

    def __init__(
        self,
        steps: list[Step],
        plan: MemoryPlan,
        guard: int,
        workspace: Callable[[Step], int] | None,
        *,
        takes_over: bool,
    ) -> None:
        self.steps, self.plan, self.guard, self.workspace = steps, plan, guard, workspace
        self.takes_over = takes_over
        self.last: dict[Value, int] = {}  # the last step that reads a value; views prolong what they show
        self.taken: dict[Value, Block] = {}  # value whose block goes on as another one's -> the block
        self.blocks: list[Block] = []
        self.placed: list[_Placed] = []
        self.sizes: dict[tuple[Shape, np.dtype[Any]], int] = {}  # bytes by type: large programs have few of them

    def found(self, keep: Iterable[Value], rerunnable: bool) -> tuple[list[Block], list[_Placed]]:
        """Blocks and values in the order of their making."""
        steps, views, last, workspace = self.steps, self.plan.views, self.last, self.workspace
        # Past the last step: never given back, never taken over.
        last.update({views.get(value, value): len(steps) for value in keep})
        if rerunnable:
            last.update(dict.fromkeys(_between_phases(steps, views), len(steps)))
        for index in range(len(steps) - 1, -1, -1):
            step = steps[index]
            results = step.results
            if results and results[0] in views:
                last.setdefault(views[results[0]], index)
                continue
            needed = workspace(step) if workspace is not None else 0
            if needed:
                buffer = self.plan.workspaces[step] = _workspace(step, index, needed)
                self.blocks.append(Block(needed + self.guard, index, index))
                self.placed.append((buffer, self.blocks[-1], needed, index, index))
            if results:
                self._place(step, index)
            for value in step.inputs:
                if value.kind == "temporary":
                    last.setdefault(views.get(value, value), index)
        if self.taken:  # memory of values that no step makes
            self.blocks += self.taken.values()
            self.blocks.sort(key=lambda block: -block.first)
        self.blocks.reverse()
        self.placed.reverse()
        return self.blocks, self.placed

    def _place(self, step: Step, index: int) -> None:
        """Blocks of a step's results; what reads them is known already."""
        last, taken = self.last, self.taken
        in_place = _in_place(step, last, self.plan.views) if self.takes_over and step.op.elementwise else {}
        for value in reversed(step.results):
            if value.kind != "temporary":
                continue
            end = last.get(value, index)
            nbytes = self.sizes.get((value.shape, value.dtype))
            if nbytes is None:
                nbytes = self.sizes[value.shape, value.dtype] = value.nbytes
            block = taken.pop(value, None) if taken else None
            if block is None:
                block = Block(nbytes + self.guard, index, end)
            else:
                block.first = index
            if value in in_place:
                taken[in_place[value]] = block  # as many bytes as the result has
            else:
                self.blocks.append(block)
            self.placed.append((value, block, nbytes, index, end))


def _is_large_product(step: Step) -> bool:
    is_product = step.op.name in _PRODUCTS
    return is_product and sum(value.nbytes for value in (*step.inputs, *step.results)) >= LARGE_PRODUCT


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


def _in_place(step: Step, last: Mapping[Value, int], views: dict[Value, Value]) -> dict[Value, Value]:
    """Results -> inputs that nobody reads later and whose memory they may take over, element by element."""
    taken: dict[Value, Value] = {}
    free = [v for v in step.inputs if v not in last and v.kind == "temporary" and v not in views]
    if not free:
        return taken
    free = list(dict.fromkeys(free))
    if not views.keys().isdisjoint(step.inputs):
        # What is read through a view too is read where elements do not line up.
        viewed = {views[value] for value in step.inputs if value in views}
        free = [value for value in free if value not in viewed]
    for result in step.results:
        if not free:
            break
        for value in free:
            if value.shape == result.shape and value.dtype.itemsize == result.dtype.itemsize and result.size:
                taken[result] = value
                free.remove(value)
                break
    return taken
