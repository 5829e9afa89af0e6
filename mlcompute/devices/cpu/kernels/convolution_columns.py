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

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, copy_line, splat_constant
from mlcompute.devices.cpu.codegen.short_rows import read_across, write_across
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
    return None if step.op.name == "convolution_weight_gradient" or not has_few_pixels(step) else columns_of(step)


def has_few_pixels(step: Step) -> bool:
    """Do filters, or their gradient, take more memory than the columns? Then most of the time is theirs."""
    sizes = columns_of(step)
    return sizes is not None and sizes.taps > 1 and 4 * math.prod(sizes.w) >= max(_LARGE, sizes.nbytes)


# The convolution and the gradient of its input -----------------------------------------------------------------------


def few_pixels_entries(
    step: Step, operands: Operands, images: Sequence[Operand], result: Operand, sizes: Columns
) -> Sequence[Entry]:
    """For operands that are dense."""
    image, weights = images
    columns = operands.workspace(step, 0, sizes.nbytes).holding((sizes.pixels, sizes.depth), FLOAT32)
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
    lanes, taps = vector_lanes(), sizes.taps
    under = Line(code, code.aligned_buffer(taps * lanes), "float")
    begin, end = code.share(args.number(sizes.pixels))
    with code.loop(begin, end) as pixel:
        sample, top, left = windows.corner(pixel)
        with code.loop(0, windows.inputs, lanes) as channel:
            with code.loop(0, windows.taps) as tap:
                inside, at = windows.pixel_under(sample, top, left, tap)
                value = Variable(splat_constant(code, 0.0))
                with code.when(inside):
                    value.set(Line(code, code.at(source, code.add(at, channel), "float"), "float").load(0))
                under.store(code.mul(tap, lanes), value.get())
            first = code.mul(code.add(code.mul(pixel, windows.inputs), channel), windows.taps)
            write_across(code, under, lanes, (code.at(target, first, "float"), windows.taps), taps)
    kernel, cost = "columns of windows", 0.7 * sizes.pixels * sizes.depth
    return Entry(step, code, args.values, reads=[image], writes=[columns], kernel=kernel, cost=cost)


def _fold_entry(step: Step, sizes: Columns, columns: Operand, result: Operand) -> Entry:
    """dx: columns added to the pixels under their windows; threads share samples, and vectors of their channels."""
    code = Code("convolution_fold")
    args = KernelArguments(code)
    windows = _Windows(args, step, sizes)
    source, target = args.pointer(columns), args.pointer(result)
    lanes, taps = vector_lanes(), sizes.taps
    under = Line(code, code.aligned_buffer(taps * lanes), "float")
    vectors, pixels = code.div(windows.inputs, lanes), code.mul(windows.height, windows.width)
    begin, end = code.share(code.mul(args.number(sizes.x[0]), vectors))
    with code.loop(begin, end) as unit:
        sample, channel = code.div(unit, vectors), code.mul(code.rem(unit, vectors), lanes)
        image = code.at(target, code.add(code.mul(code.mul(sample, pixels), windows.inputs), channel), "float")
        with code.loop(0, pixels) as number:
            Line(code, image, "float").store(code.mul(number, windows.inputs), splat_constant(code, 0.0))
        per_sample = code.mul(windows.rows, windows.columns)
        with code.loop(0, per_sample) as number:
            window = code.add(code.mul(sample, per_sample), number)
            first = code.mul(code.add(code.mul(window, windows.inputs), channel), windows.taps)
            read_across(code, (code.at(source, first, "float"), windows.taps), taps, under, lanes)
            _, top, left = windows.corner(number)
            with code.loop(0, windows.taps) as tap:
                inside, at = windows.pixel_under("0", top, left, tap)
                with code.when(inside):
                    pixel = Line(code, code.at(image, at, "float"), "float")
                    pixel.store(0, pixel.load(0) + under.load(code.mul(tap, lanes)))
    kernel, cost = "sum of windows", 0.4 * sizes.pixels * sizes.depth
    return Entry(step, code, args.values, reads=[columns], writes=[result], kernel=kernel, cost=cost)


