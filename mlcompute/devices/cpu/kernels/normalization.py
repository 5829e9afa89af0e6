"""normalize: y = (x - m) / sqrt(v + epsilon), over rows (layer norm) or columns (channels-last batch norm).

Mean and variance come from two passes over data that is still in the cache. Columns with many rows are cut into
blocks, each with its own mean and sum of squares about it; those are then joined exactly as in
T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
The number of blocks depends on the shape alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import SUM, LineReduction, Term, fill, reduce_columns
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    Variable,
    loop_over,
    row_groups,
    splat,
    splat_constant,
    to_float,
    vector_loop,
)
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.row_column import MIN_COLUMNS, UNITS, WORTH_BLOCKS, ColumnLoops, RowLoops
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import (
    Axis,
    Operand,
    Operands,
    ReductionAxes,
    dense_strides,
    iteration_count,
    shared_rows,
)
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import FLOAT32, Shape, Step

_NS_PER_ELEMENT = 0.4
#: Columns worked on at once, and rows written at once.
_TILE, _ROWS = 512, 4


def normalize_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """By rows when elements that are reduced lie side by side, else by columns."""
    axes = step.attributes["axes"]
    x, (y, mean, variance) = operands[step.inputs[0]], (operands[value] for value in step.results)
    if not supports_normalize(step) or not reads_normalize(step, operands):
        return None
    kept = tuple(0 if axis in axes else stride for axis, stride in enumerate(mean.strides))
    loops = _axes(x.shape, axes, [x.strides, y.strides, kept])
    if loops[-1].reduced:
        return [_row_entry(step, [x, y, mean, variance], loops, operands.threads)]
    blocks = _blocks(loops)
    if workspace(step) < 2 * blocks * mean.size * 4:
        blocks = 1
    return _column_entries(step, operands, [x, y, mean, variance], loops, blocks)


def supports_normalize(step: Step) -> bool:
    """float32 or bfloat16, not empty, and reduced along rows, or along one axis of columns?"""
    shape = step.inputs[0].shape
    strides = dense_strides(shape)
    floats = all(computed_type(value.dtype) == FLOAT32 for value in (*step.inputs, *step.results))
    return floats and bool(step.inputs[0].size) and has_rows_or_columns(shape, step.attributes["axes"], [strides])


def reads_normalize(step: Step, operands: Operands) -> bool:
    """The same of how the operand lies."""
    x = operands[step.inputs[0]]
    return has_rows_or_columns(x.shape, step.attributes["axes"], [x.strides, dense_strides(x.shape)])


def has_rows_or_columns(shape: Shape, axes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """Are the innermost elements reduced together, or is only one loop around them reduced?"""
    loops = _axes(shape, axes, strides)
    return loops[-1].reduced or sum(axis.reduced for axis in loops) == 1


def workspace(step: Step) -> int:
    """Bytes for the statistics of the blocks."""
    shape, axes, statistics = step.inputs[0].shape, step.attributes["axes"], step.results[1]
    if not step.inputs[0].size:
        return 0
    loops = _axes(shape, axes, [dense_strides(shape)])
    blocks = 1 if loops[-1].reduced else _blocks(loops)
    return 2 * blocks * statistics.nbytes if blocks > 1 else 0


def _axes(shape: Shape, axes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Axis]:
    return list(ReductionAxes.of(shape, axes, [tuple(own) for own in strides], innermost=True).axes)


def _blocks(axes: Sequence[Axis]) -> int:
    """Into how many blocks the rows are cut; each block joins all of them again, so not into too many."""
    rows = next(axis.extent for axis in axes if axis.reduced)
    others = iteration_count([axis for axis in axes[:-1] if not axis.reduced])
    if iteration_count(axes) < WORTH_BLOCKS or others * -(-axes[-1].extent // MIN_COLUMNS) >= UNITS // 2:
        return 1
    return max(1, min(-(-UNITS // others), math.isqrt(rows // 16)))


# Rows ---------------------------------------------------------------------------------------------------------------


def _row_entry(step: Step, all_: Sequence[Operand], axes: Sequence[Axis], threads: int) -> Entry:
    x, y, mean, variance = all_
    code = Code("normalize_rows")
    args = KernelArguments(code)
    source, target, means, variances = (args.pointer(operand) for operand in all_)
    types = [MEMORY_TYPES[operand.dtype] for operand in (x, y)]
    reduced_count = args.number(iteration_count([axis for axis in axes if axis.reduced]))
    epsilon = _epsilon(args, step)
    units = iteration_count([axis for axis in axes if not axis.reduced])
    rows = shared_rows(x.shape, step.attributes["axes"], all_, units, threads)
    loops = RowLoops(args, axes, rows, operands=2)
    *outer, innermost = loops.reduced
    size = to_float(code, reduced_count)

    def write() -> None:
        with loops.each_unit():
            from_, to = (loops.address(p, i, types[i]) for i, p in enumerate((source, target)))

            def over(total: LineReduction, term: Term | None = None) -> SimdValue:
                with loop_over(code, outer, [from_], types[:1]) as (inner,):
                    total.add(Line(code, inner, types[0], loops.strides[0]), innermost.extent, term)
                return total.result()

            m = over(LineReduction(code, SUM)) / size
            centre = splat(m)
            v = over(LineReduction(code, SUM), lambda value, index, mask: _square(value - centre)) / size
            for pointer, value in ((means, m), (variances, v)):
                code.store(loops.address(pointer, 2, "float"), "float", value.name)
            scale = splat(1.0 / (v + epsilon).sqrt())
            with loop_over(code, outer, [from_, to], types) as addresses:
                seen, made = map(functools.partial(Line, code), addresses, types, loops.strides)

                def finish(index: str, mask: str | None) -> None:
                    made.store(index, (seen.load(index, mask) - centre) * scale, mask)

                vector_loop(code, 0, innermost.extent, finish)

    code.later(f"{types} {loops.code_key} {vector_lanes()}", write)
    return Entry(
        step, code, args.values, reads=[x], writes=[y, mean, variance],
        rows=rows, by_row={0, 1, 2, 3} if rows else set(),
        kernel="normalize rows", cost=x.size * _NS_PER_ELEMENT,
    )  # fmt: skip


def _square(x: SimdValue) -> SimdValue:
    return x * x


def _epsilon(args: KernelArguments, step: Step) -> SimdValue:
    """The op's small number, handed over as the bits of a float."""
    bits = args.number(int(np.float32(step.attributes["epsilon"]).view(np.int32)))
    code = args.code
    narrow = SimdValue(code, code.let(f"trunc i64 {bits} to i32"), "i32", 1)
    return narrow.from_bits()


