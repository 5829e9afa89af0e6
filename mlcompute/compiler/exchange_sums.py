"""exchange_sums: a program ends a part wherever it needs sums over all slices of the batch, and goes on with them.

    forward      ... m = sum_over_slices(x)          ->   forward     ... sum <- x
    forward      y = f(m) ...                             forward:1   m = sum; y = f(m) ...

Between two parts the processes of a group have added up what all slices have left. Parts are phases of their own: no
pass moves a step from one to another.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Step, overwritten_by


def exchange_sums(steps: list[Step], context: Context) -> list[Step]:
    """sum <- x, and a new part that reads the sum, for every `sum_over_slices`."""
    program, trace, part = context.program, context.trace, 0
    if all(step.op.name != "sum_over_slices" for step in steps):
        return steps
    done: list[Step] = []
    late: list[Step] = []
    left = set(program.shared.values())
    phase = "forward"
    for step in steps:
        if step.phase != phase:
            phase, part = step.phase, 0
        name = f"{phase}:{part}" if part else phase
        if step.op.name != "sum_over_slices":
            step = Step(step.op, step.inputs, step.results, step.attributes, step.layer, name)
            # All slices leave losses and statistics in the same memory, which is emptied when a slice has finished.
            is_late = context.style == "slice" and left.intersection(overwritten_by(step))
            (late if is_late else done).append(step)
            continue
        (x,), (y,) = step.inputs, step.results
        total = trace.value(y.shape, y.dtype, "state", "sum over slices")
        part += 1
        done.append(Step(TABLE["assign"], (total, x), (), {}, step.layer, name))
        done.append(Step(TABLE["copy"], (total,), (y,), {}, step.layer, f"{phase}:{part}"))
        program.sums[name] = total
    last = done[-1].phase
    return done + [Step(step.op, step.inputs, step.results, step.attributes, step.layer, last) for step in late]
