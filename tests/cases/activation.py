"""Cases of ActivationLayer: every function, its constants, its kinks, and far from zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name the whole world uses)

from mlcompute.enums import ActivationType, ArithmeticOperation
from mlcompute.layers.activation import ActivationDescriptor, ActivationLayer
from tests.cases.case import Array, Case, Refusal

Function = Callable[[Any], Any]

ONE_TO_FOUR = np.array([[[[1, 2], [3, 4]]]], np.float32)
FAR = np.array([[-1e4, -200, -90, -30, -16, -1e-4, 1e-4, 16, 30, 90, 200, 1e4]], np.float32)
WILD = np.array([[math.nan, -math.inf, math.inf]], np.float32)


def _made(kind: ActivationType, *constants: float, exact: bool = False) -> Callable[[], ActivationLayer]:
    return lambda: ActivationLayer(ActivationDescriptor(kind, *constants, exact=exact))


def _row(*values: float) -> Array:
    return np.array([values], np.float32)


def _capped(a: float, b: float) -> Function:
    def oracle(x: Any) -> Any:
        y = F.leaky_relu(x, a)
        return torch.where(y >= b, torch.full_like(y, b), y)

    return oracle


def _soft_plus(a: float, b: float) -> Function:
    # Not F.softplus: it turns linear at a threshold, or overflows without one.
    return lambda x: a * torch.logaddexp(b * x, torch.zeros_like(x))


T = ActivationType
#: name, how to make it, the same in PyTorch, where its kinks are.
_FUNCTIONS: list[tuple[str, Callable[[], ActivationLayer], Function, Sequence[float]]] = [
    ("none", _made(T.NONE), lambda x: x * 1, ()),
    ("relu", _made(T.RELU), torch.relu, (0,)),
    ("relu constructor", ActivationLayer.relu, torch.relu, (0,)),
    ("leaky relu", ActivationLayer.leaky_relu, lambda x: F.leaky_relu(x, 0.01), (0,)),
    ("leaky relu 0.3", lambda: ActivationLayer.leaky_relu(0.3), lambda x: F.leaky_relu(x, 0.3), (0,)),
    ("leaky relu with a negative slope", _made(T.RELU, -0.5), lambda x: F.leaky_relu(x, -0.5), (0,)),
    ("linear type only", _made(T.LINEAR), lambda x: x * 1, ()),
    ("linear", lambda: ActivationLayer.linear(2.5, -0.5), lambda x: 2.5 * x - 0.5, ()),
    ("sigmoid", ActivationLayer.sigmoid, torch.sigmoid, ()),
    ("hard sigmoid", ActivationLayer.hard_sigmoid, lambda x: F.hardtanh(0.2 * x + 0.5, 0, 1), ()),
    ("hard sigmoid 0.5 0.25", _made(T.HARD_SIGMOID, 0.5, 0.25), lambda x: F.hardtanh(x / 2 + 0.25, 0, 1), (-0.5, 1.5)),
    ("tanh", ActivationLayer.tanh, torch.tanh, ()),
    ("tanh 1.7 0.6", _made(T.TANH, 1.7, 0.6), lambda x: 1.7 * torch.tanh(0.6 * x), ()),
    ("absolute", ActivationLayer.absolute, torch.abs, (0,)),
    ("soft plus", ActivationLayer.soft_plus, _soft_plus(1, 1), ()),
    ("soft plus beta 3", lambda: ActivationLayer.soft_plus(3.0), _soft_plus(1 / 3, 3.0), ()),
    ("soft plus 0.5 2", _made(T.SOFT_PLUS, 0.5, 2.0), _soft_plus(0.5, 2.0), ()),
    ("soft sign", ActivationLayer.soft_sign, F.softsign, (0,)),
    ("elu", ActivationLayer.elu, F.elu, (0,)),
    ("elu 0.7", lambda: ActivationLayer.elu(0.7), lambda x: F.elu(x, 0.7), (0,)),
    ("relun type only", _made(T.RELUN), _capped(1.0, 1.0), (0, 1)),
    ("relun 0.2 1.5", lambda: ActivationLayer.relun(0.2, 1.5), _capped(0.2, 1.5), (0, 1.5)),
    ("relun with the cap below zero", lambda: ActivationLayer.relun(0.5, -0.25), _capped(0.5, -0.25), (-0.5, 0)),
    ("relu6", ActivationLayer.relu6, F.relu6, (0, 6)),
    ("log sigmoid", ActivationLayer.log_sigmoid, F.logsigmoid, ()),
    ("selu", ActivationLayer.selu, F.selu, (0,)),
    ("celu", ActivationLayer.celu, F.celu, (0,)),
    ("celu 2.5", lambda: ActivationLayer.celu(2.5), lambda x: F.celu(x, 2.5), (0,)),
    ("hard shrink", ActivationLayer.hard_shrink, F.hardshrink, (-0.5, 0.5)),
    ("hard shrink 0.25", lambda: ActivationLayer.hard_shrink(0.25), lambda x: F.hardshrink(x, 0.25), (-0.25, 0.25)),
    ("soft shrink", ActivationLayer.soft_shrink, F.softshrink, (-0.5, 0.5)),
    ("soft shrink 0.25", lambda: ActivationLayer.soft_shrink(0.25), lambda x: F.softshrink(x, 0.25), (-0.25, 0.25)),
    ("tanh shrink", ActivationLayer.tanh_shrink, F.tanhshrink, ()),
    ("threshold type only", _made(T.THRESHOLD), lambda x: F.threshold(x, 1.0, 1.0), (1,)),
    ("threshold 0.5 -2", lambda: ActivationLayer.threshold(0.5, -2.0), lambda x: F.threshold(x, 0.5, -2.0), (0.5,)),
    ("gelu", ActivationLayer.gelu, lambda x: F.gelu(x, approximate="tanh"), ()),
    ("gelu type only", _made(T.GELU), lambda x: F.gelu(x, approximate="tanh"), ()),
    ("gelu does not read a and b", _made(T.GELU, 3.0, 4.0), lambda x: F.gelu(x, approximate="tanh"), ()),
    ("gelu exact", lambda: ActivationLayer.gelu(exact=True), F.gelu, ()),
    ("gelu exact descriptor", _made(T.GELU, exact=True), F.gelu, ()),
    ("hard swish", ActivationLayer.hard_swish, F.hardswish, (-3, 3)),
    ("silu", ActivationLayer.silu, F.silu, ()),
    ("mish", ActivationLayer.mish, F.mish, ()),
    ("hard tanh", ActivationLayer.hard_tanh, F.hardtanh, (-1, 1)),
    ("clamp type only", _made(T.CLAMP), lambda x: F.hardtanh(x, 1, 1), (1,)),
    ("clamp -0.5 1", lambda: ActivationLayer.clamp(-0.5, 1.0), lambda x: F.hardtanh(x, -0.5, 1.0), (-0.5, 1)),
]


def _oracle(function: Function) -> Callable[..., Any]:
    return lambda p, x: function(x)


def _cases_of(name: str, make: Callable[[], ActivationLayer], function: Function, kinks: Sequence[float]) -> list[Case]:
    cases = [
        Case(name, make, [(3, 2, 3, 5)], _oracle(function)),
        Case(f"{name}, far from zero", make, [FAR], _oracle(function), smooth=False, note="crosses saturation"),
    ]
    if kinks:
        points = _row(*(kink + shift for kink in kinks for shift in (-0.125, 0.0, 0.125)))
        cases.append(
            Case(f"{name}, at its kinks", make, [points], _oracle(function), smooth=False, note="sits on the kinks")
        )
    return cases


def _golden(name: str, make: Callable[[], ActivationLayer], *values: float) -> Case:
    expected = np.array(values, np.float32).reshape(1, 1, 2, 2)
    return Case(f"golden {name}", make, [ONE_TO_FOUR], expect=expected, smooth=False, note="some sit on their kinks")


def _wild(name: str, make: Callable[[], ActivationLayer], *values: float, x: Array = WILD) -> Case:
    return Case(name, make, [x], expect=_row(*values), smooth=False, note="not finite")


_MANY: list[tuple[int, ...]] = [(2, 3, 1, 2, 4), (2, 1, 2, 1, 3, 1, 2, 2)]
_SHAPES: list[tuple[int, ...]] = [*_MANY, (1,), (7,), (1, 1), (5, 1), (1, 1, 1), (2, 1, 7), (1, 1, 1, 1), (1, 3, 1, 1)]

CASES: list[Case] = [
    *(case for row in _FUNCTIONS for case in _cases_of(*row)),
    *(Case(f"elu of {shape}", ActivationLayer.elu, [shape], _oracle(F.elu)) for shape in _SHAPES),
    *(Case(f"relu of {shape}", ActivationLayer.relu, [shape], _oracle(torch.relu)) for shape in _SHAPES),
    Case("celu with a below 0", lambda: ActivationLayer.celu(-2.0), [(3, 5)], _oracle(lambda x: F.celu(x, -2.0))),
    Case("float16 sigmoid", ActivationLayer.sigmoid, [np.linspace(-8, 8, 12).reshape(3, 4).astype(np.float16)],
         _oracle(torch.sigmoid), smooth=False, note="differences vanish in float16"),
    _golden("sigmoid", _made(T.SIGMOID), 0.7310586, 0.880797, 0.9525741, 0.9820138),
    _golden("hard sigmoid", _made(T.HARD_SIGMOID), 0.7, 0.9, 1, 1),
    _golden("tanh", _made(T.TANH), 0.7615941, 0.9640276, 0.9950548, 0.9993293),
    _golden("soft plus", _made(T.SOFT_PLUS), 1.313262, 2.126928, 3.048587, 4.01815),
    _golden("soft sign", _made(T.SOFT_SIGN), 0.5, 0.6666667, 0.75, 0.8),
    _golden("relun type only", _made(T.RELUN), 1, 1, 1, 1),
    _golden("clamp type only", _made(T.CLAMP), 1, 1, 1, 1),
    _golden("log sigmoid", _made(T.LOG_SIGMOID), -0.3132617, -0.126928, -0.04858733, -0.01814996),
    _golden("selu", _made(T.SELU), 1.050701, 2.101402, 3.152103, 4.202804),
    _golden("soft shrink 0.5", _made(T.SOFT_SHRINK), 0.5, 1.5, 2.5, 3.5),
    _golden("soft shrink 0.4", _made(T.SOFT_SHRINK, 0.4), 0.6, 1.6, 2.6, 3.6),
    _golden("tanh shrink", _made(T.TANH_SHRINK), 0.2384059, 1.035972, 2.004945, 3.000671),
    _golden("gelu", _made(T.GELU), 0.841192, 1.954598, 2.996363, 3.99993),
    _golden("hard swish", _made(T.HARD_SWISH), 0.6666667, 1.666667, 3, 4),
    _golden("clamp -1 2", _made(T.CLAMP, -1.0, 2.0), 1, 2, 2, 2),
    _wild("none passes everything", _made(T.NONE), math.nan, -math.inf, math.inf),
    _wild("relu passes nan", _made(T.RELU), math.nan, 0, math.inf),
    _wild("leaky relu passes nan", _made(T.RELU, 0.5), math.nan, -math.inf, math.inf),
    _wild("sigmoid of infinities", _made(T.SIGMOID), math.nan, 0, 1),
    _wild("hard sigmoid of infinities", _made(T.HARD_SIGMOID), math.nan, 0, 1),
    _wild("tanh of infinities", _made(T.TANH), math.nan, -1, 1),
    _wild("absolute of infinities", _made(T.ABSOLUTE), math.nan, math.inf, math.inf),
    _wild("soft plus of infinities", _made(T.SOFT_PLUS), math.nan, 0, math.inf),
    _wild("elu of infinities", _made(T.ELU), math.nan, -1, math.inf),
    _wild("celu of infinities", _made(T.CELU, 2.0), math.nan, -2, math.inf),
    _wild("relun of infinities", _made(T.RELUN, 0.0, 6.0), math.nan, 0, 6),
    _wild("log sigmoid of infinities", _made(T.LOG_SIGMOID), math.nan, -math.inf, 0),
    _wild("hard shrink passes nan", _made(T.HARD_SHRINK), math.nan, -math.inf, math.inf),
    _wild("soft shrink passes nan", _made(T.SOFT_SHRINK), math.nan, -math.inf, math.inf),
    _wild("threshold passes nan", _made(T.THRESHOLD), math.nan, 1, math.inf),
    _wild("clamp passes nan", _made(T.CLAMP, -1.0, 2.0), math.nan, -1, 2),
    _wild("gelu of nan", _made(T.GELU), math.nan, x=_row(math.nan)),
    _wild("soft sign of nan", _made(T.SOFT_SIGN), math.nan, x=_row(math.nan)),
    _wild("clamp with a nan bound", _made(T.CLAMP, math.nan, 2.0), math.nan, math.nan, x=_row(-1, 5)),
    _wild("threshold with a nan limit", _made(T.THRESHOLD, math.nan, 2.0), math.nan, math.nan, x=_row(-1, 5)),
    _wild("relu with a nan slope", _made(T.RELU, math.nan), math.nan, 5, x=_row(-1, 5)),
    _wild("linear with a nan scale", _made(T.LINEAR, math.nan), math.nan, x=_row(1)),
]  # fmt: skip

_INTEGERS = np.ones((2, 3), np.int32)


def _ill(make: Callable[..., Any], *given: Any, **named: Any) -> Callable[[], ActivationLayer]:
    return lambda: make(*given, **named)


REFUSALS: list[Refusal] = [
    Refusal("two sources", ActivationLayer.relu, "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
    Refusal("integers", ActivationLayer.relu, "a source of type INT32 is not supported", [_INTEGERS]),
    Refusal("unknown type", _ill(ActivationDescriptor, 99), "activation_type is 99"),
    Refusal("sentinel", _ill(ActivationDescriptor, T.COUNT), "activation_type is"),
    Refusal("another enumeration", _ill(ActivationDescriptor, ArithmeticOperation.ADD), "activation_type is"),
    Refusal("a type by name", _ill(ActivationDescriptor, "relu"), "must be a ActivationType", error=TypeError),
    Refusal("a constant that is none", _ill(ActivationDescriptor, T.ELU, "1"), "a must be a number", error=TypeError),
    Refusal("celu 0", _ill(ActivationLayer.celu, 0.0), "CELU divides by a, and a is 0"),
    Refusal("clamp the wrong way round", _ill(ActivationLayer.clamp, 2.0, -1.0), "least value a above its largest"),
    Refusal("soft plus 0", _ill(ActivationLayer.soft_plus, 0), "divides by beta, and beta is 0"),
    Refusal("exact relu", _ill(ActivationDescriptor, T.RELU, exact=True), "exact is for GELU, the type is RELU"),
    Refusal("no descriptor", _ill(ActivationLayer, T.RELU), "needs an ActivationDescriptor", error=TypeError),
]
