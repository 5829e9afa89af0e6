"""What kernels share: walks over collapsed axes, lines of vectors with a shorter last one, arguments in order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.code import Code, align_of, type_suffix, vector, vector_lanes
from mlcompute.devices.cpu.entry import Argument
from mlcompute.devices.cpu.lanes import Lanes, literal
from mlcompute.devices.cpu.operands import Operand, collapse
from mlcompute.ops.op import Shape

#: Fewer rows than this are not shared as rows: threads would stand idle.
LEAST_ROWS = 8


class Words:
    """The arguments of a kernel, collected while its code is written: what is asked for is what is handed over."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.arguments: list[Argument] = []

    def pointer(self, operand: Operand | int | Code) -> str:
        self.arguments.append(operand)
        return self.code.argument(len(self.arguments) - 1, "ptr")

    def number(self, number: int) -> str:
        self.arguments.append(number)
        return self.code.argument(len(self.arguments) - 1)

    def numbers(self, numbers: Sequence[int]) -> list[str]:
        return [self.number(number) for number in numbers]


# Axes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a walk: its extent, the stride of every walked operand, and whether it disappears."""

    extent: int
    strides: tuple[int, ...]
    reduced: bool = False


def walk_axes(shape: Shape, reduced: Collection[int], walks: Sequence[Sequence[int]]) -> list[Axis]:
    """The axes in the order the first operand lies in memory, innermost last, joined where they continue each other."""
    axes = [
        Axis(extent, tuple(walk[axis] for walk in walks), axis in reduced)
        for axis, extent in enumerate(shape)
        if extent != 1
    ]
    # A repeated axis (stride 0) goes outside: a line of one repeated element is no line.
    axes.sort(key=lambda axis: -(axis.strides[0] or math.inf))
    joined: list[Axis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.reduced == axis.reduced
            and all(outer == inner * axis.extent for outer, inner in zip(last.strides, axis.strides, strict=True))
        ):
            joined[-1] = Axis(last.extent * axis.extent, axis.strides, axis.reduced)
        else:
            joined.append(axis)
    return joined


def joint_axes(shape: Shape, walks: Sequence[tuple[int, ...]]) -> list[Axis]:
    """The axes in their own order, joined where they continue each other for every operand; at least one."""
    extents, strides = collapse(shape, walks)
    return [Axis(extent, tuple(walk[axis] for walk in strides)) for axis, extent in enumerate(extents)]


def count_of(axes: Sequence[Axis]) -> int:
    """How many steps a walk over these axes takes."""
    return math.prod(axis.extent for axis in axes)


@dataclass(frozen=True)
class AxisWords:
    """An axis inside a kernel: registers that hold its extent and strides."""

    extent: str
    strides: list[str]


def axis_words(words: Words, axes: Sequence[Axis]) -> list[AxisWords]:
    """Hand the extents and strides of axes to a kernel."""
    return [AxisWords(words.number(axis.extent), words.numbers(axis.strides)) for axis in axes]


def split_index(code: Code, index: str, axes: Sequence[AxisWords]) -> list[str]:
    """The index along each axis that a running number of a walk means."""
    indices: list[str] = []
    for axis in reversed(axes[1:]):
        indices.append(code.rem(index, axis.extent))
        index = code.div(index, axis.extent)
    return [*([index] if axes else []), *reversed(indices)]


def moved(code: Code, pointer: str, operand: int, axes: Sequence[AxisWords], indices: Sequence[str], type_: str) -> str:
    """The address after stepping along axes by indices."""
    for axis, index in zip(axes, indices, strict=True):
        pointer = code.at(pointer, code.mul(index, axis.strides[operand]), type_)
    return pointer


@contextlib.contextmanager
def nest(code: Code, axes: Sequence[AxisWords], pointers: Sequence[str], types: Sequence[str]) -> Iterator[list[str]]:
    """Loops over axes, outermost first; gives the operands' addresses inside."""
    with contextlib.ExitStack() as stack:
        places = list(pointers)
        for axis in axes:
            index = stack.enter_context(code.loop(0, axis.extent))
            places = [
                code.at(place, code.mul(index, axis.strides[number]), type_)
                for number, (place, type_) in enumerate(zip(places, types, strict=True))
            ]
        yield places


def shared_rows(shape: Shape, reduced: Collection[int], operands: Sequence[Operand], units: int) -> int:
    """Rows (the leading extent) that threads can own in all of these operands; 0 when they cannot.

    units   pieces of work along the kept axes, outermost first: rows are owned only where they are whole units
    """
    rows = shape[0] if shape else 0
    if rows < LEAST_ROWS or 0 in reduced or units % rows:
        return 0
    return rows if all(operand.is_dense and operand.shape[0] == rows for operand in operands) else 0


