"""Windows that slide over sequences, images and volumes: padding policies, output sizes; for convolution and pooling.

One number per spatial axis: (x,), (y, x) or (z, y, x).
"""

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

Pair = tuple[int, ...]
#: What users may write: one number for all axes, or one per axis.
Sizes = int | Iterable[int]
#: Padding as ops take it: (top, bottom, left, right), (front, back, top, bottom, left, right) for volumes.
Padding = tuple[int, ...]

_AXES = {1: "(x,)", 2: "(y, x)", 3: "(z, y, x)"}
#: What sources with so many spatial axes look like.
AXES = {1: "(n, channels, l)", 2: "(n, channels, h, w)", 3: "(n, channels, d, h, w)"}

Descriptor = TypeVar("Descriptor", bound="WindowDescriptor")


def sizes_of(who: str, name: str, sizes: Sizes, axes: int, least: int = 1) -> Pair:
    """One number per axis, from one for all of them or from a list."""
    listed = sizes if isinstance(sizes, Iterable) and not isinstance(sizes, str) else (sizes,)
    entries = tuple(whole(who, name, size, least) for size in listed)
    if len(entries) not in (1, axes):
        counts = {1: "one", 2: "one for both axes, or two", 3: "one for all axes, or three"}
        raise ShapeError(f"{who}: {name} has {len(entries)} entries", expected=f"{counts[axes]}: {_AXES[axes]}")
    return entries if len(entries) == axes else entries * axes


