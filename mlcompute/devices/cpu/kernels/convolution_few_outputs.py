"""The gradient of the filters of a convolution with few outputs and stride one, as one to an image or a score.

    x (n, h, w, c)     dy (n, oh, ow, o), o at most half a vector     ->     dw (o, c, kh, kw)

    sums (kh, kw o, c) += a row of dy, at every distance of a tap from left to right, times a row of x (w, c)

    per slice of the rows of x, and row of taps: copy the row of dy that it meets, multiply, add | sum of slices

A bar is a barrier. A vector of outputs would be filled up with zeros, which are multiplied, too. Here the outputs are
rows of a product, beside the taps: pixels of dy are neighbours, so those under the next tap begin one pixel later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, aligned, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, copy_line, fill_line
from mlcompute.devices.cpu.gemm.packed_gemm import (
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    pack_rows,
    packed_gemm,
    padded,
    panel_width,
)
from mlcompute.devices.cpu.kernels.slice_sums import sum_of_slices_entry
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import FLOAT32, Shape, Step

#: Bytes for the sums of all slices; a single one may take more.
_SUMS = 1 << 20


class FewOutputs(NamedTuple):
    """Shapes with channels first, as the op has them, and how windows lie."""

    x: Shape
    w: Shape
    y: Shape
    down: int
    top: int
    left: int

    @property
    def piece(self) -> int:
        """Rows of a product: the outputs of a row of taps."""
        return self.w[3] * self.w[0]

    @property
    def copied(self) -> tuple[int, int, int]:
        """Of a row of dy: zeros before it, its first pixel, and how many pixels there are under windows of a row."""
        before, width = self.w[3] - 1 - self.left, self.x[3] + self.w[3] - 1
        zeros, first = max(0, before), max(0, -before)
        return zeros, first, max(0, min(self.y[3] - first, width - zeros))

    @property
    def is_packed(self) -> bool:
        """Are rows of x one panel as they lie?"""
        return panel_width(self.w[1]) * vector_lanes() == self.w[1]

    @property
    def floats(self) -> int:
        """Of the sums of a slice."""
        return aligned(math.prod(self.w))

    @property
    def slices(self) -> int:
        """Parts of the rows with sums of their own: a fact of the machine, not of the number of threads."""
        return max(1, min(machine_slices(), self.x[0] * self.x[2], _SUMS // (4 * self.floats)))

    @property
    def thread_parts(self) -> dict[str, int]:
        parts = {"dy": (self.x[3] + self.w[3] - 1) * self.w[0]}
        return parts if self.is_packed else {**parts, "x": self.x[3] * padded(self.w[1])}

    @property
    def nbytes(self) -> int:
        """Bytes for the sums of all slices, and for every thread's rows."""
        return 4 * self.slices * self.floats + threads_bytes(self.thread_parts)


def few_outputs(step: Step) -> FewOutputs | None:
    """The sizes of a step that this kernel computes; None for all others."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    if step.op.name != "convolution_weight_gradient" or len(w) != 4 or a["groups"] != 1:
        return None
    if set(a["strides"]) != {1} or a["dilations"][1] != 1 or w[2] * w[3] == 1:
        return None
    if any(value.dtype != FLOAT32 for value in (*step.inputs, *step.results)):
        return None
    # Vectors are filled with inputs.
    if 2 * w[0] > vector_lanes() or 2 * w[1] < vector_lanes() or w[1] <= w[0]:
        return None
    return FewOutputs(x, w, y, a["dilations"][0], a["padding"][0], a["padding"][2])


def few_outputs_entries(
    step: Step, operands: Operands, images: Sequence[Operand], result: Operand, sizes: FewOutputs
) -> Sequence[Entry]:
    """dw; operands are dense."""
    nbytes = 4 * sizes.slices * sizes.floats
    sums = operands.workspace(step, 0, nbytes)
    rest = operands.workspace(step, nbytes, sizes.nbytes - nbytes)
    outputs, inputs, down, across = sizes.w
    shape, strides = (down, across, outputs, inputs), (across, -1, inputs * down * across, down * across)
    summed = sum_of_slices_entry(step, sums, result, (sizes.slices, sizes.floats), shape, strides, first=across - 1)
    return [_sums_entry(step, sizes, images, sums, rest), summed]


def _sums_entry(step: Step, sizes: FewOutputs, images: Sequence[Operand], sums: Operand, rest: Operand) -> Entry:
    """Of every slice: (tap down; tap across from the last to the first, output; input)."""
    code = Code("few_outputs")
    args = KernelArguments(code)
    memory = ThreadWorkspace(args, rest, sizes.thread_parts)
    x, dy, target = (args.pointer(operand) for operand in (*images, sums))
    outputs, inputs, taps_down, _ = args.numbers(sizes.w)
    height, width, rows, columns = args.numbers([*sizes.x[2:], *sizes.y[2:]])
    down, top, slices, floats, piece = args.numbers([sizes.down, sizes.top, sizes.slices, sizes.floats, sizes.piece])
    total, dy_floats = args.numbers([sizes.x[0] * sizes.x[2], sizes.thread_parts["dy"]])
    zeros, first_pixel, copied = (args.number(pixels * sizes.w[0]) for pixels in sizes.copied)
    multiply, pack = (args.pointer(function(sizes.w[1])) for function in (packed_gemm, pack_rows))
    begin, end = code.share(slices, 1, memory.max_threads, in_pieces=True)
    with code.when(code.let(f"icmp slt i64 {begin}, {end}")):  # zeros beside the pixels stay
        fill_line(code, Line(code, memory["dy"], "float"), 0, dy_floats)
    with code.loop(begin, end) as number:
        own = code.at(target, code.mul(number, floats), "float")
        fill_line(code, Line(code, own, "float"), 0, floats)
        bounds = (code.div(code.mul(total, edge), slices) for edge in (number, code.add(number, 1)))
        with code.loop(*bounds) as row:
            sample, y = code.div(row, height), code.rem(row, height)
            pixels = code.at(x, code.mul(code.mul(row, width), inputs), "float")
            if not sizes.is_packed:
                call_pack(code, pack, (0, inputs), width, (pixels, inputs), memory["x"])
                pixels = memory["x"]
            with code.loop(0, taps_down) as tap:
                under = code.sub(code.add(y, top), code.mul(tap, down))
                # Unsigned: a row before the first is a very large number.
                with code.when(code.let(f"icmp ult i64 {under}, {rows}")):
                    line = code.mul(code.add(code.mul(sample, rows), under), code.mul(columns, outputs))
                    source = Line(code, code.at(dy, code.add(line, first_pixel), "float"), "float")
                    copied_to = Line(code, code.at(memory["dy"], zeros, "float"), "float")
                    copy_line(code, source, copied_to, 0, copied)
                    extents, a = (piece, inputs, width), (memory["dy"], 1, outputs)
                    c = code.at(own, code.mul(code.mul(tap, piece), inputs), "float"), inputs
                    call_packed_gemm(code, multiply, extents, a, pixels, c, accumulate=1)
    flops = 2.0 * math.prod(sizes.x) * math.prod(sizes.w[2:]) * sizes.w[0]
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[sums],
        scratch=memory.scratch,
        kernel=f"gemm of outputs and taps x{sizes.slices}",
        cost=1.5 * flops / FLOPS_PER_NS,
        in_pieces=True,
    )
