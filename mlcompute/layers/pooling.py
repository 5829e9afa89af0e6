"""Pooling: every window of a sequence, image or volume becomes its maximum, its average or its length."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np

from mlcompute import ops
from mlcompute.enums import PaddingPolicy, PoolingType
from mlcompute.layers.arguments import member
from mlcompute.layers.factories import factory
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.layers.windows import AXES, Sizes, WindowDescriptor
from mlcompute.ops.op import Array, Shape, Value
from mlcompute.tensor import TensorDescriptor


def _pooling(
    cls: type[PoolingDescriptor],
    kind: PoolingType,
    kernel_sizes: Sizes,
    strides: Sizes,
    padding_policy: PaddingPolicy,
    padding_sizes: Sizes | None = None,
    dilation_rates: Sizes = (1, 1),
    spatial_axes: int = 2,
) -> PoolingDescriptor:
    return cls(kind, kernel_sizes, strides, dilation_rates, padding_policy, padding_sizes, spatial_axes=spatial_axes)


class PoolingDescriptor(WindowDescriptor):
    """Kind, kernel, strides, dilation and padding of a pooling layer; every pair is (y, x). Immutable.

    spatial_axes            2 for images (n, c, h, w), 1 for sequences (n, c, l), 3 for volumes (n, c, d, h, w)
    strides                 1 unless given, not the kernel's size
    count_includes_padding  AVERAGE only: divide by the full kernel, not by the elements inside the image

    >>> import mlcompute as mlc
    >>> mlc.PoolingDescriptor(mlc.PoolingType.MAX, (2, 3), strides=2).strides
    (2, 2)
    """

    pooling_type = ReadOnly[PoolingType]("How a window becomes one number.")
    count_includes_padding = ReadOnly[bool](
        "Do averages divide by the full kernel even where it reaches into the padding?"
    )

    max_pooling = factory(_pooling, PoolingType.MAX, "The largest element of each window.")
    l2_norm_pooling = factory(_pooling, PoolingType.L2_NORM, "The square root of the sum of squares of each window.")

    def __init__(
        self,
        pooling_type: PoolingType,
        kernel_sizes: Sizes,
        strides: Sizes = (1, 1),
        dilation_rates: Sizes = (1, 1),
        padding_policy: PaddingPolicy = PaddingPolicy.SAME,
        padding_sizes: Sizes | None = None,
        count_includes_padding: bool = False,
        *,
        spatial_axes: int = 2,
    ) -> None:
        super().__init__(kernel_sizes, strides, dilation_rates, padding_policy, padding_sizes, spatial_axes)
        self._pooling_type = member("PoolingDescriptor", "pooling_type", PoolingType, pooling_type)
        self._count_includes_padding = bool(count_includes_padding)

    @classmethod
    def pooling(cls, pooling_type: PoolingType, kernel_size: int, stride: int) -> PoolingDescriptor:
        """Square windows with SAME padding."""
        return cls(pooling_type, (kernel_size, kernel_size), (stride, stride))

    @classmethod
    def average_pooling(
        cls,
        kernel_sizes: Sizes,
        strides: Sizes,
        padding_policy: PaddingPolicy,
        padding_sizes: Sizes | None = None,
        count_includes_padding: bool = False,
        dilation_rates: Sizes = (1, 1),
        *,
        spatial_axes: int = 2,
    ) -> PoolingDescriptor:
        """The mean of each window."""
        return cls(
            PoolingType.AVERAGE,
            kernel_sizes,
            strides,
            dilation_rates,
            padding_policy,
            padding_sizes,
            count_includes_padding,
            spatial_axes=spatial_axes,
        )


class PoolingLayer(Layer):
    """y = max x, (sum x) / count or sqrt(sum x²) over every window.   x (n, c, h, w)   ->   y (n, c, h', w')

    Sequences (n, c, l) and volumes (n, c, d, h, w) alike, where the descriptor's spatial_axes is 1 or 3.
    The maximum ignores padding, averages and L2 norms see zeros there. On ties the gradient of a maximum goes to the
    first in row-major order.
    """

    default_label = "Pooling"
    source_types = FLOATS

    descriptor = ReadOnly[PoolingDescriptor]("What the layer was made with.")

    def __init__(self, descriptor: PoolingDescriptor) -> None:
        super().__init__()
        if not isinstance(descriptor, PoolingDescriptor):
            raise TypeError(f"PoolingLayer: descriptor must be a PoolingDescriptor, not {type(descriptor).__name__}")
        self._descriptor = copy.copy(descriptor)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        d = self._descriptor
        self.expect(
            len(x.shape) == 2 + d.spatial_axes,
            f"the source has {len(x.shape)} axes, {2 + d.spatial_axes} are needed: {AXES[d.spatial_axes]}",
            source=x.shape,
        )
        source = x.shape[2:]
        image = d.result_image(source)
        window = f"{d.kernel_sizes} covering {d.reach}, strides {d.strides}, {d.padding_policy.name}"
        self.expect(
            min(image) >= 1,
            f"the result would be {' x '.join(map(str, image))}",
            source=x.shape,
            window=window,
            fix="use smaller kernel_sizes or dilation_rates",
        )
        self.expect(
            d.pooling_type != PoolingType.MAX or bool(d.inside(source).all()),
            "a window lies wholly in the padding, where there is no maximum",
            source=x.shape,
            window=window,
            fix="use smaller padding_sizes or dilation_rates",
        )
        return [TensorDescriptor((*x.shape[:2], *image), data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        d = self._descriptor
        image = x.shape[2:]
        y = pooled(
            ops.max_pool if d.pooling_type == PoolingType.MAX else ops.sum_pool,
            x * x if d.pooling_type == PoolingType.L2_NORM else x,
            d.kernel_sizes,
            d.strides,
            d.dilation_rates,
            d.padding(image),
        )
        if d.pooling_type == PoolingType.AVERAGE:
            return y * x.trace.constant(self._shares(d.inside(image)), x.dtype)
        if d.pooling_type == PoolingType.L2_NORM:
            # The root's slope is infinite at 0; there the norm is defined to have none.
            empty = ops.equal(y, 0.0)
            return ops.select(empty, 0.0, ops.sqrt(ops.select(empty, 1.0, y)))
        return y

    def _shares(self, inside: Array) -> Array:
        """What each window's sum is multiplied by to become an average; 0 for a window wholly in the padding."""
        area = math.prod(self._descriptor.kernel_sizes)
        if self._descriptor.count_includes_padding or np.all(inside == area):
            return np.array(1.0 / area)
        return np.divide(1.0, inside, out=np.zeros(inside.shape), where=inside > 0)


def pooled(
    pool: Callable[..., Value], x: Value, kernel: Shape, strides: Shape, dilations: Shape, padding: Shape
) -> Value:
    """Pooling along one, two or three axes by that of images, without moving anything in memory.

    A sequence is an image of one row. Of a volume every slice is an image; then depths are rows, pixels columns.
    """
    if len(kernel) == 2:
        return pool(x, kernel, strides, dilations, padding)
    n, c, *extents = x.shape
    if len(kernel) == 1:
        rows = ops.reshape(x, (n, c, 1, *extents))
        y = pool(rows, (1, *kernel), (1, *strides), (1, *dilations), (0, 0, *padding))
        return ops.reshape(y, (n, c, y.shape[3]))
    depth, height, width = extents
    slices = ops.reshape(x, (n, c * depth, height, width))
    y = pool(slices, kernel[1:], strides[1:], dilations[1:], padding[2:])
    image = y.shape[2:]
    columns = ops.reshape(y, (n, c, depth, math.prod(image)))
    y = pool(columns, (kernel[0], 1), (strides[0], 1), (dilations[0], 1), (*padding[:2], 0, 0))
    return ops.reshape(y, (n, c, y.shape[2], *image))
