"""Copies with a shape of their own: concatenate, pad, slice_gradient. A thread writes one element of the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for, divisor, is_wide
from mlcompute.devices.cuda.codegen.types import is_element, literal, memory_type, stored
from mlcompute.devices.cuda.kernels.elementwise import nest_launches
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row
from mlcompute.devices.loop_nest import LoopNest, Operand, Operands
from mlcompute.ops.op import Shape, Step


def _supports(step: Step) -> bool:
    return is_element(step.results[0].dtype)


def concatenate_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One copy per part, into its place in the result."""
    y, axis = operands[step.results[0]], step.attributes["axis"]
    launches: list[Launch] = []
    start = 0
    for value in step.inputs:
        part = operands[value]
        place = Operand(y.base, y.offset + start * y.strides[axis], part.shape, y.strides, y.dtype)
        launches += nest_launches(step, LoopNest.of(part.shape, [(value, part)], [], [(value, place)]))
        start += part.shape[axis]
    return launches


def pad_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """x inside a border of one number."""
    before = step.attributes["before"]
    return _padded(step, operands, before, (1,) * len(before), step.attributes["value"])


def slice_gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """x at the elements a slice read, zeros elsewhere."""
    return _padded(step, operands, step.attributes["start"], step.attributes["stride"], 0.0)


def _padded(step: Step, operands: Operands, before: Shape, steps: Shape, value: float) -> Sequence[Launch]:
    """Element i of x lies at before + i steps of y, on every axis; other elements of y get a number."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if not y.size:
        return []
    axes = _joined(x, y, before, steps)
    wide = is_wide(y.shape, [y.strides]) or is_wide(x.shape, [x.strides])
    index = np.int64 if wide else np.int32
    source = _padded_source(len(axes), [axis.extent != axis.inner for axis in axes], wide, y, value)
    arguments: list[Argument] = [x, y, index(y.size)]
    for axis in axes:
        arguments.append(np.int64(axis.extent) if wide else divisor(axis.extent))
        arguments += [index(axis.inner), index(axis.before), index(axis.stride)]
        arguments.append(np.int64(axis.step) if wide else divisor(axis.step))
    return [Launch(step, "padded copy", source, arguments, [1], blocks_for(y.size), (BLOCK, 1, 1))]


class _Axis:
    """One axis of y with x inside: extents of both, where x begins, its steps in y, and its stride in memory."""

    def __init__(self, extent: int, inner: int, before: int, step: int, stride: int) -> None:
        self.extent, self.inner, self.before, self.step, self.stride = extent, inner, before, step, stride


def _joined(x: Operand, y: Operand, before: Shape, steps: Shape) -> list[_Axis]:
    """The axes of y, joined where x fills the inner one: the fewer, the less each thread has to divide."""
    axes: list[_Axis] = []
    for extent, inner, b, k, stride in zip(y.shape, x.shape, before, steps, x.strides, strict=True):
        last = axes[-1] if axes else None
        fills = extent == inner
        if last is not None and fills and last.step == 1 and last.stride == stride * extent:
            axes[-1] = _Axis(last.extent * extent, last.inner * extent, last.before * extent, 1, stride)
        else:
            axes.append(_Axis(extent, inner, b, 1 if fills else k, stride))
    return axes or [_Axis(1, 1, 0, 1, 1)]


def _padded_source(rank: int, padded: Sequence[bool], wide: bool, y: Operand, value: float) -> str:
    type_, index, number = memory_type(y.dtype), "long long" if wide else "int", "long long" if wide else "Divisor"
    parameters = [f"const {type_}* x", f"{type_}* y", f"{index} count"]
    for axis in range(rank):
        parameters += [f"{number} extent{axis}", f"{index} inner{axis}", f"{index} before{axis}"]
        parameters += [f"{index} stride{axis}", f"{number} step{axis}"]
    lines = [
        f"{index} item = ({index})blockIdx.x * {BLOCK} + threadIdx.x;",
        "if (item >= count) return;",
        f"{index} rest = item, offset = 0, i, q;",
        "bool inside = true;",
    ]
    for axis in range(rank - 1, -1, -1):
        if axis == 0:
            lines.append("i = rest;")
        elif wide:
            lines += [f"i = rest % extent{axis};", f"rest /= extent{axis};"]
        else:
            lines.append(f"q = quotient(rest, extent{axis});")
            lines += [f"i = rest - q * (int)extent{axis}.divisor;", "rest = q;"]
        if padded[axis]:
            lines += [f"i -= before{axis};", "inside = inside && i >= 0;", "i = i < 0 ? 0 : i;"]
            if wide:
                lines += [f"inside = inside && i % step{axis} == 0;", f"i /= step{axis};"]
            else:
                lines.append(f"q = quotient(i, step{axis});")
                lines += [f"inside = inside && q * (int)step{axis}.divisor == i;", "i = q;"]
            lines.append(f"inside = inside && i < inner{axis};")
        lines.append(f"offset += i * stride{axis};")
    filled = stored(y.dtype, literal(y.dtype, value))
    lines += [f"{type_} element = {filled};", "if (inside) element = x[offset];", "y[item] = element;"]
    body = "\n".join(f"    {line}" for line in lines)
    return f'extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL({", ".join(parameters)}) {{\n{body}\n}}\n'


KERNELS: dict[str, Row] = {
    "concatenate": Row(concatenate_launches, _supports),
    "pad": Row(pad_launches, _supports),
    "slice_gradient": Row(slice_gradient_launches, _supports),
}
