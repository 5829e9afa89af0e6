"""Copies: concatenate, pad, slice_gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import (
    AxisRegisters,
    Line,
    address_at,
    axis_registers,
    copy_line,
    fill_line,
    line_stride,
    loop_over,
    share_units,
    unravel_index,
)
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import Operand, Operands, collapsed_axes, enough_rows, iteration_count
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import Shape, Step

_NS_PER_ELEMENT = 0.15


# Concatenate --------------------------------------------------------------------------------------------------------


def concatenate_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """All parts in one pass: for every outer index, part after part."""
    parts, y = [operands[value] for value in step.inputs], operands[step.results[0]]
    axis = step.attributes["axis"]
    if not y.size or computed_type(y.dtype) not in MEMORY_TYPES:
        return None
    code, element = Code("concatenate"), MEMORY_TYPES[y.dtype]
    args = KernelArguments(code)
    target, sources = args.pointer(y), [args.pointer(part) for part in parts]
    outer = collapsed_axes(y.shape[:axis], [part.strides[:axis] for part in (y, *parts)])
    kept = axis_registers(args, outer)
    # Without outer indices threads share every part by itself.
    alone = iteration_count(outer) == 1
    rows = y.shape[0] if axis and enough_rows(y.shape[0], operands.threads) and outer[0].extent % y.shape[0] == 0 else 0
    begin, end = ("0", "1") if alone else share_units(args, iteration_count(outer), rows)
    with code.loop(begin, end) as unit:
        indices = unravel_index(code, unit, kept)
        to, start = address_at(code, target, 0, kept, indices, element), 0
        for number, (part, source) in enumerate(zip(parts, sources, strict=True), start=1):
            address = code.at(to, args.number(start * y.strides[axis]), element)
            start += part.shape[axis]
            _copy_part(args, part, y, axis, address_at(code, source, number, kept, indices, element), address, alone)
    dense = {i for i, part in enumerate(parts) if part.is_dense}
    return [
        Entry(
            step, code, args.values, reads=parts, writes=[y], rows=rows,
            by_row={*dense, len(parts)} if rows else set(), kernel="concatenate", cost=y.size * _NS_PER_ELEMENT,
        )
    ]  # fmt: skip


def _copy_part(
    args: KernelArguments, part: Operand, y: Operand, axis: int, source: str, target: str, shared: bool
) -> None:
    code, element = args.code, MEMORY_TYPES[y.dtype]
    axes = collapsed_axes(part.shape[axis:], [part.strides[axis:], y.strides[axis:]])
    names = axis_registers(args, axes)
    strides = [line_stride(args, stride) for stride in axes[-1].strides]
    begin, end = code.share(names[0].extent, 64 if len(axes) == 1 else 1) if shared else ("0", names[0].extent)
    if len(axes) == 1:
        copy_line(code, Line(code, source, element, strides[0]), Line(code, target, element, strides[1]), begin, end)
        return
    with code.loop(begin, end) as index:
        addresses = [address_at(code, p, i, names[:1], [index], element) for i, p in enumerate((source, target))]
        with loop_over(code, names[1:-1], addresses, [element, element]) as (seen, made):
            lines = Line(code, seen, element, strides[0]), Line(code, made, element, strides[1])
            copy_line(code, *lines, "0", names[-1].extent)


# Pad and slice_gradient ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PaddedAxis:
    """One axis of a larger array y with a smaller one inside: element i of x lies at before + i step."""

    extent: int
    inner: int
    before: int
    step: int
    stride: int


def pad_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """x inside a border of one number."""
    before = step.attributes["before"]
    return _padded_copy(step, operands, before, (1,) * len(before), step.attributes["value"])


def slice_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """x at the elements a slice read, zeros elsewhere."""
    return _padded_copy(step, operands, step.attributes["start"], step.attributes["stride"], 0.0)


def _padded_copy(step: Step, operands: Operands, before: Shape, steps: Shape, value: float) -> Sequence[Entry] | None:
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if not (x.size and y.size) or computed_type(y.dtype) not in MEMORY_TYPES:
        return None
    axes = _padded_axes(x, y, before, steps)
    *outer, last = axes
    units = 1
    for axis in outer:
        units *= axis.extent
    rows = (
        y.shape[0] if y.shape and enough_rows(y.shape[0], operands.threads) and units % y.shape[0] == 0 and outer else 0
    )
    code, element = Code("padded_copy"), MEMORY_TYPES[y.dtype]
    args = KernelArguments(code)
    source, target = args.pointer(x), args.pointer(y)
    kept = [AxisRegisters(args.number(axis.extent), args.numbers([axis.stride])) for axis in outer]
    inner = args.numbers([axis.inner for axis in outer])
    starts, jumps = args.numbers([axis.before for axis in outer]), args.numbers([axis.step for axis in outer])
    width, count, start, jump = args.numbers([last.extent, last.inner, last.before, last.step])
    stride = line_stride(args, last.stride)
    begin, end = share_units(args, units, rows)
    with code.loop(begin, end) as unit:
        inside, address = "true", source
        for number, index in enumerate(unravel_index(code, unit, kept)):
            if outer[number].extent == outer[number].inner:
                address = code.at(address, code.mul(index, kept[number].strides[0]), element)
                continue
            index = code.sub(index, starts[number])
            if outer[number].step > 1:
                on_step = code.let(f"icmp eq i64 {code.rem(index, jumps[number])}, 0")
                inside = code.let(f"and i1 {inside}, {on_step}")
                # A negative index stays negative or becomes 0 here; only the latter needs the remainder to tell.
                index = code.div(index, jumps[number])
            inside = code.let(f"and i1 {inside}, {code.let(f'icmp ult i64 {index}, {inner[number]}')}")
            address = code.at(address, code.mul(index, kept[number].strides[0]), element)
        line = Line(code, code.at(target, code.mul(unit, width), element), element)
        with code.when(code.let(f"xor i1 {inside}, true")):
            fill_line(code, line, "0", width, value)
        with code.when(inside):
            seen = Line(code, address, element, stride)
            if last.step > 1:
                fill_line(code, line, "0", width, value)
                copy_line(code, seen, Line(code, line.address(start), element, jump), "0", count)
            else:
                if last.extent != last.inner:
                    fill_line(code, line, "0", start, value)
                    fill_line(code, line, code.add(start, count), width, value)
                copy_line(code, seen, Line(code, line.address(start), element), "0", count)
    owned = {1} | ({0} if x.is_dense and x.shape[0] == rows else set())
    return [
        Entry(
            step, code, args.values, reads=[x], writes=[y], rows=rows, by_row=owned if rows else set(),
            kernel="padded copy", cost=y.size * _NS_PER_ELEMENT,
        )
    ]  # fmt: skip


def _padded_axes(x: Operand, y: Operand, before: Shape, steps: Shape) -> list[_PaddedAxis]:
    """The axes of y, joined where x fills the inner one: then rows of y are longer and fewer."""
    axes: list[_PaddedAxis] = []
    for extent, inner, b, k, stride in zip(y.shape, x.shape, before, steps, x.strides, strict=True):
        if extent == 1 and axes:
            continue
        last = axes[-1] if axes else None
        fills = extent == inner
        if last is not None and fills and last.step == 1 and (last.stride == stride * extent or last.extent == 1):
            axes[-1] = _PaddedAxis(last.extent * extent, last.inner * extent, last.before * extent, 1, stride)
        else:
            axes.append(_PaddedAxis(extent, inner, b, 1 if fills else k, stride))
    return axes or [_PaddedAxis(1, 1, 0, 1, 1)]


KERNELS: dict[str, Maker] = {
    "concatenate": concatenate_entries,
    "pad": pad_entries,
    "slice_gradient": slice_gradient_entries,
}
BFLOAT16 = dict.fromkeys(KERNELS, always)
