"""write_exchanged: a gradient is computed directly in the memory it is exchanged from, without a copy.

dw = matmul(dy, x); exchanged <- dw      ->      exchanged = matmul(dy, x)
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.op import Step, Value


def write_exchanged(steps: list[Step], context: Context) -> list[Step]:
    """Results that are only stored become what they are stored to; reshapes in between go with them."""
    program, index = context.program, context.index(steps)
    owners = {value: tensor for tensor, value in program.exchanged.items()}
    written: dict[Step, Value] = {}
    gone: set[Step] = set()
    for step in steps:
        if step.op.name != "assign" or step.inputs[0] not in owners:
            continue
        target, value = step.inputs
        chain = [step]
        while index.readers[value] == chain[-1:] and value not in context.kept:
            maker = index.makers.get(value)
            if maker is None:
                break
            if maker.op.name == "reshape":
                chain.append(maker)
                value = maker.inputs[0]
                continue
            is_plain = maker.op.is_pure and not maker.op.is_view and "steps" not in maker.attributes
            if is_plain and len(maker.results) == 1 and value.dtype == target.dtype:
                memory = context.trace.value(value.shape, value.dtype, "state", target.label)
                program.exchanged[owners[target]] = written[maker] = memory
                gone.update(chain)
            break
    return [_stored(step, written) for step in steps if step not in gone]


def _stored(step: Step, written: dict[Step, Value]) -> Step:
    memory = written.get(step)
    if memory is None:
        return step
    return Step(step.op, step.inputs, (memory,), step.attributes, step.layer, step.phase)
