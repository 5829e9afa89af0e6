"""Operands: what a name in a model stands for while it is imported, and how it becomes a value of ops."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.onnx.budget import Budget, LimitedTrace, bytes_needed, operations
from mlcompute.onnx.rows import Answer, Call, Row
from mlcompute.onnx.types import carried, constant_type, element_type, is_carried
from mlcompute.onnx.uniform import CopiedTensor
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.ops.op import Array, Shape, Trace, Value, run_meaning
from mlcompute.runtime.tensor_state import current_values
from mlcompute.tensor import Tensor


@dataclass(eq=False)
class Known:
    """Numbers that do not change: constants, and everything computed from constants and shapes."""

    array: Array
    name: str = ""
    #: One number, repeated as a shape in the file says: how models without numbers say "a weight of this shape".
    is_fill: bool = False
    #: What computed it from the shape of a value, and as which result: then it may be another for a smaller batch.
    made: tuple[Use, int] | None = None


@dataclass(eq=False)
class Weight:
    """A tensor with data, updated by the optimizer unless every use of it is a frozen one."""

    tensor: Tensor
    shape: Shape
    name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tensor.descriptor.data_type.numpy

    @property
    def array(self) -> Array:
        data = current_values(self.tensor)  # large, and only looked at
        assert data is not None
        return data.reshape(self.shape)


@dataclass(eq=False)
class Source:
    """A tensor that is fed or computed by a layer; the tensor may carry it with another shape."""

    tensor: Tensor
    shape: Shape
    dtype: np.dtype[Any]
    name: str


@dataclass(eq=False)
class Derived:
    """A result of operators on weights only, computed inside every layer that uses it: gradients reach the weights."""

    use: Use
    index: int
    shape: Shape
    dtype: np.dtype[Any]


@dataclass(eq=False)
class Listed:
    """A sequence; it exists only while importing."""

    items: list[Operand]


@dataclass(eq=False)
class Failed:
    """What a node that cannot be imported would have given, or something no operator can use; `reason` says why."""

    reason: str = ""


Operand = Known | Weight | Source | Derived | Listed | Failed


@dataclass(eq=False)
class Use:
    """One use of an operator: its row, attributes and operands (None where one was left out)."""

    row: Row
    version: int
    attributes: Mapping[str, Any]
    operands: Sequence[Operand | None]
    names: Sequence[str]
    output_count: int

    def is_known(self) -> bool:
        return all(operand is None or isinstance(operand, Known) for operand in self.operands)

    def has_source(self) -> bool:
        return any(isinstance(operand, Source) for operand in self.operands)

    def describe(self, scope: Scope) -> list[Answer]:
        """The operator in ops, in a scope that says what its operands are."""
        answers = self.row.function(Call(self, scope))
        if isinstance(answers, (Value, np.ndarray)) or answers is None:
            return [answers]
        return list(answers)

    @functools.cached_property
    def weights(self) -> dict[Tensor, bool]:
        """The tensors with data it reads -> are they used where weights are trained?

        Kept, because what is derived may be used many times, and what it is derived from as well.
        """
        found: dict[Tensor, bool] = {}
        for index, operand in enumerate(self.operands):
            if isinstance(operand, Weight):
                trained = index not in self.row.frozen
                found[operand.tensor] = found.get(operand.tensor, False) or trained
            elif isinstance(operand, Derived):
                for tensor, trained in operand.use.weights.items():
                    found[tensor] = found.get(tensor, False) or (trained and index not in self.row.frozen)
        return found

    def sources(self) -> list[Source]:
        unique = {id(operand.tensor): operand for operand in self.operands if isinstance(operand, Source)}
        return list(unique.values())


def _numbers(weight: Weight) -> Array:
    """A weight's numbers; one number repeated stays one number."""
    tensor = weight.tensor
    numbers = tensor.numbers if isinstance(tensor, CopiedTensor) else None
    if numbers is None:
        return weight.array
    return np.broadcast_to(numbers, weight.shape) if numbers.ndim == 0 else numbers.reshape(weight.shape)


