"""Pooling: every window of an image becomes its maximum, its average or its length."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from mlcompute import ops
from mlcompute.enums import PaddingPolicy, PoolingType
from mlcompute.layers.arguments import member
from mlcompute.layers.factories import factory
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.layers.windows import Sizes, WindowDescriptor
from mlcompute.ops.op import Array, Value
from mlcompute.tensor import TensorDescriptor


def _pooling(
    cls: type[PoolingDescriptor],
    kind: PoolingType,
    kernel_sizes: Sizes,
    strides: Sizes,
    padding_policy: PaddingPolicy,
    padding_sizes: Sizes | None = None,
    dilation_rates: Sizes = (1, 1),
) -> PoolingDescriptor:
    return cls(kind, kernel_sizes, strides, dilation_rates, padding_policy, padding_sizes)


class PoolingDescriptor(WindowDescriptor):
    """Kind, kernel, strides, dilation and padding of a pooling layer; every pair is (y, x). Immutable.

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
    ) -> None:
        super().__init__(kernel_sizes, strides, dilation_rates, padding_policy, padding_sizes)
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
        )


class PoolingLayer(Layer):
    """y = max x, (sum x) / count or sqrt(sum x²) over every window.   x (n, c, h, w)   ->   y (n, c, h', w')

    The maximum ignores padding, averages and L2 norms see zeros there. On ties the gradient of a maximum goes to
    the first in row-major order.
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
            len(x.shape) == 4, f"the source has {len(x.shape)} axes, 4 are needed: (n, channels, h, w)", source=x.shape
        )
        n, channels, height, width = x.shape
        image = d.result_image((height, width))
        window = f"{d.kernel_sizes} covering {d.reach}, strides {d.strides}, {d.padding_policy.name}"
        self.expect(
            min(image) >= 1,
            f"the result would be {image[0]} x {image[1]}",
            source=x.shape,
            window=window,
            fix="use smaller kernel_sizes or dilation_rates",
        )
        self.expect(
            d.pooling_type != PoolingType.MAX or bool(d.inside((height, width)).all()),
            "a window lies wholly in the padding, where there is no maximum",
            source=x.shape,
            window=window,
            fix="use smaller padding_sizes or dilation_rates",
        )
        return [TensorDescriptor((n, channels, *image), data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        d = self._descriptor
        image = x.shape[2], x.shape[3]
        pool = ops.max_pool if d.pooling_type == PoolingType.MAX else ops.sum_pool
        y = pool(
            x * x if d.pooling_type == PoolingType.L2_NORM else x,
            kernel=d.kernel_sizes,
            strides=d.strides,
            dilations=d.dilation_rates,
            padding=d.padding(image),
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
        area = self._descriptor.kernel_height * self._descriptor.kernel_width
        if self._descriptor.count_includes_padding or np.all(inside == area):
            return np.array(1.0 / area)
        return np.divide(1.0, inside, out=np.zeros(inside.shape), where=inside > 0)
