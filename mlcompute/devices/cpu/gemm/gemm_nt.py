"""gemm_nt of few rows: y = a b, where columns of b are contiguous, computed as yᵀ = bᵀ aᵀ.

    a (m, k), rows or columns contiguous     b (k, n), columns contiguous     ->     y (m, n), dense

A large fully connected layer of a small batch reads its weights from main memory, and packing them would wait for it.
So the few rows of a are packed, a block at a time, and weights are read as they lie, once, fetched some rows ahead.
Some rows of yᵀ are summed in memory of the thread, then turned round into y. Elements are summed as in `packed_gemm`,
on any thread.
"""

from __future__ import annotations

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    LINE,
    UNCACHED,
    Ahead,
    begin_fetching,
    call_pack,
    call_packed_gemm,
    fetch_rate,
    in_wide_panels,
    pack_columns,
    pack_rows,
    packed_gemm,
    panel_width,
    tallest_tile,
)
from mlcompute.devices.cpu.kernels.transposes import Transpose
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import FLOAT32, Step

#: Elements of yᵀ that are summed at a time.
_SUMS = 1 << 16
#: Rows of a up to which so many rows of yᵀ are summed at a time that packing a for each time costs little.
_MOST_ROWS = 128
#: Rows of yᵀ that every thread should have: packing a takes as long as multiplying a few.
_LEAST_COLUMNS = 64


def suits_nt(a: Operand, b: Operand, y: Operand) -> bool:
    """Are there few rows, and a b too large for the cache, whose columns are contiguous?"""
    if len(y.shape) != 2 or any(operand.dtype != FLOAT32 for operand in (a, b, y)):
        return False
    (m, n), k = y.shape, a.shape[1]
    has_lines = a.strides[0] == 1 or a.strides[1] == 1
    is_large = 4 * n * k >= UNCACHED and n >= max(m, _LEAST_COLUMNS * machine_slices()) and k >= max(2 * m, DEPTH)
    return m <= _MOST_ROWS and is_large and has_lines and b.strides[0] == 1 and y.is_dense


def gemm_nt_entry(step: Step, a: Operand, b: Operand, y: Operand) -> Entry:
    """Threads share the columns of y."""
    (m, n), k, lanes, as_if = y.shape, a.shape[1], vector_lanes(), in_wide_panels(y.shape[0])
    width = panel_width(as_if)
    panel, tile = width * lanes, tallest_tile(width)
    in_rows = a.strides[1] == 1
    code = Code("gemm_nt_few_rows")
    args = KernelArguments(code)
    few, columns, depth, a_stride = args.numbers([m, n, k, a.strides[0 if in_rows else 1]])
    b_column, most, pitch = args.numbers([b.strides[1], _SUMS // as_if // lanes * lanes, as_if])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    multiply = args.pointer(packed_gemm(as_if, 1))
    pack = args.pointer((pack_columns if in_rows else pack_rows)(as_if))
    packed, sums = code.aligned_buffer(DEPTH * panel), code.aligned_buffer(_SUMS)
    place = code.variable("[2 x i64]", "zeroinitializer")
    first, last = code.share(columns, lanes)

    def next_weights(corner: str, is_first: str) -> Ahead:
        """The rows of bᵀ of the next tile but one, when the first panel reads them."""
        begin_fetching(code, place)
        rate = code.let(f"select i1 {is_first}, i64 {fetch_rate(DEPTH, tile * DEPTH / LINE)}, i64 0")
        return Ahead([code.at(corner, code.mul(b_column, 2 * tile), "float")], DEPTH, b_column, rate, place)

    def write() -> None:
        # Blocks of about the same number of rows.
        length = code.sub(last, first)
        blocks = code.intrinsic("smax", "i64", _quotient_up(code, length, most), "1")
        height = code.mul(_quotient_up(code, _quotient_up(code, length, blocks), str(lanes)), lanes)
        with code.loop(first, last, height) as top:
            tall = code.minimum(code.sub(last, top), height)
            with code.loop(0, depth, DEPTH) as start, code.loop(0, few, panel) as row:
                steps, wide = code.minimum(code.sub(depth, start), DEPTH), code.minimum(code.sub(few, row), panel)
                line, element = (row, start) if in_rows else (start, row)
                source = code.at(from_a, code.add(code.mul(line, a_stride), element), "float")
                call_pack(code, pack, (0, wide), steps, (source, a_stride), packed)
                corner = code.at(from_b, code.add(code.mul(top, b_column), start), "float")
                target = code.at(sums, row, "float"), pitch
                ahead = next_weights(corner, code.let(f"icmp eq i64 {row}, 0"))
                call_packed_gemm(
                    code, multiply, (tall, wide, steps), (corner, b_column, 1), packed, target, start, ahead=ahead
                )
            turn = Transpose(code, "float", pitch, columns)
            turn.write(sums, code.at(to_y, top, "float"), ("0", few), tall)

    code.later(f"{in_rows} {panel} {lanes}", write)
    cost = 2.0 * m * n * k / FLOPS_PER_NS + 300.0
    return Entry(step, code, args.values, reads=[a, b], writes=[y], kernel="gemm_nt", cost=cost)


def _quotient_up(code: Code, a: str, b: str) -> str:
    return code.div(code.add(a, code.sub(b, 1)), b)
