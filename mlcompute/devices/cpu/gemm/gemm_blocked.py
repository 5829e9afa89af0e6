"""gemm_blocked: y = a b over leading axes, b packed a block at a time, just before it is used.

    a (.., m, k) and b (.., k, n), rows or columns contiguous     ->     y (.., m, n), dense

A block of b, `DEPTH` deep and a few panels wide, becomes panels in a buffer of the thread's own that fits its
second-level cache, and the thread's rows of a are multiplied with it there, some at a time, while the next block of b
is fetched: even a small one has often left the cache since the last step. What is bfloat16 becomes float32 on the way,
and a result in bfloat16 is summed in a block of float32, and rounded once, at the end. Elements are summed as in
`packed_gemm`, on any thread. Threads that share rows of y sum in blocks of their own, too: what one of them writes, the
prefetcher of another would fetch again for every block of the depth.

Fully connected layers have a transposed b (`gemm_nt`), their weight gradients a transposed a (`gemm_tn`). A library's
gemm reads the former badly: it reached a third of its usual rate with a long depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, address_at, axis_registers, copy_line, unravel_index
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    LINE,
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
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Axis, Operand, Operands, iteration_count
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import FLOAT32, Step

#: Columns of b packed, rows of a multiplied with them, and rows of a result summed elsewhere, at a time.
_WIDE, _ROWS, _TALL = 256, 48, 288
#: Floats of a block on the stack in which a thread sums what it computes of rows that others write to.
_OWN_SUMS = 1 << 16
#: What packing a panel costs, in rows of a that could be multiplied with it meanwhile.
_PACKING = 16
#: What it costs few threads that they read each other's rows of a, and write to the same rows of y.
_ACROSS = 1.15
#: Threads from which on rows of a are fetched one tile ahead: fewer lose more by the instructions than they wait. Other
#: threads take over pieces of such many, and what is a thread's own counts for little.
_MANY_THREADS = 8
#: Rows of a piece of a thread's work, where its panels are packed again for every piece.
_PIECE_ROWS = 2 * _PACKING


def cut_rows_and_panels(threads: int, rows: int, panels: int) -> tuple[int, int]:
    """Into how many parts threads cut the rows of y, and its panels: the product is at most the number of threads.

    Sharing rows alone lets other kernels go on with the same rows without a barrier, and what one thread writes is not
    what another has read: it is chosen unless it is slower by more than that is worth.
    """

    dearer = _ACROSS if threads < _MANY_THREADS else 1.0

    def cost(grid: tuple[int, int]) -> float:
        down, across = grid
        return -(-panels // across) * (-(-rows // down) + _PACKING) * (1.0 if across == 1 else dearer)

    return min(((threads // across, across) for across in range(1, threads + 1)), key=cost)


def share_part(
    args: KernelArguments, extents: tuple[str, str], cuts: Sequence[tuple[int, int]]
) -> tuple[tuple[str, str], tuple[str, str]]:
    """[first, last) of this thread's rows and panels; `cuts`: into how many parts 1, 2, .. threads cut them."""
    code = args.code
    # A program that is too small for all threads runs on fewer; threads beyond those planned have nothing to do.
    known = code.minimum("%threads", args.number(len(cuts)))
    place = code.at("%arguments", code.add(code.mul(code.sub(known, 1), 2), len(args.values)), "i64")
    args.values += [number for cut in cuts for number in cut]
    row_parts, panel_parts = (code.load(code.at(place, word, "i64"), "i64") for word in range(2))
    part, other = code.div("%thread", panel_parts), code.rem("%thread", panel_parts)
    of_rows, of_panels = _part(code, extents[0], part, row_parts), _part(code, extents[1], other, panel_parts)
    # A piece is some panels, which are packed once as before; of few panels it is some rows, too (`_most_pieces`).
    number, pieces = code.asked_piece()
    across = code.minimum(code.sub(of_panels[1], of_panels[0]), pieces)
    across = code.intrinsic("umax", "i64", across, "1")
    down = code.div(pieces, across)
    cut = []
    for bounds, mine, count in (
        (of_rows, code.div(number, across), down),
        (of_panels, code.rem(number, across), across),
    ):
        within = _part(code, code.sub(bounds[1], bounds[0]), mine, count)
        cut.append((code.add(bounds[0], within[0]), code.add(bounds[0], within[1])))
    return cut[0], cut[1]


