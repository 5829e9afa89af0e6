"""unmerge_aliased_updates: shared updates that would overwrite their own inputs are separated again.

Element by element, a parameter is overwritten while its gradient is read. Where that is a view of the parameter, the
ops become steps of their own, and `fuse_elementwise` sees to it.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FUSED_ASSIGN
from mlcompute.ops.op import Step, Value, inner_steps, overwritten_by


def unmerge_aliased_updates(steps: list[Step], context: Context) -> list[Step]:
    """Fused updates whose inputs alias what they overwrite, as the steps they consist of."""
    aliases: dict[Value, Value] = {}  # views of what may be overwritten
    broken: dict[Step, tuple[Step, ...]] = {}
    for step in steps:
        op = step.op
        if op.is_view:
            source = step.inputs[0]
            if source.kind != "temporary":
                aliases[step.results[0]] = source
            elif source in aliases:
                aliases[step.results[0]] = aliases[source]
        elif op is FUSED_ASSIGN:
            shown = [aliases[value] for value in step.inputs if value in aliases]
            if shown and not set(shown).isdisjoint(overwritten_by(step)):
                broken[step] = inner_steps(step)
    return [one for step in steps for one in broken.get(step, (step,))] if broken else steps
