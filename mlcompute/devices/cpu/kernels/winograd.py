"""Convolutions of 3x3 and 5x5, or 3 and 5 in one direction, at stride one by Winograd's algorithm: less than half the
multiplications.

    forward, dx   transform filters | per block of tiles: transform x, a matmul per point, inverse transform to y
    dw            per slice, part of the filters and block of tiles: transform x and dy, a matmul per point |
                  inverse transform to dw

A bar is a barrier; a point is one of the values of a transformed tile. Images lie channels-last, a register holds
neighbouring channels of one pixel, and a block of tiles stays in the thread's cache from the first step to the last.
The gradient of the input is the convolution of dy with the filters rotated and their channels exchanged.
Dilated, the pixels of a tile lie as far apart as the taps: all else is the same. Groups of filters have products of
their own; as many as fill a register have one together, with zeros in place of the filters that do not exist.
Matrices are multiplied by `packed_gemm`: how samples are shared changes nothing.

What is not finite spreads within its tile: where a plain sum gives one infinity, a tile may give NaN.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from mlcompute.devices.cpu.codegen.addressing import DenseArray, ThreadWorkspace
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, fill_line, splat_constant, tail_mask
from mlcompute.devices.cpu.codegen.short_rows import read_across, write_across
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.gemm.packed_gemm import call_packed_gemm, packed_gemm, panel_width
from mlcompute.devices.cpu.kernels.winograd_sizes import (
    Cut,
    Sizes,
    cut_channels,
    cut_filters,
    filter_floats,
    thread_parts,
)
from mlcompute.devices.cpu.kernels.winograd_transforms import Matrix, apply, transposed
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand, Operands, enough_rows
from mlcompute.ops.op import Shape, Step


def winograd_entries(step: Step, operands: Operands, sizes: Sizes) -> Sequence[Entry]:
    """The entries of a convolution or of one of its gradients, for operands that are dense."""
    if step.op.name == "convolution_weight_gradient":
        return _weight_gradient(step, operands, sizes)
    image, weights, result = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    buffer = operands.workspace(step, 0, 4 * sizes.groups * filter_floats(sizes))
    backwards = step.op.name == "convolution_input_gradient"
    return [
        _filters_entry(step, sizes, weights, buffer, backwards),
        _images_entry(step, operands, sizes, image, buffer, result),
    ]


# Filters ------------------------------------------------------------------------------------------------------------


class _Filters:
    """Filters (O, C, r, s) as rows of products: (group, depth; channel, tap).

    by_channel   elements from one channel to the next
    channels     of a group of filters
    """

    def __init__(self, args: KernelArguments, sizes: Sizes, shape: Shape, backwards: bool = False) -> None:
        self._code, self._taps = args.code, math.prod(shape[2:])
        outputs, inputs = shape[0] // (sizes.groups * sizes.merged), shape[1]
        # Forward a product runs over a filter's inputs, backwards over the filters.
        steps = (self._taps, inputs * self._taps)
        self._by_depth, self.by_channel = args.numbers(steps[::-1] if backwards else steps)
        self._depth, self.channels = args.numbers([outputs, inputs] if backwards else [inputs, outputs])
        self._merged, self._by_group = args.numbers([sizes.merged, outputs * inputs * self._taps])

    def row(self, group: str, k: str) -> tuple[str, str]:
        """Of row k of a product: the first element, and the first of the channels that are in a group with it."""
        code = self._code
        own = code.div(k, self._depth)
        first = code.mul(code.add(code.mul(group, self._merged), own), self._by_group)
        return code.add(first, code.mul(code.rem(k, self._depth), self._by_depth)), code.mul(own, self.channels)

    @contextlib.contextmanager
    def elements(self, row: tuple[str, str]) -> Iterator[tuple[str, str, str]]:
        """Every element of a row where groups are merged: its offset, its channel and its tap."""
        code, (first, start) = self._code, row
        with code.loop(0, self.channels) as channel, code.loop(0, self._taps) as tap:
            at = code.add(code.add(first, code.mul(channel, self.by_channel)), tap)
            yield at, code.add(start, channel), tap


def _filters_entry(step: Step, sizes: Sizes, weights: Operand, buffer: Operand, backwards: bool) -> Entry:
    """w (O, C, r, s) to points (group, point, depth, channel), packed for the gemm; backwards: rotated."""
    code, down, across = Code("winograd_filters"), sizes.down, sizes.across
    args = KernelArguments(code)
    depth, channels = args.numbers([sizes.depth, sizes.channels])
    taps = down.taps * across.taps
    filters = _Filters(args, sizes, weights.shape, backwards)
    source, target = args.pointer(weights), args.pointer(buffer)
    there = args.numbers(weights.shape[:2] if backwards else weights.shape[1::-1])
    rows, per_group = args.numbers([sizes.groups * sizes.depth, filter_floats(sizes)])

    def write() -> None:
        matrix = code.mul(depth, channels)
        begin, end = code.share(rows)
        lanes = vector_lanes()
        gathered = Line(code, code.aligned_buffer(taps * lanes), "float")
        with code.loop(begin, end) as row, code.loop(0, channels, lanes) as channel:
            group, k = code.div(row, depth), code.rem(row, depth)
            start = filters.row(group, k)
            into = gathered if not backwards else gathered._replace(pointer=gathered.address((taps - 1) * lanes))
            apart = -lanes if backwards else lanes
            if sizes.merged > 1:
                fill_line(code, gathered, 0, str(taps * lanes))
                with filters.elements(start) as (element, lane, tap):
                    value = code.load(code.at(source, element, "float"), "float")
                    code.store(into.address(code.add(code.mul(tap, apart), lane)), "float", value)
            else:
                first = code.at(source, code.add(start[0], code.mul(channel, filters.by_channel)), "float")
                exists = code.let(f"icmp slt i64 {k}, {there[0]}")
                count = code.let(f"select i1 {exists}, i64 {code.sub(there[1], channel)}, i64 0")
                read_across(code, (first, filters.by_channel), taps, into, apart, None if sizes.filled else count)
            place = code.add(code.mul(group, per_group), _packed(code, sizes, k, channel, depth))
            points = Line(code, code.at(target, place, "float"), "float")
            load, store = _loading(gathered, across.taps, lanes), _storing(points, across.inputs, matrix)
            _transform(code, (down.from_w, across.from_w), load, store)

    code.later(f"{sizes.code_key} {backwards}", write)
    cost = 2.0 * sizes.groups * sizes.depth * sizes.channels * sizes.points / vector_lanes()
    return Entry(step, code, args.values, [weights], [buffer], kernel="winograd filter transform", cost=cost)


def _packed(code: Code, sizes: Sizes, k: str, channel: str, depth: str) -> str:
    """Where `products` wants row k of the second factor of a product of that depth, from one channel on."""
    panel = panel_width(sizes.channels) * vector_lanes()
    within = code.rem(channel, panel)
    return code.add(code.mul(code.sub(channel, within), depth), code.add(code.mul(k, panel), within))


#: Of a tile of vectors: load from a row and column, store into a row and column.
_Load = Callable[[int, str | int], SimdValue]
_Store = Callable[[str | int, int, SimdValue], None]


def _transform(code: Code, both: tuple[Matrix, Matrix], load: _Load, store: _Store) -> None:
    """down tile acrossᵀ: one is applied to every column, then the other to every row.

    Columns and rows are loops: written out, they take several times as long to compile, and longer to run.
    """
    lanes, (down, across) = vector_lanes(), both
    results, height, width = len(down), len(down[0]), len(across[0])
    if down == ((1.0,),):  # nothing to be done with columns
        for j, value in enumerate(apply(across, [load(0, j) for j in range(width)])):
            store(0, j, value)
        return
    buffer = Line(code, code.aligned_buffer(results * width * lanes), "float")
    with code.loop(0, width) as column:
        at = code.mul(column, lanes)
        for i, value in enumerate(apply(down, [load(i, column) for i in range(height)])):
            buffer.store(code.add(at, i * width * lanes), value)
    with code.loop(0, results) as row:
        at = code.mul(row, width * lanes)
        for j, value in enumerate(apply(across, [buffer.load(code.add(at, j * lanes)) for j in range(width)])):
            store(row, j, value)


def _loading(line: Line, width: int, apart: str | int) -> _Load:
    """Loads from a tile that lies row by row, its vectors so many floats apart."""
    code = line.code
    return lambda row, column: line.load(code.mul(code.add(column, row * width), apart))


def _storing(line: Line, width: int, apart: str | int) -> _Store:
    """Stores into a tile that lies row by row, its vectors so many floats apart."""
    code = line.code
    return lambda row, column, value: line.store(code.mul(code.add(code.mul(row, width), column), apart), value)


# Images -------------------------------------------------------------------------------------------------------------


class _Tiles:
    """What kernels over blocks of tiles share: how pixels are transformed in the thread's own workspace."""

    def __init__(self, args: KernelArguments, sizes: Sizes, memory: ThreadWorkspace) -> None:
        self.code, self.down, self.across, self.memory = args.code, sizes.down, sizes.across, memory
        self.sizes, self.args = sizes, args
        self.tile_rows, self.row_tiles, self.block = args.numbers([sizes.tile_rows, sizes.row_tiles, sizes.block])
        self.sections, self.height_tiles = args.numbers([sizes.sections, sizes.height_tiles])
        self.grids_across, self.step_down, self.step_across = args.numbers([sizes.grids[1], *sizes.dilations])
        self.depth, self.channels = args.numbers([sizes.depth, sizes.channels])
        self.x_points, self.y_points = args.numbers(
            [sizes.point_floats(sizes.depth), sizes.point_floats(sizes.channels)]
        )

    def image(self, operand: Operand) -> DenseArray:
        """An image (samples, rows, columns, channels)."""
        extents = tuple(self.args.numbers(operand.shape[1:]))
        return DenseArray(self.code, self.args.pointer(operand), extents, MEMORY_TYPES[operand.dtype])

    def place(self, row: str) -> tuple[str, str, str]:
        """Of a row of tiles, counted through all samples: its sample, and its first row and column of pixels."""
        code = self.code
        within = code.rem(row, self.tile_rows)
        section, line = code.rem(within, self.sections), code.div(within, self.sections)
        grid_across, line = code.rem(line, self.grids_across), code.div(line, self.grids_across)
        grid_down, tile_row = code.div(line, self.height_tiles), code.rem(line, self.height_tiles)
        tiles_left = code.mul(section, self.row_tiles)
        top = code.add(grid_down, code.mul(code.mul(tile_row, self.down.outputs), self.step_down))
        left = code.add(grid_across, code.mul(code.mul(tiles_left, self.across.outputs), self.step_across))
        return code.div(row, self.tile_rows), top, left

    def copy_pixels(
        self, image: DenseArray, row: str, part: tuple[str | int, str], extents: Shape, top: str | int, left: str | int
    ) -> DenseArray:
        """Copy the pixels under a row of tiles to the thread's memory; zeros where there are none.

        row        which row of tiles, counted through all samples
        part       which channels: the first, and how many
        extents    height and width of a tile
        top, left  rows and columns of zeros before the image
        """
        code = self.code
        height, width, _ = image.extents
        channel, channels = part
        columns = code.add(code.mul(self.row_tiles, self.across.outputs), extents[1] - self.across.outputs)
        sample, first, first_column = self.place(row)
        start = code.sub(first_column, left)
        # Columns of the tiles that lie before the image, and before its end.
        before, there = (code.minimum(self._columns_before(code.sub(edge, start)), columns) for edge in ("0", width))
        target = DenseArray(code, self.memory["pixels"], (columns, channels))
        with code.loop(0, extents[0]) as offset:
            y = code.sub(code.add(first, code.mul(offset, self.step_down)), top)
            # An unsigned comparison: a row before the first is a very large number.
            exists = code.let(f"icmp ult i64 {y}, {height}")
            begin, end = (code.let(f"select i1 {exists}, i64 {edge}, i64 {columns}") for edge in (before, there))
            self._write(target.address(offset, "0"), None, begin, channels)
            corner = image.address(sample, y, code.add(start, code.mul(begin, self.step_across)))
            source = Line(code, code.at(corner, channel, image.element), image.element)
            apart, rest = code.mul(image.extents[2], self.step_across), code.sub(image.extents[2], channel)
            self._write(target.address(offset, begin), source, code.sub(end, begin), channels, apart, rest)
            self._write(target.address(offset, end), None, code.sub(columns, end), channels)
        return target

    def _columns_before(self, pixels: str) -> str:
        """Columns of a tile among so many pixels."""
        code = self.code
        exist = code.intrinsic("smax", "i64", pixels, "0")
        return code.div(code.add(exist, code.sub(self.step_across, 1)), self.step_across)

    def _write(
        self, target: str, source: Line | None, pixels: str, channels: str, apart: str = "", there: str = ""
    ) -> None:
        """Copy channels of pixels, which lie `apart` and of which so many are there, or write zeros."""
        code, zeros = self.code, splat_constant(self.code, 0.0)
        with code.loop(0, pixels) as pixel:
            to = Line(code, code.at(target, code.mul(pixel, channels), "float"), "float")
            if source is not None:
                line = source._replace(pointer=source.address(code.mul(pixel, apart)))
            with code.loop(0, channels, vector_lanes()) as index:
                to.store(index, zeros if source is None else line.load(index, self.mask(there, index)))

    def mask(self, there: str, channel: str) -> str | None:
        """The lanes of a vector from a channel on that are below a number of channels; None for all."""
        return None if self.sizes.filled else tail_mask(self.code, self.code.sub(there, channel), vector_lanes())

    def transform_x(
        self, image: DenseArray, start: str, count: str, top: str, left: str, channel: str | int = 0
    ) -> None:
        """Points (point, tile, channel) of the input, from a channel on, under `count` rows of tiles."""
        code, extents = self.code, (self.down.inputs, self.across.inputs)
        with code.loop(0, count) as row:
            pixels = self.copy_pixels(image, code.add(start, row), (channel, self.depth), extents, top, left)
            with code.loop(0, self.row_tiles) as tile, code.loop(0, self.depth, vector_lanes()) as channel:
                number_ = code.add(code.mul(row, self.row_tiles), tile)
                offset = code.add(code.mul(number_, self.depth), channel)
                both = self.down.from_x, self.across.from_x
                self.transform(both, (pixels, tile, channel), self.memory["x"], offset, self.x_points)

    def transform(
        self, both: tuple[Matrix, Matrix], tile: tuple[DenseArray, str, str], target: str, offset: str, points: str
    ) -> None:
        """The points of a tile (pixels, its number, a channel), which lie `points` apart from an offset on."""
        code, (pixels, which, channel) = self.code, tile
        corner = code.mul(which, self.across.outputs)
        line = Line(code, code.at(target, offset, "float"), "float")

        def load(row: int, column: str | int) -> SimdValue:
            return pixels.line(str(row), code.add(corner, column)).load(channel)

        _transform(code, both, load, _storing(line, len(both[1]), points))


