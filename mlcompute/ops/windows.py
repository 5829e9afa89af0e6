"""Windows that slide over images and volumes: what convolution and pooling share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.op import Array, Shape

#: (y, x); of convolutions also (z, y, x)
Pair = tuple[int, ...]
#: (top, bottom, left, right); of convolutions also (front, back, top, bottom, left, right)
Sides = tuple[int, ...]


def window_counts(op: str, image: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Shape:
    """How many windows fit along every axis; a ShapeError when none does."""
    rank = len(image)
    if not len(kernel) == len(strides) == len(dilations) == rank or len(padding) != 2 * rank:
        raise ShapeError(
            f"{op}: kernel, strides, dilations and padding do not fit {rank} axes",
            image=image, kernel=kernel, strides=strides, dilations=dilations, padding=padding,
        )  # fmt: skip
    if min(*kernel, *strides, *dilations) < 1 or min(padding) < 0:
        raise ShapeError(
            f"{op}: kernel, strides and dilations must be at least 1, padding at least 0",
            kernel=kernel, strides=strides, dilations=dilations, padding=padding,
        )  # fmt: skip
    counts = []
    for d in range(rank):
        padded = image[d] + padding[2 * d] + padding[2 * d + 1]
        reach = dilations[d] * (kernel[d] - 1) + 1
        if reach > padded:
            raise ShapeError(f"{op}: a window of {reach} does not fit into a padded extent of {padded}", image=image)
        counts.append((padded - reach) // strides[d] + 1)
    return tuple(counts)


def bordered(x: Array, padding: Sides, fill: float) -> Array:
    """An image with its padding around it."""
    padded = np.full(
        (*x.shape[:2], *(n + b + a for n, b, a in zip(x.shape[2:], padding[::2], padding[1::2], strict=True))),
        fill,
        x.dtype,
    )
    inner(padded, padding)[...] = x
    return padded


def inner(x: Array, padding: Sides) -> Array:
    """An image without the padding around it."""
    extents = zip(x.shape[2:], padding[::2], padding[1::2], strict=True)
    inside = (slice(None), slice(None), *(slice(before, n - after) for n, before, after in extents))
    return x[inside]


def each_place(
    kernel: Pair, counts: Shape, strides: Pair, dilations: Pair
) -> Iterable[tuple[Shape, tuple[slice, ...]]]:
    """For every kernel position, row-major: its indices, and where the padded pixels lie it meets, one per window."""
    for place in itertools.product(*map(range, kernel)):
        starts = [k * d for k, d in zip(place, dilations, strict=True)]
        pixels = (
            slice(start, start + (count - 1) * stride + 1, stride)
            for start, count, stride in zip(starts, counts, strides, strict=True)
        )
        yield place, (slice(None), slice(None), *pixels)
