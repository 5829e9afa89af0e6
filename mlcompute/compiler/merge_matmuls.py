"""merge_matmuls: matmuls of one matrix with several weights become one matmul.

    q = x wqᵀ + bq     k = x wkᵀ + bk     v = x wvᵀ + bv          three matmuls that leave a large device half idle
    y = x [wq wk wv]ᵀ + [bq bk bv]          q, k and v are slices of y, seen in place

It comes before gradients are added, so those of x and of the weights are one matmul each, too: see
`join_slice_gradients`. The weights are copied side by side, which takes memory and, compared with matmuls of many
rows, little time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Step, Value

#: A matmul of more results keeps a device busy by itself.
_MOST_RESULTS = 1 << 23
#: Ops through which a weight or a bias is still seen as itself.
_SEEN_THROUGH = ("reshape", "convert", "stop_gradient")


@dataclass(eq=False)
class _Matmul:
    """x wᵀ, or x wᵀ + bias.

    weight   (outputs, inputs), before it is transposed
    ends     the result, and the reshapes of it that are all anybody reads, each of the one before
    """

    step: Step
    weight: Value
    bias: Value | None
    ends: list[Value]


def merge_matmuls(steps: list[Step], context: Context) -> list[Step]:
    """The same results, from fewer and larger matmuls. Weights of which only some are trained stay apart."""
    run = _Merging(steps, context)
    groups: dict[Hashable, list[_Matmul]] = {}
    for step in steps:
        if step.op.name == "matmul":
            found = run.matmul(step)
            if found is not None:
                key = run.identity(step.inputs[0]), run.trained(found.weight), found.weight.dtype
                groups.setdefault(key, []).append(found)
    replaced: dict[Step, list[Step]] = {}
    for group in groups.values():
        if len({run.identity(matmul.weight) for matmul in group}) == len(group) > 1:
            replaced |= run.merged(group)
    return [new for step in steps for new in replaced.get(step, (step,))] if replaced else steps


class _Merging:
    def __init__(self, steps: list[Step], context: Context) -> None:
        program, request = context.program, context.request
        self.trace, self.index = context.trace, context.index(steps)
        self.least_rows = context.engine.traits.merges_matmuls
        self.named = set(program.values.values())  # somebody may ask for these, or for their gradients
        values = program.values
        self._trained = {values[tensor] for tensor in request.parameters if tensor in values}
        self._identities: dict[Value, Hashable] = {}

    def identity(self, value: Value) -> Hashable:
        """Equal for values that are made of the same one in the same way."""
        found = self._identities.get(value)
        if found is None:
            found = value
            maker = self.index.makers.get(value)
            if maker is not None and (maker.op.is_view or maker.op.name in _SEEN_THROUGH):
                found = maker.op.name, tuple(maker.attributes.items()), self.identity(maker.inputs[0])
            self._identities[value] = found
        return found

    def trained(self, weight: Value) -> bool:
        """Does a gradient reach the parameter that a weight is?"""
        chain = self._chain(weight)
        assert chain is not None
        return all(step.op.name != "stop_gradient" for step in chain) and self._root(weight) in self._trained

    def matmul(self, step: Step) -> _Matmul | None:
        """A matmul with a transposed parameter; None when it is another, or one that is not worth while."""
        x, right = step.inputs
        (y,) = step.results
        transpose = self.index.makers.get(right)
        if transpose is None or transpose.op.name != "transpose" or right.rank != 2 or x.rank < 2:
            return None
        weight = transpose.inputs[0]
        if y.size > _MOST_RESULTS or y.size < self.least_rows * y.shape[-1] or self._chain(weight) is None:
            return None
        bias, ends = None, [y]
        add = self._only_reader(y)
        if add is not None and add.op.name == "add" and add.results[0].shape == y.shape:
            other = add.inputs[1] if add.inputs[0] is y else add.inputs[0]
            if other.shape == (y.shape[-1],) and self._chain(other) is not None:
                bias, ends = other, [add.results[0]]
        while (reader := self._only_reader(ends[-1])) is not None and reader.op.name == "reshape":
            ends.append(reader.results[0])
        return _Matmul(step, weight, bias, ends)

    def merged(self, group: Sequence[_Matmul]) -> dict[Step, list[Step]]:
        """What becomes of the steps of some matmuls: all that is new stands where the first of them was."""
        trace, first, makers = self.trace, group[0].step, self.index.makers
        has_bias = all(matmul.bias is not None for matmul in group)
        if not has_bias:
            for matmul in group:
                if matmul.bias is not None:
                    matmul.bias, matmul.ends = None, [matmul.step.results[0]]
        before = trace.steps, trace.layer, trace.phase
        trace.steps, trace.layer, trace.phase = [], first.layer, first.phase
        weights = ops.transpose(ops.concatenate([self._rematerialized(matmul.weight) for matmul in group], 0))
        biases = [self._rematerialized(matmul.bias) for matmul in group if matmul.bias is not None]
        bias = ops.concatenate(biases, 0) if biases else None
        y = ops.matmul(first.inputs[0], weights)
        y = y if bias is None else y + bias
        depth, axis = self._deepest(group)
        shapes = [matmul.ends[depth].shape for matmul in group]
        stops = list(accumulate(shape[axis] for shape in shapes))
        y = ops.reshape(y, (*shapes[0][:axis], stops[-1], *shapes[0][axis + 1 :]))
        for matmul, shape, stop in zip(group, shapes, stops, strict=True):
            part, end = ops.slice_axis(y, axis, stop - shape[axis], stop), matmul.ends[depth]
            trace.steps[-1] = Step(TABLE["slice"], (y,), (end,), trace.steps[-1].attributes, *_of(matmul.step))
            assert part.shape == end.shape
        replaced: dict[Step, list[Step]] = {}
        for matmul in group:
            gone = [matmul.step, *(makers[end] for end in matmul.ends[: depth + 1])]
            replaced |= {step: [] for step in gone}
        replaced[first] = trace.steps
        trace.steps, trace.layer, trace.phase = before
        return replaced

    def _deepest(self, group: Sequence[_Matmul]) -> tuple[int, int]:
        """How many reshapes may come before the slices, and along which axis these are then taken.

        A slice of columns does not lie row by row, so a reshape of it would be a copy.
        """
        for depth in reversed(range(min(len(matmul.ends) for matmul in group))):
            shapes = [matmul.ends[depth].shape for matmul in group]
            rows, leading = group[0].ends[0].size // group[0].ends[0].shape[-1], shapes[0]
            axis = next((axis for axis in range(len(leading)) if math.prod(leading[:axis]) == rows), None)
            if axis is not None and len({(shape[:axis], shape[axis + 1 :]) for shape in shapes}) == 1:
                return depth, axis
        return 0, group[0].ends[0].rank - 1

    def _only_reader(self, value: Value) -> Step | None:
        """The one step that reads a value, once, and that nobody else can ask for."""
        readers = self.index.readers.get(value, [])
        alone = value not in self.named and len(readers) == 1 and readers[0].inputs.count(value) == 1
        return readers[0] if alone else None

    def _chain(self, value: Value) -> list[Step] | None:
        """The steps that make a weight or a bias of a parameter, the last first; None when it is something else."""
        chain: list[Step] = []
        while value.kind != "parameter":
            maker = self.index.makers.get(value)
            if maker is None or maker.op.name not in _SEEN_THROUGH:
                return None
            chain.append(maker)
            value = maker.inputs[0]
        return chain

    def _root(self, value: Value) -> Value:
        chain = self._chain(value)
        return chain[-1].inputs[0] if chain else value

    def _rematerialized(self, value: Value) -> Value:
        """A weight or a bias of which the steps may stand further below."""
        again = self._root(value)
        for step in reversed(self._chain(value) or []):
            (again,) = self.trace.add(step.op, (again,), step.attributes)
        return again


def _of(step: Step) -> tuple[str, str]:
    return step.layer, step.phase
