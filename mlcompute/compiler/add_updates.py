"""add_updates: the optimizer's steps for every parameter, and where their state and settings come from."""

from __future__ import annotations

from dataclasses import replace

from mlcompute.compiler.context import Context
from mlcompute.compiler.schedule_updates import store_early
from mlcompute.compiler.share_updates import share_updates
from mlcompute.compiler.update import Updated, update
from mlcompute.ops.bfloat16 import at_least_float32
from mlcompute.ops.op import FLOAT32, Shape, Step, Trace, Value
from mlcompute.optimizers.optimizer import Members


def add_updates(steps: list[Step], context: Context) -> list[Step]:
    """Steps of the update phase behind the others."""
    program, run, optimizer = context.program, context.lowering, context.request.optimizer
    assert optimizer is not None
    trace = run.trace
    trace.steps = list(steps)
    updated: list[Updated] = []
    members: dict[Value, Members] = {}
    layouts: dict[tuple[Members, Shape], dict[str, Shape]] = {}
    for tensor in context.request.parameters:
        gradient = program.gradients.get(tensor)
        if gradient is None:
            continue
        value = run.values[tensor]
        # Second moments of small gradients vanish in half precision: state is kept in float32 at least.
        dtype = at_least_float32(value.dtype)
        groups = members[value] = context.request.groups.get(tensor, ())
        layout = layouts.get((groups, value.shape))
        if layout is None:
            layout = layouts[groups, value.shape] = optimizer.rule(groups).layout(value.shape)
        states = [trace.value(shape, dtype, "state", name) for name, shape in layout.items()]
        program.states[tensor] = states
        updated.append((value, gradient, states))
    if not updated:
        return steps
    names = optimizer.scalars_of(1, set(members.values()))
    program.scalars.update({name: trace.value((), FLOAT32, "scalar", name) for name in names})
    if context.request.out_of_place:
        _store_out_of_place(context, trace, update(trace, optimizer, updated, program.scalars, members), len(steps))
        return _beside_readers(trace.steps, len(steps))
    if context.fuses_elementwise:
        updated = share_updates(trace, optimizer, updated, program.scalars, context.engine.supports, members)
    start = len(trace.steps)
    store_early(trace, update(trace, optimizer, updated, program.scalars, members), start)
    return trace.steps


def _store_out_of_place(context: Context, trace: Trace, pairs: list[tuple[Value, Value]], start: int) -> None:
    """New parameters, and new state where that is asked for, do not overwrite the old ones."""
    program, moves_states = context.program, context.request.moves_states
    targets: dict[Value, Value] = {}
    for tensor, states in program.states.items():
        parameter = program.values[tensor]
        moved = [parameter, *(states if moves_states else ())]
        targets |= {old: trace.value(old.shape, old.dtype, "state", f"new {old.label}") for old in moved}
        program.updated[tensor] = [targets.get(old, old) for old in (parameter, *states)]
    store_early(trace, [(targets.get(old, old), new) for old, new in pairs], start)
    if context.request.streams:
        read_by_others = {program.updated[tensor][0] for tensor in program.states}
        trace.steps = [
            replace(step, attributes={"streams": True})
            if step.op.name == "assign" and step.inputs[0] in read_by_others
            else step
            for step in trace.steps
        ]


def _beside_readers(steps: list[Step], count: int) -> list[Step]:
    """The first `count` steps, sums of gradients, each right before the update that reads it: they become one loop.

    Those that store sums, of what is not updated, come last.
    """
    sums = {value: step for step in steps[:count] for value in step.results}
    placed: list[Step] = []

    def place(step: Step) -> None:
        for value in step.inputs:
            if value in sums:
                place(sums.pop(value))
        placed.append(step)

    for step in [*steps[count:], *(step for step in steps[:count] if step.op.name == "assign")]:
        place(step)
    return placed
