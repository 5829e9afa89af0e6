"""Reductions over any axes: sum, max, min, any, all, argmax, argmin; softmax and normalize have files of their own.

Whatever the axes, either lines of neighbouring elements become one element each (rows), or rows become one row
(columns). Where that leaves too few pieces for all threads, the reduced axis is cut into blocks, a number that
follows from the shape alone, and a second pass combines the blocks: sums never depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import (
    Combiner,
    LineReduction,
    combiner_for,
    extract_lanes,
    fill,
    reduce_columns,
)
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    Variable,
    lane_numbers,
    loop_over,
    splat_constant,
    vector_loop,
)
from mlcompute.devices.cpu.codegen.simd import FLOATING, SimdValue, select
from mlcompute.devices.cpu.kernels.row_column import MIN_COLUMNS, UNITS, WORTH_BLOCKS, ColumnLoops, RowLoops
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import (
    MIN_SHARED_ROWS,
    Axis,
    Operand,
    Operands,
    ReductionAxes,
    dense_strides,
    iteration_count,
    shared_rows,
)
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import Shape, Step

_MOST_BLOCKS = 64
_NS_PER_ELEMENT = 0.12


def reduction_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """sum, max, min, any, all."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    combiner = combiner_for(step.op.name, x.dtype)
    if combiner is None or not x.size:
        return None
    return reduce_axes(step, operands, combiner, x, y, step.attributes["axes"], workspace(step))


