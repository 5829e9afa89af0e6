"""Loops in kernels: over collapsed axes, and over lines of vectors with a masked tail."""

from __future__ import annotations

import contextlib
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import BFLOAT16, Code, align_of, type_suffix, vector, vector_lanes
from mlcompute.devices.cpu.codegen.simd import SimdValue, from_bfloat16, literal, to_bfloat16
from mlcompute.devices.loop_nest import Axis

# Axes -------------------------------------------------------------------------------------------------------------


class AxisRegisters(NamedTuple):
    """An axis inside a kernel: registers that hold its extent and strides."""

    extent: str
    strides: list[str]


def axis_registers(args: KernelArguments, axes: Sequence[Axis]) -> list[AxisRegisters]:
    """Hand the extents and strides of axes to a kernel."""
    return [AxisRegisters(args.number(axis.extent), args.numbers(axis.strides)) for axis in axes]


def unravel_index(code: Code, index: str, axes: Sequence[AxisRegisters]) -> list[str]:
    """The index along each axis of a flat, row-major index over all of them."""
    indices: list[str] = []
    for axis in reversed(axes[1:]):
        indices.append(code.rem(index, axis.extent))
        index = code.div(index, axis.extent)
    return [*([index] if axes else []), *reversed(indices)]


def address_at(
    code: Code, pointer: str, operand: int, axes: Sequence[AxisRegisters], indices: Sequence[str], type_: str
) -> str:
    """The address after stepping along axes by indices."""
    for axis, index in zip(axes, indices, strict=True):
        pointer = code.at(pointer, code.mul(index, axis.strides[operand]), type_)
    return pointer


@contextlib.contextmanager
def loop_over(
    code: Code, axes: Sequence[AxisRegisters], pointers: Sequence[str], types: Sequence[str]
) -> Iterator[list[str]]:
    """Loops over axes, outermost first; gives the operands' addresses inside."""
    with contextlib.ExitStack() as stack:
        addresses = list(pointers)
        for axis in axes:
            index = stack.enter_context(code.loop(0, axis.extent))
            addresses = [
                code.at(address, code.mul(index, axis.strides[number]), type_)
                for number, (address, type_) in enumerate(zip(addresses, types, strict=True))
            ]
        yield addresses


