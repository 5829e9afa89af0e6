"""Elementwise ops, with NumPy broadcasting of the inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import BOOL, TABLE, Array, ArrayType, Op, Shape, Typed, Value, emit
from mlcompute.ops.reductions import sum_to

Number = Value | float


@functools.lru_cache(1024)
def broadcast_shape(*shapes: Shape) -> Shape:
    """The common shape after NumPy broadcasting; a ShapeError when there is none."""
    common: Shape = ()
    for shape in shapes:
        if not shape or shape == common:
            continue
        longer, shorter = (common, shape) if len(common) > len(shape) else (shape, common)
        start = len(longer) - len(shorter)
        extents = list(longer)
        for axis, extent in enumerate(shorter, start):
            if extents[axis] == 1:
                extents[axis] = extent
            elif extent not in (1, extents[axis]):
                raise ShapeError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast to a common one")
        common = tuple(extents)
    return common


class _Elementwise(Op):
    elementwise = True


def _define(
    name: str,
    meaning: Callable[..., Any],
    derivative: Callable[..., Any] | None,
    dtype: Callable[..., np.dtype[Any]],
    expansion: Callable[..., Value] | None = None,
) -> None:
    """Add a map to the table. `derivative(dy, y, *inputs)` may ignore broadcasting: sums are added here."""

    def result(*inputs: Typed, **_: Any) -> ArrayType:
        shape = inputs[0].shape
        for x in inputs:
            if x.shape and x.shape != shape:  # scalars go with anything
                shape = broadcast_shape(*[x.shape for x in inputs]) if shape else x.shape
        return ArrayType(shape, dtype(*inputs, **_))

    def with_sums(dy: Value, y: Value, *inputs: Value, **attributes: Any) -> tuple[Value | None, ...]:
        assert derivative is not None
        gradients = derivative(dy, y, *inputs, **attributes)
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        return tuple(
            [
                gradient if gradient is None or gradient.shape == x.shape else sum_to(gradient, x.shape)
                for gradient, x in zip(gradients, inputs, strict=True)
            ]
        )

    members = {
        "name": name,
        "family": "elementwise",
        "result": staticmethod(result),
        "meaning": staticmethod(meaning),
        "derivative": staticmethod(with_sums) if derivative else None,
        "expansion": staticmethod(expansion) if expansion else None,
    }
    assert name not in TABLE
    TABLE[name] = type(name, (_Elementwise,), members)()


def _same(*inputs: Typed, **_: Any) -> np.dtype[Any]:
    dtype = inputs[0].dtype
    for x in inputs:
        if x.dtype is not dtype and x.dtype != dtype:
            raise DataError("map: operands of different data types do not mix", types=[str(x.dtype) for x in inputs])
    return dtype


def _same_branches(condition: Typed, a: Typed, b: Typed) -> np.dtype[Any]:
    return _same(a, b)


def _boolean(*_: Typed, **__: Any) -> np.dtype[Any]:
    return BOOL


#: Ops that take an element many instructions, longer than writing it to memory and reading it again.
FUNCTIONS = frozenset(
    (
        *("exp", "exp2", "expm1", "log", "log2", "log1p", "sigmoid", "softplus", "erf", "sin", "cos", "tan", "pow"),
        *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    )
)

# Functions on symbolic values ---------------------------------------------------------------------------------


def _function(name: str) -> Callable[..., Value]:
    return functools.partial(emit, name)


add, subtract, multiply, divide = map(_function, ("add", "subtract", "multiply", "divide"))
negate, minimum, maximum, pow_ = map(_function, ("negate", "minimum", "maximum", "pow"))
floor, ceil, round_, sign, abs_ = map(_function, ("floor", "ceil", "round", "sign", "abs"))
sqrt, rsqrt, exp, exp2, expm1 = map(_function, ("sqrt", "rsqrt", "exp", "exp2", "expm1"))
log, log2, log1p, sigmoid, softplus = map(_function, ("log", "log2", "log1p", "sigmoid", "softplus"))
erf, relu, copy, stop_gradient = map(_function, ("erf", "relu", "copy", "stop_gradient"))
gelu, gelu_gradient = map(_function, ("gelu", "gelu_gradient"))
sin, cos, tan, asin, acos, atan = map(_function, ("sin", "cos", "tan", "asin", "acos", "atan"))
sinh, cosh, tanh = map(_function, ("sinh", "cosh", "tanh"))
asinh, acosh, atanh = map(_function, ("asinh", "acosh", "atanh"))
equal, not_equal, less, greater = map(_function, ("equal", "not_equal", "less", "greater"))
less_or_equal, greater_or_equal = map(_function, ("less_or_equal", "greater_or_equal"))
logical_and, logical_or = map(_function, ("logical_and", "logical_or"))
logical_xor, logical_not = map(_function, ("logical_xor", "logical_not"))


def select(condition: Value, a: Number, b: Number) -> Value:
    """a where the condition is true, else b."""
    # A number takes the dtype of the other branch, never the condition's.
    if not isinstance(a, Value):
        assert isinstance(b, Value)
        a = condition.trace.number(a, b.dtype)
    if not isinstance(b, Value):
        b = condition.trace.number(b, a.dtype)
    return emit("select", condition, a, b)


def convert(x: Value, to: np.dtype[Any]) -> Value:
    """x in another dtype; x itself when it already has it."""
    return x if x.dtype is to or x.dtype == to else emit("convert", x, to=np.dtype(to))


# Arithmetic -------------------------------------------------------------------------------------------------

_define("add", np.add, lambda dy, y, a, b: (dy, dy), _same)
_define("subtract", np.subtract, lambda dy, y, a, b: (dy, -dy), _same)
_define("multiply", np.multiply, lambda dy, y, a, b: (dy * b, dy * a), _same)
_define("divide", np.divide, lambda dy, y, a, b: (dy / b, -(dy * y) / b), _same)
_define("negate", np.negative, lambda dy, y, x: -dy, _same)


def _pow_derivative(dy: Value, y: Value, a: Value, b: Value) -> tuple[Value, Value]:
    # x^0 has slope 0 even at x = 0, and 0^b does not move with b > 0 although ln 0 is infinite.
    da = select(equal(b, 0.0), 0.0, dy * (b * pow_(a, b - 1.0)))
    flat = logical_and(equal(a, 0.0), b >= 0.0)
    return da, dy * select(flat, 0.0, y * log(select(flat, 1.0, a)))


_define("pow", np.power, _pow_derivative, _same)


def _to_selected(other_wins: Callable[..., Value]) -> Callable[[Value, Value, Value, Value], tuple[Value, Value]]:
    def derivative(dy: Value, y: Value, a: Value, b: Value) -> tuple[Value, Value]:
        # As torch.minimum and torch.maximum: equal operands share the gradient evenly, and beside a NaN both get it.
        shared = select(equal(a, b), dy * 0.5, dy)
        return select(other_wins(a, b), 0.0, shared), select(other_wins(b, a), 0.0, shared)

    return derivative


_define("minimum", np.minimum, _to_selected(greater), _same)
_define("maximum", np.maximum, _to_selected(less), _same)

# Rounding and sign ------------------------------------------------------------------------------------------

_define("floor", np.floor, lambda dy, y, x: None, _same)
_define("ceil", np.ceil, lambda dy, y, x: None, _same)
_define("round", np.round, lambda dy, y, x: None, _same)  # half to even
_define("sign", np.sign, lambda dy, y, x: None, _same)
_define("abs", np.abs, lambda dy, y, x: dy * sign(x), _same)

# Roots, exponentials, logarithms ------------------------------------------------------------------------------

_LN2 = math.log(2.0)


def _sigmoid(x: Array) -> Array:
    # exp of a non-positive number never overflows.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _softplus(x: Array) -> Array:
    """log(1 + e^x) without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _erf(x: Array) -> Array:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(x.dtype)


