"""take and embedding: gather rows by index; take_gradient: add rows by index; count_indices.

Where several indices name one row, one thread owns it and adds them in order, so sums never depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import Line, add_line, copy_line, fill_line, line_stride, share_units
from mlcompute.devices.cpu.kernels.checked_indices import CheckedIndices, adding, is_index
from mlcompute.devices.cpu.kernels.indexing import read_by_index
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operand, Operands, enough_rows, single_axis
from mlcompute.ops.op import Step

#: From this width on threads share the columns of rows that are added up; narrower rows are shared as rows.
_WIDE = 64
#: Neighbouring rows one thread owns, so that no two threads write to one cache line.
_OWNED = 16


@dataclass(frozen=True)
class _Rows:
    """x (outer, along, inner) and indices, each seen as one line: (extent, stride)."""

    outer: tuple[int, int]
    along: tuple[int, int]
    inner: tuple[int, int]
    indices: tuple[int, int]


def _rows_of(x: Operand, indices: Operand, axis: int, indexed: int) -> _Rows | None:
    """`indexed`: how many axes of x, from `axis` on, indices name or are shaped like."""
    end = axis + indexed
    outer = single_axis(x.shape[:axis], x.strides[:axis])
    along = single_axis(x.shape[axis:end], x.strides[axis:end])
    inner = single_axis(x.shape[end:], x.strides[end:])
    checked = single_axis(indices.shape, indices.strides)
    return None if not (outer and along and inner and checked) else _Rows(outer, along, inner, checked)


def take_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """Row after row, in the order of the indices; element by element where rows do not lie in lines."""
    x, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axis = step.attributes.get("axis", 0)
    lines = _rows_of(x, indices, axis, 1)
    if not (x.size and y.size) or x.dtype not in MEMORY_TYPES or not is_index(indices.dtype):
        return None
    if lines is None:
        before, after = (0,) * axis, (0,) * (len(x.shape) - axis - 1)
        unindexed = (*x.strides[:axis], *(0,) * len(indices.shape), *x.strides[axis + 1 :])
        return [read_by_index(step, operands, axis, (*before, *indices.strides, *after), unindexed, 0, set())]
    code, element = Code("take"), MEMORY_TYPES[x.dtype]
    args = KernelArguments(code)
    source, target = args.pointer(x), args.pointer(y)
    checked = CheckedIndices(args, indices, x.shape[axis])
    outer_stride, along_stride, index_stride = args.numbers([lines.outer[1], lines.along[1], lines.indices[1]])
    count, inner = args.numbers([lines.indices[0], lines.inner[0]])
    stride = line_stride(args, lines.inner[1])
    rows, by_row = _take_rows(x, indices, y, axis, operands.threads)
    begin, end = share_units(args, lines.outer[0] * lines.indices[0], rows)
    with code.loop(begin, end) as unit:
        outer, number = (code.div(unit, count), code.rem(unit, count)) if lines.outer[0] > 1 else ("0", unit)
        index = checked.load(checked.pointer, code.mul(number, index_stride))
        offset = code.add(code.mul(outer, outer_stride), code.mul(index, along_stride))
        seen = Line(code, code.at(source, offset, element), element, stride)
        made = Line(code, code.at(target, code.mul(unit, inner), element), element)
        if lines.inner[0] == 1:
            made.store(0, seen.load(0, lanes=1))
        else:
            copy_line(code, seen, made, 0, inner)
    return [
        Entry(
            step, code, args.values, reads=[x, indices], writes=[y], rows=rows, by_row=by_row,
            kernel="gather rows", cost=y.size * 0.15 + lines.outer[0] * lines.indices[0] * 3.0, status=checked.status,
        )
    ]  # fmt: skip


def _take_rows(x: Operand, indices: Operand, y: Operand, axis: int, threads: int) -> tuple[int, set[int]]:
    """Rows threads own, and in which of (x, indices, y): samples, or indices with what they bring."""
    rows = y.shape[0] if y.shape else 0
    if not enough_rows(rows, threads) or (axis == 0 and not indices.shape):
        return 0, set()
    owned = 1 if axis == 0 else 0
    return rows, {owned, 2} if (x, indices)[owned].is_dense else {2}


def take_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """Threads own samples; with few samples, columns; where those are few, too, rows of the result."""
    dy, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axis = step.attributes["axis"]
    lines = _rows_of(dy, indices, axis, len(indices.shape))
    if lines is None or not (dy.size and y.size) or dy.dtype not in MEMORY_TYPES or not is_index(indices.dtype):
        return None
    by_sample = axis > 0 and enough_rows(dy.shape[0], operands.threads)
    by_outer = by_sample or (axis > 0 and enough_rows(lines.outer[0], operands.threads))
    shared = "samples" if by_outer else "columns" if lines.inner[0] >= _WIDE else "rows"
    rows = dy.shape[0] if by_sample else 0
    code = Code(f"take_gradient_{shared}")
    args = KernelArguments(code)
    status = _add_rows(args, shared, dy, indices, y, lines, rows, step.attributes["extent"])
    return [
        Entry(
            step, code, args.values, reads=[dy, indices], writes=[y],
            rows=rows, by_row={0, 2} if dy.is_dense else {2},
            kernel=f"scatter-add rows, sharing {shared}", cost=dy.size * 0.25 + y.size * 0.1, status=status.status,
        )
    ]  # fmt: skip


def _add_rows(
    args: KernelArguments, shared: str, dy: Operand, indices: Operand, y: Operand, lines: _Rows, rows: int, extent: int
) -> CheckedIndices:
    code, element, add = args.code, MEMORY_TYPES[dy.dtype], adding(dy.dtype)
    source, target = args.pointer(dy), args.pointer(y)
    checked = CheckedIndices(args, indices, extent)
    outer_stride, along_stride, index_stride = args.numbers([lines.outer[1], lines.along[1], lines.indices[1]])
    outer, count, inner, size = args.numbers([lines.outer[0], lines.indices[0], lines.inner[0], extent])
    stride = line_stride(args, lines.inner[1])
    first, last = share_units(args, lines.outer[0], rows) if shared == "samples" else ("0", outer)
    begin, end = code.share(inner, _OWNED) if shared == "columns" else ("0", inner)

    def row_of(address: str, index: str) -> Line:
        return Line(code, code.at(address, code.mul(index, inner), element), element)

    with code.loop(first, last) as sample:
        address = code.at(target, code.mul(sample, code.mul(size, inner)), element)
        seen = code.at(source, code.mul(sample, outer_stride), element)
        if shared == "samples":
            fill_line(code, Line(code, address, element), "0", code.mul(size, inner))
        elif shared == "columns":
            with code.loop(0, size) as index:
                fill_line(code, row_of(address, index), begin, end)
        else:
            stripe = code.mul("%threads", _OWNED)
            with code.loop(code.mul("%thread", _OWNED), size, stripe) as index:
                stop = code.minimum(code.add(index, _OWNED), size)
                fill_line(code, Line(code, address, element), code.mul(index, inner), code.mul(stop, inner))
        with code.loop(0, count) as number:
            index = checked.load(checked.pointer, code.mul(number, index_stride))
            line = Line(code, code.at(seen, code.mul(number, along_stride), element), element, stride)
            if shared == "rows":
                block = code.let(f"udiv i64 {index}, {_OWNED}")
                owner = code.let(f"urem i64 {block}, %threads")
                with code.when(code.let(f"icmp eq i64 {owner}, %thread")):
                    add_line(code, line, row_of(address, index), begin, end, add)
            else:
                add_line(code, line, row_of(address, index), begin, end, add)
    return checked


def count_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """count_indices: each thread counts a range of indices."""
    indices, y = operands[step.inputs[0]], operands[step.results[0]]
    line = single_axis(indices.shape, indices.strides)
    if line is None or not y.size or not is_index(indices.dtype):
        return None
    code = Code("count_indices")
    args = KernelArguments(code)
    target = args.pointer(y)
    checked = CheckedIndices(args, indices, y.size)
    count, stride = args.numbers(line if indices.size else (0, 0))
    begin, end = code.share(args.number(y.size), _OWNED)
    fill_line(code, Line(code, target, "i64"), begin, end)
    with code.loop(0, count) as number:
        index = checked.load(checked.pointer, code.mul(number, stride))
        low, high = code.let(f"icmp sge i64 {index}, {begin}"), code.let(f"icmp slt i64 {index}, {end}")
        with code.when(code.let(f"and i1 {low}, {high}")):
            address = code.at(target, index, "i64")
            code.store(address, "i64", code.add(code.load(address, "i64"), 1))
    return [
        Entry(
            step, code, args.values, reads=[indices], writes=[y],
            kernel="count indices", cost=y.size * 0.2 + indices.size, status=checked.status,
        )
    ]  # fmt: skip


def reads_rows(step: Step, operands: Operands) -> bool:
    """Are the axes before, at and after the indexed ones each one line?"""
    if step.op.name == "count_indices":
        return single_axis(step.inputs[0].shape, operands[step.inputs[0]].strides) is not None
    dy, indices = (operands[value] for value in step.inputs)
    return _rows_of(dy, indices, step.attributes["axis"], len(indices.shape)) is not None


KERNELS: dict[str, Maker] = {
    "take": take_entries,
    "embedding": take_entries,
    "take_gradient": take_gradient_entries,
    "count_indices": count_entries,
}
READS = dict.fromkeys(("take_gradient", "count_indices"), reads_rows)
