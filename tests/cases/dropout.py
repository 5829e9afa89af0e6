"""Cases of DropoutLayer: the identity where it must be one, and a linear map where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlcompute.layers.dropout import DropoutLayer
from tests.cases.case import Case, Refusal

ONE_TO_FOUR = np.array([[[[1, 2], [3, 4]]]], np.float32)


def _made(rate: Any, seed: Any) -> Callable[[], DropoutLayer]:
    return lambda: DropoutLayer(rate, seed)


def _identity(p: Any, x: Any) -> Any:
    return x * 1


_SHAPES: list[tuple[int, ...]] = [(1,), (1, 7), (3, 5), (2, 3, 5), (3, 2, 1, 5)]

CASES: list[Case] = [
    *(Case(f"inference of {shape}", _made(0.5, 7), [shape], _identity, training=False) for shape in _SHAPES),
    *(
        Case(f"training of {shape}", _made(0.5, 7), [shape], training=True, note="random: no formula to compare with")
        for shape in _SHAPES
    ),
    Case("rate 0 in training", _made(0, 7), [(3, 5)], _identity, training=True),
    Case("rate 0 in inference", _made(0.0, 7), [(3, 5)], _identity, training=False),
    Case("golden rate 0", _made(0.0, 7), [ONE_TO_FOUR], _identity, expect=ONE_TO_FOUR),
    Case("a small rate", _made(0.01, 1), [(4, 25)], training=True, note="random: no formula to compare with"),
    Case("a large rate", _made(0.99, 2**64 - 1), [(4, 25)], training=True, note="random: no formula to compare with"),
    Case("float16 in inference", _made(0.5, 7), [np.ones((2, 3), np.float16)], _identity, training=False, smooth=False,
         note="differences vanish in float16"),
]  # fmt: skip

REFUSALS: list[Refusal] = [
    Refusal("rate 1", _made(1.0, 7), "rate is 1.0"),
    Refusal("negative rate", _made(-0.1, 7), "rate is -0.1"),
    Refusal("nan as rate", _made(float("nan"), 7), "rate is nan"),
    Refusal("negative seed", _made(0.5, -1), "seed is -1"),
    Refusal("a seed of more than 64 bits", _made(0.5, 2**64), "seed is 18446744073709551616"),
    Refusal("a rate that is no number", _made("0.5", 7), "rate must be a number", error=TypeError),
    Refusal("a seed that is not whole", _made(0.5, 1.5), "seed must be a whole number", error=TypeError),
    Refusal("two sources", _made(0.5, 7), "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
    Refusal("integers", _made(0.5, 7), "a source of type INT64 is not supported", [np.ones((2, 3), np.int64)]),
]
