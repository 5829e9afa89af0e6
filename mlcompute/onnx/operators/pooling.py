"""Pooling of any number of spatial axes."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import math

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.operators.shapes import limited, padded
from mlcompute.onnx.operators.windows import Ints, output_extent, pads_of, spatial, window_places
from mlcompute.onnx.rows import Call, NotImportedError, operator
from mlcompute.ops.op import Value


class _Windows:
    """The windows an operator asks for, with padding so that the last one fits."""

    def __init__(self, call: Call) -> None:
        x = call[0]
        rank = x.rank - 2
        if rank < 1:
            raise ShapeError(f"{call.kind}: {x.shape} has no spatial axes")
        self.image = x.shape[2:]
        self.kernel = spatial(call, "kernel_shape", rank, 0)
        self.strides, self.dilations = spatial(call, "strides", rank), spatial(call, "dilations", rank)
        self.begin, end = pads_of(call, self.image, self.kernel, self.strides, self.dilations)
        limited(np.zeros((), x.dtype), tuple(n + b + e for n, b, e in zip(self.image, self.begin, end, strict=True)))
        ceil = bool(call.attribute("ceil_mode", 0)) and call.attribute("auto_pad", "NOTSET") in ("NOTSET", "")
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        self.counts = tuple(
            output_extent(n, r, s, b + e, ceil, b)
            for n, r, s, b, e in zip(self.image, reach, self.strides, self.begin, end, strict=True)
        )
        if min(self.counts) < 1:
            raise ShapeError(f"{call.kind}: no window of {self.kernel} fits into {self.image}")
        #: Padding the model asked for, and what the last windows reach.
        self.end = end
        self.reached = tuple(
            max((c - 1) * s + r - n - b, 0)
            for c, s, r, n, b in zip(self.counts, self.strides, reach, self.image, self.begin, strict=True)
        )

    def pool(self, x: Value, name: str) -> Value:
        """Largest or sum of every window, two axes at a time: both may be taken one axis after the other."""
        function = ops.max_pool if name == "max" else ops.sum_pool
        for axis in range(0, len(self.kernel), 2):
            x = self._pool_pair(x, axis, function)
        return x

    def _pool_pair(self, x: Value, axis: int, function: object) -> Value:
        pair = slice(axis, axis + 2)
        before, image, after = x.shape[: 2 + axis], x.shape[2 + axis : 4 + axis], x.shape[4 + axis :]
        kernel, strides, dilations = self.kernel[pair], self.strides[pair], self.dilations[pair]
        begin, end, counts = self.begin[pair], self.reached[pair], self.counts[pair]
        if len(kernel) == 1:
            image, counts = (*image, 1), (*counts, 1)
            kernel, strides, dilations, begin, end = (
                (*ints, one) for ints, one in ((kernel, 1), (strides, 1), (dilations, 1), (begin, 0), (end, 0))
            )
        order = ()
        if after:  # the axes to pool over come last
            front = tuple(range(2 + axis))
            order = (*front, *range(4 + axis, x.rank), 2 + axis, 3 + axis)
            x = ops.transpose(x, order)
        sides = (begin[0], end[0], begin[1], end[1])
        flat = ops.reshape(x, (before[0], math.prod((*before[1:], *after)), *image))
        y = function(flat, kernel, strides, dilations, sides)  # type: ignore[operator]
        y = ops.reshape(y, (*before, *after, *counts))
        if order:
            y = ops.transpose(y, tuple(int(k) for k in np.argsort(order)))
        elif len(self.kernel[pair]) == 1:
            y = ops.reshape(y, y.shape[:-1])
        return y

    def places(self, call: Call) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return window_places(call, self.image, self.kernel, self.strides, self.dilations, self.begin, self.counts)


@operator("MaxPool")
def max_pool(call: Call) -> Value | tuple[Value, Value]:
    x, windows = call[0], _Windows(call)
    if not x.is_floating:
        return ops.convert(windows.pool(ops.convert(x, np.dtype(np.float32)), "max"), x.dtype)
    if not call.wants(1):
        return windows.pool(x, "max")
    places = windows.places(call)
    planes, size = math.prod(x.shape[:2]), math.prod(windows.image)
    # One more element, the smallest there is, stands for the padding.
    rows = padded(ops.reshape(x, (planes, size)), 1, 0, 1, value=-math.inf)
    found = ops.take(rows, call.constant(np.where(places < 0, size, places), np.int64), 1)
    winner = ops.argmax(found, 2)
    y = ops.reshape(ops.gather(found, winner, 2), (*x.shape[:2], *windows.counts))
    call.affordable(size + planes)
    table = np.arange(size).reshape(windows.image)
    if call.attribute("storage_order", 0):
        table = np.arange(size).reshape(windows.image[::-1]).T
    numbers = np.append(table.reshape(-1), 0)[places]
    offsets = np.arange(planes).reshape(planes, 1, 1) * size
    all_numbers = ops.broadcast(call.constant(numbers[None], np.int64), found.shape) + call.constant(offsets, np.int64)
    indices = ops.gather(all_numbers, winner, 2)
    return y, ops.reshape(indices, y.shape)


@operator("AveragePool")
def average_pool(call: Call) -> Value:
    x, windows = call[0], _Windows(call)
    total = windows.pool(x, "sum")
    # How many elements each window averages: those inside the image or, if asked for, inside image and padding.
    counts = np.ones((), np.float64)
    call.affordable(*windows.counts)
    call.affordable(max(windows.counts), max(windows.kernel))
    for axis, extent in enumerate(windows.image):
        starts = np.arange(windows.counts[axis]) * windows.strides[axis] - windows.begin[axis]
        places = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        low, high = 0, extent
        if call.attribute("count_include_pad", 0):
            low, high = -windows.begin[axis], extent + windows.end[axis]
        inside = np.sum((places >= low) & (places < high), axis=1)
        counts = counts[..., None] * inside
    with np.errstate(divide="ignore"):
        return total * call.constant(1.0 / counts, x.dtype)


@operator("LpPool")
def lp_pool(call: Call) -> Value:
    x, windows = call[0], _Windows(call)
    p = call.attribute("p", 2)
    return _root(windows.pool(_powered(x, p), "sum"), p)


def _powered(x: Value, p: float) -> Value:
    if p == 1:
        return ops.abs_(x)
    return x * x if p == 2 else ops.pow_(ops.abs_(x), ops.full(x, (), float(p)))


def _root(x: Value, p: float) -> Value:
    if p == 1:
        return x
    return ops.sqrt(x) if p == 2 else ops.pow_(x, ops.full(x, (), 1.0 / p))


def _spatial_axes(x: Value, kind: str) -> Ints:
    if x.rank < 3:
        raise ShapeError(f"{kind}: {x.shape} has no spatial axes")
    return tuple(range(2, x.rank))


@operator("GlobalAveragePool")
def global_average_pool(call: Call) -> Value:
    return ops.mean(call[0], _spatial_axes(call[0], call.kind))


@operator("GlobalMaxPool")
def global_max_pool(call: Call) -> Value:
    return ops.max_(call[0], _spatial_axes(call[0], call.kind))


@operator("GlobalLpPool")
def global_lp_pool(call: Call) -> Value:
    x, p = call[0], call.attribute("p", 2)
    return _root(ops.sum_(_powered(x, p), _spatial_axes(x, call.kind)), p)


@operator("MaxUnpool", needs=(2,))
def max_unpool(call: Call) -> Value:
    x, indices = call[0], call[1]
    rank = x.rank - 2
    kernel, strides = spatial(call, "kernel_shape", rank, 0), spatial(call, "strides", rank)
    pads = call.attribute("pads") or (0,) * (2 * rank)
    small = tuple(
        (n - 1) * s + k - pads[a] - pads[rank + a]
        for a, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    )
    image = tuple(call.integers(2)[2:]) if call.has(2) else small
    if min(image) < 1:
        raise NotImportedError(f"MaxUnpool to an image of {image}")
    # The numbers count places in the small image of every plane; they are the same places in the larger one.
    full = (*x.shape[:2], *small)
    size = math.prod(full)
    flat = ops.reshape(ops.convert(indices, np.dtype(np.int64)), (x.size,))
    base = ops.full(x, (size,), 0.0)
    y = ops.reshape(ops.scatter(ops.reshape(x, (x.size,)), flat, base, 0), full)
    for axis in range(rank):
        y = padded(y, axis + 2, 0, image[axis] - small[axis])
    return y
