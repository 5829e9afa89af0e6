"""Filters for Winograd's algorithm: brought to points, packed for a matmul at each, and their gradient brought back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, fill_line
from mlcompute.devices.cpu.codegen.short_rows import read_across, write_across
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.gemm.packed_gemm import panel_width
from mlcompute.devices.cpu.kernels.winograd_phases import PHASES, PhasedFilters
from mlcompute.devices.cpu.kernels.winograd_sizes import Cut, Sizes, filter_floats
from mlcompute.devices.cpu.kernels.winograd_transforms import Matrix, apply, transposed
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Shape, Step


class _Filters:
    """Filters (O, C, r, s) as rows of products: (group, depth; channel, tap); of volumes (plane, depth; channel, tap).

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
        self._plane_taps = math.prod(shape[3:]) if sizes.planes is not None else 0
        self._last_plane = args.number(shape[2] - 1) if self._plane_taps and backwards else None

    def row(self, group: str, k: str) -> tuple[str, str]:
        """Of row k of a product: the first element, and the first of the channels that are in a group with it."""
        code = self._code
        own = code.div(k, self._depth)
        if self._plane_taps:  # rows of a plane of taps follow each other
            plane = own if self._last_plane is None else code.sub(self._last_plane, own)
            return code.add(code.mul(code.rem(k, self._depth), self._by_depth), code.mul(plane, self._plane_taps)), "0"
        first = code.mul(code.add(code.mul(group, self._merged), own), self._by_group)
        return code.add(first, code.mul(code.rem(k, self._depth), self._by_depth)), code.mul(own, self.channels)

    @contextlib.contextmanager
    def elements(self, row: tuple[str, str]) -> Iterator[tuple[str, str, str]]:
        """Every element of a row where groups are merged: its offset, its channel and its tap."""
        code, (first, start) = self._code, row
        with code.loop(0, self.channels) as channel, code.loop(0, self._taps) as tap:
            at = code.add(code.add(first, code.mul(channel, self.by_channel)), tap)
            yield at, code.add(start, channel), tap


def filters_entry(step: Step, sizes: Sizes, weights: Operand, buffer: Operand, backwards: bool) -> Entry:
    """w (O, C, r, s) to points (group, point, depth, channel), packed for the gemm; backwards: rotated."""
    code, down, across = Code("winograd_filters"), sizes.down, sizes.across
    args = KernelArguments(code)
    depth, channels = args.numbers([sizes.depth, sizes.channels])
    taps = down.taps * across.taps
    filters = _Filters(args, sizes, weights.shape, backwards)
    source, target = args.pointer(weights), args.pointer(buffer)
    # Rows and columns of a product, of one phase if filters have some.
    there = args.numbers(weights.shape[:2] if backwards else weights.shape[1::-1])
    rows, per_group = args.numbers([sizes.groups * sizes.depth, filter_floats(sizes)])

    def write_phases() -> None:
        phased = PhasedFilters(code, sizes)
        begin, end = code.share(there[0])
        with code.loop(begin, end) as row, code.loop(0, there[1], vector_lanes()) as column:
            first = code.add(filters.row("0", row)[0], code.mul(column, filters.by_channel))
            phased.read(code.at(source, first, "float"), filters.by_channel)
            with code.loop(0, PHASES) as phase:
                k, channel = row, column
                if backwards:
                    channel = code.add(code.mul(phase, there[1]), column)
                else:
                    k = code.add(code.mul(phase, there[0]), row)
                points = Line(code, code.at(target, place_in_panels(code, sizes, k, channel, depth), "float"), "float")
                store = storing(points, across.inputs, code.mul(depth, channels))
                transform_tile(code, (down.from_w, across.from_w), phased.loading(phase, backwards), store)

    def write() -> None:
        if sizes.phases is not None:
            write_phases()
            return
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
            place = code.add(code.mul(group, per_group), place_in_panels(code, sizes, k, channel, depth))
            points = Line(code, code.at(target, place, "float"), "float")
            load, store = loading(gathered, across.taps, lanes), storing(points, across.inputs, matrix)
            transform_tile(code, (down.from_w, across.from_w), load, store)

    code.later(f"{sizes.code_key} {backwards}", write)
    cost = 2.0 * sizes.groups * sizes.depth * sizes.channels * sizes.points / vector_lanes()
    return Entry(step, code, args.values, [weights], [buffer], kernel="winograd filter transform", cost=cost)


def place_in_panels(code: Code, sizes: Sizes, k: str, channel: str, depth: str) -> str:
    """Where `products` wants row k of the second factor of a product of that depth, from one channel on."""
    panel = panel_width(sizes.channels) * vector_lanes()
    within = code.rem(channel, panel)
    return code.add(code.mul(code.sub(channel, within), depth), code.add(code.mul(k, panel), within))


#: Of a tile of vectors: load from a row and column, store into a row and column.
Load = Callable[[int, str | int], SimdValue]
Store = Callable[[str | int, int, SimdValue], None]


def transform_tile(code: Code, both: tuple[Matrix, Matrix], load: Load, store: Store) -> None:
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


def loading(line: Line, width: int, apart: str | int) -> Load:
    """Loads from a tile that lies row by row, its vectors so many floats apart."""
    code = line.code
    return lambda row, column: line.load(code.mul(code.add(column, row * width), apart))


def storing(line: Line, width: int, apart: str | int) -> Store:
    """Stores into a tile that lies row by row, its vectors so many floats apart."""
    code = line.code
    return lambda row, column, value: line.store(code.mul(code.add(code.mul(row, width), column), apart), value)


def points_entry(step: Step, sizes: Sizes, cut: Cut, sums: Operand, result: Operand) -> Entry:
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
    planes = 1 if sizes.planes is None else sizes.planes.taps
    outputs, inputs, group_depth = args.numbers(
        [result.shape[0], planes * sizes.groups * sizes.merged * result.shape[1], sizes.depth]
    )

    def write() -> None:
        matrix = code.mul(depth, channels)
        begin, end = code.share(inputs)
        lanes = vector_lanes()
        totals, taken = (Line(code, code.aligned_buffer(count * lanes), "float") for count in (sizes.points, taps))

        def bring_back(k: str, channel: str, store: Store) -> None:
            """The taps of one row of the product, and a vector of its columns."""
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
            transform_tile(code, both, loading(totals, across.inputs, lanes), store)

        if sizes.phases is not None:
            phased = PhasedFilters(code, sizes)
            with code.loop(begin, end) as k, code.loop(0, all_channels, lanes) as channel:
                with code.loop(0, PHASES) as phase:
                    bring_back(code.add(code.mul(phase, inputs), k), channel, phased.storing(phase))
                first = code.add(filters.row("0", k)[0], code.mul(channel, filters.by_channel))
                phased.write(code.at(target, first, "float"), filters.by_channel)
            return
        with code.loop(begin, end) as k, code.loop(0, all_channels, lanes) as channel:
            bring_back(k, channel, storing(taken, across.taps, lanes))
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
