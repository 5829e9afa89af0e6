"""Cases of ArithmeticLayer: every operation, broadcasting, integers, and outside the domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ArithmeticOperation, ComparisonOperation
from mlcompute.layers.arithmetic import ArithmeticLayer
from tests.cases.case import Array, Case, Refusal, Source, numbers

O = ArithmeticOperation

ONE_TO_FOUR = np.array([[[[1, 2], [3, 4]]]], np.float32)


def _made(operation: Any) -> Callable[[], ArithmeticLayer]:
    return lambda: ArithmeticLayer(operation)


def _oracle(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, *sources: function(*sources)


def _row(*values: float) -> Array:
    return np.array([values], np.float32)


def _within(low: float, high: float, *shape: int) -> Array:
    return numbers(*shape, seed=7, low=low, high=high)


def _where_zero(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def oracle(x: Any, y: Any) -> Any:
        # Zeroing both operands keeps NaN out of PyTorch's gradients as well.
        is_zero = y == 0
        safe = function(torch.where(is_zero, 0.0, x), torch.where(is_zero, 1.0, y))
        return torch.where(is_zero, 0.0, safe)

    return oracle


#: operation, the same in PyTorch, the range it is asked on
_UNARY: list[tuple[ArithmeticOperation, Callable[[Any], Any], float, float]] = [
    (O.SQRT, torch.sqrt, 0.1, 9),
    (O.RSQRT, torch.rsqrt, 0.2, 9),
    (O.SIN, torch.sin, -7, 7),
    (O.COS, torch.cos, -7, 7),
    (O.TAN, torch.tan, -1.3, 1.3),
    (O.ASIN, torch.asin, -0.95, 0.95),
    (O.ACOS, torch.acos, -0.95, 0.95),
    (O.ATAN, torch.atan, -7, 7),
    (O.SINH, torch.sinh, -3, 3),
    (O.COSH, torch.cosh, -3, 3),
    (O.TANH, torch.tanh, -3, 3),
    (O.ASINH, torch.asinh, -7, 7),
    (O.ACOSH, torch.acosh, 1.2, 9),
    (O.ATANH, torch.atanh, -0.95, 0.95),
    (O.EXP, torch.exp, -3, 3),
    (O.EXP2, torch.exp2, -3, 3),
    (O.LOG, torch.log, 0.1, 9),
    (O.LOG2, torch.log2, 0.1, 9),
]
_ROUNDING = [(O.FLOOR, torch.floor), (O.ROUND, torch.round), (O.CEIL, torch.ceil)]

_POSITIVE = _within(0.3, 3, 4, 3)
_BINARY: list[tuple[ArithmeticOperation, Callable[[Any, Any], Any], Source]] = [
    (O.ADD, torch.add, (4, 3)),
    (O.SUBTRACT, torch.sub, (4, 3)),
    (O.MULTIPLY, torch.mul, (4, 3)),
    (O.DIVIDE, torch.div, _POSITIVE),
    (O.POW, torch.pow, _POSITIVE),
    (O.MULTIPLY_NO_NAN, _where_zero(torch.mul), (4, 3)),
    (O.DIVIDE_NO_NAN, _where_zero(torch.div), _POSITIVE),
    (O.MIN, torch.minimum, (4, 3)),
    (O.MAX, torch.maximum, (4, 3)),
    (O.FLOOR_DIVIDE, lambda x, y: (x / y).floor(), _POSITIVE),
    (O.REMAINDER, torch.remainder, _POSITIVE),
]

#: Pairs of shapes that broadcast; whether the first source's axis 0 is a batch axis of both.
_PAIRS: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [
    ((3, 1), (3, 5), True),
    ((3, 5), (3, 1), True),
    ((2, 3, 4, 5), (2, 1, 1, 5), True),
    ((2, 1, 4, 1), (2, 3, 1, 5), True),
    ((1, 1), (1, 1), True),
    ((4, 3), (3,), False),
    ((3,), (4, 3), False),
    ((1, 3), (4, 3), False),
    ((2, 3, 4), (1,), False),
    ((1,), (2, 3, 4, 5), False),
    ((2, 1, 3), (5, 1, 1, 1), False),
]


def _broadcast(operation: ArithmeticOperation, function: Callable[..., Any]) -> list[Case]:
    return [
        Case(f"{operation.name} of {x} and {y}", _made(operation), [x, y], _oracle(function), batches=batches)
        for x, y, batches in _PAIRS
    ]


def _values(operation: ArithmeticOperation, sources: Sequence[Source], *values: float, note: str) -> Case:
    """Values outside the domain, or with a rule of their own: only the forward pass has a meaning to compare."""
    name = f"{operation.name}: {note}"
    return Case(name, _made(operation), sources, expect=_row(*values), smooth=False, note=note)


def _ints(dtype: type[Any], *shape: int) -> Array:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype) - 3


def _integers(dtype: type[Any], name: str) -> list[Case]:
    x, y = _ints(dtype, 2, 5), _ints(dtype, 1, 5) * dtype(2) + dtype(1)
    pairs = [(O.ADD, np.add), (O.SUBTRACT, np.subtract), (O.MULTIPLY, np.multiply), (O.MIN, np.minimum),
             (O.MAX, np.maximum), (O.FLOOR_DIVIDE, np.floor_divide), (O.REMAINDER, np.remainder)]  # fmt: skip
    cases = [
        Case(f"{kind.name} of {name}", _made(kind), [x, y], expect=formula(x, y), batches=False)
        for kind, formula in pairs
    ]
    return cases + [Case(f"{kind.name} of {name}", _made(kind), [x], expect=x) for kind, _ in _ROUNDING]


_INF, _NAN = math.inf, math.nan
_HALVES = np.arange(-3, 3.5, 0.5, dtype=np.float32)[None]
_TIES = [_row(1, 2, 3, -0.5), _row(1, 3, 2, -0.5)]
_KINKS = "gradient at equal operands"

def _constant(operation: ArithmeticOperation, number: float, first: bool = False) -> Callable[[], ArithmeticLayer]:
    return lambda: ArithmeticLayer(operation, constant=number, constant_first=first)


#: A constant on either side.
_CONSTANTS = [
    *(Case(f"{kind.name} with a constant", _constant(kind, 0.5), [(2, 3)], _oracle(lambda x, f=function: f(x, 0.5)))
      for kind, function in [(O.ADD, torch.add), (O.SUBTRACT, torch.subtract), (O.MULTIPLY, torch.multiply)]),
    Case("DIVIDE by a constant", _constant(O.DIVIDE, 3), [(2, 3)], lambda p, x: x / 3),
    Case("a constant divided", _constant(O.DIVIDE, 3, True), [_within(0.5, 2, 2, 3)], lambda p, x: 3 / x),
    Case("a constant less a source", _constant(O.SUBTRACT, 1, True), [(2, 3)], lambda p, x: 1 - x),
    Case("MAX with a constant", _constant(O.MAX, 0.1), [(2, 3)],
         lambda p, x: torch.maximum(x, torch.tensor(0.1, dtype=x.dtype))),
    *(Case(f"POW {power}", _constant(O.POW, power), [_within(0.5, 2, 2, 3)], lambda p, x, e=power: x**e)
      for power in (-1, 0, 0.5, 1, 2, 3, 2.5, -2)),
    Case("POW 2 of negative numbers", _constant(O.POW, 2), [(3, 4)], lambda p, x: x**2),
    Case("a constant to a power", _constant(O.POW, 2, True), [(3, 4)], lambda p, x: 2**x),
    Case("integers and a constant", _constant(O.MULTIPLY, -2), [_ints(np.int64, 2, 3)],
         expect=_ints(np.int64, 2, 3) * -2),
]

CASES: list[Case] = [
    *_CONSTANTS,
    *(
        Case(f"{kind.name}", _made(kind), [_within(low, high, 3, 2, 1, 5)], _oracle(function))
        for kind, function, low, high in _UNARY
    ),
    *(
        Case(f"{kind.name} of one number", _made(kind), [_within(low, high, 1)], _oracle(function))
        for kind, function, low, high in _UNARY
    ),
    *(Case(f"{kind.name}", _made(kind), [_within(-5, 5, 3, 7)], _oracle(function)) for kind, function in _ROUNDING),
    *(
        Case(f"{kind.name} at halves", _made(kind), [_HALVES], _oracle(function),
             smooth=False, note="sits on the steps")
        for kind, function in _ROUNDING
    ),
    *(
        Case(f"{kind.name}", _made(kind), [_POSITIVE if kind == O.POW else (4, 3), y], _oracle(function))
        for kind, function, y in _BINARY
    ),
    *_broadcast(O.ADD, torch.add),
    *_broadcast(O.SUBTRACT, torch.sub),
    *_broadcast(O.MULTIPLY, torch.mul),
    *_broadcast(O.MAX, torch.maximum),
    *_broadcast(O.MULTIPLY_NO_NAN, _where_zero(torch.mul)),
    Case("DIVIDE by a column", _made(O.DIVIDE), [(4, 3), _within(0.5, 2, 4, 1)], _oracle(torch.div)),
    Case("POW of a column", _made(O.POW), [_within(0.5, 2, 4, 1), (4, 3)], _oracle(torch.pow)),
    Case("DIVIDE_NO_NAN by a column with a zero", _made(O.DIVIDE_NO_NAN),
         [(4, 3), np.array([[2], [0], [-0.5], [1]], np.float32)], _oracle(_where_zero(torch.div)),
         smooth=False, note="jumps at zero"),
    Case("MULTIPLY_NO_NAN with zeros", _made(O.MULTIPLY_NO_NAN), [(2, 4), np.array([[0, 1, 0, 2]] * 2, np.float32)],
         _oracle(_where_zero(torch.mul)), smooth=False, note="no gradient at zero"),
    Case("MIN with equal operands", _made(O.MIN), _TIES, _oracle(torch.minimum), smooth=False, note=_KINKS),
    Case("MAX with equal operands", _made(O.MAX), _TIES, _oracle(torch.maximum), smooth=False, note=_KINKS),
    Case("POW at zero", _made(O.POW), [_row(0, 0, 0, 2), _row(0, 1, 2, 0)], _oracle(torch.pow), smooth=False,
         note="one-sided at zero"),
    Case("ADD of float16", _made(O.ADD), [numbers(3, 4).astype(np.float16), numbers(3, 4, seed=1).astype(np.float16)],
         _oracle(torch.add), smooth=False, note="differences vanish in float16"),
    Case("golden ADD", _made(O.ADD), [ONE_TO_FOUR, ONE_TO_FOUR], expect=ONE_TO_FOUR * 2),
    Case("golden MULTIPLY", _made(O.MULTIPLY), [ONE_TO_FOUR, ONE_TO_FOUR], expect=ONE_TO_FOUR**2),
    Case("golden POW", _made(O.POW), [ONE_TO_FOUR, ONE_TO_FOUR], expect=ONE_TO_FOUR**ONE_TO_FOUR),
    *_integers(np.int32, "int32"),
    *_integers(np.int64, "int64"),
    _values(O.ACOS, [_row(2, -2, 1)], _NAN, _NAN, 0, note="outside [-1, 1]"),
    _values(O.ASIN, [_row(2, 0)], _NAN, 0, note="outside [-1, 1]"),
    _values(O.ATANH, [_row(1, -1, 2)], _INF, -_INF, _NAN, note="at and beyond 1"),
    _values(O.ACOSH, [_row(1, 0.5)], 0, _NAN, note="below 1"),
    _values(O.SQRT, [_row(-1, 0, _INF)], _NAN, 0, _INF, note="below 0"),
    _values(O.RSQRT, [_row(-1, 0, _INF)], _NAN, _INF, 0, note="at and below 0"),
    _values(O.LOG, [_row(-1, 0, _INF)], _NAN, -_INF, _INF, note="at and below 0"),
    _values(O.LOG2, [_row(-1, 0, 8)], _NAN, -_INF, 3, note="at and below 0"),
    _values(O.EXP, [_row(200, -200)], _INF, 0, note="overflow"),
    _values(O.EXP2, [_row(200, -200)], _INF, 0, note="overflow"),
    _values(O.DIVIDE, [_row(1, -1, 0), _row(0, 0, 0)], _INF, -_INF, _NAN, note="by 0"),
    _values(O.POW, [_row(-2, -2, 0), _row(3, 0.5, -1)], -8, _NAN, _INF, note="of numbers not positive"),
    _values(O.MIN, [_row(_NAN, 1, 2), _row(1, _NAN, 3)], _NAN, _NAN, 2, note="with nan"),
    _values(O.MAX, [_row(_NAN, 1, 2), _row(1, _NAN, 3)], _NAN, _NAN, 3, note="with nan"),
    _values(O.MULTIPLY_NO_NAN, [_row(_NAN, _INF, 2, 0), _row(0, 0, 3, _NAN)], 0, 0, 6, _NAN, note="nan times 0"),
    _values(O.FLOOR_DIVIDE, [_row(1, -1, -7, 1, -1, _INF), _row(0.1, 0, 2, _INF, _INF, 2)],
            9, -_INF, -4, 0, -1, _NAN, note="down"),
    _values(O.REMAINDER, [_row(-7, 7, -1, 1, 3, _INF), _row(2, -2, _INF, _INF, 0, 2)],
            1, -1, _INF, 1, _NAN, _NAN, note="signs"),
    _values(O.DIVIDE_NO_NAN, [_row(_NAN, _INF, 6, 0), _row(0, 0, 3, 0)], 0, 0, 2, 0, note="nan by 0"),
]  # fmt: skip

_INT32, _INT64 = np.ones((2, 3), np.int32), np.ones((2, 3), np.int64)
_FLOATS_ONLY = sorted(set(O) - {O.ADD, O.SUBTRACT, O.MULTIPLY, O.MIN, O.MAX, O.FLOOR, O.ROUND, O.CEIL, O.COUNT}
    - {O.FLOOR_DIVIDE, O.REMAINDER})
_PAIRED = {kind for kind, _, _ in _BINARY}

REFUSALS: list[Refusal] = [
    Refusal("a constant for one operand", _constant(O.EXP, 1), "EXP has one operand"),
    Refusal("constant_first alone", lambda: ArithmeticLayer(O.ADD, constant_first=True), "constant_first without"),
    Refusal("a constant that is no number", _constant(O.ADD, "1"), "constant must be a number", error=TypeError),  # type: ignore[arg-type]
    Refusal("half of integers", _constant(O.MULTIPLY, 0.5), "the constant is 0.5", [_INT32]),
    Refusal("a constant out of range", _constant(O.ADD, 2.0**40), "a whole number that INT32 can hold", [_INT32]),
    Refusal("a constant and two sources", _constant(O.ADD, 1), "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
    *(
        Refusal(f"{kind.name} of integers", _made(kind), f"{kind.name} is not defined for INT32",
                [_INT32] * (2 if kind in _PAIRED else 1))
        for kind in _FLOATS_ONLY
    ),
    *(
        Refusal(f"{kind.name} with one source", _made(kind), f"{kind.name} takes 2 source(s), 1 were given", [(2, 3)])
        for kind in sorted(_PAIRED)
    ),
    *(
        Refusal(f"{kind.name} with two sources", _made(kind), f"{kind.name} takes 1 source(s), 2 were given",
                [(2,), (2,)])
        for kind in [*(row[0] for row in _UNARY), *(row[0] for row in _ROUNDING)]
    ),
    Refusal("three sources", _made(O.ADD), "ADD takes 2 source(s), 3 were given", [(2,), (2,), (2,)]),
    Refusal("no common shape", _made(O.ADD), "(2, 3) and (2, 4) have no common shape", [(2, 3), (2, 4)]),
    Refusal("aligned at the wrong end", _made(O.MULTIPLY), "have no common shape", [(4, 3), (4,)]),
    Refusal("two types of integers", _made(O.ADD), "different types: INT32, INT64", [_INT32, _INT64]),
    Refusal("integers and floats", _made(O.ADD), "different types: INT32, FLOAT32", [_INT32, (2, 3)]),
    Refusal("halves and floats", _made(O.ADD), "different types", [np.ones((2, 3), np.float16), (2, 3)]),
    Refusal("booleans", _made(O.ADD), "a source of type BOOLEAN is not supported", [np.ones((2, 3), np.bool_)] * 2),
    Refusal("unknown operation", _made(99), "operation is 99"),
    Refusal("sentinel", _made(O.COUNT), "operation is"),
    Refusal("another enumeration", _made(ComparisonOperation.LESS), "operation is"),
    Refusal("an operation by name", _made("add"), "must be a ArithmeticOperation", error=TypeError),
]  # fmt: skip
