"""gemm_tn: y = aᵀ b summed over a batch, the weight gradient of a fully connected layer.

    a (k, m) and b (k, n), rows contiguous     ->     y (m, n)

Both operands lie as this gemm reads them, so nothing is packed, and rows of y can be made a few at a time at no
loss: an optimizer update that follows finds them in the cache, and all of y need never exist. An element is summed
in the same order however many rows are computed at once. Longer sums than `DEPTH` go elsewhere: they would round worse,
and a library's gemm is faster there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import Argument, KernelArguments, call_kernel
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, splat, splat_constant, tail_mask
from mlcompute.devices.cpu.gemm.packed_gemm import DEPTH, FLOPS_PER_NS, registers
from mlcompute.devices.cpu.kernels.elementwise import fused_entry
from mlcompute.devices.cpu.kernels.widened import conversion_entry
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import MIN_SHARED_ROWS, Operand, Operands, dense_strides
from mlcompute.ops.bfloat16 import computed_type, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step, Value

#: Beyond this b would be read from main memory again for every few rows of y.
_LARGEST_B = 1 << 20
#: Rows of y that are made at a time take about this much.
_TILE_BYTES = 24 * 1024


def tile_size() -> tuple[int, int]:
    """Vectors and rows of the tile of y that is kept in registers, beside a row of b and an element of a."""
    return (3, 8) if registers() == 32 else (2, 4)


def gemm_tn() -> Code:
    """Its code, for a kernel's `KernelArguments.pointer`; see `call_gemm_tn`."""
    return _code(vector_lanes())


def call_gemm_tn(
    code: Code,
    function: str,
    extents: tuple[str | int, str | int, str | int],
    a: tuple[str, str | int],
    b: tuple[str, str | int],
    c: tuple[str, str | int],
) -> None:
    """Call `gemm_tn`: (rows, columns, depth); a, b and c with their strides from row to row."""
    call_kernel(code, function, [*extents, a[1], b[1], c[1]], [a[0], b[0], c[0]])


@functools.cache
def _code(lanes: int) -> Code:
    code = Code("gemm_tn", level=2)
    code.later(f"{lanes} {tile_size()}", lambda: _write(code, lanes))
    return code


def _write(code: Code, lanes: int) -> None:
    rows, columns, depth, a_row, b_row, c_row = (code.argument(index) for index in range(6))
    a, b, c = (code.argument(index, "ptr") for index in range(6, 9))
    width, tallest = tile_size()
    panel = width * lanes
    full = code.mul(code.div(columns, panel), panel)
    begin: str | int = 0
    for height in (tallest, 1):
        end = code.add(begin, code.mul(code.div(code.sub(rows, begin), height), height))
        with code.loop(begin, end, height) as row:
            from_a = code.at(a, row, "float"), a_row
            to_c = [code.at(c, code.mul(code.add(row, i), c_row), "float") for i in range(height)]
            with code.loop(0, full, panel) as column:
                _tile(code, depth, from_a, (code.at(b, column, "float"), b_row), to_c, column, [None] * width)
            rest = code.sub(columns, full)
            with code.when(code.let(f"icmp sgt i64 {rest}, 0")):
                masks = [tail_mask(code, code.sub(rest, v * lanes), lanes) for v in range(width)]
                _tile(code, depth, from_a, (code.at(b, full, "float"), b_row), to_c, full, masks)
        begin = end


def _tile(
    code: Code,
    depth: str,
    a: tuple[str, str],
    b: tuple[str, str],
    c_rows: Sequence[str],
    column: str,
    masks: Sequence[str | None],
) -> None:
    """A few rows of a few vectors, summed in registers; a and b come with their strides from row to row."""
    lanes = vector_lanes()
    sums = [[Variable(splat_constant(code, 0.0)) for _ in masks] for _ in c_rows]
    with code.loop(0, depth) as k:
        a_row, b_row = (
            Line(code, code.at(pointer, code.mul(k, stride), "float"), "float") for pointer, stride in (a, b)
        )
        vectors = [b_row.load(v * lanes, mask) for v, mask in enumerate(masks)]
        for i, row_sums in enumerate(sums):
            element = splat(a_row.load(i, lanes=1))
            for vector, total in zip(vectors, row_sums, strict=True):
                # Fused where the machine can; nothing is gained by emulating it.
                total.set(element.intrinsic("fmuladd", vector, total.get()))
    for c_row, row_sums in zip(c_rows, sums, strict=True):
        line = Line(code, code.at(c_row, column, "float"), "float")
        for v, (total, mask) in enumerate(zip(row_sums, masks, strict=True)):
            line.store(v * lanes, total.get(), mask)


