"""differentiate: append the steps that compute gradients, in reverse order of the forward steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from mlcompute.ops.op import Trace, Value


def differentiate(
    trace: Trace,
    seeds: Mapping[Value, Value],
    wanted: Iterable[Value],
    stopped: AbstractSet[Value] = frozenset(),
) -> dict[Value, Value]:
    """Gradients of everything between `wanted` and `seeds`.

    seeds     the gradients to start from, e.g. {loss: ones}; a value both seeded and computed adds up
    wanted    values whose gradient somebody needs; only paths that reach one of them are followed
    stopped   values the gradient does not pass: steps that produced them are left out
    returns   value -> its gradient, for every value on those paths
    """
    forward = list(trace.steps)
    reaches = set(wanted)
    for step in forward:
        if step.op.derivative is not None and not reaches.isdisjoint(step.inputs):
            reaches.update([value for value in step.results if value.is_floating and value not in stopped])
    gradients = {value: seed for value, seed in seeds.items() if value in reaches}
    layer, trace.phase = trace.layer, "gradient"
    for step in reversed(forward):
        if step.op.derivative is None or reaches.isdisjoint(step.inputs):
            continue
        if stopped and all(value in stopped for value in step.results):
            continue
        dy = [gradients.get(value) if value in reaches else None for value in step.results]
        if all(d is None for d in dy):
            continue
        trace.layer = step.layer
        single = len(step.results) == 1
        parts = step.op.derivative(
            dy[0] if single else tuple(dy), step.results[0] if single else step.results, *step.inputs, **step.attributes
        )
        if not isinstance(parts, tuple):
            parts = (parts,)
        for value, part in zip(step.inputs, parts, strict=True):
            if part is None or value not in reaches:
                continue
            gradients[value] = gradients[value] + part if value in gradients else part
    trace.layer = layer
    return gradients
