"""y = a bᵀ, the product of a fully connected layer: b's rows are packed a block at a time, just before they are used.

    a (m, k), any strides     b (n, k), rows contiguous     ->     y (m, n), rows contiguous

A library's product reads a transposed b badly: with a long depth it reached a third of its usual rate. Here a block of
b, `DEPTH` deep and one panel wide, is turned over into memory of the thread's own that fits its first-level cache, and
all rows of a the thread has meet it there. Elements are summed as `products` sums them, whoever computes them.
"""

from __future__ import annotations

from mlcompute.devices.cpu.code import Code, vector_lanes
from mlcompute.devices.cpu.entry import Entry
from mlcompute.devices.cpu.kernels.products import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_product,
    pack_columns,
    panel_width,
    product,
)
from mlcompute.devices.cpu.kernels.walks import Words
from mlcompute.devices.cpu.operands import Operand, Operands
from mlcompute.ops.op import Step

#: Rows each thread must have for packing all of b by itself to be cheap; with fewer, threads share b's rows instead.
_MANY_ROWS = 96


def turned_product_entry(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Entry:
    """b as the step has it: (k, n), its columns contiguous."""
    (m, n), k = y.shape[-2:], a.shape[-1]
    code = Code("turned_product")
    words = Words(code)
    panel = panel_width(n) * vector_lanes()
    panels = -(-n // panel)
    shares_rows = m >= _MANY_ROWS * operands.threads or panels < operands.threads
    rows, columns, depth = words.numbers([m, n, k])
    a_row, a_depth, b_row = words.numbers([a.strides[-2], a.strides[-1], b.strides[-1]])
    from_a, from_b, to_y = (words.pointer(operand) for operand in (a, b, y))
    multiply, pack = words.pointer(product(n)), words.pointer(pack_columns(n))
    # Both ways of sharing are one code: by rows, every thread takes all panels; by panels, all rows.
    by_rows = code.let(f"icmp ne i64 {words.number(int(shares_rows))}, 0")
    row_range, panel_range = code.share(rows), code.share(words.number(panels))
    first_row = code.let(f"select i1 {by_rows}, i64 {row_range[0]}, i64 0")
    last_row = code.let(f"select i1 {by_rows}, i64 {row_range[1]}, i64 {rows}")
    first_panel = code.let(f"select i1 {by_rows}, i64 0, i64 {panel_range[0]}")
    last_panel = code.let(f"select i1 {by_rows}, i64 {words.number(panels)}, i64 {panel_range[1]}")
    count = code.sub(last_row, first_row)
    block = code.aligned_room(DEPTH * panel)
    with code.when(code.let(f"icmp sgt i64 {count}, 0")), code.loop(0, depth, DEPTH) as start:
        steps = code.minimum(code.sub(depth, start), DEPTH)
        from_row = code.at(from_a, code.add(code.mul(first_row, a_row), code.mul(start, a_depth)), "float")
        with code.loop(first_panel, last_panel) as number:
            column = code.mul(number, panel)
            width = code.minimum(code.sub(columns, column), panel)
            source = code.at(from_b, code.add(code.mul(column, b_row), start), "float")
            call_pack(code, pack, (0, width), steps, (source, b_row), block)
            target = code.at(to_y, code.add(code.mul(first_row, columns), column), "float")
            a_block, c = (from_row, a_row, a_depth), (target, columns)
            call_product(code, multiply, (count, width, steps), a_block, block, c, accumulate=start)
    return Entry(
        step,
        code,
        words.arguments,
        reads=[a, b],
        writes=[y],
        rows=m if shares_rows and len(y.shape) == 2 else 0,
        by_row={0, 2} if a.is_dense else {2},
        kernel="product, b turned over",
        cost=2.0 * m * n * k / FLOPS_PER_NS + 300.0,
    )
