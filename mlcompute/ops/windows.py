"""Windows that slide over images: what convolution and pooling share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.op import Array, Shape

#: (y, x)
Pair = tuple[int, int]
#: (top, bottom, left, right)
Sides = tuple[int, int, int, int]


def window_counts(op: str, image: Pair, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Pair:
    """How many windows fit, down and across; a ShapeError when none does."""
    if min(*kernel, *strides, *dilations) < 1 or min(padding) < 0:
        raise ShapeError(
            f"{op}: kernel, strides and dilations must be at least 1, padding at least 0",
            kernel=kernel, strides=strides, dilations=dilations, padding=padding,
        )  # fmt: skip
    counts = []
    for d in (0, 1):
        padded = image[d] + padding[2 * d] + padding[2 * d + 1]
        reach = dilations[d] * (kernel[d] - 1) + 1
        if reach > padded:
            raise ShapeError(f"{op}: a window of {reach} does not fit into a padded extent of {padded}", image=image)
        counts.append((padded - reach) // strides[d] + 1)
    return counts[0], counts[1]


def bordered(x: Array, padding: Sides, fill: float) -> Array:
    """An image with its padding around it."""
    top, bottom, left, right = padding
    n, c, h, w = x.shape
    padded = np.full((n, c, top + h + bottom, left + w + right), fill, x.dtype)
    padded[:, :, top : top + h, left : left + w] = x
    return padded


def inner(x: Array, padding: Sides) -> Array:
    """An image without the padding around it."""
    top, bottom, left, right = padding
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


def each_place(kernel: Pair, counts: Shape, strides: Pair, dilations: Pair) -> Iterable[tuple[int, int, slice, slice]]:
    """For every kernel position, row-major: (u, v) and the padded pixels it meets, one per window."""
    for u in range(kernel[0]):
        for v in range(kernel[1]):
            top, left = u * dilations[0], v * dilations[1]
            rows = slice(top, top + (counts[0] - 1) * strides[0] + 1, strides[0])
            columns = slice(left, left + (counts[1] - 1) * strides[1] + 1, strides[1])
            yield u, v, rows, columns