# Columns ------------------------------------------------------------------------------------------------------------


def _column_entries(
    step: Step, operands: Operands, all_: Sequence[Operand], axes: Sequence[Axis], blocks: int
) -> Sequence[Entry]:
    x, mean = all_[0], all_[2]
    if blocks == 1:
        return [_full_columns(step, all_, axes, operands.threads)]
    along = next(axis for axis in axes if axis.reduced)
    size = -(-along.extent // blocks)
    blocks = -(-along.extent // size)
    # Per block: the means of all columns, then their sums of squares, each like `mean` itself.
    means = operands.workspace(step, 0, blocks * mean.size * 4)
    squares = operands.workspace(step, blocks * mean.size * 4, blocks * mean.size * 4)
    first = _block_statistics(step, x, means, squares, axes, blocks, size, mean.size)
    second = _join_blocks(step, all_, means, squares, axes, blocks, size)
    return [first, second]


def _statistics(
    loops: ColumnLoops, address: str, element: str, rows: str, columns: tuple[str, str], mean: Line, squares: Line
) -> None:
    """mean[c] and the sum of squares about it over some rows, for columns c."""
    code = loops.code
    seen = Line(code, address, element, loops.strides[0])
    for line in (mean, squares):
        fill(code, line, columns, splat_constant(code, 0.0))
    reduce_columns(code, SUM, rows, loops.along.strides[0], seen, columns, mean)
    size = splat(to_float(code, rows))
    vector_loop(code, *columns, lambda c, mask: mean.store(c, mean.load(c, mask) / size, mask))

    def term(value: SimdValue, index: str, mask: str | None) -> SimdValue:
        return _square(value - mean.load(index, mask))

    reduce_columns(code, SUM, rows, loops.along.strides[0], seen, columns, squares, term)


def _write(
    loops: ColumnLoops,
    addresses: Sequence[str],
    types: Sequence[str],
    rows: str,
    columns: tuple[str, str],
    mean: Line,
    scale: Line,
) -> None:
    """y = (x - mean) scale, several rows at once."""
    code = loops.code

    def write_rows(numbers: Sequence[str]) -> None:
        lines = [[loops.row(i, addresses[i], row, types[i]) for i in range(2)] for row in numbers]

        def column(index: str, mask: str | None) -> None:
            m, s = mean.load(index, mask), scale.load(index, mask)
            for seen, made in lines:
                made.store(index, (seen.load(index, mask) - m) * s, mask)

        vector_loop(code, *columns, column)

    row_groups(code, rows, _ROWS, write_rows)


def _full_columns(step: Step, all_: Sequence[Operand], axes: Sequence[Axis], threads: int) -> Entry:
    """Threads own columns (or samples): statistics and result in one go."""
    code = Code("normalize_columns")
    args = KernelArguments(code)
    pointers = [args.pointer(operand) for operand in all_]
    types = [MEMORY_TYPES[operand.dtype] for operand in all_]
    epsilon = splat(_epsilon(args, step))
    others = iteration_count([axis for axis in axes[:-1] if not axis.reduced])
    rows = shared_rows(all_[0].shape, step.attributes["axes"], all_, others, threads)
    loops = ColumnLoops(args, axes, rows, _TILE)
    slot = code.variable(f"[{_TILE} x float]", "poison")
    with loops.each_unit() as columns:
        addresses = [loops.address(p, min(i, 2), types[i]) for i, p in enumerate(pointers)]
        mean, variance = (Line(code, address, "float", loops.strides[2]) for address in addresses[2:])
        _statistics(loops, addresses[0], types[0], loops.along.extent, columns, mean, variance)
        size = splat(to_float(code, loops.along.extent))

        scale = loops.buffer(columns, slot)

        def finish(index: str, mask: str | None) -> None:
            v = variance.load(index, mask) / size
            variance.store(index, v, mask)
            scale.store(index, 1.0 / (v + epsilon).sqrt(), mask)

        vector_loop(code, *columns, finish)
        _write(loops, addresses[:2], types[:2], loops.along.extent, columns, mean, scale)
    return Entry(
        step, code, args.values, reads=[all_[0]], writes=list(all_[1:]),
        rows=rows, by_row={0, 1, 2, 3} if rows else set(),
        kernel="normalize columns", cost=all_[0].size * _NS_PER_ELEMENT,
    )  # fmt: skip


def _block_statistics(
    step: Step, x: Operand, means: Operand, squares: Operand, axes: Sequence[Axis], blocks: int, size: int, columns: int
) -> Entry:
    """Mean and sum of squares of every block."""
    code = Code("normalize_blocks")
    args = KernelArguments(code)
    pointers = [args.pointer(operand) for operand in (x, means, squares)]
    along = next(axis for axis in axes if axis.reduced)
    loops = ColumnLoops(args, axes, 0, _TILE, Axis(blocks, (size * along.strides[0], size * along.strides[1], columns)))
    step_ = args.number(size)
    with loops.each_unit() as range_:
        rows = code.minimum(step_, code.sub(loops.along.extent, code.mul(loops.indices[0], step_)))
        element = MEMORY_TYPES[x.dtype]
        address = loops.address(pointers[0], 0, element)
        lines = [Line(code, loops.address(p, 2, "float"), "float", loops.strides[2]) for p in pointers[1:]]
        _statistics(loops, address, element, rows, range_, lines[0], lines[1])
    return Entry(
        step, code, args.values, reads=[x], writes=[means, squares],
        kernel=f"statistics of {blocks} blocks", cost=x.size * _NS_PER_ELEMENT / 2,
    )  # fmt: skip


def _join_blocks(
    step: Step, all_: Sequence[Operand], means: Operand, squares: Operand, axes: Sequence[Axis], blocks: int, size: int
) -> Entry:
    """Statistics of all blocks become one, then each block writes its rows of the result."""
    code = Code("normalize_join")
    args = KernelArguments(code)
    x, y, mean, variance = (args.pointer(operand) for operand in all_)
    types = [MEMORY_TYPES[operand.dtype] for operand in all_[:2]]
    part_means, part_squares = args.pointer(means), args.pointer(squares)
    epsilon = splat(_epsilon(args, step))
    along, columns = next(axis for axis in axes if axis.reduced), all_[2].size
    # Along the blocks, the statistics themselves do not move: every block joins all of them.
    loops = ColumnLoops(args, axes, 0, _TILE, Axis(blocks, (size * along.strides[0], size * along.strides[1], 0)))
    step_, count, pitch = args.numbers([size, blocks, columns])
    slots = [code.variable(f"[{_TILE} x float]", "poison") for _ in range(2)]
    with loops.each_unit() as range_:
        rows = code.minimum(step_, code.sub(loops.along.extent, code.mul(loops.indices[0], step_)))
        addresses = [loops.address(p, i, types[i]) for i, p in enumerate((x, y))]
        statistics = [loops.address(p, 2, "float") for p in (mean, variance, part_means, part_squares)]
        is_first = code.let(f"icmp eq i64 {loops.indices[0]}, 0")
        full = splat(to_float(code, loops.along.extent))
        centre, scale = (loops.buffer(range_, slot) for slot in slots)

        def column(index: str, mask: str | None) -> None:
            def part(number_: int, block: str) -> Line:
                address = code.at(statistics[number_], code.mul(block, pitch), "float")
                return Line(code, address, "float", loops.strides[2])

            def size_of(block: str) -> SimdValue:
                return splat(to_float(code, code.minimum(step_, code.sub(loops.along.extent, code.mul(block, step_)))))

            total, spread = Variable(splat_constant(code, 0.0)), Variable(splat_constant(code, 0.0))
            with code.loop(0, count) as block:
                total.set(total.get() + part(2, block).load(index, mask) * size_of(block))
            m = total.get() / full
            with code.loop(0, count) as block:
                between = _square(part(2, block).load(index, mask) - m) * size_of(block)
                spread.set(spread.get() + (part(3, block).load(index, mask) + between))
            v = spread.get() / full
            with code.when(is_first):
                for address, value in zip(statistics, (m, v), strict=False):
                    Line(code, address, "float", loops.strides[2]).store(index, value, mask)
            centre.store(index, m, mask)
            scale.store(index, 1.0 / (v + epsilon).sqrt(), mask)

        vector_loop(code, *range_, column)
        _write(loops, addresses, types, rows, range_, centre, scale)
    return Entry(
        step, code, args.values, reads=[all_[0], means, squares], writes=list(all_[1:]),
        kernel=f"normalize columns in {blocks} blocks", cost=all_[0].size * _NS_PER_ELEMENT / 2,
    )  # fmt: skip


KERNELS: dict[str, Maker] = {"normalize": normalize_entries}
WORKSPACES: dict[str, Callable[[Step], int]] = {"normalize": workspace}
READS = {"normalize": reads_normalize}
SUPPORTS = {"normalize": supports_normalize}
BFLOAT16 = dict.fromkeys(KERNELS, always)
