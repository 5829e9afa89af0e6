"""expand: composite ops a device has no kernel for become smaller ops."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.compiler.simplify import Substitution
from mlcompute.errors import CompileError
from mlcompute.ops.op import Op, Step, Trace, Value


def expand(trace: Trace, supports: Callable[[Op], bool]) -> Substitution:
    """Rewrite `trace.steps` in place until the device supports every op."""
    substitution = Substitution()
    if all(supports(op) for op in {step.op for step in trace.steps}):
        return substitution
    layer, phase = trace.layer, trace.phase
    pending = list(reversed(trace.steps))
    done: list[Step] = []
    while pending:
        step = pending.pop()
        inputs = tuple(substitution[value] for value in step.inputs)
        if inputs != step.inputs:
            step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
        if supports(step.op):
            done.append(step)
            continue
        if step.op.expansion is None:
            raise CompileError(
                f"layer '{step.layer}': the device has no kernel for {step.op.name}, and it has no expansion"
            )
        trace.steps, trace.layer, trace.phase = [], step.layer, step.phase
        answers = step.op.expansion(*step.inputs, **step.attributes)
        answers = (answers,) if isinstance(answers, Value) else tuple(answers)
        for value, answer in zip(step.results, answers, strict=True):
            substitution[value] = answer
        pending.extend(reversed(trace.steps))
    trace.steps, trace.layer, trace.phase = done, layer, phase
    return substitution
