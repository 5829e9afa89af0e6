"""Operands inside a kernel that picks lines by leading indices: dense, strided, and a thread's own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.code import Code
from mlcompute.devices.cpu.kernels.walks import Line, Words, splat
from mlcompute.devices.cpu.lanes import Lanes
from mlcompute.devices.cpu.operands import Operand


@dataclass(frozen=True)
class Dense:
    """A dense operand: its address and the extents of its axes but the first."""

    code: Code
    pointer: str
    extents: tuple[str, ...]

    def place(self, *indices: str) -> str:
        """The address of what the leading indices pick."""
        code, offset = self.code, indices[0]
        for index, extent in zip(indices[1:], self.extents, strict=False):
            offset = code.add(code.mul(offset, extent), index)
        for extent in self.extents[len(indices) - 1 :]:
            offset = code.mul(offset, extent)
        return code.at(self.pointer, offset, "float")

    def line(self, *indices: str) -> Line:
        return Line(self.code, self.place(*indices), "float")

    def lines(self, count: int, width: str, *indices: str) -> list[Line]:
        """What the leading indices pick, cut into lines of one width."""
        code, first = self.code, self.place(*indices)
        return [Line(code, code.at(first, code.mul(k, width), "float"), "float") for k in range(count)]


@dataclass(frozen=True)
class Strided:
    """An operand of any strides: its address and strides in registers, the last also as a number."""

    code: Code
    pointer: str
    strides: tuple[str, ...]
    last: int

    @classmethod
    def of(cls, words: Words, operand: Operand) -> Strided:
        last = 1 if operand.shape[-1] == 1 else operand.strides[-1]
        strides = words.numbers([*operand.strides[:-1], last])
        return cls(words.code, words.pointer(operand), tuple(strides), last)

    def place(self, *indices: str) -> str:
        """The address of what the leading indices pick."""
        pointer = self.pointer
        for index, stride in zip(indices, self.strides, strict=False):
            pointer = self.code.at(pointer, self.code.mul(index, stride), "float")
        return pointer

    def reader(self, *indices: str, start: str | int = 0) -> Callable[[str, str | None], Lanes]:
        """Loads of vectors (index, mask) from the line that the leading indices pick, from its element `start` on."""
        first = self.code.at(self.place(*indices), self.code.mul(start, self.strides[-1]), "float")
        line = Line(self.code, first, "float", None if self.last == 1 else self.strides[-1])
        if self.last == 0:
            repeated = splat(line.load(0, lanes=1))
            return lambda index, mask: repeated
        return lambda index, mask: line.load(index, mask)


class ThreadMemory:
    """Memory of every thread's own, in named parts of so many floats; what it holds is forgotten between kernels.

    It is part of the step's planned workspace and holds `planned_threads()` threads: `most`, for `code.share`, keeps
    threads beyond these away from it.
    """

    def __init__(self, words: Words, room: Operand, parts: dict[str, int]) -> None:
        code, size = words.code, thread_floats(parts)
        self.room, self.count = room, room.size // (4 * size)
        self.most = words.number(self.count)
        place = code.at(words.pointer(room), code.mul("%thread", words.number(size)), "float")
        self._places: dict[str, str] = {}
        for name, floats in parts.items():
            self._places[name] = place
            place = code.at(place, words.number(aligned(floats)), "float")

    def __getitem__(self, name: str) -> str:
        return self._places[name]


def thread_floats(parts: dict[str, int]) -> int:
    """Floats of one thread's memory; every part begins at a cache line."""
    return sum(map(aligned, parts.values()))


def aligned(size: int) -> int:
    """Floats up to the next cache line."""
    return -(-size // 16) * 16


def owned(operands: Sequence[Operand], rows: int, but: Sequence[Operand] = ()) -> set[int]:
    """Which operands, other than some, keep every sample in bytes of its own, in the order of the samples."""
    return {
        index
        for index, operand in enumerate(operands)
        if operand.shape[0] == rows and operand not in but and _keeps_rows_apart(operand)
    }


def _keeps_rows_apart(operand: Operand) -> bool:
    per_row = operand.size // operand.shape[0]
    reach = sum((extent - 1) * stride for extent, stride in zip(operand.shape[1:], operand.strides[1:], strict=True))
    return operand.strides[0] == per_row and 0 <= reach < per_row


def fetch(lines: Sequence[Line], index: str, to_write: bool = False) -> None:
    """Have vectors brought into the second-level cache while something else is computed. Any address is harmless."""
    for line in lines:
        line.code.declare("void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)")
        line.code.do(f"call void @llvm.prefetch.p0(ptr {line.place(index)}, i32 {int(to_write)}, i32 2, i32 1)")
