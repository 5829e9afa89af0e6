"""What the kernels of recurrent layers share: sizes, working memory, packed weights, samples and times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import DenseArray, StridedArray, aligned, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import copy_line, vector_loop
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    fetch_rate,
    pack_columns,
    pack_rows,
    padded,
    panel_width,
    tallest_tile,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import FLOAT32, Array, Step, Value

#: Depth that products sum in registers: the end of a tile costs as much as 5 of its depth, and here there are few rows
#: that would find a panel in the first-level cache.
BLOCK = 256
#: Floats between the sums of two slices, which different threads write: a page, beyond which prefetchers do not look.
_PAGE = 1024

# Outside the kernel: sizes and memory -------------------------------------------------------------------------------


#: What the operands of the ops are called; c and cells are of an lstm alone.
_NAMES = {
    "lstm": ("x wx wh b h0 c0", "y h c gates cells"),
    "lstm_gradient": ("dy dh dc x wx wh h0 c0 y gates cells", "dx dwx dwh db dh0 dc0"),
    "rnn": ("x wx wh b h0", "y h gates"),
    "rnn_gradient": ("dy dh x wx wh h0 y gates", "dx dwx dwh db dh0"),
}


@dataclass(frozen=True)
class Recurrence:
    """Operands by name, and sizes: samples, times, widths of the inputs, of the state and of the gates' sums.

    from_inputs   width of the leading part of the sums that the inputs take part in
    from_hidden   width of the last part, that the hidden state takes part in
    """

    step: Step
    values: dict[str, Value]
    lengths: Value | None
    samples: int
    steps: int
    inputs: int
    hidden: int
    gates: int
    from_inputs: int
    from_hidden: int

    @classmethod
    def of(cls, step: Step) -> Recurrence:
        before, after = (names.split() for names in _NAMES[step.op.name])
        values = dict(zip(before, step.inputs, strict=False)) | dict(zip(after, step.results, strict=True))
        lengths = step.inputs[-1] if step.attributes["has_lengths"] else None
        hidden = values["wh"].shape[1]
        widths = (values["gates"].shape[2], values["wx"].shape[0], values["wh"].shape[0])
        return cls(step, values, lengths, *values["x"].shape, hidden, *widths)  # type: ignore[call-arg]

    @property
    def is_gradient(self) -> bool:
        return "dy" in self.values

    @property
    def has_cells(self) -> bool:
        """Is there a second state, as in an lstm?"""
        return "cells" in self.values

    @property
    def gate_count(self) -> int:
        return self.gates // self.hidden

    @property
    def first_from_hidden(self) -> int:
        """Where the part of the sums begins that the hidden state takes part in."""
        return self.gates - self.from_hidden

    @property
    def keeps_gradient(self) -> bool:
        """Is something of dh added to dz wh? Samples in their padding have dz = 0 and keep what they have; of a GRU a
        part goes to the time before as it is."""
        return self.lengths is not None or self.step.attributes.get("cell") == "gru"

    def kernel(self, name: str = "") -> str:
        """What the printed program calls a kernel."""
        cell = str(self.step.attributes.get("cell", "lstm"))
        kind = cell if cell in ("lstm", "gru") else f"rnn {cell}"
        return f"{kind}, {name}" if name else kind

    @property
    def cell_cost(self) -> float:
        """Nanoseconds of one function of every unit, sample and time."""
        return 2.0 * self.samples * self.steps * self.hidden

    def product_cost(self, width: int) -> float:
        """Nanoseconds of multiplying the gates' width by another, for every sample and time."""
        return 2.0 * self.samples * self.steps * self.from_hidden * width / FLOPS_PER_NS


