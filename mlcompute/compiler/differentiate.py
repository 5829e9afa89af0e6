"""differentiate: append the steps that compute gradients, in reverse order of the forward steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from mlcompute.ops.op import Trace, Value, no_derivative


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
        if step.op.name != "stop_gradient" and not reaches.isdisjoint(step.inputs):
            reaches.update([value for value in step.results if value.is_floating and value not in stopped])
    gradients = {value: seed for value, seed in seeds.items() if value in reaches}
    layer, trace.phase = trace.layer, "gradient"
    for step in reversed(forward):
        derivative, inputs, results = step.op.derivative, step.inputs, step.results
        if reaches.isdisjoint(inputs):
            continue
        if stopped and all(value in stopped for value in results):
            continue
        dy = tuple([gradients.get(value) if value in reaches else None for value in results])
        if dy.count(None) == len(dy):
            continue
        if derivative is None:
            raise no_derivative(step.layer, step.op.name)
        trace.layer = step.layer
        if len(results) == 1:
            parts = derivative(dy[0], results[0], *inputs, **step.attributes)
        else:
            parts = derivative(dy, results, *inputs, **step.attributes)
        if not isinstance(parts, tuple):
            parts = (parts,)
        for value, part in zip(inputs, parts, strict=True):
            if part is not None and value in reaches:
                known = gradients.get(value)
                gradients[value] = part if known is None else known + part
    trace.layer = layer
    return gradients
