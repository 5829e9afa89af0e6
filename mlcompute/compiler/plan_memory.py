"""plan_memory: lifetimes of values become offsets in one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlcompute.compiler.assign_offsets import Block, assign_offsets
from mlcompute.compiler.index import views_of
from mlcompute.ops.op import Step, Value

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
    last = _lifetimes(steps, plan, frozenset(keep), rerunnable)
    blocks: list[Block] = []
    placed: dict[Value, tuple[Block, int, int, int]] = {}  # block, bytes, first and last step
    takes_over, views = reuse and not guard, plan.views
    for index, step in enumerate(steps):
        op, results = step.op, step.results
        if op.is_view and results[0] in views:
            continue
        taken_over = _in_place(step, index, last, views) if takes_over and op.elementwise and results else None
        for value in results:
            end = last.get(value, -1)
            if end < 0:
                continue
            if taken_over and value in taken_over:
                block, nbytes, first, _ = placed[taken_over[value]]  # as many bytes as the result has
                block.last = end
                placed[taken_over[value]] = (block, nbytes, first, index)
            else:
                nbytes = value.nbytes
                block = Block(nbytes + guard, index, end)
                blocks.append(block)
            placed[value] = (block, nbytes, index, end)
        needed = workspace(step) if workspace is not None else 0
        if needed:
            buffer = plan.workspaces[step] = _workspace(step, index, needed)
            blocks.append(Block(needed + guard, index, index))
            placed[buffer] = (blocks[-1], needed, index, index)
    if lingers or products_linger:
        products = {index for index, step in enumerate(steps) if products_linger and _is_large_product(step)}
        for block in blocks:
            block.last += products_linger if block.last in products else lingers if block.nbytes <= _SMALL else 0
    assign_offsets(blocks, reuse)
    plan.placements = {
        value: Placement(block.offset, nbytes, first, end) for value, (block, nbytes, first, end) in placed.items()
    }
    plan.nbytes = max((block.offset + block.nbytes for block in blocks), default=0)
    return plan


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


def _lifetimes(steps: list[Step], plan: MemoryPlan, keep: AbstractSet[Value], rerunnable: bool) -> dict[Value, int]:
    """The last step at which each arena value must exist; views prolong what they show."""
    last: dict[Value, int] = {}
    phase: dict[Value, str] = {}
    stays: list[Value] = []
    views = plan.views
    end = len(steps)  # past the last step: never given back, never taken over
    for index, step in enumerate(steps):
        for value in step.inputs:
            if value.kind == "temporary":
                base = views.get(value, value)
                if base in last:
                    last[base] = index
                    if rerunnable and phase[base] != step.phase:
                        stays.append(base)
        for value in step.results:
            if value.kind == "temporary" and value not in views:
                last[value] = index
                if rerunnable:
                    phase[value] = step.phase
    last.update(dict.fromkeys(stays, end))
    for value in keep:
        base = views.get(value, value)
        if base in last:
            last[base] = end
    return last


def _in_place(step: Step, index: int, last: dict[Value, int], views: dict[Value, Value]) -> dict[Value, Value]:
    """Results -> inputs that die here and whose memory they may take over, element by element."""
    taken: dict[Value, Value] = {}
    free = [value for value in step.inputs if last.get(value) == index]
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
