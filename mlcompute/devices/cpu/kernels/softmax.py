"""softmax and log_softmax: rows in three passes over the cache, columns (another axis than the last) likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.code import Code
from mlcompute.devices.cpu.entry import Entry, Maker
from mlcompute.devices.cpu.kernels.folds import LARGEST_NUMBER, SUM, LineFold, fill, larger_number
from mlcompute.devices.cpu.kernels.tiles import ColumnTiles
from mlcompute.devices.cpu.kernels.walks import (
    Axis,
    Line,
    Words,
    axis_words,
    count_of,
    each_vector,
    line_stride,
    moved,
    number,
    share_units,
    shared_rows,
    splat,
    split_index,
    walk_axes,
)
from mlcompute.devices.cpu.lanes import Lanes
from mlcompute.devices.cpu.math import exp, log
from mlcompute.devices.cpu.operands import Operand, Operands
from mlcompute.ops.op import FLOAT32, Step

#: Columns worked on at once: what is kept of them fits the first-level cache with room for the rows.
_TILE = 512


def softmax_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One pass for the largest, one for the sum of exponentials, one for the result."""
    x, y, along = operands[step.inputs[0]], operands[step.results[0]], (step.attributes["axis"],)
    if x.dtype != FLOAT32 or not x.size:
        return None
    axes = walk_axes(x.shape, along, [x.strides, y.strides])
    if not any(axis.reduced for axis in axes):
        axes = [Axis(1, (0, 0), True), *axes]
    rows = shared_rows(x.shape, along, (x, y), count_of([axis for axis in axes[:-1] if not axis.reduced]))
    code = Code(step.op.name)
    words = Words(code)
    write = _rows if axes[-1].reduced else _columns
    write(words, step.op.name == "log_softmax", x, y, axes, rows)
    return [
        Entry(
            step, code, words.arguments, reads=[x], writes=[y], rows=rows, by_row={0, 1} if rows else set(),
            kernel=f"{step.op.name} of {write.__name__[1:]}", cost=x.size * 0.6,
        )
    ]  # fmt: skip


def _exp(x: Lanes) -> Lanes:
    return Lanes(x.code, exp(x.code, x.name, x.lanes), "float", x.lanes)


def _log(x: Lanes) -> Lanes:
    return Lanes(x.code, log(x.code, x.name, x.lanes), "float", x.lanes)


def _rows(words: Words, logarithm: bool, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    code = words.code
    source, target = words.pointer(x), words.pointer(y)
    kept = axis_words(words, axes[:-1])
    extent, strides = words.number(axes[-1].extent), [line_stride(words, stride) for stride in axes[-1].strides]
    begin, end = share_units(words, count_of(axes[:-1]), rows)
    with code.loop(begin, end) as unit:
        indices = split_index(code, unit, kept)
        seen = Line(code, moved(code, source, 0, kept, indices, "float"), "float", strides[0])
        made = Line(code, moved(code, target, 1, kept, indices, "float"), "float", strides[1])
        # A NaN that the largest misses makes the sum NaN, and with it the whole row.
        largest = LineFold(code, LARGEST_NUMBER)
        largest.add(seen, extent)
        shift = splat(largest.result())

        def exponential(value: Lanes, index: str, mask: str | None) -> Lanes:
            e = _exp(value - shift)
            if not logarithm:
                made.store(index, e, mask)
            return e

        total = LineFold(code, SUM)
        total.add(seen, extent, exponential)
        last = splat(_log(total.result()) if logarithm else 1.0 / total.result())

        def finish(index: str, mask: str | None) -> None:
            y = seen.load(index, mask) - shift - last if logarithm else made.load(index, mask) * last
            made.store(index, y, mask)

        each_vector(code, 0, extent, finish)


def _columns(words: Words, logarithm: bool, x: Operand, y: Operand, axes: Sequence[Axis], rows: int) -> None:
    """Row after row, so that memory is read in order; what is known of the columns so far stays on the stack."""
    code = words.code
    source, target = words.pointer(x), words.pointer(y)
    outer = [axis for axis in axes[:-1] if not axis.reduced]
    kept = axis_words(words, outer)
    (along,) = axis_words(words, [axis for axis in axes if axis.reduced])
    strides = [line_stride(words, stride) for stride in axes[-1].strides]
    tiles = ColumnTiles(words, axes[-1].extent, count_of(outer), _TILE)
    begin, end = share_units(words, count_of(outer) * tiles.count, rows)
    buffers = [code.variable(f"[{_TILE} x float]", "poison") for _ in range(2)]
    with code.loop(begin, end) as unit:
        unit, columns = tiles.split(unit)
        indices = split_index(code, unit, kept)
        places = [moved(code, pointer, i, kept, indices, "float") for i, pointer in enumerate((source, target))]
        back = code.sub(0, columns[0])
        largest, total = (Line(code, code.at(buffer, back, "float"), "float") for buffer in buffers)
        fill(code, largest, columns, number(code, LARGEST_NUMBER.identity))
        fill(code, total, columns, number(code, 0.0))

        def each_row(body: Callable[[Line, Line, str, str | None], None]) -> None:
            with code.loop(0, along.extent) as row:
                seen, made = (
                    Line(code, code.at(place, code.mul(row, stride), "float"), "float", apart)
                    for place, stride, apart in zip(places, along.strides, strides, strict=True)
                )
                each_vector(code, *columns, lambda index, mask: body(seen, made, index, mask))

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
        each_vector(code, *columns, invert)
        each_row(finish)


KERNELS: dict[str, Maker] = dict.fromkeys(("softmax", "log_softmax"), softmax_entries)
