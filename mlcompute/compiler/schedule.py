"""schedule: what changes memory runs as soon as it may, so that what it consumed is free early."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.ops.op import Step, Value, overwritten_by


def update_early(steps: list[Step]) -> list[Step]:
    """Fused execution: every step of the update phase moves to where its gradient is complete."""
    return move_early(steps, lambda step: step.phase == "update")


def move_early(steps: list[Step], moves: Callable[[Step], bool]) -> list[Step]:
    """Move chosen steps forward, never past what they depend on, a reader of what they overwrite, or its writer."""
    fixed: list[Step] = []
    moving: list[Step] = []
    # Slot k is right after fixed step k; -1: before all. `latest` is where a step stands now.
    slots: list[int] = []
    latest: list[int] = []
    ready: dict[Value, int] = {}
    #: Memory that is overwritten somewhere, and the views of it.
    shown = {value: value for step in steps for value in overwritten_by(step)}
    last_read = dict.fromkeys(shown, -1)
    last_written = dict.fromkeys(shown, -1)
    for step in steps:
        read = [shown[value] for value in step.inputs if value in shown]
        if moves(step):
            limits = [ready[value] for value in step.inputs if value in ready]
            limits += [last_written[root] for root in read]
            limits += [last_read[root] for root in overwritten_by(step)]
            slot = max(limits, default=-1)
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
            for root in overwritten_by(step):
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
