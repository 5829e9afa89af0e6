"""Pooling against windows unfolded in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.enums import PaddingPolicy, PoolingType
from mlcompute.layers.pooling import PoolingDescriptor, PoolingLayer
from tests.cases.case import Case, Refusal, Source, numbers

SAME, VALID, SIZED = PaddingPolicy.SAME, PaddingPolicy.VALID, PaddingPolicy.USE_PADDING_SIZE
MAX, AVERAGE, L2 = PoolingType.MAX, PoolingType.AVERAGE, PoolingType.L2_NORM
Pair = tuple[int, int]


def windows(x: torch.Tensor, fill: float, k: Pair, s: Pair, d: Pair, policy: PaddingPolicy, p: Pair) -> torch.Tensor:
    """Every window as a row: (n, c, h', w', kernel elements), `fill` in the padding."""
    pads = []
    for extent, kernel, stride, dilation, size in zip(x.shape[2:], k, s, d, p, strict=True):
        out = (extent + stride - 1) // stride
        total = max(0, (out - 1) * stride + (kernel - 1) * dilation + 1 - extent)
        pads.append({SAME: (total // 2, total - total // 2), VALID: (0, 0), SIZED: (size, size)}[policy])
    x = F.pad(x, (*pads[1], *pads[0]), value=fill)
    rows, columns = (
        [torch.arange(0, kernel * dilation, dilation) + start
         for start in range(0, extent - (kernel - 1) * dilation, stride)]
        for extent, kernel, stride, dilation in zip(x.shape[2:], k, s, d, strict=True)
    )  # fmt: skip
    return torch.stack([torch.stack([x[:, :, r][..., c].flatten(2) for c in columns], 2) for r in rows], 2)


def oracle(kind: PoolingType, includes: bool, **options: Any) -> Callable[..., torch.Tensor]:
    def pooled(_: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if kind == MAX:
            inside = windows(x, -torch.inf, **options)
            # argmax answers the first of equals; the maximum itself would share the gradient among them.
            return inside.gather(-1, inside.argmax(-1, keepdim=True)).squeeze(-1)
        inside = windows(x, 0.0, **options)
        if kind == AVERAGE:
            ones = windows(torch.ones_like(x), 1.0 if includes else 0.0, **options).sum(-1)
            return inside.sum(-1) / ones.clamp(min=1.0)
        squares = (inside * inside).sum(-1)
        empty = squares == 0
        return torch.where(empty, 0.0, torch.where(empty, 1.0, squares).sqrt())

    return pooled


def pool(
    name: str,
    kind: PoolingType,
    source: Source,
    k: Pair,
    s: Pair = (1, 1),
    d: Pair = (1, 1),
    policy: PaddingPolicy = SAME,
    p: Pair = (0, 0),
    includes: bool = False,
    **rest: Any,
) -> Case:
    descriptor = PoolingDescriptor(kind, k, s, d, policy, p, includes)
    check = oracle(kind, includes, k=k, s=s, d=d, policy=policy, p=p)
    return Case(name, lambda: PoolingLayer(descriptor), [source], check, **rest)


def made(name: str, descriptor: PoolingDescriptor, check: Callable[..., torch.Tensor]) -> Case:
    return Case(name, lambda: PoolingLayer(descriptor), [(2, 2, 7, 6)], check)


SQUARE = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 2, 2)
HOLES = numbers(2, 2, 5, 5) * (np.arange(25).reshape(5, 5) % 7 == 3)
NANS = numbers(2, 2, 4, 4)
NANS[0, 1, 2, 1] = np.nan
INFINITE = numbers(1, 2, 4, 4)
INFINITE[0, 0, :2, :2] = -np.inf
INFINITE[0, 1, 3, 3] = np.inf

CASES = [
    pool("max 2/2 of 1 2 3 4", MAX, SQUARE, (2, 2), (2, 2), expect=4),
    pool("average 2/2 of 1 2 3 4", AVERAGE, SQUARE, (2, 2), (2, 2), expect=2.5),
    pool("L2 2/2 of 1 2 3 4", L2, SQUARE, (2, 2), (2, 2), expect=5.477226),
    made(
        "pooling()",
        PoolingDescriptor.pooling(MAX, 3, 2),
        oracle(MAX, False, k=(3, 3), s=(2, 2), d=(1, 1), policy=SAME, p=(0, 0)),
    ),
    made(
        "max_pooling()",
        PoolingDescriptor.max_pooling((3, 2), 2, SIZED, (1, 0), dilation_rates=(1, 2)),
        oracle(MAX, False, k=(3, 2), s=(2, 2), d=(1, 2), policy=SIZED, p=(1, 0)),
    ),
    made(
        "average_pooling()",
        PoolingDescriptor.average_pooling((3, 2), (2, 1), SIZED, [1], True, dilation_rates=(1, 2)),
        oracle(AVERAGE, True, k=(3, 2), s=(2, 1), d=(1, 2), policy=SIZED, p=(1, 1)),
    ),
    made(
        "l2_norm_pooling()",
        PoolingDescriptor.l2_norm_pooling((3, 2), (2, 1), VALID, dilation_rates=(2, 1)),
        oracle(L2, False, k=(3, 2), s=(2, 1), d=(2, 1), policy=VALID, p=(0, 0)),
    ),
    *(
        case
        for kind in (MAX, AVERAGE, L2)
        for case in (
            pool(f"{kind.name} batch of one, same", kind, (1, 3, 5, 4), (2, 2)),
            pool(f"{kind.name} kernel of one", kind, (2, 2, 3, 4), (1, 1)),
            pool(f"{kind.name} one pixel under a 3x3 kernel", kind, (3, 2, 1, 1), (3, 3)),
            pool(f"{kind.name} narrower than the gaps of the kernel", kind, (3, 2, 1, 2), (3, 3), (1, 1), (2, 3)),
            pool(f"{kind.name} same with strides", kind, (2, 3, 7, 8), (3, 3), (2, 3)),
            pool(f"{kind.name} same, strides larger than the kernel", kind, (2, 1, 7, 8), (2, 1), (3, 4)),
            pool(f"{kind.name} valid", kind, (2, 2, 7, 5), (3, 2), (2, 1), policy=VALID),
            pool(f"{kind.name} the whole image", kind, (2, 3, 4, 5), (4, 5), policy=VALID),
            pool(f"{kind.name} sized", kind, (2, 2, 5, 6), (3, 3), (2, 2), policy=SIZED, p=(1, 1)),
            pool(f"{kind.name} sized, one axis", kind, (2, 2, 5, 6), (1, 3), policy=SIZED, p=(0, 1)),
            pool(f"{kind.name} dilation, valid", kind, (2, 2, 8, 7), (2, 3), (1, 2), (3, 2), VALID),
            pool(f"{kind.name} dilation, same", kind, (2, 2, 6, 7), (3, 2), (2, 1), (2, 2)),
        )
    ),
    pool("max of negative numbers ignores the padding", MAX, -np.abs(numbers(2, 2, 4, 4)) - 1, (3, 3)),
    pool(
        "max of equals: the gradient goes to the first",
        MAX,
        np.ones((2, 2, 4, 5), np.float32),
        (3, 3),
        (2, 2),
        smooth=False,
        note="every window is a kink",
    ),
    pool("max with NaN", MAX, NANS, (2, 2), (2, 2), (1, 1), VALID, smooth=False, note="NaN wins its window"),
    pool("max with infinities", MAX, INFINITE, (2, 2), (2, 2), smooth=False, note="infinities have no differences"),
    pool("average with NaN", AVERAGE, NANS, (2, 2), (2, 2), smooth=False, note="NaN stays in its windows"),
    pool("average, padding counted", AVERAGE, (2, 2, 5, 4), (3, 3), (2, 1), includes=True),
    pool(
        "average, sized padding counted", AVERAGE, (2, 2, 4, 4), (2, 2), (2, 2), policy=SIZED, p=(1, 1), includes=True
    ),
    pool("average of windows wholly in the padding is 0", AVERAGE, (2, 2, 3, 3), (2, 2), policy=SIZED, p=(3, 2)),
    pool("average between two pixels is 0", AVERAGE, (2, 2, 1, 1), (2, 2), (1, 1), (2, 2)),
    pool("L2 of windows wholly in the padding is 0", L2, (2, 2, 3, 3), (2, 2), policy=SIZED, p=(2, 2)),
    pool("L2 of zeros has gradient 0", L2, HOLES, (2, 2), smooth=False, note="a norm has a kink at 0"),
    pool("L2 with NaN", L2, NANS, (2, 2), (2, 2), smooth=False, note="NaN stays in its windows"),
    pool(
        "half precision source",
        AVERAGE,
        numbers(2, 2, 4, 4).astype(np.float16),
        (2, 2),
        (2, 2),
        smooth=False,
        note="finite differences do not reach through float16",
    ),
]


def make(*args: Any, **options: Any) -> Callable[[], PoolingLayer]:
    return lambda: PoolingLayer(PoolingDescriptor(*args, **options))


REFUSALS = [
    Refusal("no kind", make(PoolingType.COUNT, 2), "pooling_type is <PoolingType.COUNT"),
    Refusal("kind 0", make(0, 2), "pooling_type is 0"),
    Refusal("kind in words", make("max", 2), "pooling_type must be a PoolingType", error=TypeError),
    Refusal("kernel of zero", make(MAX, (2, 0)), "kernel_sizes is 0"),
    Refusal("stride of zero", make(MAX, 2, 0), "strides is 0"),
    Refusal("dilation of zero", make(MAX, 2, 1, 0), "dilation_rates is 0"),
    Refusal("negative padding", make(MAX, 2, 1, 1, SIZED, -1), "padding_sizes is -1"),
    Refusal("sized without sizes", make(MAX, 2, 1, 1, SIZED), "USE_PADDING_SIZE needs padding_sizes"),
    Refusal("three strides", make(MAX, 2, (1, 1, 1)), "strides has 3 entries"),
    Refusal("kernel that is no number", make(MAX, 2.0), "kernel_sizes must be a whole number", error=TypeError),
    Refusal("no descriptor", lambda: PoolingLayer(2), "must be a PoolingDescriptor", error=TypeError),  # type: ignore[arg-type]
    Refusal("rank 3", make(MAX, 2), "the source has 3 axes", [(2, 4, 4)]),
    Refusal("window larger than the image", make(MAX, 3, padding_policy=VALID), "would be 0 x 2", [(1, 1, 2, 4)]),
    Refusal("maximum of nothing", make(MAX, 1, 1, 1, SIZED, 1), "a window lies wholly in the padding", [(1, 1, 2, 2)]),
    Refusal("maximum between two pixels", make(MAX, 2, 1, 2), "a window lies wholly in the padding", [(1, 1, 1, 1)]),
    Refusal("two sources", make(MAX, 2), "takes 1 source(s), 2 were given", [(1, 1, 2, 2)] * 2),
    Refusal("whole numbers", make(MAX, 2), "INT32 is not supported", [np.zeros((1, 1, 2, 2), np.int32)]),
]
