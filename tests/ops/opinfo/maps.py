"""PyTorch's elementwise functions and activations, said in our ops."""

from __future__ import annotations

import math
from typing import Any

from mlcompute import ops
from mlcompute.ops.op import Value
from tests.ops.opinfo.table import MAPS, Mapping, said

# Direct rows: the op itself ------------------------------------------------------------------------------------

for _name in (
    "abs", "sign", "floor", "ceil", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sigmoid", "erf",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
):  # fmt: skip
    MAPS[_name] = Mapping(lambda x, _name=_name: ops.emit(_name, x))
for _name, _op in {
    "neg": "negate", "sgn": "sign", "round": "round", "nn.functional.relu": "relu",
    "clone": "copy", "contiguous": "copy", "positive": "copy", "alias_copy": "copy", "resolve_conj": "copy",
    "resolve_neg": "copy", "real": "copy", "conj": "copy", "conj_physical": "copy", "double": "copy",
    "logical_not": "logical_not",
}.items():  # fmt: skip
    MAPS[_name] = Mapping(lambda x, _op=_op, **_: ops.emit(_op, x))
for _name, _op in {
    "mul": "multiply", "__rmul__": "multiply", "div.no_rounding_mode": "divide", "true_divide": "divide",
    "maximum": "maximum", "minimum": "minimum", "max.binary": "maximum", "min.binary": "minimum", "pow": "pow",
    "float_power": "pow", "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_or_equal", "gt": "greater",
    "ge": "greater_or_equal", "logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "logical_xor",
    "__radd__": "add", "clamp_min": "maximum", "clamp_max": "minimum",
}.items():  # fmt: skip
    MAPS[_name] = Mapping(lambda a, b, _op=_op, **_: ops.emit(_op, a, b))

# Arithmetic ----------------------------------------------------------------------------------------------------

MAPS["add"] = Mapping(lambda a, b, alpha=1: a + b * alpha)
MAPS["sub"] = Mapping(lambda a, b, alpha=1: a - b * alpha)
MAPS["rsub"] = Mapping(lambda a, b, alpha=1: b - a * alpha)
MAPS["__rsub__"] = Mapping(lambda a, b: b - a)
MAPS["__rdiv__"] = Mapping(lambda a, b: b / a)
MAPS["__rpow__"] = Mapping(lambda a, b: ops.pow_(b, a))
MAPS["reciprocal"] = Mapping(lambda x: 1.0 / x)
MAPS["square"] = Mapping(lambda x: x * x)
MAPS["deg2rad"] = Mapping(lambda x: x * (math.pi / 180.0))
MAPS["rad2deg"] = Mapping(lambda x: x * (180.0 / math.pi))
MAPS["log10"] = Mapping(lambda x: ops.log(x) * (1.0 / math.log(10.0)))
MAPS["erfc"] = Mapping(lambda x: 1.0 - ops.erf(x))
MAPS["ldexp"] = Mapping(lambda x, n: x * ops.exp2(n))
MAPS["addcmul"] = Mapping(lambda x, a, b, value=1: x + a * b * value)
MAPS["addcdiv"] = Mapping(lambda x, a, b, value=1: x + a / b * value)
MAPS["lerp"] = Mapping(lambda a, b, weight: a + (b - a) * weight)
MAPS["heaviside"] = Mapping(
    lambda x, at_zero: ops.select(ops.equal(x, 0.0), at_zero, ops.convert(x > 0.0, x.dtype)),
)
MAPS["isnan"] = Mapping(lambda x: ops.not_equal(x, x))
MAPS["isinf"] = Mapping(lambda x: ops.equal(ops.abs_(x), math.inf))
MAPS["isposinf"] = Mapping(lambda x: ops.equal(x, math.inf))
MAPS["isneginf"] = Mapping(lambda x: ops.equal(x, -math.inf))
MAPS["isfinite"] = Mapping(lambda x: ops.abs_(x) < math.inf)
MAPS["where"] = Mapping(lambda a, condition, b: ops.select(condition, a, b))
MAPS["masked_fill"] = Mapping(lambda x, mask, value: ops.select(mask, value, x))


