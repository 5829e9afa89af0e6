"""The formulas of `normalize` and `normalize_gradient`: statistics of every result, and what follows from them.

    normalize            y = (x - m) / sqrt(v + epsilon), m = mean x, v = mean (x - m)²
    normalize_gradient   dx = a dy - b - c y, a = scale / sqrt(v + epsilon), b = a mean dy, c = a mean(dy y)

Mean and variance come from two passes over data that is still in the cache. Columns with many rows are cut into
blocks, each with its own mean and sum of squares about it; those are then joined exactly as in
T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
Sums of blocks are added up in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.combiners import fill
from mlcompute.devices.cpu.codegen.loops import Line, Variable, splat, splat_constant, to_float, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue

#: What is added up for one element, or a vector of them: terms of the elements that are normalised.
Terms = Callable[..., Sequence[SimdValue]]
#: Sums of some terms over all elements of a result.
SumRow = Callable[[int, Terms], list[SimdValue]]
#: Adds some terms of rows to lines of columns; the terms may depend on the column.
AddRows = Callable[[Sequence[Line], Callable[[str, "str | None"], Terms]], None]


#: Calls a function with both statistics of a block and the number of its rows, for all blocks, in order.
EachBlock = Callable[[Callable[[Sequence[SimdValue], SimdValue], None]], None]


class Form(Protocol):
    """One of the two. Statistics are two numbers per result, coefficients are what the result is formed with.

    coefficient_count   how many of them
    """

    coefficient_count: int

    def of_row(self, sum_row: SumRow, size: SimdValue) -> list[SimdValue]:
        """The statistics of a row."""

    def of_rows(
        self, code: Code, add_rows: AddRows, rows: str, columns: tuple[str, str], statistics: Sequence[Line]
    ) -> None:
        """Statistics of some rows, column by column, for `joined`."""

    def of_one_block(self, own: Sequence[SimdValue], size: SimdValue) -> list[SimdValue]:
        """The statistics of all rows, where `of_rows` has seen all of them."""

    def joined(self, code: Code, each_block: EachBlock, size: SimdValue) -> list[SimdValue]:
        """The statistics of all rows from those of their blocks."""

    def coefficients(
        self, statistics: Sequence[SimdValue], size: SimdValue, epsilon: SimdValue, known: Sequence[SimdValue]
    ) -> list[SimdValue]:
        """What the result is formed with; `known`: the core's inputs that are the same for all elements."""

    def formed(self, coefficients: Sequence[SimdValue], *elements: SimdValue) -> SimdValue:
        """The result's element."""


class NormalizeForm:
    """Mean and variance; of a block, mean and sum of squares about it."""

    coefficient_count = 2

    def of_row(self, sum_row: SumRow, size: SimdValue) -> list[SimdValue]:
        mean = sum_row(1, lambda x: (x,))[0] / size
        centre = splat(mean)
        return [mean, sum_row(1, lambda x: (_square(x - centre),))[0] / size]

    def of_rows(
        self, code: Code, add_rows: AddRows, rows: str, columns: tuple[str, str], statistics: Sequence[Line]
    ) -> None:
        mean, squares = statistics
        for line in statistics:
            fill(code, line, columns, splat_constant(code, 0.0))
        add_rows([mean], lambda index, mask: lambda x: (x,))
        size = splat(to_float(code, rows))
        vector_loop(code, *columns, lambda index, mask: mean.store(index, mean.load(index, mask) / size, mask))

        def about_mean(index: str, mask: str | None) -> Terms:
            m = mean.load(index, mask)
            return lambda x: (_square(x - m),)

        add_rows([squares], about_mean)

    def of_one_block(self, own: Sequence[SimdValue], size: SimdValue) -> list[SimdValue]:
        mean, squares = own
        return [mean, squares / size]

    def joined(self, code: Code, each_block: EachBlock, size: SimdValue) -> list[SimdValue]:
        total, spread = (Variable(splat_constant(code, 0.0)) for _ in range(2))
        each_block(lambda own, rows: total.set(total.get() + own[0] * rows))
        mean = total.get() / size
        each_block(lambda own, rows: spread.set(spread.get() + (own[1] + _square(own[0] - mean) * rows)))
        return [mean, spread.get() / size]

    def coefficients(
        self, statistics: Sequence[SimdValue], size: SimdValue, epsilon: SimdValue, known: Sequence[SimdValue]
    ) -> list[SimdValue]:
        mean, variance = statistics
        return [mean, 1.0 / (variance + epsilon).sqrt()]

    def formed(self, coefficients: Sequence[SimdValue], *elements: SimdValue) -> SimdValue:
        (x,), (centre, scale) = elements, coefficients
        return (x - centre) * scale


class GradientForm:
    """sum dy and sum dy y."""

    coefficient_count = 3

    def of_row(self, sum_row: SumRow, size: SimdValue) -> list[SimdValue]:
        return sum_row(2, lambda dy, y: (dy, dy * y))

    def of_rows(
        self, code: Code, add_rows: AddRows, rows: str, columns: tuple[str, str], statistics: Sequence[Line]
    ) -> None:
        for line in statistics:
            fill(code, line, columns, splat_constant(code, 0.0))
        add_rows(statistics, lambda index, mask: lambda dy, y: (dy, dy * y))

    def of_one_block(self, own: Sequence[SimdValue], size: SimdValue) -> list[SimdValue]:
        return list(own)

    def joined(self, code: Code, each_block: EachBlock, size: SimdValue) -> list[SimdValue]:
        totals = [Variable(splat_constant(code, 0.0)) for _ in range(2)]

        def add(own: Sequence[SimdValue], rows: SimdValue) -> None:
            for total, part in zip(totals, own, strict=True):
                total.set(total.get() + part)

        each_block(add)
        return [total.get() for total in totals]

    def coefficients(
        self, statistics: Sequence[SimdValue], size: SimdValue, epsilon: SimdValue, known: Sequence[SimdValue]
    ) -> list[SimdValue]:
        variance, *scales = known
        factor = 1.0 / (variance + epsilon).sqrt()
        for scale in scales:
            factor = factor * scale
        return [factor, *(factor * (total / size) for total in statistics)]

    def formed(self, coefficients: Sequence[SimdValue], *elements: SimdValue) -> SimdValue:
        (dy, y), (a, b, c) = elements, coefficients
        return dy * a - b - y * c


def _square(x: SimdValue) -> SimdValue:
    return x * x


FORMS: dict[str, Form] = {"normalize": NormalizeForm(), "normalize_gradient": GradientForm()}
