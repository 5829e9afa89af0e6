"""gemm_nt of 32 to 64 rows: y = a bᵀ with the weights b read where they lie, and a packed instead.

    a (m, k) and b (n, k), rows contiguous     ->     y (m, n), dense

For a few rows, bringing b into panels takes as long as a fifth of the product and more. Here the rows of a are the
columns of a panel, few enough for one, and elements of b are spread over vectors: yᵀ = b aᵀ, summed in a block of the
thread's own and transposed into y at the end. The products are the same, added up in the order of `packed_gemm`, so
that the sums are those of `gemm_blocked`, bitwise. Threads share rows of b: those they also update.
"""

from __future__ import annotations

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    pack_columns,
    packed_gemm,
    panel_width,
)
from mlcompute.devices.cpu.kernels.transposes import Transpose
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import FLOAT32, Step

#: Rows of b whose sums are kept at a time, in full cache lines of y.
_GROUP, _GRAIN = 384, 16
#: Rows of b that a thread must have, for packing a not to matter.
_LEAST_ROWS = 128
#: Rows of a from which on a panel of them is wide enough, and by how much of it they may fall short of filling it.
_FEWEST, _UNFILLED = 32, 0.1


def suits_in_place(a: Operand, b: Operand, y: Operand, threads: int) -> bool:
    """Do the rows of a fill one panel, and are there enough rows of b for every thread?"""
    if len(y.shape) != 2 or any(operand.dtype != FLOAT32 for operand in (a, b, y)):
        return False
    (m, n), k = y.shape, a.shape[1]
    panel = panel_width(m) * vector_lanes()
    return (
        max(_FEWEST, (1 - _UNFILLED) * panel) <= m <= panel
        and n >= _LEAST_ROWS * threads
        and k >= DEPTH
        and a.strides[1] == b.strides[0] == 1
        and y.is_dense
    )


def in_place_entry(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Entry:
    """b as the step sees it: (k, n), columns contiguous."""
    (m, n), k = y.shape, a.shape[1]
    panel = panel_width(m) * vector_lanes()
    code = Code("gemm_nt_in_place")
    args = KernelArguments(code)
    rows, columns, depth, a_row, b_row = args.numbers([m, n, k, a.strides[0], b.strides[1]])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    multiply, pack = args.pointer(packed_gemm(m, rows_ahead=True)), args.pointer(pack_columns(m))
    packed, sums = code.aligned_buffer(DEPTH * panel), code.aligned_buffer(_GROUP * panel)

    def write() -> None:
        begin, end = code.share(columns, _GRAIN, in_pieces=True)
        with code.loop(begin, end, _GROUP) as first:
            tall = code.minimum(code.sub(end, first), _GROUP)
            with code.loop(0, depth, DEPTH) as start:
                steps = code.minimum(code.sub(depth, start), DEPTH)
                call_pack(code, pack, (0, rows), steps, (code.at(from_a, start, "float"), a_row), packed)
                corner = code.at(from_b, code.add(code.mul(first, b_row), start), "float")
                factor, extents = (corner, b_row, 1), (tall, rows, steps)
                call_packed_gemm(code, multiply, extents, factor, packed, (sums, panel), accumulate=start)
            transpose = Transpose(code, "float", str(panel), columns)
            transpose.write(sums, code.at(to_y, first, "float"), ("0", rows), tall)

    code.later(f"{panel} {vector_lanes()}", write)
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        own_reads={1},
        kernel="gemm_nt, weights in place",
        cost=2.0 * m * n * k / FLOPS_PER_NS + 300.0,
        in_pieces=True,
        most_pieces=min(Entry.most_pieces, n // operands.threads // _LEAST_ROWS),
    )
