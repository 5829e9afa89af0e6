"""Winograd's short convolutions: few multiplications for many outputs, as three constant matrices.

    y = Aᵀ ((G w) * (Bᵀ x))     m outputs of an r-tap filter from n = m + r - 1 inputs, n multiplications instead of m r

In two dimensions every matrix is applied to the columns and then to the rows. The gradient of the filter is the same
form read backwards: dw = Gᵀ ((A dy) * (Bᵀ x)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.lanes import Lanes

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Form:
    """F(m, r): outputs per tile, taps of the filter, and the matrices."""

    outputs: int
    taps: int
    to_y: Matrix  # Aᵀ, (m, n)
    from_w: Matrix  # G, (n, r)
    from_x: Matrix  # Bᵀ, (n, n)

    @property
    def inputs(self) -> int:
        """Extent of the input tile; its square is the number of points at which products are taken."""
        return self.outputs + self.taps - 1


#: Two outputs of three taps, interpolated at 0, 1, -1 and infinity: only additions and halves, so nothing is lost.
THREE = Form(
    2,
    3,
    to_y=((1, 1, 1, 0), (0, 1, -1, -1)),
    from_w=((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    from_x=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
)


def turned(matrix: Matrix) -> Matrix:
    """The transpose."""
    return tuple(zip(*matrix, strict=True))


def both_ways(matrix: Matrix, square: Sequence[Sequence[Lanes]]) -> list[list[Lanes]]:
    """matrix square matrixᵀ: applied to every column, then to every row."""
    columns = [apply(matrix, column) for column in zip(*square, strict=True)]
    return [apply(matrix, row) for row in zip(*columns, strict=True)]


def apply(matrix: Matrix, vectors: Sequence[Lanes]) -> list[Lanes]:
    """The matrix times a column of registers. Two rows that differ only in signs share their sums."""
    results: list[Lanes] = []
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


def _combined(row: Sequence[float], vectors: Sequence[Lanes]) -> Lanes:
    """A sum of multiples, without multiplying by one or by zero."""
    terms = sorted((pair for pair in zip(row, vectors, strict=True) if pair[0]), key=lambda pair: pair[0] < 0)
    factor, vector = terms[0]
    total = vector if factor == 1 else -vector if factor == -1 else vector * factor
    for factor, vector in terms[1:]:
        part = vector if abs(factor) == 1 else vector * abs(factor)
        total = total + part if factor > 0 else total - part
    return total