_define("sqrt", np.sqrt, lambda dy, y, x: dy * 0.5 / y, _same)
_define("rsqrt", lambda x: 1 / np.sqrt(x), lambda dy, y, x: dy * -0.5 * (y * y * y), _same)
_define("exp", np.exp, lambda dy, y, x: dy * y, _same)
_define("exp2", np.exp2, lambda dy, y, x: dy * (y * _LN2), _same)
_define("expm1", np.expm1, lambda dy, y, x: dy * (y + 1.0), _same)
_define("log", np.log, lambda dy, y, x: dy / x, _same)
_define("log2", np.log2, lambda dy, y, x: dy / (x * _LN2), _same)
_define("log1p", np.log1p, lambda dy, y, x: dy / (x + 1.0), _same)
_define("sigmoid", _sigmoid, lambda dy, y, x: dy * (y * (1.0 - y)), _same)
_define("softplus", _softplus, lambda dy, y, x: dy * sigmoid(x), _same)
_define("erf", _erf, lambda dy, y, x: dy * (2.0 / math.sqrt(math.pi) * exp(-(x * x))), _same)
# y <= 0 exactly where x <= 0; asking y lets the activation overwrite its source.
_define("relu", lambda x: np.maximum(x, 0), lambda dy, y, x: select(y <= 0.0, 0.0, dy), _same)

