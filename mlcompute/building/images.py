"""Builders for images and features: convolution, dense, pooling, padding, upsampling. Images are (n, c, h, w).

Convolution and pooling take sequences (n, c, l) and volumes (n, c, d, h, w), too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, get_args

from mlcompute.building.builder import (
    GLOROT,
    Activation,
    Initial,
    biases_of,
    build,
    chosen,
    expect_channels_second,
    expect_rank,
    fresh,
)
from mlcompute.building.choices import BorderName, PaddingName, PoolingName, SampleName
from mlcompute.enums import (
    ConvolutionType,
    PaddingPolicy,
    PaddingType,
    PoolingType,
    ReductionType,
    SampleMode,
)
from mlcompute.errors import ShapeError, warn
from mlcompute.layers.arguments import whole
from mlcompute.layers.convolution import ConvolutionDescriptor, ConvolutionLayer
from mlcompute.layers.fully_connected import FullyConnectedLayer
from mlcompute.layers.padding import PaddingLayer
from mlcompute.layers.pixel_shuffle import PixelShuffleLayer, PixelUnshuffleLayer
from mlcompute.layers.pooling import PoolingDescriptor, PoolingLayer
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.upsample import UpsampleLayer
from mlcompute.layers.windows import Sizes, sizes_of
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph

#: "same", "valid", or zeros on both sides of each axis: one number for all, or one per axis.
Border = PaddingName | int | Sequence[int]

_POLICIES = {"same": PaddingPolicy.SAME, "valid": PaddingPolicy.VALID}
_REDUCTIONS = {PoolingType.MAX: ReductionType.MAX, PoolingType.AVERAGE: ReductionType.MEAN}
_POOLINGS = {"max": PoolingType.MAX, "average": PoolingType.AVERAGE, "l2": PoolingType.L2_NORM}
_BORDERS = {name: PaddingType[name.upper()] for name in get_args(BorderName)}
_SAMPLES = {name: SampleMode[name.upper()] for name in get_args(SampleName)}
_IMAGE = "four axes: (n, channels, height, width)"
_SPATIAL = "(n, channels, length), (n, channels, height, width) or (n, channels, depth, height, width)"


def convolution(
    self: Graph,
    x: Tensor,
    channels: int,
    kernel: Sizes = 3,
    *,
    stride: Sizes = 1,
    padding: Border = "same",
    dilation: Sizes = 1,
    groups: int = 1,
    transposed: bool = False,
    activation: Activation = None,
    weights: Tensor | None = None,
    biases: Tensor | bool = True,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """Convolve images.   x (n, c, h, w)   ->   (n, channels, h', w')

    Sequences (n, c, l), channels before the length, and volumes (n, c, d, h, w) are convolved along all their axes.

    kernel, stride, dilation  one number for all axes, or one per axis: (y, x)
    padding     "same": h' = h / stride, rounded up; "valid": none; or how many zeros on each side
    transposed  the result is larger than the source by the strides
    weights     Glorot uniform unless given; (channels, c / groups, *kernel)
    biases      True: zeros to start with; False: none; or a tensor
    updates     False keeps the optimizer away from weights and biases

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> image = graph.input((32, 1, 28, 28), "image")
    >>> graph.convolution(image, 16, kernel=5, stride=2, activation="relu").descriptor.shape
    (32, 16, 14, 14)
    """
    kind = ConvolutionType.TRANSPOSED if transposed else ConvolutionType.STANDARD
    return _convolve(self, 
        "convolution", x, channels, kernel, stride, padding, dilation, groups, kind,
        activation, weights, biases, initializer, updates, name,
    )  # fmt: skip


def depthwise_convolution(
    self: Graph,
    x: Tensor,
    multiplier: int = 1,
    kernel: Sizes = 3,
    *,
    stride: Sizes = 1,
    padding: Border = "same",
    dilation: Sizes = 1,
    activation: Activation = None,
    weights: Tensor | None = None,
    biases: Tensor | bool = True,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """Convolve every channel on its own.   x (n, c, h, w)   ->   (n, c * multiplier, h', w'); or sequences, volumes"""
    who = f"{type(self).__name__}.depthwise_convolution"
    inputs = _spatial(self, "depthwise_convolution", x)[0]
    channels = inputs * whole(who, "multiplier", multiplier, 1)
    return _convolve(self, 
        "depthwise_convolution", x, channels, kernel, stride, padding, dilation, inputs, ConvolutionType.DEPTHWISE,
        activation, weights, biases, initializer, updates, name,
    )  # fmt: skip


def _convolve(
    self: Graph,
    method: str,
    x: Tensor,
    channels: int,
    kernel: Sizes,
    stride: Sizes,
    padding: Border,
    dilation: Sizes,
    groups: int,
    kind: ConvolutionType,
    activation: Activation,
    weights: Tensor | None,
    biases: Tensor | bool,
    initializer: Initial,
    updates: bool,
    name: str,
) -> Tensor:
    who = f"{type(self).__name__}.{method}"
    inputs, *image = _spatial(self, method, x)
    channels = whole(who, "channels", channels, 1)
    policy, sizes = _padding(self, method, padding, len(image))
    descriptor = ConvolutionDescriptor(
        kernel, inputs, channels, kind, groups, stride, dilation, policy, sizes, spatial_axes=len(image)
    )
    if weights is None:
        shape = (channels, inputs // descriptor.group_count, *descriptor.kernel_sizes)
        weights = fresh(*shape, like=x, initializer=initializer)
    layer = ConvolutionLayer(weights, biases_of(who, biases, channels, x), descriptor)
    return build(self, layer, [x], name, method, activation=activation, updates=updates)


def _spatial(self: Graph, method: str, x: Tensor) -> tuple[int, ...]:
    """Channels and extents of what windows slide over."""
    shape = expect_rank(self, method, x, (3, 4, 5), _SPATIAL).descriptor.shape
    who = f"{type(self).__name__}.{method}"
    expect_channels_second(who, x)
    if len(shape) == 4 and state_of(x).producer is None and shape[1] == shape[2] > 4 and shape[3] in (1, 3, 4):
        warn(
            f"{who}: the source {shape} '{x.label}' is read as {shape[1]} channels of {shape[2]} x {shape[3]}. Images "
            "with channels last, as in Keras, are fed as (n, channels, height, width): array.transpose(0, 3, 1, 2)"
        )
    if len(shape) == 3 and state_of(x).producer is None and shape[1] == shape[2] > 4:
        warn(
            f"{who}: the source {shape} '{x.label}' is read as {shape[1]} channels of length {shape[2]}. Grey images "
            "are fed with a channel, (n, 1, height, width): array[:, None]"
        )
    return shape[1:]


def _padding(self: Graph, method: str, padding: Border, axes: int) -> tuple[PaddingPolicy, tuple[int, ...] | None]:
    who = f"{type(self).__name__}.{method}"
    if isinstance(padding, str):
        fix = "or how many zeros on each side: padding=1, or one number per axis"
        return chosen(who, "padding", _POLICIES, padding, fix), None
    return PaddingPolicy.USE_PADDING_SIZE, sizes_of(who, "padding", padding, axes, least=0)


@functools.lru_cache(256)
def _channels(inputs: int, outputs: int) -> ConvolutionDescriptor:
    """What a fully connected layer is made with; immutable, and the same one for many layers of a deep network."""
    return ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)


def dense(
    self: Graph,
    x: Tensor,
    outputs: int,
    *,
    activation: Activation = None,
    weights: Tensor | None = None,
    biases: Tensor | bool = True,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """x wᵀ + b over the last axis.   x (*, in) or (n, in, 1, 1)   ->   (*, outputs) or (n, outputs, 1, 1)

    weights  Glorot uniform unless given; (outputs, in)
    biases   True: zeros to start with; False: none; or a tensor

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.dense(graph.input((32, 100), "x"), 10).descriptor.shape
    (32, 10)
    """
    who = f"{type(self).__name__}.dense"
    shape = expect_rank(self, "dense", x, range(2, 16), "at least two axes: (n, in), (n, length, in)").descriptor.shape
    outputs = whole(who, "outputs", outputs, 1)
    is_pixel = len(shape) == 4 and shape[2:] == (1, 1)
    if len(shape) >= 4 and not is_pixel and state_of(x).feature_axis != len(shape) - 1:
        raise ShapeError(
            f"{who}: the source is an image of shape {shape}",
            expected="(n, in), (n, length, in) or (n, in, 1, 1)",
            fix="call graph.flatten(x) or graph.global_pool(x) first",
        )
    inputs = shape[1] if is_pixel else shape[-1]
    if weights is None:
        weights = fresh(outputs, inputs, like=x, initializer=initializer)
    elif isinstance(weights, Tensor) and weights.shape == (inputs, outputs) and inputs != outputs:
        warn(
            f"{who}: weights of shape {(inputs, outputs)} are read in the order {(outputs, inputs)}, outputs first, "
            "and not transposed. With inputs first, as in Keras: array.T.copy(); those of another layer: x @ weights"
        )
    layer = FullyConnectedLayer(weights, biases_of(who, biases, outputs, x), _channels(inputs, outputs))
    return build(self, layer, [x], name, "dense", activation=activation, updates=updates)


def pool(
    self: Graph,
    x: Tensor,
    kernel: Sizes = 2,
    *,
    stride: Sizes | None = None,
    kind: PoolingName = "max",
    padding: Border = "valid",
    dilation: Sizes = 1,
    count_includes_padding: bool = False,
    name: str = "",
) -> Tensor:
    """Every window becomes one number.   x (n, c, h, w)   ->   (n, c, h', w')

    Sequences (n, c, l), channels before the length, and volumes (n, c, d, h, w) are pooled along all their axes.

    kind    "max", "average" or "l2"
    stride  the kernel's size unless given
    """
    axes = len(_spatial(self, "pool", x)) - 1
    policy, sizes = _padding(self, "pool", padding, axes)
    strides = kernel if stride is None else stride
    which = chosen(f"{type(self).__name__}.pool", "kind", _POOLINGS, kind)
    descriptor = PoolingDescriptor(
        which, kernel, strides, dilation, policy, sizes, count_includes_padding, spatial_axes=axes
    )
    return build(self, PoolingLayer(descriptor), [x], name, "pool")


def global_pool(self: Graph, x: Tensor, *, kind: PoolingName = "average", name: str = "") -> Tensor:
    """Every channel becomes one number.   x (n, c, h, w)   ->   (n, c, 1, 1), which `dense` takes as it is

    x (n, c, l)   ->   (n, c, 1), and x (n, c, d, h, w)   ->   (n, c, 1, 1, 1); `flatten` makes them (n, c)
    """
    image = _spatial(self, "global_pool", x)[1:]
    which = chosen(f"{type(self).__name__}.global_pool", "kind", _POOLINGS, kind)
    if any(tensor.varies for tensor in self.input_tensors):  # a window would keep the size it is built with
        reduction = _REDUCTIONS.get(which)
        if reduction is None:
            raise ShapeError(
                f"{type(self).__name__}.global_pool: kind is {kind!r}, and inputs of the graph vary in size",
                expected="average or max",
            )
        layer = ReductionLayer(reduction, dimensions=range(2, 2 + len(image)))
        return build(self, layer, [x], name, "global_pool")
    descriptor = PoolingDescriptor(which, image, padding_policy=PaddingPolicy.VALID, spatial_axes=len(image))
    return build(self, PoolingLayer(descriptor), [x], name, "global_pool")


def pad(
    self: Graph,
    x: Tensor,
    padding: int | Sequence[int],
    *,
    kind: BorderName = "zero",
    value: float = 0.0,
    name: str = "",
) -> Tensor:
    """A border around images.   x (*, h, w)   ->   (*, top + h + bottom, left + w + right)

    padding  one number for all sides, (left, right), or (top, bottom, left, right)
    kind     "zero", "constant" (of `value`), "reflect" or "symmetric"
    """
    which = chosen(f"{type(self).__name__}.pad", "kind", _BORDERS, kind)
    sides = padding if isinstance(padding, Iterable) else [padding]
    return build(self, PaddingLayer(which, sides, value), [x], name, "pad")


def upsample(
    self: Graph,
    x: Tensor,
    factor: Sizes = 2,
    *,
    size: Sizes | None = None,
    kind: SampleName = "nearest",
    aligns_corners: bool = False,
    name: str = "",
) -> Tensor:
    """Images with more pixels.   x (n, c, h, w)   ->   (n, c, *size), by default (n, c, 2h, 2w)

    size  (height, width) of the result, instead of the factor
    kind  "nearest" or "linear"
    """
    who = f"{type(self).__name__}.upsample"
    height, width = expect_rank(self, "upsample", x, (4,), _IMAGE).descriptor.shape[2:]
    rows, columns = sizes_of(who, "factor", factor, 2)
    target = (height * rows, width * columns) if size is None else sizes_of(who, "size", size, 2)
    layer = UpsampleLayer(
        target, chosen(who, "kind", _SAMPLES, kind), aligns_corners, factor=(rows, columns) if size is None else None
    )
    return build(self, layer, [x], name, "upsample")


def pixel_shuffle(self: Graph, x: Tensor, factor: int, *, name: str = "") -> Tensor:
    """Channels become pixels.   x (n, c factor², h, w)   ->   (n, c, h factor, w factor)

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.pixel_shuffle(graph.input((1, 12, 8, 8), "x"), 2).descriptor.shape
    (1, 3, 16, 16)
    """
    return build(self, PixelShuffleLayer(factor), [x], name, "pixel_shuffle")


def pixel_unshuffle(self: Graph, x: Tensor, factor: int, *, name: str = "") -> Tensor:
    """Pixels become channels.   x (n, c, h factor, w factor)   ->   (n, c factor², h, w)"""
    return build(self, PixelUnshuffleLayer(factor), [x], name, "pixel_unshuffle")
