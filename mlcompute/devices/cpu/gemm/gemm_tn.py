"""gemm_tn: y = aᵀ b summed over a batch, the weight gradient of a fully connected layer.

    a (k, m) and b (k, n), rows contiguous     ->     y (m, n)

By itself it is a `gemm_blocked`. Where an optimizer update follows, b is packed once and rows of y are made a few at a
time: the update finds them in the cache, and all of y need never exist. An element is summed in the same order however
many rows are computed at once. Longer sums than `DEPTH` go elsewhere: they would round worse, and a library's gemm is
faster there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import Argument, KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, copy_line
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    in_wide_panels,
    pack_rows,
    packed_gemm,
    panel_width,
    tallest_tile,
)
from mlcompute.devices.cpu.kernels.elementwise import fused_entry
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import MIN_SHARED_ROWS, Operand, Operands, dense_strides
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import FLOAT32, Step, Value

#: Beyond this b would be read from main memory again for every few rows of y.
_LARGEST_B = 1 << 20
#: Rows of y that are made, and used, at a time, where every slice has two times as many.
_TILE_ROWS = 12


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


def can_update(step: Step) -> bool:
    """Is a weight to be updated tile by tile as its gradient is made? Not where that takes more memory."""
    multiply = step.attributes["steps"][0]
    (rows, columns), depth = multiply.results[0].shape, multiply.inputs[0].shape[1]
    if any(computed_type(value.dtype) != FLOAT32 for value in (*multiply.inputs, *multiply.results)):
        return False
    return suits(rows, columns, depth) and matmul_update_workspace(step) < 4 * rows * columns


def matmul_update_workspace(step: Step) -> int:
    """Bytes for the tiles of a step, and for the packed factor."""
    multiply = step.attributes["steps"][0]
    return _tiles_bytes(*multiply.results[0].shape) + _packed_bytes(multiply.inputs[1])


def _packed_bytes(b: Value) -> int:
    depth, columns = b.shape
    return 4 * depth * in_wide_panels(columns)


def _tiles_bytes(rows: int, columns: int) -> int:
    """One tile per slice of the rows."""
    slices, height = _cut(rows, columns)
    return -(-slices * height * columns * 4 // 64) * 64


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
    (m, n), k, nbytes = g.shape, a.shape[1], _tiles_bytes(*g.shape)
    count, tile = _cut(m, n)
    buffer = operands.workspace(step, 0, nbytes)
    packed = operands.workspace(step, nbytes, _packed_bytes(multiply.inputs[1]))
    full = Operand(buffer.base, 0, g.shape, dense_strides(g.shape), g.dtype)  # as the update sees a tile
    update = fused_entry(step, rest, operands, {g: full})
    if update is None:
        return None
    code = Code("matmul_update")
    args = KernelArguments(code)
    gemm, call_update, scratch = (
        args.pointer(packed_gemm(in_wide_panels(n))),
        args.pointer(update.code),
        args.pointer(buffer),
    )
    rows, columns, depth, a_row = args.numbers([m, n, k, a.strides[1]])
    from_a, from_b = args.pointer(a), args.pointer(packed)
    slices, height = args.numbers([count, tile])
    given = [_given(args, argument, full) for argument in update.arguments]
    type_, turned = MEMORY_TYPES[a.dtype], code.aligned_buffer(DEPTH * tile)
    first, last = code.share(slices)
    with code.loop(first, last) as number:
        begin, end = (code.div(code.mul(rows, edge), slices) for edge in (number, code.add(number, 1)))
        address = code.at(scratch, code.mul(code.mul(number, height), columns), "float")
        with code.loop(begin, end, height) as row:
            tall = code.minimum(code.sub(end, row), height)
            # Brought together: a distance of a power of two would leave them few places in the cache.
            with code.loop(0, depth) as sample:
                line = Line(code, code.at(from_a, code.add(code.mul(sample, a_row), row), type_), type_)
                copy_line(code, line, Line(code, code.at(turned, code.mul(sample, tile), "float"), "float"), 0, tall)
            extents, factor = (tall, columns, depth), (turned, 1, tile)
            call_packed_gemm(code, gemm, extents, factor, from_b, (address, columns))
            _call_update(code, call_update, given, address, row, tall, columns)
    return [
        _pack_entry(step, b, packed),
        Entry(
            step,
            code,
            args.values,
            reads=[a, packed, *(operand for operand in update.reads if operand is not full)],
            writes=update.writes,
            scratch=[buffer],
            kernel=f"gemm_tn + {update.kernel}, {tile} rows at a time",
            cost=2.0 * m * n * k / FLOPS_PER_NS + update.cost + 300.0,
        ),
    ]


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
