"""Split-K gemm: y = a b of few rows, where every thread reads only its own rows of b.

    a (m, k), any strides     b (k, n), rows contiguous     ->     y (m, n), dense

The input gradient of a fully connected layer reads all weights, and the update behind it writes them. Where a thread
writes what others have read, each cache line has to be taken from their caches first. So
the depth is cut as the update cuts the rows of the weights: thread s reads slice s. (A library's gemm prefetches beyond
its slice.)

Rows of y are cut into as many parts. In turn 0 slice s is multiplied into part s, in turn 1 added to part s + 1, and so
on: after as many turns as slices, with a barrier between them, every part has the sum over all slices. Slices are a
fact of the machine, and a part is summed in an order of its own: the numbers do not depend on the number of threads.
"""

from __future__ import annotations

from mlcompute.devices.cpu.codegen.arguments import Argument, KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    in_wide_panels,
    pack_rows,
    packed_gemm,
    panel_width,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import FLOAT32, Step

#: Slices beyond which turns are too short and barriers too many.
_MOST_SLICES = 4
#: Rows of y beyond which multiplying takes so long that what the caches do does not matter.
_MOST_ROWS = 128
#: Rows of a part, depth of a slice and elements of b from which it is worth it.
_LEAST_ROWS, _LEAST_DEPTH, _LEAST_B = 8, 64, 1 << 16
#: Columns of b that are packed at a time.
_WIDE = 256


def suits_split_k(a: Operand, b: Operand, y: Operand) -> bool:
    """Is b large beside a and y, and read by rows?"""
    if len(y.shape) != 2 or any(operand.dtype != FLOAT32 for operand in (a, b, y)):
        return False
    (m, n), k, slices = y.shape, a.shape[1], machine_slices()
    return (
        1 < slices <= _MOST_SLICES
        and slices * _LEAST_ROWS <= m <= _MOST_ROWS
        and k >= slices * _LEAST_DEPTH
        and k * n >= _LEAST_B
        and b.strides[1] == 1
        and y.is_dense
    )


def split_k_entries(step: Step, a: Operand, b: Operand, y: Operand) -> list[Entry]:
    """One entry per turn."""
    (m, n), k, slices = y.shape, a.shape[1], machine_slices()
    return [
        Entry(
            step,
            *_turn(turn, slices, a, b, y),
            reads=[a, b] if turn == 0 else [a, b, y],
            writes=[y],
            own_reads={1},
            kernel=f"gemm, split-K {turn + 1} of {slices}",
            cost=2.0 * m * n * k / slices / FLOPS_PER_NS + 300.0,
        )
        for turn in range(slices)
    ]


def _turn(turn: int, slices: int, a: Operand, b: Operand, y: Operand) -> tuple[Code, list[Argument]]:
    (m, n), k, as_if = y.shape, a.shape[1], in_wide_panels(y.shape[1])
    panel = panel_width(as_if) * vector_lanes()
    at_once = min(as_if, max(1, _WIDE // panel) * panel)
    code = Code("split_k")
    args = KernelArguments(code)
    number, parts, rows, columns, depth = args.numbers([turn, slices, m, n, k])
    a_row, a_depth, b_depth = args.numbers([*a.strides, b.strides[0]])
    from_a, from_b, to_y = (args.pointer(operand) for operand in (a, b, y))
    multiply, pack = args.pointer(packed_gemm(as_if)), args.pointer(pack_rows(as_if, MEMORY_TYPES[b.dtype]))
    block = code.aligned_buffer(DEPTH * at_once)

    def bounds(extent: str, part: str) -> tuple[str, str]:
        first, last = (code.div(code.mul(extent, edge), parts) for edge in (part, code.add(part, 1)))
        return first, last

    def write() -> None:
        begin, end = code.share(parts)
        with code.loop(begin, end) as mine:
            top, bottom = bounds(rows, code.rem(code.add(mine, number), parts))
            first, last = bounds(depth, mine)
            with code.loop(0, columns, at_once) as column, code.loop(first, last, DEPTH) as start:
                width = code.minimum(code.sub(columns, column), at_once)
                steps = code.minimum(code.sub(last, start), DEPTH)
                corner = code.at(from_b, code.add(code.mul(start, b_depth), column), "float")
                call_pack(code, pack, (0, width), steps, (corner, b_depth), block)
                lines = code.at(from_a, code.add(code.mul(top, a_row), code.mul(start, a_depth)), "float")
                target = code.at(to_y, code.add(code.mul(top, columns), column), "float")
                adds = code.add(number, code.sub(start, first))  # not the very first of a part
                call_packed_gemm(
                    code,
                    multiply,
                    (code.sub(bottom, top), width, steps),
                    (lines, a_row, a_depth),
                    block,
                    (target, columns),
                    accumulate=adds,
                )

    code.later(f"{at_once} {panel}", write)
    return code, args.values