def known_array(operand: Operand, budget: Budget | None = None) -> Array | None:
    """An operand's numbers when the model determines them; weights count with the numbers they have now."""
    if isinstance(operand, Weight):
        return _numbers(operand)
    if isinstance(operand, Known):
        return operand.array
    if isinstance(operand, Derived):
        return folded(operand.use, budget)[operand.index]
    return None


@dataclass(eq=False)
class Scope:
    """Where a use is described: a trace, and what sources and weights are in it.

    shapes_only   constants and what is derived from weights need no numbers
    exact   constants keep the model's own types: nothing is carried, everything is folded
    float_type   what floating constants become; as they are carried if not given
    fixed   the numbers of an input that must be known, if the caller has given them
    shape_now   the shape of a source in a smaller batch than the model was imported for; None: as imported
    """

    trace: Trace
    source: Callable[[Source], Value]
    weight: Callable[[Weight], Value]
    exact: bool = False
    shapes_only: bool = False
    training: bool = False
    uniform: Callable[[Value, Shape], Value] | None = None
    fixed: Callable[[Source], Array | None] = lambda source: None
    float_type: np.dtype[Any] | None = None
    batch: tuple[int, int] | None = None
    shape_now: Callable[[Source], Shape] | None = None
    known_arrays: dict[int, Array] = field(default_factory=dict)
    made: dict[int, Value] = field(default_factory=dict)
    _derived: dict[int, list[Answer]] = field(default_factory=dict)

    def value_of(self, operand: Operand) -> Value:
        key = id(operand)
        if key not in self.made:
            self.made[key] = self._make(operand)
        return self.made[key]

    def _make(self, operand: Operand) -> Value:
        if isinstance(operand, Known):
            return self._constant(self.known(operand))
        if isinstance(operand, Weight):
            return self.weight(operand)
        if isinstance(operand, Source):
            return self.source(operand)
        if isinstance(operand, Derived) and self.shapes_only:
            return self.trace.value(operand.shape, operand.dtype)
        if isinstance(operand, Derived):
            key = id(operand.use)
            if key not in self._derived:
                self._derived[key] = operand.use.describe(self)
            answer = self._derived[key][operand.index]
            assert answer is not None
            return answer if isinstance(answer, Value) else self._constant(answer)
        if isinstance(operand, Listed):
            raise ShapeError("a sequence where a tensor is expected")
        raise ShapeError(operand.reason or "the operand was not imported")

    def numbers(self, operand: Operand | None) -> Array | None:
        """The numbers of an operand where they are known at import, or the caller gives them."""
        if operand is None or isinstance(operand, Known):
            return self.peek(operand)
        found = known_array(operand, getattr(self.trace, "budget", None))
        return self.fixed(operand) if found is None and isinstance(operand, Source) else found

    def peek(self, operand: Operand | None) -> Array | None:
        """The numbers of a constant; None of anything else."""
        return self.known(operand) if isinstance(operand, Known) else None

    def known(self, operand: Known) -> Array:
        """The numbers of a constant in the batch that is described."""
        return operand.array if self.shape_now is None else known_now(operand, self.shape_now, self.known_arrays)

    def _constant(self, array: Array) -> Value:
        if self.exact:
            assert isinstance(self.trace, LimitedTrace)
            return self.trace.given(array)
        to = constant_type(array.dtype)
        if self.shapes_only:
            return self.trace.value(array.shape, to, "constant")
        if self.float_type is not None and is_floating(to):
            to = self.float_type
        if array.dtype != to:
            with np.errstate(all="ignore"):
                array = array.astype(to)
        return self.trace.constant(array)


