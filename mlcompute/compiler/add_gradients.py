"""add_gradients: the gradient pass of a graph, from its losses and the caller's own gradients."""

from __future__ import annotations

from mlcompute import ops
from mlcompute.compiler.accumulate_gradients import SHARE
from mlcompute.compiler.context import Context
from mlcompute.compiler.differentiate import differentiate
from mlcompute.ops.op import FLOAT32, Step, Value


def add_gradients(steps: list[Step], context: Context) -> list[Step]:
    """Steps of the gradient phase behind the others."""
    request, program, run = context.request, context.program, context.lowering
    trace, values = run.trace, run.values
    trace.steps = list(steps)
    trace.phase = "gradient"
    seeds: dict[Value, Value] = {}
    share = None
    if program.name in ("slice", "phases"):
        share = program.scalars[SHARE] = trace.value((), FLOAT32, "scalar", SHARE)
    for tensor in request.minimised:
        loss = values[tensor]
        seeds[loss] = ops.full(loss, loss.shape, 1.0)
        if share is not None and tensor in request.averaged:
            # A mean over a slice counts by the slice's share in the batch, and so do all gradients that start there.
            seeds[loss] = ops.broadcast(ops.convert(share, loss.dtype), loss.shape)
    for given, tensor in request.user_gradients.items():
        if tensor not in values:
            continue
        fed = run.input(given, values[tensor].shape)
        program.inputs[given] = fed
        value = values[tensor]
        seeds[value] = seeds[value] + fed if value in seeds else fed
    sources = [values[tensor] for tensor in (*request.parameters, *request.wanted) if tensor in values]
    stopped = {values[tensor] for tensor in request.stopped if tensor in values}
    gradients = differentiate(trace, seeds, sources, stopped, read=set(values.values()))
    for value, gradient in gradients.items():
        if gradient.kind == "input":
            # Fed memory is the caller's; a gradient that may be read later needs its own.
            gradients[value] = ops.copy(gradient)
    program.gradients = {tensor: gradients[value] for tensor, value in values.items() if value in gradients}
    return trace.steps
