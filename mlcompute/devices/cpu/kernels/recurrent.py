"""LSTM forward and back: threads share the samples and run whole sequences without meeting.

    forward    pack weights | per sample and time: products into the gates, the cell in place
    gradient   pack weights | per sample, back through time: the cell, a product | dx per sample, weights by their rows

A bar is a meeting. The products are our own (`products`): no result depends on how samples are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cpu.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.entry import Entry, Maker
from mlcompute.devices.cpu.kernels.folds import SUM, fill, fold_columns
from mlcompute.devices.cpu.kernels.products import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_product,
    pack_columns,
    pack_row,
    pack_rows,
    padded,
    panel_width,
    product,
)
from mlcompute.devices.cpu.kernels.walks import Line, Words, each_vector, line_stride, number
from mlcompute.devices.cpu.lanes import Lanes
from mlcompute.devices.cpu.math import sigmoid, tanh
from mlcompute.devices.cpu.operands import Operand, Operands
from mlcompute.ops.op import FLOAT32, Step

#: With fewer samples than this, a thread multiplies the inputs of all times at once, sample by sample: for one time
#: at once there are too few rows to make reading the weights worth while.
FEW_SAMPLES = 8


@dataclass(frozen=True)
class _Sizes:
    """n samples of `steps` times, `inputs` wide, `hidden` units."""

    samples: int
    steps: int
    inputs: int
    hidden: int

    @property
    def gates(self) -> int:
        return 4 * self.hidden

    @property
    def product_cost(self) -> float:
        """Nanoseconds of a product of every sample and time with the weights."""
        return 2.0 * self.samples * self.steps * self.gates * (self.inputs + self.hidden) / FLOPS_PER_NS

    @property
    def cell_cost(self) -> float:
        return 2.0 * self.samples * self.steps * self.hidden


def _sizes(step: Step) -> _Sizes:
    x, wh = (step.inputs[0], step.inputs[2]) if step.op.name == "lstm" else (step.inputs[3], step.inputs[5])
    return _Sizes(*x.shape, wh.shape[1])


class _Workspace:
    """Parts of a step's workspace, one after the other, in floats."""

    def __init__(self, parts: dict[str, int]) -> None:
        self.parts = parts

    @property
    def nbytes(self) -> int:
        return 4 * sum(_aligned(size) for size in self.parts.values())

    def operands(self, step: Step, operands: Operands) -> dict[str, Operand]:
        places, start = {}, 0
        for name, size in self.parts.items():
            places[name] = operands.workspace(step, 4 * start, 4 * size)
            start += _aligned(size)
        return places


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _workspace(step: Step) -> _Workspace:
    s = _sizes(step)
    if step.op.name == "lstm":
        return _Workspace({"wx": padded(s.gates) * s.inputs, "wh": padded(s.gates) * s.hidden})
    return _Workspace(
        {
            "dz": s.samples * s.steps * s.gates,
            "h0": s.samples * s.hidden,
            "c0": s.samples * s.hidden,
            "wx": padded(s.inputs) * s.gates,
            "wh": padded(s.hidden) * s.gates,
        }
    )


def workspace(step: Step) -> int:
    """Bytes for packed weights and, for the gradient, the gates' gradients and the first states."""
    return _workspace(step).nbytes if all(0 not in value.shape for value in step.inputs) else 0


def _can_run(values: Sequence[Operand], lengths: Sequence[Operand]) -> bool:
    types = all(operand.dtype == FLOAT32 and operand.size for operand in values)
    return types and all(operand.dtype in (np.int32, np.int64) for operand in lengths)


def _times(words: Words, step: Step, sizes: _Sizes) -> tuple[str, str, str]:
    """Number of times, the time visited first, and the step from one to the next."""
    reverse = step.attributes["reverse"]
    return words.number(sizes.steps), words.number(sizes.steps - 1 if reverse else 0), words.number(-1 if reverse else 1)


