"""Elementwise operators: arithmetic, activations, comparison, logic, casts; on bits, of constants only.

Devices have no bitwise arithmetic.
"""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.onnx.rows import Call, operator, through_double
from mlcompute.onnx.types import carried, is_carried, numpy_type
from mlcompute.ops.op import BOOL, FLOAT32, Array, Value

# One operand ----------------------------------------------------------------------------------------------------


def _unary(name: str, function: Callable[[Value], Value], *, trains: bool = True) -> None:
    operator(name, trains=trains)(lambda call: function(call[0]))


for _name, _function in {
    "Abs": ops.abs_, "Acos": ops.acos, "Acosh": ops.acosh, "Asin": ops.asin, "Asinh": ops.asinh, "Atan": ops.atan,
    "Atanh": ops.atanh, "Cos": ops.cos, "Cosh": ops.cosh, "Erf": ops.erf, "Exp": ops.exp, "Log": ops.log,
    "Neg": ops.negate, "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Sin": ops.sin, "Sinh": ops.sinh,
    "Softplus": ops.softplus, "Sqrt": ops.sqrt, "Tan": ops.tan, "Tanh": ops.tanh,
}.items():  # fmt: skip
    _unary(_name, _function)

for _name, _function in {"Ceil": ops.ceil, "Floor": ops.floor, "Round": ops.round_, "Sign": ops.sign}.items():
    _unary(_name, _function, trains=False)

_unary("Reciprocal", lambda x: 1.0 / x)
_unary("Softsign", lambda x: x / (1.0 + ops.abs_(x)))
_unary("HardSwish", lambda x: x * ops.minimum(ops.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0))
_unary("Mish", lambda x: x * ops.tanh(ops.softplus(x)))
_unary("Not", ops.logical_not, trains=False)
_unary("IsNaN", lambda x: ops.not_equal(x, x), trains=False)


@operator("Identity")
def identity(call: Call) -> Value:
    return call[0]


@operator("IsInf", trains=False)
def is_inf(call: Call) -> Value:
    x = call[0]
    found = []
    if call.attribute("detect_positive", 1):
        found.append(ops.equal(x, math.inf))
    if call.attribute("detect_negative", 1):
        found.append(ops.equal(x, -math.inf))
    return reduce(ops.logical_or, found) if found else ops.full(x, x.shape, False, BOOL)


@operator("Elu")
def elu(call: Call) -> Value:
    return _elu(call[0], call.attribute("alpha", 1.0))


def _elu(x: Value, alpha: float) -> Value:
    # The branch not taken must stay finite: its derivative is multiplied by 0.
    return ops.select(x > 0.0, x, alpha * ops.expm1(ops.minimum(x, 0.0)))


@operator("Celu")
def celu(call: Call) -> Value:
    alpha = call.attribute("alpha", 1.0)
    x = call[0]
    return ops.maximum(x, 0.0) + ops.minimum(alpha * ops.expm1(ops.minimum(x, 0.0) * (1.0 / alpha)), 0.0)


@operator("Selu")
def selu(call: Call) -> Value:
    alpha = call.attribute("alpha", 1.6732632423543772)
    gamma: float = call.attribute("gamma", 1.0507009873554805)
    return _elu(call[0], alpha) * gamma


@operator("LeakyRelu")
def leaky_relu(call: Call) -> Value:
    x = call[0]
    return ops.select(x < 0.0, x * call.attribute("alpha", 0.01), x)


@operator("ThresholdedRelu")
def thresholded_relu(call: Call) -> Value:
    x = call[0]
    return ops.select(x > call.attribute("alpha", 1.0), x, 0.0)


@operator("HardSigmoid")
def hard_sigmoid(call: Call) -> Value:
    x = call[0] * call.attribute("alpha", 0.2) + call.attribute("beta", 0.5)
    return ops.minimum(ops.maximum(x, 0.0), 1.0)


@operator("Shrink")
def shrink(call: Call) -> Value:
    bias, lambd = call.attribute("bias", 0.0), call.attribute("lambd", 0.5)
    return through_double(call[0], lambda x: ops.select(x < -lambd, x + bias, ops.select(x > lambd, x - bias, 0.0)))


@operator("Gelu")
def gelu(call: Call) -> Value:
    x = call[0]
    if call.attribute("approximate", "none") == "tanh":
        return 0.5 * x * (1.0 + ops.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))
    return 0.5 * x * (1.0 + ops.erf(x * math.sqrt(0.5)))


@operator("Swish")
def swish(call: Call) -> Value:
    return call[0] * ops.sigmoid(call[0] * call.attribute("alpha", 1.0))


@operator("PRelu", weights=(1,))
def prelu(call: Call) -> Value:
    x, slope = call[0], call[1]
    if call.version < 9 and slope.rank == 1 and slope.shape[0] > 1 and x.rank > 2:
        slope = ops.reshape(slope, (slope.shape[0], *(1,) * (x.rank - 2)))
    return ops.select(x < 0.0, x * slope, x)


@operator("Clip", frozen=(1, 2))
def clip(call: Call) -> Value:
    x = call[0]
    low, high = call.attribute("min"), call.attribute("max")
    lowest = low if low is not None else call.optional(1)
    highest = high if high is not None else call.optional(2)
    if lowest is not None:
        x = ops.maximum(x, lowest)
    return x if highest is None else ops.minimum(x, highest)


# Two or more operands ---------------------------------------------------------------------------------------------


