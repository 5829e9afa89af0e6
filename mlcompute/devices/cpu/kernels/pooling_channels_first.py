"""Pooling of channels-first images: vectors of neighbouring windows of one row.

Windows inside the image go in vectors, the last of which steps back to end with the row: a window done twice gives the
same numbers twice. Where windows add to what is there they may not be done twice, and the rest of the row goes one by
one, like all windows that reach over the left or right border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import Combiner, extract_lanes, fill
from mlcompute.devices.cpu.codegen.loops import Line, Variable, fill_line, share_units, splat, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue, select
from mlcompute.devices.cpu.kernels.pooling_windows import Images, Search, Span, Windows, each_tap, first_largest, span
from mlcompute.devices.loop_nest import Operand


class _Loops:
    """Loops over the planes (sample and channel) of this thread, and over the rows of windows in them."""

    def __init__(self, args: KernelArguments, windows: Windows, rows: int, adds: bool = False) -> None:
        self.code, self.windows = args.code, windows
        self.height, self.width = args.numbers(windows.image)
        self.down, self.across = args.numbers(windows.counts)
        self._channels = args.number(windows.channels)
        self._units = share_units(args, windows.samples * windows.channels, rows)
        self.pixels = args.number(windows.image[0] * windows.image[1])
        # Windows begin .. end - 1 lie inside the image from left to right.
        stride, left = windows.strides[1], windows.padding[2]
        begin = min(-(-left // stride), windows.counts[1])
        end = min((windows.image[1] + left - windows.reach[1]) // stride + 1, windows.counts[1])
        inside = max(end - begin, 0)
        most = min(vector_lanes(), 8) if adds else vector_lanes()
        self.lanes = min(most, 1 << (inside.bit_length() - 1)) if inside > 1 else 1
        if self.lanes == 1:
            begin = end = 0
        elif adds:
            end = begin + inside // self.lanes * self.lanes
        self._begin, self._end = args.numbers([begin, end])

    def planes(self, enter: Callable[[Callable[[Images], Images]], None]) -> None:
        """enter(find) for every plane; find gives the plane of an operand."""
        code = self.code
        with code.loop(*self._units) as unit:
            sample, channel = code.div(unit, self._channels), code.rem(unit, self._channels)
            enter(lambda images: images.at(sample=sample, channel=channel))

    def rows(self, vector: Callable[[str, Span, str], None], single: Callable[[str, Span, str, Span], None]) -> None:
        """vector(row, down, pixel) for runs of windows, single(row, down, pixel, across) for the others."""
        code = self.code
        with code.loop(0, self.down) as row:
            down = span(code, self.windows, 0, row, self.height)
            if self.lanes > 1:
                last = code.sub(self._end, self.lanes)
                with code.loop(self._begin, self._end, self.lanes) as pixel:
                    vector(row, down, code.minimum(pixel, last))
            for begin, end in (("0", self._begin), (self._end, self.across)):
                if self.lanes == 1 and begin == "0":
                    continue
                with code.loop(begin, end) as pixel:
                    single(row, down, pixel, span(code, self.windows, 1, pixel, self.width))


def _load_strided(code: Code, address: str, stride: int, lanes: int) -> SimdValue:
    """Elements a stride apart."""
    if stride == 1:
        return Line(code, address, "float").load(0, lanes=lanes)
    if stride == 2:
        # Two vectors that overlap by one element end exactly with the last one needed: nothing beyond it is read.
        first = Line(code, address, "float").load(0, lanes=lanes)
        second = Line(code, address, "float").load(lanes - 1, lanes=lanes)
        picked = [*range(0, lanes, 2), *range(lanes + 1, 2 * lanes, 2)]
        listed = ", ".join(f"i32 {lane}" for lane in picked)
        name = code.let(
            f"shufflevector {first.type} {first.name}, {second.type} {second.name}, <{lanes} x i32> <{listed}>"
        )
        return SimdValue(code, name, "float", lanes)
    return Line(code, address, "float", str(stride)).load(0, lanes=lanes)


def _tap(windows: Windows, corner: Images, u: str | int, v: int) -> str:
    """The address of element (u, v) of a window."""
    code = corner.code
    return corner.at(row=code.mul(u, windows.dilations[0]), pixel=str(v * windows.dilations[1])).pointer


def pool(args: KernelArguments, windows: Windows, combiner: Combiner, x: Operand, y: Operand, rows: int) -> None:
    """y = every window of x reduced."""
    code = args.code
    source, target = Images.of(args, x, False), Images.of(args, y, False)
    loops = _Loops(args, windows, rows)

    def enter(find: Callable[[Images], Images]) -> None:
        seen, made = find(source), find(target)

        def vector(row: str, down: Span, pixel: str) -> None:
            start = code.sub(code.mul(pixel, windows.strides[1]), windows.padding[2])
            corner = seen.at(row=down.start, pixel=start)
            total = Variable(combiner.identity_value(code, loops.lanes))
            with code.loop(down.first, down.end) as u:
                found = total.get()
                for v in range(windows.kernel[1]):
                    found = combiner.combine(
                        found, _load_strided(code, _tap(windows, corner, u, v), windows.strides[1], loops.lanes)
                    )
                total.set(found)
            Line(code, made.at(row=row, pixel=pixel).pointer, "float").store(0, total.get())

        def single(row: str, down: Span, pixel: str, across: Span) -> None:
            total = Variable(combiner.identity_value(code, 1))
            corner = seen.at(row=down.start, pixel=across.start)
            with each_tap(code, windows, corner, down, across) as (tap, _):
                total.set(combiner.combine(total.get(), Line(code, tap.pointer, "float").load(0, lanes=1)))
            Line(code, made.at(row=row, pixel=pixel).pointer, "float").store(0, total.get())

        loops.rows(vector, single)

    loops.planes(enter)


def spread(args: KernelArguments, windows: Windows, inputs: Sequence[Operand], y: Operand, rows: int) -> None:
    """Gradients: dy of every window goes to its largest element, or (without x) to all of them."""
    if len(inputs) == 1:
        _spread_evenly(args, windows, inputs[0], y, rows)
    else:
        _spread_to_largest(args, windows, inputs[0], inputs[1], y, rows)


def _spread_evenly(args: KernelArguments, windows: Windows, dy: Operand, y: Operand, rows: int) -> None:
    """Element by element of the windows: rows of dy are added to rows of y, as far as they lie inside."""
    code = args.code
    made, given = Images.of(args, y, False), Images.of(args, dy, False)
    loops = _Loops(args, windows, rows)
    stride, dilation, left = windows.strides[1], windows.dilations[1], windows.padding[2]
    apart = args.number(stride)

    def enter(find: Callable[[Images], Images]) -> None:
        plane, source = find(made), find(given)
        if windows.cover_the_image:
            value = splat(SimdValue(code, code.load(source.pointer, "float"), "float", 1))
            fill(code, Line(code, plane.pointer, "float"), ("0", loops.pixels), value)
            return
        fill_line(code, Line(code, plane.pointer, "float"), "0", loops.pixels)
        with code.loop(0, loops.down) as row:
            down = span(code, windows, 0, row, loops.height)
            with code.loop(down.first, down.end) as u, code.loop(0, windows.kernel[1]) as v:
                # Window p reads column p stride + offset of the image.
                offset = code.sub(code.mul(v, dilation), left)
                short = code.sub(stride - 1, offset)
                begin = code.div(code.intrinsic("smax", "i64", short, "0"), stride)
                available = code.add(code.sub(loops.width, offset), stride - 1)
                end = code.minimum(code.div(available, stride), loops.across)
                line = plane.at(row=code.add(down.start, code.mul(u, windows.dilations[0])), pixel=offset)
                to = Line(code, line.pointer, "float", None if stride == 1 else apart)
                from_ = Line(code, source.at(row=row).pointer, "float")

                def add(index: str, mask: str | None) -> None:
                    to.store(index, to.load(index, mask) + from_.load(index, mask), mask)

                vector_loop(code, begin, end, add)

    loops.planes(enter)


def _spread_to_largest(args: KernelArguments, windows: Windows, dy: Operand, x: Operand, y: Operand, rows: int) -> None:
    code = args.code
    made, given, source = (Images.of(args, operand, False) for operand in (y, dy, x))
    # Pairs of elements that lie side by side, each in one window, are written as full vectors.
    in_pairs = windows.kernel[1] == windows.strides[1] == 2 and windows.dilations[1] == 1
    in_pairs = in_pairs and not (windows.overlap or windows.is_padded) and windows.is_written_out
    loops = _Loops(args, windows, rows, adds=not in_pairs)
    writes_all = windows.tile and loops.lanes > 1 and in_pairs

    def enter(find: Callable[[Images], Images]) -> None:
        plane, from_, seen = find(made), find(given), find(source)
        if not writes_all:
            fill_line(code, Line(code, plane.pointer, "float"), "0", loops.pixels)

        def vector(row: str, down: Span, pixel: str) -> None:
            """Find the largest of several windows at once, then add to them one by one."""
            start = code.sub(code.mul(pixel, windows.strides[1]), windows.padding[2])
            corner, target = seen.at(row=down.start, pixel=start), plane.at(row=down.start, pixel=start)
            search = Search(code, loops.lanes)
            with code.loop(down.first, down.end) as u:
                offset = code.mul(code.mul(u, windows.dilations[0]), plane.row)
                for v in range(windows.kernel[1]):
                    position = code.let(f"trunc i64 {code.add(offset, v * windows.dilations[1])} to i32")
                    value = _load_strided(code, _tap(windows, corner, u, v), windows.strides[1], loops.lanes)
                    search.see(value, splat(SimdValue(code, position, "i32", 1), loops.lanes))
            found = search.found()
            values = Line(code, from_.at(row=row, pixel=pixel).pointer, "float").load(0, lanes=loops.lanes)
            with code.when(code.let(f"icmp slt i64 {down.first}, {down.end}")):
                for lane in range(loops.lanes):
                    offset = code.let(f"sext i32 {extract_lanes(found, lane, 1).name} to i64")
                    address = code.at(target.pointer, code.add(offset, lane * windows.strides[1]), "float")
                    line = Line(code, address, "float")
                    line.store(0, line.load(0, lanes=1) + extract_lanes(values, lane, 1))

        def pairs(row: str, down: Span, pixel: str) -> None:
            start = code.mul(pixel, windows.strides[1])
            corner = seen.at(row=down.start, pixel=start)
            found = first_largest(
                [_load_strided(code, _tap(windows, corner, u, v), 2, loops.lanes) for u, v in windows.taps]
            )
            value = Line(code, from_.at(row=row, pixel=pixel).pointer, "float").load(0, lanes=loops.lanes)
            parts = [select(found.equals(position), value, 0.0) for position in range(len(windows.taps))]
            target = plane.at(row=down.start, pixel=start)
            for u in range(windows.kernel[0]):
                _store_pairs(code, _tap(windows, target, u, 0), parts[2 * u], parts[2 * u + 1])

        def single(row: str, down: Span, pixel: str, across: Span) -> None:
            search = Search(code, 1)
            with each_tap(code, windows, seen.at(row=down.start, pixel=across.start), down, across) as (tap, position):
                narrow = SimdValue(code, code.let(f"trunc i64 {position} to i32"), "i32", 1)
                search.see(Line(code, tap.pointer, "float").load(0, lanes=1), narrow)
            found = search.found()
            with code.when((found >= 0).name):
                wide = code.let(f"zext i32 {found.name} to i64")
                u, v = code.div(wide, windows.kernel[1]), code.rem(wide, windows.kernel[1])
                target = plane.at(
                    row=code.add(down.start, code.mul(u, windows.dilations[0])),
                    pixel=code.add(across.start, code.mul(v, windows.dilations[1])),
                )
                line = Line(code, target.pointer, "float")
                value = Line(code, from_.at(row=row, pixel=pixel).pointer, "float").load(0, lanes=1)
                line.store(0, line.load(0, lanes=1) + value)

        loops.rows(pairs if in_pairs else vector, single)

    loops.planes(enter)


def _store_pairs(code: Code, address: str, first: SimdValue, second: SimdValue) -> None:
    """first[0], second[0], first[1], second[1], ..."""
    lanes = first.lanes
    listed = ", ".join(f"i32 {lane // 2 + lane % 2 * lanes}" for lane in range(2 * lanes))
    name = code.let(
        f"shufflevector {first.type} {first.name}, {second.type} {second.name}, <{2 * lanes} x i32> <{listed}>"
    )
    Line(code, address, "float").store(0, SimdValue(code, name, "float", 2 * lanes))