def known_now(operand: Known, shape_now: Callable[[Source], Shape], found: dict[int, Array]) -> Array:
    """The numbers of a constant; those that were computed from shapes are computed again for other shapes.

    found   what was computed for these shapes already, by operand
    """
    if operand.made is None:
        return operand.array
    if id(operand) not in found:
        use, index = operand.made
        array = folded(use, shape_now=shape_now, known=found)[index]
        assert array is not None
        found[id(operand)] = array
    return found[id(operand)]


def folded(
    use: Use,
    budget: Budget | None = None,
    shape_now: Callable[[Source], Shape] | None = None,
    known: dict[int, Array] | None = None,
) -> list[Array | None]:
    """A use on operands that are all known (weights as they are now), by the NumPy meanings of its ops.

    budget      what an import may still take; without one, nothing is refused
    shape_now   shapes of sources the use asks for the shape of; without it there are none
    known       what was computed for these shapes already, by operand
    """
    trace = LimitedTrace(budget if budget is not None else Budget(1 << 62, 1 << 62))

    def source(operand: Source) -> Value:
        return _no_source(operand) if shape_now is None else trace.value(shape_now(operand), operand.dtype)

    # What weights have a part in is carried, as they are: a cast of one to double is the weight itself.
    exact = not use.weights
    scope = Scope(trace, source, lambda weight: trace.given(_numbers(weight)), exact=exact, shape_now=shape_now)
    scope.known_arrays = {} if known is None else known
    answers = use.describe(scope)
    arrays: dict[Value, Array] = dict(trace.constants)
    left = Counter(value for step in trace.steps for value in step.inputs)
    left.update(answer for answer in answers if isinstance(answer, Value))
    taken: dict[Value, int] = {}
    with np.errstate(all="ignore"):
        for step in trace.steps:
            trace.budget.spend_work(operations(step))
            size = bytes_needed(step)
            trace.afford(size)
            results = run_meaning(step, [arrays[value] for value in step.inputs])
            arrays.update(zip(step.results, results, strict=True))
            taken[step.results[0]] = size
            for value in step.inputs:
                left[value] -= 1
                if not left[value]:
                    del arrays[value]
                    if step.op.is_view:  # the memory stays in use, under another name
                        taken[step.results[0]] += taken.pop(value, 0)
                    else:
                        trace.made -= taken.pop(value, 0)
    return [arrays[answer] if isinstance(answer, Value) else answer for answer in answers]


def _no_source(source: Source) -> Value:
    raise DataError(f"'{source.name}' is not known at import")


def sketch(
    use: Use, fixed: Callable[[Source], Array | None], budget: Budget
) -> tuple[list[Answer], dict[int, Operand]]:
    """What a use gives, in shapes and types, and which value stands for which operand: a result may be one."""
    trace = LimitedTrace(budget)

    def source(operand: Source) -> Value:
        return trace.value(operand.shape, operand.dtype, "input", operand.name)

    def weight(operand: Weight) -> Value:
        return trace.value(operand.shape, carried(operand.dtype), "parameter", operand.name)

    scope = Scope(trace, source, weight, fixed=fixed, shapes_only=True)
    answers = use.describe(scope)
    same = {}
    for operand in use.operands:
        if operand is not None and id(operand) in scope.made:
            same[id(scope.made[id(operand)])] = operand
    for answer in answers:
        if isinstance(answer, Value) and not is_carried(answer.dtype):
            raise DataError(f"{use.row.name}: gives {answer.dtype}, which no tensor can hold")
    return answers, same


def type_of(operand: Operand | None) -> Any:
    """An operand's type, as ONNX's function builders want to know it."""
    from onnx import TypeProto, helper

    if operand is None or isinstance(operand, (Failed, Listed)):
        return TypeProto()
    if isinstance(operand, Known):
        return helper.make_tensor_type_proto(element_type(operand.array.dtype), operand.array.shape)
    return helper.make_tensor_type_proto(element_type(operand.dtype), operand.shape)