def _aligned(call: Call) -> tuple[Value, Value]:
    """The two operands; before version 7 the second one lies at an axis of the first."""
    a, b = call[0], call[1]
    if call.version < 7 and call.attribute("broadcast", 0) and b.rank < a.rank:
        axis = call.attribute("axis")
        if axis is not None:
            axis = axis % a.rank
            b = ops.reshape(b, (*b.shape, *(1,) * (a.rank - axis - b.rank)))
    return a, b


def _binary(name: str, function: Callable[[Value, Value], Value], *, trains: bool = True) -> None:
    operator(name, trains=trains)(lambda call: function(*_aligned(call)))


for _name, _two in {"Add": ops.add, "Sub": ops.subtract, "Mul": ops.multiply, "Div": ops.divide}.items():
    _binary(_name, _two)

for _name, _two in {
    "Equal": ops.equal, "Greater": ops.greater, "GreaterOrEqual": ops.greater_or_equal, "Less": ops.less,
    "LessOrEqual": ops.less_or_equal, "And": ops.logical_and, "Or": ops.logical_or, "Xor": ops.logical_xor,
}.items():  # fmt: skip
    _binary(_name, _two, trains=False)


@operator("Pow")
def pow_(call: Call) -> Value:
    a, b = _aligned(call)
    if a.dtype == b.dtype and a.is_floating:
        return ops.pow_(a, b)
    if a.is_floating:
        return ops.pow_(a, ops.convert(b, a.dtype))
    wide = np.dtype(np.float64) if call.known(0) is not None and call.known(1) is not None else FLOAT32
    return ops.convert(ops.round_(ops.pow_(ops.convert(a, wide), ops.convert(b, wide))), a.dtype)


def truncated(x: Value) -> Value:
    """x without its fraction."""
    return ops.sign(x) * ops.floor(ops.abs_(x))


@operator("Mod", trains=False, note="gradients do not flow")
def mod(call: Call) -> Value:
    a, b = _aligned(call)
    if not call.attribute("fmod", 0) and a.dtype.kind != "u":
        return ops.remainder(a, b)
    if not a.is_floating:
        return a - (a / b) * b  # whole numbers are divided towards zero
    # Whatever is finite is its own rest when divided by infinity.
    whole = ops.logical_and(ops.equal(ops.abs_(b), math.inf), ops.abs_(a) < math.inf)
    return ops.select(whole, ops.broadcast(a, whole.shape), a - truncated(a / b) * b)


def _fold(function: Callable[[Value, Value], Value]) -> Callable[[Call], Value]:
    return lambda call: reduce(function, call.all_values())


operator("Max")(_fold(ops.maximum))
operator("Min")(_fold(ops.minimum))
operator("Sum")(_fold(ops.add))


@operator("Mean")
def mean(call: Call) -> Value:
    return reduce(ops.add, call.all_values()) * (1.0 / call.count)


@operator("Where")
def where(call: Call) -> Value:
    return ops.select(call[0], call[1], call[2])


# Types ------------------------------------------------------------------------------------------------------------


def cast_to(call: Call, x: Value, dtype: np.dtype[Any]) -> Value | Array:
    """x in another ONNX type."""
    known = call.known(0) if is_carried(dtype) else call.array(0)
    if known is not None:
        with np.errstate(all="ignore"):
            return _cast_array(known, dtype, bool(call.attribute("saturate", 1)), call.attribute("round_mode", "up"))
    to = carried(dtype)
    if to == BOOL:
        return x if x.dtype == BOOL else ops.not_equal(x, 0)
    return ops.convert(x, to)


def _cast_array(array: Array, dtype: np.dtype[Any], saturate: bool, rounding: str) -> Array:
    if array.dtype == dtype:
        return array
    if dtype.name.startswith("float8"):
        from onnx import numpy_helper

        if dtype.name == "float8_e8m0fnu":
            return np.asarray(numpy_helper.to_float8e8m0(array, saturate, rounding)).astype(dtype)
        if saturate:
            return np.asarray(numpy_helper.saturate_cast(array, dtype))
    return array.astype(dtype)


@operator("Cast", note="not to or from strings; to 8-bit floats and 4-bit types only constants")
def cast(call: Call) -> Value | Array:
    return cast_to(call, call[0], numpy_type(call.attribute("to")))


@operator("CastLike", note="as Cast")
def cast_like(call: Call) -> Value | Array:
    known = call.known(1)
    return cast_to(call, call[0], call[1].dtype if known is None else known.dtype)


def _of_constants(name: str, function: Callable[..., Array], count: int) -> None:
    def describe(call: Call) -> Array:
        return np.asarray(function(*(call.array(k) for k in range(count))))

    operator(name, trains=False, needs=range(count), note="of constants only")(describe)


_of_constants("BitwiseAnd", np.bitwise_and, 2)
_of_constants("BitwiseOr", np.bitwise_or, 2)
_of_constants("BitwiseXor", np.bitwise_xor, 2)
_of_constants("BitwiseNot", np.invert, 1)


@operator("BitShift", trains=False, needs=(0, 1), note="of constants only")
def bit_shift(call: Call) -> Array:
    shift = np.left_shift if call.attribute("direction") == "LEFT" else np.right_shift
    return np.asarray(shift(call.array(0), call.array(1)))


@operator("BitCast", trains=False, needs=(0,), note="of constants only")
def bit_cast(call: Call) -> Array:
    x = call.array(0)
    found: Array = np.ascontiguousarray(x).view(numpy_type(call.attribute("to"))).reshape(x.shape)
    return found