def share_units(words: Words, units: int, rows: int, most: str | None = None) -> tuple[str, str]:
    """This thread's part of `units`, in whole rows where rows are owned; `most`: so many threads have one."""
    code = words.code
    shared, per_row = words.number(rows or units), words.number(units // rows if rows else 1)
    begin, end = code.share(shared, most=most)
    return code.mul(begin, per_row), code.mul(end, per_row)


# Lines of vectors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Elements one after the other (stride None) or a fixed stride apart."""

    code: Code
    pointer: str
    element: str
    stride: str | None = None

    def place(self, index: str | int) -> str:
        step = index if self.stride is None else self.code.mul(index, self.stride)
        return self.code.at(self.pointer, step, self.element)

    def load(
        self, index: str | int, mask: str | None = None, otherwise: float = 0.0, lanes: int | None = None
    ) -> Lanes:
        """A vector from `index` on; lanes outside the mask are not read and hold `otherwise`."""
        code, lanes = self.code, lanes or vector_lanes()
        type_ = vector(self.element, lanes)
        if lanes == 1 or (self.stride is None and mask is None):
            return Lanes(code, code.load(self.place(index), type_), self.element, lanes)
        suffix, fill = type_suffix(type_), literal(otherwise, self.element, lanes)
        mask = mask or literal(1, "i1", lanes)
        if self.stride is None:
            name, places, pointers = f"llvm.masked.load.{suffix}.p0", self.place(index), "ptr"
        else:
            name, pointers = f"llvm.masked.gather.{suffix}.v{lanes}p0", vector("ptr", lanes)
            places = self._places(index, lanes)
        code.declare(f"{type_} @{name}({pointers}, i32, {vector('i1', lanes)}, {type_})")
        align = align_of(type_)
        text = f"call {type_} @{name}({pointers} {places}, i32 {align}, {vector('i1', lanes)} {mask}, {type_} {fill})"
        return Lanes(code, code.let(text), self.element, lanes)

    def store(self, index: str | int, value: Lanes, mask: str | None = None) -> None:
        """Write a vector from `index` on; lanes outside the mask are left alone."""
        code, lanes = self.code, value.lanes
        if lanes == 1 or (self.stride is None and mask is None):
            code.store(self.place(index), value.type, value.name)
            return
        suffix, mask = type_suffix(value.type), mask or literal(1, "i1", lanes)
        if self.stride is None:
            name, places, pointers = f"llvm.masked.store.{suffix}.p0", self.place(index), "ptr"
        else:
            name, pointers = f"llvm.masked.scatter.{suffix}.v{lanes}p0", vector("ptr", lanes)
            places = self._places(index, lanes)
        code.declare(f"void @{name}({value.type}, {pointers}, i32, {vector('i1', lanes)})")
        code.do(
            f"call void @{name}({value.type} {value.name}, {pointers} {places}, i32 {align_of(value.type)}, "
            f"{vector('i1', lanes)} {mask})"
        )

    def _places(self, index: str | int, lanes: int) -> str:
        assert self.stride is not None
        steps = Lanes(self.code, numbered(lanes, "i64"), "i64", lanes)
        offsets = steps * Lanes(self.code, self.code.splat(self.stride, "i64", lanes), "i64", lanes)
        first = self.place(index)
        return self.code.let(f"getelementptr {self.element}, ptr {first}, {offsets.type} {offsets.name}")


def line_stride(words: Words, stride: int) -> str | None:
    """None for neighbours, else a register: contiguous lines get other code."""
    return None if stride == 1 else words.number(stride)


def numbered(lanes: int, type_: str) -> str:
    """0, 1, 2, ... as a vector constant."""
    return "<" + ", ".join(f"{type_} {lane}" for lane in range(lanes)) + ">"


def first_lanes(code: Code, count: str, lanes: int) -> str:
    """A mask of the first `count` lanes."""
    narrow = code.let(f"trunc i64 {count} to i32")
    limit = code.splat(narrow, "i32", lanes)
    return code.let(f"icmp slt <{lanes} x i32> {numbered(lanes, 'i32')}, {limit}")


def each_vector(
    code: Code, begin: str | int, end: str | int, body: Callable[[str, str | None], None], whole: bool = False
) -> None:
    """body(index, mask) for every vector from begin to end; the last, shorter one has a mask.

    whole   there is no shorter one
    """
    lanes = vector_lanes()
    if whole:
        with code.loop(begin, end, lanes) as index:
            body(index, None)
        return
    count = code.sub(end, begin)
    last = code.add(begin, code.let(f"and i64 {count}, {-lanes}"))
    with code.loop(begin, last, lanes) as index:
        body(index, None)
    rest = code.sub(end, last)
    with code.when(code.let(f"icmp sgt i64 {rest}, 0")):
        body(last, first_lanes(code, rest, lanes))


class Cell:
    """A register that changes while loops run."""

    def __init__(self, initial: Lanes) -> None:
        self._code, self._like = initial.code, initial
        self._slot = initial.code.variable(initial.type, initial.name)

    def get(self) -> Lanes:
        like = self._like
        return Lanes(self._code, self._code.get(like.type, self._slot), like.element, like.lanes)

    def set(self, value: Lanes) -> None:
        self._code.set(value.type, self._slot, value.name)


def number(code: Code, value: float, element: str = "float", lanes: int | None = None) -> Lanes:
    """A constant in every lane."""
    lanes = lanes or vector_lanes()
    return Lanes(code, literal(value, element, lanes), element, lanes)


def splat(value: Lanes, lanes: int | None = None) -> Lanes:
    """A scalar in every lane of a vector."""
    lanes = lanes or vector_lanes()
    return Lanes(value.code, value.code.splat(value.name, value.element, lanes), value.element, lanes)


def to_float(code: Code, integer: str) -> Lanes:
    """An i64 register as a float."""
    return Lanes(code, code.let(f"sitofp i64 {integer} to float"), "float", 1)
