"""Cases of ComparisonLayer: every operation on floats, integers and booleans, and NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ArithmeticOperation, ComparisonOperation
from mlcompute.layers.comparison import ComparisonLayer
from tests.cases.case import Array, Case, Refusal

O = ComparisonOperation


def _made(operation: Any) -> Callable[[], ComparisonLayer]:
    return lambda: ComparisonLayer(operation)


def _oracle(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, *sources: function(*sources)


_COMPARE: list[tuple[ComparisonOperation, Callable[..., Any], list[bool]]] = [
    (O.EQUAL, torch.eq, [False, False, False]),
    (O.NOT_EQUAL, torch.ne, [True, True, True]),
    (O.LESS, torch.lt, [False, False, True]),
    (O.GREATER, torch.gt, [False, False, False]),
    (O.LESS_OR_EQUAL, torch.le, [False, False, True]),
    (O.GREATER_OR_EQUAL, torch.ge, [False, False, False]),
]
_LOGICAL: list[tuple[ComparisonOperation, Callable[..., Any]]] = [
    (O.LOGICAL_AND, torch.logical_and),
    (O.LOGICAL_OR, torch.logical_or),
    (O.LOGICAL_NAND, lambda x, y: ~torch.logical_and(x, y)),
    (O.LOGICAL_NOR, lambda x, y: ~torch.logical_or(x, y)),
    (O.LOGICAL_XOR, torch.logical_xor),
]
_EVERY = [(kind, function) for kind, function, _ in _COMPARE] + _LOGICAL

# Small whole numbers, so that equality and zero happen often; every pair of values occurs.
_X = np.repeat(np.arange(-2, 3), 5).reshape(5, 5)
_Y = np.tile(np.arange(-2, 3), 5).reshape(5, 5)
_TYPES: list[tuple[str, Any]] = [
    ("float32", np.float32), ("float16", np.float16), ("int64", np.int64), ("int32", np.int32), ("int8", np.int8),
]  # fmt: skip
_TRUTH = np.array([[False, False, True, True]]), np.array([[False, True, False, True]])
_STEPS = "steps, no gradient"


def _row(*values: float) -> Array:
    return np.array([values], np.float32)


CASES: list[Case] = [
    Case("GREATER than a constant", lambda: ComparisonLayer(O.GREATER, constant=0.5), [(3, 4)], lambda p, x: x > 0.5,
         smooth=False, note=_STEPS),
    Case("LESS than a constant of integers", lambda: ComparisonLayer(O.LESS, constant=2),
         [np.arange(6, dtype=np.int32).reshape(2, 3)], expect=np.arange(6).reshape(2, 3) < 2),
    *(
        Case(f"{kind.name} of {name}", _made(kind), [_X.astype(dtype), _Y.astype(dtype)], _oracle(function),
             smooth=False, note=_STEPS)
        for kind, function in _EVERY
        for name, dtype in _TYPES
    ),
    *(Case(f"{kind.name} of bool", _made(kind), list(_TRUTH), _oracle(function)) for kind, function in _EVERY),
    *(
        Case(f"{kind.name} of (2, 3, 1, 5) and (2, 1, 4, 1)", _made(kind), [(2, 3, 1, 5), (2, 1, 4, 1)],
             _oracle(function))
        for kind, function in _EVERY
    ),
    *(
        Case(f"{kind.name} of (3,) and (2, 3)", _made(kind), [(3,), (2, 3)], _oracle(function), batches=False)
        for kind, function in _EVERY
    ),
    *(
        Case(f"{kind.name} with nan", _made(kind), [_row(math.nan, math.nan, -math.inf), _row(math.nan, 1, math.inf)],
             expect=np.array([expected]), smooth=False, note="nan is unequal to everything")
        for kind, _, expected in _COMPARE
    ),
    Case("LOGICAL_AND of nan", _made(O.LOGICAL_AND), [_row(math.nan, math.nan, -0.0), _row(1, 0, 1)],
         expect=np.array([[True, False, False]]), smooth=False, note="nan is not zero"),
    Case("LOGICAL_AND of float32 and bool", _made(O.LOGICAL_AND), [_row(0, 2, 0, -1), _TRUTH[1]],
         expect=np.array([[False, True, False, True]]), smooth=False, note=_STEPS),
    Case("LOGICAL_NOT of bool", _made(O.LOGICAL_NOT), [_TRUTH[0]], _oracle(torch.logical_not)),
    *(
        Case(f"LOGICAL_NOT of {name}", _made(O.LOGICAL_NOT), [_X.astype(dtype)], _oracle(torch.logical_not),
             smooth=False, note=_STEPS)
        for name, dtype in _TYPES
    ),
    Case("LOGICAL_NOT of nan", _made(O.LOGICAL_NOT), [_row(math.nan, 0)], expect=np.array([[False, True]]),
         smooth=False, note="nan is not zero"),
    Case("LESS of one number", _made(O.LESS), [(1,), (1,)], _oracle(torch.lt)),
]  # fmt: skip

REFUSALS: list[Refusal] = [
    Refusal("a logical constant", lambda: ComparisonLayer(O.LOGICAL_OR, constant=1), "compares with no number"),
    Refusal("half an integer", lambda: ComparisonLayer(O.LESS, constant=0.5), "the constant is 0.5",
            [np.ones((2, 3), np.int32)]),
    Refusal("a number and a truth", lambda: ComparisonLayer(O.LESS, constant=1), "the source is BOOLEAN",
            [np.ones((2, 3), np.bool_)]),
    *(
        Refusal(f"{kind.name} with one source", _made(kind), f"{kind.name} takes 2 source(s), 1 were given", [(2, 3)])
        for kind, _ in _EVERY
    ),
    Refusal("LOGICAL_NOT with two sources", _made(O.LOGICAL_NOT), "LOGICAL_NOT takes 1 source(s), 2 were given",
            [(2, 3), (2, 3)]),
    Refusal("no common shape", _made(O.EQUAL), "(2, 3) and (2, 4) have no common shape", [(2, 3), (2, 4)]),
    Refusal("two types", _made(O.LESS), "different types: FLOAT32, INT32", [(2, 3), np.ones((2, 3), np.int32)]),
    Refusal("unknown operation", _made(99), "operation is 99"),
    Refusal("sentinel", _made(O.COUNT), "operation is"),
    Refusal("another enumeration", _made(ArithmeticOperation.ADD), "operation is"),
    Refusal("an operation by name", _made("less"), "must be a ComparisonOperation", error=TypeError),
]  # fmt: skip
