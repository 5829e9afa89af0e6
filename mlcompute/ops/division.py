"""Quotients and remainders as NumPy has them: the quotient rounded down, the remainder of the divisor's sign.

Both are made of other ops. Floats are divided in float64: with quotients below 2^29 every result is that of exact
numbers, rounded once. Whole numbers are exact.
"""

from __future__ import annotations

import math

import numpy as np

from mlcompute.ops.elementwise import (
    abs_,
    convert,
    equal,
    floor,
    greater_or_equal,
    less,
    logical_and,
    not_equal,
    select,
)
from mlcompute.ops.op import Value

__all__ = ["floor_divide", "remainder"]

_DOUBLE = np.dtype(np.float64)


def floor_divide(a: Value, b: Value) -> Value:
    """a // b.   Whole numbers divided by 0 give 0."""
    return _divided(a, b)[0]


def remainder(a: Value, b: Value) -> Value:
    """a - (a // b) b, of b's sign.   Of whole numbers divided by 0 it is 0."""
    return _divided(a, b)[1]


def _divided(a: Value, b: Value) -> tuple[Value, Value]:
    return _floats(a, b) if a.is_floating else _integers(a, b)


def _floats(a: Value, b: Value) -> tuple[Value, Value]:
    x, y = convert(a, _DOUBLE), convert(b, _DOUBLE)
    is_finite = less(abs_(x), math.inf)
    # A finite number divided by an infinity is its own remainder, unless the signs differ.
    by_infinity = logical_and(is_finite, equal(abs_(y), math.inf))
    crosses = logical_and(not_equal(x, 0.0), not_equal(less(x, 0.0), less(y, 0.0)))
    quotient = select(logical_and(by_infinity, crosses), -1.0, floor(x / y))
    quotient = select(is_finite, quotient, math.nan)
    rest = select(by_infinity, select(crosses, y, x), x - quotient * y)
    return convert(quotient, a.dtype), convert(rest, a.dtype)


def _integers(a: Value, b: Value) -> tuple[Value, Value]:
    by_zero = equal(b, 0)
    divisor = select(by_zero, 1, b)
    y = convert(divisor, _DOUBLE)
    quotient = convert(floor(convert(a, _DOUBLE) / y), a.dtype)
    rest = a - quotient * divisor
    if a.dtype.itemsize == 8:  # numbers beyond 2^53 were rounded: what is left is divided again, then it is off by 1
        more = convert(floor(convert(rest, _DOUBLE) / y), a.dtype)
        quotient, rest = quotient + more, rest - more * divisor
        too_large = logical_and(not_equal(rest, 0), not_equal(less(rest, 0), less(divisor, 0)))
        quotient, rest = select(too_large, quotient - 1, quotient), select(too_large, rest + divisor, rest)
        too_small = greater_or_equal(abs_(rest), abs_(divisor))
        quotient, rest = select(too_small, quotient + 1, quotient), select(too_small, rest - divisor, rest)
    return select(by_zero, 0, quotient), select(by_zero, 0, rest)
