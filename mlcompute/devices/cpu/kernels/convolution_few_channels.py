"""Convolutions whose result has few channels: gradients of inputs, which transposed convolutions to an image compute,
and convolutions with stride one, to an image or a score.

    dy (n, oh, ow, o)     w (o, c, kh, kw)     ->     dx (n, h, w, c), c at most half a vector

    columns = rows of dy (ow, o) times w (o, kh kw c)     dx = every window's rows of taps (kw c), added where they lie

    pack filters | per band of dx: clear it; per some rows of dy: multiply, add

A bar is a barrier. A vector of channels would be filled up with zeros, which are multiplied, too. Here the taps of a
window are side by side, and a row of them is a piece of a row of dx. Sums run in the same order on any thread.

With stride one a convolution is the same of x and y in place of dy and dx, with the filters rotated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, aligned, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, add_line, fill_line
from mlcompute.devices.cpu.gemm.packed_gemm import FLOPS_PER_NS, call_packed_gemm, packed_gemm, padded, panel_width
from mlcompute.devices.cpu.kernels.convolution_windows import taps_inside
from mlcompute.devices.cpu.kernels.winograd_sizes import winograd_sizes
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import FLOAT32, Shape, Step

#: Pixels of the source that are multiplied at a time, if a row has not more.
_PIXELS = 96
#: Windows that a band has below each other at least.
_LEAST_WINDOWS = 4
#: A convolution of fewer channels leaves the product of a pixel and the filters little to do.
_LEAST_DEPTH = 8
#: Products of pixels and taps per one that is added to a pixel: filters as large as an image have many beside it.
_MOST_PRODUCTS = 16


class FewChannels(NamedTuple):
    """A pixel of the source adds a window to the result; shapes with channels first.

    taps       of a filter, down and across
    down       rows of the result from tap to tap
    top, left  rows and columns of windows before the first of the result
    rotated    are filters of a convolution, (channels of the result, of the source, taps), and not of its gradient?
    """

    source: Shape
    result: Shape
    taps: tuple[int, int]
    strides: tuple[int, int]
    down: int
    top: int
    left: int
    rotated: bool

    @property
    def depth(self) -> int:
        return self.source[1]

    @property
    def channels(self) -> int:
        return self.result[1]

    @property
    def columns(self) -> int:
        """Taps of all channels."""
        return math.prod(self.taps) * self.channels

    @property
    def piece(self) -> int:
        """Floats of a row of taps."""
        return self.taps[1] * self.channels

    @property
    def rows(self) -> int:
        """Rows of the source that are multiplied at a time."""
        return min(self.source[2], max(1, _PIXELS // self.source[3]))

    @property
    def inside(self) -> tuple[int, int]:
        """[first, last) of the windows of a row that lie inside the image from left to right."""
        count, stride = self.source[3], self.strides[1]
        first = max(0, min(count, -(-self.left // stride)))
        return first, max(first, min(count, (self.result[3] - self.taps[1] + self.left) // stride + 1))

    @property
    def reach(self) -> int:
        """Rows from the first tap to the last."""
        return self.down * (self.taps[0] - 1)

    @property
    def bands(self) -> int:
        """Of the rows of a sample, for threads to share where samples are few. Two bands multiply the same `reach`."""
        wanted = -(-planned_threads() // self.source[0])
        return max(1, min(wanted, self.result[2] // (_LEAST_WINDOWS * (self.reach + 1))))

    @property
    def packed_floats(self) -> int:
        return aligned(padded(self.columns) * self.depth)

    @property
    def thread_parts(self) -> dict[str, int]:
        return {"columns": self.rows * self.source[3] * self.columns}

    @property
    def nbytes(self) -> int:
        """Bytes for the packed filters, and for every thread's columns."""
        return 4 * self.packed_floats + threads_bytes(self.thread_parts)


