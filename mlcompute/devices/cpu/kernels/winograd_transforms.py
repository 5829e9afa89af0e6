"""The transforms of Winograd's short convolutions: few multiplications for many outputs, as three constant matrices.

    y = Aᵀ ((G w) * (Bᵀ x))     m outputs of an r-tap filter from n = m + r - 1 inputs, n multiplications instead of m r

In two dimensions a matrix is applied to the columns and then one to the rows; a filter that has extent in one direction
only leaves the other as it is: F(1, 1). The gradient of the filter is the same
form read backwards: dw = Gᵀ ((A dy) * (Bᵀ x)).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.simd import SimdValue

Matrix = tuple[tuple[float, ...], ...]


class Form(NamedTuple):
    """F(m, r): outputs per tile, taps of the filter, and the matrices."""

    outputs: int
    taps: int
    to_y: Matrix  # Aᵀ, (m, n)
    from_w: Matrix  # G, (n, r)
    from_x: Matrix  # Bᵀ, (n, n)

    @property
    def inputs(self) -> int:
        """Extent of the input tile: as many points at which products are taken."""
        return self.outputs + self.taps - 1


def form(outputs: int, taps: int, *points: float) -> Form:
    """The form that multiplies polynomials by their values at these points and at infinity (Toom and Cook).

    A filter and its outputs are polynomials with as many coefficients; their product has n of them, so n values
    determine it. Turning that multiplication around (its transpose) gives the convolution.

    points   integers, and these divided by powers of two: all but the last division is exact
    """
    others = [[*points[:number], *points[number + 1 :]] for number in range(len(points))]
    spans = [math.prod(point - other for other in rest) for point, rest in zip(points, others, strict=True)]
    to_y = [(*(point**i for point in points), float(i == outputs - 1)) for i in range(outputs)]
    # A sum with 0 makes no difference to any number but -0.
    from_w = [tuple(point**j / span + 0.0 for j in range(taps)) for point, span in zip(points, spans, strict=True)]
    from_w.append(tuple(float(j == taps - 1) for j in range(taps)))
    from_x = [(*_with_roots(rest), 0.0) for rest in others] + [tuple(_with_roots(points))]
    return Form(outputs, taps, tuple(to_y), tuple(from_w), tuple(from_x))


def _with_roots(roots: Sequence[float]) -> list[float]:
    """Coefficients of the polynomial with these roots, the constant one first."""
    coefficients = [1.0]
    for root in roots:
        shifted, scaled = [0.0, *coefficients], [*coefficients, 0.0]
        coefficients = [a - root * b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


#: By taps. Points are chosen for small errors. Those of the first forms need only additions and halves: they are as
#: accurate as plain sums. With 2 and -1/2, each the other's negative reciprocal, the others stay within two or three
#: times the error of a plain sum (with 2 and -2 it would be six to ten).
_SIX = (0.0, 1.0, -1.0, 2.0, -0.5)
_POINTS: dict[int, list[tuple[int, tuple[float, ...]]]] = {
    2: [(2, (0.0, -1.0)), (3, (0.0, 1.0, -1.0))],
    3: [(2, (0.0, 1.0, -1.0)), (4, _SIX)],
    4: [(3, _SIX)],
    5: [(2, _SIX)],
}


#: The same in one direction only, where errors do not multiply: more points stay as accurate.
_EIGHT = (*_SIX, 0.5, -2.0)
_LINE_POINTS: dict[int, list[tuple[int, tuple[float, ...]]]] = {
    2: [(3, (0.0, 1.0, -1.0)), (5, _SIX)],
    3: [(4, _SIX)],
    4: [(3, _SIX), (5, _EIGHT)],
    5: [(4, _EIGHT)],
}
_UNCHANGED = Form(1, 1, ((1.0,),), ((1.0,),), ((1.0,),))


@functools.cache
def forms(down: int, across: int) -> tuple[tuple[Form, Form], ...]:
    """Those for a filter of so many taps in both directions, few outputs per tile first; none for most."""
    if down == across:
        both = [form(outputs, down, *points) for outputs, points in _POINTS.get(down, ())]
        return tuple((each, each) for each in both)
    if 1 not in (down, across):
        return ()
    taps = max(down, across)
    line = [form(outputs, taps, *points) for outputs, points in _LINE_POINTS.get(taps, ())]
    return tuple((each, _UNCHANGED) if across == 1 else (_UNCHANGED, each) for each in line)


def transposed(matrix: Matrix) -> Matrix:
    """The transpose."""
    return tuple(zip(*matrix, strict=True))


def apply(matrix: Matrix, vectors: Sequence[SimdValue]) -> list[SimdValue]:
    """The matrix times a column of registers. Two rows that differ only in signs share their sums."""
    results: list[SimdValue] = []
    rows = list(matrix)
    while rows:
        row = rows.pop(0)
        mate = rows[0] if rows and all(abs(a) == abs(b) for a, b in zip(row, rows[0], strict=True)) else None
        alike = [a if mate is None or a == b else 0.0 for a, b in zip(row, mate or row, strict=True)]
        unlike = [a if mate is not None and a != b else 0.0 for a, b in zip(row, mate or row, strict=True)]
        if mate is None or not any(alike) or not any(unlike):
            results.append(_combined(row, vectors))
            continue
        rows.pop(0)
        same, other = _combined(alike, vectors), _combined(unlike, vectors)
        results += [same + other, same - other]
    return results


def _combined(row: Sequence[float], vectors: Sequence[SimdValue]) -> SimdValue:
    """A sum of multiples, without multiplying by one or by zero."""
    terms = sorted((pair for pair in zip(row, vectors, strict=True) if pair[0]), key=lambda pair: pair[0] != 1)
    factor, vector = terms[0]
    total = vector if factor == 1 else -vector if factor == -1 else vector * factor
    for factor, vector in terms[1:]:
        if abs(factor) == 1:
            total = total + vector if factor > 0 else total - vector
        else:
            total = vector.intrinsic("fmuladd", vector.like(factor), total)
    return total
