"""schedule: what changes memory runs as soon as it may, so that what it consumed is free early."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.ops.op import Step, Value, overwritten_by


def update_early(steps: list[Step]) -> list[Step]:
    """Fused execution: every step of the update phase moves to where its gradient is complete."""
    return move_early(assign_early(steps), lambda step: step.phase == "update")


def assign_early(steps: list[Step]) -> list[Step]:
    """Split execution: within the update phase, each new value is stored as soon as nobody reads the old one."""
    start = next((index for index, step in enumerate(steps) if step.phase == "update"), len(steps))
    return move_early(steps, lambda step: step.phase == "update" and not step.op.is_pure, start)


def move_early(steps: list[Step], moves: Callable[[Step], bool], start: int = 0) -> list[Step]:
    """Move chosen steps forward, never past what they depend on, a reader of what they overwrite, or its writer.

    start  how many steps at the beginning stay there and before all others
    """
    fixed = steps[:start]
    moving: list[Step] = []
    # Slot k is right after fixed step k; -1: before all. `latest` is where a step stands now.
    slots: list[int] = []
    latest: list[int] = []
    ready: dict[Value, int] = {}
    #: Memory that is overwritten somewhere, and the views of it.
    shown = {value: value for step in steps if not step.op.is_pure for value in overwritten_by(step)}
    last_read = dict.fromkeys(shown, -1)
    last_written = dict.fromkeys(shown, -1)
    for step in fixed:
        if step.op.is_view and step.inputs[0] in shown:
            shown[step.results[0]] = shown[step.inputs[0]]
    for step in steps[start:]:
        read = [shown[value] for value in step.inputs if value in shown]
        written = () if step.op.is_pure else overwritten_by(step)
        if moves(step):
            limits = [ready[value] for value in step.inputs if value in ready]
            limits += [last_written[root] for root in read]
            limits += [last_read[root] for root in written]
            slot = max(limits, default=start - 1)
            if slot < start - 1:
                slot = start - 1
            moving.append(step)
            slots.append(slot)
            latest.append(len(fixed) - 1)
        else:
            slot = len(fixed)
            fixed.append(step)
        if read:
            if step.op.is_view:
                shown[step.results[0]] = read[0]
            for root in read:
                last_read[root] = max(last_read[root], slot)
            for root in written:
                last_written[root] = slot
        for value in step.results:
            ready[value] = slot
    _as_late_as_useful(moving, shown, slots, latest)
    after: list[list[Step]] = [[] for _ in range(len(fixed) + 1)]
    for step, slot in zip(moving, slots, strict=True):
        after[slot + 1].append(step)
    scheduled = after[0]
    for index, step in enumerate(fixed):
        scheduled.append(step)
        scheduled += after[index + 1]
    return scheduled


def _as_late_as_useful(moving: list[Step], shown: dict[Value, Value], slots: list[int], latest: list[int]) -> None:
    """Delay each step to its first consumer (and to no overwriting of what it reads): results live shorter."""
    needed: dict[Value, int] = {}
    overwritten: dict[Value, int] = {}
    for index in range(len(moving) - 1, -1, -1):
        step, slot = moving[index], slots[index]
        if step.op.is_pure:
            limits = [needed[value] for value in step.results if value in needed]
            if limits:
                limits.append(latest[index])
                read = [shown[value] for value in step.inputs if value in shown]
                limits += [overwritten[root] for root in read if root in overwritten]
                slot = slots[index] = max(slot, min(limits))
        for target in overwritten_by(step):
            overwritten[target] = slot
        for value in step.inputs:
            if needed.get(value, slot) >= slot:
                needed[value] = slot