def share_units(
    args: KernelArguments, units: int, rows: int, max_threads: str | None = None, in_pieces: bool = False
) -> tuple[str, str]:
    """This thread's part of `units`, in full rows where rows are owned; at most `max_threads` threads have one."""
    code = args.code
    shared, per_row = args.number(rows or units), args.number(units // rows if rows else 1)
    begin, end = code.share(shared, max_threads=max_threads, in_pieces=in_pieces)
    return code.mul(begin, per_row), code.mul(end, per_row)


# Lines of vectors ---------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Elements one after the other (stride None) or a fixed stride apart."""

    code: Code
    pointer: str
    element: str
    stride: str | None = None

    @property
    def register(self) -> str:
        """The type of an element in a register."""
        return "float" if self.element == BFLOAT16 else self.element

    def address(self, index: str | int) -> str:
        step = index if self.stride is None else self.code.mul(index, self.stride)
        return self.code.at(self.pointer, step, self.element)

    def load(
        self, index: str | int, mask: str | None = None, otherwise: float = 0.0, lanes: int | None = None
    ) -> SimdValue:
        """A vector from `index` on, bfloat16 as float; lanes outside the mask are not read and hold `otherwise`."""
        if self.element == BFLOAT16:
            return from_bfloat16(self._replace(element="i16").load(index, mask, bfloat16_bits(otherwise), lanes))
        code, lanes = self.code, lanes or vector_lanes()
        type_ = vector(self.element, lanes)
        if lanes == 1 or (self.stride is None and mask is None):
            return SimdValue(code, code.load(self.address(index), type_), self.element, lanes)
        suffix, fill = type_suffix(type_), literal(otherwise, self.element, lanes)
        mask = mask or literal(1, "i1", lanes)
        if self.stride is None:
            name, addresses, pointers = f"llvm.masked.load.{suffix}.p0", self.address(index), "ptr"
        else:
            name, pointers = f"llvm.masked.gather.{suffix}.v{lanes}p0", vector("ptr", lanes)
            addresses = self._addresses(index, lanes)
        code.declare(f"{type_} @{name}({pointers}, i32, {vector('i1', lanes)}, {type_})")
        align = align_of(type_)
        text = (
            f"call {type_} @{name}({pointers} {addresses}, i32 {align}, {vector('i1', lanes)} {mask}, {type_} {fill})"
        )
        return SimdValue(code, code.let(text), self.element, lanes)

    def store(self, index: str | int, value: SimdValue, mask: str | None = None) -> None:
        """Write a vector from `index` on; lanes outside the mask are left alone. Float is rounded to bfloat16."""
        if self.element == BFLOAT16:
            self._replace(element="i16").store(index, to_bfloat16(value), mask)
            return
        code, lanes = self.code, value.lanes
        if lanes == 1 or (self.stride is None and mask is None):
            code.store(self.address(index), value.type, value.name)
            return
        suffix, mask = type_suffix(value.type), mask or literal(1, "i1", lanes)
        if self.stride is None:
            name, addresses, pointers = f"llvm.masked.store.{suffix}.p0", self.address(index), "ptr"
        else:
            name, pointers = f"llvm.masked.scatter.{suffix}.v{lanes}p0", vector("ptr", lanes)
            addresses = self._addresses(index, lanes)
        code.declare(f"void @{name}({value.type}, {pointers}, i32, {vector('i1', lanes)})")
        code.do(
            f"call void @{name}({value.type} {value.name}, {pointers} {addresses}, i32 {align_of(value.type)}, "
            f"{vector('i1', lanes)} {mask})"
        )

    def _addresses(self, index: str | int, lanes: int) -> str:
        assert self.stride is not None
        steps = SimdValue(self.code, lane_numbers(lanes, "i64"), "i64", lanes)
        offsets = steps * SimdValue(self.code, self.code.splat(self.stride, "i64", lanes), "i64", lanes)
        first = self.address(index)
        return self.code.let(f"getelementptr {self.element}, ptr {first}, {offsets.type} {offsets.name}")


def bfloat16_bits(value: float) -> int:
    """The bits of a number that bfloat16 has exactly, or of the next one toward zero."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0] >> 16)


def line_stride(args: KernelArguments, stride: int) -> str | None:
    """None for neighbours, else a register: contiguous lines get other code."""
    return None if stride == 1 else args.number(stride)


def lane_numbers(lanes: int, type_: str) -> str:
    """0, 1, 2, ... as a vector constant."""
    return "<" + ", ".join(f"{type_} {lane}" for lane in range(lanes)) + ">"


def tail_mask(code: Code, count: str, lanes: int) -> str:
    """A mask of the first `count` lanes."""
    narrow = code.let(f"trunc i64 {count} to i32")
    limit = code.splat(narrow, "i32", lanes)
    return code.let(f"icmp slt <{lanes} x i32> {lane_numbers(lanes, 'i32')}, {limit}")


def vector_loop(
    code: Code, begin: str | int, end: str | int, body: Callable[[str, str | None], None], full: bool = False
) -> None:
    """body(index, mask) for every vector from begin to end; the last, shorter one has a mask. Nothing if end < begin.

    full   there is no shorter one
    """
    lanes = vector_lanes()
    if full:
        with code.loop(begin, end, lanes) as index:
            body(index, None)
        return
    last = _end_of_full_vectors(code, begin, end, lanes)
    with code.loop(begin, last, lanes) as index:
        body(index, None)
    rest = code.sub(end, last)
    with code.when(code.let(f"icmp sgt i64 {rest}, 0")):
        body(last, tail_mask(code, rest, lanes))


def _end_of_full_vectors(code: Code, begin: str | int, end: str | int, lanes: int) -> str:
    """`begin` where `end` lies before it, as for windows that lie beside the image."""
    count = code.intrinsic("smax", "i64", code.sub(end, begin), "0")
    return code.add(begin, code.let(f"and i64 {count}, {-lanes}"))


def row_groups(code: Code, rows: str, count: int, body: Callable[[Sequence[str]], None]) -> None:
    """body(numbers) for all rows, `count` of them at once, then one by one."""
    full = code.mul(code.div(rows, count), count)
    with code.loop(0, full, count) as first:
        body([code.add(first, row) for row in range(count)])
    with code.loop(full, rows) as row:
        body([row])


class Variable:
    """A register that changes while loops run."""

    def __init__(self, initial: SimdValue) -> None:
        self._code, self._like = initial.code, initial
        self._slot = initial.code.variable(initial.type, initial.name)

    def get(self) -> SimdValue:
        like = self._like
        return SimdValue(self._code, self._code.get(like.type, self._slot), like.element, like.lanes)

    def set(self, value: SimdValue) -> None:
        self._code.set(value.type, self._slot, value.name)


def splat_constant(code: Code, value: float, element: str = "float", lanes: int | None = None) -> SimdValue:
    """A constant in every lane."""
    lanes = lanes or vector_lanes()
    return SimdValue(code, literal(value, element, lanes), element, lanes)


def splat(value: SimdValue, lanes: int | None = None) -> SimdValue:
    """A scalar in every lane of a vector."""
    lanes = lanes or vector_lanes()
    return SimdValue(value.code, value.code.splat(value.name, value.element, lanes), value.element, lanes)


def to_float(code: Code, integer: str) -> SimdValue:
    """An i64 register as a float."""
    return SimdValue(code, code.let(f"sitofp i64 {integer} to float"), "float", 1)


# Copying lines ----------------------------------------------------------------------------------------------------


def each_vector_or_element(
    code: Code, begin: str | int, end: str, body: Callable[[str, str | None, int], None]
) -> None:
    """body(index, mask, lanes) along a line, for bodies that only load and store.

    Masked stores are slow before AVX-512, so a shorter last vector then goes element by element.
    """
    lanes = vector_lanes()
    if lanes == 16:
        vector_loop(code, begin, end, lambda index, mask: body(index, mask, lanes))
        return
    last = _end_of_full_vectors(code, begin, end, lanes)
    with code.loop(begin, last, lanes) as index:
        body(index, None, lanes)
    with code.loop(last, end) as index:
        body(index, None, 1)


def copy_line(code: Code, source: Line, target: Line, begin: str | int, end: str) -> None:
    """target[i] = source[i]"""

    def body(index: str, mask: str | None, lanes: int) -> None:
        target.store(index, source.load(index, mask, lanes=lanes), mask)

    each_vector_or_element(code, begin, end, body)


def add_line(
    code: Code, source: Line, target: Line, begin: str | int, end: str, add: Callable[..., SimdValue] = operator.add
) -> None:
    """target[i] += source[i], or what `add` makes of both."""

    def body(index: str, mask: str | None, lanes: int) -> None:
        target.store(index, add(target.load(index, mask, lanes=lanes), source.load(index, mask, lanes=lanes)), mask)

    each_vector_or_element(code, begin, end, body)


def fill_line(code: Code, target: Line, begin: str | int, end: str, value: float = 0) -> None:
    """target[i] = value"""

    def body(index: str, mask: str | None, lanes: int) -> None:
        target.store(index, splat_constant(code, value, target.register, lanes), mask)

    each_vector_or_element(code, begin, end, body)