@said("trunc")
def trunc(x: Value) -> Value:
    return ops.select(x < 0.0, ops.ceil(x), ops.floor(x))


@said("frac")
def frac(x: Value) -> Value:
    return x - trunc(x)


@said("floor_divide", "div.floor_rounding")
def floor_divide(a: Any, b: Any, rounding_mode: str = "floor") -> Value:
    return ops.floor(ops.divide(a, b))


@said("div.trunc_rounding")
def trunc_divide(a: Any, b: Any, rounding_mode: str = "trunc") -> Value:
    return trunc(ops.divide(a, b))


@said("remainder")
def remainder(a: Any, b: Any) -> Value:
    return ops.subtract(a, floor_divide(a, b) * b)


@said("__rmod__")
def reverse_remainder(a: Any, b: Any) -> Value:
    return remainder(b, a)


@said("fmod")
def fmod(a: Any, b: Any) -> Value:
    return ops.subtract(a, trunc(ops.divide(a, b)) * b)


@said("copysign")
def copysign(a: Value, b: Any) -> Value:
    # -0 is negative: its reciprocal is.
    negative = 1.0 / b < 0.0 if isinstance(b, Value) else a.trace.constant(math.copysign(1.0, b) < 0)
    size = ops.abs_(a)
    return ops.select(negative, -size, size)


@said("hypot")
def hypot(a: Value, b: Value) -> Value:
    return ops.sqrt(a * a + b * b)


@said("logaddexp")
def logaddexp(a: Value, b: Value) -> Value:
    return b + ops.softplus(a - b)


@said("logaddexp2")
def logaddexp2(a: Value, b: Value) -> Value:
    return ops.log2(ops.exp2(a) + ops.exp2(b))


@said("xlogy", only=lambda x, y: bool((y > 0).all()), why="0 log(0) needs another gradient than the formula's")
def xlogy(x: Value, y: Value) -> Value:
    return ops.select(ops.equal(x, 0.0), 0.0, x * ops.log(y))


def _no_nan(a: Any, b: Any) -> bool:
    return not (a.isnan().any() or b.isnan().any())


@said("fmax", only=_no_nan, why="NaN wins in ours and loses in theirs")
def fmax(a: Value, b: Value) -> Value:
    return ops.maximum(a, b)


@said("fmin", only=_no_nan, why="NaN wins in ours and loses in theirs")
def fmin(a: Value, b: Value) -> Value:
    return ops.minimum(a, b)


@said("clamp", only=lambda x, low=None, high=None: all(b is None or b.dtype == x.dtype for b in (low, high)),
      why="types do not mix")  # fmt: skip
def clamp(x: Value, low: Any = None, high: Any = None) -> Value:
    if low is not None:
        x = ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


