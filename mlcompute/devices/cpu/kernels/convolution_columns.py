"""Convolutions with large filters as matmuls over the pixels under their windows.

    x (n, h, w, c), channels last     w (o, c, kh, kw)     columns (pixels of y, c kh kw)     ->     y (n, oh, ow, o)

    y = columns(x) wᵀ      columns(dx) = dy w      dw = dyᵀ columns(x)

Where y has few pixels, filters are most of what is read: every thread reads a part of them, once, as they lie. oneDNN
would bring them into a format of its own first, and read all of them for every slice of the batch.

The gradient of filters needs no columns in memory: threads share blocks of dw, each of some outputs and some inputs
with all their taps, or where these are few blocks, with some of them. A tap's inputs under some windows are packed,
multiplied by dy, and added to sums that stay in the cache. Slices of the batch, as oneDNN gets them, would each need
sums as large as the filters.

Sums run in the same order on any number of threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, thread_floats
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, copy_line, splat_constant
from mlcompute.devices.cpu.gemm.matmul import gemm_entry
from mlcompute.devices.cpu.gemm.packed_gemm import DEPTH, FLOPS_PER_NS, call_packed_gemm, packed_gemm, panel_width
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import FLOAT32, Shape, Step

#: Bytes of the sums of a block of dw, about.
_BLOCK_BYTES = 160_000
#: Fewest outputs of a block: its inputs are packed again for every other block.
_LEAST_OUTPUTS = 16
#: Bytes from which on filters are large.
_LARGE = 1 << 19


class Columns(NamedTuple):
    """A convolution or one of its gradients: shapes with channels first, as the op has them."""

    x: Shape
    w: Shape
    y: Shape

    @property
    def taps(self) -> int:
        return self.w[2] * self.w[3]

    @property
    def depth(self) -> int:
        """Elements of a filter."""
        return self.w[1] * self.taps

    @property
    def pixels(self) -> int:
        """Pixels of y."""
        return self.y[0] * self.y[2] * self.y[3]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return 4 * self.pixels * self.depth

    @property
    def panel(self) -> int:
        """Inputs of a block of dw."""
        return panel_width(self.w[1]) * vector_lanes()

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and taps of a block of dw: as the cache allows, and so that threads have about as much to do."""
        most = max(_LEAST_OUTPUTS, _BLOCK_BYTES // (4 * self.taps * self.panel))

        def cost(block: tuple[int, int]) -> tuple[int, int]:
            outputs, taps = block
            blocks = -(-self.w[0] // outputs) * -(-self.w[1] // self.panel) * (self.taps // taps)
            # dy is read once for all taps of a block, which takes about as long as one of them.
            return math.ceil(blocks / planned_threads()) * (taps + 1) * (outputs + 8), -taps

        taps = [number for number in range(1, self.taps + 1) if self.taps % number == 0]
        return min(itertools.product(range(_LEAST_OUTPUTS, min(most, self.w[0]) + 1, 8), taps), key=cost)


def columns_of(step: Step) -> Columns | None:
    """The sizes of a step that these kernels compute; None for all others."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    if len(w) != 4 or a["groups"] != 1 or w[1] % vector_lanes() or w[0] < _LEAST_OUTPUTS:
        return None
    return Columns(x, w, y)


def few_pixels(step: Step) -> Columns | None:
    """The sizes of a convolution, or of its input's gradient, whose filters are large and larger than its columns."""
    sizes = columns_of(step)
    if sizes is None or step.op.name == "convolution_weight_gradient" or sizes.taps == 1:
        return None
    filters = 4 * math.prod(sizes.w)
    return sizes if filters >= max(_LARGE, sizes.nbytes) else None


# The convolution and the gradient of its input -----------------------------------------------------------------------


def few_pixels_entries(
    step: Step, operands: Operands, sizes: Columns, image: Operand, weights: Operand, result: Operand
) -> Sequence[Entry]:
    """For operands that are dense."""
    buffer = operands.workspace(step, 0, sizes.nbytes)
    columns = Operand(buffer.base, 0, (sizes.pixels, sizes.depth), (sizes.depth, 1), FLOAT32)
    outputs = sizes.w[0]
    if step.op.name == "convolution":
        transposed = Operand(weights.base, weights.offset, (sizes.depth, outputs), (1, sizes.depth), FLOAT32)
        pixels = Operand(result.base, result.offset, (sizes.pixels, outputs), (outputs, 1), FLOAT32)
        multiply = gemm_entry(step, operands, columns, transposed, pixels)
        assert multiply is not None
        return [_unfold_entry(step, sizes, image, columns), multiply]
    filters = Operand(weights.base, weights.offset, (outputs, sizes.depth), (sizes.depth, 1), FLOAT32)
    pixels = Operand(image.base, image.offset, (sizes.pixels, outputs), (outputs, 1), FLOAT32)
    multiply = gemm_entry(step, operands, pixels, filters, columns)
    assert multiply is not None
    return [multiply, _fold_entry(step, sizes, columns, result)]


def _unfold_entry(step: Step, sizes: Columns, image: Operand, columns: Operand) -> Entry:
    """columns(x): every window's pixels, channel by channel, tap by tap; threads share windows."""
    code = Code("convolution_unfold")
    args = KernelArguments(code)
    windows = _Windows(args, step, sizes)
    source, target = args.pointer(image), args.pointer(columns)
    begin, end = code.share(args.number(sizes.pixels))
    with code.loop(begin, end) as pixel:
        sample, top, left = windows.corner(pixel)
        with code.loop(0, windows.taps) as tap:
            inside, at = windows.pixel_under(sample, top, left, tap)
            to = code.at(target, code.add(code.mul(pixel, code.mul(windows.taps, windows.inputs)), tap), "float")
            with code.loop(0, windows.inputs, vector_lanes()) as channel:
                value = Variable(splat_constant(code, 0.0))
                with code.when(inside):
                    value.set(Line(code, code.at(source, code.add(at, channel), "float"), "float").load(0))
                line = Line(code, code.at(to, code.mul(channel, windows.taps), "float"), "float", windows.taps)
                line.store(0, value.get())
    kernel, cost = "columns of windows", 0.7 * sizes.pixels * sizes.depth
    return Entry(step, code, args.values, reads=[image], writes=[columns], kernel=kernel, cost=cost)


def _fold_entry(step: Step, sizes: Columns, columns: Operand, result: Operand) -> Entry:
    """dx: for every pixel, the sum over the windows above it, tap by tap; threads share pixels."""
    code = Code("convolution_fold")
    args = KernelArguments(code)
    windows = _Windows(args, step, sizes)
    source, target = args.pointer(columns), args.pointer(result)
    begin, end = code.share(args.number(sizes.x[0] * sizes.x[2] * sizes.x[3]))
    with code.loop(begin, end) as pixel:
        line = code.div(pixel, windows.width)
        sample = code.div(line, windows.height)
        y, x = code.rem(line, windows.height), code.rem(pixel, windows.width)
        with code.loop(0, windows.inputs, vector_lanes()) as channel:
            total = Variable(splat_constant(code, 0.0))
            with code.loop(0, windows.taps) as tap:
                inside, window = windows.window_over(sample, y, x, tap)
                with code.when(inside):
                    at = code.add(code.mul(code.add(code.mul(window, windows.inputs), channel), windows.taps), tap)
                    total.set(total.get() + Line(code, code.at(source, at, "float"), "float", windows.taps).load(0))
            at = code.add(code.mul(pixel, windows.inputs), channel)
            Line(code, code.at(target, at, "float"), "float").store(0, total.get())
    kernel, cost = "sum of windows", 0.7 * math.prod(sizes.x) * sizes.taps
    return Entry(step, code, args.values, reads=[columns], writes=[result], kernel=kernel, cost=cost)


class _Windows:
    """Where windows and pixels lie, in registers."""

    def __init__(self, args: KernelArguments, step: Step, sizes: Columns) -> None:
        a = step.attributes
        self.code = args.code
        self.height, self.width, self.rows, self.columns = args.numbers([*sizes.x[2:], *sizes.y[2:]])
        self.inputs, self.taps, self._across = args.numbers([sizes.w[1], sizes.taps, sizes.w[3]])
        self._strides, self._dilations = args.numbers(a["strides"]), args.numbers(a["dilations"])
        self._before = args.numbers([a["padding"][0], a["padding"][2]])

    def corner(self, pixel: str) -> tuple[str, str, str]:
        """The first pixel of the sample, and row and column of the window's first pixel; these may lie outside."""
        code = self.code
        line = code.div(pixel, self.columns)
        starts = (code.rem(line, self.rows), code.rem(pixel, self.columns))
        top, left = (
            code.sub(code.mul(start, stride), before)
            for start, stride, before in zip(starts, self._strides, self._before, strict=True)
        )
        return code.mul(code.div(line, self.rows), code.mul(self.height, self.width)), top, left

    def _tap(self, tap: str) -> tuple[str, str]:
        """Rows and columns from a window's first pixel to the one under a tap."""
        code = self.code
        places = (code.div(tap, self._across), code.rem(tap, self._across))
        down, across = (code.mul(place, step) for place, step in zip(places, self._dilations, strict=True))
        return down, across

    def _is_inside(self, y: str, x: str, height: str, width: str) -> str:
        # Unsigned comparisons: a row before the first is a very large number.
        conditions = (f"icmp ult i64 {y}, {height}", f"icmp ult i64 {x}, {width}")
        return self.code.let("and i1 {}, {}".format(*map(self.code.let, conditions)))

    def pixel_under(self, sample: str, top: str, left: str, tap: str) -> tuple[str, str]:
        """Whether there is a pixel under a window's tap, and its first element."""
        code, (down, across) = self.code, self._tap(tap)
        y, x = code.add(top, down), code.add(left, across)
        at = code.mul(code.add(sample, code.add(code.mul(y, self.width), x)), self.inputs)
        return self._is_inside(y, x, self.height, self.width), at

    def window_over(self, sample: str, y: str, x: str, tap: str) -> tuple[str, str]:
        """Whether there is a window whose tap lies over a pixel, and its number."""
        code = self.code
        inside, places = "true", []
        for place, step, stride, before, extent in zip(
            (y, x), self._tap(tap), self._strides, self._before, (self.rows, self.columns), strict=True
        ):
            start = code.sub(code.add(place, before), step)
            number = code.div(start, stride)
            fits = code.let(f"icmp eq i64 {code.mul(number, stride)}, {start}")
            exists = code.let(f"and i1 {fits}, {code.let(f'icmp ult i64 {number}, {extent}')}")
            inside = code.let(f"and i1 {inside}, {exists}")
            places.append(number)
        return inside, code.add(code.mul(code.add(code.mul(sample, self.rows), places[0]), self.columns), places[1])


# The gradient of the filters -----------------------------------------------------------------------------------------


def gradient_workspace(step: Step, sizes: Columns) -> int:
    """Bytes for the sums of every thread."""
    return 4 * thread_floats(_sums(step, sizes)) * planned_threads()


def _sums(step: Step, sizes: Columns) -> dict[str, int]:
    """A thread's own memory: sums, and where dy is bfloat16 a block of it in float32."""
    outputs, taps = sizes.block
    parts = {"sums": outputs * taps * sizes.panel}
    if is_bfloat16(step.inputs[1].dtype):
        parts["dy"] = DEPTH * outputs
    return parts


def gradient_entry(step: Step, operands: Operands, sizes: Columns, images: Sequence[Operand], result: Operand) -> Entry:
    """For operands that are dense."""
    code = Code("convolution_columns")
    args = KernelArguments(code)
    memory = ThreadWorkspace(args, operands.workspace(step, 0, gradient_workspace(step, sizes)), _sums(step, sizes))
    types = [MEMORY_TYPES[image.dtype] for image in images]
    windows, lanes, panel = _Windows(args, step, sizes), vector_lanes(), sizes.panel
    (block_outputs, block_taps), inputs = sizes.block, windows.inputs
    pixels, outputs, block, taps = args.numbers([sizes.pixels, sizes.w[0], block_outputs, block_taps])
    x, dy, dw = (args.pointer(operand) for operand in (*images, result))
    multiply = args.pointer(packed_gemm(sizes.w[1]))
    across, along = -(-sizes.w[1] // panel), sizes.taps // block_taps
    per_output, per_channel, count = args.numbers(
        [across * along, along, -(-sizes.w[0] // block_outputs) * across * along]
    )
    packed = code.aligned_buffer(DEPTH * panel)
    corners = [code.variable(f"[{DEPTH} x i64]", "zeroinitializer") for _ in range(3)]
    begin, end = code.share(count, 1, memory.max_threads, in_pieces=True)
    with code.loop(begin, end) as unit:
        output = code.mul(code.div(unit, per_output), block)
        channel = code.mul(code.div(code.rem(unit, per_output), per_channel), panel)
        first_tap = code.mul(code.rem(unit, per_channel), taps)
        tall = code.minimum(code.sub(outputs, output), block)
        wide = code.minimum(code.sub(inputs, channel), panel)
        with code.loop(0, pixels, DEPTH) as start:
            steps = code.minimum(code.sub(pixels, start), DEPTH)
            with code.loop(0, steps) as index:
                for corner, place in zip(corners, windows.corner(code.add(start, index)), strict=True):
                    code.store(code.at(corner, index, "i64"), "i64", place)
            source = code.at(dy, code.add(code.mul(start, outputs), output), types[1])
            a: tuple[str, str | int, str | int] = (source, 1, outputs)
            if types[1] != "float":
                with code.loop(0, steps) as index:
                    line = Line(code, code.at(source, code.mul(index, outputs), types[1]), types[1])
                    copied = Line(code, code.at(memory["dy"], code.mul(index, block), "float"), "float")
                    copy_line(code, line, copied, 0, tall)
                a = (memory["dy"], 1, block)
            with code.loop(0, taps) as tap:
                with code.loop(0, steps) as index:
                    sample, top, left = (code.load(code.at(corner, index, "i64"), "i64") for corner in corners)
                    inside, at = windows.pixel_under(sample, top, left, code.add(first_tap, tap))
                    target = Line(code, code.at(packed, code.mul(index, panel), "float"), "float")
                    with code.when(inside):
                        pixel = Line(code, code.at(x, code.add(at, channel), types[0]), types[0])
                        with code.loop(0, wide, lanes) as vector:
                            target.store(vector, pixel.load(vector))
                    with code.when(code.let(f"xor i1 {inside}, true")), code.loop(0, wide, lanes) as vector:
                        target.store(vector, splat_constant(code, 0.0))
                sums = code.at(memory["sums"], code.mul(tap, panel), "float"), code.mul(taps, panel)
                extents = (tall, wide, steps)
                call_packed_gemm(code, multiply, extents, a, packed, sums, accumulate=start)
        with code.loop(0, tall) as row, code.loop(0, taps) as tap, code.loop(0, wide, lanes) as vector:
            at = code.add(code.mul(code.add(code.mul(row, taps), tap), panel), vector)
            value = Line(code, code.at(memory["sums"], at, "float"), "float").load(0)
            first = code.add(code.mul(code.add(output, row), inputs), code.add(channel, vector))
            place = code.add(code.mul(first, windows.taps), code.add(first_tap, tap))
            target = Line(code, code.at(dw, place, "float"), "float", windows.taps)
            target.store(0, value)
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[result],
        kernel=f"gemm of columns, blocks of {block_outputs} outputs" + f", {block_taps} taps" * (along > 1),
        cost=2.0 * sizes.w[0] * sizes.depth * sizes.pixels / FLOPS_PER_NS,
        in_pieces=True,
        scratch=[memory.buffer],
    )
