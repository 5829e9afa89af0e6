"""max_pool, sum_pool and their gradients: channels-last images in vectors of channels.

A place, the number of an element in its window, is a byte in memory and 32 bits wide in registers.

Channels-first images are walked along their rows (pooling_rows.py); a window over the whole image is a plain
reduction. Gradients are written window by window by the one thread that owns the place, so sums keep one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.code import Code, vector, vector_lanes
from mlcompute.devices.cpu.entry import Entry, Maker
from mlcompute.devices.cpu.kernels import pooling_rows
from mlcompute.devices.cpu.kernels.folds import Fold, fold_of
from mlcompute.devices.cpu.kernels.indices import fill_line
from mlcompute.devices.cpu.kernels.reductions import reduce_axes
from mlcompute.devices.cpu.kernels.walks import LEAST_ROWS, Cell, Line, Words, each_vector, share_units, splat
from mlcompute.devices.cpu.kernels.windows import Images, Search, Span, Windows, each_tap, first_largest, span
from mlcompute.devices.cpu.lanes import Lanes, select
from mlcompute.devices.cpu.operands import Operand, Operands
from mlcompute.ops.op import FLOAT32, Step

#: Channels per unit where there are too few samples to share: a cache line.
_CHANNELS = 16


def pool_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """max_pool and sum_pool."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    windows = Windows.of(step, x.shape, y.shape)
    fold = fold_of(step.op.name.removesuffix("_pool"), x.dtype)
    if x.dtype != FLOAT32 or fold is None or not (x.size and y.size):
        return None
    if windows.cover_the_image:
        return reduce_axes(step, operands, fold, x, y, (1, 2) if windows.last else (2, 3))
    if not _is_regular(x):
        return None
    write = _pool_channels if windows.last else pooling_rows.pool
    return [_entry(step, windows, [x], [y], lambda words, rows: write(words, windows, fold, x, y, rows))]


def places_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """max_pool_places: channels-last only."""
    x, y, places = operands[step.inputs[0]], *(operands[value] for value in step.results)
    windows = Windows.of(step, x.shape, y.shape)
    fold = fold_of("max", x.dtype)
    if x.dtype != FLOAT32 or fold is None or not windows.last or not (x.size and y.size and _is_regular(x)):
        return None

    def write(words: Words, rows: int) -> None:
        _pool_channels(words, windows, fold, x, y, rows, places)

    return [_entry(step, windows, [x], [y, places], write)]


def pool_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """max_pool_gradient, max_pool_spread (channels-last only) and sum_pool_gradient."""
    inputs, y = [operands[value] for value in step.inputs], operands[step.results[0]]
    windows = Windows.of(step, y.shape, inputs[0].shape)
    if not (inputs[0].dtype == FLOAT32 and all(o.size and _is_regular(o) for o in (*inputs, y))):
        return None
    if any(x.dtype != FLOAT32 for x in inputs[1:]) and not (step.op.name == "max_pool_spread" and windows.last):
        return None
    write = _spread_channels if windows.last else pooling_rows.spread
    return [_entry(step, windows, inputs, [y], lambda words, rows: write(words, windows, inputs, y, rows))]


def _is_regular(operand: Operand) -> bool:
    """Do the elements that become vectors lie side by side?"""
    return operand.strides[3] == 1 or operand.shape[3] == 1


def _entry(
    step: Step,
    windows: Windows,
    inputs: Sequence[Operand],
    results: Sequence[Operand],
    write: Callable[[Words, int], None],
) -> Entry:
    rows = windows.samples if windows.samples >= LEAST_ROWS else 0
    code = Code(step.op.name, thorough=True)
    words = Words(code)
    write(words, rows)
    visits = windows.samples * windows.channels * windows.counts[0] * windows.counts[1] * len(windows.taps)
    return Entry(
        step, code, words.arguments, reads=list(inputs), writes=list(results), rows=rows,
        by_row={i for i, operand in enumerate((*inputs, *results)) if operand.is_dense} if rows else set(),
        kernel=f"{step.op.name} in {'channels' if windows.last else 'rows'}",
        cost=visits * (0.15 if windows.last else 0.5) + results[0].size * 0.1,
    )  # fmt: skip


