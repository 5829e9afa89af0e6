"""gemm_mixed: y = a b with bfloat16 in any place: read, packed and multiplied as float32, and rounded once, at the end.

    a (.., m, k) and b (.., k, n), rows or columns contiguous     ->     y (.., m, n), dense

A block of b becomes panels as in `gemm_nt`; a few rows of a become float32 in a buffer that stays in the first-level
cache while they are multiplied with all panels of the block. A result in bfloat16 is summed in a block of float32 of
the thread's own. Elements are summed as in `packed_gemm`, on any thread.
"""

from __future__ import annotations

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, thread_floats
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    address_at,
    axis_registers,
    copy_line,
    unravel_index,
)
from mlcompute.devices.cpu.gemm.gemm_nt import cut_rows_and_panels, share_part
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    pack_columns,
    pack_rows,
    packed_gemm,
    padded,
    panel_width,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Axis, Operand, Operands, iteration_count
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step, Value

#: Rows of a that are converted at a time, rows of a result that is summed elsewhere, and columns of b packed at a time.
_ROWS, _TALL, _WIDE = 48, 288, 256


def _parts(m: int, n: int, a_is_narrow: bool, y_is_narrow: bool) -> dict[str, int]:
    """A thread's own memory, in floats."""
    wide = _block_columns(n)
    parts = {"b": DEPTH * wide}
    if a_is_narrow:
        parts["a"] = _ROWS * DEPTH
    if y_is_narrow:
        parts["y"] = _tall(m) * wide
    return parts


def _block_columns(n: int) -> int:
    """Columns of b that are packed at a time, in full panels."""
    panel = panel_width(n) * vector_lanes()
    return min(padded(n), max(1, _WIDE // panel) * panel)


def _tall(m: int) -> int:
    """Rows of a result that are summed at a time: no more than threads have each, so that many need little memory."""
    return min(m, _TALL, max(_ROWS, -(-m // planned_threads())))


def mixed_workspace(a: Value, y: Value) -> int:
    """Bytes for every thread's own memory."""
    parts = _parts(y.shape[-2], y.shape[-1], is_bfloat16(a.dtype), is_bfloat16(y.dtype))
    return 4 * thread_floats(parts) * planned_threads()


def gemm_mixed_entry(
    step: Step, operands: Operands, a: Operand, b: Operand, y: Operand, batch: list[Axis], buffer: Operand
) -> Entry:
    """`batch`: the axes along which matrices follow each other, with the strides of a, b and y."""
    (m, n), k, count = y.shape[-2:], a.shape[-1], iteration_count(batch)
    code = Code("gemm_mixed")
    args = KernelArguments(code)
    types = [MEMORY_TYPES[operand.dtype] for operand in (a, b, y)]
    converts_a, converts_y = is_bfloat16(a.dtype), is_bfloat16(y.dtype)
    memory = ThreadWorkspace(args, buffer, _parts(m, n, converts_a, converts_y))
    panel = panel_width(n) * vector_lanes()
    threads = min(operands.threads, memory.count)
    # Threads share matrices where there are enough, else the rows and panels of each.
    by_matrix = count >= threads > 1
    down, across = (1, 1) if by_matrix else cut_rows_and_panels(threads, m, -(-n // panel))
    rows, columns, depth = args.numbers([m, n, k])
    row_step = args.number(_tall(m) if converts_y else max(1, m))
    a_row, a_depth, b_depth, b_column = args.numbers([*a.strides[-2:], *b.strides[-2:]])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    by_columns = b.strides[-1] != 1 and n > 1
    pack = args.pointer((pack_columns if by_columns else pack_rows)(n, types[1]))
    b_stride = b_column if by_columns else b_depth
    multiply = args.pointer(packed_gemm(n))
    axes = axis_registers(args, batch)
    all_matrices, all_panels = args.numbers([count, -(-n // panel)])
    in_rows = a.strides[-1] == 1 or k == 1

    if by_matrix:
        first, last = code.share(all_matrices, 1, memory.max_threads)
        row_bounds, panel_bounds = ["0", rows], ["0", all_panels]
    else:
        first, last = "0", all_matrices
        row_bounds, panel_bounds = share_part(args, (rows, all_panels), (down, across), threads)

    def a_block(row: str, height: str, start: str, steps: str, source: str) -> tuple[str, str | int, str | int]:
        """Some rows of a from a depth on, as float32: converted in the order in which they lie."""
        corner = code.at(source, code.add(code.mul(row, a_row), code.mul(start, a_depth)), types[0])
        if not converts_a:
            return corner, a_row, a_depth
        lines, length, by, pitch = (height, steps, a_row, DEPTH) if in_rows else (steps, height, a_depth, _ROWS)
        with code.loop(0, lines) as index:
            seen = Line(code, code.at(corner, code.mul(index, by), types[0]), types[0])
            copy_line(code, seen, Line(code, code.at(memory["a"], code.mul(index, pitch), "float"), "float"), 0, length)
        return (memory["a"], DEPTH, 1) if in_rows else (memory["a"], 1, _ROWS)

    has_rows = code.let(f"icmp slt i64 {row_bounds[0]}, {row_bounds[1]}")
    with code.when(has_rows), code.loop(first, last) as number:
        matrix = unravel_index(code, number, axes)
        at_a, at_b, at_y = (
            address_at(code, pointer, i, axes, matrix, types[i]) for i, pointer in enumerate((from_a, from_b, to_y))
        )
        with (
            code.loop(row_bounds[0], row_bounds[1], row_step) as top,
            code.loop(panel_bounds[0], panel_bounds[1], _block_columns(n) // panel) as group,
        ):
            tall = code.minimum(code.sub(row_bounds[1], top), row_step)
            column = code.mul(group, panel)
            end = code.mul(code.minimum(code.add(group, _block_columns(n) // panel), panel_bounds[1]), panel)
            width = code.sub(code.minimum(end, columns), column)
            target = code.at(at_y, code.add(code.mul(top, columns), column), types[2])
            sums, between = (memory["y"], _block_columns(n)) if converts_y else (target, columns)
            with code.loop(0, depth, DEPTH) as start:
                steps = code.minimum(code.sub(depth, start), DEPTH)
                corner = code.at(at_b, code.add(code.mul(column, b_column), code.mul(start, b_depth)), types[1])
                call_pack(code, pack, (0, width), steps, (corner, b_stride), memory["b"])
                with code.loop(0, tall, _ROWS) as row:
                    height = code.minimum(code.sub(tall, row), _ROWS)
                    rows_of_a = a_block(code.add(top, row), height, start, steps, at_a)
                    c = code.at(sums, code.mul(row, between), "float"), between
                    call_packed_gemm(
                        code, multiply, (height, width, steps), rows_of_a, memory["b"], c, accumulate=start
                    )
            if converts_y:
                with code.loop(0, tall) as row:
                    seen = Line(code, code.at(sums, code.mul(row, between), "float"), "float")
                    made = Line(code, code.at(target, code.mul(row, columns), types[2]), types[2])
                    copy_line(code, seen, made, 0, width)
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        rows=m if not by_matrix and across == 1 and len(y.shape) == 2 and threads == operands.threads else 0,
        by_row={0, 2} if a.is_dense else {2},
        kernel="gemm_mixed",
        cost=2.0 * count * m * n * k / FLOPS_PER_NS + 300.0,
        scratch=[memory.buffer],
    )
