"""gemm_tn: y = aᵀ b summed over a batch, the weight gradient of a fully connected layer.

    a (k, m) and b (k, n), rows contiguous     ->     y (m, n)

By itself it is a `gemm_blocked`. Where an optimizer update follows, b is packed once and rows of y are made a few at a
time: the update finds them in the cache, and all of y need never exist. Where b does not stay in the second-level
cache, or sums are long, columns are cut into blocks, too, and several tiles of rows are multiplied with each block. An
element is summed in the same order however many rows are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen.addressing import aligned, thread_floats
from mlcompute.devices.cpu.codegen.arguments import Argument, KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, copy_line
from mlcompute.devices.cpu.gemm.gemm_tn_slices import suits_slices
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
    pack_rows,
    packed_gemm,
    panel_width,
    tallest_tile,
    tile_lines,
)
from mlcompute.devices.cpu.kernels.elementwise import fused_entry
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.cpu.runtime.threads import machine_slices, planned_threads
from mlcompute.devices.loop_nest import MIN_SHARED_ROWS, Operand, Operands
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import FLOAT32, Step, Value

#: Bytes of b that are read again for every tile of rows of y; more are read in blocks of columns.
_CACHED_B = 1 << 20
#: Beyond this b would be read from main memory again and again.
_LARGEST_B = 1 << 24
#: Longer sums than this have so many terms that the update behind them hardly matters.
_MOST_DEPTH = 512
#: Rows and columns from which long sums, or a large b, are worth it.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 64
#: Rows of y that are made, and used, at a time, where every slice has two times as many.
_TILE_ROWS = 12
#: Floats of aᵀ, brought together, that are multiplied with one block of columns of b, and the bytes of such a block.
_GROUP_FLOATS, _BLOCK_BYTES = 1 << 16, 1 << 19
#: Bytes of a slice of parameter and state that a core's own caches do not hold until the next step.
_UNCACHED = 1 << 20
#: Blocks of columns that are pieces of a thread's work; fewer are too long.
_MANY_BLOCKS = 4


def is_gemm_tn(a: Operand, b: Operand, y: Operand) -> bool:
    """Can this kernel compute y = a b, a being a view of its transpose?"""
    return all(operand.dtype == FLOAT32 for operand in (a, b, y)) and _has_form(a, b, y)


def _has_form(a: Operand, b: Operand, y: Operand) -> bool:
    return (
        len(a.shape) == len(b.shape) == len(y.shape) == 2
        and suits(*y.shape, a.shape[1])
        and a.strides[0] == 1
        and b.strides[1] == 1
        and y.is_dense
    )


def sums_as_update(a: Operand, b: Operand, y: Operand) -> bool:
    """Is y = a b the gradient of a weight that `can_update`, of factors of which some are bfloat16?

    With an update behind it, it is computed from float32, whatever instructions there are. So it is by itself: in
    passes that are run one by one, gradients are the same numbers.
    """
    return y.dtype == FLOAT32 and _has_form(a, b, y) and not _leaves_to_library(y.shape[1], a.shape[1])


def _leaves_to_library(columns: int, depth: int) -> bool:
    """Of factors of which some are bfloat16: are instructions faster than an update behind the sums?"""
    return _in_blocks(columns, depth) and bool(onednn.bfloat16_gemm())


def suits(rows: int, columns: int, depth: int) -> bool:
    """Are there enough rows and columns to fill registers, few samples, and a b small enough to stay in the cache?"""
    if _in_blocks(columns, depth):
        enough = rows >= _LEAST_ROWS and columns >= _LEAST_COLUMNS
        return enough and depth <= _MOST_DEPTH and depth * columns * 4 <= _LARGEST_B
    return rows >= MIN_SHARED_ROWS and columns >= 16 and depth > 0


def _in_blocks(columns: int, depth: int) -> bool:
    """Are columns cut into blocks?"""
    return depth > DEPTH or depth * columns * 4 > _CACHED_B


def _block_columns(columns: int, depth: int) -> int:
    """Columns of y that are made at a time: all of them, or full panels of which a block of b stays in the cache."""
    if not _in_blocks(columns, depth):
        return columns
    panel = panel_width(in_wide_panels(columns)) * vector_lanes()
    return min(columns, max(1, _BLOCK_BYTES // (4 * depth * panel)) * panel)


def can_update(step: Step) -> bool:
    """Is a weight to be updated tile by tile as its gradient is made? Not where that takes more memory."""
    multiply = step.attributes["steps"][0]
    (rows, columns), depth = multiply.results[0].shape, multiply.inputs[0].shape[1]
    types = {value.dtype for value in (*multiply.inputs, *multiply.results)}
    if any(computed_type(dtype) != FLOAT32 for dtype in types):
        return False
    if types != {FLOAT32} and _leaves_to_library(columns, depth):
        return False
    if suits_slices(multiply):  # and is updated afterwards
        return False
    return suits(rows, columns, depth) and matmul_update_workspace(step) < 4 * rows * columns


def matmul_update_workspace(step: Step) -> int:
    """Bytes for the tiles of a step, and for the packed factor."""
    multiply = step.attributes["steps"][0]
    rows, columns = multiply.results[0].shape
    return _tiles_bytes(rows, columns, multiply.inputs[0].shape[1]) + _packed_bytes(multiply.inputs[1])


def _packed_bytes(b: Value) -> int:
    depth, columns = b.shape
    return 4 * depth * in_wide_panels(columns)


def _tiles_bytes(rows: int, columns: int, depth: int) -> int:
    """One tile per slice of the rows."""
    return 4 * _cut(rows, columns)[0] * _tile_floats(rows, columns, depth)


def _tile_floats(rows: int, columns: int, depth: int) -> int:
    """From the tile of a slice to that of the next: with a gap, unless that is much beside the gradient."""
    slices, height = _cut(rows, columns)
    size = height * _block_columns(columns, depth)
    apart = thread_floats({"tile": size})
    return apart if 4 * slices * apart <= rows * columns else aligned(size)


def _cut(rows: int, columns: int) -> tuple[int, int]:
    """Slices of the rows, no more than have two tiles each, and the rows of a tile: such as fill the registers."""
    full = tallest_tile(panel_width(in_wide_panels(columns)))
    several = -(-_TILE_ROWS // full) * full
    height = several if rows >= 2 * several * machine_slices() else full
    return max(1, min(machine_slices(), rows // (2 * height))), height


def matmul_update_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """A matmul and the update it feeds, a few rows at a time."""
    multiply, *rest = step.attributes["steps"]
    (g,) = multiply.results
    a, b = (operands[value] for value in multiply.inputs)
    (m, n), k = g.shape, a.shape[1]
    nbytes, (count, tile) = _tiles_bytes(m, n, k), _cut(m, n)
    buffer = operands.workspace(step, 0, nbytes)
    packed = operands.workspace(step, nbytes, _packed_bytes(multiply.inputs[1]))
    full = buffer.holding(g.shape, g.dtype)  # as the update sees a tile
    update = fused_entry(step, rest, operands, {g: full})
    if update is None:
        return None
    code = Code("matmul_update")
    args = KernelArguments(code)
    # What the update reads is fetched while the tile that it belongs to is multiplied.
    read = [operand for operand in dict.fromkeys(update.reads) if operand.shape == g.shape and operand is not full]
    is_large = 4 * m * n * len(read) >= _UNCACHED * count and k >= LINE  # shorter sums leave no time for it
    fetched = [operand for operand in read if is_large and operand.dtype == FLOAT32]
    gemm, call_update, scratch = (
        args.pointer(packed_gemm(in_wide_panels(n), len(fetched))),
        args.pointer(update.code),
        args.pointer(buffer),
    )
    rows, columns, depth, a_row = args.numbers([m, n, k, a.strides[1]])
    from_a, from_b = args.pointer(a), args.pointer(packed)
    slices, height, block, between = args.numbers([count, tile, _block_columns(n, k), _tile_floats(m, n, k)])
    from_fetched = [args.pointer(operand) for operand in fetched]
    rate, place = args.number(fetch_rate(k, tile_lines(n))), code.variable("[2 x i64]", "zeroinitializer")
    given = [_given(args, argument, full) for argument in update.arguments]
    in_blocks = _in_blocks(n, k)
    group = max(1, _GROUP_FLOATS // (k * tile)) * tile if in_blocks else tile
    type_, transposed = MEMORY_TYPES[a.dtype], code.aligned_buffer(_GROUP_FLOATS if in_blocks else DEPTH * tile)
    at_once = args.number(group)
    # A thread may run pieces of others where all have memory: of blocks of columns if there are many, else of rows.
    in_pieces, blocks = count == planned_threads(), -(-n // _block_columns(n, k))
    by_columns = blocks >= _MANY_BLOCKS
    first, last = code.share(slices, 1, slices)
    address = code.at(scratch, code.mul(code.worker(), between), "float")
    with code.loop(first, last) as number:
        begin, end = (code.div(code.mul(rows, edge), slices) for edge in (number, code.add(number, 1)))
        left: str | int = 0
        right: str = columns
        if in_pieces:
            if by_columns:
                left, right = _piece(code, "0", columns, block)
            else:
                begin, end = _piece(code, begin, end, height)
        with code.loop(begin, end, at_once) as top:
            bottom = code.minimum(code.add(top, at_once), end)
            # Brought together: a distance of a power of two would leave them few places in the cache.
            with code.loop(0, depth) as sample:
                line = Line(code, code.at(from_a, code.add(code.mul(sample, a_row), top), type_), type_)
                target = Line(code, code.at(transposed, code.mul(sample, at_once), "float"), "float")
                copy_line(code, line, target, 0, code.sub(bottom, top))
            with code.loop(left, right, block) as column, code.loop(top, bottom, height) as row:
                tall, wide = code.minimum(code.sub(bottom, row), height), code.minimum(code.sub(right, column), block)
                factor = (code.at(transposed, code.sub(row, top), "float"), 1, at_once)
                panels = code.at(from_b, code.mul(column, depth), "float")
                corner = code.add(code.mul(row, columns), column)
                ahead = None
                if fetched:
                    begin_fetching(code, place)
                    starts = [code.at(pointer, corner, "float") for pointer in from_fetched]
                    ahead = Ahead(starts, wide, columns, rate, place, code.mul(tall, columns))
                call_packed_gemm(code, gemm, (tall, wide, depth), factor, panels, (address, block), ahead=ahead)
                if in_blocks:
                    with code.loop(0, tall) as line_number:
                        line_of = code.at(address, code.mul(line_number, block), "float")
                        start = code.add(code.mul(code.add(row, line_number), columns), column)
                        _call_update(code, call_update, given, line_of, start, "1", wide)
                else:
                    _call_update(code, call_update, given, address, code.mul(row, columns), tall, columns)
    return [
        _pack_entry(step, b, packed),
        Entry(
            step,
            code,
            args.values,
            reads=[a, packed, *(operand for operand in update.reads if operand is not full)],
            writes=update.writes,
            own_reads=set(range(2, 1 + len(update.reads))),
            scratch=[buffer],
            kernel=f"gemm_tn + {update.kernel}, {tile} rows at a time",
            cost=2.0 * m * n * k / FLOPS_PER_NS + update.cost + 300.0,
            in_pieces=in_pieces,
            most_pieces=min(Entry.most_pieces, blocks if by_columns else max(1, m // (count * tile))),
        ),
    ]


def _piece(code: Code, begin: str, end: str, grain: str) -> tuple[str, str]:
    """The piece that is asked for of what lies between two bounds, in full multiples of `grain` from the first on."""
    grains = code.div(code.add(code.sub(end, begin), code.sub(grain, 1)), grain)
    first, last = code.piece("0", grains)
    first, last = (code.add(begin, code.mul(edge, grain)) for edge in (first, last))
    return first, code.minimum(last, end)


def _pack_entry(step: Step, b: Operand, packed: Operand) -> Entry:
    """b in panels, which threads share."""
    (depth, columns), as_if = b.shape, in_wide_panels(b.shape[1])
    code = Code("pack_factor")
    args = KernelArguments(code)
    mine = code.share(args.number(columns), panel_width(as_if) * vector_lanes())
    pack, steps = args.pointer(pack_rows(as_if, MEMORY_TYPES[b.dtype])), args.number(depth)
    source = args.pointer(b), args.number(b.strides[0])
    call_pack(code, pack, mine, steps, source, args.pointer(packed))
    return Entry(step, code, args.values, [b], [packed], kernel="pack", cost=0.3 * b.size)


def _given(args: KernelArguments, argument: Argument, full: Operand) -> tuple[str, str]:
    """An argument of the update's loop nest: (how it moves with the rows, register)."""
    if argument is full:
        return "tile", ""
    if isinstance(argument, Operand):
        return ("rows" if argument.shape == full.shape else "still"), args.pointer(argument)
    assert isinstance(argument, int)
    return "number", args.number(argument)


def _call_update(
    code: Code, function: str, given: Sequence[tuple[str, str]], tile: str, start: str, count: str, columns: str
) -> None:
    """The loop nest over all of y, told that y has these rows only: see `loop_entry` for its arguments.

    start   the first element, counted from the beginning of y
    """
    words = code.variable(f"[{len(given)} x i64]", "undef")
    # Units to share, steps in each, and the one extent that is left when everything is dense.
    sizes = {0: count, 1: columns, 2: code.mul(count, columns)}
    for index, (kind, word) in enumerate(given):
        target = code.at(words, index, "i64")
        if kind == "number":
            code.do(f"store i64 {sizes.get(index, word)}, ptr {target}")
            continue
        if kind == "rows":
            word = code.at(word, start, "float")
        code.do(f"store ptr {tile if kind == 'tile' else word}, ptr {target}")
    code.do(f"call void {function}(i64 {code.stream_bit()}, i64 1, ptr {words})")


KERNELS: dict[str, Maker] = {"matmul_update": matmul_update_entries}
WORKSPACES: dict[str, Callable[[Step], int]] = {"matmul_update": matmul_update_workspace}
SUPPORTS = {"matmul_update": can_update}
BFLOAT16 = dict.fromkeys(KERNELS, always)