#: sqrt(2 / pi), in the digits that ML Compute stores, and the factor of the cube.
GELU_SCALE, GELU_CUBIC = 0.7978845608, 0.044715


def _gelu(x: Any, sigmoid: Callable[[Any], Any]) -> Any:
    """x / 2 (1 + tanh(SCALE (x + CUBIC x³))), for arrays and for symbolic values."""
    # (1 + tanh z) / 2 = sigmoid(2 z), which keeps its digits where tanh is close to -1.
    return x * sigmoid((x * x * GELU_CUBIC + 1.0) * x * (2.0 * GELU_SCALE))


def _gelu_gradient(dy: Any, x: Any, sigmoid: Callable[[Any], Any]) -> Any:
    """dy times the slope of gelu at x."""
    cubic = x * x * GELU_CUBIC
    s = sigmoid((cubic + 1.0) * x * (2.0 * GELU_SCALE))
    # x is read last: then s and the cube are computed from it, not kept from the forward pass (`rematerialize`).
    return dy * (s * (1.0 - s) * (cubic * 3.0 + 1.0) * x * (2.0 * GELU_SCALE) + s)


# Ops of their own, because libraries apply them to a product before it is stored; else they are what they expand into.
_define(
    "gelu",
    lambda x: _gelu(x, _sigmoid),
    lambda dy, y, x: gelu_gradient(dy, x),
    _same,
    expansion=lambda x: _gelu(x, sigmoid),
)
_define(
    "gelu_gradient",
    lambda dy, x: _gelu_gradient(dy, x, _sigmoid),
    None,
    _same,
    expansion=lambda dy, x: _gelu_gradient(dy, x, sigmoid),
)

# Trigonometry -----------------------------------------------------------------------------------------------

_define("sin", np.sin, lambda dy, y, x: dy * cos(x), _same)
_define("cos", np.cos, lambda dy, y, x: -(dy * sin(x)), _same)
_define("tan", np.tan, lambda dy, y, x: dy * (1.0 + y * y), _same)
# (1 - x)(1 + x) keeps the digits that 1 - x x loses near |x| = 1.
_define("asin", np.arcsin, lambda dy, y, x: dy * rsqrt((1.0 - x) * (1.0 + x)), _same)
_define("acos", np.arccos, lambda dy, y, x: -(dy * rsqrt((1.0 - x) * (1.0 + x))), _same)
_define("atan", np.arctan, lambda dy, y, x: dy / (x * x + 1.0), _same)
_define("sinh", np.sinh, lambda dy, y, x: dy * cosh(x), _same)
_define("cosh", np.cosh, lambda dy, y, x: dy * sinh(x), _same)
_define("tanh", np.tanh, lambda dy, y, x: dy * (1.0 - y * y), _same)
_define("asinh", np.arcsinh, lambda dy, y, x: dy * rsqrt(x * x + 1.0), _same)
_define("acosh", np.arccosh, lambda dy, y, x: dy * rsqrt((x - 1.0) * (x + 1.0)), _same)
_define("atanh", np.arctanh, lambda dy, y, x: dy / ((1.0 - x) * (1.0 + x)), _same)

# Comparison, logic, choice ------------------------------------------------------------------------------------

_define("equal", np.equal, None, _boolean)
_define("not_equal", np.not_equal, None, _boolean)
_define("less", np.less, None, _boolean)
_define("less_or_equal", np.less_equal, None, _boolean)
_define("greater", np.greater, None, _boolean)
_define("greater_or_equal", np.greater_equal, None, _boolean)
_define("logical_and", np.logical_and, None, _boolean)
_define("logical_or", np.logical_or, None, _boolean)
_define("logical_xor", np.logical_xor, None, _boolean)
_define("logical_not", np.logical_not, None, _boolean)
_define(
    "select",
    lambda condition, a, b: np.where(condition, a, b),
    lambda dy, y, c, a, b: (None, select(c, dy, 0.0), select(c, 0.0, dy)),
    _same_branches,
)
# `flush`: subnormal numbers may become 0, where that is faster.
_define(
    "convert",
    lambda x, to, flush=False: x.astype(to),
    lambda dy, y, x, to, flush=False: convert(dy, x.dtype) if x.is_floating and y.is_floating else None,
    lambda x, to, flush=False: np.dtype(to),
)
_define("copy", lambda x: np.array(x), lambda dy, y, x: dy, _same)
# The forward value passes, the gradient does not.
_define("stop_gradient", lambda x: np.array(x), None, _same)
