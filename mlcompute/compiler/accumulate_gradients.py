"""accumulate_gradients: gradients of several batches are added up before the optimizer sees them."""

from __future__ import annotations

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.ops.bfloat16 import at_least_float32
from mlcompute.ops.op import FLOAT32, Step

#: What is fed with every batch: what its gradients count in the sum, and whether they are added to those before (1) or
#: begin a new sum (0).
SHARE, KEEP = "gradient_share", "gradient_keep"


def accumulate_gradients(steps: list[Step], context: Context) -> list[Step]:
    """sum = keep sum + share g for every parameter. The sums stay between runs; updates are made from them.

    A sum that is not kept is not read: NaN in it would be NaN times 0, and that is NaN.
    """
    program, run = context.program, context.lowering
    trace = run.trace
    trace.steps, trace.phase = list(steps), "gradient"
    share, keep = (program.scalars.setdefault(name, trace.value((), FLOAT32, "scalar", name)) for name in (SHARE, KEEP))
    is_kept = keep > 0.0
    for tensor in context.request.parameters:
        gradient = program.gradients.get(tensor)
        if gradient is None:
            continue
        trace.layer = run.values[tensor].label
        # In half precision, small gradients would vanish beside a large sum.
        dtype = at_least_float32(gradient.dtype)
        before = trace.value(gradient.shape, dtype, "state", "gradient sum")
        total = ops.select(is_kept, before, 0.0) + ops.convert(gradient, dtype) * ops.convert(share, dtype)
        ops.assign(before, total)
        program.gradient_sums[tensor], program.gradients[tensor] = before, total
    trace.layer = ""
    return trace.steps
