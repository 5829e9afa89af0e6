"""Which pixels of one image lie under which taps of a filter, seen from each pixel of another image; as plain tables.

From a pixel of y, or of dx, to the pixels its sum runs over:

    y[p]    is a sum over x[p * stride - padding + tap * dilation]
    dx[q]   is a sum over dy[(q + padding - tap * dilation) / stride], where that is a whole number

Pixels of dx whose coordinates leave the same remainders have the same taps: they are a class. Within a class both sums
are one: the j-th pixel reads the source at  j * step + offset(tap). Every tap belongs to one class.

Taps whose pixels are neighbours in memory are a run, which is copied at once; runs are joined to chunks, whose pixels
fit the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import Array, Shape, Step

#: Pixels of the target that are computed together.
BLOCK = 48
#: Elements of a chunk for one pixel, about.
_CHUNK = 768


def taps_inside(step: Step) -> int:
    """Pairs of a pixel of y and a tap over the image, for one channel and sample of a convolution or its gradients."""
    a, (x, w, y) = step.attributes, convolution_shapes(step)
    axes = zip(x[2:], w[2:], y[2:], a["strides"], a["dilations"], a["padding"][::2], strict=True)
    pairs = 1
    for source, taps, result, stride, dilation, before in axes:
        starts = [before - tap * dilation for tap in range(taps)]
        found = (min(result, -(-(source + start) // stride)) - max(0, -(-start // stride)) for start in starts)
        pairs *= sum(max(0, count) for count in found)
    return pairs


class Run(NamedTuple):
    """Neighbouring taps: (offsets of the first, their number, where they begin among the elements of their chunk)."""

    offsets: Shape
    length: int
    position: int


class Chunk(NamedTuple):
    """Runs from `first` to `last`; their elements begin at `start` among all elements of a filter."""

    first: int
    last: int
    start: int
    depth: int


class PixelClass(NamedTuple):
    """Pixels of the target that have the same taps."""

    remainders: Shape
    counts: Shape
    chunks: tuple[int, int]


class Windows:
    """The tables of a convolution or its input's gradient; the gradient of filters reads the same pixels as the first.

    source, target   shapes of the images, channels last: (samples, ..., channels)
    depth, columns   channels of the source, and of the target, in one group
    taps             of a filter, in the order in which its elements are packed; with strides beyond the image not all
                     `filter_taps` of them
    """

    def __init__(self, step: Step) -> None:
        a, (x, w, y) = step.attributes, convolution_shapes(step)
        self.groups: int = a["groups"]
        self.is_gradient = step.op.name == "convolution_input_gradient"
        self.inputs: int = w[1]
        self.outputs: int = w[0] // self.groups
        kernel, self._dilations, self._before = w[2:], a["dilations"], a["padding"][::2]
        source, target = (y, x) if self.is_gradient else (x, y)
        self.depth: int
        self.columns: int
        self.depth, self.columns = (self.outputs, self.inputs) if self.is_gradient else (self.inputs, self.outputs)
        self.samples: int = x[0]
        self.source, self.target = source[2:], target[2:]
        rank = len(kernel)
        # How far the target and the source move from one pixel of a class to the next.
        self.target_steps: Shape = tuple(a["strides"]) if self.is_gradient else (1,) * rank
        self.source_steps: Shape = (1,) * rank if self.is_gradient else tuple(a["strides"])
        self.filter_taps = math.prod(kernel)
        self.taps: list[int] = []
        self.runs: list[Run] = []
        self.chunks: list[Chunk] = []
        self.classes: list[PixelClass] = []
        for remainders in itertools.product(*map(range, map(min, self.target_steps, self.target))):
            self._add_class(remainders, kernel)

    def _offsets(self, tap: Shape, remainders: Shape) -> Shape | None:
        """From a pixel to the one under a tap; None where there is none for any pixel of the class."""
        places = zip(tap, self._dilations, self._before, remainders, self.target_steps, strict=True)
        if not self.is_gradient:
            return tuple(k * dilation - before for k, dilation, before, _, _ in places)
        found = [(remainder + before - k * dilation, step) for k, dilation, before, remainder, step in places]
        return None if any(at % step for at, step in found) else tuple(at // step for at, step in found)

    def _add_class(self, remainders: Shape, kernel: Shape) -> None:
        taps = []
        for number, tap in enumerate(itertools.product(*map(range, kernel))):
            offsets = self._offsets(tap, remainders)
            if offsets is not None:
                taps.append((offsets, number))
        first = len(self.chunks)
        for offsets, length in _runs(sorted(taps), joins=self.groups == 1):
            self._add_run(offsets, length, is_new=len(self.chunks) == first)
        self.taps += [number for _, number in sorted(taps)]
        places = zip(self.target, remainders, self.target_steps, strict=True)
        counts = tuple(-(-(extent - remainder) // step) for extent, remainder, step in places)
        self.classes.append(PixelClass(remainders, counts, (first, len(self.chunks))))

    def _add_run(self, offsets: Shape, length: int, is_new: bool) -> None:
        elements = length * self.depth
        last = self.chunks[-1] if self.chunks else Chunk(0, 0, 0, 0)
        if is_new or last.depth + elements > _CHUNK:
            last = Chunk(len(self.runs), len(self.runs), last.start + last.depth, 0)
            self.chunks.append(last)
        self.runs.append(Run(offsets, length, last.depth))
        self.chunks[-1] = Chunk(last.first, len(self.runs), last.start, last.depth + elements)

    @property
    def elements(self) -> int:
        """Elements of a filter."""
        return len(self.taps) * self.depth

    @property
    def widest(self) -> int:
        """Elements of the largest chunk."""
        return max((chunk.depth for chunk in self.chunks), default=1)

    @property
    def pixels(self) -> int:
        """Pixels of the target."""
        return self.samples * math.prod(self.target)

    @property
    def flops(self) -> float:
        taken = (math.prod(one.counts) * sum(c.depth for c in self.chunks[slice(*one.chunks)]) for one in self.classes)
        return 2.0 * self.samples * self.groups * self.columns * sum(taken)

    def run_table(self) -> Array:
        """(offsets..., length, position) of every run."""
        return _table([(*run.offsets, run.length, run.position) for run in self.runs], len(self.source) + 2)

    def chunk_table(self) -> Array:
        """(first run, last run, start, depth) of every chunk."""
        return _table([(c.first, c.last, c.start, c.depth) for c in self.chunks], 4)

    def class_table(self, groups: int) -> Array:
        """(first unit, last unit, blocks, pixels, first chunk, last chunk, remainders..., counts...) of every class.

        A unit is a block of pixels of one of `groups`.
        """
        rows, unit = [], 0
        for one in self.classes:
            pixels = self.samples * math.prod(one.counts)
            blocks = -(-pixels // BLOCK)
            rows.append((unit, unit + groups * blocks, blocks, pixels, *one.chunks, *one.remainders, *one.counts))
            unit = rows[-1][1]
        return _table(rows, 6 + 2 * len(self.source))


def _runs(taps: Sequence[tuple[Shape, int]], joins: bool) -> list[tuple[Shape, int]]:
    """(offsets of the first, length) of taps in the order of their offsets; neighbours are joined."""
    runs: list[tuple[Shape, int]] = []
    for offsets, _ in taps:
        if joins and runs and (*runs[-1][0][:-1], runs[-1][0][-1] + runs[-1][1]) == offsets:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((offsets, 1))
    return runs


def _table(rows: Sequence[Sequence[int]], width: int) -> Array:
    return np.array(rows or [[0] * width], np.int64)
