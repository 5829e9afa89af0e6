"""add_updates: the optimizer's steps for every parameter, and where their state and settings come from."""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.schedule_updates import store_early
from mlcompute.compiler.share_updates import share_updates
from mlcompute.compiler.update import Updated, update
from mlcompute.ops.op import FLOAT32, Step, Value
from mlcompute.optimizers.optimizer import Members


def add_updates(steps: list[Step], context: Context) -> list[Step]:
    """Steps of the update phase behind the others."""
    program, run, optimizer = context.program, context.lowering, context.request.optimizer
    assert run is not None
    assert optimizer is not None
    trace = run.trace
    trace.steps = list(steps)
    updated: list[Updated] = []
    members: dict[Value, Members] = {}
    for tensor in context.request.parameters:
        gradient = program.gradients.get(tensor)
        if gradient is None:
            continue
        value = run.values[tensor]
        # Second moments of small gradients vanish in half precision: state is kept in float32 at least.
        dtype = FLOAT32 if value.dtype.itemsize < FLOAT32.itemsize else value.dtype
        groups = members[value] = context.request.groups.get(tensor, ())
        layout = optimizer.rule(groups).layout(value.shape)
        states = [trace.value(shape, dtype, "state", name) for name, shape in layout.items()]
        program.states[tensor] = states
        updated.append((value, gradient, states))
    if not updated:
        return steps
    names = optimizer.scalars_of(1, set(members.values()))
    program.scalars.update({name: trace.value((), FLOAT32, "scalar", name) for name in names})
    if context.fuses_elementwise:
        updated = share_updates(trace, optimizer, updated, program.scalars, context.engine.supports, members)
    start = len(trace.steps)
    store_early(trace, update(trace, optimizer, updated, program.scalars, members), start)
    return trace.steps