class WindowDescriptor:
    """What convolution and pooling descriptors share: kernel, strides, dilation, padding; one entry per spatial axis.

    What is said of y is that of the axis before the last; of sequences, which have none, it is neutral.
    """

    spatial_axes = ReadOnly[int]("How many axes windows slide along: 1, 2 or 3.")
    kernel_sizes = ReadOnly[Pair]("(height, width) of the window; (length,) or (depth, height, width).")
    kernel_width = ReadOnly[int]("Window width.", "_kernel_sizes", -1)
    strides = ReadOnly[Pair]("(y, x) distance between neighbouring windows.")
    stride_in_x = ReadOnly[int]("Horizontal distance between neighbouring windows.", "_strides", -1)
    dilation_rates = ReadOnly[Pair]("(y, x) distance between neighbouring elements of a window.")
    dilation_rate_in_x = ReadOnly[int](
        "Horizontal distance between neighbouring elements of a window.", "_dilation_rates", -1
    )
    padding_policy = ReadOnly[PaddingPolicy]("How the border is treated.")
    padding_sizes = ReadOnly[Pair]("(top and bottom, left and right) padding; counts only with USE_PADDING_SIZE.")
    padding_size_in_x = ReadOnly[int](
        "Padding on the left and on the right; counts only with USE_PADDING_SIZE.", "_padding_sizes", -1
    )

    def __init__(
        self,
        kernel_sizes: Sizes,
        strides: Sizes,
        dilation_rates: Sizes,
        padding_policy: PaddingPolicy,
        padding_sizes: Sizes | None,
        spatial_axes: int = 2,
    ) -> None:
        who = type(self).__name__
        self._spatial_axes = axes = whole(who, "spatial_axes", spatial_axes, 1)
        if axes > 3:
            raise ShapeError(f"{who}: spatial_axes is {axes}", expected="1 (sequences), 2 (images) or 3 (volumes)")
        # The default, which is that of images, means 1 along any number of axes.
        kernel_sizes, strides, dilation_rates = (
            1 if isinstance(sizes, tuple) and sizes == (1, 1) else sizes
            for sizes in (kernel_sizes, strides, dilation_rates)
        )
        self._kernel_sizes = sizes_of(who, "kernel_sizes", kernel_sizes, axes)
        self._strides = sizes_of(who, "strides", strides, axes)
        self._dilation_rates = sizes_of(who, "dilation_rates", dilation_rates, axes)
        self._padding_policy = member(who, "padding_policy", PaddingPolicy, padding_policy)
        if padding_sizes is None and self._padding_policy == PaddingPolicy.USE_PADDING_SIZE:
            raise ShapeError(f"{who}: USE_PADDING_SIZE needs padding_sizes", fix=f"give padding_sizes={_AXES[axes]}")
        self._padding_sizes = sizes_of(who, "padding_sizes", 0 if padding_sizes is None else padding_sizes, axes, 0)

    @property
    def kernel_height(self) -> int:
        """Window height."""
        return self._kernel_sizes[-2] if self._spatial_axes > 1 else 1

    @property
    def stride_in_y(self) -> int:
        """Vertical distance between neighbouring windows."""
        return self._strides[-2] if self._spatial_axes > 1 else 1

    @property
    def dilation_rate_in_y(self) -> int:
        """Vertical distance between neighbouring elements of a window."""
        return self._dilation_rates[-2] if self._spatial_axes > 1 else 1

    @property
    def padding_size_in_y(self) -> int:
        """Padding above and below; counts only with USE_PADDING_SIZE."""
        return self._padding_sizes[-2] if self._spatial_axes > 1 else 0

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

    # Geometry, one entry per axis ---------------------------------------------------------------------------

    @property
    def reach(self) -> Pair:
        """Extents a window covers, gaps included: dilation (kernel - 1) + 1."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self._kernel_sizes, self._dilation_rates, strict=True))

    def padding(self, image: Pair) -> Padding:
        """(top, bottom, left, right) around a source of these extents; the odd pixel goes after."""
        axes = zip(image, self.reach, self._strides, strict=True)
        return self._sides([(-(-extent // stride) - 1) * stride + reach - extent for extent, reach, stride in axes])

    def _sides(self, totals_if_same: list[int]) -> Padding:
        """What lies before and after, axis by axis, where the policy SAME wants so much in all."""
        if self._padding_policy == PaddingPolicy.SAME:
            return _halved([max(total, 0) for total in totals_if_same])
        uses_size = self._padding_policy == PaddingPolicy.USE_PADDING_SIZE
        return _halved([2 * size if uses_size else 0 for size in self._padding_sizes])

    def result_image(self, image: Pair) -> Pair:
        """Extents of the result: how many windows fit. Below 1 where none does."""
        sides = self.padding(image)
        padded = (extent + before + after for extent, before, after in zip(image, sides[::2], sides[1::2], strict=True))
        return tuple(
            (extent - reach) // stride + 1
            for extent, reach, stride in zip(padded, self.reach, self._strides, strict=True)
        )

    def inside(self, image: Pair) -> Array:
        """How many elements of each window lie in the image and not in its padding, with the result's extents."""
        counts: Array = np.ones((), np.int64)
        for axis, before in enumerate(self.padding(image)[::2]):
            starts = np.arange(self.result_image(image)[axis]) * self._strides[axis] - before
            steps = np.arange(self._kernel_sizes[axis]) * self._dilation_rates[axis]
            places = starts[:, None] + steps
            counts = counts[..., None] * np.sum((places >= 0) & (places < image[axis]), axis=1)
        return counts

    def crop(self) -> Padding:
        """(top, bottom, left, right) a transposed convolution leaves out of its full result."""
        return self._sides([reach - stride for reach, stride in zip(self.reach, self._strides, strict=True)])

    def transposed_image(self, image: Pair) -> Pair:
        """Extents of a transposed convolution's result; SAME multiplies the source by the strides."""
        if self._padding_policy == PaddingPolicy.SAME:
            return tuple(extent * stride for extent, stride in zip(image, self._strides, strict=True))
        cut = self.crop()
        return tuple(
            (extent - 1) * stride + reach - before - after
            for extent, stride, reach, before, after in zip(
                image, self._strides, self.reach, cut[::2], cut[1::2], strict=True
            )
        )


def _halved(totals: list[int]) -> Padding:
    return tuple(side for total in totals for side in (total // 2, total - total // 2))
