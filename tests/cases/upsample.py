"""Cases of UpsampleLayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

from mlcompute.enums import SampleMode
from mlcompute.errors import DataError
from mlcompute.layers.upsample import UpsampleLayer
from tests.cases.case import Case, Refusal, numbers

NEAREST, LINEAR = SampleMode.NEAREST, SampleMode.LINEAR
ONE_TO_FOUR = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 2, 2)


def nearest(*size: int) -> Callable[..., Any]:
    def oracle(p: Any, x: torch.Tensor) -> torch.Tensor:
        whole = (*x.shape[2 : x.ndim - len(size)], *size)
        return F.interpolate(x.double(), size=whole, mode="nearest").to(x.dtype)

    return oracle


def linear(*size: int, corners: bool = False) -> Callable[..., Any]:
    def oracle(p: Any, x: torch.Tensor) -> torch.Tensor:
        whole = (*x.shape[2 : x.ndim - len(size)], *size)
        mode = "linear" if x.ndim == 3 else "bilinear"
        return F.interpolate(x, size=whole, mode=mode, align_corners=corners)

    return oracle


def layer(*size: int, mode: SampleMode = NEAREST, corners: bool = False) -> Callable[[], UpsampleLayer]:
    return partial(UpsampleLayer, size, mode, corners)


CASES = [
    Case(
        "golden nearest",
        partial(UpsampleLayer, [4, 4]),
        [ONE_TO_FOUR],
        nearest(4, 4),
        expect=[[[[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]]],
    ),
    Case("nearest double", layer(6, 8), [(2, 3, 3, 4)], nearest(6, 8)),
    Case("nearest odd ratios", layer(7, 5), [(2, 2, 3, 4)], nearest(7, 5)),
    Case("nearest one axis grows", layer(3, 9), [(2, 2, 3, 4)], nearest(3, 9)),
    Case("nearest width only", layer(9), [(2, 3, 2, 4)], nearest(9)),
    Case("nearest rank 3", layer(9), [(3, 2, 4)], nearest(9)),
    Case("nearest from one pixel", layer(3, 5), [(2, 2, 1, 1)], nearest(3, 5)),
    Case("nearest to the same size", layer(3, 4), [(2, 1, 3, 4)], nearest(3, 4)),
    Case("nearest ignores corners", layer(6, 5, corners=True), [(2, 1, 3, 2)], nearest(6, 5)),
    Case("nearest int32", layer(4, 3), [np.arange(8, dtype=np.int32).reshape(2, 1, 2, 2)], nearest(4, 3)),
    Case("nearest float16", layer(4, 3), [numbers(2, 1, 2, 2).astype(np.float16)], nearest(4, 3)),
    *(
        Case(
            f"linear {name}{', corners' * corners}",
            layer(*size, mode=LINEAR, corners=corners),
            [source],
            linear(*size, corners=corners),
        )
        for corners in (False, True)
        for name, size, source in (
            ("double", (6, 8), (2, 3, 3, 4)),
            ("odd ratios", (7, 5), (2, 2, 3, 4)),
            ("triple, batch of one", (9, 3), (1, 1, 3, 1)),
            ("one axis grows", (3, 9), (3, 2, 3, 4)),
            ("width only", (9,), (2, 3, 2, 4)),
            ("rank 3", (9,), (3, 2, 4)),
            ("from one pixel", (3, 5), (2, 2, 1, 1)),
            ("to the same size", (3, 4), (2, 1, 3, 4)),
        )
    ),
    Case(
        "linear golden halves",
        layer(2, 3, mode=LINEAR, corners=True),
        [ONE_TO_FOUR],
        linear(2, 3, corners=True),
        expect=[[[[1, 1.5, 2], [3, 3.5, 4]]]],
    ),
    Case("linear float16", layer(5, 4, mode=LINEAR), [numbers(2, 1, 3, 2).astype(np.float16)], linear(5, 4)),
]

REFUSALS = [
    Refusal("no entries", lambda: UpsampleLayer([]), "shape has 0 entries"),
    Refusal("three entries", lambda: UpsampleLayer([2, 4, 4]), "shape has 3 entries"),
    Refusal("size 0", lambda: UpsampleLayer([0, 4]), "shape[0] is 0"),
    Refusal("not a list", lambda: UpsampleLayer(4), "shape must be a list", error=TypeError),  # type: ignore[arg-type]
    Refusal("fractional size", lambda: UpsampleLayer([4.5, 4]), "must be a whole number", error=TypeError),  # type: ignore[list-item]
    Refusal("mode", lambda: UpsampleLayer([4, 4], "linear"), "must be a SampleMode", error=TypeError),  # type: ignore[arg-type]
    Refusal("unknown mode", lambda: UpsampleLayer([4, 4], 2), "sample_mode is 2", error=DataError),  # type: ignore[arg-type]
    Refusal("smaller height", lambda: UpsampleLayer([2, 4]), "the height of the result is 2", [(1, 1, 3, 3)]),
    Refusal("smaller width", lambda: UpsampleLayer([2]), "the width of the result is 2", [(1, 1, 3, 3)]),
    Refusal("rank 2", lambda: UpsampleLayer([4]), "the source has shape (2, 3)", [(2, 3)]),
    Refusal("rank 3 with two sizes", lambda: UpsampleLayer([4, 4]), "the source has shape (2, 3, 3)", [(2, 3, 3)]),
    Refusal(
        "linear integers",
        lambda: UpsampleLayer([4, 4], LINEAR),
        "LINEAR needs floating-point",
        [np.zeros((1, 1, 2, 2), np.int32)],
        error=DataError,
    ),
    Refusal("two sources", lambda: UpsampleLayer([4, 4]), "takes 1 source(s), 2", [(1, 1, 2, 2)] * 2),
]
