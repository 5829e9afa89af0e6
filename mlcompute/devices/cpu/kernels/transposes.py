"""Copies that exchange axes: what lies side by side is not what is written side by side.

Squares of elements are loaded as vectors along the axis on which the source lies in one piece, transposed in
registers, and stored as vectors along the axis on which the target does. A few lines, as the channels of an image,
become pixels one after the other: they are interleaved in registers.

Other elementwise loops that read such operands go by tiles, which are transposed into memory of the thread first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.loop_nest import LoopNest

#: Rows of a square, if a vector holds so many elements of four bytes.
_SQUARE = 8
#: Elements of a cache line.
_LINE = 16


def square() -> int:
    """Rows and columns of the squares that are transposed."""
    return min(_SQUARE, vector_lanes())


def source_axis(nest: LoopNest) -> int | None:
    """The loop along which the source of a copy lies in one piece, if the copy should go by squares; else None."""
    if (
        any(step.op.name != "copy" for step in nest.ops)
        or len(nest.loads) != 1
        or len(nest.stores) != 1
        or len(nest.extents) < 2
    ):
        return None
    (load,), (store,), inner = nest.loads, nest.stores, len(nest.extents) - 1
    dtypes = {load.operand.dtype, store.operand.dtype}
    if len(dtypes) != 1 or load.operand.dtype not in MEMORY_TYPES or load.operand.dtype.itemsize != 4:
        return None
    least = square()
    if store.strides[inner] != 1 or load.strides[inner] in (0, 1):
        return None
    axis = next((axis for axis in range(inner) if load.strides[axis] == 1 and nest.extents[axis] >= least), None)
    if axis is None or nest.extents[inner] >= least or store.strides[axis] == nest.extents[inner]:
        return axis
    return None


def interleaved_lines(nest: LoopNest) -> int:
    """Lines of the source that such a copy interleaves, fewer than a square has rows; 0 where it goes by squares."""
    return nest.extents[-1] if source_axis(nest) is not None and nest.extents[-1] < square() else 0


#: Rows (along the axis on which transposed operands lie in one piece) and columns of a tile; operands that are tiled.
TILE_ROWS, TILE_COLUMNS, _MOST_TILED = _LINE, 64, 6


class Tiling(NamedTuple):
    """A loop along which some loads lie in one piece, while the innermost loop would read them a stride apart."""

    axis: int
    loads: tuple[int, ...]


def tiling(nest: LoopNest) -> Tiling | None:
    """How a nest should go by tiles; None where all it reads lies well, or there is too little to turn round."""
    inner, least = len(nest.extents) - 1, square()
    if inner < 1 or nest.extents[inner] < least:
        return None
    found: dict[int, list[int]] = {}
    for number, load in enumerate(nest.loads):
        if load.strides[inner] in (0, 1) or load.operand.dtype.itemsize != 4 or load.operand.dtype not in MEMORY_TYPES:
            continue
        axis = next((axis for axis in range(inner) if load.strides[axis] == 1 and nest.extents[axis] >= least), None)
        if axis is not None:
            found.setdefault(axis, []).append(number)
    if not found:
        return None
    axis = max(found, key=lambda axis: len(found[axis]))
    return Tiling(axis, tuple(found[axis][:_MOST_TILED]))


@dataclass(eq=False, repr=False)
class Transpose:
    """The innermost two loops of such a copy: over the source's axis, from a begin to an end, and over the target's.

    from_source, from_target   strides of the source along the target's axis, and of the target along the source's
    lines                      so many elements of the target's axis follow one after the other; 0: any number
    """

    code: Code
    element: str
    from_source: str
    from_target: str
    lines: int = 0

    def write(self, source: str, target: str, bounds: tuple[str, str], extent: str) -> None:
        """Copy target[i, j] = source[j, i] for i within bounds and all j below an extent."""
        if self.lines:
            self._interleave(source, target, bounds, extent)
        else:
            self._by_squares(source, target, bounds, extent)

    def _interleave(self, source: str, target: str, bounds: tuple[str, str], extent: str) -> None:
        """As many elements of each line as a vector has, at a time."""
        code, lanes, lines, (start, end) = self.code, vector_lanes(), self.lines, bounds
        type_ = vector(self.element, lanes)
        stop = code.add(start, code.mul(code.div(code.sub(end, start), lanes), lanes))
        with code.loop(start, stop, lanes) as i:
            rows = [code.load(self._source(source, i, str(line)), type_) for line in range(lines)]
            for number in range(lines):
                places = [divmod(number * lanes + lane, lines) for lane in range(lanes)]  # element, and line of it
                mixed = self._shuffled(rows[0], rows[0], [place for place, _ in places])
                for other in range(1, lines):
                    picks = [lanes + place if line == other else lane for lane, (place, line) in enumerate(places)]
                    mixed = self._shuffled(mixed, rows[other], picks)
                to = code.at(self._target(target, i, "0"), number * lanes, self.element)
                code.store(to, type_, mixed)
        with code.loop(stop, end) as i, code.loop(0, extent) as j:
            self._element(source, target, i, j)

    def _by_squares(self, source: str, target: str, bounds: tuple[str, str], extent: str) -> None:
        code, side = self.code, square()
        columns = code.mul(code.div(extent, side), side)
        start, end = bounds
        for group in (_LINE, side):  # whole cache lines of the source, which it might not see again in the cache
            stop = code.add(start, code.mul(code.div(code.sub(end, start), group), group))
            with code.loop(start, stop, group) as first:
                with code.loop(0, columns, side) as j:
                    for number in range(0, group, side):
                        self._square(source, target, code.add(first, number), j, side)
                with code.loop(columns, extent) as j, code.loop(first, code.add(first, group)) as i:
                    self._element(source, target, i, j)
            start = stop
        with code.loop(start, end) as i, code.loop(0, extent) as j:
            self._element(source, target, i, j)

    def _source(self, source: str, i: str, j: str) -> str:
        return self.code.at(self.code.at(source, i, self.element), self.code.mul(j, self.from_source), self.element)

    def _target(self, target: str, i: str, j: str) -> str:
        return self.code.at(self.code.at(target, j, self.element), self.code.mul(i, self.from_target), self.element)

    def _element(self, source: str, target: str, i: str, j: str) -> None:
        value = self.code.load(self._source(source, i, j), self.element)
        self.code.store(self._target(target, i, j), self.element, value)

    def _square(self, source: str, target: str, i: str, j: str, side: int) -> None:
        code, type_ = self.code, vector(self.element, side)
        rows = [code.load(self._source(source, i, code.add(j, number)), type_) for number in range(side)]
        step = 1
        while step < side:  # exchange the halves of 2 x 2 squares whose elements are `step` wide
            for number in range(side):
                if number & step:
                    continue
                a, b = rows[number], rows[number + step]
                low = [lane if not lane & step else side + lane - step for lane in range(side)]
                high = [lane + step if not lane & step else side + lane for lane in range(side)]
                rows[number], rows[number + step] = self._shuffled(a, b, low), self._shuffled(a, b, high)
            step *= 2
        for number, row in enumerate(rows):
            code.store(self._target(target, code.add(i, number), j), type_, row)

    def _shuffled(self, a: str, b: str, lanes: list[int]) -> str:
        type_, mask = vector(self.element, len(lanes)), ", ".join(f"i32 {lane}" for lane in lanes)
        return self.code.let(f"shufflevector {type_} {a}, {type_} {b}, <{len(lanes)} x i32> <{mask}>")