def _images_entry(
    step: Step, operands: Operands, sizes: Sizes, image: Operand, filters: Operand, result: Operand
) -> Entry:
    """All blocks of a thread's samples: transform x, a matmul per point, transform back to y."""
    code = Code("winograd")
    args = KernelArguments(code)
    parts, part = cut_channels(sizes)
    filters_bytes = 4 * sizes.groups * filter_floats(sizes)
    memory = ThreadWorkspace.of(args, operands, step, thread_parts(part), filters_bytes)
    tiles = _Tiles(args, part, memory)
    x, y = tiles.image(image), tiles.image(result)
    packed, multiply = args.pointer(filters), args.pointer(packed_gemm(part.channels))
    top, left, tile_rows = args.numbers([sizes.top, sizes.left, sizes.samples * part.tile_rows])
    matrix, groups, per_group = args.numbers([sizes.depth * sizes.channels, sizes.groups, filter_floats(sizes)])
    # By samples, as other kernels share them, or where those are few by rows of tiles, for one part after the other.
    by_sample = parts == 1 and enough_rows(sizes.samples, operands.threads) and memory.count >= operands.threads
    units = args.number(sizes.samples if by_sample else parts * sizes.samples * part.tile_rows)
    per_unit = args.number(part.tile_rows if by_sample else 1)
    begin, end = (code.mul(bound, per_unit) for bound in code.share(units, 1, memory.max_threads, True))

    def write() -> None:
        last_part = code.div(code.sub(code.add(end, tile_rows), 1), tile_rows)
        with code.loop(code.div(begin, tile_rows), last_part) as number:
            passed, channel = code.mul(number, tile_rows), code.mul(number, tiles.channels)
            first = code.sub(begin, code.minimum(begin, passed))
            last = code.minimum(code.sub(end, passed), tile_rows)
            with code.loop(first, last, tiles.block) as start, code.loop(0, groups) as group:
                rows = code.minimum(code.sub(last, start), tiles.block)
                count = code.mul(rows, tiles.row_tiles)
                tiles.transform_x(x, start, rows, top, left, code.mul(group, tiles.depth))
                filters_ = code.at(packed, code.mul(group, per_group), "float")
                with code.loop(0, sizes.points) as point:
                    a = (code.at(memory["x"], code.mul(point, tiles.x_points), "float"), tiles.depth, 1)
                    c = (code.at(memory["y"], code.mul(point, tiles.y_points), "float"), tiles.channels)
                    b = code.at(filters_, code.add(code.mul(point, matrix), code.mul(channel, tiles.depth)), "float")
                    call_packed_gemm(code, multiply, (count, tiles.channels, tiles.depth), a, b, c)
                # Channels are cut into parts, or into groups.
                _inverse_transform(tiles, y, start, rows, code.add(channel, code.mul(group, tiles.channels)))

    code.later(f"{part.code_key} {x.element} {y.element}", write)
    return Entry(
        step,
        code,
        args.values,
        reads=[image, filters],
        writes=[result],
        rows=sizes.samples if by_sample else 0,
        by_row={0, 2},
        kernel=f"winograd {sizes.down.outputs}x{sizes.across.outputs}",
        cost=sizes.cost,
        in_pieces=True,
        scratch=memory.scratch,
    )


