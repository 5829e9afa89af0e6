"""copy_strided_operands: operands that a kernel cannot read through a view are copied in steps of their own."""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Step


def copy_strided_operands(steps: list[Step], context: Context) -> list[Step]:
    """Every reader gets a copy of its own just before it: what is shown may have been overwritten since the last."""
    needed = context.engine.needs_dense(steps, context.index(steps).views)
    if not needed:
        return steps
    done: list[Step] = []
    for step in steps:
        dense = {}
        for value in needed.get(step, ()):
            if value not in dense:
                dense[value] = context.trace.value(value.shape, value.dtype)
                done.append(Step(TABLE["copy"], (value,), (dense[value],), {}, step.layer, step.phase))
        if dense:
            inputs = tuple([dense.get(value, value) for value in step.inputs])
            step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
        done.append(step)
    return done
