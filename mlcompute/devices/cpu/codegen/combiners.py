"""Reduction combiners (sum, max, min, any, all), and reductions with them along a line or over the rows of columns."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, row_groups, splat_constant, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue, select
from mlcompute.ops.bfloat16 import computed_type

#: Vectors a line is reduced by at once, to hide the latency of an addition.
_WAYS = 4
#: Rounds of so many vectors are summed apart, so that long sums stay accurate: errors grow with the number of
#: rounds in a block plus the number of blocks, not with their product.
_ROUNDS = 64
#: Rows combined with each other before they are combined with the column's running value.
ROWS = 8


class Combiner(NamedTuple):
    """How two elements become one.

    element   LLVM type of running values; `identity` leaves any of them unchanged
    combine_many   combines a list at once, where that is cheaper than two by two
    prepare   from the element in memory to what is combined
    is_sum    rounding grows with the length, so long reductions go in blocks
    """

    name: str
    element: str
    identity: float
    combine: Callable[[SimdValue, SimdValue], SimdValue]
    combine_many: Callable[[Sequence[SimdValue]], SimdValue] | None = None
    prepare: Callable[[SimdValue], SimdValue] = lambda x: x
    is_sum: bool = False

    def combine_all(self, values: Sequence[SimdValue]) -> SimdValue:
        """Several combined into one, in a fixed tree."""
        return self.combine_many(values) if self.combine_many is not None else _tree(values, self.combine)

    def identity_value(self, code: Code, lanes: int | None = None) -> SimdValue:
        return splat_constant(code, self.identity, self.element, lanes)


def add(a: SimdValue, b: SimdValue) -> SimdValue:
    """a + b"""
    return a + b


def larger(a: SimdValue, b: SimdValue) -> SimdValue:
    """max(a, b); NaN wins."""
    found = select(a > b, a, b)  # b beside a NaN
    return select(a.is_nan(), a, found) if a.is_floating else found


def smaller(a: SimdValue, b: SimdValue) -> SimdValue:
    """min(a, b); NaN wins."""
    found = select(a < b, a, b)
    return select(a.is_nan(), a, found) if a.is_floating else found


def larger_number(a: SimdValue, b: SimdValue) -> SimdValue:
    """max(a, b) in one instruction; b beside a NaN."""
    return select(a > b, a, b)


def smaller_number(a: SimdValue, b: SimdValue) -> SimdValue:
    """min(a, b) in one instruction; b beside a NaN."""
    return select(a < b, a, b)


def _tree(values: Sequence[SimdValue], combine: Callable[[SimdValue, SimdValue], SimdValue]) -> SimdValue:
    found = list(values)
    while len(found) > 1:
        pairs = [combine(a, b) for a, b in zip(found[::2], found[1::2], strict=False)]
        found = pairs + found[2 * len(pairs) :]
    return found[0]


def _extreme(values: Sequence[SimdValue], pick: Callable[[SimdValue, SimdValue], SimdValue]) -> SimdValue:
    """The extreme of several; NaN if there is one. One comparison finds the NaNs of two."""
    if not values[0].is_floating:
        return _tree(values, pick)
    masks = [a.compare("uno", "ne", b) for a, b in zip(values[::2], values[1::2], strict=False)]
    if len(values) % 2:
        masks.append(values[-1].is_nan())
    return select(functools.reduce(operator.or_, masks), math.nan, _tree(values, pick))


def largest(values: Sequence[SimdValue]) -> SimdValue:
    """The largest of several; NaN wins."""
    return _extreme(values, larger_number)


def smallest(values: Sequence[SimdValue]) -> SimdValue:
    """The smallest of several; NaN wins."""
    return _extreme(values, smaller_number)


SUM = Combiner("sum", "float", 0.0, add, is_sum=True)
MAX_SKIPPING_NAN = Combiner("max", "float", -math.inf, larger_number)


def combiner_for(name: str, dtype: np.dtype[Any]) -> Combiner | None:
    """The combiner of a reduction op for elements of a dtype; None when there is none."""
    if name in ("any", "all"):
        if dtype.kind not in "bf" or dtype not in MEMORY_TYPES or dtype.itemsize == 2:
            return None
        prepare: Callable[[SimdValue], SimdValue] = _same if dtype.kind == "b" else _is_not_zero
        return Combiner(name, "i8", int(name == "all"), _or if name == "any" else _and, prepare=prepare)
    dtype = computed_type(dtype)
    if dtype not in MEMORY_TYPES or dtype.kind == "b" or dtype == np.float16:
        return None
    element, floating = MEMORY_TYPES[dtype], dtype.kind == "f"
    if name == "sum":
        return Combiner("sum", element, 0, add, is_sum=floating)
    if dtype.kind == "u":  # all bits set are the largest
        unsigned = functools.partial(_unsigned_extreme, "ugt" if name == "max" else "ult")
        return Combiner(name, element, 0 if name == "max" else -1, unsigned)
    bounds = (-math.inf, math.inf) if floating else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if name == "max":
        return Combiner("max", element, bounds[0], larger, largest)
    return Combiner("min", element, bounds[1], smaller, smallest)


def _unsigned_extreme(predicate: str, a: SimdValue, b: SimdValue) -> SimdValue:
    return select(a.compare("", predicate, b), a, b)


def _same(x: SimdValue) -> SimdValue:
    return x


def _is_not_zero(x: SimdValue) -> SimdValue:
    mask = x.differs(0.0)
    return mask.let(f"zext {mask.type} {mask.name} to {vector('i8', mask.lanes)}", "i8")


def _or(a: SimdValue, b: SimdValue) -> SimdValue:
    return a | b


def _and(a: SimdValue, b: SimdValue) -> SimdValue:
    return a & b


#: What is combined for an element: (element, its index, mask of the lanes that count) -> value.
Term = Callable[[SimdValue, str, "str | None"], SimdValue]


class LineReduction:
    """A reduction along lines; several lines may be added one after the other before the result is read.

    terms   how many reductions are computed side by side
    """

    def __init__(self, code: Code, combiner: Combiner, terms: int = 1) -> None:
        self.code, self.combiner = code, combiner
        self._cells = [self._fresh() for _ in range(terms)]

    def _fresh(self) -> list[Variable]:
        return [Variable(self.combiner.identity_value(self.code)) for _ in range(_WAYS)]

    def add(self, line: Line, count: str, term: Term | None = None) -> None:
        """Combine `count` elements of a line."""

        def element(index: str, mask: str | None) -> list[SimdValue]:
            found = line.load(index, mask)
            return [term(found, index, mask) if term is not None else self.combiner.prepare(found)]

        self.add_each(count, element)

    def add_each(self, count: str, elements: Callable[[str, str | None], Sequence[SimdValue]]) -> None:
        """Combine what `elements` gives, for every term, for an index and the mask of the lanes that count."""
        code, combiner, lanes = self.code, self.combiner, vector_lanes()
        step = _WAYS * lanes

        def combine(index: str, mask: str | None, way: int, cells: Sequence[Sequence[Variable]]) -> None:
            for each, found in zip(cells, elements(index, mask), strict=True):
                if mask is not None:
                    found = select(SimdValue(code, mask, "i1", lanes), found, combiner.identity)
                each[way].set(combiner.combine(each[way].get(), found))

        def rounds(begin: str | int, end: str, cells: Sequence[Sequence[Variable]]) -> None:
            with code.loop(begin, end, step) as index:
                for way in range(_WAYS):
                    combine(code.add(index, way * lanes), None, way, cells)

        full = code.mul(code.div(count, step), step)
        if combiner.is_sum:
            with code.loop(0, full, _ROUNDS * step) as start:
                parts = [self._fresh() for _ in self._cells]
                rounds(start, code.minimum(code.add(start, _ROUNDS * step), full), parts)
                for cells, own in zip(self._cells, parts, strict=True):
                    for cell, part in zip(cells, own, strict=True):
                        cell.set(combiner.combine(cell.get(), part.get()))
        else:
            rounds(0, full, self._cells)
        vector_loop(code, full, count, lambda index, mask: combine(index, mask, 0, self._cells))

    def result(self, term: int = 0) -> SimdValue:
        """All lanes of all cells as one scalar, in a fixed tree."""
        cells = [cell.get() for cell in self._cells[term]]
        return reduce_lanes(self.combiner.combine_all(cells), self.combiner.combine)


def reduce_lanes(value: SimdValue, combine: Callable[[SimdValue, SimdValue], SimdValue]) -> SimdValue:
    """One scalar from all lanes, halving them."""
    while value.lanes > 1:
        half = value.lanes // 2
        value = combine(extract_lanes(value, 0, half), extract_lanes(value, half, half))
    return value


def extract_lanes(value: SimdValue, first: int, count: int) -> SimdValue:
    """Some neighbouring lanes."""
    if count == 1:
        name = value.code.let(f"extractelement {value.type} {value.name}, i64 {first}")
    else:
        picked = ", ".join(f"i32 {lane}" for lane in range(first, first + count))
        name = value.code.let(
            f"shufflevector {value.type} {value.name}, {value.type} poison, <{count} x i32> <{picked}>"
        )
    return SimdValue(value.code, name, value.element, count)


def reduce_columns(
    code: Code,
    combiner: Combiner,
    rows: str,
    row_stride: str,
    line: Line,
    columns: tuple[str, str],
    target: Line,
) -> None:
    """target[c] = combine(target[c], every line[r row_stride + c]) for columns c.

    Running values stay in memory, which the cache holds; rows are read in order, several at once, as prefetchers
    like it.
    """

    def row(index: str) -> Line:
        return Line(code, code.at(line.pointer, code.mul(index, row_stride), line.element), line.element, line.stride)

    def reduce_rows(rows: list[Line]) -> None:
        def column(index: str, mask: str | None) -> None:
            found = combiner.combine_all([combiner.prepare(line.load(index, mask)) for line in rows])
            target.store(index, combiner.combine(target.load(index, mask), found), mask)

        vector_loop(code, *columns, column)

    row_groups(code, rows, ROWS, lambda numbers: reduce_rows([row(index) for index in numbers]))


def fill(code: Code, line: Line, columns: tuple[str, str], value: SimdValue) -> None:
    """line[c] = value for columns c."""
    vector_loop(code, *columns, lambda index, mask: line.store(index, value, mask))