def _parts(r: Recurrence) -> dict[str, int]:
    """Parts of a step's workspace, in floats."""
    if not r.is_gradient:
        return {"wx": padded(r.from_inputs) * r.inputs, "wh": padded(r.from_hidden) * r.hidden}
    state = r.samples * r.hidden
    firsts = {"h0": state, "c0": state} if r.has_cells else {"h0": state}
    weights = {"wx": padded(r.inputs) * r.from_inputs, "wh": padded(r.hidden) * r.from_hidden}
    own = threads_bytes(weight_gradient_parts(r)) // 4
    slices = (weight_gradient_slices(r) - 1) * slice_floats(r)
    others = {"slices": slices} if slices else {}
    return {"dz": r.samples * r.steps * r.gates, "dh": state, **firsts, **weights, "own": own, **others}


def weight_gradient_slices(r: Recurrence) -> int:
    """Slices of the samples over which the gradients of the weights are summed apart.

    A fact of the machine and of the layer. Their sums take memory: those beside the first a quarter of dz at most.
    """
    weights, dz = slice_floats(r), r.samples * r.steps * r.gates
    most = min(machine_slices(), r.samples, 1 + dz // (4 * weights))
    # Threads are mostly a power of two: as many of them should share each slice.
    return 1 << (most.bit_length() - 1)


def slice_floats(r: Recurrence) -> int:
    """Floats from the sums of one slice, dwx, dwh and db one after the other, to those of the next."""
    return aligned(r.from_inputs * r.inputs + r.from_hidden * r.hidden + r.gates) + _PAGE


def fetched_lines(columns: int, depth: int, lines: float) -> int:
    """Lines to fetch in `LINE` steps of a product, for so many lines to be fetched per row of it."""
    width = panel_width(columns)
    panels = -(-columns // (width * vector_lanes()))
    return fetch_rate(depth, tallest_tile(width) * lines / panels)


def weight_gradient_parts(r: Recurrence) -> dict[str, int]:
    """Parts of a thread's own memory for the gradients of the weights, in floats."""
    return {
        "zeros": r.inputs,
        "x": DEPTH * padded(r.inputs),
        "h": DEPTH * padded(r.hidden),
        "sums": r.gates,
    }


def workspace(step: Step) -> int:
    """Bytes for packed weights and, going back, the gradients of the gates, the first states, and threads' own."""
    r = Recurrence.of(step)
    if not all(value.dtype == FLOAT32 for value in r.values.values()):
        return 0
    return 4 * sum(map(aligned, _parts(r).values()))


def workspace_parts(r: Recurrence, operands: Operands) -> dict[str, Operand]:
    """The parts of a step's workspace."""
    found, start = {}, 0
    for name, size in _parts(r).items():
        found[name] = operands.workspace(r.step, 4 * start, 4 * size)
        start += aligned(size)
    return found


def can_run(r: Recurrence) -> bool:
    """Are all types those the kernels are written for, and is there anything to do?"""
    return all(value.dtype == FLOAT32 and value.size for value in r.values.values()) and (
        r.lengths is None or r.lengths.dtype in (np.int32, np.int64)
    )


def can_pack(weights: Operand) -> bool:
    """Do the rows or the columns of a matrix lie side by side?"""
    return 1 in weights.strides or 1 in weights.shape


def pack_entry(r: Recurrence, weights: Sequence[tuple[Operand, Operand]], transposed: bool) -> Entry:
    """Pack weights, each with its buffer, threads sharing the panels; transposed: their last axis is summed over."""
    code = Code("recurrent_pack")
    args = KernelArguments(code)
    for source, target in weights:
        columns, depth = source.shape if transposed else source.shape[::-1]
        along_columns, along_depth = source.strides if transposed else source.strides[::-1]
        if along_depth == 1 or depth == 1:
            function, stride = pack_columns(columns), along_columns
        else:
            assert along_columns == 1 or columns == 1
            function, stride = pack_rows(columns), along_depth
        mine = code.share(args.number(columns), panel_width(columns) * vector_lanes())
        pack, depth_word = args.pointer(function), args.number(depth)
        rows = (args.pointer(source), args.number(stride))
        call_pack(code, pack, mine, depth_word, rows, args.pointer(target))
    sources, targets = [source for source, _ in weights], [target for _, target in weights]
    cost = 0.3 * sum(source.size for source in sources)
    return Entry(r.step, code, args.values, sources, targets, kernel=r.kernel("pack weights"), cost=cost)


# Inside the kernel ---------------------------------------------------------------------------------------------------


class Sequences:
    """Samples, times in the order they are visited, and lengths, inside a kernel."""

    def __init__(self, args: KernelArguments, r: Recurrence, lengths: Sequence[Operand]) -> None:
        self.code, self.args, self.recurrence = args.code, args, r
        self.samples, self.steps = args.number(r.samples), args.number(r.steps)
        self.inputs, self.hidden, self.gates = args.numbers([r.inputs, r.hidden, r.gates])
        self.from_inputs, self.from_hidden = args.numbers([r.from_inputs, r.from_hidden])
        self.first_from_hidden = args.number(r.first_from_hidden)
        self._is_full = r.hidden % vector_lanes() == 0
        self._reverse: bool = r.step.attributes["reverse"]
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
        code, address = self.code, self.args.pointer(status)
        with code.loop(begin, end) as sample:
            outside = code.let(f"icmp uge i64 {code.sub(self.length(sample), 1)}, {self.steps}")
            with code.when(outside):
                code.do(f"store i64 1, ptr {address}")

    def starts(self, sample: str, earlier: str, is_first: str) -> str:
        """Is there no time of the sequence before, so that the first state is the one to start from?"""
        late = self.starts_late(sample, earlier)
        return is_first if late is None else self.code.let(f"or i1 {is_first}, {late}")

    def each_sequence_unit(
        self,
        sample: str,
        time: str,
        inside: Sequence[Callable[[str, str | None], None]],
        in_padding: Callable[[str, str | None], None],
    ) -> None:
        """`each_unit` of bodies, in turn, where a time belongs to the sequence, of another beyond its end."""
        with contextlib.ExitStack() as branch:
            if self.has_lengths:
                padding = self.is_padding(sample, time)
                with self.code.when(padding):
                    self.each_unit(in_padding)
                branch.enter_context(self.code.when(self.code.let(f"xor i1 {padding}, true")))
            for body in inside:
                self.each_unit(body)

    def each_unit(self, body: Callable[[str, str | None], None]) -> None:
        """body(index, mask) for the vectors of a line of hidden units."""
        vector_loop(self.code, 0, self.hidden, body, self._is_full)

    def state_before(self, sample: str, time: str, running: DenseArray, at_times: DenseArray) -> tuple[str, str]:
        """The state that a time starts from: its address for a sample, and from there to the next sample's.

        running    the first state, and with lengths the state of every time, which in the padding is another than
                   what is stored for it
        at_times   states of all times
        """
        if self.has_lengths:
            return running.address(sample), self.hidden
        earlier, is_first = self.before(time)
        addresses = running.address(sample), at_times.address(sample, earlier)
        return (
            self.code.let(f"select i1 {is_first}, ptr {addresses[0]}, ptr {addresses[1]}"),
            self.code.let(f"select i1 {is_first}, i64 {self.hidden}, i64 {self.code.mul(self.steps, self.hidden)}"),
        )

    def copy_last_states(self, begin: str, end: str, at_times: DenseArray, target: DenseArray) -> None:
        """States of the time visited last, unless they are there already: see `state_before`."""
        if not self.has_lengths:
            last = self.time(self.code.sub(self.steps, 1))
            with self.code.loop(begin, end) as sample:
                copy_line(self.code, at_times.line(sample, last), target.line(sample), 0, self.hidden)

    def copy_states(self, begin: str, end: str, source: StridedArray, target: DenseArray) -> None:
        """The states of samples into dense memory."""
        with self.code.loop(begin, end) as sample:
            read, to = source.reader(sample), target.line(sample)
            self.each_unit(lambda index, mask: to.store(index, read(index, mask), mask))