def few_channels(step: Step) -> FewChannels | None:
    """The sizes of a step that this kernel computes; None for all others."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    if step.op.name == "convolution_weight_gradient" or len(w) != 4 or a["groups"] != 1 or a["dilations"][1] != 1:
        return None
    if any(value.dtype != FLOAT32 for value in (*step.inputs, *step.results)):
        return None
    rotated = step.op.name == "convolution"
    source, result = (x, y) if rotated else (y, x)
    if 2 * result[1] > vector_lanes() or w[2] * w[3] == 1:
        return None
    if 2 * result[1] == vector_lanes() and winograd_sizes(step) is not None:  # which wastes no more then than it saves
        return None
    down, (top, _, left, _), taps = a["dilations"][0], a["padding"], (w[2], w[3])
    if not rotated:
        return FewChannels(source, result, taps, a["strides"], down, top, left, rotated)
    if set(a["strides"]) != {1} or source[1] < _LEAST_DEPTH or source[1] <= result[1]:
        return None
    if taps_inside(step) * _MOST_PRODUCTS < math.prod(x[2:]) * math.prod(w[2:]):
        return None
    return FewChannels(source, result, taps, (1, 1), down, down * (w[2] - 1) - top, w[3] - 1 - left, rotated)


def few_channels_entries(
    step: Step, operands: Operands, images: Sequence[Operand], result: Operand, sizes: FewChannels
) -> Sequence[Entry]:
    """dx, or y; operands are dense."""
    image, weights = images
    packed = operands.workspace(step, 0, 4 * sizes.packed_floats)
    rest = operands.workspace(step, 4 * sizes.packed_floats, sizes.nbytes - 4 * sizes.packed_floats)
    multiply = _multiply_entry(step, operands, sizes, image, packed, result, rest)
    return [_pack_entry(step, sizes, weights, packed), multiply]


def _pack_entry(step: Step, sizes: FewChannels, weights: Operand, packed: Operand) -> Entry:
    """Filters as panels of (channels of the source; taps, channels of the result); threads share the former."""
    code = Code("few_channels_pack")
    args = KernelArguments(code)
    panel = panel_width(sizes.columns) * vector_lanes()
    per_filter = weights.shape[1] * math.prod(sizes.taps)
    depth, channels, taps, by_filter = args.numbers([sizes.depth, sizes.channels, math.prod(sizes.taps), per_filter])
    by_depth, by_channel = (taps, by_filter) if sizes.rotated else (by_filter, taps)
    columns, filled = args.numbers([sizes.columns, padded(sizes.columns)])
    source, target = args.pointer(weights), args.pointer(packed)
    begin, end = code.share(depth)
    with code.loop(begin, end) as k, code.loop(0, filled) as column:
        exists = code.let(f"icmp slt i64 {column}, {columns}")
        tap, channel = code.div(column, channels), code.rem(column, channels)
        if sizes.rotated:
            tap = code.sub(code.sub(taps, 1), tap)
        place = code.add(code.add(code.mul(k, by_depth), code.mul(channel, by_channel)), tap)
        # Beyond the last column nothing is read: the first element stands in and is not used.
        place = code.let(f"select i1 {exists}, i64 {place}, i64 0")
        value = code.load(code.at(source, place, "float"), "float")
        value = code.let(f"select i1 {exists}, float {value}, float 0.0")
        first = code.mul(code.add(code.mul(code.div(column, panel), depth), k), panel)
        code.store(code.at(target, code.add(first, code.rem(column, panel)), "float"), "float", value)
    return Entry(step, code, args.values, [weights], [packed], kernel="pack filters", cost=2.0 * sizes.packed_floats)


def _multiply_entry(
    step: Step,
    operands: Operands,
    sizes: FewChannels,
    image: Operand,
    packed: Operand,
    result: Operand,
    rest: Operand,
) -> Entry:
    code = Code("few_channels")
    args = KernelArguments(code)
    memory = ThreadWorkspace(args, rest, sizes.thread_parts)
    samples, depth, columns = args.numbers([sizes.source[0], sizes.depth, sizes.columns])
    channels, height, width = args.numbers(sizes.result[1:])
    rows, count = args.numbers(sizes.source[2:])
    row_step, per_row, bands = args.numbers([sizes.rows, sizes.result[3] * sizes.channels, sizes.bands])
    taps_down, taps_across, piece = args.numbers([*sizes.taps, sizes.piece])
    stride_down, stride_across, down, top, left = args.numbers([*sizes.strides, sizes.down, sizes.top, sizes.left])
    first_inside, last_inside, reach = args.numbers([*sizes.inside, sizes.reach])
    source, filters, target = (args.pointer(operand) for operand in (image, packed, result))
    multiply = args.pointer(packed_gemm(sizes.columns))

    def add_inside(line: str, window: str, at: str) -> None:
        """A row of taps, in vectors without a mask."""
        place = code.mul(code.sub(code.mul(window, stride_across), left), channels)
        taps, to = Line(code, at, "float"), Line(code, code.at(line, place, "float"), "float")
        start, lanes = 0, vector_lanes()
        while start < sizes.piece:
            while start + lanes > sizes.piece:
                lanes //= 2
            to.store(start, to.load(start, lanes=lanes) + taps.load(start, lanes=lanes))
            start += lanes

    def add_at_border(line: str, window: str, at: str) -> None:
        """The part of a row of taps that lies over the image."""
        place = code.sub(code.mul(window, stride_across), left)
        low, high = (_between(code, code.sub(edge, place), taps_across) for edge in ("0", width))
        to = Line(code, code.at(line, code.mul(place, channels), "float"), "float")
        add_line(code, Line(code, at, "float"), to, code.mul(low, channels), code.mul(high, channels))

    # Neighbours that overlap are not added one right after the other: the second would wait until the first is stored.
    apart = max(1, -(-sizes.taps[1] // sizes.strides[1]))
    by_sample = sizes.bands == 1
    begin, end = code.share(samples if by_sample else code.mul(samples, bands), 1, memory.max_threads)
    with code.loop(begin, end) as unit:
        sample, band = code.div(unit, bands), code.rem(unit, bands)
        band_rows = [code.div(code.mul(height, edge), bands) for edge in (band, code.add(band, 1))]
        tall = code.sub(band_rows[1], band_rows[0])
        to_sample = code.at(target, code.mul(sample, code.mul(height, per_row)), "float")
        cleared = Line(code, code.at(to_sample, code.mul(band_rows[0], per_row), "float"), "float")
        fill_line(code, cleared, 0, code.mul(tall, per_row))
        # Rows of the source whose windows have a row in the band.
        above, below = code.sub(code.add(band_rows[0], top), reach), code.add(band_rows[1], top)
        first_row, last_row = (code.minimum(_rows_before(code, edge, stride_down), rows) for edge in (above, below))
        with code.loop(first_row, last_row, row_step) as block:
            block_rows = code.minimum(code.sub(last_row, block), row_step)
            first = code.mul(code.mul(code.add(code.mul(sample, rows), block), count), depth)
            extents, a = (code.mul(block_rows, count), columns, depth), (code.at(source, first, "float"), depth, 1)
            call_packed_gemm(code, multiply, extents, a, filters, (memory["columns"], columns))
            with code.loop(0, block_rows) as row, code.loop(0, taps_down) as tap:
                y = code.add(code.sub(code.mul(code.add(block, row), stride_down), top), code.mul(tap, down))
                pieces = code.at(memory["columns"], code.mul(code.mul(row, count), columns), "float")
                pieces = code.at(pieces, code.mul(tap, piece), "float")
                # Unsigned: a row before the first is a very large number.
                with code.when(code.let(f"icmp ult i64 {code.sub(y, band_rows[0])}, {tall}")):
                    line = code.at(to_sample, code.mul(y, per_row), "float")
                    for offset in range(apart):
                        with code.loop(code.add(first_inside, offset), last_inside, apart) as window:
                            add_inside(line, window, code.at(pieces, code.mul(window, columns), "float"))
                    for bounds in (("0", first_inside), (last_inside, count)):
                        with code.loop(*bounds) as window:
                            add_at_border(line, window, code.at(pieces, code.mul(window, columns), "float"))
    pixels = sizes.source[0] * math.prod(sizes.source[2:])
    return Entry(
        step,
        code,
        args.values,
        reads=[image, packed],
        writes=[result],
        rows=sizes.source[0] if by_sample and operands.threads <= memory.count else 0,
        by_row={0, 2},
        kernel="gemm of taps, added",
        cost=pixels * sizes.columns * (2.0 * sizes.depth / FLOPS_PER_NS + 0.1),
        scratch=memory.scratch,
    )


def _rows_before(code: Code, row: str, stride: str) -> str:
    """Rows of windows that begin before a row, counted from the first window."""
    return code.div(code.add(code.intrinsic("smax", "i64", row, "0"), code.sub(stride, 1)), stride)


def _between(code: Code, number: str, most: str) -> str:
    """At least 0 and at most that."""
    positive = code.let(f"select i1 {code.let(f'icmp slt i64 {number}, 0')}, i64 0, i64 {number}")
    return code.minimum(positive, most)
