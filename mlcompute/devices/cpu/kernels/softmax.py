"""softmax and log_softmax: rows in three passes over the cache, columns (another axis than the last) likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.combiners import MAX_SKIPPING_NAN, SUM, LineReduction, fill, larger_number
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    splat,
    splat_constant,
    vector_loop,
)
from mlcompute.devices.cpu.codegen.math import exp, log
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.row_column import ColumnLoops, RowLoops
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import Axis, Operand, Operands, ReductionAxes, iteration_count, shared_rows
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import FLOAT32, Step

#: Columns worked on at once: what is kept of them fits the first-level cache beside the rows.
_TILE = 512


def softmax_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One pass for the largest, one for the sum of exponentials, one for the result."""
    x, y, along = operands[step.inputs[0]], operands[step.results[0]], (step.attributes["axis"],)
    if not supports_softmax(step):
        return None
    axes = ReductionAxes.of(x.shape, along, [x.strides, y.strides]).axes
    units = iteration_count([axis for axis in axes[:-1] if not axis.reduced])
    rows = shared_rows(x.shape, along, (x, y), units, operands.threads)
    code = Code(step.op.name)
    args = KernelArguments(code)
    write = _rows if axes[-1].reduced else _columns
    write(args, step.op.name == "log_softmax", x, y, axes, rows)
    return [
        Entry(
            step, code, args.values, reads=[x], writes=[y], rows=rows, by_row={0, 1} if rows else set(),
            kernel=f"{step.op.name} of {write.__name__[1:]}", cost=x.size * 0.6,
        )
    ]  # fmt: skip


def exp_of(x: SimdValue) -> SimdValue:
    """e to the power of every element."""
    return SimdValue(x.code, exp(x.code, x.name, x.lanes), "float", x.lanes)


def log_of(x: SimdValue) -> SimdValue:
    """The natural logarithm of every element."""
    return SimdValue(x.code, log(x.code, x.name, x.lanes), "float", x.lanes)


def _rows(args: KernelArguments, logarithm: bool, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code = args.code
    source, target = args.pointer(x), args.pointer(y)
    types = [MEMORY_TYPES[operand.dtype] for operand in (x, y)]
    loops = RowLoops(args, axes, rows, operands=2)
    extent = loops.reduced[-1].extent
    with loops.each_unit():
        seen, made = (
            Line(code, loops.address(pointer, i, types[i]), types[i], loops.strides[i])
            for i, pointer in enumerate((source, target))
        )
        # A NaN that the largest misses makes the sum NaN, and with it the entire row.
        largest = LineReduction(code, MAX_SKIPPING_NAN)
        largest.add(seen, extent)
        shift = splat(largest.result())

        def exponential(value: SimdValue, index: str, mask: str | None) -> SimdValue:
            e = exp_of(value - shift)
            if not logarithm:
                made.store(index, e, mask)
            return e

        total = LineReduction(code, SUM)
        total.add(seen, extent, exponential)
        last = splat(log_of(total.result()) if logarithm else 1.0 / total.result())

        def finish(index: str, mask: str | None) -> None:
            y = seen.load(index, mask) - shift - last if logarithm else made.load(index, mask) * last
            made.store(index, y, mask)

        vector_loop(code, 0, extent, finish)


def _columns(args: KernelArguments, logarithm: bool, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    """Row after row, so that memory is read in order; what is known of the columns so far stays on the stack."""
    code = args.code
    source, target = args.pointer(x), args.pointer(y)
    types = [MEMORY_TYPES[operand.dtype] for operand in (x, y)]
    loops = ColumnLoops(args, axes, rows, _TILE)
    buffers = [code.aligned_buffer(_TILE) for _ in range(2)]
    with loops.each_unit() as columns:
        addresses = [loops.address(pointer, i, types[i]) for i, pointer in enumerate((source, target))]
        largest, total = (loops.buffer(columns, buffer) for buffer in buffers)
        fill(code, largest, columns, splat_constant(code, MAX_SKIPPING_NAN.identity))
        fill(code, total, columns, splat_constant(code, 0.0))

        def each_row(body: Callable[[Line, Line, str, str | None], None]) -> None:
            with code.loop(0, loops.along.extent) as row:
                seen, made = (loops.row(i, address, row, types[i]) for i, address in enumerate(addresses))
                vector_loop(code, *columns, lambda index, mask: body(seen, made, index, mask))

        def compare(seen: Line, made: Line, index: str, mask: str | None) -> None:
            largest.store(index, larger_number(largest.load(index, mask), seen.load(index, mask)), mask)

        def add(seen: Line, made: Line, index: str, mask: str | None) -> None:
            e = exp_of(seen.load(index, mask) - largest.load(index, mask))
            total.store(index, total.load(index, mask) + e, mask)
            if not logarithm:
                made.store(index, e, mask)

        def invert(index: str, mask: str | None) -> None:
            found = total.load(index, mask)
            total.store(index, log_of(found) if logarithm else 1.0 / found, mask)

        def finish(seen: Line, made: Line, index: str, mask: str | None) -> None:
            last = total.load(index, mask)
            if logarithm:
                made.store(index, seen.load(index, mask) - largest.load(index, mask) - last, mask)
            else:
                made.store(index, made.load(index, mask) * last, mask)

        each_row(compare)
        each_row(add)
        vector_loop(code, *columns, invert)
        each_row(finish)


def supports_softmax(step: Step) -> bool:
    """float32 or bfloat16, and not empty?"""
    return computed_type(step.inputs[0].dtype) == FLOAT32 and bool(step.inputs[0].size)


KERNELS: dict[str, Maker] = dict.fromkeys(("softmax", "log_softmax"), softmax_entries)
SUPPORTS = dict.fromkeys(KERNELS, supports_softmax)
BFLOAT16 = dict.fromkeys(KERNELS, always)
