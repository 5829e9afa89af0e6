"""What the kernels of recurrent layers share: sizes, working memory, packed weights, samples and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import DenseArray, StridedArray, aligned, thread_floats
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import vector_loop
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    pack_columns,
    pack_rows,
    padded,
    panel_width,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import FLOAT32, Array, Step

# Outside the kernel: sizes and memory -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Samples, times, and the widths of the inputs and of the hidden state of an lstm or its gradient."""

    samples: int
    steps: int
    inputs: int
    hidden: int

    @classmethod
    def of(cls, step: Step) -> Sizes:
        x, wh = (0, 2) if step.op.name == "lstm" else (3, 5)
        samples, steps, inputs = step.inputs[x].shape
        return cls(samples, steps, inputs, step.inputs[wh].shape[1])

    @property
    def gates(self) -> int:
        return 4 * self.hidden

    @property
    def cell_cost(self) -> float:
        """Nanoseconds of one function of every unit, sample and time."""
        return 2.0 * self.samples * self.steps * self.hidden

    def product_cost(self, width: int) -> float:
        """Nanoseconds of multiplying the gates' width by another, for every sample and time."""
        return 2.0 * self.samples * self.steps * self.gates * width / FLOPS_PER_NS


def _parts(step: Step) -> dict[str, int]:
    """Parts of a step's workspace, in floats."""
    s = Sizes.of(step)
    if step.op.name == "lstm":
        return {"wx": padded(s.gates) * s.inputs, "wh": padded(s.gates) * s.hidden}
    state = s.samples * s.hidden
    weights = {"wx": padded(s.inputs) * s.gates, "wh": padded(s.hidden) * s.gates}
    own = thread_floats(weight_gradient_parts(s)) * planned_threads()
    return {"dz": s.samples * s.steps * s.gates, "h0": state, "c0": state, **weights, "own": own}


def weight_gradient_parts(s: Sizes) -> dict[str, int]:
    """Parts of a thread's own memory for the gradients of the weights, in floats."""
    return {
        "zeros": s.inputs,
        "x": DEPTH * padded(s.inputs),
        "h": DEPTH * padded(s.hidden),
        "sums": s.gates,
    }


def workspace(step: Step) -> int:
    """Bytes for packed weights and, going back, the gradients of the gates, the first states, and threads' own."""
    if not all(value.dtype == FLOAT32 for value in step.inputs[:6]):
        return 0
    return 4 * sum(map(aligned, _parts(step).values()))


def workspace_parts(step: Step, operands: Operands) -> dict[str, Operand]:
    """The parts of a step's workspace."""
    found, start = {}, 0
    for name, size in _parts(step).items():
        found[name] = operands.workspace(step, 4 * start, 4 * size)
        start += aligned(size)
    return found


def can_run(floats: Sequence[Operand], lengths: Sequence[Operand]) -> bool:
    """Are all types those the kernels are written for, and is there anything to do?"""
    return all(operand.dtype == FLOAT32 and operand.size for operand in floats) and all(
        operand.dtype in (np.int32, np.int64) for operand in lengths
    )


def pack_entry(step: Step, weights: Sequence[tuple[Operand, Operand]], transposed: bool) -> Entry | None:
    """Pack weights, each with its buffer, threads sharing the panels; transposed: their last axis is summed over."""
    code = Code("lstm_pack")
    args = KernelArguments(code)
    for source, target in weights:
        columns, depth = source.shape if transposed else source.shape[::-1]
        along_columns, along_depth = source.strides if transposed else source.strides[::-1]
        if along_depth == 1 or depth == 1:
            function, stride = pack_columns(columns), along_columns
        elif along_columns == 1 or columns == 1:
            function, stride = pack_rows(columns), along_depth
        else:
            return None
        mine = code.share(args.number(columns), panel_width(columns) * vector_lanes())
        pack, depth_word = args.pointer(function), args.number(depth)
        rows = (args.pointer(source), args.number(stride))
        call_pack(code, pack, mine, depth_word, rows, args.pointer(target))
    sources, targets = [source for source, _ in weights], [target for _, target in weights]
    cost = 0.3 * sum(source.size for source in sources)
    return Entry(step, code, args.values, sources, targets, kernel="lstm, pack weights", cost=cost)


