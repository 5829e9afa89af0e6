"""Copies that exchange axes: what lies side by side is not what is written side by side.

Squares of elements are loaded as vectors along the axis on which the source lies in one piece, transposed in
registers, and stored as vectors along the axis on which the target does. Other elementwise loops that read such
operands go by tiles, which are transposed into memory of the thread first.

A few columns, as the channels of an image, do not fill a vector: there vectors hold elements of several rows, one row
after the other, and operands that lie otherwise are interleaved in registers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.kernels.elementwise_ops import load_element, register_type
from mlcompute.devices.loop_nest import LoopNest, NestOperand

#: Rows of a square, if a vector holds so many elements of four bytes.
_SQUARE = 8
#: Elements of a cache line.
_LINE = 16


def square() -> int:
    """Rows and columns of the squares that are transposed."""
    return min(_SQUARE, vector_lanes())


def source_axis(nest: LoopNest) -> int | None:
    """The loop along which the source of a copy lies in one piece, if the copy should go by squares; else None."""
    if (
        any(step.op.name != "copy" for step in nest.ops)
        or len(nest.loads) != 1
        or len(nest.stores) != 1
        or len(nest.extents) < 2
    ):
        return None
    (load,), (store,), inner = nest.loads, nest.stores, len(nest.extents) - 1
    dtypes = {load.operand.dtype, store.operand.dtype}
    if len(dtypes) != 1 or load.operand.dtype not in MEMORY_TYPES or load.operand.dtype.itemsize != 4:
        return None
    least = square()
    if store.strides[inner] != 1 or load.strides[inner] in (0, 1):
        return None
    if nest.extents[inner] < least:
        return None
    return next((axis for axis in range(inner) if load.strides[axis] == 1 and nest.extents[axis] >= least), None)


class Rows(enum.Enum):
    """How an operand moves along a loop outside a short innermost one."""

    FOLLOWING = "row after row, as they are stored"
    CONTIGUOUS = "neighbouring elements: each column lies in one piece"
    REPEATED = "the same row again and again"


class FewColumns(NamedTuple):
    """A loop whose iterations, of a few columns each, follow one another in all that is stored; and how loads move."""

    axis: int
    columns: int
    loads: tuple[Rows, ...]


def few_columns(nest: LoopNest) -> FewColumns | None:
    """How a nest with a short innermost loop goes by vectors of several rows; None where it should not."""
    inner, columns = len(nest.extents) - 1, nest.extents[-1]
    if inner < 1 or not 1 < columns < square() or any(store.streams for store in nest.stores):
        return None
    for axis in range(inner):
        loads, stores = ([_rows(each, axis, columns) for each in group] for group in (nest.loads, nest.stores))
        known = [each for each in loads if each is not None]
        if set(stores) == {Rows.FOLLOWING} and len(known) == len(loads) and nest.extents[axis] >= vector_lanes():
            return FewColumns(axis, columns, tuple(known))
    return None


def _rows(each: NestOperand, axis: int, columns: int) -> Rows | None:
    if (each.strides[axis], each.strides[-1]) == (columns, 1):
        return Rows.FOLLOWING
    return {0: Rows.REPEATED, 1: Rows.CONTIGUOUS}.get(each.strides[axis])


def vectors_of_rows(
    code: Code, few: FewColumns, rows: Rows, dtype: np.dtype[Any], pointer: str, stride: str
) -> list[str]:
    """What a load has for as many rows as a vector has lanes, row after row: a vector per column.

    stride   of the load along the innermost loop
    """
    lanes, columns, element = vector_lanes(), few.columns, register_type(dtype)
    memory, type_ = MEMORY_TYPES[dtype], vector(element, lanes)
    if rows is Rows.FOLLOWING:
        return [load_element(code, code.at(pointer, n * lanes, memory), dtype, lanes) for n in range(columns)]
    starts = [code.at(pointer, code.mul(column, stride), memory) for column in range(columns)]
    if rows is Rows.CONTIGUOUS:
        lines = [load_element(code, start, dtype, lanes) for start in starts]
    else:
        lines = [code.splat(load_element(code, start, dtype, 1), element, lanes) for start in starts]
    mixed = []
    for number in range(columns):
        places = [divmod(number * lanes + lane, columns) for lane in range(lanes)]  # row, and column of it
        found = shuffled(code, type_, lines[0], lines[0], [row for row, _ in places])
        for other in range(1, columns):
            picks = [lanes + row if column == other else lane for lane, (row, column) in enumerate(places)]
            found = shuffled(code, type_, found, lines[other], picks)
        mixed.append(found)
    return mixed


#: Rows (along the axis on which transposed operands lie in one piece) and columns of a tile; operands that are tiled.
TILE_ROWS, TILE_COLUMNS, _MOST_TILED = _LINE, 64, 6


class Tiling(NamedTuple):
    """A loop along which some loads lie in one piece, while the innermost loop would read them a stride apart."""

    axis: int
    loads: tuple[int, ...]


def tiling(nest: LoopNest) -> Tiling | None:
    """How a nest should go by tiles; None where all it reads lies well, or there is too little to turn round."""
    inner, least = len(nest.extents) - 1, square()
    if inner < 1 or nest.extents[inner] < least:
        return None
    found: dict[int, list[int]] = {}
    for number, load in enumerate(nest.loads):
        if load.strides[inner] in (0, 1) or load.operand.dtype.itemsize != 4 or load.operand.dtype not in MEMORY_TYPES:
            continue
        axis = next((axis for axis in range(inner) if load.strides[axis] == 1 and nest.extents[axis] >= least), None)
        if axis is not None:
            found.setdefault(axis, []).append(number)
    if not found:
        return None
    axis = max(found, key=lambda axis: len(found[axis]))
    return Tiling(axis, tuple(found[axis][:_MOST_TILED]))


@dataclass(eq=False, repr=False)
class Transpose:
    """The innermost two loops of such a copy: over the source's axis, from a begin to an end, and over the target's.

    from_source, from_target   strides of the source along the target's axis, and of the target along the source's
    """

    code: Code
    element: str
    from_source: str
    from_target: str

    def write(self, source: str, target: str, bounds: tuple[str, str], extent: str) -> None:
        """Copy target[i, j] = source[j, i] for i within bounds and all j below an extent."""
        code, side = self.code, square()
        columns = code.mul(code.div(extent, side), side)
        start, end = bounds
        for group in (_LINE, side):  # whole cache lines of the source, which it might not see again in the cache
            stop = code.add(start, code.mul(code.div(code.sub(end, start), group), group))
            with code.loop(start, stop, group) as first:
                with code.loop(0, columns, side) as j:
                    for number in range(0, group, side):
                        self._square(source, target, code.add(first, number), j, side)
                with code.loop(columns, extent) as j, code.loop(first, code.add(first, group)) as i:
                    self._element(source, target, i, j)
            start = stop
        with code.loop(start, end) as i, code.loop(0, extent) as j:
            self._element(source, target, i, j)

    def _source(self, source: str, i: str, j: str) -> str:
        return self.code.at(self.code.at(source, i, self.element), self.code.mul(j, self.from_source), self.element)

    def _target(self, target: str, i: str, j: str) -> str:
        return self.code.at(self.code.at(target, j, self.element), self.code.mul(i, self.from_target), self.element)

    def _element(self, source: str, target: str, i: str, j: str) -> None:
        value = self.code.load(self._source(source, i, j), self.element)
        self.code.store(self._target(target, i, j), self.element, value)

    def _square(self, source: str, target: str, i: str, j: str, side: int) -> None:
        code, type_ = self.code, vector(self.element, side)
        rows = [code.load(self._source(source, i, code.add(j, number)), type_) for number in range(side)]
        step = 1
        while step < side:  # exchange the halves of 2 x 2 squares whose elements are `step` wide
            for number in range(side):
                if number & step:
                    continue
                a, b = rows[number], rows[number + step]
                low = [lane if not lane & step else side + lane - step for lane in range(side)]
                high = [lane + step if not lane & step else side + lane for lane in range(side)]
                rows[number], rows[number + step] = (shuffled(code, type_, a, b, picks) for picks in (low, high))
            step *= 2
        for number, row in enumerate(rows):
            code.store(self._target(target, code.add(i, number), j), type_, row)


def shuffled(code: Code, type_: str, a: str, b: str, lanes: list[int]) -> str:
    """Lanes of two vectors of a type, those of b counted on from those of a."""
    mask = ", ".join(f"i32 {lane}" for lane in lanes)
    return code.let(f"shufflevector {type_} {a}, {type_} {b}, <{len(lanes)} x i32> <{mask}>")
