"""y = a b for integers and float64, which no library multiplies: row after row of y, a row of b at a time.

    a (.., m, k), b (.., k, n), any strides     ->     y (.., m, n), contiguous

Integers wrap as NumPy's do. Without depth (k = 0) y is 0, for every type.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    address_at,
    axis_registers,
    each_vector_or_element,
    fill_line,
    line_stride,
    splat,
    unravel_index,
)
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Axis, Operand, iteration_count
from mlcompute.ops.op import Step

_NS_PER_PRODUCT = 0.2


def gemm_by_rows_entry(step: Step, a: Operand, b: Operand, y: Operand, batch: Sequence[Axis]) -> Entry | None:
    """Threads share the rows of y. None: not for these types."""
    k, integers_or_doubles = a.shape[-1], all(operand.dtype.kind in "iu" for operand in (a, b, y)) or y.dtype == float
    if len({a.dtype, b.dtype, y.dtype}) > 1 or y.dtype not in MEMORY_TYPES or not (integers_or_doubles or k == 0):
        return None
    code, element = Code("gemm_by_rows"), MEMORY_TYPES[y.dtype]
    args = KernelArguments(code)
    pointers = [args.pointer(operand) for operand in (a, b, y)]
    rows, columns, depth = args.numbers([y.shape[-2], y.shape[-1], k])
    a_row, a_depth, b_row = args.numbers([a.strides[-2], a.strides[-1], b.strides[-2]])
    b_column = line_stride(args, b.strides[-1])
    axes = axis_registers(args, batch)
    count = iteration_count(batch) * y.shape[-2]
    begin, end = code.share(args.number(count))
    with code.loop(begin, end) as unit:
        matrix, row = unravel_index(code, code.div(unit, rows), axes), code.rem(unit, rows)
        at_a, at_b, at_y = (address_at(code, p, i, axes, matrix, element) for i, p in enumerate(pointers))
        at_a = code.at(at_a, code.mul(row, a_row), element)
        total = Line(code, code.at(at_y, code.mul(row, columns), element), element)
        fill_line(code, total, 0, columns)
        with code.loop(0, depth) as number:
            factor = SimdValue(code, code.load(code.at(at_a, code.mul(number, a_depth), element), element), element, 1)
            line = Line(code, code.at(at_b, code.mul(number, b_row), element), element, b_column)

            def add(index: str, mask: str | None, lanes: int, line: Line = line, factor: SimdValue = factor) -> None:
                scaled = line.load(index, mask, lanes=lanes) * (splat(factor, lanes) if lanes > 1 else factor)
                total.store(index, total.load(index, mask, lanes=lanes) + scaled, mask)

            each_vector_or_element(code, 0, columns, add)
    return Entry(
        step, code, args.values, reads=[a, b], writes=[y], kernel="gemm by rows",
        cost=count * y.shape[-1] * (1 + k) * _NS_PER_PRODUCT,
    )  # fmt: skip
