"""Builders for elementwise operations: activations, arithmetic, data types; and for matmul."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.building.builder import (
    ACTIVATIONS,
    Operand,
    build,
    chosen,
    constant_like,
    expect_rank,
    filled,
    label_constants,
    number_or_tensor,
    own_layer,
)
from mlcompute.building.choices import AnyActivationName, ArithmeticName, ComparisonName
from mlcompute.building.contents import undone_on_error
from mlcompute.enums import ArithmeticOperation, ComparisonOperation, DataType, SoftmaxOperation
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.activation import ActivationDescriptor, ActivationLayer
from mlcompute.layers.arguments import axis_of, class_axis_of
from mlcompute.layers.arithmetic import ArithmeticLayer
from mlcompute.layers.cast import CastLayer
from mlcompute.layers.comparison import ComparisonLayer
from mlcompute.layers.cosine_similarity import CosineSimilarityLayer
from mlcompute.layers.factories import named
from mlcompute.layers.matmul import MatMulDescriptor, MatMulLayer
from mlcompute.layers.prelu import PReLULayer
from mlcompute.layers.selection import SelectionLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_OPERATIONS = {
    operation.name.lower(): operation for operation in ArithmeticOperation if operation.name not in ("COUNT", "INVALID")
}
_COMPARISONS = {
    operation.name.lower(): operation for operation in ComparisonOperation if operation.name not in ("COUNT", "INVALID")
}
#: Operations whose operands may change places.
_COMMUTATIVE = {"add", "multiply", "min", "max"}
#: The comparison that says the same with its operands exchanged.
_EXCHANGED: dict[ComparisonName, ComparisonName] = {
    "equal": "equal",
    "not_equal": "not_equal",
    "less": "greater",
    "greater": "less",
    "less_or_equal": "greater_or_equal",
    "greater_or_equal": "less_or_equal",
}
#: Activations without constants of their own would have nothing to compute with.
_ALL_ACTIVATIONS = {
    **ACTIVATIONS,
    "clamp": ActivationLayer.clamp,
    "linear": ActivationLayer.linear,
    "relun": ActivationLayer.relun,
    "threshold": ActivationLayer.threshold,
}


def activation(
    self: Graph, x: Tensor, kind: AnyActivationName | ActivationDescriptor = "relu", *, name: str = "", **constants: Any
) -> Tensor:
    """One function of every element.   x   ->   like x

    kind       the name of one of ActivationLayer's class methods, or a descriptor
    constants  what that class method takes, e.g. negative_slope=0.2 for "leaky_relu", exact=True for "gelu"

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.activation(graph.input((2, 3), "x"), "leaky_relu", negative_slope=0.2)
    >>> graph.layer("leaky_relu1").descriptor.a
    0.2
    """
    who = f"{type(self).__name__}.activation"
    if isinstance(kind, ActivationDescriptor):
        layer, word = ActivationLayer(kind), kind.activation_type.name.lower()
        if constants:
            raise TypeError(f"{who}: a descriptor has its constants, {', '.join(constants)} cannot be given too")
    else:
        make: Any = chosen(who, "kind", _ALL_ACTIVATIONS, kind, own_layer(kind))
        try:
            layer, word = make(**constants), kind
        except TypeError as error:
            if "unexpected keyword" in str(error) or "missing" in str(error):
                raise TypeError(f"{who}: {kind!r}: {error}") from None
            raise
    return build(self, layer, [x], name, word)


def prelu(
    self: Graph,
    x: Tensor,
    *,
    slope: float = 0.25,
    per_channel: bool = False,
    dimension: int | None = None,
    slopes: Tensor | None = None,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """x where positive, else a trained slope times x.   x   ->   like x

    slope        what the slopes start at
    per_channel  one slope per channel instead of one for all
    dimension    the axis of the channels; by default where the features are: axis 1, the last of sequences
    slopes       an existing tensor, of one element or one per channel
    """
    shape = expect_rank(self, "prelu", x, range(1, 16), "at least one axis").descriptor.shape
    axis = dimension
    if axis is None:
        known = state_of(x).feature_axis
        axis = known if known is not None else min(1, len(shape) - 1)
    if slopes is None:
        count = shape[axis_of(f"{type(self).__name__}.prelu", axis, len(shape))] if per_channel else 1
        slopes = filled(slope, count, like=x)
    return build(self, PReLULayer(slopes, axis), [x], name, "prelu", updates=updates)


def cast(self: Graph, x: Tensor, data_type: DataType, *, name: str = "") -> Tensor:
    """x in another data type; gradients pass between floating types.   x   ->   like x

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.cast(graph.input((2, 3), "x"), mlc.DataType.INT32).descriptor
    int32[2, 3]
    """
    return build(self, CastLayer(data_type), [x], name, "cast")


def cosine_similarity(
    self: Graph, x: Tensor, y: Tensor, *, dimension: int = 1, epsilon: float = 1e-8, name: str = ""
) -> Tensor:
    """The cosine of the angle between vectors along one axis.   x, y (n, *, d, *)   ->   (n, *, *)"""
    return build(self, CosineSimilarityLayer(dimension, epsilon), [x, y], name, "cosine_similarity")


def softmax(self: Graph, x: Tensor, *, dimension: int | None = None, logarithm: bool = False, name: str = "") -> Tensor:
    """e^x / sum e^x along one axis, or its logarithm.   x   ->   like x

    Not before a softmax cross entropy loss, which takes the softmax itself.

    dimension  by default where the features are: axis 1, and the last of sequences (n, length, features)
    """
    if dimension is None:
        shape = expect_rank(self, "softmax", x, range(1, 16), "at least one axis").descriptor.shape
        dimension = class_axis_of(shape, state_of(x).feature_axis)
        if dimension is None:
            raise ShapeError(
                f"{type(self).__name__}.softmax: along axis 1 or axis 2 of {shape}?",
                source=f"'{x.label}'",
                fix="say it: dimension=2 for sequences (n, length, features), 1 for (n, features, length)",
            )
    operation = SoftmaxOperation.LOG_SOFTMAX if logarithm else SoftmaxOperation.SOFTMAX
    return build(self, SoftmaxLayer(operation, dimension), [x], name, "softmax")


def _on_two(kind: Any, self: Graph, x: Operand, y: Operand, *, name: str = "") -> Tensor:
    return self.arithmetic(kind, x, y, name=name)


add = named(_on_two, "add", "x + y, with broadcasting.")
subtract = named(_on_two, "subtract", "x - y, with broadcasting.")
multiply = named(_on_two, "multiply", "x y, element by element, with broadcasting.")
divide = named(_on_two, "divide", "x / y, with broadcasting.")


def arithmetic(self: Graph, kind: ArithmeticName, x: Operand, y: Operand | None = None, *, name: str = "") -> Tensor:
    """Any operation of ArithmeticLayer by its name in small letters: "sqrt", "exp", "max", "pow" ...

    One of two operands may be a number, which the layer keeps, or an array of constants. Operands of two types become
    one of the wider type, as in NumPy: `loss * (labels != -100)`.
    """
    who = f"{type(self).__name__}.arithmetic"
    operation = chosen(who, "kind", _OPERATIONS, kind)
    first = number_or_tensor(who, x, y)
    if y is None:
        return build(self, ArithmeticLayer(operation), [_one_tensor(who, first)], name, kind)
    second = number_or_tensor(who, y, x)
    if widest := _widest(first, second, divides=kind == "divide", adds=True):
        with undone_on_error(self):
            return self.arithmetic(kind, *(_cast(self, one, widest) for one in (first, second)), name=name)
    if kind in _COMMUTATIVE and not isinstance(first, Tensor):
        first, second = second, first
    if not isinstance(second, Tensor):
        layer = ArithmeticLayer(operation, constant=second)
        return build(self, layer, [_one_tensor(who, first)], name, kind)
    if not isinstance(first, Tensor):
        return build(self, ArithmeticLayer(operation, constant=first, constant_first=True), [second], name, kind)
    result = build(self, ArithmeticLayer(operation), [first, second], name, kind)
    return label_constants(result, (first, second), (x, y))


def compare(self: Graph, kind: ComparisonName, x: Operand, y: Operand | None = None, *, name: str = "") -> Tensor:
    """BOOLEAN: "equal", "less", "greater_or_equal", "logical_and" ... as ComparisonLayer has them, in small letters.

    One of two operands may be a number or an array of constants, with broadcasting.
    """
    who = f"{type(self).__name__}.compare"
    operation = chosen(who, "kind", _COMPARISONS, kind)
    first = number_or_tensor(who, x, y)
    if y is None:
        return build(self, ComparisonLayer(operation), [_one_tensor(who, first)], name, kind)
    second = number_or_tensor(who, y, x)
    if widest := _widest(first, second):
        with undone_on_error(self):
            return self.compare(kind, *(_cast(self, one, widest) for one in (first, second)), name=name)
    if kind in _EXCHANGED and not isinstance(first, Tensor):
        kind = _EXCHANGED[kind]
        operation, first, second = _COMPARISONS[kind], second, first
    if not isinstance(second, Tensor):
        return build(self, ComparisonLayer(operation, constant=second), [_one_tensor(who, first)], name, kind)
    result = build(self, ComparisonLayer(operation), [_one_tensor(who, first), second], name, kind)
    return label_constants(result, (first, second), (x, y))


def where(self: Graph, condition: Tensor | Array, x: Operand, y: Operand, *, name: str = "") -> Tensor:
    """Element by element x where the condition is not zero, else y, with broadcasting.

    condition  a tensor, or an array of booleans that is constant, such as a mask
    x, y       tensors, numbers or arrays of constants
    """
    who = f"{type(self).__name__}.where"
    chooses = _mask(who, condition) if isinstance(condition, np.ndarray) else condition
    if not isinstance(chooses, Tensor):
        advice = "; `x == y` asks whether two tensors are the same, x.equal(y) compares what they hold"
        about = advice if isinstance(condition, bool) else ""
        given = type(condition).__name__
        raise TypeError(f"{who}: the condition must be a Tensor or an array of booleans, not {given}{about}")
    first, second = constant_like(who, x, y), constant_like(who, y, x)
    if widest := _widest(first, second):
        with undone_on_error(self):
            return self.where(condition, _cast(self, first, widest), _cast(self, second, widest), name=name)
    result = build(self, SelectionLayer(), [chooses, first, second], name, "where")
    return label_constants(result, (first, second, chooses), (x, y, condition))


def _mask(who: str, condition: Array) -> Tensor:
    """A constant that chooses."""
    if condition.dtype != bool:
        raise DataError(
            f"{who}: the condition is an array of {condition.dtype}",
            expected="an array of booleans",
            fix="compare first: mask > 0",
        )
    return Tensor(shape=condition.shape or (1,), data=condition, data_type=DataType.BOOLEAN)


#: Types that meet in one expression, the widest last: narrower operands become of that type.
_WIDTHS = (
    DataType.BOOLEAN, DataType.INT32, DataType.INT64, DataType.BFLOAT16, DataType.FLOAT16, DataType.FLOAT32,
)  # fmt: skip


def _widest(*operands: Tensor | float, divides: bool = False, adds: bool = False) -> DataType | None:
    """The type that operands are to be cast to; None where they may stay as they are, or no type is theirs.

    divides  whole numbers become floating ones
    adds     booleans do, too: they count as 0 and 1; and whole numbers beside a number that is none
    """
    found = {operand.descriptor.data_type for operand in operands if isinstance(operand, Tensor)}
    if not found <= set(_WIDTHS):
        return None
    widest = max(found, key=_WIDTHS.index)
    numbers = [operand for operand in operands if not isinstance(operand, Tensor)]
    if found >= {DataType.FLOAT16, DataType.BFLOAT16}:  # one has more digits, the other larger numbers
        widest = DataType.FLOAT32
    if adds and widest is DataType.BOOLEAN:
        widest = DataType.FLOAT32
    if not widest.is_floating and (divides or (adds and not all(number.is_integer() for number in numbers))):
        widest = DataType.FLOAT32
    return widest if found != {widest} else None


def _cast(graph: Graph, operand: Tensor | float, data_type: DataType) -> Tensor | float:
    if not isinstance(operand, Tensor) or operand.descriptor.data_type == data_type:
        return operand
    return graph.cast(operand, data_type)


def _one_tensor(who: str, given: Tensor | float) -> Tensor:
    if not isinstance(given, Tensor):
        raise TypeError(f"{who}: no operand is a Tensor")
    return given


def matmul(
    self: Graph,
    x: Tensor,
    y: Tensor,
    *,
    transposes_x: bool = False,
    transposes_y: bool = False,
    alpha: float = 1.0,
    name: str = "",
) -> Tensor:
    """alpha x y.   x (*, m, k)   y (*, k, n)   ->   (*, m, n); leading axes broadcast"""
    layer = MatMulLayer(MatMulDescriptor(alpha, transposes_x, transposes_y))
    return build(self, layer, [x, y], name, "matmul")
