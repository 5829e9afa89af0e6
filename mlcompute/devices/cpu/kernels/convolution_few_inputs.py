"""The gradient of the input of a convolution that has few channels: what a transposed convolution to an image computes.

    dy (n, oh, ow, o)     w (o, c, kh, kw)     ->     dx (n, h, w, c), c less than half a vector

    columns = rows of dy (ow, o) times w (o, kh kw c)     dx = every window's rows of taps (kw c), added where they lie

    pack filters | per sample: clear dx; per some rows of dy: multiply, add

A bar is a barrier. A vector of channels would be filled up with zeros, which are multiplied, too. Here the taps of a
window are side by side, and a row of them is a piece of a row of dx. Sums run in the same order on any thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, aligned, thread_floats
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, add_line, fill_line
from mlcompute.devices.cpu.gemm.packed_gemm import FLOPS_PER_NS, call_packed_gemm, packed_gemm, padded, panel_width
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import FLOAT32, Shape, Step

#: Pixels of dy that are multiplied at a time, if a row has not more.
_PIXELS = 96


class FewInputs(NamedTuple):
    """Shapes with channels first, as the op has them, and how windows lie."""

    x: Shape
    w: Shape
    y: Shape
    strides: tuple[int, int]
    down: int
    top: int
    left: int

    @property
    def columns(self) -> int:
        """Taps of all channels."""
        return math.prod(self.w[1:])

    @property
    def taps(self) -> int:
        """Floats of a row of taps."""
        return self.w[3] * self.w[1]

    @property
    def rows(self) -> int:
        """Rows of dy that are multiplied at a time."""
        return min(self.y[2], max(1, _PIXELS // self.y[3]))

    @property
    def inside(self) -> tuple[int, int]:
        """[first, last) of the windows of a row that lie inside the image from left to right."""
        count, stride = self.y[3], self.strides[1]
        first = min(count, -(-self.left // stride))
        return first, max(first, min(count, (self.x[3] - self.w[3] + self.left) // stride + 1))

    @property
    def packed_floats(self) -> int:
        return aligned(padded(self.columns) * self.w[0])

    @property
    def thread_parts(self) -> dict[str, int]:
        return {"columns": self.rows * self.y[3] * self.columns}

    @property
    def nbytes(self) -> int:
        """Bytes for the packed filters, and for every thread's columns."""
        return 4 * (self.packed_floats + thread_floats(self.thread_parts) * planned_threads())


