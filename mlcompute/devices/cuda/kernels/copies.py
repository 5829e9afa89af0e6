"""Copies into a larger value: concatenate, pad, slice_gradient. A thread per result, or per few neighbouring ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.types import literal, memory_type, stored
from mlcompute.devices.cuda.kernels.launch import Launch, Row, supports_elements
from mlcompute.devices.loop_nest import Axis, Operand, Operands, collapsed_axes
from mlcompute.ops.op import Step

#: Values that one launch concatenates at most.
_MOST_PARTS = 16


def _offset(source: KernelSource, name: str, strides: Sequence[int]) -> str:
    """An expression: where the coordinates lie in an operand."""
    return " + ".join(f"c{axis} * {source.index(f'{name}_{axis}', stride)}" for axis, stride in enumerate(strides))


# Concatenate --------------------------------------------------------------------------------------------------------


def concatenate_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """All values in one launch, unless there are very many."""
    y, axis = operands[step.results[0]], step.attributes["axis"]
    parts = [operands[value] for value in step.inputs]
    ends = list(accumulate(part.shape[axis] for part in parts))
    placed = [(part, end - part.shape[axis], end) for part, end in zip(parts, ends, strict=True) if part.size]
    chunks = [placed[start : start + _MOST_PARTS] for start in range(0, len(placed), _MOST_PARTS)]
    return [_concatenated(step, chunk, y, axis) for chunk in chunks]


def _concatenated(step: Step, parts: Sequence[tuple[Operand, int, int]], y: Operand, axis: int) -> Launch:
    values = [part for part, _, _ in parts]
    all_ = [y, *values]
    inside = slice(axis + 1, None)
    outer = collapsed_axes(y.shape[:axis], [one.strides[:axis] for one in all_])
    inner = collapsed_axes(y.shape[inside], [one.strides[inside] for one in all_])
    along = tuple(one.strides[axis] for one in all_)
    # Elements along the axis and what is inside of it are one line, where that is so in every value.
    joined = [inner[0].extent * stride for stride in inner[0].strides]
    factor = 1
    if iterations(inner) == 1:
        inner = []
    elif list(along) == joined:
        factor, along = inner[0].extent, inner[0].strides
        inner = inner[1:]
    begin, end = parts[0][1] * factor, parts[-1][2] * factor
    axes = [*outer, Axis(end - begin, along), *inner]
    bounds = [(first * factor - begin, last * factor - begin) for _, first, last in parts]
    place = len(outer)
    width = _width(all_, axes, bounds if not inner else [])
    if place == len(axes) - 1:
        bounds = [(first // width, last // width) for first, last in bounds]
    axes[-1] = Axis(axes[-1].extent // width, tuple(stride * width for stride in axes[-1].strides))
    source = KernelSource(all_, y.size)
    kind = memory_type(y.dtype)
    for number, one in enumerate(values):
        source.pointer(f"x{number}", one)
    source.pointer("y", y._replace(offset=y.offset + parts[0][1] * y.strides[axis]), written=True)
    lines = []
    for number, (first, last) in enumerate(bounds):
        start = source.index(f"begin{number}", first)
        test = f"c{place} < {source.index(f'end{number}', last)}"
        offset = _offset(source, f"x{number}", [one.strides[number + 1] for one in axes])
        moved = f"({offset} - {start} * x{number}_{place})"
        branch = f"if ({test}) " if number + 1 < len(bounds) else ""
        lines.append(f"    {branch}group = *reinterpret_cast<const Group*>(x{number} + {moved});")
    target = _offset(source, "y", [one.strides[0] for one in axes])
    body = f"""{source.coordinates({f"c{number}": one.extent for number, one in enumerate(axes)})}
    using Group = Pack<{kind}, {width}>;
    Group group;
{(chr(10) + "    else ").join(line.strip() for line in lines)}
    *reinterpret_cast<Group*>(y + ({target})) = group;"""
    total = int(np.prod([one.extent for one in axes], dtype=np.int64))
    return source.launch(step, "concatenate", "", body, grid=blocks_for(total), block=BLOCK)


def iterations(axes: Sequence[Axis]) -> int:
    """How often the innermost of some loops runs."""
    return int(np.prod([axis.extent for axis in axes], dtype=np.int64))


def _width(operands: Sequence[Operand], axes: Sequence[Axis], bounds: Sequence[tuple[int, int]]) -> int:
    """Neighbouring elements that are moved at once."""
    inner, nbytes = axes[-1], operands[0].dtype.itemsize
    if any(stride != 1 for stride in inner.strides):
        return 1
    numbers = [inner.extent, *(number for pair in bounds for number in pair)]
    numbers += [stride for axis in axes[:-1] if axis.extent != 1 for stride in axis.strides]
    numbers += [one.offset for one in operands]
    return next((width for width in (16 // nbytes, 4, 2) if all(number % width == 0 for number in numbers)), 1)


# Pad and slice_gradient ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PaddedAxis:
    """An axis of a larger value y with a smaller x inside: element i of x lies at before + i step."""

    extent: int
    inner: int
    before: int
    step: int
    strides: tuple[int, int]

    @property
    def is_full(self) -> bool:
        return self.extent == self.inner and self.step == 1

    def merged(self, inside: _PaddedAxis) -> _PaddedAxis | None:
        """This axis and the next as one; None where they are two."""
        n = inside.extent
        if not inside.is_full or self.step != 1 or self.strides != tuple(n * stride for stride in inside.strides):
            return None
        return _PaddedAxis(self.extent * n, self.inner * n, self.before * n, 1, inside.strides)

    def grouped(self, width: int) -> _PaddedAxis:
        """The same in groups of elements."""
        extent, inner, before = (number // width for number in (self.extent, self.inner, self.before))
        return _PaddedAxis(extent, inner, before, self.step, (self.strides[0] * width, self.strides[1] * width))


def pad_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """x inside a border of one number."""
    before = step.attributes["before"]
    return _padded(step, operands, before, (1,) * len(before), step.attributes["value"])


def slice_gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """x at every stride-th place of zeros."""
    return _padded(step, operands, step.attributes["start"], step.attributes["stride"], 0.0)


def _padded(
    step: Step, operands: Operands, before: Sequence[int], steps: Sequence[int], fill: float
) -> Sequence[Launch]:
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if not y.size:
        return []
    axes: list[_PaddedAxis] = []
    for d, extent in enumerate(y.shape):
        # A stride of x counts from one of its elements to the next, and those of one element count for nothing.
        own = _PaddedAxis(extent, x.shape[d], before[d], steps[d], (x.strides[d], y.strides[d]))
        both = axes[-1].merged(own) if axes else None
        axes[-1:] = [both] if both else [*axes[-1:], own]
    axes = axes or [_PaddedAxis(1, 1, 0, 1, (1, 1))]
    width = _padded_width(x, y, axes)
    axes[-1] = axes[-1].grouped(width)
    source = KernelSource([x, y], y.size)
    source.pointer("x", x)
    source.pointer("y", y, written=True)
    kind, lines = memory_type(y.dtype), []
    for number, axis in enumerate(axes):
        at = f"c{number}"
        if axis.is_full:
            lines.append(f"    const Index i{number} = {at};")
            continue
        lines.append(f"    Index i{number} = {at} - {source.index(f'before{number}', axis.before)};")
        lines.append(f"    inside = inside && i{number} >= 0;")
        if axis.step > 1:
            by = source.extent(f"step{number}", axis.step)
            lines.append(f"    const Index q{number} = inside ? {source.divided(f'i{number}', by)} : 0;")
            lines.append(f"    inside = inside && q{number} * {by} == i{number};")
            lines.append(f"    i{number} = q{number};")
        lines.append(f"    inside = inside && i{number} < {source.index(f'inner{number}', axis.inner)};")
    seen = " + ".join(f"i{n} * {source.index(f'x_{n}', axis.strides[0])}" for n, axis in enumerate(axes))
    target = _offset(source, "y", [axis.strides[1] for axis in axes])
    border = literal(y.dtype, fill)
    body = f"""{source.coordinates({f"c{number}": axis.extent for number, axis in enumerate(axes)})}
    bool inside = true;
{chr(10).join(lines)}
    using Group = Pack<{kind}, {width}>;
    Group group;
    if (inside) {{
        group = *reinterpret_cast<const Group*>(x + ({seen}));
    }} else {{
        #pragma unroll
        for (int v = 0; v < {width}; ++v) group.at[v] = {stored(y.dtype, border)};
    }}
    *reinterpret_cast<Group*>(y + ({target})) = group;"""
    return [source.launch(step, step.op.name, "", body, grid=blocks_for(y.size // width), block=BLOCK)]


def _padded_width(x: Operand, y: Operand, axes: Sequence[_PaddedAxis]) -> int:
    inner = axes[-1]
    if inner.strides != (1, 1) or inner.step != 1:
        return 1
    numbers = [inner.extent, inner.inner, inner.before, x.offset, y.offset]
    numbers += [stride for axis in axes[:-1] if axis.extent != 1 for stride in axis.strides]
    return next((w for w in (16 // x.dtype.itemsize, 4, 2) if all(number % w == 0 for number in numbers)), 1)


KERNELS: dict[str, Row] = {
    "concatenate": Row(concatenate_launches, supports=supports_elements),
    "pad": Row(pad_launches, supports=supports_elements),
    "slice_gradient": Row(slice_gradient_launches, supports=supports_elements),
}
