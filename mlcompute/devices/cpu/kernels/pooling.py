"""max_pool, sum_pool and their gradients: channels-last images in vectors of channels.

A pool index, the number of an element in its window, is a byte in memory and 32 bits wide in registers.

Channels-first images are pooled along their rows (pooling_channels_first.py); a window over the full image is a plain
reduction. Gradients are written window by window by the one thread that owns the element, so sums keep one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import Combiner, combiner_for
from mlcompute.devices.cpu.codegen.loops import Line, Variable, fill_line, share_units, splat, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue, select
from mlcompute.devices.cpu.kernels import pooling_channels_first
from mlcompute.devices.cpu.kernels.pooling_windows import Images, Search, Span, Windows, each_tap, first_largest, span
from mlcompute.devices.cpu.kernels.reductions import reduce_axes
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operand, Operands, enough_rows
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import FLOAT32, Step

#: Channels per unit where there are too few samples to share: a cache line.
_CHANNELS = 16


def pool_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """max_pool and sum_pool."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    windows = Windows.of(step, x.shape, y.shape)
    combiner = combiner_for(step.op.name.removesuffix("_pool"), x.dtype)
    if computed_type(x.dtype) != FLOAT32 or combiner is None or not (x.size and y.size):
        return None
    if windows.cover_the_image:
        return reduce_axes(step, operands, combiner, x, y, (1, 2) if windows.last else (2, 3))
    if not _is_regular(x):
        return None
    write = _pool_channels if windows.last else pooling_channels_first.pool
    return [_entry(step, operands, windows, [x], [y], lambda args, rows: write(args, windows, combiner, x, y, rows))]


def pool_indices_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """max_pool_with_indices: channels-last only."""
    x, y, indices = operands[step.inputs[0]], *(operands[value] for value in step.results)
    windows = Windows.of(step, x.shape, y.shape)
    combiner = combiner_for("max", x.dtype)
    if computed_type(x.dtype) != FLOAT32 or combiner is None or not windows.last:
        return None
    if not (x.size and y.size and _is_regular(x)):
        return None

    def write(args: KernelArguments, rows: int) -> None:
        _pool_channels(args, windows, combiner, x, y, rows, indices)

    return [_entry(step, operands, windows, [x], [y, indices], write)]


def pool_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """max_pool_gradient, max_pool_indices_gradient (channels-last only) and sum_pool_gradient."""
    inputs, y = [operands[value] for value in step.inputs], operands[step.results[0]]
    windows = Windows.of(step, y.shape, inputs[0].shape)
    if not (computed_type(inputs[0].dtype) == FLOAT32 and all(o.size and _is_regular(o) for o in (*inputs, y))):
        return None
    is_by_indices = step.op.name == "max_pool_indices_gradient" and windows.last
    if not is_by_indices and any(x.dtype.kind in "iu" for x in inputs[1:]):
        return None
    write = _spread_channels if windows.last else pooling_channels_first.spread
    return [_entry(step, operands, windows, inputs, [y], lambda args, rows: write(args, windows, inputs, y, rows))]


def reads_bfloat16(step: Step) -> bool:
    """Are vectors of bfloat16 read and written once? Sums in memory would round too often."""
    is_gradient = step.op.name in ("max_pool_gradient", "max_pool_indices_gradient", "sum_pool_gradient")
    images = (step.inputs[0].shape, step.results[0].shape)
    windows = Windows.of(step, *(images[::-1] if is_gradient else images))
    return windows.last and not windows.overlap if is_gradient else windows.last and not windows.cover_the_image


def reads_windows(step: Step, operands: Operands) -> bool:
    """Do the elements that become vectors lie side by side?"""
    x, y = step.inputs[0].shape, step.results[0].shape
    if step.op.name in ("max_pool", "sum_pool") and Windows.of(step, x, y).cover_the_image:
        return True
    return all(_is_regular(operands[value]) for value in step.inputs)


def _is_regular(operand: Operand) -> bool:
    """Do the elements that become vectors lie side by side?"""
    return operand.strides[3] == 1 or operand.shape[3] == 1


def _entry(
    step: Step,
    operands: Operands,
    windows: Windows,
    inputs: Sequence[Operand],
    results: Sequence[Operand],
    write: Callable[[KernelArguments, int], None],
) -> Entry:
    rows = windows.samples if enough_rows(windows.samples, operands.threads) else 0
    code = Code(step.op.name, level=3)
    args = KernelArguments(code)
    write(args, rows)
    visits = windows.samples * windows.channels * windows.counts[0] * windows.counts[1] * len(windows.taps)
    return Entry(
        step, code, args.values, reads=list(inputs), writes=list(results), rows=rows,
        by_row={i for i, operand in enumerate((*inputs, *results)) if operand.is_dense} if rows else set(),
        kernel=f"{step.op.name} in {'channels' if windows.last else 'rows'}",
        cost=visits * (0.15 if windows.last else 0.5) + results[0].size * 0.1,
    )  # fmt: skip