# Inside the kernel ---------------------------------------------------------------------------------------------------


class Sequences:
    """Samples, times in the order they are visited, and lengths, inside a kernel."""

    def __init__(self, args: KernelArguments, step: Step, sizes: Sizes, lengths: Sequence[Operand]) -> None:
        self.code, self.args = args.code, args
        self.samples, self.steps = args.number(sizes.samples), args.number(sizes.steps)
        self.inputs, self.hidden, self.gates = args.numbers([sizes.inputs, sizes.hidden, sizes.gates])
        self._is_full = sizes.hidden % vector_lanes() == 0
        self._reverse: bool = step.attributes["reverse"]
        self._lengths = lengths[0] if lengths else None
        if self._lengths is not None:
            self._length_address = args.pointer(self._lengths)
            self._length_stride = args.number(self._lengths.strides[0])

    @property
    def has_lengths(self) -> bool:
        return self._lengths is not None

    def dense(self, operand: Operand, *extents: str) -> DenseArray:
        """An operand with these extents after its first."""
        return DenseArray(self.code, self.args.pointer(operand), extents)

    def strided(self, operand: Operand) -> StridedArray:
        return StridedArray.of(self.args, operand)

    def time(self, visited: str) -> str:
        """The time that is visited as number `visited`."""
        return self.code.sub(self.code.sub(self.steps, 1), visited) if self._reverse else visited

    def before(self, time: str) -> tuple[str, str]:
        """The time visited just before one, and whether there is none."""
        earlier = self.code.add(time, 1) if self._reverse else self.code.sub(time, 1)
        return earlier, self.code.let(f"icmp uge i64 {earlier}, {self.steps}")

    def after(self, time: str) -> str:
        """The time visited next; outside the sequence for the last."""
        return self.code.sub(time, 1) if self._reverse else self.code.add(time, 1)

    def starts_late(self, sample: str, earlier: str) -> str | None:
        """Going from last to first: does a time lie in the padding, so that the sequence has not begun there?"""
        if not (self._reverse and self.has_lengths):
            return None
        return self.code.let(f"icmp sge i64 {earlier}, {self.length(sample)}")

    def length(self, sample: str) -> str:
        assert self._lengths is not None
        type_ = MEMORY_TYPES[self._lengths.dtype]
        address = self.code.at(self._length_address, self.code.mul(sample, self._length_stride), type_)
        length = self.code.load(address, type_)
        return length if type_ == "i64" else self.code.let(f"sext {type_} {length} to i64")

    def is_padding(self, sample: str, time: str) -> str:
        return self.code.let(f"icmp sge i64 {time}, {self.length(sample)}")

    def check_lengths(self, begin: str, end: str, status: Array) -> None:
        """Set the status if a length is below 1 or beyond the times. Times are never addressed by a length."""
        code, address = self.code, self.args.pointer(status.ctypes.data)
        with code.loop(begin, end) as sample:
            outside = code.let(f"icmp uge i64 {code.sub(self.length(sample), 1)}, {self.steps}")
            with code.when(outside):
                code.do(f"store i64 1, ptr {address}")

    def each_unit(self, body: Callable[[str, str | None], None]) -> None:
        """body(index, mask) for the vectors of a line of hidden units."""
        vector_loop(self.code, 0, self.hidden, body, self._is_full)

    def copy_states(self, begin: str, end: str, source: StridedArray, target: DenseArray) -> None:
        """The states of samples into dense memory."""
        with self.code.loop(begin, end) as sample:
            read, to = source.reader(sample), target.line(sample)
            self.each_unit(lambda index, mask: to.store(index, read(index, mask), mask))
