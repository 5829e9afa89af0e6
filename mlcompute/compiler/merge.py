"""merge: each group of maps becomes one step, so that what it computes on the way never touches memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlcompute.ops.op import Array, ArrayType, Op, Step, Typed, Value, run_meaning


class Merged(Op):
    """Several maps over one shape, run element by element in one pass over memory.

    `steps` in the attributes are the maps in order, then the assigns that store what they computed.
    """

    name = "merged"
    family = "merged"
    elementwise = True

    @staticmethod
    def result(*inputs: Typed, steps: tuple[Step, ...], stored: tuple[Value, ...], **_: Any) -> tuple[ArrayType, ...]:
        return tuple(ArrayType(value.shape, value.dtype) for value in stored)

    @staticmethod
    def meaning(*arrays: Array, steps: tuple[Step, ...], stored: tuple[Value, ...], inputs: tuple[Value, ...]) -> Any:
        memory = dict(zip(inputs, arrays, strict=True))
        for step in steps:
            results = run_meaning(step, [memory[value] for value in step.inputs])
            memory.update(zip(step.results, results, strict=True))
        return tuple(memory[value] for value in stored)


class MergedAssign(Merged):
    """The same with assigns among its steps."""

    is_pure = False


MERGED, MERGED_ASSIGN = Merged(), MergedAssign()


def merge(steps: list[Step], keep: Iterable[Value]) -> list[Step]:
    """Runs of maps of one shape and phase (with the assigns of their results) as single steps."""
    kept = set(keep)
    last_use: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in step.inputs:
            last_use[value] = index
    merged: list[Step] = []
    group: list[Step] = []
    views: list[Step] = []
    inside: set[Value] = set()

    def close(index: int) -> None:
        if group:
            shown = {view.inputs[0] for view in views}
            merged.append(_merged(group, index, last_use, kept | shown) if len(group) > 1 else group[0])
            group.clear()
            inside.clear()
        merged.extend(views)
        views.clear()

    for index, step in enumerate(steps):
        if group and step.phase != group[0].phase:
            close(index)
        if step.op.is_view:
            # A view of something outside the group can stand before it; one of its results must follow it.
            if step.inputs[0] in inside or any(step.inputs[0] in view.results for view in views):
                views.append(step)
            else:
                merged.append(step)
            continue
        joins = step.op.family == "map" or (step.op.name == "assign" and step.inputs[1] in inside)
        waits = any(value in view.results for view in views for value in step.inputs)
        if group and (waits or not joins or not _fits(step, group)):
            close(index)
        if step.op.family == "map":
            group.append(step)
            inside.update(step.results)
        elif joins and group:
            group.append(step)
        else:
            close(index)
            merged.append(step)
    close(len(steps))
    return merged


def _fits(step: Step, group: list[Step]) -> bool:
    first = group[0]
    if step.op.name == "assign":
        return True
    # After a store into lasting memory, a further map might read the old value of it.
    overwritten = {other.inputs[0] for other in group if other.op.name == "assign"}
    return step.results[0].shape == first.results[0].shape and not overwritten.intersection(step.inputs)


def _merged(group: list[Step], end: int, last_use: dict[Value, int], kept: set[Value]) -> Step:
    made = {value for step in group for value in step.results}
    inputs = tuple(dict.fromkeys(value for step in group for value in step.inputs if value not in made))
    stored = tuple(
        value for step in group for value in step.results if value in kept or last_use.get(value, -1) >= end
    )
    layers = dict.fromkeys(step.layer for step in group)
    attributes = {"steps": tuple(group), "stored": stored, "inputs": inputs}
    op = MERGED_ASSIGN if any(not step.op.is_pure for step in group) else MERGED
    return Step(op, inputs, stored, attributes, next(iter(layers)), group[0].phase)