def _inverse_transform(tiles: _Tiles, y: DenseArray, start: str, rows: str, first: str) -> None:
    """Transform the products of all points back to pixels, from a channel on; tiles may reach beyond the image."""
    code, down, across, memory = tiles.code, tiles.down, tiles.across, tiles.memory
    height, width, _ = y.extents
    with code.loop(0, rows) as row:
        sample, top, first_column = tiles.place(code.add(start, row))
        with code.loop(0, tiles.row_tiles) as tile, code.loop(0, tiles.channels, vector_lanes()) as channel:
            offset = code.add(code.mul(code.add(code.mul(row, tiles.row_tiles), tile), tiles.channels), channel)
            products = Line(code, code.at(memory["y"], offset, "float"), "float")
            left = code.add(first_column, code.mul(code.mul(tile, across.outputs), tiles.step_across))
            at = code.add(first, channel)
            mask = tiles.mask(y.extents[2], at)

            def store(down_: str | int, across_: int, value: SimdValue) -> None:
                i = code.add(top, code.mul(down_, tiles.step_down))
                j = code.add(left, code.mul(across_, tiles.step_across))
                inside = [code.let(f"icmp slt i64 {i}, {height}"), code.let(f"icmp slt i64 {j}, {width}")]
                with code.when(code.let(f"and i1 {inside[0]}, {inside[1]}")):
                    y.line(sample, i, j).store(at, value, mask)

            _transform(code, (down.to_y, across.to_y), _loading(products, across.inputs, tiles.y_points), store)


