"""Convolutions of a few samples cut into bands of rows, so that all threads have some.

    y rows [p, q)    from x rows [p s - top, (q - 1) s - top + reach), those inside the image
    dx rows [a, b)   from dy rows [ceil((a + top - reach + 1) / s), floor((b - 1 + top) / s)]

s is the stride, reach the rows a window covers. A band is a convolution of its own with other zeros above and below;
along the first axis with more than one row it is one piece of memory. Every pixel of the result is computed by itself;
gradients of filters, which belong to the rows of y, are added up in order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlcompute.ops.op import Shape

#: Rows of a band, and what it must at least have to do: a call of a primitive takes about a microsecond.
_LEAST_ROWS, _LEAST_FLOPS = 2, 4e5


class Band(NamedTuple):
    """Rows of x and y, [begin, end), which belong to each other, and the padding between them."""

    x: tuple[int, int]
    y: tuple[int, int]
    padding: Shape


class Bands(NamedTuple):
    """Bands of every sample along an axis of channels-first shapes."""

    axis: int
    bands: tuple[Band, ...]

    def shape(self, x: Shape, band: Band) -> Shape:
        """Of the band of one sample of x."""
        return (1, *x[1 : self.axis], band.x[1] - band.x[0], *x[self.axis + 1 :])

    def start(self, image: Shape, sample: int, row: int) -> int:
        """Elements of a channels-last image before a row of a sample."""
        per_row = image[1] * math.prod(image[self.axis + 1 :])
        return sample * math.prod(image[1:]) + row * per_row


def bands_of(direction: str, x: Shape, w: Shape, y: Shape, attributes: Mapping[str, Any], pieces: int) -> Bands | None:
    """How to cut samples where there are fewer of them than pieces are wanted; None where full samples are better.

    x, w, y   channels-first shapes
    """
    axis = next((axis for axis in range(2, len(x)) if x[axis] != 1 or y[axis] != 1), 0)
    result = x if direction == "backward_data" else y
    if not axis:
        return None
    count = min(pieces // x[0], result[axis] // _LEAST_ROWS)
    flops = 2.0 * math.prod(y[2:]) * math.prod(w)
    if count < 2 or flops / count < _LEAST_FLOPS:
        return None
    cut = _backward if direction == "backward_data" else _forward
    bounds = [result[axis] * number // count for number in range(count + 1)]
    found = [cut(begin, end, axis, x, w, y, attributes) for begin, end in itertools.pairwise(bounds)]
    bands = [band for band in found if band is not None]
    return Bands(axis, tuple(bands)) if len(bands) == count else None


def _forward(p: int, q: int, axis: int, x: Shape, w: Shape, y: Shape, attributes: Mapping[str, Any]) -> Band | None:
    stride, reach, top = _window(axis, w, attributes)
    begin, end = p * stride - top, (q - 1) * stride - top + reach
    rows = max(0, begin), min(x[axis], end)
    if rows[0] >= rows[1]:
        return None
    return Band(rows, (p, q), _padding(axis, attributes, rows[0] - begin, end - rows[1]))


def _backward(a: int, b: int, axis: int, x: Shape, w: Shape, y: Shape, attributes: Mapping[str, Any]) -> Band | None:
    stride, reach, top = _window(axis, w, attributes)
    p, q = max(0, -((reach - 1 - a - top) // stride)), min(y[axis], (b - 1 + top) // stride + 1)
    above = top + a - p * stride
    below = (q - p - 1) * stride + reach - (b - a) - above
    if p >= q or above < 0 or below <= -stride:
        return None
    return Band((a, b), (p, q), _padding(axis, attributes, above, max(0, below)))


def _window(axis: int, w: Shape, attributes: Mapping[str, Any]) -> tuple[int, int, int]:
    """Stride, rows a window covers, and zeros before the first row."""
    dilation = attributes["dilations"][axis - 2]
    return attributes["strides"][axis - 2], dilation * (w[axis] - 1) + 1, attributes["padding"][2 * (axis - 2)]


def _padding(axis: int, attributes: Mapping[str, Any], above: int, below: int) -> Shape:
    padding: Sequence[int] = attributes["padding"]
    return (*padding[: 2 * (axis - 2)], above, below, *padding[2 * (axis - 2) + 2 :])
