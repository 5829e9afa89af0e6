"""exchange_gradients: gradients are left where the processes of a group exchange them.

Two programs take the place of one. A slice of the batch runs forward and gradient pass and stores every gradient into
memory of its own, all of them side by side; the runtime exchanges it. The update (`start_from_exchanged.py`) then reads
the sums over all slices, for the part of the parameters this process owns.
"""

from __future__ import annotations

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.enums import GradientClippingType
from mlcompute.ops.op import FLOAT32, Step
from mlcompute.optimizers.optimizer import Optimizer

#: The norm of all gradients, where it is known before the update: no process has all of them.
GLOBAL_NORM = "global_norm"


def group_norm(group: int) -> str:
    """The name of the norm of the gradients of a group of parameters, where that is known before the update."""
    return f"{GLOBAL_NORM} of group {group}"


def norm_names(optimizer: Optimizer) -> list[str]:
    """The norms over several gradients that an update reads."""
    names = [group_norm(index) for index, group in enumerate(optimizer.groups) if group.clip_norm is not None]
    by_norm = optimizer.gradient_clipping_type == GradientClippingType.BY_GLOBAL_NORM
    return [GLOBAL_NORM, *names] if by_norm and not optimizer.custom_global_norm else names


def exchange_gradients(steps: list[Step], context: Context) -> list[Step]:
    """exchanged <- gradient for every parameter, in float32 at least."""
    program, run = context.program, context.lowering
    assert run is not None
    trace = run.trace
    trace.steps, trace.phase = list(steps), "gradient"
    for tensor in context.request.parameters:
        gradient = program.gradients.get(tensor)
        if gradient is None:
            continue
        trace.layer = run.values[tensor].label
        dtype = FLOAT32 if gradient.dtype.itemsize < FLOAT32.itemsize else gradient.dtype
        exchanged = trace.value(gradient.shape, dtype, "state", "exchanged gradient")
        ops.assign(exchanged, ops.convert(gradient, dtype))
        program.exchanged[tensor] = exchanged
    trace.layer = ""
    return trace.steps