@said("isclose")
def isclose(a: Value, b: Value, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Value:
    near = ops.abs_(a - b) <= ops.abs_(b) * rtol + atol
    found = ops.logical_or(ops.equal(a, b), near)
    both_nan = ops.logical_and(ops.not_equal(a, a), ops.not_equal(b, b))
    return ops.logical_or(found, both_nan) if equal_nan else found


@said("nan_to_num")
def nan_to_num(x: Value, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    largest = 1.7976931348623157e308
    x = ops.select(ops.not_equal(x, x), nan or 0.0, x)
    x = ops.select(ops.equal(x, math.inf), largest if posinf is None else posinf, x)
    return ops.select(ops.equal(x, -math.inf), -largest if neginf is None else neginf, x)


@said("logit")
def logit(x: Value, eps: float | None = None) -> Value:
    if eps is not None:
        x = ops.minimum(ops.maximum(x, eps), 1.0 - eps)
    return ops.log(x / (1.0 - x))


@said("sinc")
def sinc(x: Value) -> Value:
    at_zero = ops.equal(x, 0.0)
    angle = ops.select(at_zero, 1.0, x * math.pi)
    return ops.select(at_zero, 1.0, ops.sin(angle) / angle)


# Activations ---------------------------------------------------------------------------------------------------

MAPS["nn.functional.logsigmoid"] = Mapping(lambda x: -ops.softplus(-x))
MAPS["nn.functional.silu"] = Mapping(lambda x, inplace=False: x * ops.sigmoid(x))
MAPS["nn.functional.mish"] = Mapping(lambda x, inplace=False: x * ops.tanh(ops.softplus(x)))
MAPS["nn.functional.softsign"] = Mapping(lambda x: x / (ops.abs_(x) + 1.0))
MAPS["nn.functional.tanhshrink"] = Mapping(lambda x: x - ops.tanh(x))
MAPS["nn.functional.relu6"] = Mapping(lambda x, inplace=False: ops.minimum(ops.relu(x), 6.0))


@said("nn.functional.leaky_relu")
def leaky_relu(x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    return ops.select(x > 0.0, x, x * negative_slope)


@said("nn.functional.prelu")
def prelu(x: Value, weight: Value) -> Value:
    per_channel = (weight.size, *(1,) * (x.rank - 2)) if weight.size > 1 else ()
    return ops.select(x > 0.0, x, ops.reshape(weight, per_channel) * x)


@said("nn.functional.elu")
def elu(x: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
    return ops.select(x > 0.0, x, ops.expm1(ops.minimum(x, 0.0)) * alpha)


@said("nn.functional.celu")
def celu(x: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
    return ops.select(x > 0.0, x, ops.expm1(ops.minimum(x, 0.0) / alpha) * alpha)


@said("nn.functional.selu")
def selu(x: Value, inplace: bool = False) -> Value:
    return elu(x, 1.6732632423543772) * 1.0507009873554805


@said("nn.functional.gelu")
def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
        return x * 0.5 * (ops.tanh(inner) + 1.0)
    return x * 0.5 * (ops.erf(x * math.sqrt(0.5)) + 1.0)


def hardsigmoid(x: Value, inplace: bool = False) -> Value:
    return ops.minimum(ops.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)


# PyTorch's slope is a sixth rounded to float32.
MAPS["nn.functional.hardsigmoid"] = Mapping(hardsigmoid, scale=1000.0)


@said("nn.functional.hardswish")
def hardswish(x: Value, inplace: bool = False) -> Value:
    return ops.select(x <= -3.0, 0.0, ops.select(x >= 3.0, x, x * (x + 3.0) * (1.0 / 6.0)))


@said("nn.functional.hardtanh")
def hardtanh(x: Value, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Value:
    return ops.minimum(ops.maximum(x, min_val), max_val)


@said("nn.functional.hardshrink")
def hardshrink(x: Value, lambd: float = 0.5) -> Value:
    return ops.select(ops.abs_(x) > lambd, x, 0.0)


@said("nn.functional.softshrink")
def softshrink(x: Value, lambd: float = 0.5) -> Value:
    return ops.select(x > lambd, x - lambd, ops.select(x < -lambd, x + lambd, 0.0))


@said("nn.functional.threshold")
def threshold(x: Value, threshold: float, value: float, inplace: bool = False) -> Value:
    return ops.select(x > threshold, x, value)


@said("nn.functional.softplus")
def softplus(x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    return ops.select(x * beta > threshold, x, ops.softplus(x * beta) / beta)


@said("nn.functional.glu")
def glu(x: Value, dim: int = -1) -> Value:
    axis, half = dim % x.rank, x.shape[dim] // 2
    return ops.slice_axis(x, axis, 0, half) * ops.sigmoid(ops.slice_axis(x, axis, half, 2 * half))