# Entries ------------------------------------------------------------------------------------------------------------


def is_gemm_tn(a: Operand, b: Operand, y: Operand) -> bool:
    """Can this kernel compute y = a b, a being a view of its transpose?"""
    return (
        len(a.shape) == len(b.shape) == len(y.shape) == 2
        and all(operand.dtype == FLOAT32 for operand in (a, b, y))
        and suits(*y.shape, a.shape[1])
        and a.strides[0] == 1
        and b.strides[1] == 1
        and y.is_dense
    )


def suits(rows: int, columns: int, depth: int) -> bool:
    """Are there enough rows and columns to fill registers, few samples, and a b small enough to stay in the cache?"""
    return rows >= MIN_SHARED_ROWS and columns >= 16 and 0 < depth <= DEPTH and depth * columns * 4 <= _LARGEST_B


def gemm_tn_entry(step: Step, a: Operand, b: Operand, y: Operand) -> Entry:
    """y = a b as a kernel of its own; threads share rows."""
    (m, n), k = y.shape, a.shape[1]
    code = Code("gemm_tn_rows")
    args = KernelArguments(code)
    function = args.pointer(gemm_tn())
    rows, columns, depth, a_row, b_row = args.numbers([m, n, k, a.strides[1], b.strides[0]])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    begin, end = code.share(rows)
    extents = code.sub(end, begin), columns, depth
    target = code.at(to_y, code.mul(begin, columns), "float")
    call_gemm_tn(code, function, extents, (code.at(from_a, begin, "float"), a_row), (from_b, b_row), (target, columns))
    return Entry(
        step,
        code,
        args.values,
        reads=[a, b],
        writes=[y],
        rows=m,
        by_row={2},
        kernel="gemm_tn",
        cost=2.0 * m * n * k / FLOPS_PER_NS + 300.0,
    )