class _Windows:
    """Where windows and pixels lie, in registers."""

    def __init__(self, args: KernelArguments, step: Step, sizes: Columns) -> None:
        a = step.attributes
        self.code = args.code
        self.height, self.width, self.rows, self.columns = args.numbers([*sizes.x[2:], *sizes.y[2:]])
        self.inputs, self.taps, self._across = args.numbers([sizes.w[1], sizes.taps, sizes.w[3]])
        self.strides, self._dilations = args.numbers(a["strides"]), args.numbers(a["dilations"])
        self.before = args.numbers([a["padding"][0], a["padding"][2]])

    def corner(self, pixel: str) -> tuple[str, str, str]:
        """The first pixel of the sample, and row and column of the window's first pixel; these may lie outside."""
        code = self.code
        line = code.div(pixel, self.columns)
        starts = (code.rem(line, self.rows), code.rem(pixel, self.columns))
        top, left = (
            code.sub(code.mul(start, stride), before)
            for start, stride, before in zip(starts, self.strides, self.before, strict=True)
        )
        return code.mul(code.div(line, self.rows), code.mul(self.height, self.width)), top, left

    def tap(self, tap: str) -> tuple[str, str]:
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
        code, (down, across) = self.code, self.tap(tap)
        y, x = code.add(top, down), code.add(left, across)
        at = code.mul(code.add(sample, code.add(code.mul(y, self.width), x)), self.inputs)
        return self._is_inside(y, x, self.height, self.width), at

    def columns_inside(self, across: str) -> tuple[str, str]:
        """[first, last) of the windows of a line that have a column of pixels under a tap so far across."""
        code, stride, width = self.code, self.strides[1], self.width
        before = code.let(f"sub i64 {self.before[1]}, {across}")
        first, last = (
            code.div(code.add(code.intrinsic("smax", "i64", room, "0"), code.sub(stride, 1)), stride)
            for room in (before, code.add(width, before))
        )
        return first, code.minimum(last, self.columns)


# The gradient of the filters -----------------------------------------------------------------------------------------


def gradient_workspace(step: Step, sizes: Columns) -> int:
    """Bytes for the sums of every thread."""
    return threads_bytes(_sums(step, sizes))


def _sums(step: Step, sizes: Columns) -> dict[str, int]:
    """A thread's own memory: sums, and where dy is bfloat16 a block of it in float32."""
    outputs, taps = sizes.block
    parts = {"sums": outputs * taps * sizes.panel}
    if is_bfloat16(step.inputs[1].dtype):
        parts["dy"] = DEPTH * outputs
    return parts


class _Lines:
    """Packs the pixels under a tap, line of windows by line: pixels a stride apart, and zeros where there are none."""

    def __init__(self, windows: _Windows) -> None:
        self._windows, self._code = windows, windows.code
        #: Of every line of some windows: the first pixel of the sample, and the row of the first tap.
        self._samples, self._tops = (self._code.variable(f"[{DEPTH} x i64]", "zeroinitializer") for _ in range(2))

    def begin(self, start: str, steps: str) -> None:
        """For so many windows from `start` on, at most `DEPTH`."""
        code, windows = self._code, self._windows
        self._start, self._end = start, code.add(start, steps)
        self._first = code.div(start, windows.columns)
        self._last = code.add(code.div(code.sub(self._end, 1), windows.columns), 1)
        with code.loop(self._first, self._last) as line:
            sample, top, _ = windows.corner(code.mul(line, windows.columns))
            for table, value in ((self._samples, sample), (self._tops, top)):
                code.store(code.at(table, code.sub(line, self._first), "i64"), "i64", value)

    def pack(self, tap: str, image: tuple[str, str, str], to: tuple[str, int, str | None]) -> None:
        """Some channels of the pixels under a tap.

        image  its address, the first channel, the type of an element
        to     address, floats of a pixel there, and how many of these are there (None: all)
        """
        code, windows, (x, channel, type_), (packed, panel, wide) = self._code, self._windows, image, to
        down, across = windows.tap(tap)
        inside = windows.columns_inside(across)
        apart = code.mul(windows.strides[1], windows.inputs)

        def write(columns: tuple[str, str], place: str, source: str | None) -> None:
            """Windows of a line: their pixels, or zeros; `place` and `source` are those of the line's first window."""
            with code.loop(*columns) as column:
                target = Line(code, code.at(packed, code.mul(code.add(place, column), panel), "float"), "float")
                pixel = Line(code, code.at(source or x, code.mul(column, apart), type_), type_)
                with contextlib.ExitStack() as stack:
                    offsets: Sequence[str | int] = range(0, panel, vector_lanes())
                    if wide is not None:
                        offsets = [stack.enter_context(code.loop(0, wide, vector_lanes()))]
                    for offset in offsets:
                        target.store(offset, splat_constant(code, 0.0) if source is None else pixel.load(offset))

        with code.loop(self._first, self._last) as line:
            number = code.sub(line, self._first)
            sample, top = (code.load(code.at(table, number, "i64"), "i64") for table in (self._samples, self._tops))
            begin = code.mul(line, windows.columns)
            low = code.sub(code.intrinsic("smax", "i64", begin, self._start), begin)
            high = code.sub(code.minimum(code.add(begin, windows.columns), self._end), begin)
            y = code.add(top, down)
            # An unsigned comparison: a row before the first is a very large number.
            exists = code.let(f"icmp ult i64 {y}, {windows.height}")
            within = [code.minimum(code.intrinsic("smax", "i64", edge, low), high) for edge in inside]
            first, last = (code.let(f"select i1 {exists}, i64 {edge}, i64 {high}") for edge in within)
            left = code.sub(across, windows.before[1])
            at = code.mul(code.add(sample, code.add(code.mul(y, windows.width), left)), windows.inputs)
            source, place = code.at(x, code.add(at, channel), type_), code.sub(begin, self._start)
            write((low, first), place, None)
            write((first, last), place, source)
            write((last, high), place, None)


