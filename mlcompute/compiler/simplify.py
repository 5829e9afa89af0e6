"""simplify: fewer steps with the same results. Constants are folded, equal steps shared, unused ones dropped."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from mlcompute.ops.op import Array, Step, Trace, Value, run_meaning

#: Folding trades memory for time; beyond this size a constant is cheaper to compute than to keep.
LARGEST_FOLDED = 1 << 20


class Substitution:
    """What became of values that simplification replaced by others."""

    def __init__(self) -> None:
        self._replaced: dict[Value, Value] = {}

    def __setitem__(self, value: Value, by: Value) -> None:
        self._replaced[value] = self[by]

    def __getitem__(self, value: Value) -> Value:
        return self._replaced.get(value, value)


def simplify(trace: Trace, keep: Iterable[Value]) -> Substitution:
    """Rewrite `trace.steps` in place; values in `keep` stay available, possibly under the returned substitutes."""
    substitution = Substitution()
    seen: dict[Hashable, tuple[Value, ...]] = {}
    scalars: dict[Hashable, Value] = {}
    producers: dict[Value, Step] = {}
    steps: list[Step] = []
    #: How often lasting memory was overwritten so far: reading it before and after is not the same step.
    versions: dict[Value, int] = {}
    for step in trace.steps:
        inputs = tuple(_shared_scalar(trace, substitution[value], scalars) for value in step.inputs)
        if inputs != step.inputs:
            step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
        shorter = _identity(step, producers, trace)
        if isinstance(shorter, Value):
            substitution[step.results[0]] = shorter
            continue
        if shorter is not None:
            step = shorter
        if step.op.is_pure:
            key = (*_key(step), tuple(versions.get(value, 0) for value in step.inputs))
            known = seen.get(key)
            if known is None and _foldable(step, trace):
                known = _fold(step, trace)
            if known is not None:
                for value, same in zip(step.results, known, strict=True):
                    substitution[value] = same
                seen[key] = known
                continue
            seen[key] = step.results
        else:
            versions[step.inputs[0]] = versions.get(step.inputs[0], 0) + 1
        for value in step.results:
            producers[value] = step
        steps.append(step)
    trace.steps = drop_unused(steps, [substitution[value] for value in keep])
    return substitution


def drop_unused(steps: list[Step], keep: Iterable[Value]) -> list[Step]:
    """Steps that lead to a kept value or have an effect, in their order."""
    needed = set(keep)
    kept = []
    for step in reversed(steps):
        if not step.op.is_pure or any(value in needed for value in step.results):
            needed.update(step.inputs)
            kept.append(step)
    kept.reverse()
    return kept


def _shared_scalar(trace: Trace, value: Value, scalars: dict[Hashable, Value]) -> Value:
    """One value per distinct scalar constant, so that steps which mention it compare equal."""
    if value.kind != "constant" or value.shape:
        return value
    return scalars.setdefault((value.dtype, trace.constants[value].tobytes()), value)


def _key(step: Step) -> tuple[Hashable, ...]:
    return step.op.name, step.inputs, tuple(sorted(step.attributes.items()))


def _foldable(step: Step, trace: Trace) -> bool:
    if not step.inputs or any(value.kind != "constant" for value in step.inputs):
        return False
    # A repeated scalar is a view of a few bytes; folding it would only make it large.
    return step.op.name != "broadcast" and sum(value.nbytes for value in step.results) <= LARGEST_FOLDED


def _fold(step: Step, trace: Trace) -> tuple[Value, ...]:
    with np.errstate(all="ignore"):
        arrays = run_meaning(step, [trace.constants[value] for value in step.inputs])
    return tuple(trace.constant(array) for array in arrays)


def _scalar(trace: Trace, value: Value) -> Array | None:
    return trace.constants[value] if value.kind == "constant" and not value.shape else None


def _identity(step: Step, producers: dict[Value, Step], trace: Trace) -> Value | Step | None:
    """A value the step only repeats, or a shorter step that does the same; None when it must stay."""
    name, inputs = step.op.name, step.inputs
    if name in ("reshape", "broadcast") and inputs[0].shape == step.results[0].shape:
        return inputs[0]
    if name == "stop_gradient":  # its work was done when gradients were taken
        return inputs[0]
    if name == "multiply":
        for number, other in (inputs, inputs[::-1]):
            scalar = _scalar(trace, number)
            if scalar is not None and scalar == 1 and other.shape == step.results[0].shape:
                return other
    if name == "divide":
        scalar = _scalar(trace, inputs[1])
        if scalar is not None and scalar == 1 and inputs[0].shape == step.results[0].shape:
            return inputs[0]
    before = producers.get(inputs[0]) if inputs else None
    if before is None or before.op.name != name:
        return None
    source = before.inputs[0]
    if name == "negate":
        return source
    if name == "reshape":
        shape = step.attributes["shape"]
        return source if source.shape == shape else _step(step, source, shape=shape)
    if name == "transpose":
        first, second = before.attributes["axes"], step.attributes["axes"]
        axes = tuple(first[axis] for axis in second)
        return source if axes == tuple(range(len(axes))) else _step(step, source, axes=axes)
    return None


def _step(step: Step, source: Value, **attributes: Any) -> Step:
    return Step(step.op, (source,), step.results, attributes, step.layer, step.phase)