def tile_rows(columns: int) -> int:
    """Rows of y that are made, and used, at a time: so many that they stay in the first-level cache."""
    return max(MIN_SHARED_ROWS, _TILE_BYTES // (4 * columns) // 8 * 8)


def can_update(step: Step) -> bool:
    """Is a weight to be updated tile by tile as its gradient is made? Not where the tiles take as much as all of it."""
    multiply = step.attributes["steps"][0]
    (rows, columns), depth = multiply.results[0].shape, multiply.inputs[0].shape[1]
    if any(computed_type(value.dtype) != FLOAT32 for value in (*multiply.inputs, *multiply.results)):
        return False
    return suits(rows, columns, depth) and 2 * _tiles_bytes(rows, columns) <= 4 * rows * columns


def matmul_update_workspace(step: Step) -> int:
    """Bytes for the tiles of a step, and for float32 copies of factors in bfloat16."""
    multiply = step.attributes["steps"][0]
    return _tiles_bytes(*multiply.results[0].shape) + sum(map(_copy_bytes, multiply.inputs))


def _copy_bytes(factor: Value) -> int:
    return -(-4 * factor.size // 64) * 64 if is_bfloat16(factor.dtype) else 0


def _tiles_bytes(rows: int, columns: int) -> int:
    """One tile per slice of the rows."""
    return _slices(rows, columns) * tile_rows(columns) * columns * 4


def _slices(rows: int, columns: int) -> int:
    """Slices of the rows: no more than have two tiles each."""
    return max(1, min(machine_slices(), rows // (2 * tile_rows(columns))))


def matmul_update_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """A matmul and the update it feeds, a few rows at a time."""
    multiply, *rest = step.attributes["steps"]
    (g,) = multiply.results
    start, factors, before = _tiles_bytes(*g.shape), [], []
    for value in multiply.inputs:
        factor = operands[value]
        if nbytes := _copy_bytes(value):  # each is read as often as the other has columns
            place = operands.workspace(step, start, nbytes)
            copy = Operand(place.base, start // 4, factor.shape, factor.strides, FLOAT32)
            before.append(conversion_entry(step, value, factor, copy, operands.threads))
            factor, start = copy, start + nbytes
        factors.append(factor)
    a, b = factors
    (m, n), k, tile = g.shape, a.shape[1], tile_rows(g.shape[1])
    buffer = operands.workspace(step, 0, _tiles_bytes(m, n))
    full = Operand(buffer.base, 0, g.shape, dense_strides(g.shape), g.dtype)  # as the update sees a tile
    update = fused_entry(step, rest, operands, {g: full})
    if update is None:
        return None
    code = Code("matmul_update")
    args = KernelArguments(code)
    function, call_update, scratch = args.pointer(gemm_tn()), args.pointer(update.code), args.pointer(buffer)
    rows, columns, depth, a_row, b_row = args.numbers([m, n, k, a.strides[1], b.strides[0]])
    from_a, from_b = args.pointer(a), args.pointer(b)
    slices, height = args.numbers([_slices(m, n), tile])
    given = [_given(args, argument, full) for argument in update.arguments]
    first, last = code.share(slices)
    with code.loop(first, last) as number:
        begin, end = (code.div(code.mul(rows, edge), slices) for edge in (number, code.add(number, 1)))
        address = code.at(scratch, code.mul(code.mul(number, height), columns), "float")
        with code.loop(begin, end, height) as row:
            count = code.minimum(code.sub(end, row), height)
            source = code.at(from_a, row, "float"), a_row
            call_gemm_tn(code, function, (count, columns, depth), source, (from_b, b_row), (address, columns))
            _call_update(code, call_update, given, address, row, count, columns)
    return [
        *before,
        Entry(
            step,
            code,
            args.values,
            reads=[a, b, *(operand for operand in update.reads if operand is not full)],
            writes=update.writes,
            scratch=[buffer],
            kernel=f"gemm_tn + {update.kernel}, {tile} rows at a time",
            cost=2.0 * m * n * k / FLOPS_PER_NS + update.cost + 300.0,
        ),
    ]


def _given(args: KernelArguments, argument: Argument, full: Operand) -> tuple[str, str]:
    """An argument of the update's loop nest: (how it moves with the rows, register)."""
    if argument is full:
        return "tile", ""
    if isinstance(argument, Operand):
        return ("rows" if argument.shape == full.shape else "still"), args.pointer(argument)
    assert isinstance(argument, int)
    return "number", args.number(argument)


def _call_update(
    code: Code, function: str, given: Sequence[tuple[str, str]], tile: str, row: str, count: str, columns: str
) -> None:
    """The loop nest over all of y, told that y has these rows only: see `loop_entry` for its arguments."""
    words = code.variable(f"[{len(given)} x i64]", "undef")
    # Units to share, steps in each, and the one extent that is left when everything is dense.
    sizes = {0: count, 1: columns, 2: code.mul(count, columns)}
    for index, (kind, word) in enumerate(given):
        target = code.at(words, index, "i64")
        if kind == "number":
            code.do(f"store i64 {sizes.get(index, word)}, ptr {target}")
            continue
        if kind == "rows":
            word = code.at(word, code.mul(row, columns), "float")
        code.do(f"store ptr {tile if kind == 'tile' else word}, ptr {target}")
    code.do(f"call void {function}(i64 0, i64 1, ptr {words})")


KERNELS: dict[str, Maker] = {"matmul_update": matmul_update_entries}
WORKSPACES: dict[str, Callable[[Step], int]] = {"matmul_update": matmul_update_workspace}
SUPPORTS = {"matmul_update": can_update}
BFLOAT16 = dict.fromkeys(KERNELS, always)