class _Walk:
    """A walk over all windows of this thread's samples, or of its channels where samples are few."""

    def __init__(self, words: Words, windows: Windows, rows: int) -> None:
        self.code, self.windows = words.code, windows
        self.height, self.width = words.numbers(windows.image)
        self.down, self.across = words.numbers(windows.counts)
        width = windows.channels if rows else _CHANNELS
        self.tiles = -(-windows.channels // width)
        self._channels, self._width, self._tiles = words.numbers([windows.channels, width, self.tiles])
        self._units = share_units(words, windows.samples * self.tiles, rows)
        pixels = words.number(windows.image[0] * windows.image[1])
        self.pixels, self.elements = pixels, words.code.mul(pixels, self._channels)

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


def _whole_and_clipped(
    code: Code, windows: Windows, down: Span, across: Span, whole: Callable[[], None], clipped: Callable[[], None]
) -> None:
    """Code for windows inside the image, and other code for those at its border, where there are any."""
    if not windows.is_written_out:
        clipped()
        return
    masks = [mask for mask in (down.is_whole, across.is_whole) if mask is not None]
    if not masks:
        whole()
        return
    inside = masks[0] if len(masks) == 1 else code.let(f"and i1 {masks[0]}, {masks[1]}")
    with code.when(inside):
        whole()
    with code.when(code.let(f"xor i1 {inside}, true")):
        clipped()


def _tap_images(windows: Windows, corner: Images) -> list[Images]:
    """Every element of a window inside the image; `corner` is the first."""
    (down, across) = windows.dilations
    return [corner.at(row=str(u * down), pixel=str(v * across)) for u, v in windows.taps]


def _line(image: Images) -> Line:
    return Line(image.code, image.pointer, image.element)


def _pool_channels(
    words: Words, windows: Windows, fold: Fold, x: Operand, y: Operand, rows: int, places: Operand | None = None
) -> None:
    """Every window of x folded; where it found the largest goes into `places`."""
    code, lanes = words.code, vector_lanes()
    images_of = [Images.of(words, operand, True) for operand in (x, y, *([places] if places else []))]
    walk = _Walk(words, windows, rows)

    def visit(images: list[Images], row: str, pixel: str, down: Span, across: Span, channels: tuple[str, str]) -> None:
        corner = images[0].at(row=down.start, pixel=across.start)
        target, *where = (_line(image.at(row=row, pixel=pixel)) for image in images[1:])

        def whole() -> None:
            taps = [_line(image) for image in _tap_images(windows, corner)]

            def body(index: str, mask: str | None) -> None:
                values = [tap.load(index, mask) for tap in taps]
                target.store(index, fold.all_of(values), mask)
                for line in where:
                    line.store(index, _narrow(first_largest(values)), mask)

            each_vector(code, *channels, body)

        def clipped() -> None:
            def body(index: str, mask: str | None) -> None:
                total, search = Cell(fold.start(code)), Search(code, lanes) if where else None
                with each_tap(code, windows, corner, down, across) as (tap, position):
                    value = _line(tap).load(index, mask)
                    total.set(fold.combine(total.get(), value))
                    if search is not None:
                        search.see(value, _splat_number(code, position))
                target.store(index, total.get(), mask)
                for line in where:
                    assert search is not None
                    line.store(index, _narrow(search.found()), mask)

            each_vector(code, *channels, body)

        _whole_and_clipped(code, windows, down, across, whole, clipped)

    walk.each(lambda sample, channels: [image.at(sample=sample) for image in images_of], visit)


def _spread_channels(words: Words, windows: Windows, inputs: Sequence[Operand], y: Operand, rows: int) -> None:
    """Gradients: dy of every window goes to its largest element, or to all of them.

    inputs   dy, and what tells the largest element: x, or its place in every window; neither for all of them
    """
    code, lanes = words.code, vector_lanes()
    made, given = Images.of(words, y, True), Images.of(words, inputs[0], True)
    places = [Images.of(words, p, True) for p in inputs[1:] if p.dtype != FLOAT32]
    seen = [Images.of(words, x, True) for x in inputs[1:] if x.dtype == FLOAT32]
    walk = _Walk(words, windows, rows)
    adds = windows.overlap

    def enter(sample: str, channels: tuple[str, str]) -> list[Images]:
        images = [image.at(sample=sample) for image in (made, given, *seen, *places)]
        if not windows.tile:
            _clear(walk, images[0], channels)
        return images

    def put(target: Line, index: str, mask: str | None, value: Lanes) -> None:
        target.store(index, target.load(index, mask) + value if adds else value, mask)

    def visit(images: list[Images], row: str, pixel: str, down: Span, across: Span, channels: tuple[str, str]) -> None:
        source = _line(images[1].at(row=row, pixel=pixel))
        corners = [image.at(row=down.start, pixel=across.start) for image in (images[0], *images[2 : 2 + len(seen)])]
        known = [_line(image.at(row=row, pixel=pixel)) for image in images[2 + len(seen) :]]

        def whole() -> None:
            targets, *taps = ([_line(image) for image in _tap_images(windows, corner)] for corner in corners)

            def body(index: str, mask: str | None) -> None:
                dy = source.load(index, mask)
                found = first_largest([tap.load(index, mask) for tap in taps[0]]) if taps else None
                found = _wide(known[0].load(index, mask)) if known else found
                for position, target in enumerate(targets):
                    put(target, index, mask, dy if found is None else select(found.equals(position), dy, 0.0))

            each_vector(code, *channels, body)

        def clipped() -> None:
            def body(index: str, mask: str | None) -> None:
                dy = source.load(index, mask)
                search = Search(code, lanes) if seen else None
                if search is not None:
                    with each_tap(code, windows, corners[1], down, across) as (tap, position):
                        search.see(_line(tap).load(index, mask), _splat_number(code, position))
                place = _wide(known[0].load(index, mask)) if known else None
                with each_tap(code, windows, corners[0], down, across) as (tap, position):
                    found = place if search is None else search.found()
                    value = dy if found is None else select(found.equals(_splat_number(code, position)), dy, 0.0)
                    put(_line(tap), index, mask, value)

            each_vector(code, *channels, body)

        _whole_and_clipped(code, windows, down, across, whole, clipped)

    walk.each(enter, visit)


def _narrow(found: Lanes) -> Lanes:
    return found.let(f"trunc {found.type} {found.name} to {vector('i8', found.lanes)}", "i8")


def _wide(place: Lanes) -> Lanes:
    return place.let(f"zext {place.type} {place.name} to {vector('i32', place.lanes)}", "i32")


def _splat_number(code: Code, position: str) -> Lanes:
    return splat(Lanes(code, code.let(f"trunc i64 {position} to i32"), "i32", 1))


def _clear(walk: _Walk, image: Images, channels: tuple[str, str]) -> None:
    """Zeros in all pixels of some channels; in one go where those are all."""
    code = walk.code
    if walk.tiles == 1:
        fill_line(code, _line(image), "0", walk.elements)
        return
    with code.loop(0, walk.pixels) as pixel:
        fill_line(code, _line(image.at(pixel=pixel)), *channels)


KERNELS: dict[str, Maker] = {
    **dict.fromkeys(("max_pool", "sum_pool"), pool_entries),
    "max_pool_places": places_entries,
    **dict.fromkeys(("max_pool_gradient", "max_pool_spread", "sum_pool_gradient"), pool_gradient_entries),
}
