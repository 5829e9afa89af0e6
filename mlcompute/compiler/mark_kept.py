"""mark_kept: which values stay readable after a run. Steps whose results nothing uses are removed."""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.simplify import drop_unused
from mlcompute.ops.op import Step


def mark_kept(steps: list[Step], context: Context) -> list[Step]:
    """Declared outputs, losses, debugged layers; every result and gradient where phases are run one by one."""
    request = context.request
    values, gradients = context.program.values, context.program.gradients
    kept = [values[tensor] for tensor in (*request.kept, *request.debugged) if tensor in values]
    wanted = (*request.kept_gradients, *request.debugged)
    kept += [gradients[tensor] for tensor in wanted if tensor in gradients]
    if context.program.runs_in_phases:
        kept += [values[result] for node in request.nodes for result in node.results]
        kept += list(gradients.values())
    context.kept = frozenset(kept)
    index = context.index(steps)
    context.shown = frozenset(index.base(value) for value in context.readable)
    return drop_unused(steps, context.kept)
