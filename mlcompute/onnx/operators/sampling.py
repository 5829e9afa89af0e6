"""Operators that read images between pixels: resizing, grids, regions."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.budget import affordable
from mlcompute.onnx.operands import Failed, Known, Listed, Use
from mlcompute.onnx.operators.shapes import limited
from mlcompute.onnx.rows import Call, NotImportedError, front, operator, through_double
from mlcompute.ops.indexing import INT64
from mlcompute.ops.op import Array, Value

# Resize: every axis by itself, as a matrix that mixes its elements ---------------------------------------------------


def _cubic(x: Array, a: float) -> Array:
    """Keys' kernel: 1 at 0, 0 at the other whole numbers, nothing beyond 2."""
    x = np.abs(x)
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))


def _positions(call: Call, extent: int, size: int, scale: float, roi: tuple[float, float]) -> Array:
    """Where each element of the result lies in the source.

    In float32, as other programs compute it: by a scale of 2.2, element 11 lies on element 5 and not a little before.
    """
    return np.asarray(_positions_in_float32(call, extent, size, np.float32(scale), roi), np.float64)


def _positions_in_float32(call: Call, extent: int, size: int, scale: np.float32, roi: tuple[float, float]) -> Any:
    mode = call.attribute("coordinate_transformation_mode", "half_pixel")
    if call.kind == "Upsample" or call.version < 11:
        mode = "asymmetric"
    x = np.arange(size, dtype=np.float32)
    full = scale * np.float32(extent)  # the size before it is rounded down
    full = np.float32(size) if np.isclose(full, size, rtol=1e-6, atol=0.0) else full
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        return x * np.float32(extent - 1) / (full - 1) if full != 1 else x * 0.0
    if mode == "tf_crop_and_resize":
        start, end = map(float, roi)
        if full != 1:
            return start * (extent - 1) + x * ((end - start) * (extent - 1) / (full - 1))
        return x * 0.0 + 0.5 * (start + end) * (extent - 1)
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "pytorch_half_pixel" and size == 1:
        return x * 0.0
    if mode == "half_pixel_symmetric":
        centre = extent / 2
        return centre * (1 - size / full) + (x + 0.5) / scale - 0.5
    if mode not in ("half_pixel", "pytorch_half_pixel"):
        raise ShapeError(f"{call.kind}: there is no coordinate_transformation_mode {mode!r}")
    return (x + 0.5) / scale - 0.5


#: Positions this near to the middle between two elements are taken for the middle: 2 / float32(4 / 7) is not quite 3.5.
_HALF = 0.5 + 1e-5


