"""Convolutions as tiles for Winograd's algorithm: which ones it suits, and how blocks, slices and parts are cut."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import aligned, thread_floats, threads_bytes
from mlcompute.devices.cpu.codegen.code import vector_lanes
from mlcompute.devices.cpu.gemm.packed_gemm import FLOPS_PER_NS, panel_width
from mlcompute.devices.cpu.kernels.convolution_windows import taps_inside
from mlcompute.devices.cpu.kernels.winograd_transforms import Form, forms
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import Shape, Step

#: Tiles of a block, about: enough rows for a product, and their points within so many bytes of the cache.
_TILES, _CACHE = 48, 400_000
#: Bytes for the points of all threads' blocks, about.
_ALL_BLOCKS = 3 << 20
#: Of the time of a plain sum, what filters in groups or with extent in one direction may be estimated to take; one with
#: channels that do not fill vectors, since plain sums fill them up, too; and a dilated one.
_GAIN, _GAIN_UNFILLED, _GAIN_DILATED = 0.75, 1.25, 1.0
#: Inputs of a group of filters that are worth multiplying zeros with, to fill vectors.
_LEAST_INPUTS = 4
#: Fewer tiles than this do not pay for transforming the filters.
_LEAST_TILES = 64
#: Bytes for the sums of all slices of the gradient of filters; a single one may take more.
_SUMS = 5 << 19
#: Bytes of the points of filters that stay in a thread's cache, and what reading others costs, in tiles of a block that
#: could be multiplied meanwhile.
_CACHED_FILTERS, _READING = 2_400_000, 3.0
#: Bytes of the sums that a part of the filters takes, about: they are read and written once per block of tiles.
_PART = 1_300_000
#: Filters (inputs times outputs) whose points take more memory than they save time.
_MOST_FILTERS = 256 * 256
#: Taps of a part of a large filter, at most.
_MOST_TAPS = 5
#: Of stride two, large filters and volumes: floats of the points of filters, at most, what one of them or of the
#: filters costs in nanoseconds, and how much longer tiles take than estimated.
_MOST_POINTS, _PER_FILTER, _LONGER = 36 * 256 * 256, 1.2, 1.15


class Split(NamedTuple):
    """Filters of stride two, or of many taps, as smaller ones of stride one: the images that these look at are the
    channels (a, b, c) of one.

        x (step i + apart a - top, step j + apart b - left, c)   is   (i, j, (a, b, c))
        w (o, c, step p + apart a, step q + apart b)             is   (o, (a, b, c), p, q)

    With stride two, a and b are the remainders of rows and columns. Large filters are cut: a part has `apart` taps.

    channels    of the image
    before      top, left: rows and columns of zeros before it
    extents     taps of the filter, down and across; those of parts beyond it are 0
    counts      parts, down and across; `steps` and `aparts` likewise
    of_result   is it the result that has parts (the gradient of the input with stride two), and not the source?
    """

    channels: int
    before: Shape
    extents: Shape
    counts: Shape
    steps: Shape
    aparts: Shape
    of_result: bool = False

    @property
    def parts(self) -> int:
        """In both directions."""
        return math.prod(self.counts)


class Planes(NamedTuple):
    """A convolution of volumes as one of images: of every plane of the result, whose channels are those of the planes
    under the taps along the depth, one plane after the other.

    taps       along the depth, and `step` from one to the next
    channels   of a volume, of the source
    front      planes of zeros before the source
    source, result   planes of a sample
    """

    taps: int
    step: int
    channels: int
    front: int
    source: int
    result: int


class Sizes(NamedTuple):
    """A convolution as tiles: image in (samples, height, width, depth), image out (..., rows, columns, channels).

    Depth and channels are those of a group of filters, or of as many groups as fill a vector: their products are one,
    in which filters of other groups are zeros.

    down, across   the forms in both directions
    filled         depth and channels fill vectors; else they are rounded up to `depth` and `channels`, with zeros
    dilations      from one pixel of a tile to the next
    groups         products per point
    merged         groups of filters in one product
    split          of a convolution of stride two, or with large filters: depth or channels are theirs
    planes         of a convolution of volumes: samples and depth are theirs
    """

    down: Form
    across: Form
    samples: int
    source: Shape
    depth: int
    result: Shape
    channels: int
    top: int
    left: int
    filled: bool = True
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1
    merged: int = 1
    split: Split | None = None
    planes: Planes | None = None

    @property
    def points(self) -> int:
        return self.down.inputs * self.across.inputs

    @property
    def sections(self) -> int:
        """Parts in which a row of pixels is cut: a sequence is one long row."""
        return -(-self._width_tiles // max(8, self._cached_tiles)) if self.down.taps == 1 else 1

    @property
    def grids(self) -> tuple[int, int]:
        """Dilated, an image is many images, of pixels that lie as far apart as taps: how many, down and across."""
        return min(self.dilations[0], self.result[0]), min(self.dilations[1], self.result[1])

    @property
    def height_tiles(self) -> int:
        """Rows of tiles in one grid."""
        return -(-self.result[0] // (self.dilations[0] * self.down.outputs))

    @property
    def tile_rows(self) -> int:
        """Rows of tiles in one sample: as many per row of pixels as it has sections."""
        return math.prod(self.grids) * self.height_tiles * self.sections

    @property
    def row_tiles(self) -> int:
        """Tiles in one row."""
        return -(-self._width_tiles // self.sections)

    @property
    def _width_tiles(self) -> int:
        return -(-self.result[1] // (self.dilations[1] * self.across.outputs))

    @property
    def _cached_tiles(self) -> int:
        cache = min(_CACHE, _ALL_BLOCKS // machine_slices())
        return min(_TILES, cache // (4 * self.points * (self.depth + self.channels)))

    @property
    def block(self) -> int:
        """Rows of tiles that are worked on together."""
        return max(1, round(self._cached_tiles / self.row_tiles))

    @property
    def block_tiles(self) -> int:
        return self.block * self.row_tiles

    def point_floats(self, channels: int) -> int:
        """From the tiles of one point to those of the next: not a power of two, which would crowd the cache."""
        return self.block_tiles * channels + 16

    @property
    def tiles(self) -> int:
        return self.samples * self.tile_rows * self.row_tiles

    @property
    def code_key(self) -> str:
        """Everything a kernel's code depends on; extents are arguments."""
        choices = f"{panel_width(self.channels)} {self.filled} {self.merged > 1} {vector_lanes()}"
        split = self.split and self.split[2:]
        return f"{self.down} {self.across} {choices} {split} {self.planes is not None}"

    @property
    def cost(self) -> float:
        """Nanoseconds, about: the products, and bringing pixels to points and back."""
        per_point = self.depth * self.channels + 10 * (self.depth + self.channels)
        return 2.0 * self.groups * self.tiles * self.points * per_point / FLOPS_PER_NS


