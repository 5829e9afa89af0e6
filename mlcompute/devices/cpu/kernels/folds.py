"""Folding many elements into one: along a line, or over the rows of a block for every column."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.devices.cpu.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.kernels.walks import Cell, Line, each_vector, number
from mlcompute.devices.cpu.lanes import Lanes, select

#: Vectors a line is folded by at once, to hide the latency of an addition.
_WAYS = 4
#: Rounds of so many vectors are summed apart, so that long sums stay accurate: errors grow with the number of
#: rounds in a block plus the number of blocks, not with their product.
_ROUNDS = 64
#: Rows added together before they meet the column's running value.
ROWS = 8


@dataclass(frozen=True)
class Fold:
    """How two elements become one.

    element   LLVM type of running values; `identity` leaves any of them unchanged
    several   combines a list at once, where that is cheaper than two by two
    prepare   from the element in memory to what is folded
    is_sum    rounding grows with the length, so long folds go in blocks
    """

    name: str
    element: str
    identity: float
    combine: Callable[[Lanes, Lanes], Lanes]
    several: Callable[[Sequence[Lanes]], Lanes] | None = None
    prepare: Callable[[Lanes], Lanes] = lambda x: x
    is_sum: bool = False

    def all_of(self, values: Sequence[Lanes]) -> Lanes:
        """Several folded into one, in a fixed tree."""
        return self.several(values) if self.several is not None else _tree(values, self.combine)

    def start(self, code: Code, lanes: int | None = None) -> Lanes:
        return number(code, self.identity, self.element, lanes)


def add(a: Lanes, b: Lanes) -> Lanes:
    """a + b"""
    return a + b


def larger(a: Lanes, b: Lanes) -> Lanes:
    """max(a, b); NaN wins."""
    found = select(a > b, a, b)  # b beside a NaN
    return select(a.is_nan(), a, found) if a.is_floating else found


def smaller(a: Lanes, b: Lanes) -> Lanes:
    """min(a, b); NaN wins."""
    found = select(a < b, a, b)
    return select(a.is_nan(), a, found) if a.is_floating else found


def larger_number(a: Lanes, b: Lanes) -> Lanes:
    """max(a, b) in one instruction; b beside a NaN."""
    return select(a > b, a, b)


def smaller_number(a: Lanes, b: Lanes) -> Lanes:
    """min(a, b) in one instruction; b beside a NaN."""
    return select(a < b, a, b)


def _tree(values: Sequence[Lanes], combine: Callable[[Lanes, Lanes], Lanes]) -> Lanes:
    found = list(values)
    while len(found) > 1:
        pairs = [combine(a, b) for a, b in zip(found[::2], found[1::2], strict=False)]
        found = pairs + found[2 * len(pairs) :]
    return found[0]


def _extreme(values: Sequence[Lanes], pick: Callable[[Lanes, Lanes], Lanes]) -> Lanes:
    """The extreme of several; NaN if there is one. One comparison finds the NaNs of two."""
    if not values[0].is_floating:
        return _tree(values, pick)
    masks = [a.compare("uno", "ne", b) for a, b in zip(values[::2], values[1::2], strict=False)]
    if len(values) % 2:
        masks.append(values[-1].is_nan())
    return select(functools.reduce(operator.or_, masks), math.nan, _tree(values, pick))


def largest(values: Sequence[Lanes]) -> Lanes:
    """The largest of several; NaN wins."""
    return _extreme(values, larger_number)


def smallest(values: Sequence[Lanes]) -> Lanes:
    """The smallest of several; NaN wins."""
    return _extreme(values, smaller_number)


SUM = Fold("sum", "float", 0.0, add, is_sum=True)
LARGEST_NUMBER = Fold("max", "float", -math.inf, larger_number)


def fold_of(name: str, dtype: np.dtype[Any]) -> Fold | None:
    """The fold of a reduction op over elements of a dtype; None when there is none."""
    if name in ("any", "all"):
        if dtype.kind not in "bf" or dtype not in MEMORY_TYPES or dtype.itemsize == 2:
            return None
        prepare: Callable[[Lanes], Lanes] = _same if dtype.kind == "b" else _is_not_zero
        return Fold(name, "i8", int(name == "all"), _or if name == "any" else _and, prepare=prepare)
    if dtype not in (np.float32, np.int32, np.int64):
        return None
    element, floating = MEMORY_TYPES[dtype], dtype.kind == "f"
    if name == "sum":
        return Fold("sum", element, 0, add, is_sum=floating)
    bounds = (-math.inf, math.inf) if floating else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if name == "max":
        return Fold("max", element, bounds[0], larger, largest)
    return Fold("min", element, bounds[1], smaller, smallest)


def _same(x: Lanes) -> Lanes:
    return x


def _is_not_zero(x: Lanes) -> Lanes:
    mask = x.differs(0.0)
    return mask.let(f"zext {mask.type} {mask.name} to {vector('i8', mask.lanes)}", "i8")


def _or(a: Lanes, b: Lanes) -> Lanes:
    return a | b


def _and(a: Lanes, b: Lanes) -> Lanes:
    return a & b


#: What is folded for an element: (element, its index, mask of the lanes that count) -> value.
Term = Callable[[Lanes, str, "str | None"], Lanes]


class LineFold:
    """A fold along lines; several lines may be folded one after the other before the result is asked for."""

    def __init__(self, code: Code, fold: Fold) -> None:
        self.code, self.fold = code, fold
        self._cells = [Cell(fold.start(code)) for _ in range(_WAYS)]

    def add(self, line: Line, count: str, term: Term | None = None) -> None:
        """Fold `count` elements of a line."""
        code, fold, lanes = self.code, self.fold, vector_lanes()
        step = _WAYS * lanes

        def value(index: str, mask: str | None) -> Lanes:
            element = line.load(index, mask)
            found = term(element, index, mask) if term is not None else fold.prepare(element)
            return found if mask is None else select(Lanes(code, mask, "i1", lanes), found, fold.identity)

        def rounds(begin: str | int, end: str, cells: list[Cell]) -> None:
            with code.loop(begin, end, step) as index:
                for way, cell in enumerate(cells):
                    cell.set(fold.combine(cell.get(), value(code.add(index, way * lanes), None)))

        def rest(index: str, mask: str | None) -> None:
            self._cells[0].set(fold.combine(self._cells[0].get(), value(index, mask)))

        whole = code.mul(code.div(count, step), step)
        if fold.is_sum:
            with code.loop(0, whole, _ROUNDS * step) as start:
                parts = [Cell(fold.start(code)) for _ in range(_WAYS)]
                rounds(start, code.minimum(code.add(start, _ROUNDS * step), whole), parts)
                for cell, part in zip(self._cells, parts, strict=True):
                    cell.set(fold.combine(cell.get(), part.get()))
        else:
            rounds(0, whole, self._cells)
        each_vector(code, whole, count, rest)

    def result(self) -> Lanes:
        """All lanes of all cells as one scalar, in a fixed tree."""
        return fold_lanes(self.fold.all_of([cell.get() for cell in self._cells]), self.fold.combine)


def fold_lanes(value: Lanes, combine: Callable[[Lanes, Lanes], Lanes]) -> Lanes:
    """One scalar from all lanes, halving them."""
    while value.lanes > 1:
        half = value.lanes // 2
        value = combine(part_of(value, 0, half), part_of(value, half, half))
    return value


def part_of(value: Lanes, first: int, count: int) -> Lanes:
    """Some neighbouring lanes."""
    if count == 1:
        name = value.code.let(f"extractelement {value.type} {value.name}, i64 {first}")
    else:
        picked = ", ".join(f"i32 {lane}" for lane in range(first, first + count))
        name = value.code.let(
            f"shufflevector {value.type} {value.name}, {value.type} poison, <{count} x i32> <{picked}>"
        )
    return Lanes(value.code, name, value.element, count)


def fold_columns(
    code: Code,
    fold: Fold,
    rows: str,
    row_stride: str,
    line: Line,
    columns: tuple[str, str],
    target: Line,
    term: Term | None = None,
) -> None:
    """target[c] = combine(target[c], every line[r row_stride + c]) for columns c.

    Running values stay in memory, which the cache holds; rows are read in order, several at once, as prefetchers
    like it.
    """

    def row(index: str) -> Line:
        return Line(code, code.at(line.pointer, code.mul(index, row_stride), line.element), line.element, line.stride)

    def value(line: Line, index: str, mask: str | None) -> Lanes:
        element = line.load(index, mask)
        return term(element, index, mask) if term is not None else fold.prepare(element)

    def fold_rows(rows: list[Line]) -> None:
        def column(index: str, mask: str | None) -> None:
            found = fold.all_of([value(line, index, mask) for line in rows])
            target.store(index, fold.combine(target.load(index, mask), found), mask)

        each_vector(code, *columns, column)

    whole = code.mul(code.div(rows, ROWS), ROWS)
    with code.loop(0, whole, ROWS) as first:
        fold_rows([row(code.add(first, r)) for r in range(ROWS)])
    with code.loop(whole, rows) as index:
        fold_rows([row(index)])


def fill(code: Code, line: Line, columns: tuple[str, str], value: Lanes) -> None:
    """line[c] = value for columns c."""
    each_vector(code, *columns, lambda index, mask: line.store(index, value, mask))
