"""softmax and log_softmax: rows in three passes over the cache, columns (another axis than the last) likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.combiners import MAX_SKIPPING_NAN, SUM, LineReduction, fill, larger_number
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    address_at,
    axis_registers,
    line_stride,
    share_units,
    splat,
    splat_constant,
    unravel_index,
    vector_loop,
)
from mlcompute.devices.cpu.codegen.math import exp, log
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.column_tiles import ColumnTiles
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Axis, Operand, Operands, ReductionAxes, iteration_count, shared_rows
from mlcompute.ops.op import FLOAT32, Step

#: Columns worked on at once: what is kept of them fits the first-level cache beside the rows.
_TILE = 512


def softmax_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One pass for the largest, one for the sum of exponentials, one for the result."""
    x, y, along = operands[step.inputs[0]], operands[step.results[0]], (step.attributes["axis"],)
    if x.dtype != FLOAT32 or not x.size:
        return None
    axes = ReductionAxes.of(x.shape, along, [x.strides, y.strides]).axes
    rows = shared_rows(x.shape, along, (x, y), iteration_count([axis for axis in axes[:-1] if not axis.reduced]))
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


def _exp(x: SimdValue) -> SimdValue:
    return SimdValue(x.code, exp(x.code, x.name, x.lanes), "float", x.lanes)


def _log(x: SimdValue) -> SimdValue:
    return SimdValue(x.code, log(x.code, x.name, x.lanes), "float", x.lanes)


def _rows(args: KernelArguments, logarithm: bool, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code = args.code
    source, target = args.pointer(x), args.pointer(y)
    kept = axis_registers(args, axes[:-1])
    extent, strides = args.number(axes[-1].extent), [line_stride(args, stride) for stride in axes[-1].strides]
    begin, end = share_units(args, iteration_count(axes[:-1]), rows)
    with code.loop(begin, end) as unit:
        indices = unravel_index(code, unit, kept)
        seen = Line(code, address_at(code, source, 0, kept, indices, "float"), "float", strides[0])
        made = Line(code, address_at(code, target, 1, kept, indices, "float"), "float", strides[1])
        # A NaN that the largest misses makes the sum NaN, and with it the entire row.
        largest = LineReduction(code, MAX_SKIPPING_NAN)
        largest.add(seen, extent)
        shift = splat(largest.result())

        def exponential(value: SimdValue, index: str, mask: str | None) -> SimdValue:
            e = _exp(value - shift)
            if not logarithm:
                made.store(index, e, mask)
            return e

        total = LineReduction(code, SUM)
        total.add(seen, extent, exponential)
        last = splat(_log(total.result()) if logarithm else 1.0 / total.result())

        def finish(index: str, mask: str | None) -> None:
            y = seen.load(index, mask) - shift - last if logarithm else made.load(index, mask) * last
            made.store(index, y, mask)

        vector_loop(code, 0, extent, finish)


def _columns(args: KernelArguments, logarithm: bool, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    """Row after row, so that memory is read in order; what is known of the columns so far stays on the stack."""
    code = args.code
    source, target = args.pointer(x), args.pointer(y)
    outer = [axis for axis in axes[:-1] if not axis.reduced]
    kept = axis_registers(args, outer)
    (along,) = axis_registers(args, [axis for axis in axes if axis.reduced])
    strides = [line_stride(args, stride) for stride in axes[-1].strides]
    tiles = ColumnTiles(args, axes[-1].extent, iteration_count(outer), _TILE)
    begin, end = share_units(args, iteration_count(outer) * tiles.count, rows)
    buffers = [code.variable(f"[{_TILE} x float]", "poison") for _ in range(2)]
    with code.loop(begin, end) as unit:
        unit, columns = tiles.split(unit)
        indices = unravel_index(code, unit, kept)
        addresses = [address_at(code, pointer, i, kept, indices, "float") for i, pointer in enumerate((source, target))]
        back = code.sub(0, columns[0])
        largest, total = (Line(code, code.at(buffer, back, "float"), "float") for buffer in buffers)
        fill(code, largest, columns, splat_constant(code, MAX_SKIPPING_NAN.identity))
        fill(code, total, columns, splat_constant(code, 0.0))

        def each_row(body: Callable[[Line, Line, str, str | None], None]) -> None:
            with code.loop(0, along.extent) as row:
                seen, made = (
                    Line(code, code.at(address, code.mul(row, stride), "float"), "float", apart)
                    for address, stride, apart in zip(addresses, along.strides, strides, strict=True)
                )
                vector_loop(code, *columns, lambda index, mask: body(seen, made, index, mask))

        def compare(seen: Line, made: Line, index: str, mask: str | None) -> None:
            largest.store(index, larger_number(largest.load(index, mask), seen.load(index, mask)), mask)

        def add(seen: Line, made: Line, index: str, mask: str | None) -> None:
            e = _exp(seen.load(index, mask) - largest.load(index, mask))
            total.store(index, total.load(index, mask) + e, mask)
            if not logarithm:
                made.store(index, e, mask)

        def invert(index: str, mask: str | None) -> None:
            found = total.load(index, mask)
            total.store(index, _log(found) if logarithm else 1.0 / found, mask)

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


KERNELS: dict[str, Maker] = dict.fromkeys(("softmax", "log_softmax"), softmax_entries)
