"""Convolution against torch.nn.functional with the padding spelled out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.enums import ConvolutionType, PaddingPolicy
from mlcompute.layers.convolution import ConvolutionDescriptor, ConvolutionLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Case, Refusal, numbers

SAME, VALID, SIZED = PaddingPolicy.SAME, PaddingPolicy.VALID, PaddingPolicy.USE_PADDING_SIZE
Pair = tuple[int, int]


def make(
    d: ConvolutionDescriptor, biases: bool = True, shape: tuple[int, ...] | None = None
) -> Callable[[], ConvolutionLayer]:
    """A layer with seeded parameters; `shape` is another spelling of the weights' shape."""
    inputs, outputs = d.input_feature_channel_count, d.output_feature_channel_count
    full = shape or (1, outputs * inputs // d.group_count, d.kernel_height, d.kernel_width)

    def layer() -> ConvolutionLayer:
        w = Tensor(shape=full, data=numbers(*full, seed=1))
        b = Tensor(shape=(1, outputs, 1, 1), data=numbers(outputs, seed=2)) if biases else None
        return ConvolutionLayer(w, b, d)

    return layer


def sides(policy: PaddingPolicy, extent: int, k: int, s: int, d: int, p: int) -> Pair:
    """Zeros before and after one axis, after TensorFlow's definition of SAME."""
    if policy != SAME:
        return (p, p) if policy == SIZED else (0, 0)
    out = (extent + s - 1) // s
    total = max(0, (out - 1) * s + (k - 1) * d + 1 - extent)
    return total // 2, total - total // 2


def direct(
    outputs: int,
    k: Pair,
    s: Pair = (1, 1),
    d: Pair = (1, 1),
    policy: PaddingPolicy = SAME,
    p: Pair = (0, 0),
    g: int = 1,
) -> Callable[..., torch.Tensor]:
    def oracle(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        w = parameters["weights"].reshape(outputs, x.shape[1] // g, *k)
        top, bottom = sides(policy, x.shape[2], k[0], s[0], d[0], p[0])
        left, right = sides(policy, x.shape[3], k[1], s[1], d[1], p[1])
        b = parameters.get("biases")
        return F.conv2d(F.pad(x, (left, right, top, bottom)), w, None if b is None else b.reshape(-1), s, 0, d, g)

    return oracle


def transposed(
    outputs: int,
    k: Pair,
    s: Pair = (1, 1),
    d: Pair = (1, 1),
    policy: PaddingPolicy = SAME,
    p: Pair = (0, 0),
    g: int = 1,
) -> Callable[..., torch.Tensor]:
    def oracle(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        inputs = x.shape[1]
        # Stored (out, in/g) within each group; PyTorch wants (in, out/g).
        stored = parameters["weights"].reshape(g, outputs // g, inputs // g, *k)
        w = stored.permute(0, 2, 1, 3, 4).reshape(inputs, outputs // g, *k)
        y = F.conv_transpose2d(x, w, None, s, 0, 0, g, d)
        cuts = []
        for axis in (0, 1):
            extra = (k[axis] - 1) * d[axis] + 1 - s[axis]
            before = extra // 2 if policy == SAME else p[axis] if policy == SIZED else 0
            after = extra - extra // 2 if policy == SAME else before
            # A kernel smaller than its stride leaves a gap after the last pixel, not a negative crop.
            cuts.append((0, extra) if policy == SAME and extra < 0 else (before, after))
        (top, bottom), (left, right) = cuts
        y = F.pad(y, (-left, -right, -top, -bottom))
        b = parameters.get("biases")
        return y if b is None else y + b.reshape(1, -1, 1, 1)

    return oracle


def standard_case(name: str, source: tuple[int, ...], outputs: int, k: Pair, biases: bool = True, **o: Any) -> Case:
    """Options by their short names: s strides, d dilations, policy, p padding sizes, g groups."""
    descriptor = ConvolutionDescriptor(
        k, source[1], outputs, group_count=o.get("g", 1), strides=o.get("s", 1), dilation_rates=o.get("d", 1),
        padding_policy=o.get("policy", SAME), padding_sizes=o.get("p"),
    )  # fmt: skip
    return Case(name, make(descriptor, biases), [source], direct(outputs, k, **o))


def transposed_case(name: str, source: tuple[int, ...], outputs: int, k: Pair, biases: bool = True, **o: Any) -> Case:
    descriptor = ConvolutionDescriptor.convolution_transpose(
        k, source[1], outputs, o.get("g", 1), o.get("s", 1), o.get("d", 1), o.get("policy", SAME), o.get("p")
    )
    return Case(name, make(descriptor, biases), [source], transposed(outputs, k, **o))


def depthwise_case(name: str, source: tuple[int, ...], multiplier: int, k: Pair, **o: Any) -> Case:
    channels = source[1]
    descriptor = ConvolutionDescriptor.depthwise_convolution(
        k, channels, multiplier, o.get("s", 1), o.get("d", 1), o.get("policy", SAME), o.get("p")
    )
    return Case(name, make(descriptor), [source], direct(channels * multiplier, k, g=channels, **o))


def pointwise(bias: float | None) -> ConvolutionLayer:
    b = None if bias is None else Tensor(shape=(1, 1, 1, 1), fill_with_data=bias)
    return ConvolutionLayer(Tensor(shape=(1, 1, 1, 1), fill_with_data=2.0), b, ConvolutionDescriptor())


SQUARE = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 2, 2)

CASES = [
    Case("1x1 weight 2", lambda: pointwise(None), [SQUARE], direct(1, (1, 1)), expect=[2, 4, 6, 8]),
    Case("1x1 weight 2 bias 1", lambda: pointwise(1.0), [SQUARE], direct(1, (1, 1)), expect=[3, 5, 7, 9]),
    standard_case("3x3 same", (2, 4, 6, 7), 5, (3, 3)),
    standard_case("3x3 without biases", (2, 4, 5, 5), 3, (3, 3), biases=False),
    standard_case("batch of one", (1, 3, 4, 4), 2, (3, 3)),
    standard_case("one pixel", (3, 2, 1, 1), 4, (1, 1)),
    standard_case("one pixel under a 3x3 kernel", (2, 2, 1, 1), 3, (3, 3)),
    standard_case("valid", (2, 3, 7, 6), 4, (3, 2), policy=VALID),
    standard_case("valid, kernel as large as the image", (2, 3, 4, 5), 2, (4, 5), policy=VALID),
    standard_case("even kernel, same: the odd zero goes after", (2, 2, 5, 4), 3, (2, 4)),
    standard_case("same with strides", (2, 3, 7, 8), 4, (3, 3), s=(2, 3)),
    standard_case("same, strides larger than the kernel", (2, 2, 7, 9), 2, (1, 2), s=(3, 4)),
    standard_case("same, strides beyond the image", (2, 1, 3, 2), 2, (3, 3), s=(5, 5)),
    standard_case("sized padding", (2, 3, 5, 6), 4, (3, 3), policy=SIZED, p=(1, 2), s=(2, 1)),
    standard_case("padding larger than the kernel", (1, 2, 3, 3), 2, (2, 2), policy=SIZED, p=(3, 0)),
    standard_case("padding sizes do not count with valid", (2, 2, 5, 5), 2, (3, 3), policy=VALID, p=(2, 2)),
    standard_case("dilation", (2, 2, 9, 8), 3, (3, 2), d=(2, 3), policy=VALID),
    standard_case("dilation, same, strides", (2, 2, 8, 7), 3, (3, 3), d=(2, 1), s=(2, 2)),
    standard_case("windows that leave the last rows out", (2, 2, 8, 8), 2, (3, 3), policy=VALID, s=(3, 3)),
    standard_case("two groups", (2, 4, 5, 5), 6, (3, 3), g=2),
    standard_case("as many groups as channels", (2, 3, 4, 4), 3, (3, 3), g=3),
    standard_case("one row", (2, 3, 1, 9), 2, (1, 3)),
    standard_case("one column", (2, 3, 9, 1), 2, (3, 1), s=(2, 1)),
    depthwise_case("depthwise", (2, 3, 5, 6), 1, (3, 3)),
    depthwise_case("depthwise, multiplier 2, strides", (2, 3, 7, 5), 2, (3, 3), s=(2, 2)),
    depthwise_case("depthwise of one channel", (1, 1, 4, 4), 3, (2, 2), policy=VALID),
    depthwise_case(
        "depthwise with dilation and sized padding", (2, 2, 7, 7), 1, (3, 3), d=(2, 2), policy=SIZED, p=(2, 1)
    ),
    transposed_case("transposed, same, strides 2", (2, 3, 4, 5), 4, (3, 3), s=(2, 2)),
    transposed_case("transposed, same, stride 1", (2, 3, 4, 4), 2, (4, 3)),
    transposed_case("transposed, valid", (2, 3, 4, 3), 2, (3, 2), s=(2, 3), policy=VALID),
    transposed_case("transposed, sized", (2, 2, 4, 4), 3, (4, 4), s=(2, 2), policy=SIZED, p=(1, 1)),
    transposed_case("transposed, dilation", (1, 2, 4, 3), 3, (3, 2), s=(2, 1), d=(2, 3)),
    transposed_case("transposed, kernel smaller than the stride", (2, 2, 3, 3), 2, (1, 2), s=(3, 3)),
    transposed_case("transposed, one pixel", (2, 3, 1, 1), 2, (3, 3), policy=VALID),
    transposed_case("transposed without biases", (1, 2, 3, 3), 1, (2, 2), biases=False, s=(2, 2)),
    transposed_case("transposed, two groups", (2, 4, 3, 4), 6, (3, 3), s=(2, 2), g=2),
    Case(
        "weights spelled (out, in, h, w)",
        make(ConvolutionDescriptor((3, 2), 3, 4), shape=(4, 3, 3, 2)),
        [(2, 3, 5, 5)],
        direct(4, (3, 2)),
    ),
    Case(
        "weights spelled flat",
        make(ConvolutionDescriptor((3, 2), 3, 4), shape=(72,)),
        [(2, 3, 5, 5)],
        direct(4, (3, 2)),
    ),
    Case(
        "one number for both axes",
        make(ConvolutionDescriptor(3, 2, 2, strides=[2], dilation_rates=1)),
        [(2, 2, 6, 5)],
        direct(2, (3, 3), (2, 2)),
    ),
    Case(
        "kernel_width and kernel_height",
        make(ConvolutionDescriptor(kernel_width=3, kernel_height=1, input_feature_channel_count=2)),
        [(2, 2, 4, 5)],
        direct(1, (1, 3)),
    ),
    Case(
        "many channels",
        make(ConvolutionDescriptor((3, 3), 64, 8)),
        [(2, 64, 5, 5)],
        direct(8, (3, 3)),
        scale=4.0,
        note="sums of 576 products",
    ),
]


def weights(*shape: int) -> Tensor:
    return Tensor(shape=shape, data=numbers(*shape))


REFUSALS = [
    Refusal("kernel of zero", lambda: make(ConvolutionDescriptor((0, 3), 1, 1))(), "kernel_sizes is 0"),
    Refusal("stride of zero", lambda: make(ConvolutionDescriptor(3, strides=0))(), "strides is 0"),
    Refusal("dilation of zero", lambda: make(ConvolutionDescriptor(3, dilation_rates=(1, 0)))(), "dilation_rates is 0"),
    Refusal("no channels", lambda: make(ConvolutionDescriptor(3, 0, 1))(), "input_feature_channel_count is 0"),
    Refusal("no groups", lambda: make(ConvolutionDescriptor(3, 2, 2, group_count=0))(), "group_count is 0"),
    Refusal(
        "negative padding",
        lambda: make(ConvolutionDescriptor(3, padding_policy=SIZED, padding_sizes=(-1, 0)))(),
        "padding_sizes is -1",
    ),
    Refusal(
        "sized without sizes",
        lambda: make(ConvolutionDescriptor(3, padding_policy=SIZED))(),
        "USE_PADDING_SIZE needs padding_sizes",
    ),
    Refusal("three kernel sizes", lambda: make(ConvolutionDescriptor((3, 3, 3)))(), "kernel_sizes has 3 entries"),
    Refusal("groups that do not divide", lambda: make(ConvolutionDescriptor(1, 4, 6, group_count=4))(), "4 groups"),
    Refusal(
        "depthwise output that is no multiple",
        lambda: make(ConvolutionDescriptor(1, 4, 6, ConvolutionType.DEPTHWISE))(),
        "4 input and 6 output channels cannot be divided among 4 groups",
    ),
    Refusal(
        "depthwise with other groups",
        lambda: make(ConvolutionDescriptor(1, 4, 8, ConvolutionType.DEPTHWISE, group_count=2))(),
        "has 4 groups, not 2",
    ),
    Refusal(
        "kernel given twice",
        lambda: make(ConvolutionDescriptor((3, 3), kernel_width=3, kernel_height=3))(),
        "given twice or in part",
    ),
    Refusal("half a kernel", lambda: make(ConvolutionDescriptor(kernel_width=3))(), "given twice or in part"),
    Refusal(
        "no such policy",
        lambda: make(ConvolutionDescriptor(padding_policy=7))(),  # type: ignore[arg-type]
        "padding_policy is 7",
    ),
    Refusal(
        "type that is no type",
        lambda: make(ConvolutionDescriptor(convolution_type="standard"))(),  # type: ignore[arg-type]
        "convolution_type must be a ConvolutionType",
        error=TypeError,
    ),
    Refusal(
        "kernel that is no number",
        lambda: make(ConvolutionDescriptor((1.5, 3)))(),  # type: ignore[arg-type]
        "kernel_sizes must be a whole number",
        error=TypeError,
    ),
    Refusal(
        "too few weights",
        lambda: ConvolutionLayer(weights(1, 19, 3, 3), None, ConvolutionDescriptor((3, 3), 4, 5)),
        "weights needs 180 elements (5 outputs x 4 inputs x 3 x 3), the tensor has 171",
    ),
    Refusal(
        "weights without the group division",
        lambda: ConvolutionLayer(weights(4, 4, 3, 3), None, ConvolutionDescriptor((3, 3), 4, 4, group_count=2)),
        "weights needs 72 elements",
    ),
    Refusal(
        "too many biases",
        lambda: ConvolutionLayer(weights(1, 1, 1, 1), weights(2), ConvolutionDescriptor()),
        "biases needs 1 elements",
    ),
    Refusal(
        "weights that are no tensor",
        lambda: ConvolutionLayer(numbers(1), None, ConvolutionDescriptor()),  # type: ignore[arg-type]
        "weights must be a Tensor",
        error=TypeError,
    ),
    Refusal(
        "no descriptor",
        lambda: ConvolutionLayer(weights(1), None, None),  # type: ignore[arg-type]
        "descriptor must be a ConvolutionDescriptor",
        error=TypeError,
    ),
    Refusal("rank 3", make(ConvolutionDescriptor(1, 3, 1)), "the source has 3 axes", [(3, 4, 4)]),
    Refusal(
        "other channels",
        make(ConvolutionDescriptor(1, 3, 1)),
        "input_feature_channel_count is 3, the source has 4 channels",
        [(2, 4, 4, 4)],
    ),
    Refusal(
        "kernel larger than the image",
        make(ConvolutionDescriptor(5, 1, 1, padding_policy=VALID)),
        "the result would be 0 x 1",
        [(1, 1, 4, 5)],
    ),
    Refusal(
        "transposed result of nothing",
        make(ConvolutionDescriptor.convolution_transpose(1, 1, 1, padding_policy=SIZED, padding_sizes=1)),
        "the result would be -1 x 0",
        [(1, 1, 1, 2)],
    ),
    Refusal("two sources", make(ConvolutionDescriptor()), "takes 1 source(s), 2 were given", [(1, 1, 1, 1)] * 2),
    Refusal(
        "whole numbers",
        make(ConvolutionDescriptor()),
        "a source of type INT32 is not supported",
        [np.zeros((1, 1, 2, 2), np.int32)],
    ),
]