# The gradient of the filters ----------------------------------------------------------------------------------------


def _weight_gradient(step: Step, operands: Operands, sizes: Sizes) -> Sequence[Entry]:
    """Each slice of the batch sums over its samples at every point; slices are added in order, then brought to dw."""
    x, dy, result = (operands[value] for value in (*step.inputs, step.results[0]))
    cut = cut_filters(sizes)
    sums = operands.workspace(step, 0, cut.sums_bytes)
    return [
        _sums_entry(step, operands, sizes, cut, (x, dy), sums),
        _points_entry(step, sizes, cut, sums, result),
    ]


def _sums_entry(
    step: Step, operands: Operands, sizes: Sizes, cut: Cut, images: tuple[Operand, Operand], sums: Operand
) -> Entry:
    """Per slice and part of the filters, in memory of their own: sums over its tiles of the products of x and dy at
    every point, (point, depth, channel)."""
    code = Code("winograd_gradient")
    args = KernelArguments(code)
    memory = ThreadWorkspace.of(args, operands, step, thread_parts(cut.part), cut.sums_bytes)
    tiles = _Tiles(args, cut.part, memory)
    x, dy = (tiles.image(image) for image in images)
    target, multiply = args.pointer(sums), args.pointer(packed_gemm(cut.part.channels))
    top, left, samples, slices, floats, parts, depth_parts, channel_parts = args.numbers(
        [*(sizes.top, sizes.left, sizes.samples), *(cut.slices, cut.task_floats), cut.parts, *cut[1:3]]
    )

    def write() -> None:
        matrix = code.mul(tiles.depth, tiles.channels)
        first, last = code.share(code.mul(slices, parts), 1, memory.max_threads, in_pieces=True)
        with code.loop(first, last) as task:
            number, part = code.div(task, parts), code.rem(task, parts)
            # Parts of the channels of x in all groups, and of those of y in one of them.
            of_depth, of_channels = code.div(part, channel_parts), code.rem(part, channel_parts)
            group = code.div(of_depth, depth_parts)
            from_depth = code.mul(of_depth, tiles.depth)
            from_channel = code.mul(code.add(code.mul(group, channel_parts), of_channels), tiles.channels)
            bounds = (number, code.add(number, 1))
            begin, end = (code.mul(code.div(code.mul(samples, bound), slices), tiles.tile_rows) for bound in bounds)
            own = code.at(target, code.mul(task, floats), "float")
            with code.loop(begin, end, tiles.block) as start:
                rows = code.minimum(code.sub(end, start), tiles.block)
                count = code.mul(rows, tiles.row_tiles)
                tiles.transform_x(x, start, rows, top, left, from_depth)
                _transform_dy(tiles, dy, start, rows, count, from_channel)
                with code.loop(0, sizes.points) as point:
                    a = (code.at(memory["x"], code.mul(point, tiles.x_points), "float"), 1, tiles.depth)
                    b = code.at(memory["y"], code.mul(point, tiles.y_points), "float")
                    c = (code.at(own, code.mul(point, matrix), "float"), tiles.channels)
                    extents = (tiles.depth, tiles.channels, count)
                    call_packed_gemm(code, multiply, extents, a, b, c, accumulate=code.sub(start, begin))

    code.later(f"{cut.part.code_key} {x.element} {dy.element}", write)
    outputs = f"{sizes.down.outputs}x{sizes.across.outputs}"
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[sums],
        kernel=f"winograd {outputs}, sums of {cut.slices} slices" + f" in {cut.parts} parts" * (cut.parts > 1),
        cost=sizes.cost,
        in_pieces=True,
        scratch=memory.scratch,
    )


