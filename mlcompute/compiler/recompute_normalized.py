"""recompute_normalized: the gradient pass computes normalized values again instead of keeping them.

    forward     n, m, v = normalize(x)     y = relu(n scale + shift)
    gradient    n' = (x - m) / sqrt(v + epsilon)     y' = relu(n' scale + shift)

x was written by the step that made it, whatever follows; n need never be, where the device fuses elementwise ops with
normalisations (`Traits.fuses_normalization`). What the gradient needs of y (the sign, say) follows from n' without
reading y. Where the device's mean is more exact than the one it stores, n' is not n to the last bit; it is used in all
styles of execution, so these agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlcompute.compiler.context import Context
from mlcompute.compiler.conversion import conversion
from mlcompute.compiler.fuse_normalization import CORES, NORMALIZATIONS
from mlcompute.compiler.index import Index
from mlcompute.ops.op import TABLE, Step, Trace, Value

#: Elementwise ops between n and what is computed from it again.
_MOST_OPS = 16
#: What asks for the very numbers: the gradient of a maximum looks for elements that equal it.
_EXACT = ("equal", "not_equal")


def recompute_normalized(steps: list[Step], context: Context) -> list[Step]:
    """Reads of normalised values in the gradient pass, and of what follows from them alone, become reads of x."""
    index = context.index(steps)
    if index.op_names.isdisjoint(NORMALIZATIONS):
        return steps
    readable = context.readable
    inserted: dict[Step, list[Step]] = {}  # before which step
    replaced: dict[Step, dict[Value, Value]] = {}  # reader -> what it reads instead
    for step in steps:
        if step.op.name in NORMALIZATIONS and step.phase == "forward" and step.results[0] not in readable:
            found = _Recomputation.of(step, index, context.trace)
            if found is not None:
                inserted.setdefault(found.readers[0], []).extend(found.steps)
                for reader in found.readers:
                    replaced.setdefault(reader, {}).update(found.copies)
    if not inserted:
        return steps
    rewritten: list[Step] = []
    for step in steps:
        rewritten += inserted.get(step, ())
        copies = replaced.get(step)
        if copies:
            inputs = tuple(copies.get(value, value) for value in step.inputs)
            step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
        rewritten.append(step)
    return rewritten


def renormalized(step: Step, x: Value, trace: Trace) -> list[Step]:
    """Steps of the gradient pass that compute a normalised value again from its source x, mean and variance.

    They compute in the statistics' data type, as the normalisation does.
    """
    n, mean, variance = step.results
    steps: list[Step] = []

    def add(name: str, *inputs: Value) -> Value:
        result = trace.value(inputs[0].shape, inputs[0].dtype)
        steps.append(Step(TABLE[name], inputs, (result,), {}, step.layer, "gradient"))
        return result

    def convert(value: Value, to: np.dtype[Any]) -> Value:
        if value.dtype == to:
            return value
        result = trace.value(value.shape, to)
        steps.append(replace(conversion(value, result, step), phase="gradient"))
        return result

    root = add("rsqrt", add("add", variance, trace.number(step.attributes["epsilon"], variance.dtype)))
    convert(add("multiply", add("subtract", convert(x, mean.dtype), mean), root), n.dtype)
    return steps


@dataclass
class _Recomputation:
    """What the gradient pass computes again after one normalisation.

    readers   the steps that read it, in order
    copies    value of the forward pass -> the same in the gradient pass
    """

    steps: list[Step]
    readers: list[Step]
    copies: dict[Value, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step, index: Index, trace: Trace) -> _Recomputation | None:
        """None where nothing is gained: n is read by others than elementwise steps, and so must lie in memory."""
        (x,), (n, mean, _) = step.inputs, step.results
        following = _elementwise_closure(step, index)
        if following is None or x.kind not in ("temporary", "input") or x.dtype != mean.dtype:
            return None
        readers = {
            reader: index.positions[reader]
            for value in (n, *(each.results[0] for each in following))
            for reader in index.readers.get(value, ())
            if reader.phase == "gradient" and (reader.op.family == "elementwise" or reader.op.name in CORES)
            if reader.op.name not in _EXACT
        }
        if not any(reader.phase == "gradient" for reader in index.readers.get(n, ())):
            return None
        run = cls([], sorted(readers, key=lambda reader: readers[reader]))
        wanted = {value for reader in readers for value in reader.inputs}
        run.steps += renormalized(step, x, trace)
        run.copies[n] = run.steps[-1].results[0]
        for each in _needed(following, wanted):
            (value,) = each.results
            copy = run.copies[value] = trace.value(value.shape, value.dtype)
            inputs = tuple(run.copies.get(source, source) for source in each.inputs)
            run.steps.append(Step(each.op, inputs, (copy,), each.attributes, each.layer, "gradient"))
        return run


def _elementwise_closure(step: Step, index: Index) -> list[Step] | None:
    """The elementwise forward steps that follow from a normalised value and from values smaller than it, in order.

    None if others than elementwise steps read the normalised value.
    """
    n = step.results[0]
    values = {n}
    found: list[Step] = []
    for reader in index.readers.get(n, ()):
        if not (reader.op.family == "elementwise" or (reader.phase == "gradient" and reader.op.name in CORES)):
            return None
    pending = [n]
    while pending and len(found) < _MOST_OPS:
        for reader in index.readers.get(pending.pop(), ()):
            is_one = reader.op.family == "elementwise" and reader.op.is_pure and reader.phase == "forward"
            others = [value for value in reader.inputs if value not in values]
            if is_one and reader not in found and all(_is_small_and_persistent(value, n, index) for value in others):
                found.append(reader)
                values.add(reader.results[0])
                pending.append(reader.results[0])
    return sorted(found, key=lambda each: index.positions[each])


def _is_small_and_persistent(value: Value, n: Value, index: Index) -> bool:
    """A parameter, a view of one or a constant with fewer elements, which the gradient pass can read as well."""
    return value.size < n.size and index.base(value).kind in ("parameter", "constant", "scalar")


def _needed(steps: list[Step], wanted: set[Value]) -> list[Step]:
    """Those that lead to what is wanted."""
    wanted, needed = set(wanted), []
    for step in reversed(steps):
        if step.results[0] in wanted:
            needed.append(step)
            wanted.update(step.inputs)
    return needed[::-1]
