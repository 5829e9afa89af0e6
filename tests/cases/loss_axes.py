"""Losses with their classes on the last axis, against those with them on axis 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlcompute.enums import LossType
from mlcompute.layers.loss import LossLayer
from tests.cases.case import Array, Case, Refusal, numbers
from tests.cases.loss import (
    MEAN,
    NONE,
    SUM,
    TOKENS,
    Loss,
    categorical,
    chances,
    cosine,
    given,
    make,
    one_hot,
    oracle,
    smoothed,
    softmax,
    softmax_layer,
    tensor,
)

L = LossLayer


def last(*shape: int, make: Any = numbers) -> Array:
    """An array made with its classes on axis 1, seen with them on the last."""
    made: Array = make(shape[0], shape[-1], *shape[1:-1])
    return np.ascontiguousarray(np.moveaxis(made, 1, -1))


def over_last(loss: Loss) -> Loss:
    return lambda y, t: loss(y.movedim(-1, 1), t.movedim(-1, 1)).movedim(1, -1)


def sequences(name: str, build: Callable[..., LossLayer], loss: Loss, source: Any, label: Any) -> list[Case]:
    """Classes on the last axis, by its number from either end."""
    return [
        Case(
            f"{name} {reduction.name} {shape}, class_axis={axis}",
            lambda r=reduction, a=axis: build(r, class_axis=a),  # type: ignore[misc]
            [last(*shape, make=source)],
            oracle(over_last(loss), reduction),
            [last(*shape, make=label)],
        )
        for reduction, shape, axis in [
            (NONE, (2, 4, 3), -1),
            (MEAN, (2, 4, 3), 2),
            (SUM, (2, 1, 3), None),
            (MEAN, (2, 3, 2, 5), 3),
            (NONE, (2, 4, 1), 2),
        ]
    ]


CASES = [
    *sequences("softmax", L.softmax_cross_entropy, softmax, numbers, one_hot),
    *sequences("categorical", L.categorical_cross_entropy, categorical, chances, one_hot),
    *sequences("cosine", L.cosine_distance, cosine, numbers, lambda *s: numbers(*s, seed=9)),
    given(
        "softmax over sequences, a weight per token",
        lambda: L.softmax_cross_entropy(SUM, weights=tensor(TOKENS), class_axis=-1),
        (3, 4, 5),
        last(3, 4, 5, make=one_hot),
        oracle(over_last(softmax), SUM, own=TOKENS),
    ),
    given(
        "softmax over sequences, smoothed",
        lambda: L.softmax_cross_entropy(MEAN, 0.1, class_axis=-1),
        (3, 4, 5),
        last(3, 4, 5, make=one_hot),
        oracle(over_last(smoothed(softmax, 0.1, 5)), MEAN),
    ),
]

REFUSALS = [
    Refusal("a sequence, or is it?", softmax_layer, "on axis 1 or on axis 2?", [(2, 4, 5)], [(2, 4, 5)]),
    Refusal(
        "class axis beyond the axes",
        lambda: L.softmax_cross_entropy(MEAN, class_axis=3),
        "class_axis is 3, the prediction has 3 axes",
        [(2, 4, 5)],
        [(2, 4, 5)],
    ),
    Refusal(
        "class axis of the samples, from the end",
        lambda: L.cosine_distance(MEAN, class_axis=-3),
        "class_axis is -3",
        [(2, 4, 5)],
        [(2, 4, 5)],
    ),
    Refusal("class axis of the samples", make(LossType.COSINE_DISTANCE, class_axis=0), "class_axis is 0, the axis of"),
    Refusal("class axis without classes", make(class_axis=1), "MEAN_SQUARED_ERROR sums over no classes"),
    Refusal("class axis in words", make(LossType.COSINE_DISTANCE, class_axis="last"), "whole number", error=TypeError),
]
