"""Windows of pooling: where they lie, which of their elements lie inside the image, which one is the largest."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import Variable, splat_constant
from mlcompute.devices.cpu.codegen.simd import SimdValue, select
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Shape, Step

#: Windows up to this size are written out; larger ones loop over their elements.
_WRITTEN_OUT = 16


class Windows(NamedTuple):
    """The windows of one pooling step; pairs are (down, across)."""

    last: bool
    samples: int
    channels: int
    image: tuple[int, int]
    counts: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    padding: tuple[int, int, int, int]

    @classmethod
    def of(cls, step: Step, image: Shape, pooled: Shape) -> Windows:
        """From the shapes of the full image and of what has one element per window."""
        a, last = step.attributes, bool(step.attributes.get("channels_last"))
        n, c, h, w = (image[axis] for axis in ((0, 3, 1, 2) if last else (0, 1, 2, 3)))
        counts = pooled[1:3] if last else pooled[2:4]
        return cls(
            last, n, c, (h, w), (counts[0], counts[1]), a["kernel"], a["strides"], a["dilations"], tuple(a["padding"])
        )

    @property
    def code_key(self) -> str:
        """What code over windows is written for: it reads samples, channels, images and counts from its arguments."""
        return f"{self.kernel} {self.strides} {self.dilations} {self.padding}"

    @property
    def taps(self) -> list[tuple[int, int]]:
        """Elements of a window, row-major."""
        return [(u, v) for u in range(self.kernel[0]) for v in range(self.kernel[1])]

    @property
    def reach(self) -> tuple[int, int]:
        """Extent of a window with its gaps."""
        (ky, kx), (dy, dx) = self.kernel, self.dilations
        return dy * (ky - 1) + 1, dx * (kx - 1) + 1

    @property
    def is_padded(self) -> bool:
        return any(self.padding)

    @property
    def is_written_out(self) -> bool:
        return self.kernel[0] * self.kernel[1] <= _WRITTEN_OUT

    @property
    def overlap(self) -> bool:
        return any(reach > stride for reach, stride in zip(self.reach, self.strides, strict=True))

    @property
    def tile(self) -> bool:
        """Does every element of the image lie in exactly one window?"""
        return (
            not self.is_padded
            and self.kernel == self.strides == self.reach
            and all(n * k == e for n, k, e in zip(self.counts, self.kernel, self.image, strict=True))
        )

    @property
    def cover_the_image(self) -> bool:
        """Is there one window, and is it the image?"""
        return not self.is_padded and self.kernel == self.reach == self.image and self.counts == (1, 1)


class Images(NamedTuple):
    """An operand inside a kernel: its address and the strides of samples, channels, rows and pixels."""

    code: Code
    pointer: str
    sample: str
    channel: str
    row: str
    pixel: str
    element: str

    @classmethod
    def of(cls, args: KernelArguments, operand: Operand, last: bool) -> Images:
        order = (0, 3, 1, 2) if last else (0, 1, 2, 3)
        pointer = args.pointer(operand)
        sample, channel, row, pixel = args.numbers([operand.strides[axis] for axis in order])
        return cls(args.code, pointer, sample, channel, row, pixel, MEMORY_TYPES[operand.dtype])

    def at(self, **steps: str) -> Images:
        """The image from some sample, channel, row or pixel on."""
        pointer = self.pointer
        for name, count in steps.items():
            pointer = self.code.at(pointer, self.code.mul(count, getattr(self, name)), self.element)
        return self._replace(pointer=pointer)


class Span(NamedTuple):
    """The elements of windows along one axis that lie inside the image: first <= u < end of `kernel`."""

    start: str  # where element 0 lies, maybe outside
    first: str
    end: str
    is_full: str | None  # a mask that says so; None: it always is


def span(code: Code, windows: Windows, axis: int, index: str, extent: str) -> Span:
    """Of window `index` along an axis (0 down, 1 across) of an image with that extent."""
    stride, dilation, kernel = windows.strides[axis], windows.dilations[axis], windows.kernel[axis]
    before, after = windows.padding[2 * axis : 2 * axis + 2]
    start = code.mul(index, stride)
    if not before and not after:
        return Span(start, "0", str(kernel), None)
    start = code.sub(start, before)
    missing = code.intrinsic("smax", "i64", code.sub(0, start), "0")
    available = code.sub(extent, start)
    first = code.div(code.add(missing, dilation - 1), dilation)
    end = code.minimum(code.div(code.add(available, dilation - 1), dilation), kernel)
    count = code.sub(end, first)
    return Span(start, first, end, code.let(f"icmp eq i64 {count}, {kernel}"))


@contextlib.contextmanager
def each_tap(code: Code, windows: Windows, image: Images, down: Span, across: Span) -> Iterator[tuple[Images, str]]:
    """Loops over the elements of a window inside the image: their address and number. `image`: at element (0, 0)."""
    with code.loop(down.first, down.end) as u, code.loop(across.first, across.end) as v:
        y, x = code.mul(u, windows.dilations[0]), code.mul(v, windows.dilations[1])
        yield image.at(row=y, pixel=x), code.add(code.mul(u, windows.kernel[1]), v)


def _beats(a: SimdValue, b: SimdValue) -> SimdValue:
    """Is a larger than b, or a NaN where b is none?"""
    return (a > b) | (a.is_nan() & b.compare("ord", "eq", b))


def first_largest(values: Sequence[SimdValue]) -> SimdValue:
    """The number of the first largest of several, as i32; the first NaN counts as largest."""
    best = values[0]
    found = splat_constant(best.code, 0, "i32", best.lanes)
    for position, value in enumerate(values[1:], start=1):
        wins = _beats(value, best)
        best, found = select(wins, value, best), select(wins, position, found)
    return found


class Search:
    """The first largest so far and its number, where elements are visited in a loop; -1 before the first."""

    def __init__(self, code: Code, lanes: int) -> None:
        self._value, self._found = (
            Variable(splat_constant(code, -math.inf, lanes=lanes)),
            Variable(splat_constant(code, -1, "i32", lanes)),
        )

    def see(self, value: SimdValue, position: SimdValue) -> None:
        wins = _beats(value, self._value.get()) | (self._found.get() < 0)
        self._value.set(select(wins, value, self._value.get()))
        self._found.set(select(wins, position, self._found.get()))

    def found(self) -> SimdValue:
        return self._found.get()