class _Loops:
    """Loops over all windows of this thread's samples, or of its channels where samples are few."""

    def __init__(self, args: KernelArguments, windows: Windows, rows: int) -> None:
        self.code, self.windows = args.code, windows
        self.height, self.width = args.numbers(windows.image)
        self.down, self.across = args.numbers(windows.counts)
        width = windows.channels if rows else _CHANNELS
        self.tiles = -(-windows.channels // width)
        self._channels, self._width, self._tiles = args.numbers([windows.channels, width, self.tiles])
        self._units = share_units(args, windows.samples * self.tiles, rows)
        pixels = args.number(windows.image[0] * windows.image[1])
        self.pixels, self.elements = pixels, args.code.mul(pixels, self._channels)

    def each(
        self,
        enter: Callable[[str, tuple[str, str]], list[Images]],
        visit: Callable[[list[Images], str, str, Span, Span, tuple[str, str]], None],
    ) -> None:
        """enter(sample, channels) gives images; visit(images, row, pixel, down, across, channels) every window."""
        code = self.code
        with code.loop(*self._units) as unit:
            sample, tile = code.div(unit, self._tiles), code.rem(unit, self._tiles)
            begin = code.mul(tile, self._width)
            channels = begin, code.minimum(code.add(begin, self._width), self._channels)
            images = enter(sample, channels)
            with code.loop(0, self.down) as row:
                down = span(code, self.windows, 0, row, self.height)
                with code.loop(0, self.across) as pixel:
                    visit(images, row, pixel, down, span(code, self.windows, 1, pixel, self.width), channels)


def _full_and_clipped(
    code: Code, windows: Windows, down: Span, across: Span, full: Callable[[], None], clipped: Callable[[], None]
) -> None:
    """Code for windows inside the image, and other code for those at its border, where there are any."""
    if not windows.is_written_out:
        clipped()
        return
    masks = [mask for mask in (down.is_full, across.is_full) if mask is not None]
    if not masks:
        full()
        return
    inside = masks[0] if len(masks) == 1 else code.let(f"and i1 {masks[0]}, {masks[1]}")
    with code.when(inside):
        full()
    with code.when(code.let(f"xor i1 {inside}, true")):
        clipped()


def _tap_images(windows: Windows, corner: Images) -> list[Images]:
    """Every element of a window inside the image; `corner` is the first."""
    (down, across) = windows.dilations
    return [corner.at(row=str(u * down), pixel=str(v * across)) for u, v in windows.taps]


def _line(image: Images) -> Line:
    return Line(image.code, image.pointer, image.element)


def _pool_channels(
    args: KernelArguments,
    windows: Windows,
    combiner: Combiner,
    x: Operand,
    y: Operand,
    rows: int,
    indices: Operand | None = None,
) -> None:
    """Every window of x reduced; the number of the largest goes into `indices`."""
    code, lanes = args.code, vector_lanes()
    images_of = [Images.of(args, operand, True) for operand in (x, y, *([indices] if indices else []))]
    loops = _Loops(args, windows, rows)

    def visit(images: list[Images], row: str, pixel: str, down: Span, across: Span, channels: tuple[str, str]) -> None:
        corner = images[0].at(row=down.start, pixel=across.start)
        target, *where = (_line(image.at(row=row, pixel=pixel)) for image in images[1:])

        def full() -> None:
            taps = [_line(image) for image in _tap_images(windows, corner)]

            def body(index: str, mask: str | None) -> None:
                values = [tap.load(index, mask) for tap in taps]
                target.store(index, combiner.combine_all(values), mask)
                for line in where:
                    line.store(index, _narrow(first_largest(values)), mask)

            vector_loop(code, *channels, body)

        def clipped() -> None:
            def body(index: str, mask: str | None) -> None:
                total, search = Variable(combiner.identity_value(code)), Search(code, lanes) if where else None
                with each_tap(code, windows, corner, down, across) as (tap, position):
                    value = _line(tap).load(index, mask)
                    total.set(combiner.combine(total.get(), value))
                    if search is not None:
                        search.see(value, _splat_number(code, position))
                target.store(index, total.get(), mask)
                for line in where:
                    assert search is not None
                    line.store(index, _narrow(search.found()), mask)

            vector_loop(code, *channels, body)

        _full_and_clipped(code, windows, down, across, full, clipped)

    def enter(sample: str, channels: tuple[str, str]) -> list[Images]:
        return [image.at(sample=sample) for image in images_of]

    depends_on = f"{combiner.name} {combiner.element} {windows.code_key} {[image.element for image in images_of]}"
    code.later(f"{depends_on} {lanes}", lambda: loops.each(enter, visit))


def _spread_channels(args: KernelArguments, windows: Windows, inputs: Sequence[Operand], y: Operand, rows: int) -> None:
    """Gradients: dy of every window goes to its largest element, or to all of them.

    inputs   dy, and what tells the largest element: x, or its index in every window; neither for all of them
    """
    code, lanes = args.code, vector_lanes()
    made, given = Images.of(args, y, True), Images.of(args, inputs[0], True)
    indices = [Images.of(args, p, True) for p in inputs[1:] if p.dtype.kind in "iu"]
    seen = [Images.of(args, x, True) for x in inputs[1:] if x.dtype.kind not in "iu"]
    loops = _Loops(args, windows, rows)
    adds = windows.overlap

    def enter(sample: str, channels: tuple[str, str]) -> list[Images]:
        images = [image.at(sample=sample) for image in (made, given, *seen, *indices)]
        if not windows.tile:
            _clear(loops, images[0], channels)
        return images

    def put(target: Line, index: str, mask: str | None, value: SimdValue) -> None:
        target.store(index, target.load(index, mask) + value if adds else value, mask)

    def visit(images: list[Images], row: str, pixel: str, down: Span, across: Span, channels: tuple[str, str]) -> None:
        source = _line(images[1].at(row=row, pixel=pixel))
        corners = [image.at(row=down.start, pixel=across.start) for image in (images[0], *images[2 : 2 + len(seen)])]
        known = [_line(image.at(row=row, pixel=pixel)) for image in images[2 + len(seen) :]]

        def full() -> None:
            targets, *taps = ([_line(image) for image in _tap_images(windows, corner)] for corner in corners)

            def body(index: str, mask: str | None) -> None:
                dy = source.load(index, mask)
                found = first_largest([tap.load(index, mask) for tap in taps[0]]) if taps else None
                found = _wide(known[0].load(index, mask)) if known else found
                for position, target in enumerate(targets):
                    put(target, index, mask, dy if found is None else select(found.equals(position), dy, 0.0))

            vector_loop(code, *channels, body)

        def clipped() -> None:
            def body(index: str, mask: str | None) -> None:
                dy = source.load(index, mask)
                search = Search(code, lanes) if seen else None
                if search is not None:
                    with each_tap(code, windows, corners[1], down, across) as (tap, position):
                        search.see(_line(tap).load(index, mask), _splat_number(code, position))
                index_in_window = _wide(known[0].load(index, mask)) if known else None
                with each_tap(code, windows, corners[0], down, across) as (tap, position):
                    found = index_in_window if search is None else search.found()
                    value = dy if found is None else select(found.equals(_splat_number(code, position)), dy, 0.0)
                    put(_line(tap), index, mask, value)

            vector_loop(code, *channels, body)

        _full_and_clipped(code, windows, down, across, full, clipped)

    elements = [[image.element for image in images] for images in ([made, given], seen, indices)]
    depends_on = f"{windows.code_key} {windows.tile} {adds} {elements} {loops.tiles == 1} {lanes}"
    code.later(depends_on, lambda: loops.each(enter, visit))


def _narrow(found: SimdValue) -> SimdValue:
    return found.let(f"trunc {found.type} {found.name} to {vector('i8', found.lanes)}", "i8")


def _wide(index_in_window: SimdValue) -> SimdValue:
    return index_in_window.let(
        f"zext {index_in_window.type} {index_in_window.name} to {vector('i32', index_in_window.lanes)}", "i32"
    )


def _splat_number(code: Code, position: str) -> SimdValue:
    return splat(SimdValue(code, code.let(f"trunc i64 {position} to i32"), "i32", 1))


def _clear(loops: _Loops, image: Images, channels: tuple[str, str]) -> None:
    """Zeros in all pixels of some channels; in one go where those are all."""
    code = loops.code
    if loops.tiles == 1:
        fill_line(code, _line(image), "0", loops.elements)
        return
    with code.loop(0, loops.pixels) as pixel:
        fill_line(code, _line(image.at(pixel=pixel)), *channels)


KERNELS: dict[str, Maker] = {
    **dict.fromkeys(("max_pool", "sum_pool"), pool_entries),
    "max_pool_with_indices": pool_indices_entries,
    **dict.fromkeys(("max_pool_gradient", "max_pool_indices_gradient", "sum_pool_gradient"), pool_gradient_entries),
}
READS = dict.fromkeys(KERNELS, reads_windows)
BFLOAT16 = dict.fromkeys(KERNELS, reads_bfloat16)
