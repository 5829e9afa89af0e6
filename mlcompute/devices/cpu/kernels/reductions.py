"""Reductions over any axes: sum, max, min, any, all, argmax, argmin; softmax and normalize have files of their own.

Whatever the axes, either lines of neighbouring elements become one element each (rows), or rows become one row
(columns). Where that leaves too few pieces for all threads, the reduced axis is cut into blocks, a number that
follows from the shape alone, and a second pass folds the blocks: sums never depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mlcompute.devices.cpu.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.entry import Entry, Maker
from mlcompute.devices.cpu.kernels import normalize, normalize_gradient, softmax
from mlcompute.devices.cpu.kernels.folds import Fold, LineFold, fill, fold_columns, fold_of, part_of
from mlcompute.devices.cpu.kernels.tiles import LEAST_COLUMNS, UNITS, ColumnTiles
from mlcompute.devices.cpu.kernels.walks import (
    LEAST_ROWS,
    Axis,
    Cell,
    Line,
    Words,
    axis_words,
    count_of,
    each_vector,
    line_stride,
    moved,
    nest,
    number,
    numbered,
    share_units,
    shared_rows,
    split_index,
    walk_axes,
)
from mlcompute.devices.cpu.lanes import Lanes, select
from mlcompute.devices.cpu.operands import Operand, Operands, dense_strides
from mlcompute.ops.op import Shape, Step

#: Fewer elements than this are not worth a second pass.
_WORTH_BLOCKS = 1 << 16
_MOST_BLOCKS = 64
_NS_PER_ELEMENT = 0.12


def reduction_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """sum, max, min, any, all."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    fold = fold_of(step.op.name, x.dtype)
    if fold is None or not x.size:
        return None
    return reduce_axes(step, operands, fold, x, y, step.attributes["axes"], workspace(step))


