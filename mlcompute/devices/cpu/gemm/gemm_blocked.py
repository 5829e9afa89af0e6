"""gemm_blocked: y = a b over leading axes, in any orientation: what multiplies where there is no library.

    a (.., m, k), any strides     b (.., k, n), rows or columns contiguous     ->     y (.., m, n), dense

As `gemm_nt`, but b may lie either way, and there may be many matrices. With few rows, packing b would take longer than
multiplying: b is then read as it lies, once for every row. An element is summed in the same order on any thread.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import reduce_lanes
from mlcompute.devices.cpu.codegen.loops import (
    AxisRegisters,
    Line,
    Variable,
    address_at,
    axis_registers,
    copy_line,
    splat,
    splat_constant,
    unravel_index,
    vector_loop,
)
from mlcompute.devices.cpu.gemm.gemm_nt import cut_rows_and_panels
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    pack_columns,
    pack_rows,
    packed_gemm,
    panel_width,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Axis, Operand, Operands, iteration_count
from mlcompute.ops.op import Step

#: Columns of b that are packed at a time, and rows of a that are multiplied with them while they are in the cache.
_WIDE, _ROWS = 256, 48
#: Rows for which b is not packed.
_FEW_ROWS = 3
#: Columns that are summed side by side where b is not packed: vectors of them, or rows of bᵀ.
_TOGETHER = 4


def gemm_blocked_entry(
    step: Step, operands: Operands, a: Operand, b: Operand, y: Operand, batch: Sequence[Axis], by_columns: bool
) -> Entry:
    """`batch`: axes along which matrices follow each other; `by_columns`: those of b are contiguous."""
    (m, n), k = y.shape[-2:], a.shape[-1]
    count = iteration_count(batch)
    reads_depth = by_columns and (a.strides[-1] == 1 or k == 1)
    few = m <= _FEW_ROWS and (reads_depth or not by_columns)
    code = Code("gemm_few_rows" if few else "gemm_blocked")
    args = KernelArguments(code)
    width = _TOGETHER * (1 if by_columns else vector_lanes()) if few else panel_width(n) * vector_lanes()
    panels = -(-n // width)
    down, across = cut_rows_and_panels(-(-operands.threads // count), m, panels)
    down = min(down, m)
    tall, wide = -(-m // down), -(-panels // across) * width
    rows, columns, depth, row_parts, column_parts, height, reach = args.numbers([m, n, k, down, across, tall, wide])
    a_row, a_depth, b_stride = *args.numbers(a.strides[-2:]), args.number(b.strides[-1 if by_columns else -2])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    matrices = args.number(count)
    axes = axis_registers(args, batch)
    begin, end = code.share(code.mul(matrices, code.mul(row_parts, column_parts)))
    block = "" if few else code.aligned_buffer(DEPTH * _WIDE)
    # Rows of a that are read for many panels are brought together first: a distance of a power of two leaves them few
    # places in the cache.
    a_block = code.aligned_buffer(DEPTH * _ROWS) if a.strides[-1] == 1 and n >= _WIDE and not few else None
    functions = (
        [] if few else [args.pointer(one(n)) for one in (packed_gemm, pack_columns if by_columns else pack_rows)]
    )
    with code.loop(begin, end) as unit:
        line = code.div(unit, column_parts)
        row, column = code.mul(code.rem(line, row_parts), height), code.mul(code.rem(unit, column_parts), reach)
        last_row, last_column = (
            code.minimum(code.add(row, height), rows),
            code.minimum(code.add(column, reach), columns),
        )
        place = unravel_index(code, code.div(line, row_parts), axes)
        at = _Matrices(code, axes, place)
        here = _Part((row, last_row), (column, last_column), depth, columns)
        lies = (at(0, from_a), a_row, a_depth), (at(1, from_b), b_stride), at(2, to_y)
        if few:
            _few_rows(code, here, *lies, by_columns)
        else:
            _blocks(code, here, *lies, by_columns, width, (block, a_block), functions)
    by_row = {2} | ({0} if a.is_dense else set())
    is_plain = across == 1 and len(y.shape) == 2 and (operands.threads == 1 or tall * operands.threads == m)
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        rows=m if is_plain else 0,
        by_row=by_row if is_plain else set(),
        rows_for=operands.threads,
        kernel="gemm of few rows" if few else "gemm_blocked",
        cost=2.0 * count * m * n * k / (FLOPS_PER_NS / (8 if few else 1)) + 300.0,
    )


class _Matrices:
    """Addresses of one matrix of every operand."""

    def __init__(self, code: Code, axes: Sequence[AxisRegisters], place: Sequence[str]) -> None:
        self._code, self._axes, self._place = code, axes, place

    def __call__(self, operand: int, pointer: str) -> str:
        return address_at(self._code, pointer, operand, self._axes, self._place, "float")


class _Part:
    """Rows and columns of y that a thread computes at a time, in registers; its depth, and all of its columns."""

    def __init__(self, rows: tuple[str, str], columns: tuple[str, str], depth: str, width: str) -> None:
        self.rows, self.columns, self.depth, self.width = rows, columns, depth, width


# b packed a block at a time -------------------------------------------------------------------------------------------


def _blocks(
    code: Code, part: _Part, a: tuple[str, str, str], b: tuple[str, str], y: str, by_columns: bool,
    panel: int, buffers: tuple[str, str | None], functions: Sequence[str],
) -> None:  # fmt: skip
    (from_a, a_row, a_depth), (from_b, b_stride), (multiply, pack) = a, b, functions
    (first_row, last_row), (block, a_block) = part.rows, buffers
    with code.loop(0, part.depth, DEPTH) as start:
        steps = code.minimum(code.sub(part.depth, start), DEPTH)
        with code.loop(*part.columns, _WIDE // panel * panel) as column:
            wide = code.minimum(code.sub(part.columns[1], column), _WIDE // panel * panel)
            lies = (column, start) if by_columns else (start, column)
            source = code.at(from_b, code.add(code.mul(lies[0], b_stride), lies[1]), "float")
            call_pack(code, pack, (0, wide), steps, (source, b_stride), block)
            with code.loop(first_row, last_row, _ROWS) as row:
                height = code.minimum(code.sub(last_row, row), _ROWS)
                rows = code.at(from_a, code.add(code.mul(row, a_row), code.mul(start, a_depth)), "float")
                target = code.at(y, code.add(code.mul(row, part.width), column), "float")
                extents, c = (height, wide, steps), (target, part.width)
                seen: tuple[str, str | int, str] = rows, a_row, a_depth
                if a_block is not None:
                    with code.loop(0, height) as index:
                        line = Line(code, code.at(rows, code.mul(index, a_row), "float"), "float")
                        to = Line(code, code.at(a_block, code.mul(index, DEPTH), "float"), "float")
                        copy_line(code, line, to, 0, steps)
                    seen = a_block, DEPTH, a_depth
                call_packed_gemm(code, multiply, extents, seen, block, c, accumulate=start)


# b as it lies ---------------------------------------------------------------------------------------------------------


def _few_rows(code: Code, part: _Part, a: tuple[str, str, str], b: tuple[str, str], y: str, by_columns: bool) -> None:
    from_a, a_row, a_depth = a
    with code.loop(*part.rows) as row:
        source = code.at(from_a, code.mul(row, a_row), "float")
        target = Line(code, code.at(y, code.mul(row, part.width), "float"), "float")
        if by_columns:
            _dot_products(code, part, Line(code, source, "float"), b, target)
        else:
            _sums_of_rows(code, part, Line(code, source, "float", a_depth), b, target)


def _sums_of_rows(code: Code, part: _Part, a: Line, b: tuple[str, str], y: Line) -> None:
    """y = Σ a_k b_k, some vectors at a time; the depth in blocks, so that errors grow with their number."""
    lanes = vector_lanes()

    def tile(column: str, masks: Sequence[str | None]) -> None:
        totals = [Variable(splat_constant(code, 0.0)) for _ in masks]
        with code.loop(0, part.depth, DEPTH) as start:
            sums = [Variable(splat_constant(code, 0.0)) for _ in masks]
            with code.loop(start, code.minimum(code.add(start, DEPTH), part.depth)) as k:
                element = splat(a.load(k, lanes=1))
                row = Line(code, code.at(b[0], code.add(code.mul(k, b[1]), column), "float"), "float")
                for v, (total, mask) in enumerate(zip(sums, masks, strict=True)):
                    total.set(element.intrinsic("fmuladd", row.load(v * lanes, mask), total.get()))
            for total, block in zip(totals, sums, strict=True):
                total.set(total.get() + block.get())
        for v, (total, mask) in enumerate(zip(totals, masks, strict=True)):
            y.store(code.add(column, v * lanes), total.get(), mask)

    first, last = part.columns
    wide = _TOGETHER * lanes
    full = code.add(first, code.mul(code.div(code.sub(last, first), wide), wide))
    with code.loop(first, full, wide) as column:
        tile(column, [None] * _TOGETHER)
    vector_loop(code, full, last, lambda column, mask: tile(column, [mask]))


def _dot_products(code: Code, part: _Part, a: Line, b: tuple[str, str], y: Line) -> None:
    """y_j = a . b_j, some columns at a time."""
    first, last = part.columns

    def tile(columns: Sequence[str]) -> None:
        rows = [Line(code, code.at(b[0], code.mul(column, b[1]), "float"), "float") for column in columns]
        totals = [Variable(splat_constant(code, 0.0)) for _ in columns]
        with code.loop(0, part.depth, DEPTH * vector_lanes()) as start:
            sums = [Variable(splat_constant(code, 0.0)) for _ in columns]

            def step(k: str, mask: str | None) -> None:
                element = a.load(k, mask)
                for row, total in zip(rows, sums, strict=True):
                    total.set(element.intrinsic("fmuladd", row.load(k, mask), total.get()))

            vector_loop(code, start, code.minimum(code.add(start, DEPTH * vector_lanes()), part.depth), step)
            for total, block in zip(totals, sums, strict=True):
                total.set(total.get() + block.get())
        for column, total in zip(columns, totals, strict=True):
            y.store(column, reduce_lanes(total.get(), operator.add))

    full = code.add(first, code.mul(code.div(code.sub(last, first), _TOGETHER), _TOGETHER))
    with code.loop(first, full, _TOGETHER) as column:
        tile([code.add(column, i) for i in range(_TOGETHER)])
    with code.loop(full, last) as column:
        tile([column])