def reduce_axes(
    step: Step, operands: Operands, combiner: Combiner, x: Operand, y: Operand, axes: Sequence[int], nbytes: int = 0
) -> Sequence[Entry]:
    """Combiner x over axes into y, whose extents there are 1; in blocks when there are too few results to share.

    nbytes   what the step's workspace has for the blocks
    """
    loops = _axes(x.shape, x.strides, y.strides, axes)
    blocks = min(_blocks(loops), nbytes // (y.size * y.dtype.itemsize))
    rows = shared_rows(x.shape, axes, (x, y), _units(loops), operands.threads)
    if blocks < 2 or rows:
        return [_entry(step, combiner, x, y, loops, rows)]
    buffer = operands.workspace(step, 0, blocks * y.size * y.dtype.itemsize)
    cut = next(axis for axis in loops if axis.reduced)
    size = -(-cut.extent // blocks)
    blocks = -(-cut.extent // size)
    first = Axis(blocks, (size * cut.strides[0], y.size))
    inside = [Axis(size, cut.strides, True) if axis is cut else axis for axis in loops]
    parts = _entry(step, combiner, x, buffer._replace(dtype=y.dtype), [first, *inside], 0, cut.extent)
    both = combiner_for(step.op.name, y.dtype) or combiner
    blocked = [Axis(blocks, (y.size, 0), True), Axis(y.size, (1, 1))] if y.size > 1 else [Axis(blocks, (1, 0), True)]
    return [parts, _entry(step, both, buffer._replace(dtype=y.dtype), y, blocked, 0)]


def workspace(step: Step) -> int:
    """Bytes for the blocks of a reduction, if it is cut into any."""
    x, y, axes = step.inputs[0], step.results[0], step.attributes["axes"]
    if x.size < WORTH_BLOCKS or (x.shape[0] >= MIN_SHARED_ROWS and 0 not in axes):
        return 0
    blocks = _blocks(_axes(x.shape, dense_strides(x.shape), dense_strides(y.shape), axes))
    return blocks * y.nbytes if blocks > 1 else 0


def _axes(shape: Shape, x_strides: Sequence[int], y_strides: Sequence[int], axes: Sequence[int]) -> list[Axis]:
    kept = tuple(0 if axis in axes else stride for axis, stride in enumerate(y_strides))
    return list(ReductionAxes.of(shape, axes, [tuple(x_strides), kept]).axes)


def _units(axes: Sequence[Axis]) -> int:
    """Pieces threads can share without cutting the innermost axis."""
    return iteration_count([axis for axis in axes[:-1] if not axis.reduced])


def _blocks(axes: Sequence[Axis]) -> int:
    """Into how many blocks the outermost reduced axis is cut."""
    reduced = [axis for axis in axes if axis.reduced]
    kept = [axis for axis in axes if not axis.reduced]
    rows = reduced[0].extent
    if iteration_count(axes) < WORTH_BLOCKS:
        return 1
    if axes[-1].reduced:
        units, least, accurate = iteration_count(kept), 1 if len(reduced) > 1 else 4096, 1
    else:
        # Columns are summed row after row, so very many rows go in blocks for accuracy, too.
        units, least = iteration_count(kept[:-1]) * -(-kept[-1].extent // MIN_COLUMNS), 16
        accurate = -(-rows // 2048)
    wanted = -(-UNITS // units) if units < 16 else 1
    return max(1, min(max(wanted, accurate), _MOST_BLOCKS, rows // least))


def _entry(
    step: Step, combiner: Combiner, x: Operand, y: Operand, axes: Sequence[Axis], rows: int, cut: int | None = None
) -> Entry:
    """One pass. `cut`: the first axis numbers blocks of the first reduced axis, whose full extent this is."""
    write = _rows if axes[-1].reduced else _columns
    code = Code(f"{combiner.name}_{write.__name__[1:]}")
    args = KernelArguments(code)
    write(args, combiner, x, y, axes, rows, cut)
    return Entry(
        step,
        code,
        args.values,
        reads=[x],
        writes=[y],
        rows=rows,
        by_row={0, 1} if rows else set(),
        kernel=f"{combiner.name} over {write.__name__[1:]}",
        cost=iteration_count(axes) * _NS_PER_ELEMENT,
    )


def _rows(
    args: KernelArguments, combiner: Combiner, x: Operand, y: Operand, axes: Sequence[Axis], rows: int, cut: int | None
) -> None:
    """The innermost axis is reduced: one result per unit, reduced along lines."""
    code, element = args.code, MEMORY_TYPES[x.dtype]
    source, target = args.pointer(x), args.pointer(y)
    loops = RowLoops(args, axes, rows, operands=1, full=cut)

    def write() -> None:
        with loops.each_unit():
            total = LineReduction(code, combiner)
            *outer, innermost = loops.reduced
            with loop_over(code, outer, [loops.address(source, 0, element)], [element]) as (inner,):
                total.add(Line(code, inner, element, loops.strides[0]), innermost.extent)
            code.store(loops.address(target, 1, combiner.element), combiner.element, total.result().name)

    code.later(_structure(combiner, x, axes, loops.strides, cut), write)


def _columns(
    args: KernelArguments, combiner: Combiner, x: Operand, y: Operand, axes: Sequence[Axis], rows: int, cut: int | None
) -> None:
    """The innermost axis stays: rows are combined into one, a range of columns per unit."""
    code, element = args.code, MEMORY_TYPES[x.dtype]
    source, target = args.pointer(x), args.pointer(y)
    loops = ColumnLoops(args, axes, rows, full=cut)

    def write() -> None:
        with loops.each_unit() as columns:
            to = Line(code, loops.address(target, 1, combiner.element), combiner.element, loops.strides[1])
            fill(code, to, columns, combiner.identity_value(code))
            *outer, innermost = loops.reduced
            with loop_over(code, outer, [loops.address(source, 0, element)], [element]) as (inner,):
                line = Line(code, inner, element, loops.strides[0])
                reduce_columns(code, combiner, innermost.extent, innermost.strides[0], line, columns, to)

    code.later(_structure(combiner, x, axes, loops.strides, cut), write)


def _structure(
    combiner: Combiner, x: Operand, axes: Sequence[Axis], strides: Sequence[str | None], cut: int | None
) -> str:
    """What a kernel's code depends on, beside the arguments it reads."""
    reduced, apart = [axis.reduced for axis in axes], [stride is not None for stride in strides]
    prepare = combiner.prepare.__qualname__
    return f"{combiner.name} {combiner.element} {prepare} {x.dtype} {reduced} {apart} {cut is None} {vector_lanes()}"


# Index of the extreme ---------------------------------------------------------------------------------------------

#: The index of lanes that have seen nothing better than the worst possible element.
_NOWHERE = 2**31 - 1


def extreme_index_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """argmax, argmin: the first extreme, NaN before all others."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if _compared_type(x.dtype) is None or not x.size or x.shape[step.attributes["axis"]] >= _NOWHERE:
        return None
    along = (step.attributes["axis"],)
    axes = _axes(x.shape, x.strides, y.strides, along)
    rows = shared_rows(x.shape, along, (x, y), _units(axes), operands.threads)
    code = Code(step.op.name)
    args = KernelArguments(code)
    (_index_rows if axes[-1].reduced else _index_columns)(args, step.op.name, x, y, axes, rows)
    return [
        Entry(
            step, code, args.values, reads=[x], writes=[y], rows=rows, by_row={0, 1} if rows else set(),
            kernel=f"{step.op.name} loop", cost=x.size * 0.3,
        )
    ]  # fmt: skip


def _compared_type(dtype: np.dtype[Any]) -> str | None:
    """The type in which elements are compared: small ones are widened, so that signed comparisons do."""
    if dtype.kind in "iub" and dtype.itemsize == 1:
        return "i32"
    dtype = computed_type(dtype)
    return MEMORY_TYPES[dtype] if dtype in (np.float32, np.float64, np.int32, np.int64) else None


class _Extreme:
    """The best element seen in every lane, and where it was."""

    def __init__(self, code: Code, name: str, dtype: np.dtype[Any]) -> None:
        element = _compared_type(dtype)
        assert element is not None
        self.code, self._element, self._is_signed = code, element, dtype.kind == "i"
        highest: float = math.inf if element in FLOATING else 2 ** (int(element[1:]) - 1) - 1
        worst = highest if name == "argmin" else -highest if element in FLOATING else -highest - 1
        self.value, self.index = (
            Variable(splat_constant(code, worst, element)),
            Variable(splat_constant(code, _NOWHERE, "i32")),
        )
        self.beats: Callable[[SimdValue, SimdValue], SimdValue] = (
            (lambda a, b: a > b) if name == "argmax" else (lambda a, b: a < b)
        )

    def better(self, a: SimdValue, b: SimdValue) -> SimdValue:
        """Does a come before b, wherever they are?"""
        wins = self.beats(a, b)
        if a.is_floating:
            wins = wins | (a.is_nan() & b.compare("ord", "eq", b))
        return wins

    def see(self, value: SimdValue, index: SimdValue, mask: str | None = None) -> None:
        if value.element != self._element:
            wide = vector(self._element, value.lanes)
            cast = "sext" if self._is_signed else "zext"
            value = value.let(f"{cast} {value.type} {value.name} to {wide}", self._element)
        wins = self.better(value, self.value.get())
        if mask is not None:
            wins = wins & SimdValue(self.code, mask, "i1", value.lanes)
        self.value.set(select(wins, value, self.value.get()))
        self.index.set(select(wins, index, self.index.get()))

    def positions(self) -> SimdValue:
        """Where each lane's best was."""
        return _as_position(self.index.get())

    def position(self) -> SimdValue:
        """Where the best of all lanes was."""
        pairs = (self.value.get(), self.index.get())
        while pairs[0].lanes > 1:
            half = pairs[0].lanes // 2
            (v, w), (i, j) = ((extract_lanes(p, 0, half), extract_lanes(p, half, half)) for p in pairs)
            first = self.better(v, w) | ~(self.better(w, v) | (j < i))
            pairs = select(first, v, w), select(first, i, j)
        return _as_position(pairs[1])


def _as_position(index: SimdValue) -> SimdValue:
    """As i64; where nothing was better than the worst, the start."""
    found = select(index.equals(_NOWHERE), 0, index)
    return found.let(f"sext {found.type} {found.name} to {vector('i64', found.lanes)}", "i64")


def _index_rows(args: KernelArguments, name: str, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code, lanes, element = args.code, vector_lanes(), MEMORY_TYPES[x.dtype]
    source, target = args.pointer(x), args.pointer(y)
    loops = RowLoops(args, axes, rows, operands=1)
    with loops.each_unit():
        line = Line(code, loops.address(source, 0, element), element, loops.strides[0])
        best = _Extreme(code, name, x.dtype)

        def look(index: str, mask: str | None) -> None:
            here = SimdValue(code, code.splat(code.let(f"trunc i64 {index} to i32"), "i32", lanes), "i32", lanes)
            best.see(line.load(index, mask), here + SimdValue(code, lane_numbers(lanes, "i32"), "i32", lanes), mask)

        vector_loop(code, 0, loops.reduced[-1].extent, look)
        code.store(loops.address(target, 1, "i64"), "i64", best.position().name)


def _index_columns(args: KernelArguments, name: str, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code, lanes, element = args.code, vector_lanes(), MEMORY_TYPES[x.dtype]
    source, target = args.pointer(x), args.pointer(y)
    loops = ColumnLoops(args, axes, rows)
    with loops.each_unit() as columns:
        address = loops.address(source, 0, element)
        to = Line(code, loops.address(target, 1, "i64"), "i64", loops.strides[1])

        def column(index: str, mask: str | None) -> None:
            best = _Extreme(code, name, x.dtype)
            with code.loop(0, loops.along.extent) as row:
                line = loops.row(0, address, row, element)
                here = SimdValue(code, code.splat(code.let(f"trunc i64 {row} to i32"), "i32", lanes), "i32", lanes)
                best.see(line.load(index, mask), here, mask)
            to.store(index, best.positions(), mask)

        vector_loop(code, *columns, column)


KERNELS: dict[str, Maker] = {
    **dict.fromkeys(("sum", "max", "min", "any", "all"), reduction_entries),
    **dict.fromkeys(("argmax", "argmin"), extreme_index_entries),
}
WORKSPACES: dict[str, Callable[[Step], int]] = {
    **dict.fromkeys(("sum", "max", "min", "any", "all"), workspace),
}
BFLOAT16 = dict.fromkeys(("sum", "max", "min", "argmax", "argmin"), always)
