"""Activations: one function of one number, applied to every element."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from mlcompute import ops
from mlcompute.enums import ActivationType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import member, real
from mlcompute.layers.factories import factory
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.elementwise import GELU_CUBIC, GELU_SCALE
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946

#: (a, b) when only the type is given; (1, 1) for the types not listed.
_DEFAULTS = {
    ActivationType.RELU: (0.0, 1.0),
    ActivationType.LINEAR: (1.0, 0.0),
    ActivationType.HARD_SIGMOID: (0.2, 0.5),
    ActivationType.HARD_SHRINK: (0.5, 1.0),
    ActivationType.SOFT_SHRINK: (0.5, 1.0),
}
#: The constants that a function compares x with.
_LIMITS = {
    ActivationType.RELUN: ("b",),
    ActivationType.CLAMP: ("a", "b"),
    ActivationType.HARD_SHRINK: ("a",),
    ActivationType.SOFT_SHRINK: ("a",),
    ActivationType.THRESHOLD: ("a",),
}


class ActivationDescriptor:
    """Which function, and its constants a, b and c. Immutable.

    a, b, c   None takes the type's own default; what they mean is in `activate`; no function reads c
    exact     GELU only: x times the normal distribution function itself instead of its tanh approximation

    >>> import mlcompute as mlc
    >>> mlc.ActivationDescriptor(mlc.ActivationType.HARD_SIGMOID)
    ActivationDescriptor(HARD_SIGMOID, a=0.2, b=0.5, c=1.0)
    """

    activation_type = ReadOnly[ActivationType]("Which function.")
    a = ReadOnly[float]("First constant.")
    b = ReadOnly[float]("Second constant.")
    c = ReadOnly[float]("Third constant; kept, but no function reads it.")
    exact = ReadOnly[bool]("Is this GELU the one with the error function?")

    def __init__(
        self,
        activation_type: ActivationType,
        a: float | None = None,
        b: float | None = None,
        c: float | None = None,
        *,
        exact: bool = False,
    ) -> None:
        who = "ActivationDescriptor"
        self._activation_type = kind = member(who, "activation_type", ActivationType, activation_type)
        default_a, default_b = _DEFAULTS.get(kind, (1.0, 1.0))
        self._a = default_a if a is None else real(who, "a", a)
        self._b = default_b if b is None else real(who, "b", b)
        self._c = 1.0 if c is None else real(who, "c", c)
        self._exact = bool(exact)
        if kind == ActivationType.CELU and self._a == 0:
            raise DataError(f"{who}: CELU divides by a, and a is 0", fix="give another a, or use RELU")
        if kind == ActivationType.CLAMP and self._a > self._b:
            raise DataError(
                f"{who}: CLAMP has its least value a above its largest value b",
                a=self._a,
                b=self._b,
                fix="exchange them",
            )
        if self._exact and kind != ActivationType.GELU:
            raise DataError(f"{who}: exact is for GELU, the type is {kind.name}", fix="leave exact out")

    def copy(self) -> ActivationDescriptor:
        """An equal descriptor of its own."""
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActivationDescriptor) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        exact = ", exact=True" if self._exact else ""
        return f"ActivationDescriptor({self._activation_type.name}, a={self._a}, b={self._b}, c={self._c}{exact})"


def _plain(cls: type[ActivationLayer], kind: ActivationType) -> ActivationLayer:
    return cls(ActivationDescriptor(kind))


class ActivationLayer(Layer):
    """y = f(x), element by element.   x (*)   ->   y (*)

    descriptor  which f; the class methods below make the usual ones
    """

    default_label = "Activation"
    source_types = FLOATS

    descriptor = ReadOnly[ActivationDescriptor]("Which function, and its constants.")

    relu = factory(_plain, ActivationType.RELU, "max(x, 0)")
    sigmoid = factory(_plain, ActivationType.SIGMOID, "1 / (1 + e^-x)")
    hard_sigmoid = factory(_plain, ActivationType.HARD_SIGMOID, "0.2 x + 0.5, kept within 0 and 1")
    tanh = factory(_plain, ActivationType.TANH, "tanh x")
    absolute = factory(_plain, ActivationType.ABSOLUTE, "|x|")
    soft_sign = factory(_plain, ActivationType.SOFT_SIGN, "x / (1 + |x|)")
    log_sigmoid = factory(_plain, ActivationType.LOG_SIGMOID, "log(1 / (1 + e^-x))")
    selu = factory(_plain, ActivationType.SELU, "ELU with the two constants that keep mean 0 and variance 1")
    hard_swish = factory(_plain, ActivationType.HARD_SWISH, "x min(max(x + 3, 0), 6) / 6")
    silu = factory(_plain, ActivationType.SILU, "x / (1 + e^-x), also called swish")
    mish = factory(_plain, ActivationType.MISH, "x tanh(log(1 + e^x))")

    def __init__(self, descriptor: ActivationDescriptor) -> None:
        super().__init__()
        if not isinstance(descriptor, ActivationDescriptor):
            raise TypeError(f"ActivationLayer: needs an ActivationDescriptor, not {type(descriptor).__name__}")
        self._descriptor = descriptor

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        return list(sources)

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        return activate(self._descriptor, x)

    @classmethod
    def _of(cls, kind: ActivationType, a: float | None = None, b: float | None = None) -> ActivationLayer:
        return cls(ActivationDescriptor(kind, a, b))

    @classmethod
    def relu6(cls) -> ActivationLayer:
        """min(max(x, 0), 6)"""
        return cls._of(ActivationType.RELUN, 0.0, 6.0)

    @classmethod
    def leaky_relu(cls, negative_slope: float = 0.01) -> ActivationLayer:
        """x where positive, else negative_slope x"""
        return cls._of(ActivationType.RELU, negative_slope)

    @classmethod
    def linear(cls, scale: float, bias: float) -> ActivationLayer:
        """scale x + bias"""
        return cls._of(ActivationType.LINEAR, scale, bias)

    @classmethod
    def soft_plus(cls, beta: float = 1.0) -> ActivationLayer:
        """log(1 + e^(beta x)) / beta"""
        beta = real("ActivationLayer.soft_plus", "beta", beta)
        if beta == 0:
            raise DataError("ActivationLayer.soft_plus: divides by beta, and beta is 0")
        return cls._of(ActivationType.SOFT_PLUS, 1.0 / beta, beta)

    @classmethod
    def elu(cls, a: float = 1.0) -> ActivationLayer:
        """x where positive, else a (e^x - 1)"""
        return cls._of(ActivationType.ELU, a)

    @classmethod
    def relun(cls, a: float, b: float) -> ActivationLayer:
        """min(x where positive, else a x; b)"""
        return cls._of(ActivationType.RELUN, a, b)

    @classmethod
    def celu(cls, a: float = 1.0) -> ActivationLayer:
        """x where positive, else a (e^(x/a) - 1)"""
        return cls._of(ActivationType.CELU, a)

    @classmethod
    def hard_shrink(cls, a: float = 0.5) -> ActivationLayer:
        """x outside [-a, a], else 0"""
        return cls._of(ActivationType.HARD_SHRINK, a)

    @classmethod
    def soft_shrink(cls, a: float = 0.5) -> ActivationLayer:
        """x moved towards 0 by a, 0 where it would cross"""
        return cls._of(ActivationType.SOFT_SHRINK, a)

    @classmethod
    def tanh_shrink(cls) -> ActivationLayer:
        """x - tanh x"""
        return cls._of(ActivationType.TANH_SHRINK, 0.0)

    @classmethod
    def threshold(cls, threshold: float, replacement: float) -> ActivationLayer:
        """x above the threshold, else the replacement"""
        return cls._of(ActivationType.THRESHOLD, threshold, replacement)

    @classmethod
    def gelu(cls, *, exact: bool = False) -> ActivationLayer:
        """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); exact: x / 2 (1 + erf(x / sqrt 2))"""
        return cls(ActivationDescriptor(ActivationType.GELU, GELU_SCALE, GELU_CUBIC, exact=exact))

    @classmethod
    def hard_tanh(cls) -> ActivationLayer:
        """min(max(x, -1), 1)"""
        return cls._of(ActivationType.CLAMP, -1.0, 1.0)

    @classmethod
    def clamp(cls, min_value: float, max_value: float) -> ActivationLayer:
        """min(max(x, min_value), max_value)"""
        return cls._of(ActivationType.CLAMP, min_value, max_value)


def activate(descriptor: ActivationDescriptor, x: Value) -> Value:
    """f(x) for the descriptor's f. At a kink the slope is that of the negative, or of the flat, side.

    Every comparison is written so that a NaN takes the branch that passes it on.
    """
    kind, a, b = descriptor.activation_type, descriptor.a, descriptor.b
    if kind in _LIMITS and any(math.isnan(getattr(descriptor, limit)) for limit in _LIMITS[kind]):
        # Comparing with NaN is false everywhere, which would hide it; as arithmetic it spreads.
        return x * math.nan
    match kind:
        case ActivationType.NONE:
            return x
        case ActivationType.RELU:
            return _leaky(x, a)
        case ActivationType.LINEAR:
            return x * a + b
        case ActivationType.SIGMOID:
            return ops.sigmoid(x)
        case ActivationType.HARD_SIGMOID:
            return _clamp(x * a + b, 0.0, 1.0)
        case ActivationType.TANH:
            return ops.tanh(x * b) * a
        case ActivationType.ABSOLUTE:
            return ops.abs_(x)
        case ActivationType.SOFT_PLUS:
            return ops.softplus(x * b) * a
        case ActivationType.SOFT_SIGN:
            return x / (ops.abs_(x) + 1.0)
        case ActivationType.ELU:
            return _elu(x, a, 1.0)
        case ActivationType.RELUN:
            y = _leaky(x, a)
            return ops.select(y >= b, b, y)
        case ActivationType.LOG_SIGMOID:
            return -ops.softplus(-x)
        case ActivationType.SELU:
            return _elu(x, _SELU_ALPHA, 1.0) * _SELU_SCALE
        case ActivationType.CELU:
            return _elu(x, a, 1.0 / a)
        case ActivationType.HARD_SHRINK:
            return ops.select(ops.abs_(x) <= a, 0.0, x)
        case ActivationType.SOFT_SHRINK:
            return ops.select(x > a, x - a, ops.select(x >= -a, 0.0, x + a))
        case ActivationType.TANH_SHRINK:
            return x - ops.tanh(x)
        case ActivationType.THRESHOLD:
            return ops.select(x <= a, b, x)
        case ActivationType.GELU:
            return _gelu(x, descriptor.exact)
        case ActivationType.HARD_SWISH:
            return x * (_clamp(x + 3.0, 0.0, 6.0) * (1.0 / 6.0))
        case ActivationType.CLAMP:
            return _clamp(x, a, b)
        case ActivationType.SILU:
            return x * ops.sigmoid(x)
        case ActivationType.MISH:
            return x * ops.tanh(ops.softplus(x))
    raise AssertionError(f"{kind!r} passed the descriptor")


def _leaky(x: Value, slope: float) -> Value:
    return ops.relu(x) if slope == 0 else ops.select(x > 0.0, x, x * slope)


def _clamp(x: Value, low: float, high: float) -> Value:
    return ops.select(x <= low, low, ops.select(x >= high, high, x))


def _elu(x: Value, a: float, rate: float) -> Value:
    """x where positive, else a (e^(rate x) - 1)"""
    # The branch not taken must stay finite: an infinity times its zero gradient would be NaN.
    negative = ops.select(x > 0.0, 0.0, x)
    return ops.select(x > 0.0, x, ops.expm1(negative * rate) * a)


def _gelu(x: Value, exact: bool) -> Value:
    if exact:
        return x * (ops.erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    return ops.gelu(x)
