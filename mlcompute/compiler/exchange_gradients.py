"""exchange_gradients: gradients, running statistics and losses are left where the processes of a group exchange them.

Two programs take the place of one. A slice of the batch runs forward and gradient pass and stores every gradient into
memory of its own, all of them side by side; the runtime exchanges it. The update (`start_from_exchanged.py`) then reads
the sums over all slices, for the part of the parameters this process owns.

Running statistics and losses are added over the slices, too: each slice stores its share of them, and the statistics
themselves stay as they were until the sums are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.compiler.program import Program
from mlcompute.ops.bfloat16 import at_least_float32
from mlcompute.ops.op import Step, Trace, Value
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.compiler.lower import Lowering

#: What part of the batch a slice is. (What its gradients count for may be less: several batches may make one step.)
SLICE = "slice_share"
#: The norm of all gradients, where it is known before the update: no process has all of them.
GLOBAL_NORM = "global_norm"


def group_norm(group: int) -> str:
    """The name of the norm of the gradients of a group of parameters, where that is known before the update."""
    return f"{GLOBAL_NORM} of group {group}"


def norm_names(optimizer: Optimizer) -> list[str]:
    """The norms over several gradients that an update reads."""
    names = [group_norm(index) for index, group in enumerate(optimizer.groups) if group.clip_norm is not None]
    return [GLOBAL_NORM, *names] if optimizer.clips_jointly and not optimizer.custom_global_norm else names


def exchange_gradients(steps: list[Step], context: Context) -> list[Step]:
    """exchanged <- gradient for every parameter, in float32 at least; shared <- share statistic or loss."""
    program, run = context.program, context.lowering
    trace = run.trace
    gradient_steps = [step for step in steps if step.phase == "gradient"]
    trace.steps = [step for step in steps if step.phase != "gradient"]
    _share_values(context, run)
    trace.steps, trace.phase = trace.steps + gradient_steps, "gradient"
    for tensor in context.request.parameters:
        gradient = program.gradients.get(tensor)
        if gradient is None:
            continue
        trace.layer = run.values[tensor].label
        dtype = at_least_float32(gradient.dtype)
        exchanged = trace.value(gradient.shape, dtype, "state", "exchanged gradient")
        ops.assign(exchanged, ops.convert(gradient, dtype))
        program.exchanged[tensor] = exchanged
    trace.layer = ""
    return trace.steps


def _share_values(context: Context, run: Lowering) -> None:
    """Statistics, instead of where they are kept, and losses: what this slice contributes to those of the batch."""
    program, request, trace = context.program, context.request, run.trace
    trace.phase = "forward"
    share = program.scalars[SLICE] = run.slice_share()
    statistics = {run.values[tensor]: tensor for tensor in run.writes if tensor.descriptor.data_type.is_floating}
    stores = {step: step.inputs[0] for step in trace.steps if step.op.name == "assign"}
    trace.steps = [step for step in trace.steps if stores.get(step) not in statistics]
    for step, target in stores.items():
        if target in statistics:
            new = step.inputs[1]
            trace.layer = step.layer
            _leave(program, trace, statistics[target], new * ops.convert(share, new.dtype), "statistic")
    for tensor in dict.fromkeys(request.minimised):
        loss = run.values.get(tensor)
        if loss is not None:
            trace.layer = loss.label
            averaged = loss * ops.convert(share, loss.dtype) if tensor in request.averaged else loss
            _leave(program, trace, tensor, averaged, "loss")


def _leave(program: Program, trace: Trace, tensor: Tensor, value: Value, what: str) -> None:
    shared = trace.value(value.shape, value.dtype, "state", f"shared {what}")
    ops.assign(shared, value)
    program.shared[tensor] = shared
