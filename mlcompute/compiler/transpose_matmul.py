"""transpose_matmul: a transposed matmul becomes the matmul of the transposed operands, which kernels read in place."""

from __future__ import annotations

import functools

from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Step, Trace, Value

_MATMUL, _TRANSPOSE = TABLE["matmul"], TABLE["transpose"]


def transpose_matmul(steps: list[Step], context: Context) -> list[Step]:
    """(a b)ᵀ -> bᵀ aᵀ wherever a matmul is used only transposed, in every style alike."""
    transposes = [step for step in steps if step.op is _TRANSPOSE]
    swapped = {
        source: step
        for step in transposes
        if (source := step.inputs[0]).kind == "temporary" and step.attributes["axes"] == _swapped(source.rank)
    }
    products = {step.results[0] for step in steps if step.op is _MATMUL and step.results[0] in swapped}
    if not products:
        return steps
    products -= context.readable
    swapped = {source: step for source, step in swapped.items() if source in products}
    if not swapped:
        return steps
    is_elsewhere = frozenset(swapped).isdisjoint
    for step in [step for step in steps if not is_elsewhere(step.inputs)]:
        for value in step.inputs:
            if swapped.get(value, step) is not step:
                del swapped[value]
    if not swapped:
        return steps
    gone = set(swapped.values())
    known = {step.results[0]: step for step in transposes if step not in gone}
    rewritten: list[Step] = []
    for step in steps:
        op = step.op
        if op is _MATMUL and step.results[0] in swapped:
            a, b = [_transposed(context.trace, value, step, rewritten, known) for value in step.inputs]
            result = swapped[step.results[0]].results
            rewritten.append(Step(op, (b, a), result, step.attributes, step.layer, step.phase))
        elif op is not _TRANSPOSE or step not in gone:
            rewritten.append(step)
    return rewritten


@functools.cache
def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _transposed(trace: Trace, value: Value, step: Step, steps: list[Step], transposes: dict[Value, Step]) -> Value:
    axes = _swapped(len(value.shape))
    before = transposes.get(value)
    if before is not None and before.attributes["axes"] == axes:
        return before.inputs[0]  # two transposes cancel
    result = trace.value((*value.shape[:-2], value.shape[-1], value.shape[-2]), value.dtype)
    steps.append(Step(_TRANSPOSE, (value,), (result,), {"axes": axes}, step.layer, step.phase))
    return result
