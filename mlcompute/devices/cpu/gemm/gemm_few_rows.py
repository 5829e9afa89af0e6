"""gemm of few rows, or of a small b: y = a b over leading axes, b read as it lies, once for every row.

    a (.., m, k)     b (.., k, n), rows or columns contiguous     ->     y (.., m, n), dense

Packing b would take longer than multiplying. An element is summed in the same order on any thread.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import reduce_lanes
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    Variable,
    address_at,
    axis_registers,
    splat,
    splat_constant,
    unravel_index,
    vector_loop,
)
from mlcompute.devices.cpu.gemm.packed_gemm import DEPTH, FLOPS_PER_NS
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Axis, Operand, Operands, iteration_count
from mlcompute.ops.op import Step

#: Rows for which b is not packed.
_FEW_ROWS = 3
#: Bytes of a b that stays in the first-level cache.
_SMALL_B = 1 << 14
#: Columns that are summed side by side: vectors of them, or rows of bᵀ.
_TOGETHER = 4


def has_few_rows(a: Operand, by_columns: bool) -> bool:
    """Are there so few rows that b is to be read as it lies?"""
    return a.shape[-2] <= _FEW_ROWS and _reads(a, by_columns)


def has_small_b(a: Operand, b: Operand, by_columns: bool) -> bool:
    """Is b so small that it is to be read as it lies for any number of rows, and too narrow to fill vectors packed?"""
    k, n = b.shape[-2:]
    return (n if by_columns else k) < vector_lanes() and 4 * k * n <= _SMALL_B and _reads(a, by_columns)


def _reads(a: Operand, by_columns: bool) -> bool:
    """Where columns of b are contiguous, rows of a have to be, too."""
    return not by_columns or a.strides[-1] == 1 or a.shape[-1] == 1


def few_rows_entry(
    step: Step, operands: Operands, a: Operand, b: Operand, y: Operand, batch: Sequence[Axis], by_columns: bool
) -> Entry:
    """`batch`: axes along which matrices follow each other; `by_columns`: those of b are contiguous."""
    (m, n), k = y.shape[-2:], a.shape[-1]
    lines = m * iteration_count(batch)
    code = Code("gemm_few_rows")
    args = KernelArguments(code)
    width = _TOGETHER * (1 if by_columns else vector_lanes())
    groups = -(-n // width)
    across = min(groups, -(-operands.threads // lines))
    rows, columns, depth, parts, reach = args.numbers([m, n, k, across, -(-groups // across) * width])
    a_row, a_depth, b_stride = *args.numbers(a.strides[-2:]), args.number(b.strides[-1 if by_columns else -2])
    pointers = [args.pointer(operand) for operand in (a, b, y)]
    axes = axis_registers(args, batch)
    begin, end = code.share(code.mul(args.number(lines), parts))
    with code.loop(begin, end) as unit:
        line, first = code.div(unit, parts), code.mul(code.rem(unit, parts), reach)
        row, matrix = code.rem(line, rows), unravel_index(code, code.div(line, rows), axes)
        at_a, at_b, at_y = (address_at(code, p, i, axes, matrix, "float") for i, p in enumerate(pointers))
        source = code.at(at_a, code.mul(row, a_row), "float")
        target = Line(code, code.at(at_y, code.mul(row, columns), "float"), "float")
        bounds = first, code.minimum(code.add(first, reach), columns)
        if by_columns:
            _dot_products(code, bounds, depth, Line(code, source, "float"), (at_b, b_stride), target)
        else:
            _sums_of_rows(code, bounds, depth, Line(code, source, "float", a_depth), (at_b, b_stride), target)
    kernel, cost = "gemm of few rows", 2.0 * lines * n * k / (FLOPS_PER_NS / 8) + 300.0
    own_reads = {1} if by_columns and lines == 1 else set()
    return Entry(step, code, args.values, reads=[a, b], writes=[y], own_reads=own_reads, kernel=kernel, cost=cost)


def _sums_of_rows(code: Code, columns: tuple[str, str], depth: str, a: Line, b: tuple[str, str], y: Line) -> None:
    """y = Σ a_k b_k, some vectors at a time; the depth in blocks, so that errors grow with their number."""
    lanes = vector_lanes()

    def tile(column: str, masks: Sequence[str | None]) -> None:
        totals = [Variable(splat_constant(code, 0.0)) for _ in masks]
        with code.loop(0, depth, DEPTH) as start:
            sums = [Variable(splat_constant(code, 0.0)) for _ in masks]
            with code.loop(start, code.minimum(code.add(start, DEPTH), depth)) as k:
                element = splat(a.load(k, lanes=1))
                row = Line(code, code.at(b[0], code.add(code.mul(k, b[1]), column), "float"), "float")
                for v, (total, mask) in enumerate(zip(sums, masks, strict=True)):
                    total.set(element.intrinsic("fmuladd", row.load(v * lanes, mask), total.get()))
            for total, block in zip(totals, sums, strict=True):
                total.set(total.get() + block.get())
        for v, (total, mask) in enumerate(zip(totals, masks, strict=True)):
            y.store(code.add(column, v * lanes), total.get(), mask)

    first, last = columns
    wide = _TOGETHER * lanes
    full = code.add(first, code.mul(code.div(code.sub(last, first), wide), wide))
    with code.loop(first, full, wide) as column:
        tile(column, [None] * _TOGETHER)
    vector_loop(code, full, last, lambda column, mask: tile(column, [mask]))


def _dot_products(code: Code, columns: tuple[str, str], depth: str, a: Line, b: tuple[str, str], y: Line) -> None:
    """y_j = a . b_j, some columns at a time."""
    first, last = columns

    def tile(columns: Sequence[str]) -> None:
        rows = [Line(code, code.at(b[0], code.mul(column, b[1]), "float"), "float") for column in columns]
        totals = [Variable(splat_constant(code, 0.0)) for _ in columns]
        with code.loop(0, depth, DEPTH * vector_lanes()) as start:
            sums = [Variable(splat_constant(code, 0.0)) for _ in columns]

            def step(k: str, mask: str | None) -> None:
                element = a.load(k, mask)
                for row, total in zip(rows, sums, strict=True):
                    total.set(element.intrinsic("fmuladd", row.load(k, mask), total.get()))

            vector_loop(code, start, code.minimum(code.add(start, DEPTH * vector_lanes()), depth), step)
            for total, block in zip(totals, sums, strict=True):
                total.set(total.get() + block.get())
        for column, total in zip(columns, totals, strict=True):
            y.store(column, reduce_lanes(total.get(), operator.add))

    full = code.add(first, code.mul(code.div(code.sub(last, first), _TOGETHER), _TOGETHER))
    with code.loop(first, full, _TOGETHER) as column:
        tile([code.add(column, i) for i in range(_TOGETHER)])
    with code.loop(full, last) as column:
        tile([column])
