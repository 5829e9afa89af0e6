"""The last kernel of gradients that are summed in slices of the pixels: the sums of all slices, added in order."""

from __future__ import annotations

import math

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    Variable,
    address_at,
    axis_registers,
    line_stride,
    unravel_index,
    vector_loop,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Axis, Operand, Strides, collapsed_axes, dense_strides, iteration_count
from mlcompute.ops.op import Shape, Step

#: Columns that are added before the next row: where they are far apart in the result, its cache lines are still there.
_TILE = 32


def sum_of_slices_entry(
    step: Step,
    sums: Operand,
    result: Operand,
    slices: tuple[int, int],
    shape: Shape,
    strides: Strides,
    first: int = 0,
) -> Entry:
    """result = the sums of all slices.

    slices           how many there are, and floats from one to the next
    shape, strides   of the sums of one slice, which are dense, and of the same elements in the result
    first            where the first of them is in the result
    """
    code = Code("sum_slices")
    args = KernelArguments(code)
    count, apart, length = args.numbers([*slices, shape[-1]])
    rows = collapsed_axes(shape[:-1], [strides[:-1], dense_strides(shape)[:-1]])
    tiles = [Axis(-(-shape[-1] // _TILE), (_TILE * strides[-1], _TILE))] if shape[-1] > _TILE else []
    axes = [*tiles, *rows]
    registers, stride = axis_registers(args, axes), line_stride(args, strides[-1])
    source, target = args.pointer(sums), code.at(args.pointer(result), args.number(first), "float")
    begin, end = code.share(args.number(iteration_count(axes)))
    with code.loop(begin, end) as unit:
        indices = unravel_index(code, unit, registers)
        to = Line(code, address_at(code, target, 0, registers, indices, "float"), "float", stride)
        line = Line(code, address_at(code, source, 1, registers, indices, "float"), "float")

        def add(index: str, mask: str | None, line: Line = line, to: Line = to) -> None:
            total = Variable(line.load(index, mask))
            with code.loop(1, count) as number:
                total.set(total.get() + line.load(code.add(code.mul(number, apart), index), mask))
            to.store(index, total.get(), mask)

        end = code.minimum(code.sub(length, code.mul(indices[0], _TILE)), _TILE) if tiles else length
        vector_loop(code, 0, end, add)
    cost = 0.3 * math.prod(shape) * slices[0]
    return Entry(step, code, args.values, [sums], [result], kernel="sum of slices", cost=cost)
