"""schedule_updates: steps that change memory run as early as possible, so that their inputs are freed early.

Where updates should follow each other (`Traits.updates_last`), they wait until their gradients are of some size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Step, Trace, Value, overwritten_by

#: Gradients that wait for their updates have so many bytes at most.
WAITING_BYTES = 64 << 20


def store_early(trace: Trace, pairs: Sequence[tuple[Value, Value]], start: int) -> None:
    """Assign new values to parameters and states, each as soon as it is there and nobody reads the old one any more.

    pairs  (target, new value)
    start  assigns stay behind that many steps of the trace: the phases before the update
    """
    if not pairs:
        return
    steps = trace.steps
    shown = {target: target for target, _ in pairs}  # and the views of them
    for step in steps:
        if step.op.is_view and step.inputs[0] in shown:
            shown[step.results[0]] = shown[step.inputs[0]]
    made = {value: start - 1 for _, value in pairs}
    read = {target: start - 1 for target, _ in pairs}
    for index in range(start, len(steps)):
        step = steps[index]
        for value in step.inputs:
            if value in shown:
                read[shown[value]] = index
        for value in step.results:
            if value in made:
                made[value] = index
    # What is stored may itself be the old value of another target, which then comes last.
    passed_on = [(target, value) for target, value in pairs if value in shown]
    for _, value in passed_on:
        read[shown[value]] = len(steps) - 1
    after: dict[int, list[Step]] = {}
    for target, value in [*passed_on, *[pair for pair in pairs if pair[1] not in shown]]:
        index = max(made[value], read[target])
        layer = steps[index].layer if index >= start else target.label
        after.setdefault(index, []).append(Step(TABLE["assign"], (target, value), (), {}, layer, "update"))
    stored = after.get(start - 1, [])
    for index in range(start, len(steps)):
        stored.append(steps[index])
        if index in after:
            stored += after[index]
    steps[start:] = stored


def schedule_updates(steps: list[Step], context: Context) -> list[Step]:
    """Every step of the update phase moves to where its gradient is complete, or some gradients are."""
    context.phases_in_order = False
    early = move_early(steps, lambda step: step.phase == "update")
    return in_groups(early, WAITING_BYTES) if context.engine.traits.updates_last else early


def in_groups(steps: list[Step], most: int) -> list[Step]:
    """Steps of the update phase, each where it may run, wait until their gradients have more than so many bytes."""
    gradients: set[Value] = set()
    scheduled: list[Step] = []
    waiting: list[Step] = []
    nbytes = 0
    for step in steps:
        if step.phase == "update":
            waiting.append(step)
            nbytes += sum([value.nbytes for value in step.inputs if value in gradients])
            continue
        if nbytes > most:
            scheduled += waiting
            waiting, nbytes = [], 0
        gradients.update(step.results)
        scheduled.append(step)
    return scheduled + waiting


def move_early(steps: list[Step], moves: Callable[[Step], bool]) -> list[Step]:
    """Move chosen steps forward, never past what they depend on, a reader of what they overwrite, or its writer."""
    moving = [step for step in steps if moves(step)]
    if not moving:
        return steps
    fixed: list[Step] = []
    # Slot k is right after fixed step k; -1: before all. `latest` is where a step stands now.
    slots: list[int] = []
    latest: list[int] = []
    # Only what matters to steps that move is watched: what they read, what is overwritten, and the views of that.
    ready = {value: -1 for step in moving for value in step.inputs}
    overwritten = {step: overwritten_by(step) for step in steps if not step.op.is_pure}
    shown = {value: _Memory() for values in overwritten.values() for value in values}
    coming = iter(moving)
    moves_next = next(coming)
    for step in steps:
        inputs, op = step.inputs, step.op
        if step is moves_next:
            slot = max([ready[value] for value in inputs], default=-1)
            for value in inputs:
                if value in shown:
                    slot = max(slot, shown[value].written)
            for value in overwritten.get(step, ()):
                slot = max(slot, shown[value].read)
            slots.append(slot)
            latest.append(len(fixed) - 1)
            moves_next = next(coming, step)
        else:
            slot = len(fixed)
            fixed.append(step)
        for value in step.results:
            if value in ready:
                ready[value] = slot
        for value in inputs:
            memory = shown.get(value)
            if memory is not None:
                if memory.read < slot:
                    memory.read = slot
                if op.is_view:
                    shown[step.results[0]] = memory
        if not op.is_pure:
            for value in overwritten[step]:
                shown[value].written = slot
    _as_late_as_useful(moving, shown, slots, latest)
    after: dict[int, list[Step]] = {}
    for step, slot in zip(moving, slots, strict=True):
        after.setdefault(slot, []).append(step)
    scheduled = after.get(-1, [])
    for index, step in enumerate(fixed):
        scheduled.append(step)
        if index in after:
            scheduled += after[index]
    return scheduled


class _Memory:
    """What is overwritten, and seen through views: the slots of its last reader and its last writer so far."""

    __slots__ = ("read", "written")

    def __init__(self) -> None:
        self.read = self.written = -1


def _as_late_as_useful(moving: list[Step], shown: dict[Value, _Memory], slots: list[int], latest: list[int]) -> None:
    """Delay each step to its first consumer (and to no overwriting of what it reads): results live shorter."""
    if not any(step.op.is_pure for step in moving):
        return  # they only overwrite
    needed: dict[Value, int] = {}
    overwritten: dict[_Memory, int] = {}
    for index in range(len(moving) - 1, -1, -1):
        step, slot = moving[index], slots[index]
        if step.op.is_pure:
            limits = [needed[value] for value in step.results if value in needed]
            if limits:
                limits.append(latest[index])
                read = [shown[value] for value in step.inputs if value in shown]
                limits += [overwritten[memory] for memory in read if memory in overwritten]
                slot = slots[index] = max(slot, min(limits))
        for target in overwritten_by(step):
            overwritten[shown[target]] = slot
        for value in step.inputs:
            if needed.get(value, slot) >= slot:
                needed[value] = slot