def reduce_axes(
    step: Step, operands: Operands, fold: Fold, x: Operand, y: Operand, axes: Sequence[int], nbytes: int = 0
) -> Sequence[Entry]:
    """Fold x over axes into y, whose extents there are 1; in blocks when there are too few results to share.

    nbytes   what the step's workspace has for the blocks
    """
    walked = _axes(x.shape, x.strides, y.strides, axes)
    blocks = min(_blocks(walked), nbytes // (y.size * y.dtype.itemsize))
    rows = shared_rows(x.shape, axes, (x, y), _units(walked))
    if blocks < 2 or rows:
        return [_entry(step, fold, x, y, walked, rows)]
    room = operands.workspace(step, 0, blocks * y.size * y.dtype.itemsize)
    cut = next(axis for axis in walked if axis.reduced)
    size = -(-cut.extent // blocks)
    blocks = -(-cut.extent // size)
    first = Axis(blocks, (size * cut.strides[0], y.size))
    inside = [Axis(size, cut.strides, True) if axis is cut else axis for axis in walked]
    parts = _entry(step, fold, x, replace(room, dtype=y.dtype), [first, *inside], 0, cut.extent)
    both = fold_of(step.op.name, y.dtype) or fold
    blocked = [Axis(blocks, (y.size, 0), True), Axis(y.size, (1, 1))] if y.size > 1 else [Axis(blocks, (1, 0), True)]
    return [parts, _entry(step, both, replace(room, dtype=y.dtype), y, blocked, 0)]


def workspace(step: Step) -> int:
    """Room for the blocks of a reduction, if it is cut into any."""
    x, y, axes = step.inputs[0], step.results[0], step.attributes["axes"]
    if not x.size or (x.shape and x.shape[0] >= LEAST_ROWS and 0 not in axes):
        return 0
    blocks = _blocks(_axes(x.shape, dense_strides(x.shape), dense_strides(y.shape), axes))
    return blocks * y.nbytes if blocks > 1 else 0


def _axes(shape: Shape, x_strides: Sequence[int], y_strides: Sequence[int], axes: Sequence[int]) -> list[Axis]:
    kept = tuple(0 if axis in axes else stride for axis, stride in enumerate(y_strides))
    walked = walk_axes(shape, axes, [x_strides, kept])
    # A walk has at least one reduced axis, if only of one step.
    return walked if any(axis.reduced for axis in walked) else [Axis(1, (0, 0), True), *walked]


def _units(axes: Sequence[Axis]) -> int:
    """Pieces threads can share without cutting the innermost axis."""
    return count_of([axis for axis in axes[:-1] if not axis.reduced])


def _blocks(axes: Sequence[Axis]) -> int:
    """Into how many blocks the outermost reduced axis is cut."""
    reduced = [axis for axis in axes if axis.reduced]
    kept = [axis for axis in axes if not axis.reduced]
    rows = reduced[0].extent
    if count_of(axes) < _WORTH_BLOCKS:
        return 1
    if axes[-1].reduced:
        units, least, accurate = count_of(kept), 1 if len(reduced) > 1 else 4096, 1
    else:
        # Columns are summed row after row, so very many rows go in blocks for accuracy, too.
        units, least = count_of(kept[:-1]) * -(-kept[-1].extent // LEAST_COLUMNS), 16
        accurate = -(-rows // 2048)
    wanted = -(-UNITS // units) if units < 16 else 1
    return max(1, min(max(wanted, accurate), _MOST_BLOCKS, rows // least))


def _entry(
    step: Step, fold: Fold, x: Operand, y: Operand, axes: Sequence[Axis], rows: int, cut: int | None = None
) -> Entry:
    """One pass. `cut`: the first axis numbers blocks of the first reduced axis, whose whole extent this is."""
    write = _rows if axes[-1].reduced else _columns
    code = Code(f"{fold.name}_{write.__name__[1:]}")
    words = Words(code)
    write(words, fold, x, y, axes, rows, cut)
    return Entry(
        step,
        code,
        words.arguments,
        reads=[x],
        writes=[y],
        rows=rows,
        by_row={0, 1} if rows else set(),
        kernel=f"{fold.name} over {write.__name__[1:]}",
        cost=count_of(axes) * _NS_PER_ELEMENT,
    )


def _block_extent(code: Code, block: str, size: str, whole: str) -> str:
    """Rows of a block: all but the last have the same number."""
    return code.minimum(size, code.sub(whole, code.mul(block, size)))


def _rows(words: Words, fold: Fold, x: Operand, y: Operand, axes: Sequence[Axis], rows: int, cut: int | None) -> None:
    """The innermost axis is reduced: one result per unit, folded along lines."""
    code, element = words.code, MEMORY_TYPES[x.dtype]
    source, target = words.pointer(x), words.pointer(y)
    kept = axis_words(words, [axis for axis in axes if not axis.reduced])
    reduced = axis_words(words, [axis for axis in axes if axis.reduced])
    stride = line_stride(words, axes[-1].strides[0])
    begin, end = share_units(words, count_of([axis for axis in axes if not axis.reduced]), rows)
    whole = words.number(cut) if cut is not None else None
    with code.loop(begin, end) as unit:
        indices = split_index(code, unit, kept)
        place = moved(code, source, 0, kept, indices, element)
        if whole is not None:
            reduced[0] = replace(reduced[0], extent=_block_extent(code, indices[0], reduced[0].extent, whole))
        total = LineFold(code, fold)
        with nest(code, reduced[:-1], [place], [element]) as (inner,):
            total.add(Line(code, inner, element, stride), reduced[-1].extent)
        code.store(moved(code, target, 1, kept, indices, fold.element), fold.element, total.result().name)


def _columns(
    words: Words, fold: Fold, x: Operand, y: Operand, axes: Sequence[Axis], rows: int, cut: int | None
) -> None:
    """The innermost axis stays: rows are folded into one, a range of columns per unit."""
    code, element = words.code, MEMORY_TYPES[x.dtype]
    source, target = words.pointer(x), words.pointer(y)
    outer = [axis for axis in axes[:-1] if not axis.reduced]
    kept = axis_words(words, outer)
    reduced = axis_words(words, [axis for axis in axes if axis.reduced])
    strides = [line_stride(words, stride) for stride in axes[-1].strides]
    tiles = ColumnTiles(words, axes[-1].extent, count_of(outer))
    begin, end = share_units(words, count_of(outer) * tiles.count, rows)
    whole = words.number(cut) if cut is not None else None
    with code.loop(begin, end) as unit:
        unit, columns = tiles.split(unit)
        indices = split_index(code, unit, kept)
        if whole is not None:
            reduced[0] = replace(reduced[0], extent=_block_extent(code, indices[0], reduced[0].extent, whole))
        to = Line(code, moved(code, target, 1, kept, indices, fold.element), fold.element, strides[1])
        fill(code, to, columns, fold.start(code))
        place = moved(code, source, 0, kept, indices, element)
        with nest(code, reduced[:-1], [place], [element]) as (inner,):
            line = Line(code, inner, element, strides[0])
            fold_columns(code, fold, reduced[-1].extent, reduced[-1].strides[0], line, columns, to)


# Index of the extreme ---------------------------------------------------------------------------------------------

#: The index of lanes that have seen nothing better than the worst possible element.
_NOWHERE = 2**31 - 1


def extreme_index_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """argmax, argmin: the first extreme, NaN before all others."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if x.dtype not in (np.float32, np.int32) or not x.size or x.shape[step.attributes["axis"]] >= _NOWHERE:
        return None
    along = (step.attributes["axis"],)
    axes = _axes(x.shape, x.strides, y.strides, along)
    rows = shared_rows(x.shape, along, (x, y), _units(axes))
    code = Code(step.op.name)
    words = Words(code)
    (_index_rows if axes[-1].reduced else _index_columns)(words, step.op.name, x, y, axes, rows)
    return [
        Entry(
            step, code, words.arguments, reads=[x], writes=[y], rows=rows, by_row={0, 1} if rows else set(),
            kernel=f"{step.op.name} loop", cost=x.size * 0.3,
        )
    ]  # fmt: skip


class _Extreme:
    """The best element seen in every lane, and where it was."""

    def __init__(self, code: Code, name: str, element: str) -> None:
        self.code = code
        worst: float = -math.inf if element == "float" else -(2**31)
        if name == "argmin":
            worst = math.inf if element == "float" else 2**31 - 1
        self.value, self.index = Cell(number(code, worst, element)), Cell(number(code, _NOWHERE, "i32"))
        self.beats: Callable[[Lanes, Lanes], Lanes] = (lambda a, b: a > b) if name == "argmax" else (lambda a, b: a < b)

    def better(self, a: Lanes, b: Lanes) -> Lanes:
        """Does a come before b, wherever they are?"""
        wins = self.beats(a, b)
        if a.is_floating:
            wins = wins | (a.is_nan() & b.compare("ord", "eq", b))
        return wins

    def see(self, value: Lanes, index: Lanes, mask: str | None = None) -> None:
        wins = self.better(value, self.value.get())
        if mask is not None:
            wins = wins & Lanes(self.code, mask, "i1", value.lanes)
        self.value.set(select(wins, value, self.value.get()))
        self.index.set(select(wins, index, self.index.get()))

    def positions(self) -> Lanes:
        """Where each lane's best was."""
        return _as_position(self.index.get())

    def position(self) -> Lanes:
        """Where the best of all lanes was."""
        pairs = (self.value.get(), self.index.get())
        while pairs[0].lanes > 1:
            half = pairs[0].lanes // 2
            (v, w), (i, j) = ((part_of(p, 0, half), part_of(p, half, half)) for p in pairs)
            first = self.better(v, w) | ~(self.better(w, v) | (j < i))
            pairs = select(first, v, w), select(first, i, j)
        return _as_position(pairs[1])


def _as_position(index: Lanes) -> Lanes:
    """As i64; where nothing was better than the worst, the start."""
    found = select(index.equals(_NOWHERE), 0, index)
    return found.let(f"sext {found.type} {found.name} to {vector('i64', found.lanes)}", "i64")


def _index_rows(words: Words, name: str, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code, lanes, element = words.code, vector_lanes(), MEMORY_TYPES[x.dtype]
    source, target = words.pointer(x), words.pointer(y)
    kept = axis_words(words, axes[:-1])
    extent, stride = words.number(axes[-1].extent), line_stride(words, axes[-1].strides[0])
    begin, end = share_units(words, count_of(axes[:-1]), rows)
    with code.loop(begin, end) as unit:
        indices = split_index(code, unit, kept)
        line = Line(code, moved(code, source, 0, kept, indices, element), element, stride)
        best = _Extreme(code, name, element)

        def look(index: str, mask: str | None) -> None:
            here = Lanes(code, code.splat(code.let(f"trunc i64 {index} to i32"), "i32", lanes), "i32", lanes)
            best.see(line.load(index, mask), here + Lanes(code, numbered(lanes, "i32"), "i32", lanes), mask)

        each_vector(code, 0, extent, look)
        code.store(moved(code, target, 1, kept, indices, "i64"), "i64", best.position().name)


def _index_columns(words: Words, name: str, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code, lanes, element = words.code, vector_lanes(), MEMORY_TYPES[x.dtype]
    source, target = words.pointer(x), words.pointer(y)
    outer = [axis for axis in axes[:-1] if not axis.reduced]
    kept = axis_words(words, outer)
    (reduced,) = axis_words(words, [axis for axis in axes if axis.reduced])
    strides = [line_stride(words, stride) for stride in axes[-1].strides]
    tiles = ColumnTiles(words, axes[-1].extent, count_of(outer))
    begin, end = share_units(words, count_of(outer) * tiles.count, rows)
    with code.loop(begin, end) as unit:
        unit, columns = tiles.split(unit)
        indices = split_index(code, unit, kept)
        place = moved(code, source, 0, kept, indices, element)
        to = Line(code, moved(code, target, 1, kept, indices, "i64"), "i64", strides[1])

        def column(index: str, mask: str | None) -> None:
            best = _Extreme(code, name, element)
            with code.loop(0, reduced.extent) as row:
                line = Line(code, code.at(place, code.mul(row, reduced.strides[0]), element), element, strides[0])
                here = Lanes(code, code.splat(code.let(f"trunc i64 {row} to i32"), "i32", lanes), "i32", lanes)
                best.see(line.load(index, mask), here, mask)
            to.store(index, best.positions(), mask)

        each_vector(code, *columns, column)


KERNELS: dict[str, Maker] = {
    **dict.fromkeys(("sum", "max", "min", "any", "all"), reduction_entries),
    **dict.fromkeys(("argmax", "argmin"), extreme_index_entries),
    **softmax.KERNELS,
    **normalize.KERNELS,
    **normalize_gradient.KERNELS,
}
WORKSPACES: dict[str, Callable[[Step], int]] = {
    **dict.fromkeys(("sum", "max", "min", "any", "all"), workspace),
    **normalize.WORKSPACES,
    **normalize_gradient.WORKSPACES,
}
