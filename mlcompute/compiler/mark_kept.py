"""mark_kept: which values stay readable after a run."""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.op import Step, Value


def mark_kept(steps: list[Step], context: Context) -> list[Step]:
    """Declared outputs, losses, debugged layers; every result and gradient where phases are run one by one."""
    kept = kept_in_one_call(context)
    if context.program.runs_in_phases:
        values, gradients = context.program.values, context.program.gradients
        kept += [values[result] for node in context.request.nodes for result in node.results]
        kept += list(gradients.values())
    context.kept = frozenset(kept)
    return steps


def kept_in_one_call(context: Context) -> list[Value]:
    """What stays readable in every style of execution."""
    request = context.request
    values, gradients = context.program.values, context.program.gradients
    kept = [values[tensor] for tensor in (*request.kept, *request.debugged) if tensor in values]
    wanted = (*request.kept_gradients, *request.debugged)
    return kept + [gradients[tensor] for tensor in wanted if tensor in gradients]