def _row(code: Code, pointer: str, *moves: tuple[str | int, str | int]) -> str:
    """The address after stepping by index * stride for every move."""
    for index, stride in moves:
        pointer = code.at(pointer, code.mul(index, stride), "float")
    return pointer


def _line(code: Code, pointer: str, *moves: tuple[str | int, str | int]) -> Line:
    return Line(code, _row(code, pointer, *moves), "float")


@dataclass(frozen=True)
class _Strided:
    """An operand inside a kernel that is read along its last axis: its address, leading strides and last stride."""

    pointer: str
    strides: list[str]
    last: str | None

    @classmethod
    def of(cls, words: Words, operand: Operand) -> _Strided:
        last = 1 if operand.shape[-1] == 1 else operand.strides[-1]
        return cls(words.pointer(operand), words.numbers(operand.strides[:-1]), line_stride(words, last))

    def line(self, code: Code, *indices: str) -> Line:
        return Line(code, _row(code, self.pointer, *zip(indices, self.strides, strict=True)), "float", self.last)


def _pack_entry(
    step: Step, operands: Operands, weights: Sequence[tuple[Operand, Operand]], turned: bool
) -> Entry | None:
    """Pack weights, threads sharing the panels.

    weights   (source, where to) pairs; turned: the product runs along their last axis, else along their first
    """
    code = Code("lstm_pack")
    words = Words(code)
    for source, target in weights:
        columns, depth = source.shape if turned else source.shape[::-1]
        by_columns, by_rows = source.strides if turned else source.strides[::-1]
        if by_rows == 1 or depth == 1:
            function, stride = pack_columns(columns), by_columns
        elif by_columns == 1 or columns == 1:
            function, stride = pack_rows(columns), by_rows
        else:
            return None
        address, count = words.pointer(function), words.number(columns)
        begin, end = code.share(count, panel_width(columns) * vector_lanes())
        place = words.pointer(source)
        stride_word, depth_word = words.number(stride), words.number(depth)
        call_pack(code, address, (begin, end), depth_word, (place, stride_word), words.pointer(target))
    sources, targets = [source for source, _ in weights], [target for _, target in weights]
    cost = 0.5 * sum(source.size for source in sources)
    return Entry(step, code, words.arguments, sources, targets, kernel="pack weights", cost=cost)


# Forward ------------------------------------------------------------------------------------------------------------


def lstm_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """The whole sequence for every sample; results y, h, c, gates, cells."""
    x, wx, wh, b, h0, c0, *lengths = (operands[value] for value in step.inputs)
    if not _can_run([x, wx, wh, b, h0, c0], lengths):
        return None
    sizes, room = _sizes(step), _workspace(step).operands(step, operands)
    pack = _pack_entry(step, operands, [(wx, room["wx"]), (wh, room["wh"])], turned=True)
    if pack is None or (b.strides[-1] != 1 and b.size > 1):
        return None
    y, h, c, gates, cells = (operands[value] for value in step.results)
    code = Code("lstm")
    words = Words(code)
    samples, hidden = words.number(sizes.samples), words.number(sizes.hidden)
    times = _times(words, step, sizes)
    begin, end = code.share(samples)
    status = np.zeros(1, np.int64)
    valid = _Lengths(words, lengths[0]) if lengths else None
    if valid is not None:
        valid.check(begin, end, times[0], words.pointer(status.ctypes.data))
    ForwardKernel(code, words, hidden, times, (begin, end), valid).write(
        sizes, x, room, b, (h0, c0), (y, h, c, gates, cells)
    )
    reads = [x, room["wx"], room["wh"], b, h0, c0, *lengths]
    writes = [y, h, c, gates, cells]
    return [
        pack,
        Entry(
            step,
            code,
            words.arguments,
            reads,
            writes,
            rows=sizes.samples,
            by_row=_owned(reads, writes, sizes.samples, {0, 4, 5, 6}),
            kernel="lstm",
            cost=sizes.product_cost + 5 * sizes.cell_cost,
            keeps_alive=[status],
        ),
    ]