def few_inputs(step: Step) -> FewInputs | None:
    """The sizes of a step that this kernel computes; None for all others."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    if step.op.name != "convolution_input_gradient" or len(w) != 4 or a["groups"] != 1 or a["dilations"][1] != 1:
        return None
    if any(value.dtype != FLOAT32 for value in (*step.inputs, *step.results)):
        return None
    if 2 * w[1] > vector_lanes() or w[2] * w[3] == 1:
        return None
    top, _, left, _ = a["padding"]
    return FewInputs(x, w, y, a["strides"], a["dilations"][0], top, left)


def few_inputs_entries(
    step: Step, operands: Operands, sizes: FewInputs, image: Operand, weights: Operand, result: Operand
) -> Sequence[Entry]:
    """dx; operands are dense."""
    packed = operands.workspace(step, 0, 4 * sizes.packed_floats)
    rest = operands.workspace(step, 4 * sizes.packed_floats, sizes.nbytes - 4 * sizes.packed_floats)
    multiply = _multiply_entry(step, operands, sizes, image, packed, result, rest)
    return [_pack_entry(step, sizes, weights, packed), multiply]


def _pack_entry(step: Step, sizes: FewInputs, weights: Operand, packed: Operand) -> Entry:
    """Filters (outputs, inputs, taps) as panels of (outputs; taps and inputs); threads share the outputs."""
    code = Code("few_inputs_pack")
    args = KernelArguments(code)
    panel = panel_width(sizes.columns) * vector_lanes()
    outputs, inputs, taps = args.numbers([sizes.w[0], sizes.w[1], sizes.w[2] * sizes.w[3]])
    columns, filled = args.numbers([sizes.columns, padded(sizes.columns)])
    source, target = args.pointer(weights), args.pointer(packed)
    begin, end = code.share(outputs)
    with code.loop(begin, end) as output, code.loop(0, filled) as column:
        exists = code.let(f"icmp slt i64 {column}, {columns}")
        place = code.add(code.mul(code.rem(column, inputs), taps), code.div(column, inputs))
        # Beyond the last column nothing is read: the first element stands in and is not used.
        place = code.let(f"select i1 {exists}, i64 {place}, i64 0")
        value = code.load(code.at(source, code.add(code.mul(output, columns), place), "float"), "float")
        value = code.let(f"select i1 {exists}, float {value}, float 0.0")
        first = code.mul(code.add(code.mul(code.div(column, panel), outputs), output), panel)
        code.store(code.at(target, code.add(first, code.rem(column, panel)), "float"), "float", value)
    return Entry(step, code, args.values, [weights], [packed], kernel="pack filters", cost=2.0 * sizes.packed_floats)


def _multiply_entry(
    step: Step,
    operands: Operands,
    sizes: FewInputs,
    image: Operand,
    packed: Operand,
    result: Operand,
    rest: Operand,
) -> Entry:
    code = Code("few_inputs")
    args = KernelArguments(code)
    memory = ThreadWorkspace(args, rest, sizes.thread_parts)
    samples, outputs, columns = args.numbers([sizes.x[0], sizes.w[0], sizes.columns])
    inputs, height, width = args.numbers(sizes.x[1:])
    rows, count = args.numbers(sizes.y[2:])
    row_step, per_row, per_sample = args.numbers([sizes.rows, sizes.x[3] * sizes.x[1], math.prod(sizes.x[1:])])
    taps_down, taps_across, taps = args.numbers([*sizes.w[2:], sizes.taps])
    stride_down, stride_across, down, top, left = args.numbers([*sizes.strides, sizes.down, sizes.top, sizes.left])
    first_inside, last_inside = args.numbers(sizes.inside)
    source, filters, target = (args.pointer(operand) for operand in (image, packed, result))
    multiply = args.pointer(packed_gemm(sizes.columns))

    def add_inside(line: str, window: str, at: str) -> None:
        """A row of taps, in vectors without a mask."""
        place = code.mul(code.sub(code.mul(window, stride_across), left), inputs)
        piece, to = Line(code, at, "float"), Line(code, code.at(line, place, "float"), "float")
        start, lanes = 0, vector_lanes()
        while start < sizes.taps:
            while start + lanes > sizes.taps:
                lanes //= 2
            to.store(start, to.load(start, lanes=lanes) + piece.load(start, lanes=lanes))
            start += lanes

    def add_at_border(line: str, window: str, at: str) -> None:
        """The part of a row of taps that lies over the image."""
        place = code.sub(code.mul(window, stride_across), left)
        low, high = (_between(code, code.sub(edge, place), taps_across) for edge in ("0", width))
        to = Line(code, code.at(line, code.mul(place, inputs), "float"), "float")
        add_line(code, Line(code, at, "float"), to, code.mul(low, inputs), code.mul(high, inputs))

    # Neighbours that overlap are not added one right after the other: the second would wait until the first is stored.
    apart = max(1, -(-sizes.w[3] // sizes.strides[1]))
    begin, end = code.share(samples, 1, memory.max_threads)
    with code.loop(begin, end) as sample:
        dx = code.at(target, code.mul(sample, per_sample), "float")
        fill_line(code, Line(code, dx, "float"), 0, per_sample)
        with code.loop(0, rows, row_step) as block:
            tall = code.minimum(code.sub(rows, block), row_step)
            first = code.mul(code.mul(code.add(code.mul(sample, rows), block), count), outputs)
            extents, a = (code.mul(tall, count), columns, outputs), (code.at(source, first, "float"), outputs, 1)
            call_packed_gemm(code, multiply, extents, a, filters, (memory["columns"], columns))
            with code.loop(0, tall) as row, code.loop(0, taps_down) as tap:
                y = code.add(code.sub(code.mul(code.add(block, row), stride_down), top), code.mul(tap, down))
                pieces = code.at(memory["columns"], code.mul(code.mul(row, count), columns), "float")
                pieces = code.at(pieces, code.mul(tap, taps), "float")
                # Unsigned: a row before the first is a very large number.
                with code.when(code.let(f"icmp ult i64 {y}, {height}")):
                    line = code.at(dx, code.mul(y, per_row), "float")
                    for offset in range(apart):
                        with code.loop(code.add(first_inside, offset), last_inside, apart) as window:
                            add_inside(line, window, code.at(pieces, code.mul(window, columns), "float"))
                    for bounds in (("0", first_inside), (last_inside, count)):
                        with code.loop(*bounds) as window:
                            add_at_border(line, window, code.at(pieces, code.mul(window, columns), "float"))
    pixels = sizes.y[0] * math.prod(sizes.y[2:])
    return Entry(
        step,
        code,
        args.values,
        reads=[image, packed],
        writes=[result],
        rows=sizes.x[0] if operands.threads <= memory.count else 0,
        by_row={0, 2},
        kernel="gemm of taps, added",
        cost=pixels * sizes.columns * (2.0 * sizes.w[0] / FLOPS_PER_NS + 0.1),
        scratch=[memory.buffer],
    )


def _between(code: Code, number: str, most: str) -> str:
    """At least 0 and at most that."""
    positive = code.let(f"select i1 {code.let(f'icmp slt i64 {number}, 0')}, i64 0, i64 {number}")
    return code.minimum(positive, most)
