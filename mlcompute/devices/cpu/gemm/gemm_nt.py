"""gemm_nt: y = a bᵀ, as in a fully connected layer: b's rows are packed a block at a time, just before they are used.

    a (m, k), any strides     b (n, k), rows contiguous     ->     y (m, n), rows contiguous

A library's gemm reads a transposed b badly: with a long depth it reached a third of its usual rate. Here a block of
b, `DEPTH` deep and a few panels wide, is transposed into a buffer of the thread's own that fits its second-level cache,
and the thread's rows of a are multiplied with it there, some at a time: these are then read once for all panels, also
where their distance in memory is a power of two and the cache has few places for them. Elements are summed as in
`packed_gemm`, on any thread.
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
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: Panels that are packed at a time, and rows of a that are multiplied with them while they are in the cache.
_PANELS, _ROWS = 4, 48
#: What packing a panel costs, in rows of a that could be multiplied with it meanwhile.
_PACKING = 12


def cut_rows_and_panels(threads: int, rows: int, panels: int) -> tuple[int, int]:
    """Into how many parts threads cut the rows of y, and its panels: the product is at most the number of threads.

    Sharing rows alone lets other kernels go on with the same rows without a barrier: it is chosen unless it is slower.
    """

    def cost(grid: tuple[int, int]) -> float:
        down, across = grid
        return -(-panels // across) * (-(-rows // down) + _PACKING) * (1.0 if across == 1 else 1.05)

    return min(((threads // across, across) for across in range(1, threads + 1)), key=cost)


def share_part(
    args: KernelArguments, extents: tuple[str, str], parts: tuple[int, int], threads: int
) -> tuple[list[str], list[str]]:
    """[first, last) of this thread's rows and panels, which `threads` threads cut into so many parts."""
    code = args.code
    planned, row_parts, panel_parts = args.numbers([threads, *parts])
    # A program that is too small for all threads runs on fewer; threads beyond those planned have nothing to do.
    is_planned = code.let(f"icmp sge i64 %threads, {planned}")
    row_parts = code.let(f"select i1 {is_planned}, i64 {row_parts}, i64 %threads")
    panel_parts = code.let(f"select i1 {is_planned}, i64 {panel_parts}, i64 1")

    def share(extent: str, number: str, parts: str) -> list[str]:
        """Part `number` of an extent; parts beyond the last are empty."""
        bounds = (code.minimum(bound, parts) for bound in (number, code.add(number, 1)))
        return [code.div(code.mul(extent, bound), parts) for bound in bounds]

    part, other = code.div("%thread", panel_parts), code.rem("%thread", panel_parts)
    return share(extents[0], part, row_parts), share(extents[1], other, panel_parts)


def gemm_nt_entry(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Entry:
    """b as the step has it: (k, n), its columns contiguous."""
    (m, n), k = y.shape[-2:], a.shape[-1]
    code = Code("gemm_nt")
    args = KernelArguments(code)
    panel = panel_width(n) * vector_lanes()
    panels = -(-n // panel)
    down, across = cut_rows_and_panels(operands.threads, m, panels)
    rows, columns, depth = args.numbers([m, n, k])
    a_row, a_depth, b_row = args.numbers([a.strides[-2], a.strides[-1], b.strides[-1]])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    multiply, pack = args.pointer(packed_gemm(n)), args.pointer(pack_columns(n))
    extents = rows, args.number(panels)
    (first_row, last_row), (first_panel, last_panel) = share_part(args, extents, (down, across), operands.threads)
    count = code.sub(last_row, first_row)
    # Few rows read a panel once: it is multiplied while it is in the first-level cache.
    at_once = args.number(_PANELS if -(-m // down) > _ROWS else 1)
    block = code.aligned_buffer(DEPTH * panel * _PANELS)
    with code.when(code.let(f"icmp sgt i64 {count}, 0")), code.loop(0, depth, DEPTH) as start:
        steps = code.minimum(code.sub(depth, start), DEPTH)
        with code.loop(first_panel, last_panel, at_once) as number:
            column = code.mul(number, panel)
            last = code.mul(code.minimum(code.add(number, at_once), last_panel), panel)
            width = code.sub(code.minimum(last, columns), column)
            source = code.at(from_b, code.add(code.mul(column, b_row), start), "float")
            call_pack(code, pack, (0, width), steps, (source, b_row), block)
            with code.loop(first_row, last_row, _ROWS) as row:
                height = code.minimum(code.sub(last_row, row), _ROWS)
                from_row = code.at(from_a, code.add(code.mul(row, a_row), code.mul(start, a_depth)), "float")
                target = code.at(to_y, code.add(code.mul(row, columns), column), "float")
                a_block, c = (from_row, a_row, a_depth), (target, columns)
                call_packed_gemm(code, multiply, (height, width, steps), a_block, block, c, accumulate=start)
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        rows=m if across == 1 and len(y.shape) == 2 else 0,
        by_row={0, 2} if a.is_dense else {2},
        kernel="gemm_nt",
        cost=2.0 * m * n * k / FLOPS_PER_NS + 300.0,
    )
