"""The gradient of large filters as a matmul, without sums of slices: dw = dyᵀ columns(x).

    x (n, h, w, c) and dy (n, oh, ow, o), channels last     ->     dw (o, c, kh, kw)

Threads share blocks of dw, each of some outputs and some inputs with all their taps. Such a block is summed over all
pixels: a tap's inputs under so many windows are packed, multiplied by dy, and added to sums that stay in the cache.
Sums run in the same order on any number of threads. Slices of the batch, as oneDNN gets them, would each need sums as
large as the filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, thread_floats
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, splat_constant
from mlcompute.devices.cpu.gemm.packed_gemm import DEPTH, FLOPS_PER_NS, call_packed_gemm, packed_gemm, panel_width
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.images import first_shape
from mlcompute.ops.op import Shape, Step

#: Bytes of the sums of a block of dw, about.
_BLOCK_BYTES = 160_000
#: Fewest outputs of a block: its inputs are packed again for every other block.
_LEAST_OUTPUTS = 16


@dataclass(frozen=True)
class Columns:
    """A weight gradient: shapes channels first, as the op has them, and how many outputs a block has."""

    x: Shape
    w: Shape
    y: Shape
    outputs: int

    @property
    def taps(self) -> int:
        return self.w[2] * self.w[3]

    @property
    def panel(self) -> int:
        """Inputs of a block."""
        return panel_width(self.w[1]) * vector_lanes()

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks along outputs and along inputs."""
        return -(-self.w[0] // self.outputs), -(-self.w[1] // self.panel)

    @property
    def sums(self) -> dict[str, int]:
        """A thread's own memory."""
        return {"sums": self.outputs * self.taps * self.panel}


def columns_of(step: Step) -> Columns | None:
    """The sizes of a weight gradient that this kernel computes; None for all others."""
    a = step.attributes
    x, w, y = first_shape(step.inputs[0].shape), a["shape"], first_shape(step.inputs[1].shape)
    if len(w) != 4 or a["groups"] != 1 or w[1] % vector_lanes() or w[0] < _LEAST_OUTPUTS:
        return None
    whole = Columns(x, w, y, w[0])
    most = max(_LEAST_OUTPUTS, _BLOCK_BYTES // (4 * whole.taps * whole.panel))
    # As large as the cache allows, and so many that threads have about as much to do.
    candidates = [Columns(x, w, y, outputs) for outputs in range(_LEAST_OUTPUTS, min(most, w[0]) + 1, 8)]

    def cost(sizes: Columns) -> float:
        rounds = math.ceil(math.prod(sizes.blocks) / planned_threads())
        return rounds * (sizes.outputs + 8)

    return min(candidates, key=cost)


def columns_workspace(sizes: Columns) -> int:
    """Bytes for the sums of every thread."""
    return 4 * thread_floats(sizes.sums) * planned_threads()


def columns_entry(step: Step, operands: Operands, sizes: Columns, images: Sequence[Operand], result: Operand) -> Entry:
    """For operands that are dense."""
    code = Code("convolution_columns")
    args = KernelArguments(code)
    memory = ThreadWorkspace(args, operands.workspace(step, 0, columns_workspace(sizes)), sizes.sums)
    a, lanes = step.attributes, vector_lanes()
    height, width, pixels, taps, taps_across = args.numbers(
        [*sizes.x[2:], sizes.y[0] * sizes.y[2] * sizes.y[3], sizes.taps, sizes.w[3]]
    )
    rows, columns, outputs, inputs, block = args.numbers([*sizes.y[2:], sizes.w[0], sizes.w[1], sizes.outputs])
    down, across, dilated_down, dilated_across = args.numbers([*a["strides"], *a["dilations"]])
    top, left = args.numbers([a["padding"][0], a["padding"][2]])
    x, dy, dw = (args.pointer(operand) for operand in (*images, result))
    multiply = args.pointer(packed_gemm(sizes.w[1]))
    count, per_output = args.numbers([math.prod(sizes.blocks), sizes.blocks[1]])
    panel = sizes.panel
    packed = code.aligned_buffer(DEPTH * panel)
    corners = [code.variable(f"[{DEPTH} x i64]", "zeroinitializer") for _ in range(3)]  # sample, y and x of windows
    begin, end = code.share(count, 1, memory.max_threads)
    with code.loop(begin, end) as unit:
        output = code.mul(code.div(unit, per_output), block)
        channel = code.mul(code.rem(unit, per_output), panel)
        tall = code.minimum(code.sub(outputs, output), block)
        wide = code.minimum(code.sub(inputs, channel), panel)
        with code.loop(0, pixels, DEPTH) as start:
            steps = code.minimum(code.sub(pixels, start), DEPTH)
            with code.loop(0, steps) as index:
                pixel = code.add(start, index)
                line = code.div(pixel, columns)
                places = (
                    code.mul(code.div(line, rows), code.mul(height, width)),
                    code.sub(code.mul(code.rem(line, rows), down), top),
                    code.sub(code.mul(code.rem(pixel, columns), across), left),
                )
                for corner, place in zip(corners, places, strict=True):
                    code.store(code.at(corner, index, "i64"), "i64", place)
            source = code.at(dy, code.add(code.mul(start, outputs), output), "float")
            with code.loop(0, taps) as tap:
                tap_y = code.mul(code.div(tap, taps_across), dilated_down)
                tap_x = code.mul(code.rem(tap, taps_across), dilated_across)
                with code.loop(0, steps) as index:
                    sample, y_, x_ = (code.load(code.at(corner, index, "i64"), "i64") for corner in corners)
                    y_, x_ = code.add(y_, tap_y), code.add(x_, tap_x)
                    # Unsigned comparisons: a row before the first is a very large number.
                    inside = code.let(
                        f"and i1 {code.let(f'icmp ult i64 {y_}, {height}')}, {code.let(f'icmp ult i64 {x_}, {width}')}"
                    )
                    at = code.mul(code.add(sample, code.add(code.mul(y_, width), x_)), inputs)
                    target = Line(code, code.at(packed, code.mul(index, panel), "float"), "float")
                    with code.when(inside):
                        pixel_line = Line(code, code.at(x, code.add(at, channel), "float"), "float")
                        with code.loop(0, wide, lanes) as vector:
                            target.store(vector, pixel_line.load(vector))
                    with code.when(code.let(f"xor i1 {inside}, true")), code.loop(0, wide, lanes) as vector:
                        target.store(vector, splat_constant(code, 0.0))
                sums = code.at(memory["sums"], code.mul(tap, panel), "float"), code.mul(taps, panel)
                extents = (tall, wide, steps)
                call_packed_gemm(code, multiply, extents, (source, 1, outputs), packed, sums, accumulate=start)
        with code.loop(0, tall) as row, code.loop(0, taps) as tap, code.loop(0, wide, lanes) as vector:
            at = code.add(code.mul(code.add(code.mul(row, taps), tap), panel), vector)
            value = Line(code, code.at(memory["sums"], at, "float"), "float").load(0)
            first = code.add(code.mul(code.add(output, row), inputs), code.add(channel, vector))
            target = Line(code, code.at(dw, code.add(code.mul(first, taps), tap), "float"), "float", taps)
            target.store(0, value)
    flops = 2.0 * math.prod(sizes.w) * sizes.y[0] * sizes.y[2] * sizes.y[3]
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[result],
        kernel=f"gemm of columns, blocks of {sizes.outputs} outputs",
        cost=flops / FLOPS_PER_NS,
        scratch=[memory.buffer],
    )
