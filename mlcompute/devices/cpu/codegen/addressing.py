"""Addressing operands inside a kernel by leading indices: dense, strided, and a thread's own workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.loops import Line, splat
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step


class DenseArray(NamedTuple):
    """A dense operand: its address and the extents of its axes but the first."""

    code: Code
    pointer: str
    extents: tuple[str, ...]
    element: str = "float"

    def address(self, *indices: str) -> str:
        """The address of what the leading indices pick."""
        code, offset = self.code, indices[0]
        for index, extent in zip(indices[1:], self.extents, strict=False):
            offset = code.add(code.mul(offset, extent), index)
        for extent in self.extents[len(indices) - 1 :]:
            offset = code.mul(offset, extent)
        return code.at(self.pointer, offset, self.element)

    def line(self, *indices: str) -> Line:
        return Line(self.code, self.address(*indices), self.element)

    def lines(self, count: int, width: str, *indices: str) -> list[Line]:
        """What the leading indices pick, cut into lines of one width."""
        code, first = self.code, self.address(*indices)
        return [Line(code, code.at(first, code.mul(k, width), self.element), self.element) for k in range(count)]


class StridedArray(NamedTuple):
    """An operand of any strides: its address and strides in registers, the last also as a number."""

    code: Code
    pointer: str
    strides: tuple[str, ...]
    last: int

    @classmethod
    def of(cls, args: KernelArguments, operand: Operand) -> StridedArray:
        last = 1 if operand.shape[-1] == 1 else operand.strides[-1]
        strides = args.numbers([*operand.strides[:-1], last])
        return cls(args.code, args.pointer(operand), tuple(strides), last)

    def address(self, *indices: str) -> str:
        """The address of what the leading indices pick."""
        pointer = self.pointer
        for index, stride in zip(indices, self.strides, strict=False):
            pointer = self.code.at(pointer, self.code.mul(index, stride), "float")
        return pointer

    def reader(self, *indices: str, start: str | int = 0) -> Callable[[str, str | None], SimdValue]:
        """Loads of vectors (index, mask) from the line that the leading indices pick, from its element `start` on."""
        first = self.code.at(self.address(*indices), self.code.mul(start, self.strides[-1]), "float")
        line = Line(self.code, first, "float", None if self.last == 1 else self.strides[-1])
        if self.last == 0:
            repeated = splat(line.load(0, lanes=1))
            return lambda index, mask: repeated
        return lambda index, mask: line.load(index, mask)


class ThreadWorkspace:
    """Memory of every thread's own, in named parts of floats; its contents are undefined between kernels.

    What is small lies on the threads' stacks: no arena grows with the number of threads for it, and one kernel after
    the other finds it in the core's own cache. (With 16 cores attention's gradient is a third faster than with memory
    that other cores have used in between. The whole step is not: what lies there instead is written more slowly.)

    Larger memory is part of the step's planned workspace, see `threads_bytes`. It holds `planned_threads()` threads:
    `max_threads`, for `code.share`, leaves threads beyond these without work.
    """

    def __init__(self, args: KernelArguments, buffer: Operand | None, parts: dict[str, int]) -> None:
        code, size = args.code, thread_floats(parts)
        if buffer is None or not buffer.size:
            assert _is_on_stack(parts), "this memory is to be planned"
            #: What it takes of the step's workspace.
            self.scratch: list[Operand] = []
            self.count = planned_threads()
            address = code.aligned_buffer(_ON_STACK)
        else:
            self.scratch, self.count = [buffer], buffer.size // (4 * size)
            address = code.at(args.pointer(buffer), code.mul(code.worker(), args.number(size)), "float")
        self.max_threads = args.number(self.count)
        self._addresses: dict[str, str] = {}
        for name, floats in parts.items():
            self._addresses[name] = address
            address = code.at(address, args.number(aligned(floats)), "float")

    @classmethod
    def of(
        cls, args: KernelArguments, operands: Operands, step: Step, parts: dict[str, int], offset: int = 0
    ) -> ThreadWorkspace:
        """Memory that lies in a step's workspace, if it is planned, from an offset on."""
        nbytes = threads_bytes(parts)
        return cls(args, operands.workspace(step, offset, nbytes) if nbytes else None, parts)

    def __getitem__(self, name: str) -> str:
        return self._addresses[name]


#: Floats of a thread's memory up to which it lies on the stack.
_ON_STACK = 1 << 16


def _is_on_stack(parts: dict[str, int]) -> bool:
    return sum(map(aligned, parts.values())) <= _ON_STACK


def threads_bytes(parts: dict[str, int]) -> int:
    """Bytes that all threads' own memory takes of a step's workspace: none if it lies on their stacks."""
    return 0 if _is_on_stack(parts) else 4 * thread_floats(parts) * planned_threads()


#: Floats between the memory of one thread and that of the next, at most, and of all such gaps together.
_APART, _ALL_GAPS = 1 << 15, 1 << 17


def thread_floats(parts: dict[str, int]) -> int:
    """Floats of one thread's memory, and of a gap behind it; every part begins at a cache line.

    A processor that sees its thread step through memory fetches some steps more, beyond the end. Without the gap that
    is what the next thread is writing, which then has to wait for it: seen to take twice as long on Zen 5.
    """
    return sum(map(aligned, parts.values())) + min(_APART, _ALL_GAPS // planned_threads()) // 16 * 16


def aligned(size: int) -> int:
    """Floats up to the next cache line."""
    return -(-size // 16) * 16


def owned_by_row(operands: Sequence[Operand], rows: int, but: Sequence[Operand] = ()) -> set[int]:
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


def prefetch(lines: Sequence[Line], index: str, to_write: bool = False) -> None:
    """Prefetch vectors into the second-level cache while something else is computed. Any address is harmless."""
    for line in lines:
        line.code.declare("void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)")
        line.code.do(f"call void @llvm.prefetch.p0(ptr {line.address(index)}, i32 {int(to_write)}, i32 2, i32 1)")
