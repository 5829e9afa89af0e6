"""A kernel's parameters and their arguments, side by side; indices along nested loops as offsets.

Extents and strides are arguments, so that steps of one form share a kernel. Indices have 32 bits (`Index` is int)
unless an operand or the number of iterations needs more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, NARROW, divisor, reach
from mlcompute.devices.cuda.codegen.types import memory_type
from mlcompute.devices.cuda.kernels.launch import Argument, Extents, Launch, Status
from mlcompute.devices.loop_nest import Axis, Operand
from mlcompute.ops.op import Step


class KernelSource:
    """Collects what a kernel is called with.

    wide   must indices have 64 bits?
    """

    def __init__(self, operands: Sequence[Operand], iterations: int = 0) -> None:
        # Threads beyond the last iteration count, too.
        self.wide = 4096 + max([iterations, *(reach(each.shape, each.strides) for each in operands)]) >= NARROW
        self._parameters: list[str] = []
        self.arguments: list[Argument] = []
        self.writes: list[int] = []

    def pointer(self, name: str, operand: Operand, *, written: bool = False, element: str | None = None) -> str:
        """An address: `const T* name`. `element`: another type than the operand's."""
        if written:
            self.writes.append(len(self.arguments))
        kind = element or memory_type(operand.dtype)
        self._parameters.append(f"{'' if written else 'const '}{kind}* __restrict__ {name}")
        self.arguments.append(operand)
        return name

    def status(self, status: Status) -> str:
        """`int* status`: where invalid data is reported."""
        self._parameters.append("int* status")
        self.arguments.append(status)
        return "status"

    def value(self, name: str, kind: str, value: np.generic) -> str:
        """A number of a given type."""
        self._parameters.append(f"{kind} {name}")
        self.arguments.append(value)
        return name

    def index(self, name: str, value: int) -> str:
        """A number that indices are computed with."""
        return self.value(name, "Index", (np.int64 if self.wide else np.int32)(value))

    def divided(self, number: str, by: str) -> str:
        """An expression: an index divided by an extent that `extent` declared."""
        return f"{number} / {by}" if self.wide else f"(Index)quotient({number}, {by}_divisor)"

    def extent(self, name: str, value: int) -> str:
        """A number that indices are also divided by."""
        self.index(name, value)
        if not self.wide:
            self.value(f"{name}_divisor", "Divisor", divisor(max(value, 1)))
        return name

    def coordinates(self, extents: Mapping[str, int]) -> str:
        """Statements that find a thread's index along every axis, by name; along the last axis it changes fastest."""
        total = self.index("total", math.prod(extents.values()))
        lines = [f"    Index rest = (Index)blockIdx.x * {BLOCK} + threadIdx.x;", f"    if (rest >= {total}) return;"]
        first, *others = extents
        for name in reversed(others):
            extent = self.extent(f"{name}_extent", extents[name])
            lines.append(f"    const Index {name}_next = {self.divided('rest', extent)};")
            lines.append(f"    const Index {name} = rest - {name}_next * {extent};")
            lines.append(f"    rest = {name}_next;")
        return "\n".join([*lines, f"    const Index {first} = rest;"])

    def unraveled(self, linear: str, axes: Sequence[Axis], offsets: Sequence[str], name: str) -> str:
        """Statements that declare an offset per operand of the axes, for a number counting their iterations.

        offsets   names of the offsets; an empty one is not needed
        name      prefix of the parameters; they are declared, too, so each use needs its own
        """
        if not axes:
            return "".join(f"const Index {offset} = 0; " for offset in offsets if offset)
        places, lines, rest = [], [], linear
        for number in reversed(range(len(axes))):
            place = f"{name}{number}"
            if number:
                extent = self.extent(f"{place}_extent", axes[number].extent)
                lines.append(f"const Index {place}_rest = {self.divided(rest, extent)};")
                lines.append(f"const Index {place} = {rest} - {place}_rest * {extent};")
                rest = f"{place}_rest"
            else:
                lines.append(f"const Index {place} = {rest};")
            places.append((number, place))
        for operand, offset in enumerate(offsets):
            if offset:
                terms = [
                    f"{place} * {self.index(f'{place}_{offset}', axes[number].strides[operand])}"
                    for number, place in places
                ]
                lines.append(f"const Index {offset} = {' + '.join(terms)};")
        return "\n".join(lines)

    def launch(self, step: Step, kernel: str, before: str, body: str, *, grid: Extents, block: int) -> Launch:
        """The launch of `body`, with definitions `before` it."""
        text = (
            f"using Index = {'long long' if self.wide else 'int'};\n{before}\n"
            f'extern "C" __global__ void __launch_bounds__({block}) KERNEL(\n    '
            + ",\n    ".join(self._parameters)
            + f") {{\n{body}\n}}\n"
        )
        return Launch(step, kernel, text, self.arguments, self.writes, grid, (block, 1, 1))


def kept_strides(operand: Operand, reduced: Sequence[int]) -> tuple[int, ...]:
    """Strides of a result along the axes of what it was reduced from: 0 where it has only one element."""
    return tuple(0 if axis in reduced else stride for axis, stride in enumerate(operand.strides))


def vector_width(operands: Sequence[Operand], axes: Sequence[Axis], which: Sequence[int]) -> int:
    """How many neighbouring elements along the innermost axis can be moved at once: 1, 2 or 4.

    which   the operands (positions in the strides of the axes) that move along that axis
    """
    inner, outer = axes[-1], [axis for axis in axes[:-1] if axis.extent != 1]
    if any(inner.strides[position] != 1 for position in which):
        return 1
    for width in (4, 2):
        fits = inner.extent % width == 0 and all(
            operands[position].offset % width == 0 and all(axis.strides[position] % width == 0 for axis in outer)
            for position in which
        )
        if fits and all(width * operands[position].dtype.itemsize <= 16 for position in which):
            return width
    return 1


def grouped(axes: Sequence[Axis], width: int) -> list[Axis]:
    """Loops whose innermost counts groups of neighbouring elements."""
    *outer, inner = axes
    strides = tuple(stride * width for stride in inner.strides)
    return [*outer, Axis(inner.extent // width, strides, inner.reduced)]