def winograd_sizes(step: Step) -> Sizes | None:
    """The sizes of a step that this form suits, None for all others. Depth and channels are those of the product."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    if not is_allowed():
        return None
    if len(w) == 5:
        return _of_planes(step)
    if len(w) == 4 and set(a["strides"]) != {1}:
        return _of_stride_two(step)
    if len(w) == 4 and not forms(*w[2:]):
        return _of_large_filters(step)
    if len(w) != 4 or (merged := _merged_groups(w, a["groups"])) is None:
        return None
    # The distance between taps is that of pixels of a tile, too; a single tap has none.
    down, across = (dilation if taps > 1 else 1 for dilation, taps in zip(a["dilations"], w[2:], strict=True))
    lanes, (top, bottom, left, right) = vector_lanes(), a["padding"]
    most_down, most_across = down * (w[2] - 1), across * (w[3] - 1)
    groups, per_group = a["groups"] // merged, (w[0] // a["groups"] * merged, w[1] * merged)
    rounded = [-(-count // lanes) * lanes for count in per_group]
    if groups * math.prod(rounded) > _MOST_FILTERS:
        return None
    if max(top, bottom) > most_down or max(left, right) > most_across:
        return None
    if step.op.name == "convolution_input_gradient":
        top, left = most_down - top, most_across - left
        (source, depth), (result, channels) = (y[2:], rounded[0]), (x[2:], rounded[1])
    else:
        (source, depth), (result, channels) = (x[2:], rounded[1]), (y[2:], rounded[0])
    filled = rounded == [*per_group]
    fitting = [
        Sizes(*both, x[0], source, depth, result, channels, top, left, filled, (down, across), groups, merged)
        for both in forms(*w[2:])
    ]
    fitting = [sizes for sizes in fitting if sizes.tiles >= _LEAST_TILES]
    # Less is saved in one direction, by two or four taps, with zeros, or where few pixels have taps inside: not enough
    # for few channels.
    has_few = w[2] != w[3] or w[2] % 2 == 0 or a["groups"] > 1
    if has_few or not filled or max(down, across) > 1:
        plain = 2.0 * y[0] * groups * math.prod(per_group) * taps_inside(step) / FLOPS_PER_NS
        gain = _GAIN if has_few else _GAIN_DILATED if filled else _GAIN_UNFILLED
        fitting = [sizes for sizes in fitting if sizes.cost < gain * plain]
    return min(fitting, key=lambda sizes: sizes.cost, default=None)


def _of_stride_two(step: Step) -> Sizes | None:
    """A convolution of stride two, if it suits; one in one direction has a stride in that alone."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    strides = [1 if taps == 1 else stride for taps, stride in zip(w[2:], a["strides"], strict=True)]
    if not _is_plain(step) or any(stride != min(taps, 2) for taps, stride in zip(w[2:], a["strides"], strict=True)):
        return None
    before, taps = a["padding"][::2], [-(-extent // stride) for extent, stride in zip(w[2:], strides, strict=True)]
    of_result = step.op.name == "convolution_input_gradient"
    split = Split(w[1], before, w[2:], (*strides,), (*strides,), (1, 1), of_result)
    if of_result:
        places = zip(x[2:], before, strides, strict=True)
        grid = tuple(-(-(extent + zeros) // stride) for extent, zeros, stride in places)
        source, depth, result, channels = y[2:], w[0], grid, split.parts * w[1]
        top, left = taps[0] - 1, taps[1] - 1
    else:
        source, depth, result, channels = x[2:], split.parts * w[1], y[2:], w[0]
        top = left = 0
    each = forms(*taps)
    return _best(step, [Sizes(*both, x[0], source, depth, result, channels, top, left, split=split) for both in each])


def _of_large_filters(step: Step) -> Sizes | None:
    """A convolution with filters of an extent that there is no form for, as one of several small filters."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    (top, bottom, left, right), (down, across) = a["padding"], (w[2] - 1, w[3] - 1)
    if not _is_plain(step) or max(top, bottom) > down or max(left, right) > across or (w[2] != w[3] and 1 not in w[2:]):
        return None
    if step.op.name == "convolution_input_gradient":
        source, depth, result, channels, before = y[2:], w[0], x[2:], w[1], (down - top, across - left)
    else:
        source, depth, result, channels, before = x[2:], w[1], y[2:], w[0], (top, left)
    fitting = []
    for most in range(2, min(max(w[2:]), _MOST_TAPS) + 1):
        taps = tuple(min(extent, most) for extent in w[2:])
        counts = tuple(-(-extent // part) for extent, part in zip(w[2:], taps, strict=True))
        split = Split(depth, before, w[2:], counts, (1, 1), taps)
        for both in forms(*taps):
            fitting.append(Sizes(*both, x[0], source, split.parts * depth, result, channels, 0, 0, split=split))
    return _best(step, fitting)


def _is_plain(step: Step) -> bool:
    """Without groups or dilation, and do channels fill vectors?"""
    a, (_, w, _) = step.attributes, convolution_shapes(step)
    return a["groups"] == 1 == max(a["dilations"]) and w[0] % vector_lanes() == w[1] % vector_lanes() == 0


def _of_planes(step: Step) -> Sizes | None:
    """A convolution of volumes, if it suits."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    (front, _, top, bottom, left, right), (deep, down, across), lanes = a["padding"], a["dilations"], vector_lanes()
    taps, reach = w[2], (deep * (w[2] - 1), down * (w[3] - 1), across * (w[4] - 1))
    both = forms(*w[3:])
    if set(a["strides"]) != {1} or a["groups"] > 1 or down * across > 1 or w[0] % lanes or w[1] % lanes:
        return None
    if max(top, bottom) > reach[1] or max(left, right) > reach[2]:
        return None
    if step.op.name == "convolution_input_gradient":
        planes = Planes(taps, deep, w[0], reach[0] - front, y[2], x[2])
        source, result, channels, top, left = y[3:], x[3:], w[1], reach[1] - top, reach[2] - left
    else:
        planes = Planes(taps, deep, w[1], front, x[2], y[2])
        source, result, channels = x[3:], y[3:], w[0]
    samples, depth = x[0] * planes.result, taps * planes.channels
    fitting = [Sizes(*each, samples, source, depth, result, channels, top, left, planes=planes) for each in both]
    return _best(step, fitting)


def _best(step: Step, fitting: list[Sizes]) -> Sizes | None:
    """The one of least cost, filters included; None if a plain sum costs less."""
    _, w, y = convolution_shapes(step)
    fitting = [sizes for sizes in fitting if sizes.tiles >= _LEAST_TILES and filter_floats(sizes) <= _MOST_POINTS]
    best = min(fitting, key=_cost_with_filters, default=None)
    plain = 2.0 * y[0] * w[0] * w[1] * taps_inside(step) / FLOPS_PER_NS + _PER_FILTER * math.prod(w)
    return best if best is not None and _cost_with_filters(best) < plain else None


def _cost_with_filters(sizes: Sizes) -> float:
    """Nanoseconds, about, where filters may be many beside the pixels."""
    return _LONGER * sizes.cost + _PER_FILTER * filter_floats(sizes)


def _merged_groups(w: Shape, groups: int) -> int | None:
    """Groups of filters that are multiplied as one, to fill vectors; None where that is not possible or wastes most."""
    outputs, inputs, lanes = w[0] // groups, w[1], vector_lanes()
    if groups == 1 or outputs % lanes == inputs % lanes == 0:
        return 1
    merged = lanes // inputs
    if outputs != inputs or lanes % inputs or inputs < _LEAST_INPUTS or groups % merged:
        return None
    return merged


def is_allowed() -> bool:
    """MLCOMPUTE_WINOGRAD=0 asks for plain sums of products, in which an infinity stays where it is."""
    return os.environ.get("MLCOMPUTE_WINOGRAD", "") != "0"


def thread_parts(sizes: Sizes) -> dict[str, int]:
    """A thread's own memory: pixels under a row of tiles with their border, and the points of a block."""
    down, across = sizes.down, sizes.across
    width = sizes.row_tiles * across.outputs + across.taps - 1
    return {
        "pixels": max(down.inputs * width * sizes.depth, down.outputs * width * sizes.channels),
        "x": sizes.points * sizes.point_floats(sizes.depth),
        "y": sizes.points * sizes.point_floats(sizes.channels),
    }


def filter_floats(sizes: Sizes) -> int:
    """Floats for the points of the filters of a group."""
    return aligned(sizes.points * sizes.depth * sizes.channels)


def winograd_workspace(step: Step, sizes: Sizes) -> int:
    """Bytes for the points of filters, or of their gradient once per slice, and for every thread's own memory."""
    if step.op.name == "convolution_weight_gradient":
        cut = cut_filters(sizes)
        return threads_bytes(thread_parts(cut.part)) + cut.sums_bytes
    _, part = cut_channels(sizes)
    return threads_bytes(thread_parts(part)) + 4 * sizes.groups * filter_floats(sizes)


class Cut(NamedTuple):
    """How the gradient of filters is cut: slices of the batch, parts of a group's filters, and the sizes of a part."""

    slices: int
    depth_parts: int
    channel_parts: int
    part: Sizes

    @property
    def parts(self) -> int:
        """Of all groups."""
        return self.part.groups * self.depth_parts * self.channel_parts

    @property
    def task_floats(self) -> int:
        """Floats from the sums of a part in one slice to those of the next: threads do not write side by side."""
        return thread_floats({"sums": filter_floats(self.part)})

    @property
    def sums_bytes(self) -> int:
        return 4 * self.slices * self.parts * self.task_floats


def cut_filters(sizes: Sizes) -> Cut:
    """A fact of shape and machine, not of the thread count: each slice has sums of its own.

    Small sums are cheap, and every thread then reads its own samples only. Where there are too few slices for all
    threads, these share parts of the filters as well. A part transforms its own channels of x and dy; others transform
    them again.
    """
    whole = 4 * sizes.groups * filter_floats(sizes)
    slices = max(1, min(machine_slices(), sizes.samples, max(1, _SUMS // whole)))
    lanes, panel = vector_lanes(), panel_width(sizes.channels) * vector_lanes()
    all_depth_parts = [parts for parts in _divisors(sizes.depth // lanes) if _keeps_images(sizes, sizes.depth // parts)]
    all_channel_parts = _divisors(-(-sizes.channels // panel)) if sizes.channels % panel == 0 else [1]
    found = []
    for depth_parts in all_depth_parts:
        for channel_parts in all_channel_parts:
            part = sizes._replace(depth=sizes.depth // depth_parts, channels=sizes.channels // channel_parts)
            tasks = slices * sizes.groups * depth_parts * channel_parts
            rounds = -(-tasks // machine_slices()) * machine_slices() / tasks
            spills = max(1.0, 4 * filter_floats(part) / _PART)
            found.append(
                (part.cost * depth_parts * channel_parts * rounds * spills**0.25, depth_parts, channel_parts, part)
            )
    _, depth_parts, channel_parts, part = min(found, key=lambda choice: choice[:3])
    return Cut(slices, depth_parts, channel_parts, part)


def _keeps_images(sizes: Sizes, depth: int) -> bool:
    """Are parts of so many channels made of full images or planes, or these of full parts?"""
    images = sizes.split or sizes.planes
    channels = depth if images is None else images.channels
    return depth % channels == 0 or channels % depth == 0


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def cut_channels(sizes: Sizes) -> tuple[int, Sizes]:
    """Parts of the channels that are computed one after the other, and the sizes of one."""
    parts = _channel_parts(sizes)
    return parts, sizes._replace(channels=sizes.channels // parts)


def _channel_parts(sizes: Sizes) -> int:
    """Parts of the channels, each with filters that stay in the cache while they are multiplied with all tiles.

    A part transforms x again. Filters that do not stay in the cache are read once for every block of tiles.
    """
    panel = panel_width(sizes.channels) * vector_lanes()
    if sizes.channels % panel or sizes.groups > 1:
        return 1

    def cost(parts: int) -> float:
        part = sizes._replace(channels=sizes.channels // parts)
        is_read_again = 4 * filter_floats(part) > _CACHED_FILTERS and sizes.tiles > part.block_tiles
        return parts * part.cost * (1.0 + (_READING / part.block_tiles if is_read_again else 0.0))

    return min(_divisors(sizes.channels // panel), key=cost)
