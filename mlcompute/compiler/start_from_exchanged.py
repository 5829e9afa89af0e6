"""start_from_exchanged: in a group of processes, an update reads the gradients that the runtime has exchanged.

The other half of `exchange_gradients.py`, in a program of its own. Where a gradient comes in parts, they are added in
the order the request says, and fused with the update like any other elementwise ops. Statistics and losses are only
added.
"""

from __future__ import annotations

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.compiler.exchange_gradients import norm_names
from mlcompute.compiler.request import Tree
from mlcompute.ops.bfloat16 import at_least_float32
from mlcompute.ops.op import FLOAT32, Step, Value


def start_from_exchanged(steps: list[Step], context: Context) -> list[Step]:
    """For a program that only updates: parameters and their gradients are values from outside."""
    program, run, optimizer = context.program, context.lowering, context.request.optimizer
    assert optimizer is not None
    trace, order = run.trace, context.request.summands
    trace.steps, trace.phase = list(steps), "update"
    for tensor in context.request.parameters:
        value = run.value_of(tensor)
        trace.layer = value.label
        dtype = at_least_float32(value.dtype)
        program.summands[tensor] = [
            trace.value(value.shape, dtype, "state", "exchanged gradient") for _ in range(_count(order))
        ]
        program.gradients[tensor] = _sum(order, program.summands[tensor])
    trace.layer = ""
    for tensor in context.request.summed:
        shape, dtype = tensor.descriptor.shape, tensor.descriptor.data_type.numpy
        parts = [trace.value(shape, dtype, "state", "part of a sum") for _ in range(_count(order))]
        total = trace.value(shape, dtype, "state", "sum")
        ops.assign(total, _sum(order, parts))
        program.summands[tensor], program.updated[tensor] = parts, [total]
    program.values = dict(run.values)
    program.persistent = dict(run.persistent)
    for name in norm_names(optimizer):
        program.scalars[name] = trace.value((), FLOAT32, "scalar", name)
    return trace.steps


def _count(order: Tree) -> int:
    return 1 if isinstance(order, int) else _count(order[0]) + _count(order[1])


def _sum(order: Tree, parts: list[Value]) -> Value:
    return parts[order] if isinstance(order, int) else _sum(order[0], parts) + _sum(order[1], parts)
