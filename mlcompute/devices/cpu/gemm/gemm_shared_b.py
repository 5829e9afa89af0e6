"""gemm of many threads with a b that they pack together: y = a b in small pieces, of which none packs again.

    a (m, k), rows or columns contiguous     b (k, n), rows or columns contiguous     ->     y (m, n), dense

Of many cores some are slow, above all where they are virtual, and all wait for the slowest. So work is cut into
pieces that others take over. `gemm_blocked` packs the panel of a piece for itself, which a piece of a few rows does not
pay for; here all threads pack b first, each some of it, and meet. Sums are those of `gemm_blocked`, bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, copy_line
from mlcompute.devices.cpu.gemm.gemm_blocked import share_part
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    in_wide_panels,
    pack_columns,
    pack_rows,
    packed_gemm,
    panel_width,
    tallest_tile,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import FLOAT32, Step, Value

#: Cores from which on it is used.
_MANY_CORES = 8
#: Rows, columns and depth from which on it is worth a barrier, and elements of b that are packed at most.
_LEAST_ROWS, _LEAST_COLUMNS, _LEAST_DEPTH, _MOST_B = 128, 64, 64, 1 << 19
#: Tiles of rows in a piece, at least; depth that is packed at a time.
_PIECE_TILES, _CHUNK = 4, 64


def shares_b(step: Step) -> bool:
    """Is b small enough to be packed as a whole, and worth it?"""
    a, b, (y,) = *step.inputs, step.results
    if machine_slices() < _MANY_CORES or any(value.dtype != FLOAT32 or len(value.shape) != 2 for value in (a, b, y)):
        return False
    (m, n), k = y.shape, a.shape[1]
    return m >= _LEAST_ROWS and n >= _LEAST_COLUMNS and k >= _LEAST_DEPTH and k * in_wide_panels(n) <= _MOST_B


def shared_b_workspace(b: Value) -> int:
    """Bytes of a packed b."""
    return 4 * b.shape[0] * in_wide_panels(b.shape[1])


def cut_tiles_and_panels(threads: int, tiles: int, panels: int, tile: int, panel: int) -> tuple[int, int]:
    """Into how many parts threads cut the tiles of rows of y, and its panels: equal ones, that read little."""

    def cost(grid: tuple[int, int]) -> tuple[int, int]:
        tall, wide = -(-tiles // grid[0]), -(-panels // grid[1])
        return tall * wide, tall * tile + wide * panel

    return min(((threads // across, across) for across in range(1, threads + 1)), key=cost)


def shared_b_entries(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Sequence[Entry]:
    """Packing, and the product."""
    packed = operands.workspace(step, 0, shared_b_workspace(step.inputs[1]))
    return [_pack(step, b, packed), _multiply(step, operands.threads, a, b, y, packed)]


def _pack(step: Step, b: Operand, packed: Operand) -> Entry:
    """Threads share the panels, and their depth."""
    (k, n), as_if = b.shape, in_wide_panels(b.shape[1])
    panel, by_columns = panel_width(as_if) * vector_lanes(), b.strides[1] != 1 and n > 1
    code = Code("pack_shared")
    args = KernelArguments(code)
    columns, depth, b_depth, b_column = args.numbers([n, k, *b.strides])
    source, target = args.pointer(b), args.pointer(packed)
    pack = args.pointer((pack_columns if by_columns else pack_rows)(as_if, MEMORY_TYPES[b.dtype]))
    chunks = args.number(-(-k // _CHUNK))
    begin, end = code.share(code.mul(args.number(-(-n // panel)), chunks))
    with code.loop(begin, end) as unit:
        column, start = code.mul(code.div(unit, chunks), panel), code.mul(code.rem(unit, chunks), _CHUNK)
        width = code.minimum(code.sub(columns, column), panel)
        steps = code.minimum(code.sub(depth, start), _CHUNK)
        corner = code.at(source, code.add(code.mul(start, b_depth), code.mul(column, b_column)), "float")
        place = code.at(target, code.add(code.mul(column, depth), code.mul(start, panel)), "float")
        call_pack(code, pack, (0, width), steps, (corner, b_column if by_columns else b_depth), place)
    return Entry(step, code, args.values, [b], [packed], kernel="pack", cost=0.3 * b.size)


def _multiply(step: Step, threads: int, a: Operand, b: Operand, y: Operand, packed: Operand) -> Entry:
    """Threads share tiles of rows and panels; a piece is some of both."""
    (m, n), k, as_if = y.shape, a.shape[1], in_wide_panels(y.shape[1])
    tile, panel = tallest_tile(panel_width(as_if)), panel_width(as_if) * vector_lanes()
    tiles, panels = -(-m // tile), -(-n // panel)
    cuts = [cut_tiles_and_panels(fewer, tiles, panels, tile, panel) for fewer in range(1, threads + 1)]
    down, across = cuts[-1]
    by_columns, in_rows = b.strides[1] != 1 and n > 1, a.strides[1] == 1 or k == 1
    name = "gemm_tn" if not (in_rows or by_columns) else "gemm_nt" if by_columns else "gemm"
    code = Code("gemm_shared_b")
    args = KernelArguments(code)
    rows, columns, depth, all_tiles, all_panels = args.numbers([m, n, k, tiles, panels])
    a_row, a_depth = args.numbers(a.strides)
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, packed, y))
    multiply = args.pointer(packed_gemm(as_if))
    row_bounds, column_bounds = share_part(args, (all_tiles, all_panels), cuts)
    top, bottom = (code.minimum(code.mul(bound, tile), rows) for bound in row_bounds)
    left, right = (code.minimum(code.mul(bound, panel), columns) for bound in column_bounds)
    together = _PIECE_TILES * tile
    block = "" if in_rows else code.aligned_buffer(DEPTH * together)

    def part_of_rows(row: str) -> None:
        """Some rows. Columns of a are brought together: powers of two apart, they find few places in the cache."""
        tall = code.minimum(code.sub(bottom, row), together)
        with code.loop(0, depth, DEPTH) as start:
            steps = code.minimum(code.sub(depth, start), DEPTH)
            with code.loop(0, steps) as index:
                offset = code.add(code.mul(code.add(start, index), a_depth), row)
                target = Line(code, code.at(block, code.mul(index, together), "float"), "float")
                copy_line(code, Line(code, code.at(from_a, offset, "float"), "float"), target, 0, tall)
            with code.loop(left, right, panel) as column:
                width = code.minimum(code.sub(right, column), panel)
                panels_at = code.at(from_b, code.add(code.mul(column, depth), code.mul(start, panel)), "float")
                c = (code.at(to_y, code.add(code.mul(row, columns), column), "float"), columns)
                factor = (block, 1, together)
                call_packed_gemm(code, multiply, (tall, width, steps), factor, panels_at, c, accumulate=start)

    has_rows, has_columns = (code.let(f"icmp slt i64 {low}, {high}") for low, high in ((top, bottom), (left, right)))
    with code.when(code.let(f"and i1 {has_rows}, {has_columns}")):
        if in_rows:
            extents, factor = (code.sub(bottom, top), code.sub(right, left), depth), code.mul(top, a_row)
            c = (code.at(to_y, code.add(code.mul(top, columns), left), "float"), columns)
            panels_at = code.at(from_b, code.mul(left, depth), "float")
            call_packed_gemm(code, multiply, extents, (code.at(from_a, factor, "float"), a_row, a_depth), panels_at, c)
        else:
            with code.loop(top, bottom, together) as row:
                part_of_rows(row)
    return Entry(
        step,
        code,
        args.values,
        reads=[a, packed],
        writes=[y],
        kernel=name,
        cost=2.0 * m * n * k / FLOPS_PER_NS + 300.0,
        in_pieces=True,
        most_pieces=min(Entry.most_pieces, max(1, tiles // down // _PIECE_TILES) * (panels // across or 1)),
    )
