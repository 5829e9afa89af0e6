"""Cases of PReLULayer: one slope, a slope per channel on any axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import mlcompute as mlc
from mlcompute.layers.prelu import PReLULayer
from tests.cases.case import Array, Case, Refusal, numbers


def make(count: int, dimension: int = 1, data_type: mlc.DataType = mlc.DataType.FLOAT32) -> Callable[[], PReLULayer]:
    def made() -> PReLULayer:
        slopes = numbers(count, seed=5).astype(data_type.numpy)
        return PReLULayer(mlc.Tensor(shape=(count,), data=slopes, data_type=data_type), dimension)

    return made


def along(axis: int) -> Callable[..., Any]:
    """torch's prelu with the channels on an axis."""

    def oracle(p: Any, x: Any) -> Any:
        if p["slopes"].numel() == 1:
            return torch.nn.functional.prelu(x, p["slopes"])
        moved = x.movedim(axis, 1) if x.ndim > 1 else x[None]
        y = torch.nn.functional.prelu(moved, p["slopes"])
        return y.movedim(1, axis) if x.ndim > 1 else y[0]

    return oracle


AT_ZERO: Array = np.array([[-1.0, 0.0, 2.0]], np.float32)

CASES: list[Case] = [
    Case("one slope", make(1), [(4, 3)], along(1)),
    Case("one slope of an image", make(1), [(2, 3, 4, 5)], along(1)),
    Case("a slope per channel", make(3), [(2, 3, 4, 5)], along(1)),
    Case("a slope per feature", make(3), [(4, 3)], along(1)),
    Case("the last axis", make(5, -1), [(2, 3, 5)], along(2)),
    Case("axis 2 of five", make(4, 2), [(2, 3, 4, 2, 3)], along(2)),
    Case("a batch of one", make(3), [(1, 3, 1, 1)], along(1)),
    Case("at zero", make(1), [AT_ZERO], along(1), smooth=False, note="sits on the kink"),
    Case(
        "float16",
        make(3, 1, mlc.DataType.FLOAT16),
        [numbers(2, 3, 4).astype(np.float16)],
        along(1),
        smooth=False,
        note="differences vanish in float16",
    ),
]

REFUSALS: list[Refusal] = [
    Refusal("another number of channels", make(3), "there are 3 slopes, axis 1 of the source has 4", [(2, 4)]),
    Refusal("no such axis", make(3, 2), "dimension is 2, the source has 2 axes", [(2, 3)]),
    Refusal("integers", make(1), "a source of type INT32 is not supported", [np.ones((2, 3), np.int32)]),
    Refusal("slopes that are none", lambda: PReLULayer(0.25), "slopes must be a Tensor", error=TypeError),
    Refusal("an axis that is none", make(1, 0.5), "dimension must be a whole number", error=TypeError),
]