def _nearest(call: Call, positions: Array, extent: int) -> Array:
    mode = call.attribute("nearest_mode", "round_prefer_floor")
    if call.kind == "Upsample" or call.version < 11:
        mode = "floor"
    rules: dict[str, Callable[[Array], Array]] = {
        "round_prefer_floor": lambda x: np.ceil(x - _HALF),
        "round_prefer_ceil": lambda x: np.floor(x + _HALF),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if mode not in rules:
        raise ShapeError(f"{call.kind}: there is no nearest_mode {mode!r}")
    return np.clip(rules[mode](positions), 0, extent - 1).astype(np.int64)


def _taps(call: Call, positions: Array, extent: int, scale: float, mode: str) -> tuple[Array, Array]:
    """Which source elements every result element takes, and how much of each.   (size, taps) each"""
    a = call.attribute("cubic_coeff_a", -0.75)
    spread = min(scale, 1.0) if call.attribute("antialias", 0) else 1.0
    reach = 1.0 if mode == "linear" else 2.0
    start = math.floor(-reach / spread) + 1
    call.affordable(5, positions.size, 2 - 2 * start)  # five arrays of them at a time
    offsets = np.arange(start, 2 - start)
    base = np.ceil(positions)[:, None] - 1  # a position on a pixel counts as the right end of the one before
    distance = (offsets - (positions[:, None] - base)) * spread
    weights = np.clip(1 - np.abs(distance), 0, 1) if mode == "linear" else _cubic(distance, a)
    places = base + offsets
    if call.attribute("exclude_outside", 0):
        weights = np.where((places >= 0) & (places < extent), weights, 0.0)
    total = weights.sum(axis=1, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)
    return np.clip(places, 0, extent - 1).astype(np.int64), weights


def _mixed(x: Value, axis: int, places: Array, weights: Array) -> Value:
    """x with the elements of one axis mixed.   (.., extent, ..) -> (.., size, ..)"""
    size, extent = len(places), x.shape[axis]
    if size * extent > _LARGEST_MATRIX:
        return _gathered(x, axis, places, weights)
    affordable(x.trace, size, extent)
    matrix = np.zeros((size, extent))
    np.add.at(matrix, (np.arange(size)[:, None], places), weights)
    moved = [k for k in range(x.rank) if k != axis] + [axis]
    back = [int(k) for k in np.argsort(moved)]
    last = ops.transpose(x, moved) if axis != x.rank - 1 else x
    flat = ops.reshape(last, (x.size // x.shape[axis], x.shape[axis]))
    mixed = ops.matmul(flat, x.trace.constant(matrix.T, x.dtype))
    shaped = ops.reshape(mixed, (*last.shape[:-1], matrix.shape[0]))
    return ops.transpose(shaped, back) if axis != x.rank - 1 else shaped


#: Beyond this many elements a matrix, which is nearly all zeros, costs more than picking elements one tap at a time.
_LARGEST_MATRIX = 1 << 18


def _gathered(x: Value, axis: int, places: Array, weights: Array) -> Value:
    """The same, one tap after the other."""
    shape = [len(places) if k == axis else 1 for k in range(x.rank)]
    parts = []
    for place, weight in zip(places.T, weights.T, strict=True):
        if weight.any():
            factor = x.trace.constant(weight.reshape(shape), x.dtype)
            parts.append(ops.take(x, x.trace.constant(place, INT64), axis) * factor)
    return reduce(ops.add, parts)


def _scaled(extent: int, scale: float) -> int:
    """A size, in float32 as PyTorch and onnxruntime compute it: 5 scaled by 1.4 is 7, and not a little less."""
    return math.floor(float(np.float32(extent) * np.float32(scale)))


def _sizes_and_scales(call: Call, x: Value, axes: list[int]) -> tuple[list[int], list[float]]:
    given = call.attribute("scales") if call.kind == "Upsample" and "scales" in call.attributes else None
    scale_operand = 1 if call.kind == "Upsample" or call.version < 11 else 2
    extents = [x.shape[axis] for axis in axes]
    if given is None and call.has(scale_operand) and call.array(scale_operand).size:
        given = [float(number) for number in call.array(scale_operand).reshape(-1)]
    if given is not None:
        scales = [float(number) for number in given]
        if len(scales) != len(axes) or min(scales, default=1.0) <= 0:
            raise ShapeError(f"{call.kind}: scales {scales} do not fit {x.shape}")
        return [_scaled(n, s) for n, s in zip(extents, scales, strict=True)], scales
    sizes = call.integers(3)
    if len(sizes) != len(axes):
        raise ShapeError(f"{call.kind}: sizes {sizes} do not fit {x.shape}")
    scales = [size / n for size, n in zip(sizes, extents, strict=True)]
    policy = call.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        same = min(scales) if policy == "not_larger" else max(scales)
        scales = [same] * len(axes)
        sizes = [math.floor(n * same + 0.5) for n in extents]
    return sizes, scales


def _exact_sizes(use: Use) -> list[tuple[int, float]]:
    """Per axis that is scaled: its extent, and the scale as it is stored. Empty where sizes are given."""
    x, scales = use.operands[0], use.operands[2] if len(use.operands) > 2 else None
    if not isinstance(scales, Known) or x is None or isinstance(x, (Known, Listed, Failed)):
        return []
    axes = use.attributes.get("axes") or range(len(x.shape))
    return [(x.shape[axis], float(s)) for axis, s in zip(axes, scales.array.reshape(-1), strict=False)]


def size_is_disputed(use: Use) -> bool:
    """Does the size depend on how exactly it is computed? ONNX's checker says that 5 scaled by 1.4 is 6."""
    return any(math.floor(n * s) != _scaled(n, s) for n, s in _exact_sizes(use))


def _rounded_corners(use: Use) -> str:
    """Corners that are aligned at a size before it is rounded down lie elsewhere than PyTorch puts them."""
    aligned = use.attributes.get("coordinate_transformation_mode") == "align_corners"
    if not aligned or all(np.float32(n) * np.float32(s) == _scaled(n, s) for n, s in _exact_sizes(use)):
        return ""
    return (
        "align_corners with scales that give no whole size is computed as ONNX's own examples are; PyTorch and "
        "onnxruntime round the size down first: export with sizes instead of scales"
    )


@operator("Resize", needs=(1, 2, 3), frozen=(1, 2), caution=_rounded_corners)
def resize(call: Call) -> Value:
    x = call[0]
    axes = [front(axis, x.rank, call.kind) for axis in call.attribute("axes") or range(x.rank)]
    sizes, scales = _sizes_and_scales(call, x, axes)
    if min(sizes, default=1) < 1:
        raise ShapeError(f"{call.kind}: {x.shape} cannot be resized to {sizes}")
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    limited(np.zeros((), x.dtype), tuple(shape))
    mode = call.attribute("mode", "nearest")
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    if mode not in ("nearest", "linear", "cubic"):
        raise ShapeError(f"{call.kind}: there is no mode {mode!r}")
    crops = call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize"
    roi = call.array(1).reshape(-1).astype(float) if crops else np.array([0.0] * len(axes) + [1.0] * len(axes))
    if mode == "nearest" or x.is_floating:
        return _resized(call, x, mode, axes, sizes, scales, roi, crops)
    return through_double(x, lambda x: ops.round_(_resized(call, x, mode, axes, sizes, scales, roi, crops)))


def _resized(
    call: Call, x: Value, mode: str, axes: list[int], sizes: list[int], scales: list[float], roi: Array, crops: bool
) -> Value:
    """Axis after axis."""
    outside = np.zeros((1,) * x.rank, bool)
    for k, (axis, size, scale) in enumerate(zip(axes, sizes, scales, strict=True)):
        extent = x.shape[axis]
        if size == extent and scale == 1.0 and not crops:
            continue
        call.affordable(size, 2)
        positions = _positions(call, extent, size, scale, (roi[k], roi[len(axes) + k]))
        if crops:
            beyond = (positions < 0) | (positions > extent - 1)
            outside = outside | beyond.reshape([size if a == axis else 1 for a in range(x.rank)])
        if mode == "nearest":
            x = ops.take(x, call.constant(_nearest(call, positions, extent)), axis)
        else:
            x = _mixed(x, axis, *_taps(call, positions, extent, scale, mode))
    if outside.any():
        value = ops.full(x, (), call.attribute("extrapolation_value", 0.0))
        call.affordable(x.size)
        x = ops.select(call.constant(np.broadcast_to(outside, x.shape)), value, x)
    return x


operator("Upsample", needs=(1,), frozen=(1,))(resize)


# Grids ----------------------------------------------------------------------------------------------------------------


def _reflected(x: Value, low: float, high: float) -> Value:
    """Positions folded back into low..high, as by mirrors at both ends."""
    span = high - low
    if span <= 0:
        return x * 0.0 + low
    t = ops.abs_(x - low)
    turns = ops.floor(t * (1.0 / span))
    rest = t - turns * span
    odd = turns - 2.0 * ops.floor(turns * 0.5)
    return ops.select(odd > 0.5, span - rest, rest) + low


class _Image:
    """An image read at places that are computed, with a rule for what lies outside.   x (N, C, *extents)"""

    def __init__(self, x: Value, padding: str, align: bool) -> None:
        self.extents = x.shape[2:]
        self.n, self.c = x.shape[:2]
        self.flat = ops.reshape(x, (self.n, self.c, math.prod(self.extents)))
        self.padding, self.align = padding, align

    def bounded(self, places: Value, axis: int) -> Value:
        """Places (as floats) moved inside by the padding rule."""
        extent = self.extents[axis]
        if self.padding == "border":
            return ops.minimum(ops.maximum(places, 0.0), float(extent - 1))
        if self.padding == "reflection":
            low, high = (0.0, extent - 1.0) if self.align else (-0.5, extent - 0.5)
            return ops.minimum(ops.maximum(_reflected(places, low, high), 0.0), float(extent - 1))
        return places

    def at(self, places: list[Value]) -> Value:
        """Elements at whole places (N, P) per axis; 0 outside.   -> (N, C, P)"""
        places = [self.bounded(place, axis) for axis, place in enumerate(places)]
        inside: list[Value] = []
        flat: Value | None = None
        for place, extent in zip(places, self.extents, strict=True):
            inside += [place >= 0.0, place <= extent - 1.0]
            whole = ops.convert(ops.minimum(ops.maximum(place, 0.0), extent - 1.0), INT64)
            flat = whole if flat is None else flat * extent + whole
        assert flat is not None
        count = flat.shape[1]
        indices = ops.broadcast(ops.reshape(flat, (self.n, 1, count)), (self.n, self.c, count))
        found = ops.gather(self.flat, indices, 2)
        valid = ops.reshape(reduce(ops.logical_and, inside), (self.n, 1, count))
        return ops.select(ops.broadcast(valid, found.shape), found, 0.0)


def _cubic_weights(t: Value) -> list[Value]:
    """Keys' kernel at distances 1 + t, t, 1 - t and 2 - t."""
    a = -0.75

    def near(x: Value) -> Value:
        return ((a + 2) * x - (a + 3)) * x * x + 1.0

    def far(x: Value) -> Value:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]


@operator("GridSample")
def grid_sample(call: Call) -> Value:
    x, grid = call[0], call[1]
    rank = x.rank - 2
    if grid.rank != x.rank or grid.shape[-1] != rank or grid.shape[0] != x.shape[0]:
        raise ShapeError(f"GridSample: a grid {grid.shape} for an image {x.shape}")
    align = bool(call.attribute("align_corners", 0))
    padding = call.attribute("padding_mode", "zeros")
    mode = call.attribute("mode", "linear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    image = _Image(x, padding, align)
    count = grid.size // (grid.shape[0] * rank)
    flat = ops.reshape(grid, (grid.shape[0], count, rank))
    positions = []
    for axis, extent in enumerate(x.shape[2:]):
        # The grid's last axis names the innermost axis of the image first.
        g = ops.reshape(ops.slice_axis(flat, 2, rank - 1 - axis, rank - axis), (grid.shape[0], count))
        place = (g + 1.0) * ((extent - 1) / 2.0) if align else ((g + 1.0) * float(extent) - 1.0) * 0.5
        positions.append(image.bounded(place, axis) if mode != "cubic" else place)
    if mode == "nearest":
        y = image.at([ops.round_(place) for place in positions])
    elif mode in ("linear", "cubic"):
        floors = [ops.floor(place) for place in positions]
        fractions = [place - low for place, low in zip(positions, floors, strict=True)]
        if mode == "linear":
            offsets, weights = [0.0, 1.0], [[1.0 - t, t] for t in fractions]
        else:
            offsets, weights = [-1.0, 0.0, 1.0, 2.0], [_cubic_weights(t) for t in fractions]
        parts = []
        for corner in itertools.product(range(len(offsets)), repeat=rank):
            found = image.at([low + offsets[k] for low, k in zip(floors, corner, strict=True)])
            weight = reduce(ops.multiply, [weights[axis][k] for axis, k in enumerate(corner)])
            parts.append(found * ops.reshape(weight, (x.shape[0], 1, count)))
        y = reduce(ops.add, parts)
    else:
        raise ShapeError(f"GridSample: there is no mode {mode!r}")
    return ops.reshape(y, (*x.shape[:2], *grid.shape[1:-1]))


# Regions --------------------------------------------------------------------------------------------------------------


@operator("RoiAlign", note="with a sampling_ratio from 1 on")
def roi_align(call: Call) -> Value:
    """Means (or largest) of points read inside each cell of a grid over each region."""
    x, rois, batch = call[0], call[1], ops.convert(call[2], INT64)
    n, c, height, width = x.shape
    count = rois.shape[0]
    scale = call.attribute("spatial_scale", 1.0)
    ratio = call.attribute("sampling_ratio", 0)
    if ratio < 1:
        raise NotImportedError("RoiAlign with sampling_ratio 0, where the number of points depends on the regions")
    ph, pw = call.attribute("output_height", 1), call.attribute("output_width", 1)
    call.affordable(max(ph, 1), max(pw, 1), ratio)
    half_pixel = call.version >= 16 and call.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    offset = 0.5 if half_pixel else 0.0

    def side(k: int) -> Value:
        found: Value = ops.reshape(ops.slice_axis(rois, 1, k, k + 1), (count, 1)) * scale - offset
        return found

    def lines(low: Value, high: Value, cells: int, extent: int) -> tuple[Value, Value, Value, Value]:
        """Lower and upper pixel, weight of the upper one, and whether the point counts.   each (regions, points)"""
        span = high - low if half_pixel else ops.maximum(high - low, 1.0)
        steps = call.constant((np.arange(cells * ratio) + 0.5) / (cells * ratio), x.dtype)
        at = low + span * steps
        valid = ops.logical_and(at >= -1.0, at <= float(extent))
        at = ops.minimum(ops.maximum(at, 0.0), extent - 1.0)
        lower = ops.minimum(ops.floor(at), float(max(extent - 1, 0)))
        upper = ops.minimum(lower + 1.0, extent - 1.0)
        return ops.convert(lower, INT64), ops.convert(upper, INT64), at - lower, valid

    y0, y1, ty, y_ok = lines(side(1), side(3), ph, height)
    x0, x1, tx, x_ok = lines(side(0), side(2), pw, width)
    rows, columns = ph * ratio, pw * ratio
    planes = ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (c, n * height * width))
    first = ops.reshape(batch, (count, 1, 1)) * (height * width)

    def column(value: Value) -> Value:
        return ops.reshape(value, (count, rows, 1))

    def row(value: Value) -> Value:
        return ops.reshape(value, (count, 1, columns))

    corners = []
    for at_y, wy in ((y0, 1.0 - ty), (y1, ty)):
        for at_x, wx in ((x0, 1.0 - tx), (x1, tx)):
            places = first + column(at_y) * width + row(at_x)
            corners.append(ops.take(planes, places, 1) * (column(wy) * row(wx)))
    valid = ops.logical_and(column(y_ok), row(x_ok))
    joined = reduce(ops.add if call.attribute("mode", "avg") == "avg" else ops.maximum, corners)
    joined = ops.select(ops.broadcast(valid, joined.shape), joined, 0.0)
    cells = ops.reshape(joined, (c, count, ph, ratio, pw, ratio))
    found = ops.mean(cells, (3, 5)) if call.attribute("mode", "avg") == "avg" else ops.max_(cells, (3, 5))
    return ops.transpose(ops.reshape(found, (c, count, ph, pw)), (1, 0, 2, 3))


@operator("DeformConv", weights=(1, 3))
def deform_conv(call: Call) -> Value:
    """Convolution whose kernel elements read at places moved by given offsets, each scaled by a mask."""
    x, w, offset = call[0], call[1], call[2]
    n, c, height, width = x.shape
    o, _, kh, kw = w.shape
    groups, parts = call.attribute("group", 1), call.attribute("offset_group", 1)
    strides = call.attribute("strides") or (1, 1)
    dilations = call.attribute("dilations") or (1, 1)
    pads = call.attribute("pads") or (0, 0, 0, 0)
    oh, ow = offset.shape[2:]
    points = kh * kw * oh * ow
    call.affordable(points)
    off = ops.reshape(offset, (n * parts, kh * kw, 2, oh * ow))
    starts = [np.arange(count) * stride - pad for count, stride, pad in zip((oh, ow), strides, pads, strict=False)]
    reach = [np.arange(count) * dilation for count, dilation in zip((kh, kw), dilations, strict=True)]
    rows = starts[0].reshape(1, 1, oh, 1) + reach[0].reshape(kh, 1, 1, 1)
    columns = starts[1].reshape(1, 1, 1, ow) + reach[1].reshape(1, kw, 1, 1)
    grid = np.broadcast_to(rows, (kh, kw, oh, ow)), np.broadcast_to(columns, (kh, kw, oh, ow))
    image = _Image(ops.reshape(x, (n * parts, c // parts, height, width)), "zeros", False)
    places = []
    for k in (0, 1):
        moved = ops.reshape(ops.slice_axis(off, 2, k, k + 1), (n * parts, points))
        places.append(moved + call.constant(grid[k].reshape(1, points), x.dtype))
    floors = [ops.floor(place) for place in places]
    found: list[Value] = []
    for corner in itertools.product((0.0, 1.0), repeat=2):
        weight = reduce(
            ops.multiply,
            [(p - f) if k else 1.0 - (p - f) for p, f, k in zip(places, floors, corner, strict=True)],
        )
        values = image.at([f + k for f, k in zip(floors, corner, strict=True)])
        found.append(values * ops.reshape(weight, (n * parts, 1, points)))
    read = reduce(ops.add, found)
    mask = call.optional(4)
    if mask is not None:
        read = read * ops.reshape(mask, (n * parts, 1, points))
    windows = ops.reshape(read, (n, groups, (c // groups) * kh * kw, oh * ow))
    kernel = ops.reshape(w, (1, groups, o // groups, (c // groups) * kh * kw))
    y = ops.reshape(ops.matmul(kernel, windows), (n, o, oh, ow))
    bias = call.optional(3)
    return y if bias is None else y + ops.reshape(bias, (o, 1, 1))
