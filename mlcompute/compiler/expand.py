"""expand: composite ops a device has no kernel for become smaller ops."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.compiler.context import Context
from mlcompute.compiler.substitution import Substitution
from mlcompute.errors import CompileError
from mlcompute.ops.op import Step, Trace, Value


def expand(steps: list[Step], context: Context) -> list[Step]:
    """Steps the device supports, every one of them."""
    engine = context.engine
    engine.warm_up(steps)
    found, substitution = expanded(steps, context.trace, engine.supports, f"device '{engine.name}'")
    context.substitute(substitution)
    context.is_expanded = True
    return found


def expanded(
    steps: list[Step], trace: Trace, supports: Callable[[Step], bool], who: str
) -> tuple[list[Step], Substitution]:
    """Supported steps only, and what became of values."""
    substitution = Substitution()
    first = next((index for index, step in enumerate(steps) if not supports(step)), len(steps))
    done, pending = steps[:first], steps[first:][::-1]
    layer, phase = trace.layer, trace.phase
    while pending:
        step = pending.pop()
        inputs = tuple([substitution[value] for value in step.inputs]) if substitution.replaced else step.inputs
        if inputs != step.inputs:
            step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
        if supports(step):
            done.append(step)
            continue
        if step.op.expansion is None:
            raise CompileError(
                f"layer '{step.layer}': {who} has no kernel for {step!r}, "
                "and it has no expansion into smaller operations",
                fix="compile for another device, or use other layers",
            )
        trace.steps, trace.layer, trace.phase = [], step.layer, step.phase
        answers = step.op.expansion(*step.inputs, **step.attributes)
        answers = (answers,) if isinstance(answers, Value) else tuple(answers)
        for value, answer in zip(step.results, answers, strict=True):
            substitution[value] = answer
        pending.extend(reversed(trace.steps))
    trace.layer, trace.phase = layer, phase
    return done, substitution