def _part(code: Code, extent: str, number: str, parts: str) -> tuple[str, str]:
    """[first, last) of part `number` of an extent; parts beyond the last are empty."""
    first, last = (code.minimum(bound, parts) for bound in (number, code.add(number, 1)))
    return code.div(code.mul(extent, first), parts), code.div(code.mul(extent, last), parts)


def _most_pieces(rows: int, panels: int) -> int:
    """Into how many pieces the rows and panels of a thread are cut: panels, and rows that are worth packing for."""
    return min(Entry.most_pieces, panels * max(1, rows // _PIECE_ROWS))


def blocked_workspace(m: int, n: int, dtype: np.dtype[Any]) -> int:
    """Bytes for every thread's sums, where the result (m, n) is bfloat16."""
    return threads_bytes(_sums(m, n)) if is_bfloat16(dtype) else 0


def _sums(m: int, n: int) -> dict[str, int]:
    return {"y": _tall(m) * _block_columns(n)}


def _block_columns(n: int) -> int:
    """Columns of b that are packed at a time, in full panels."""
    panel = panel_width(in_wide_panels(n)) * vector_lanes()
    return min(in_wide_panels(n), max(1, _WIDE // panel) * panel)


def _tall(m: int) -> int:
    """Rows of a result that are summed at a time: no more than threads have each, so that many need little memory."""
    return min(m, _TALL, max(_ROWS, -(-m // planned_threads())))


def gemm_blocked_entry(
    step: Step,
    operands: Operands,
    a: Operand,
    b: Operand,
    y: Operand,
    batch: Sequence[Axis],
) -> Entry:
    """`batch`: axes along which matrices follow each other, with the strides of a, b and y."""
    (m, n), k, count = y.shape[-2:], a.shape[-1], iteration_count(batch)
    by_columns = b.strides[-1] != 1 and n > 1
    is_transposed = count == 1 and not by_columns and a.strides[-1] != 1
    name = "gemm_tn" if is_transposed else "gemm_nt" if by_columns and count == 1 else "gemm_blocked"
    code = Code(name)
    args = KernelArguments(code)
    types = [MEMORY_TYPES[operand.dtype] for operand in (a, b, y)]
    memory = ThreadWorkspace.of(args, operands, step, _sums(m, n)) if is_bfloat16(y.dtype) else None
    as_if = in_wide_panels(n)
    panel = panel_width(as_if) * vector_lanes()
    panels = -(-n // panel)
    threads = operands.threads if memory is None else min(operands.threads, memory.count)
    cuts = [cut_rows_and_panels(-(-fewer // count), m, panels) for fewer in range(1, threads + 1)]
    down, across = cuts[-1]
    rows, columns, depth, all_panels = args.numbers([m, n, k, panels])
    a_row, a_depth, b_depth, b_column = args.numbers([*a.strides[-2:], *b.strides[-2:]])
    b_stride = b_column if by_columns else b_depth
    pointers = [args.pointer(operand) for operand in (a, b, y)]
    # The next block of b is fetched while this one is multiplied.
    fetches = b.dtype == FLOAT32
    rows_ahead = operands.threads >= _MANY_THREADS and a.dtype == FLOAT32 and (a.strides[-1] == 1 or k == 1)
    multiply = args.pointer(packed_gemm(as_if, 1 if fetches else 0, rows_ahead=rows_ahead))
    pack = args.pointer((pack_columns if by_columns else pack_rows)(as_if, types[1]))
    axes = axis_registers(args, batch)
    # Few rows read a panel once: it is multiplied while it is in the first-level cache.
    at_once = _block_columns(n) // panel if -(-m // down) > _ROWS or not by_columns else 1
    tall_step = max(1, m) if memory is None else _tall(m)
    sums_apart = memory is None and count == 1 and k > DEPTH and any(cut[1] > 1 for cut in cuts)
    if sums_apart:
        at_once = max(1, min(at_once, _OWN_SUMS // (panel * -(-m // down))))
        tall_step = min(-(-m // down), _OWN_SUMS // (at_once * panel))
    row_step = args.number(tall_step)
    tiles = -(-m // down) / tallest_tile(panel // vector_lanes())
    rate = args.number(fetch_rate(DEPTH, DEPTH * panel / LINE / tiles)) if fetches else ""
    place = code.variable("[2 x i64]", "zeroinitializer") if fetches else ""
    b_block = code.aligned_buffer(DEPTH * at_once * panel)
    own_sums = code.aligned_buffer(_OWN_SUMS) if sums_apart else ""
    # Columns of a are brought together first: a distance of a power of two leaves them few places in the cache. The few
    # rows of a tile are read where they lie.
    in_rows = a.strides[-1] == 1 or k == 1
    copies_a = is_bfloat16(a.dtype) or not in_rows
    a_block = code.aligned_buffer(DEPTH * _ROWS) if copies_a else ""

    def block_of_a(source: str, height: str, steps: str) -> tuple[str, str | int, str | int]:
        """Some rows of a from a depth on, as float32; copied in the order in which they lie."""
        if not copies_a:
            return source, a_row, a_depth
        lines, length, by, pitch = (height, steps, a_row, DEPTH) if in_rows else (steps, height, a_depth, _ROWS)
        with code.loop(0, lines) as index:
            line = Line(code, code.at(source, code.mul(index, by), types[0]), types[0])
            copy_line(code, line, Line(code, code.at(a_block, code.mul(index, pitch), "float"), "float"), 0, length)
        return (a_block, DEPTH, 1) if in_rows else (a_block, 1, _ROWS)

    def next_block(corner: str, start: str, width: str, group: str, last_panel: str) -> Ahead:
        """What is packed after the block of b from `corner` on: further down, or the top of the thread's next panels.

        No more than that: a line that another thread has read takes long to update.
        """
        begin_fetching(code, place)
        further = code.add(start, DEPTH)
        is_last = code.let(f"icmp sge i64 {further}, {depth}")
        top = code.sub(code.mul(b_column, at_once * panel), code.mul(start, b_depth))
        step = code.let(f"select i1 {is_last}, i64 {top}, i64 {code.mul(b_depth, DEPTH)}")
        left = code.let(f"select i1 {is_last}, i64 {depth}, i64 {code.sub(depth, further)}")
        end = code.minimum(code.mul(last_panel, panel), columns)
        beyond = code.minimum(code.sub(end, code.mul(code.add(group, at_once), panel)), at_once * panel)
        wide = code.let(f"select i1 {is_last}, i64 {code.intrinsic('smax', 'i64', beyond, '0')}, i64 {width}")
        deep = code.minimum(left, DEPTH)
        lines, length = (wide, deep) if by_columns else (deep, wide)
        is_none = code.let(f"icmp eq i64 {wide}, 0")
        stop = code.let(f"select i1 {is_none}, i64 0, i64 {code.mul(lines, b_stride)}")
        return Ahead([code.at(corner, step, "float")], length, b_stride, rate, place, stop)

    def part(matrix: str, row_bounds: tuple[str, str], panel_bounds: tuple[str, str]) -> None:
        """Some rows and panels of one matrix."""
        place = unravel_index(code, matrix, axes)
        at_a, at_b, at_y = (address_at(code, p, i, axes, place, types[i]) for i, p in enumerate(pointers))
        with code.loop(*row_bounds, row_step) as top, code.loop(*panel_bounds, at_once) as group:
            tall = code.minimum(code.sub(row_bounds[1], top), row_step)
            column = code.mul(group, panel)
            end = code.mul(code.minimum(code.add(group, at_once), panel_bounds[1]), panel)
            width = code.sub(code.minimum(end, columns), column)
            target = code.at(at_y, code.add(code.mul(top, columns), column), types[2])
            sums: str
            between: str | int
            sums, between = target, columns
            if memory is not None:
                sums, between = memory["y"], _block_columns(n)
            elif sums_apart:
                sums, between = own_sums, at_once * panel
            with code.loop(0, depth, DEPTH) as start:
                steps = code.minimum(code.sub(depth, start), DEPTH)
                corner = code.at(at_b, code.add(code.mul(column, b_column), code.mul(start, b_depth)), types[1])
                call_pack(code, pack, (0, width), steps, (corner, b_stride), b_block)
                ahead = next_block(corner, start, width, group, panel_bounds[1]) if fetches else None
                with code.loop(0, tall, _ROWS) as row:
                    height = code.minimum(code.sub(tall, row), _ROWS)
                    offset = code.add(code.mul(code.add(top, row), a_row), code.mul(start, a_depth))
                    rows_of_a = block_of_a(code.at(at_a, offset, types[0]), height, steps)
                    so_far = c = code.at(sums, code.mul(row, between), "float"), between
                    if sums_apart:  # the last sums go where they belong
                        is_last = code.let(f"icmp sge i64 {code.add(start, DEPTH)}, {depth}")
                        final = code.at(target, code.mul(row, columns), types[2])
                        c = (
                            code.let(f"select i1 {is_last}, ptr {final}, ptr {c[0]}"),
                            code.let(f"select i1 {is_last}, i64 {columns}, i64 {between}"),
                        )
                    extents = height, width, steps
                    call_packed_gemm(
                        code, multiply, extents, rows_of_a, b_block, c, accumulate=start, ahead=ahead, added=so_far
                    )
            if memory is not None:
                with code.loop(0, tall) as row:
                    seen = Line(code, code.at(sums, code.mul(row, between), "float"), "float")
                    made = Line(code, code.at(target, code.mul(row, columns), types[2]), types[2])
                    copy_line(code, seen, made, 0, width)

    if count == 1:
        shares = share_part(args, (rows, all_panels), cuts)

        def write() -> None:
            with code.when(code.let(f"icmp slt i64 {shares[0][0]}, {shares[0][1]}")):
                part("0", *shares)

    else:
        units, row_parts, panel_parts = args.numbers([count * down * across, down, across])
        first, last = code.share(units, 1, None if memory is None else memory.max_threads, in_pieces=True)

        def write() -> None:
            with code.loop(first, last) as unit:
                line = code.div(unit, panel_parts)
                row_bounds = _part(code, rows, code.rem(line, row_parts), row_parts)
                panel_bounds = _part(code, all_panels, code.rem(unit, panel_parts), panel_parts)
                part(code.div(line, row_parts), row_bounds, panel_bounds)

    buffered = None if memory is None else _block_columns(n)
    choices = f"{count == 1} {by_columns} {in_rows} {copies_a} {at_once} {panel} {buffered} {fetches} {sums_apart}"
    code.later(f"{choices} {types} {vector_lanes()}", write)
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        rows=m if count == across == 1 and len(y.shape) == 2 and threads == operands.threads else 0,
        by_row={0, 2} if a.is_dense else {2},
        rows_for=0 if all(cut[1] == 1 for cut in cuts) else threads,
        own_reads={1} if by_columns and count == down == 1 else set(),
        kernel=name,
        cost=2.0 * count * m * n * k / FLOPS_PER_NS + 300.0,
        in_pieces=True,
        most_pieces=_most_pieces(m // down, panels // across) if count == 1 else Entry.most_pieces,
        scratch=[] if memory is None else memory.scratch,
    )
