"""Convolution and pooling along one and three axes, against torch.nn.functional with the padding spelled out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.enums import ConvolutionType, PaddingPolicy, PoolingType
from mlcompute.layers.convolution import ConvolutionDescriptor, ConvolutionLayer
from mlcompute.layers.pooling import PoolingDescriptor, PoolingLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Case, Refusal, numbers
from tests.cases.convolution import sides

SAME, VALID, SIZED = PaddingPolicy.SAME, PaddingPolicy.VALID, PaddingPolicy.USE_PADDING_SIZE
MAX, AVERAGE, L2 = PoolingType.MAX, PoolingType.AVERAGE, PoolingType.L2_NORM
Shape = tuple[int, ...]

_CONVOLVE = {1: F.conv1d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 3: F.conv_transpose3d}


def _padded(x: torch.Tensor, value: float, k: Shape, s: Shape, d: Shape, policy: PaddingPolicy, p: Shape) -> Any:
    pads = [sides(policy, *each) for each in zip(x.shape[2:], k, s, d, p, strict=True)]
    return F.pad(x, [side for pair in reversed(pads) for side in pair], value=value)


def convolution(name: str, source: Shape, outputs: int, k: Shape, biases: bool = True, **o: Any) -> Case:
    """Options: s strides, d dilations, policy, p padding sizes, g groups, kind."""
    axes, g, kind = len(k), o.get("g", 1), o.get("kind", ConvolutionType.STANDARD)
    s, d, p, policy = o.get("s", (1,) * axes), o.get("d", (1,) * axes), o.get("p", (0,) * axes), o.get("policy", SAME)
    descriptor = ConvolutionDescriptor(k, source[1], outputs, kind, g, s, d, policy, p, spatial_axes=axes)
    g, full = descriptor.group_count, (outputs, source[1] // descriptor.group_count, *k)

    def make() -> ConvolutionLayer:
        b = Tensor(shape=(outputs,), data=numbers(outputs, seed=2)) if biases else None
        return ConvolutionLayer(Tensor(shape=full, data=numbers(*full, seed=1)), b, descriptor)

    def direct(parameters: Any, x: torch.Tensor) -> Any:
        padded = _padded(x, 0.0, k, s, d, policy, p)
        return _CONVOLVE[axes](padded, parameters["weights"], parameters.get("biases"), s, 0, d, g)

    def transposed(parameters: Any, x: torch.Tensor) -> Any:
        # Stored (out, in/g) within each group; PyTorch wants (in, out/g).
        stored = parameters["weights"].reshape(g, outputs // g, x.shape[1] // g, *k)
        w = stored.transpose(1, 2).reshape(x.shape[1], outputs // g, *k)
        y = _TRANSPOSED[axes](x, w, None, s, 0, 0, g, d)
        cuts = []
        for axis in reversed(range(axes)):
            extra = (k[axis] - 1) * d[axis] + 1 - s[axis]
            before = extra // 2 if policy == SAME else p[axis] if policy == SIZED else 0
            after = extra - extra // 2 if policy == SAME else before
            cuts += [0, -extra] if policy == SAME and extra < 0 else [-before, -after]
        y = F.pad(y, cuts)
        b = parameters.get("biases")
        return y if b is None else y + b.reshape(1, -1, *(1,) * axes)

    return Case(name, make, [source], transposed if kind == ConvolutionType.TRANSPOSED else direct)


def pool(name: str, kind: PoolingType, source: Any, k: Shape, **o: Any) -> Case:
    axes = len(k)
    s, d, p, policy = o.get("s", (1,) * axes), o.get("d", (1,) * axes), o.get("p", (0,) * axes), o.get("policy", SAME)
    descriptor = PoolingDescriptor(kind, k, s, d, policy, p, o.get("includes", False), spatial_axes=axes)

    def windows(x: torch.Tensor, fill: float) -> torch.Tensor:
        """Every window as a row: (n, c, *windows, kernel elements)."""
        x = _padded(x, fill, k, s, d, policy, p)
        parts = []
        for place in itertools.product(*map(range, k)):
            part = x
            for axis, (u, n) in enumerate(zip(place, k, strict=True)):
                start, reach = u * d[axis], (n - 1) * d[axis] + 1
                count = (x.shape[2 + axis] - reach) // s[axis] + 1
                part = part.index_select(2 + axis, torch.arange(count) * s[axis] + start)
            parts.append(part)
        return torch.stack(parts, -1)

    def oracle(_: Any, x: torch.Tensor) -> torch.Tensor:
        if kind == MAX:
            inside = windows(x, -torch.inf)
            return inside.gather(-1, inside.argmax(-1, keepdim=True)).squeeze(-1)
        inside = windows(x, 0.0)
        if kind == AVERAGE:
            ones = windows(torch.ones_like(x), 1.0 if o.get("includes") else 0.0).sum(-1)
            return inside.sum(-1) / ones.clamp(min=1.0)
        return (inside * inside).sum(-1).sqrt()

    return Case(name, lambda: PoolingLayer(descriptor), [source], oracle, smooth=o.get("smooth", True))


_TRANSPOSE, _DEPTHWISE = ConvolutionType.TRANSPOSED, ConvolutionType.DEPTHWISE
_TIES = np.array([1, 1, 0, 2, 2, 1, 0, 0] * 4, np.float32).reshape(1, 2, 2, 2, 4)

CASES: list[Case] = [
    convolution("sequence, same", (2, 3, 9), 4, (3,)),
    convolution("sequence, valid without biases", (2, 3, 9), 4, (4,), False, policy=VALID),
    convolution("sequence, strides and dilation", (2, 3, 11), 4, (3,), s=(2,), d=(2,)),
    convolution("sequence, sized padding", (2, 3, 6), 2, (3,), policy=SIZED, p=(2,), s=(2,)),
    convolution("sequence, groups", (2, 4, 7), 6, (3,), g=2),
    convolution("sequence, depthwise", (3, 4, 7), 8, (3,), kind=_DEPTHWISE),
    convolution("sequence, a batch of one, a kernel of one", (1, 3, 1), 2, (1,)),
    convolution("sequence, wide", (3, 16, 40), 16, (5,)),
    convolution("sequence, transposed", (2, 3, 5), 4, (4,), kind=_TRANSPOSE, s=(2,)),
    convolution("sequence, transposed, valid, groups", (2, 4, 5), 6, (3,), kind=_TRANSPOSE, s=(3,), g=2, policy=VALID),
    convolution("sequence, transposed, sized", (2, 3, 5), 2, (3,), False, kind=_TRANSPOSE, policy=SIZED, p=(1,)),
    convolution("volume, same", (2, 3, 4, 5, 3), 4, (3, 3, 3)),
    convolution("volume, valid without biases", (2, 2, 4, 5, 6), 3, (2, 3, 4), False, policy=VALID),
    convolution("volume, strides and dilation", (2, 3, 5, 7, 6), 2, (2, 3, 2), s=(1, 2, 3), d=(2, 1, 2)),
    convolution("volume, sized padding", (2, 2, 3, 4, 5), 3, (3, 2, 3), policy=SIZED, p=(1, 0, 2), s=(2, 1, 2)),
    convolution("volume, groups", (2, 4, 3, 4, 3), 6, (2, 2, 2), g=2),
    convolution("volume, depthwise", (2, 3, 3, 4, 3), 6, (3, 3, 3), kind=_DEPTHWISE),
    convolution("volume, a batch of one, a kernel of one", (1, 3, 1, 1, 1), 2, (1, 1, 1)),
    convolution("volume, 16 channels", (2, 16, 4, 4, 4), 16, (3, 3, 3)),
    convolution("volume, transposed", (2, 3, 2, 3, 2), 2, (3, 3, 2), kind=_TRANSPOSE, s=(2, 2, 2)),
    convolution(
        "volume, transposed, valid, groups",
        (2, 4, 2, 2, 3),
        4,
        (2, 3, 2),
        kind=_TRANSPOSE,
        s=(2, 1, 3),
        g=2,
        policy=VALID,
    ),
    convolution("volume, transposed, sized", (2, 2, 3, 3, 3), 3, (3, 3, 3), kind=_TRANSPOSE, policy=SIZED, p=(1, 0, 1)),
    *(
        case
        for kind in (MAX, AVERAGE, L2)
        for case in (
            pool(f"{kind.name} of a sequence", kind, (2, 3, 8), (3,), s=(2,)),
            pool(f"{kind.name} of a sequence, valid, dilation", kind, (2, 3, 8), (2,), d=(3,), policy=VALID),
            pool(f"{kind.name} of a volume", kind, (2, 3, 4, 5, 3), (2, 3, 2), s=(2, 2, 1)),
            pool(
                f"{kind.name} of a volume, sized",
                kind,
                (2, 2, 4, 4, 5),
                (2, 2, 3),
                s=(1, 2, 2),
                d=(2, 1, 1),
                policy=SIZED,
                p=(1, 0, 1),
            ),
            pool(f"{kind.name} of a whole volume", kind, (2, 3, 2, 3, 4), (2, 3, 4), policy=VALID),
        )
    ),
    pool("AVERAGE of a volume, counting padding", AVERAGE, (2, 2, 3, 4, 3), (3, 2, 3), includes=True),
    pool("AVERAGE of a sequence, counting padding", AVERAGE, (2, 2, 5), (3,), s=(2,), includes=True),
    pool("MAX of equals goes to the first", MAX, _TIES, (2, 2, 2), policy=VALID, smooth=False),
]


def _volume(**o: Any) -> Callable[[], ConvolutionLayer]:
    return lambda: ConvolutionLayer(
        Tensor(shape=(2, 3, 3, 3, 3)), None, ConvolutionDescriptor(3, 3, 2, spatial_axes=3, **o)
    )


REFUSALS: list[Refusal] = [
    Refusal(
        "an image for a volume",
        _volume(),
        "the source has 4 axes, 5 are needed: (n, channels, d, h, w)",
        [(1, 3, 4, 4)],
    ),
    Refusal("other channels", _volume(), "input_feature_channel_count is 3, the source has 4", [(1, 4, 4, 4, 4)]),
    Refusal(
        "a kernel that does not fit", _volume(padding_policy=VALID), "the result would be -1 x 1 x 1", [(1, 3, 1, 3, 3)]
    ),
    Refusal("two strides for three axes", _volume(strides=(1, 2)), "strides has 2 entries"),
    Refusal(
        "two strides for one axis",
        lambda: ConvolutionDescriptor(3, strides=(1, 2), spatial_axes=1),
        "strides has 2 entries",
    ),
    Refusal("four spatial axes", lambda: PoolingDescriptor(MAX, 2, spatial_axes=4), "spatial_axes is 4"),
    Refusal(
        "a volume for a sequence",
        lambda: PoolingLayer(PoolingDescriptor(MAX, 2, spatial_axes=1)),
        "the source has 5 axes, 3 are needed: (n, channels, l)",
        [(1, 3, 4, 4, 4)],
    ),
    Refusal(
        "a pool that does not fit",
        lambda: PoolingLayer(PoolingDescriptor(MAX, 5, padding_policy=VALID, spatial_axes=1)),
        "the result would be -1",
        [(1, 3, 3)],
    ),
]
