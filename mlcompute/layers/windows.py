"""Windows that slide over images: (y, x) pairs, padding policies and output sizes, for convolution and pooling."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from mlcompute.enums import PaddingPolicy
from mlcompute.errors import ShapeError
from mlcompute.layers.arguments import member, whole
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Array

Pair = tuple[int, int]
#: What users may write for a pair: one number for both axes, or (y, x).
Sizes = int | Iterable[int]
#: Padding as ops take it: (top, bottom, left, right).
Padding = tuple[int, int, int, int]

Descriptor = TypeVar("Descriptor", bound="WindowDescriptor")


def pair(who: str, name: str, sizes: Sizes, least: int = 1) -> Pair:
    """(y, x) from one number, a list of one, or a list of two."""
    listed = sizes if isinstance(sizes, Iterable) and not isinstance(sizes, str) else (sizes,)
    entries = [whole(who, name, size, least) for size in listed]
    if len(entries) not in (1, 2):
        raise ShapeError(f"{who}: {name} has {len(entries)} entries", expected="one for both axes, or two: (y, x)")
    return entries[0], entries[-1]


class WindowDescriptor:
    """What convolution and pooling descriptors share: kernel, strides, dilation and padding, always (y, x)."""

    kernel_sizes = ReadOnly[Pair]("(height, width) of the window.")
    kernel_width = ReadOnly[int]("Window width.", "_kernel_sizes", 1)
    kernel_height = ReadOnly[int]("Window height.", "_kernel_sizes", 0)
    strides = ReadOnly[Pair]("(y, x) distance between neighbouring windows.")
    stride_in_x = ReadOnly[int]("Horizontal distance between neighbouring windows.", "_strides", 1)
    stride_in_y = ReadOnly[int]("Vertical distance between neighbouring windows.", "_strides", 0)
    dilation_rates = ReadOnly[Pair]("(y, x) distance between neighbouring elements of a window.")
    dilation_rate_in_x = ReadOnly[int](
        "Horizontal distance between neighbouring elements of a window.", "_dilation_rates", 1
    )
    dilation_rate_in_y = ReadOnly[int](
        "Vertical distance between neighbouring elements of a window.", "_dilation_rates", 0
    )
    padding_policy = ReadOnly[PaddingPolicy]("How the border is treated.")
    padding_sizes = ReadOnly[Pair]("(top and bottom, left and right) padding; counts only with USE_PADDING_SIZE.")
    padding_size_in_x = ReadOnly[int](
        "Padding on the left and on the right; counts only with USE_PADDING_SIZE.", "_padding_sizes", 1
    )
    padding_size_in_y = ReadOnly[int](
        "Padding above and below; counts only with USE_PADDING_SIZE.", "_padding_sizes", 0
    )

    def __init__(
        self,
        kernel_sizes: Sizes,
        strides: Sizes,
        dilation_rates: Sizes,
        padding_policy: PaddingPolicy,
        padding_sizes: Sizes | None,
    ) -> None:
        who = type(self).__name__
        self._kernel_sizes = pair(who, "kernel_sizes", kernel_sizes)
        self._strides = pair(who, "strides", strides)
        self._dilation_rates = pair(who, "dilation_rates", dilation_rates)
        self._padding_policy = member(who, "padding_policy", PaddingPolicy, padding_policy)
        if padding_sizes is None and self._padding_policy == PaddingPolicy.USE_PADDING_SIZE:
            raise ShapeError(f"{who}: USE_PADDING_SIZE needs padding_sizes", fix="give padding_sizes=(y, x)")
        self._padding_sizes = pair(who, "padding_sizes", 0 if padding_sizes is None else padding_sizes, least=0)

    def copy(self: Descriptor) -> Descriptor:
        """An equal, independent descriptor."""
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        fields = {name.lstrip("_"): value for name, value in vars(self).items()}
        texts = [f"{k}={v.name if isinstance(v, enum.Enum) else v}" for k, v in fields.items()]
        return f"{type(self).__name__}({', '.join(texts)})"

    # Geometry, one (y, x) entry per axis ---------------------------------------------------------------------------

    @property
    def reach(self) -> Pair:
        """Extents a window covers, gaps included: dilation (kernel - 1) + 1."""
        height, width = (d * (k - 1) + 1 for k, d in zip(self._kernel_sizes, self._dilation_rates, strict=True))
        return height, width

    def padding(self, image: Pair) -> Padding:
        """(top, bottom, left, right) around a source of that (height, width); the odd pixel goes after."""
        totals = []
        for extent, reach, stride, size in zip(image, self.reach, self._strides, self._padding_sizes, strict=True):
            if self._padding_policy == PaddingPolicy.SAME:
                totals.append(max((-(-extent // stride) - 1) * stride + reach - extent, 0))
            else:
                totals.append(2 * size if self._padding_policy == PaddingPolicy.USE_PADDING_SIZE else 0)
        return _halved(totals)

    def result_image(self, image: Pair) -> Pair:
        """(height, width) of the result: how many windows fit. Below 1 where none does."""
        top, bottom, left, right = self.padding(image)
        padded = image[0] + top + bottom, image[1] + left + right
        height, width = (
            (extent - reach) // stride + 1
            for extent, reach, stride in zip(padded, self.reach, self._strides, strict=True)
        )
        return height, width

    def inside(self, image: Pair) -> Array:
        """How many elements of each window lie in the image and not in its padding, as (height, width)."""
        top, _, left, _ = self.padding(image)
        counts = []
        for axis, before in enumerate((top, left)):
            starts = np.arange(self.result_image(image)[axis]) * self._strides[axis] - before
            steps = np.arange(self._kernel_sizes[axis]) * self._dilation_rates[axis]
            places = starts[:, None] + steps
            counts.append(np.sum((places >= 0) & (places < image[axis]), axis=1))
        return np.outer(*counts)

    def crop(self) -> Padding:
        """(top, bottom, left, right) a transposed convolution leaves out of its full result."""
        totals = []
        for reach, stride, size in zip(self.reach, self._strides, self._padding_sizes, strict=True):
            if self._padding_policy == PaddingPolicy.SAME:
                totals.append(max(reach - stride, 0))
            else:
                totals.append(2 * size if self._padding_policy == PaddingPolicy.USE_PADDING_SIZE else 0)
        return _halved(totals)

    def transposed_image(self, image: Pair) -> Pair:
        """(height, width) of a transposed convolution's result; SAME multiplies the source by the strides."""
        if self._padding_policy == PaddingPolicy.SAME:
            return image[0] * self._strides[0], image[1] * self._strides[1]
        top, bottom, left, right = self.crop()
        height, width = (
            (extent - 1) * stride + reach - cut
            for extent, stride, reach, cut in zip(
                image, self._strides, self.reach, (top + bottom, left + right), strict=True
            )
        )
        return height, width


def _halved(totals: list[int]) -> Padding:
    y, x = totals
    return y // 2, y - y // 2, x // 2, x - x // 2
