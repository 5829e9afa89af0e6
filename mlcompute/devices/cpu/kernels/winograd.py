"""Convolutions of 3x3 and 5x5, or 3 and 5 in one direction, at stride one by Winograd's algorithm: less than half the
multiplications.

    forward, dx   transform filters | per block of tiles: transform x, a matmul per point, inverse transform to y
    dw            per slice, part of the filters and block of tiles: transform x and dy, a matmul per point |
                  inverse transform to dw

A bar is a barrier; a point is one of the values of a transformed tile. Images lie channels-last, a register holds
neighbouring channels of one pixel, and a block of tiles stays in the thread's cache from the first step to the last.
The gradient of the input is the convolution of dy with the filters rotated and their channels exchanged.
With stride two, even and odd rows and columns are images of their own; volumes are planes (`winograd_phases`).
Dilated, the pixels of a tile lie as far apart as the taps: all else is the same. Groups of filters have products of
their own; as many as fill a register have one together, with zeros in place of the filters that do not exist.
Matrices are multiplied by `packed_gemm`: how samples are shared changes nothing.

What is not finite spreads within its tile: where a plain sum gives one infinity, a tile may give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.addressing import DenseArray, ThreadWorkspace
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, splat_constant, tail_mask
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.gemm.packed_gemm import call_packed_gemm, packed_gemm
from mlcompute.devices.cpu.kernels.winograd_filters import (
    filters_entry,
    loading,
    place_in_panels,
    points_entry,
    storing,
    transform_tile,
)
from mlcompute.devices.cpu.kernels.winograd_phases import PhasedImage, PlanesOfVolume
from mlcompute.devices.cpu.kernels.winograd_sizes import (
    Cut,
    Sizes,
    cut_channels,
    cut_filters,
    filter_floats,
    thread_parts,
)
from mlcompute.devices.cpu.kernels.winograd_transforms import Matrix, transposed
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
        filters_entry(step, sizes, weights, buffer, backwards),
        _images_entry(step, operands, sizes, image, buffer, result),
    ]


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
        #: Where the channels of x lie, or those of y, unless side by side.
        self.source: PhasedImage | PlanesOfVolume | None = None
        self.result: PhasedImage | None = None
        if sizes.phases is not None and sizes.phases.of_result:
            self.result = PhasedImage(args, sizes)
        elif sizes.phases is not None:
            self.source = PhasedImage(args, sizes)
        elif sizes.planes is not None:
            self.source = PlanesOfVolume(args, sizes)
        self.x_points, self.y_points = args.numbers(
            [sizes.point_floats(sizes.depth), sizes.point_floats(sizes.channels)]
        )

    def image(self, operand: Operand) -> DenseArray:
        """An image (samples, rows, columns, channels); of volumes all planes."""
        extents = tuple(self.args.numbers(operand.shape[-3:]))
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
        self,
        image: DenseArray,
        row: str,
        part: tuple[str | int, str],
        extents: Shape,
        top: str | int,
        left: str | int,
        source: PhasedImage | PlanesOfVolume | None = None,
    ) -> DenseArray:
        """Copy the pixels under a row of tiles to the thread's memory; zeros where there are none.

        row        which row of tiles, counted through all samples
        part       which channels: the first, and how many
        extents    height and width of a tile
        top, left  rows and columns of zeros before the image
        source     where its channels lie, unless side by side; it knows about the zeros
        """
        code, (channel, channels) = self.code, part
        columns = code.add(code.mul(self.row_tiles, self.across.outputs), extents[1] - self.across.outputs)
        sample, first, first_column = self.place(row)
        target = DenseArray(code, self.memory["pixels"], (columns, channels))
        if source is None:
            corner = sample, code.sub(first, top), code.sub(first_column, left)
            self._copy(image, corner, (self.step_down, self.step_across), part, target, extents[0])
            return target
        with code.loop(0, channels, source.run) as run:
            plane, y, x, from_channel = source.place(sample, first, first_column, code.add(channel, run))
            into = target._replace(pointer=code.at(target.pointer, run, "float"))
            self._copy(image, (plane, y, x), source.steps, (from_channel, source.run), into, extents[0])
        return target

    def _copy(
        self,
        image: DenseArray,
        corner: tuple[str, str, str],
        steps: tuple[str | int, str | int],
        part: tuple[str | int, str],
        target: DenseArray,
        rows: int,
    ) -> None:
        """Channels of pixels that lie some steps apart, from a sample's row and column on, which may lie before it."""
        code, (height, width, all_channels), (channel, channels) = self.code, image.extents, part
        (sample, first, start), (down, across), (columns, pitch) = corner, steps, target.extents
        # Columns of the tiles that lie before the image, and before its end.
        before, there = (
            code.minimum(self._columns_before(code.sub(edge, start), across), columns) for edge in ("0", width)
        )
        with code.loop(0, rows) as offset:
            y = code.add(first, code.mul(offset, down))
            # An unsigned comparison: a row before the first is a very large number.
            exists = code.let(f"icmp ult i64 {y}, {height}")
            begin, end = (code.let(f"select i1 {exists}, i64 {edge}, i64 {columns}") for edge in (before, there))
            self._write(target.address(offset, "0"), pitch, None, begin, channels)
            at = image.address(sample, y, code.add(start, code.mul(begin, across)))
            source = Line(code, code.at(at, channel, image.element), image.element)
            apart, rest = code.mul(all_channels, across), code.sub(all_channels, channel)
            self._write(target.address(offset, begin), pitch, source, code.sub(end, begin), channels, apart, rest)
            self._write(target.address(offset, end), pitch, None, code.sub(columns, end), channels)

    def _columns_before(self, pixels: str, step: str | int) -> str:
        """Columns of a tile among so many pixels."""
        code = self.code
        exist = code.intrinsic("smax", "i64", pixels, "0")
        return code.div(code.add(exist, code.sub(step, 1)), step)

    def _write(
        self, target: str, pitch: str, source: Line | None, pixels: str, channels: str, apart: str = "", there: str = ""
    ) -> None:
        """Copy channels of pixels, which lie `apart` and of which so many are there, or write zeros, `pitch` apart."""
        code, zeros = self.code, splat_constant(self.code, 0.0)
        with code.loop(0, pixels) as pixel:
            to = Line(code, code.at(target, code.mul(pixel, pitch), "float"), "float")
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
            part = channel, self.depth
            pixels = self.copy_pixels(image, code.add(start, row), part, extents, top, left, self.source)
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

        transform_tile(code, both, load, storing(line, len(both[1]), points))


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
    by_sample = by_sample and sizes.planes is None
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
                to = at
                if tiles.result is not None:
                    _, i, j, to = tiles.result.place(sample, i, j, at)
                # Unsigned comparisons: what lies before the first row or column is a very large number.
                inside = [code.let(f"icmp ult i64 {i}, {height}"), code.let(f"icmp ult i64 {j}, {width}")]
                with code.when(code.let(f"and i1 {inside[0]}, {inside[1]}")):
                    y.line(sample, i, j).store(to, value, mask)

            transform_tile(code, (down.to_y, across.to_y), loading(products, across.inputs, tiles.y_points), store)


# The gradient of the filters ----------------------------------------------------------------------------------------


def _weight_gradient(step: Step, operands: Operands, sizes: Sizes) -> Sequence[Entry]:
    """Each slice of the batch sums over its samples at every point; slices are added in order, then brought to dw."""
    x, dy, result = (operands[value] for value in (*step.inputs, step.results[0]))
    cut = cut_filters(sizes)
    sums = operands.workspace(step, 0, cut.sums_bytes)
    return [
        _sums_entry(step, operands, sizes, cut, (x, dy), sums),
        points_entry(step, sizes, cut, sums, result),
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
            offset = place_in_panels(code, tiles.sizes, number_, channel, count)
            tiles.transform(to_y, (pixels, tile, channel), tiles.memory["y"], offset, tiles.y_points)
