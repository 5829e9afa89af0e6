"""differentiate: append the steps that compute gradients, in reverse order of the forward steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mlcompute.ops.matmul_and_convolution import MatmulOfTransposed
from mlcompute.ops.op import TABLE, Kind, PatternStep, Step, Trace, Value, distinct_items, no_derivative

_MATMUL, _TRANSPOSE, _MATMUL_OF_TRANSPOSED = TABLE["matmul"], TABLE["transpose"], MatmulOfTransposed()


def differentiate(
    trace: Trace,
    seeds: Mapping[Value, Value],
    wanted: Iterable[Value],
    stopped: AbstractSet[Value] = frozenset(),
    read: AbstractSet[Value] | None = None,
) -> dict[Value, Value]:
    """Gradients of everything between `wanted` and `seeds`.

    seeds     the gradients to start from, e.g. {loss: ones}; a value both seeded and computed adds up
    wanted    values whose gradient somebody needs; only paths that reach one of them are followed
    stopped   values the gradient does not pass: steps that produced them are left out
    read      values besides these whose gradients are asked for, so that others need not have one; None: all are
    returns   value -> its gradient, for every value on those paths
    """
    forward = list(trace.steps)
    reaches = set(wanted)
    joined = {} if read is None else _with_transposes(forward, [reaches, seeds, stopped, read])
    for step in forward:
        if not reaches.isdisjoint(step.inputs) and step.op.name != "stop_gradient":
            for value in step.results:
                if value.is_floating and value not in stopped:
                    reaches.add(value)
    gradients = {value: seed for value, seed in seeds.items() if value in reaches}
    derivatives = _Derivatives(trace)
    layer, trace.phase = trace.layer, "gradient"
    for step in reversed(forward):
        inputs, results = step.inputs, step.results
        if reaches.isdisjoint(inputs):
            continue
        if stopped and all(value in stopped for value in results):
            continue
        # Only what reaches a wanted value has a gradient.
        dy = (gradients.get(results[0]),) if len(results) == 1 else tuple([gradients.get(value) for value in results])
        if dy.count(None) == len(dy):
            continue
        trace.layer = step.layer
        if step.op is _MATMUL and step in joined:
            step = joined[step]
            inputs = step.inputs
        for value, part in zip(inputs, derivatives.of(step, dy), strict=True):
            if part is not None and value in reaches:
                known = gradients.get(value)
                gradients[value] = part if known is None else known + part
    trace.layer = layer
    return gradients


def _with_transposes(forward: Sequence[Step], known: Sequence[Container[Value]]) -> dict[Step, Step]:
    """Matmuls by transposed matrices -> both as one step, where nobody knows or reads the transposed matrix otherwise.

    Else the gradient of a layer's weights would be computed transposed, and be transposed back.
    """
    matrices = {
        step.results[0]: step.inputs[0]
        for step in forward
        if step.op is _TRANSPOSE
        and step.attributes["axes"] == (1, 0)
        and not any(step.results[0] in values for values in known)
    }
    readers: dict[Value, Step | None] = {}
    reads_none = matrices.keys().isdisjoint
    for step in forward:
        if not reads_none(step.inputs):
            for value in matrices.keys() & step.inputs:
                is_factor = step.op is _MATMUL and step.inputs[0] is not value and value not in readers
                readers[value] = step if is_factor else None
    joined: dict[Step, Step] = {}
    kinds: dict[Kind, Kind] = {}
    for value, product in readers.items():
        if product is not None:
            inputs, kind = (product.inputs[0], matrices[value]), product.kind
            both = joined[product] = Step(_MATMUL_OF_TRANSPOSED, inputs, product.results, {}, product.layer)
            if kind is not None:
                both.kind = kinds.setdefault(kind, Kind(_MATMUL_OF_TRANSPOSED, {}, kind.types))
    return joined


@dataclass(eq=False)
class _Pattern:
    """The steps of a derivative, on numbers of values: first those it is given, then its results in order.

    steps    on places of values
    parts    the gradients it comes to
    numbers  scalar constants that its steps mention besides what they are given
    """

    steps: list[PatternStep]
    parts: list[int | None]
    numbers: list[Value]


class _Derivatives:
    """Derivatives of steps. Large graphs have many steps of one op on the same types: they are described once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._patterns: dict[Hashable, _Pattern | None] = {}

    def of(self, step: Step, dy: tuple[Value | None, ...]) -> Sequence[Value | None]:
        """A gradient per input; None where none flows."""
        given = dy + step.results + step.inputs
        key = self._key(step, given)
        try:
            pattern = self._patterns.get(key, ())
        except TypeError:  # attributes that cannot be compared
            return self._described(step, dy)
        if pattern is None or len(set(given)) < len(given):
            return self._described(step, dy)
        if pattern:
            values = [*given, *pattern.numbers]
            self._trace.repeat(pattern.steps, values)
            return [None if place is None else values[place] for place in pattern.parts]
        start = len(self._trace.steps)
        parts = self._described(step, dy)
        self._patterns[key] = self._pattern(given, self._trace.steps[start:], parts)
        return parts

    def _key(self, step: Step, given: tuple[Value | None, ...]) -> Hashable:
        """What is the same for steps whose derivatives are; `given` begins with the gradients of the results."""
        kind, dy, y = step.kind, given[0], step.results[0]
        if dy is not None and dy.shape == y.shape and dy.dtype == y.dtype and len(step.results) == 1:
            for value in given:
                if value is None or value.kind == "constant":
                    break
            else:
                if kind is not None:
                    return kind
        # The same constant may be an input here, and only be mentioned there.
        types = [value if value is None or value.kind == "constant" else (value.shape, value.dtype) for value in given]
        return step.op, *types, *distinct_items(step.attributes)

    def _described(self, step: Step, dy: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        derivative, results = step.op.derivative, step.results
        if derivative is None:
            raise no_derivative(step.layer, step.op.name)
        if len(results) == 1:
            parts = derivative(dy[0], results[0], *step.inputs, **step.attributes)
        else:
            parts = derivative(dy, results, *step.inputs, **step.attributes)
        return parts if isinstance(parts, tuple) else (parts,)

    def _pattern(
        self, given: tuple[Value | None, ...], steps: Sequence[Step], parts: Sequence[Value | None]
    ) -> _Pattern | None:
        """What was described; None where that cannot be repeated with other values."""
        made = [value for step in steps for value in step.results]
        read = {value for step in steps for value in step.inputs}.union([part for part in parts if part is not None])
        numbers = list(read.difference(given, made))
        if any(value.kind != "constant" or value.shape for value in numbers):
            return None
        place = {value: number for number, value in enumerate((*given, *numbers, *made))}
        repeated: list[PatternStep] = []
        for step in steps:
            if len(step.results) != 1 or step.kind is None:
                return None
            inputs = _taking([place[value] for value in step.inputs])
            repeated.append((step.kind, inputs, step.results[0].shape, step.results[0].dtype))
        return _Pattern(repeated, [None if part is None else place[part] for part in parts], numbers)


def _taking(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the elements at some places out of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])