def gradient_entry(step: Step, operands: Operands, sizes: Columns, images: Sequence[Operand], result: Operand) -> Entry:
    """For operands that are dense."""
    code = Code("convolution_columns")
    args = KernelArguments(code)
    memory = ThreadWorkspace.of(args, operands, step, _sums(step, sizes))
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
    lines = _Lines(windows)
    begin, end = code.share(count, 1, memory.max_threads, in_pieces=True)
    with code.loop(begin, end) as unit:
        output = code.mul(code.div(unit, per_output), block)
        channel = code.mul(code.div(code.rem(unit, per_output), per_channel), panel)
        first_tap = code.mul(code.rem(unit, per_channel), taps)
        tall = code.minimum(code.sub(outputs, output), block)
        wide = code.minimum(code.sub(inputs, channel), panel)
        with code.loop(0, pixels, DEPTH) as start:
            steps = code.minimum(code.sub(pixels, start), DEPTH)
            lines.begin(start, steps)
            source = code.at(dy, code.add(code.mul(start, outputs), output), types[1])
            a: tuple[str, str | int, str | int] = (source, 1, outputs)
            if types[1] != "float":
                with code.loop(0, steps) as index:
                    line = Line(code, code.at(source, code.mul(index, outputs), types[1]), types[1])
                    copied = Line(code, code.at(memory["dy"], code.mul(index, block), "float"), "float")
                    copy_line(code, line, copied, 0, tall)
                a = (memory["dy"], 1, block)
            with code.loop(0, taps) as tap:
                image, to = (x, channel, types[0]), (packed, panel, None if sizes.w[1] % panel == 0 else wide)
                lines.pack(code.add(first_tap, tap), image, to)
                sums = code.at(memory["sums"], code.mul(tap, panel), "float"), code.mul(taps, panel)
                extents = (tall, wide, steps)
                call_packed_gemm(code, multiply, extents, a, packed, sums, accumulate=start)
        with code.loop(0, tall) as row, code.loop(0, wide, lanes) as vector:
            at = code.add(code.mul(code.mul(row, taps), panel), vector)
            made = Line(code, code.at(memory["sums"], at, "float"), "float")
            first = code.add(code.mul(code.add(output, row), inputs), code.add(channel, vector))
            place = code.add(code.mul(first, windows.taps), first_tap)
            write_across(code, made, panel, (code.at(dw, place, "float"), windows.taps), block_taps)
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[result],
        kernel=f"gemm of columns, blocks of {block_outputs} outputs" + f", {block_taps} taps" * (along > 1),
        cost=2.0 * sizes.w[0] * sizes.depth * sizes.pixels / FLOPS_PER_NS,
        in_pieces=True,
        scratch=memory.scratch,
    )
