"""orient: a transposed product becomes the product of the transposed factors, which kernels read without copying."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mlcompute.ops.op import TABLE, Step, Trace, Value

_MATMUL, _TRANSPOSE = TABLE["matmul"], TABLE["transpose"]


def orient(trace: Trace, keep: Iterable[Value] = ()) -> None:
    """(a b)ᵀ -> bᵀ aᵀ wherever the product is used only transposed; rewrites `trace.steps` in place."""
    transposes = [step for step in trace.steps if step.op is _TRANSPOSE]
    sources = {step.inputs[0] for step in transposes}
    products = {step.results[0] for step in trace.steps if step.op is _MATMUL} & sources
    uses = Counter([value for value in keep if value in products])
    uses.update([value for step in trace.steps for value in step.inputs if value in products])
    turned = {
        step.inputs[0]: step
        for step in transposes
        if uses[step.inputs[0]] == 1 and step.attributes["axes"] == _swapped(len(step.inputs[0].shape))
    }
    if not turned:
        return
    steps: list[Step] = []
    gone = set(turned.values())
    known = {step.results[0]: step for step in transposes if step not in gone}
    for step in trace.steps:
        if step.op is _MATMUL and step.results[0] in turned:
            a, b = (_turned(trace, value, step, steps, known) for value in step.inputs)
            result = turned[step.results[0]].results
            steps.append(Step(step.op, (b, a), result, {}, step.layer, step.phase))
        elif step.op is not _TRANSPOSE or step not in gone:
            steps.append(step)
    trace.steps = steps


def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _turned(trace: Trace, value: Value, step: Step, steps: list[Step], transposes: dict[Value, Step]) -> Value:
    axes = _swapped(len(value.shape))
    before = transposes.get(value)
    if before is not None and before.attributes["axes"] == axes:
        return before.inputs[0]  # turning twice is not turning at all
    result = trace.value(tuple(value.shape[axis] for axis in axes), value.dtype)
    steps.append(Step(_TRANSPOSE, (value,), (result,), {"axes": axes}, step.layer, step.phase))
    return result
