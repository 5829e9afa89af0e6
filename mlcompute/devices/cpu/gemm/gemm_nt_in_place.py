"""gemm_nt of 32 to 64 rows per thread: y = a bᵀ with the weights b read where they lie, and a packed instead.

    a (m, k) and b (n, k), rows contiguous     ->     y (m, n), dense

For a few rows, bringing b into panels takes as long as a fifth of the product and more. Here the rows of a are the
columns of a panel, and elements of b are spread over vectors: yᵀ = b aᵀ, summed in a block of the thread's own and
transposed into y at the end. The products are the same, added up in the order of `packed_gemm`, so that the sums are
those of `gemm_blocked`, bitwise.

Where all rows of a fill one panel, threads share the rows of b: those they also update. Where the rows of each thread
do, and b fits into every core's cache, threads own rows of y: what they read and write stays in their caches from one
kernel to the next, without a barrier. (Products with b itself gain nothing: its columns would be read line by line.)
"""

from __future__ import annotations

from typing import Literal

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

#: Sums that are kept at a time, for columns of y in full cache lines.
_SUMS, _GRAIN = 24576, 16
#: Rows of b that a thread must have, for packing a not to matter.
_LEAST_ROWS = 128
#: Rows of a from which on a panel of them is wide enough, and by how much of it they may fall short of filling it.
_FEWEST, _UNFILLED = 32, 0.1
#: Bytes of b that every core's own cache holds beside other things.
_CACHED_B = 1 << 20

Sharing = Literal["rows", "columns"]


def shared_in_place(a: Operand, b: Operand, y: Operand, threads: int) -> Sharing | None:
    """What threads share of y, of such a product; None where another kernel is faster."""
    if len(y.shape) != 2 or any(operand.dtype != FLOAT32 for operand in (a, b, y)):
        return None
    (m, n), k = y.shape, a.shape[1]
    if k < DEPTH or a.strides[1] != 1 or b.strides[0] != 1 or not y.is_dense:
        return None
    if _fills_panel(m) and n >= _LEAST_ROWS * threads:
        return "columns"
    each = -(-m // threads)
    is_even = m >= (1 - _UNFILLED) * each * threads
    return "rows" if _fills_panel(each) and is_even and n >= _LEAST_ROWS and 4 * k * n <= _CACHED_B else None


def _fills_panel(rows: int) -> bool:
    panel = _panel(rows)
    return max(_FEWEST, (1 - _UNFILLED) * panel) <= rows <= panel


def _panel(rows: int) -> int:
    return panel_width(rows) * vector_lanes()


def in_place_entry(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand, sharing: Sharing) -> Entry:
    """b as the step sees it: (k, n), columns contiguous."""
    (m, n), k, by_rows = y.shape, a.shape[1], sharing == "rows"
    each = -(-m // operands.threads) if by_rows else m
    panel = _panel(each)
    code = Code("gemm_nt_in_place")
    args = KernelArguments(code)
    rows, columns, depth, a_row, b_row = args.numbers([m, n, k, a.strides[0], b.strides[1]])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    multiply, pack = args.pointer(packed_gemm(each, rows_ahead=True)), args.pointer(pack_columns(each))
    group = _SUMS // panel // _GRAIN * _GRAIN
    packed, sums = code.aligned_buffer(DEPTH * panel), code.aligned_buffer(group * panel)

    def block(top: str | int, height: str, left: str, right: str) -> None:
        """Some rows and columns of y: no more rows than a panel has."""
        with code.loop(left, right, group) as first:
            wide = code.minimum(code.sub(right, first), group)
            with code.loop(0, depth, DEPTH) as start:
                steps = code.minimum(code.sub(depth, start), DEPTH)
                own = code.at(from_a, code.add(code.mul(top, a_row), start), "float")
                call_pack(code, pack, (0, height), steps, (own, a_row), packed)
                corner = code.at(from_b, code.add(code.mul(first, b_row), start), "float")
                factor, extents = (corner, b_row, 1), (wide, height, steps)
                call_packed_gemm(code, multiply, extents, factor, packed, (sums, panel), accumulate=start)
            target = code.at(to_y, code.add(code.mul(top, columns), first), "float")
            Transpose(code, "float", str(panel), columns).write(sums, target, ("0", height), wide)

    def write() -> None:
        if not by_rows:
            block(0, rows, *code.share(columns, _GRAIN, in_pieces=True))
            return
        grains = code.div(code.add(columns, _GRAIN - 1), _GRAIN)
        left, right = (code.mul(edge, _GRAIN) for edge in code.piece("0", grains))
        begin, end = code.share(rows)
        with code.loop(begin, end, panel) as top:  # fewer threads than expected have more rows
            block(top, code.minimum(code.sub(end, top), panel), left, code.minimum(right, columns))

    code.later(f"{panel} {vector_lanes()} {by_rows}", write)
    parts = 1 if by_rows else operands.threads
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        rows=m if by_rows else 0,
        by_row=({0, 2} if a.is_dense else {2}) if by_rows else set(),
        own_reads=set() if by_rows else {1},
        kernel="gemm_nt, weights in place" + (", own rows" if by_rows else ""),
        cost=2.0 * m * n * k / FLOPS_PER_NS + 300.0,
        in_pieces=True,
        most_pieces=min(Entry.most_pieces, n // parts // _LEAST_ROWS),
    )
