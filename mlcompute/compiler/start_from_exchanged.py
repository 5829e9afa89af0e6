"""start_from_exchanged: in a group of processes, an update reads the gradients that the runtime has exchanged.

The other half of `exchange_gradients.py`, in a program of its own.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.exchange_gradients import norm_names
from mlcompute.ops.op import FLOAT32, Step


def start_from_exchanged(steps: list[Step], context: Context) -> list[Step]:
    """For a program that only updates: parameters and their gradients are values from outside."""
    program, run, optimizer = context.program, context.lowering, context.request.optimizer
    assert run is not None
    assert optimizer is not None
    for tensor in context.request.parameters:
        value = run.value_of(tensor)
        dtype = FLOAT32 if value.dtype.itemsize < FLOAT32.itemsize else value.dtype
        program.exchanged[tensor] = run.trace.value(value.shape, dtype, "state", "exchanged gradient")
    program.values = dict(run.values)
    program.persistent = dict(run.persistent)
    program.gradients = dict(program.exchanged)
    for name in norm_names(optimizer):
        program.scalars[name] = run.trace.value((), FLOAT32, "scalar", name)
    return steps
