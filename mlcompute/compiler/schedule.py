"""schedule: what changes memory runs as soon as it may, so that what it consumed is free early."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.ops.op import Step, Value


def update_early(steps: list[Step]) -> list[Step]:
    """Fused execution: every step of the update phase moves to where its gradient is complete."""
    return move_early(steps, lambda step: step.phase == "update")


def assign_early(steps: list[Step]) -> list[Step]:
    """Split execution: within the update phase, each new value is stored as soon as nobody reads the old one."""
    return move_early(steps, lambda step: step.phase == "update" and not step.op.is_pure)


def move_early(steps: list[Step], moves: Callable[[Step], bool]) -> list[Step]:
    """Move chosen steps forward, never past what they depend on or a reader of what they overwrite."""
    fixed = [step for step in steps if not moves(step)]
    moving = [step for step in steps if moves(step)]
    roots: dict[Value, Value] = {}  # view -> the value whose memory it shows
    for step in steps:
        if step.op.is_view:
            source = step.inputs[0]
            roots[step.results[0]] = roots.get(source, source)
    ready: dict[Value, int] = {}
    last_read: dict[Value, int] = {}
    for index, step in enumerate(fixed):
        for value in step.inputs:
            last_read[roots.get(value, value)] = index
        for value in step.results:
            ready[value] = index
    slots = _earliest(moving, roots, ready, last_read)
    _as_late_as_useful(moving, roots, slots)
    after: list[list[Step]] = [[] for _ in range(len(fixed) + 1)]
    for step, slot in zip(moving, slots, strict=True):
        after[slot + 1].append(step)
    scheduled = list(after[0])
    for index, step in enumerate(fixed):
        scheduled.append(step)
        scheduled.extend(after[index + 1])
    return scheduled


def _earliest(
    moving: list[Step], roots: dict[Value, Value], ready: dict[Value, int], last_read: dict[Value, int]
) -> list[int]:
    """For each moving step the fixed step right after which it may run at the earliest; -1: before all."""
    slots = []
    for step in moving:
        slot = max((ready.get(value, -1) for value in step.inputs), default=-1)
        if not step.op.is_pure:
            target = roots.get(step.inputs[0], step.inputs[0])
            slot = max(slot, last_read.get(target, -1))
        for value in step.inputs:
            root = roots.get(value, value)
            last_read[root] = max(last_read.get(root, -1), slot)
        for value in step.results:
            ready[value] = slot
        slots.append(slot)
    return slots


def _as_late_as_useful(moving: list[Step], roots: dict[Value, Value], slots: list[int]) -> None:
    """Delay each step to its first consumer (and to no overwriting of what it reads): results live shorter."""
    needed: dict[Value, int] = {}
    overwritten: dict[Value, int] = {}
    for index in range(len(moving) - 1, -1, -1):
        step = moving[index]
        if step.op.is_pure:
            limits = [needed[value] for value in step.results if value in needed]
            roots_read = (roots.get(value, value) for value in step.inputs)
            limits += [overwritten[root] for root in roots_read if root in overwritten]
            slots[index] = max(slots[index], min(limits, default=slots[index]))
        else:
            overwritten[roots.get(step.inputs[0], step.inputs[0])] = slots[index]
        for value in step.inputs:
            needed[value] = min(needed.get(value, slots[index]), slots[index])