def _transform_dy(tiles: _Tiles, dy: DenseArray, start: str, rows: str, count: str, channel: str) -> None:
    """Points of the output's gradient from a channel on, packed for a product over `count` tiles."""
    code, to_y = tiles.code, (transposed(tiles.down.to_y), transposed(tiles.across.to_y))
    extents = (tiles.down.outputs, tiles.across.outputs)
    with code.loop(0, rows) as row:
        pixels = tiles.copy_pixels(dy, code.add(start, row), (channel, tiles.channels), extents, 0, 0)
        with code.loop(0, tiles.row_tiles) as tile, code.loop(0, tiles.channels, vector_lanes()) as channel:
            number_ = code.add(code.mul(row, tiles.row_tiles), tile)
            offset = _packed(code, tiles.sizes, number_, channel, count)
            tiles.transform(to_y, (pixels, tile, channel), tiles.memory["y"], offset, tiles.y_points)


def _points_entry(step: Step, sizes: Sizes, cut: Cut, sums: Operand, result: Operand) -> Entry:
    """The slices' sums added in order and brought back from points to dw (O, C, r, s)."""
    code, down, across = Code("winograd_points"), sizes.down, sizes.across
    args = KernelArguments(code)
    depth, channels, all_channels = args.numbers([cut.part.depth, cut.part.channels, sizes.channels])
    slices, per_slice, per_task, across_parts = args.numbers(
        [cut.slices, cut.parts * cut.task_floats, cut.task_floats, cut.channel_parts]
    )
    taps = down.taps * across.taps
    filters = _Filters(args, sizes, result.shape)
    source, target = args.pointer(sums), args.pointer(result)
    outputs, inputs, group_depth = args.numbers(
        [result.shape[0], sizes.groups * sizes.merged * result.shape[1], sizes.depth]
    )

    def write() -> None:
        matrix = code.mul(depth, channels)
        begin, end = code.share(inputs)
        lanes = vector_lanes()
        totals, taken = (Line(code, code.aligned_buffer(count * lanes), "float") for count in (sizes.points, taps))
        with code.loop(begin, end) as k, code.loop(0, all_channels, lanes) as channel:
            part = code.add(code.mul(code.div(k, depth), across_parts), code.div(channel, channels))
            within = code.add(code.mul(code.rem(k, depth), channels), code.rem(channel, channels))
            offset = code.add(code.mul(part, per_task), within)
            with code.loop(0, sizes.points) as point:
                line = Line(code, code.at(source, code.add(offset, code.mul(matrix, point)), "float"), "float")
                total = Variable(line.load(0))
                with code.loop(1, slices) as other:
                    total.set(total.get() + line.load(code.mul(other, per_slice)))
                totals.store(code.mul(point, lanes), total.get())
            both = transposed(down.from_w), transposed(across.from_w)
            _transform(code, both, _loading(totals, across.inputs, lanes), _storing(taken, across.taps, lanes))
            start = filters.row(code.div(k, group_depth), code.rem(k, group_depth))
            if sizes.merged > 1:
                with filters.elements(start) as (element, lane, tap):
                    value = code.load(taken.address(code.add(code.mul(tap, lanes), lane)), "float")
                    code.store(code.at(target, element, "float"), "float", value)
            else:
                first = code.at(target, code.add(start[0], code.mul(channel, filters.by_channel)), "float")
                count = None if sizes.filled else code.sub(outputs, channel)
                write_across(code, taken, lanes, (first, filters.by_channel), taps, count)

    code.later(sizes.code_key, write)
    cost = (2.0 + cut.slices) * sizes.groups * sizes.depth * sizes.channels * sizes.points / vector_lanes()
    return Entry(step, code, args.values, [sums], [result], kernel="winograd filter gradient", cost=cost)
