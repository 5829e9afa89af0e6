"""RMS normalization: against torch.nn.functional.rms_norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlcompute.layers.sample_normalization import RMSNormalizationLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Case, Refusal, numbers


def make(*shape: int, scaled: bool = True, epsilon: float = 1e-5) -> Callable[[], RMSNormalizationLayer]:
    def build() -> RMSNormalizationLayer:
        gamma = Tensor(shape=shape, data=numbers(*shape, seed=3)) if scaled else None
        return RMSNormalizationLayer(shape, gamma, epsilon)

    return build


def oracle(*shape: int, epsilon: float = 1e-5) -> Callable[..., Any]:
    return lambda p, x: torch.nn.functional.rms_norm(x, shape, p.get("gamma"), epsilon)


CASES = [
    Case("last axis", make(4), [(2, 3, 4)], oracle(4)),
    Case("two axes", make(3, 4), [(2, 3, 4)], oracle(3, 4)),
    Case("without scale", make(6, scaled=False), [(1, 6)], oracle(6)),
    Case("one element, large epsilon", make(1, epsilon=0.5), [(3, 1)], oracle(1, epsilon=0.5)),
]
REFUSALS = [
    Refusal("another extent", make(5), "normalized_shape is (5,), the source is (2, 4)", [(2, 4)]),
    Refusal("negative epsilon", make(5, epsilon=-1.0), "variance_epsilon"),
    Refusal("a small scale", lambda: RMSNormalizationLayer([5], Tensor(shape=(4,), fill_with_data=1.0)), "needs 5"),
]
