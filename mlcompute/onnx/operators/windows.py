"""What convolution and pooling share: padding rules and windows of any number of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.onnx.rows import Call
from mlcompute.ops.op import Array, Shape

Ints = tuple[int, ...]


def spatial(call: Call, name: str, rank: int, default: int = 1) -> Ints:
    """An attribute with one whole number per spatial axis."""
    given = tuple(int(n) for n in call.attribute(name) or (default,) * rank)
    if len(given) != rank or min(given, default=1) < 1:
        raise ShapeError(f"{call.kind}: {name} {given} does not fit {rank} spatial axes", expected="numbers from 1 on")
    return given


def output_extent(extent: int, reach: int, stride: int, pads: int, ceil: bool, begin: int) -> int:
    """How many windows fit; with `ceil`, also one that only starts inside (but not one that starts in the padding)."""
    free = extent + pads - reach
    if not ceil:
        return free // stride + 1
    count = -(-free // stride) + 1
    return count - 1 if (count - 1) * stride >= extent + begin else count


def pads_of(call: Call, image: Sequence[int], kernel: Ints, strides: Ints, dilations: Ints) -> tuple[Ints, Ints]:
    """Padding in front of and behind each spatial axis, from `pads` or `auto_pad`."""
    rank = len(image)
    mode = call.attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = tuple(int(n) for n in call.attribute("pads") or (0,) * (2 * rank))
        if len(pads) != 2 * rank or min(pads, default=0) < 0:
            raise ShapeError(f"{call.kind}: pads {pads} do not fit {rank} spatial axes")
        return pads[:rank], pads[rank:]
    if mode == "VALID":
        return (0,) * rank, (0,) * rank
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise ShapeError(f"{call.kind}: there is no auto_pad {mode!r}")
    begin, end = [], []
    for extent, k, s, d in zip(image, kernel, strides, dilations, strict=True):
        total = max((-(-extent // s) - 1) * s + d * (k - 1) + 1 - extent, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return tuple(begin), tuple(end)


def window_places(
    call: Call, image: Shape, kernel: Ints, strides: Ints, dilations: Ints, begin: Ints, counts: Ints
) -> Array:
    """For every window, the row-major place of each of its elements; -1 in the padding.   -> (windows, elements)"""
    call.affordable(*counts, *kernel)
    flat = np.zeros((math.prod(counts), math.prod(kernel)), np.int64)
    inside = np.ones(flat.shape, bool)
    for axis in range(len(image)):
        starts = np.arange(counts[axis]) * strides[axis] - begin[axis]
        places = starts[:, None] + np.arange(kernel[axis]) * dilations[axis]
        shape = [1] * (2 * len(image))
        shape[axis], shape[len(image) + axis] = counts[axis], kernel[axis]
        full = np.broadcast_to(places.reshape(shape), (*counts, *kernel)).reshape(flat.shape)
        flat = flat * image[axis] + full
        inside &= (full >= 0) & (full < image[axis])
    return np.where(inside, flat, -1)
