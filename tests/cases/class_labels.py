"""Losses of integer class labels, of which no one-hot array is made, and of weighed classes, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.enums import LossType, ReductionType
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Array, Refusal, numbers
from tests.cases.loss import (
    EXTREME,
    MEAN,
    NONE,
    PER_LABEL,
    PER_SAMPLE,
    SUM,
    TINY,
    TOKENS,
    categorical,
    chances,
    given,
    make,
    one_hot,
    smoothed,
    softmax,
    softmax_layer,
    tensor,
)

L = LossLayer
CLASS_WEIGHTS = numbers(5, seed=63, low=0.2, high=3)


def indices(*shape: int, classes: int = 5, kind: Any = np.int64, ignored: int | None = None) -> Array:
    """Class indices; every third one is to be ignored, if any are."""
    made = np.random.default_rng([classes, *shape]).integers(0, classes, shape).astype(kind)
    if ignored is not None:
        made.flat[::3] = ignored
    return made


def by_index(
    reduction: ReductionType, axis: int = 1, own: Array | None = None, scores: bool = True, **options: Any
) -> Any:
    """F.cross_entropy of class indices; `own`: label weights, which do not change what the mean divides by."""
    words = {NONE: "none", SUM: "sum", MEAN: "mean"}

    def check(_: Any, y: torch.Tensor, t: torch.Tensor, fed: Any = None) -> torch.Tensor:
        y = y.movedim(axis, 1)
        y = y if scores else y.clamp(min=TINY).log()
        loss: Callable[..., torch.Tensor] = F.cross_entropy if scores else F.nll_loss
        given = {k: v.to(y.dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        t = t.long().reshape(y.shape[:1] + y.shape[2:])
        w = fed if fed is not None or own is None else torch.from_numpy(own[: len(y)]).to(y.dtype)
        if w is None:
            found = loss(y, t, reduction=words[reduction], **given)
            return found.unsqueeze(axis) if reduction == NONE else found.reshape(1)
        losses = loss(y, t, reduction="none", **given)
        losses = losses * w.reshape(losses.shape if w.numel() == losses.numel() else (-1,) + (1,) * (losses.ndim - 1))
        if reduction != MEAN:
            return losses.unsqueeze(axis) if reduction == NONE else losses.sum().reshape(1)
        counts = (t != given.get("ignore_index", -100)).to(y.dtype)
        if "weight" in given:
            counts = counts * given["weight"][t.clamp(0)]
        return (losses.sum() / counts.sum()).reshape(1)

    return check


def class_weights() -> Tensor:
    return tensor(CLASS_WEIGHTS)


CASES = [
    *(
        given(f"indices {r.name} {shape}", lambda r=r: L.softmax_cross_entropy(r), shape,  # type: ignore[misc]
              indices(shape[0], *shape[2:], classes=shape[1]), by_index(r))
        for r, shape in [(MEAN, (4, 5)), (NONE, (4, 5)), (SUM, (1, 3)), (MEAN, (2, 3, 2, 5)), (NONE, (20, 7)),
                         (SUM, (2, 3, 1, 1)), (MEAN, (3, 40))]
    ),
    *(
        given(f"indices of type {kind.__name__}", lambda: L.softmax_cross_entropy(MEAN), (4, 5), indices(4, kind=kind),
              by_index(MEAN))
        for kind in (np.int32, np.int8, np.uint8)
    ),
    given("indices with an axis of 1", lambda: L.softmax_cross_entropy(NONE), (2, 5, 2, 3), indices(2, 1, 2, 3),
          by_index(NONE)),
    given("indices per token", lambda: L.softmax_cross_entropy(MEAN, class_axis=-1), (3, 4, 5), indices(3, 4),
          by_index(MEAN, 2)),
    given("indices, ignored", lambda: L.softmax_cross_entropy(MEAN, ignore_index=-100), (8, 5),
          indices(8, ignored=-100), by_index(MEAN)),
    given("indices, a class ignored", lambda: L.softmax_cross_entropy(SUM, ignore_index=0), (8, 5), indices(8),
          by_index(SUM, ignore_index=0)),
    given("indices, a number ignored that their type does not have",
          lambda: L.softmax_cross_entropy(MEAN, ignore_index=-100), (8, 5), indices(8, kind=np.uint8), by_index(MEAN)),
    given("indices, smoothed and ignored", lambda: L.softmax_cross_entropy(MEAN, 0.2, ignore_index=-1), (8, 5),
          indices(8, ignored=-1), by_index(MEAN, ignore_index=-1, label_smoothing=0.2)),
    given("indices, classes weighed", lambda: L.softmax_cross_entropy(MEAN, class_weights=class_weights()), (8, 5),
          indices(8), by_index(MEAN, weight=torch.from_numpy(CLASS_WEIGHTS))),
    given("indices, pixels of weighed classes, ignored and smoothed",
          lambda: L.softmax_cross_entropy(MEAN, 0.1, ignore_index=255, class_weights=class_weights()), (2, 5, 3, 4),
          indices(2, 3, 4, kind=np.int32, ignored=255),
          by_index(MEAN, ignore_index=255, label_smoothing=0.1, weight=torch.from_numpy(CLASS_WEIGHTS))),
    given("indices, smoothed over more classes", lambda: L.softmax_cross_entropy(SUM, 0.2, 8), (4, 5), indices(4),
          lambda p, y, t: smoothed(softmax, 0.2, 8)(y, F.one_hot(t.long(), 5).to(y.dtype)).sum().reshape(1)),
    given("indices, a weight per token, ignored",
          lambda: L.softmax_cross_entropy(MEAN, class_axis=-1, ignore_index=-100), (3, 4, 5),
          indices(3, 4, ignored=-100), by_index(MEAN, 2), weights=TOKENS),
    given("indices, a weight per sample, classes weighed",
          lambda: L.softmax_cross_entropy(MEAN, weights=tensor(PER_SAMPLE), class_weights=class_weights()), (4, 5),
          indices(4), by_index(MEAN, own=PER_SAMPLE, weight=torch.from_numpy(CLASS_WEIGHTS))),
    given("indices of probabilities", lambda: L.categorical_cross_entropy(MEAN), chances(4, 5), indices(4),
          by_index(MEAN, scores=False)),
    given("indices of probabilities, weighed and ignored",
          lambda: L.categorical_cross_entropy(MEAN, ignore_index=-100, class_weights=class_weights()),
          chances(2, 5, 3, 3), indices(2, 3, 3, ignored=-100),
          by_index(MEAN, scores=False, weight=torch.from_numpy(CLASS_WEIGHTS))),
    given("indices of probabilities, smoothed", lambda: L.categorical_cross_entropy(SUM, 0.3), chances(4, 5),
          indices(4), lambda p, y, t: smoothed(categorical, 0.3, 5)(y, F.one_hot(t.long(), 5).to(y.dtype)).sum()
          .reshape(1)),
    given("dense labels, classes weighed", lambda: L.softmax_cross_entropy(MEAN, class_weights=class_weights()),
          (4, 5), one_hot(4, 5),
          lambda p, y, t: F.cross_entropy(y, t, weight=torch.from_numpy(CLASS_WEIGHTS).to(y.dtype)).reshape(1)),
    given("indices, extreme logits", lambda: L.softmax_cross_entropy(NONE), EXTREME, indices(4, classes=4),
          by_index(NONE)),
]  # fmt: skip

REFUSALS = [
    Refusal("class indices, but real", softmax_layer, "need an integer type: DataType.INT64", [(4, 5)], [(4,)]),
    Refusal(
        "class indices of another loss", make(), "dense (one-hot), not class indices", [(4, 5)],
        [np.zeros(4, np.int32)],
    ),
    Refusal(
        "class indices of another image", softmax_layer, "the shape (2, 3, 4), dense ones the shape (2, 5, 3, 4)",
        [(2, 5, 3, 4)], [np.zeros((2, 4, 3), np.int32)],
    ),
    Refusal(
        "a label weight for each class of class indices",
        lambda: L.softmax_cross_entropy(MEAN, weights=tensor(PER_LABEL)), "(4, 1) or (4,)", [(4, 5)],
        [np.zeros(4, np.int32)],
    ),
    Refusal("ignore_index without classes", make(ignore_index=3), "takes no integer class labels"),
    Refusal("ignore_index in words", make(LossType.SOFTMAX_CROSS_ENTROPY, ignore_index="pad"), "ignore_index must be",
            error=TypeError),
    Refusal(
        "ignore_index of dense labels", make(LossType.SOFTMAX_CROSS_ENTROPY, ignore_index=-1),
        "ignore_index is -1, but the labels are dense", [(4, 5)], [(4, 5)],
    ),
    Refusal(
        "class_weights without classes",
        lambda: LossLayer(LossDescriptor(LossType.HINGE, SUM), class_weights=tensor(CLASS_WEIGHTS)),
        "HINGE has no classes to weigh",
    ),
    Refusal(
        "class_weights of other classes", lambda: L.softmax_cross_entropy(MEAN, class_weights=class_weights()),
        "class_weights of shape (5,) for 4 classes", [(4, 4)], [np.zeros(4, np.int32)],
    ),
    Refusal("class_weights that are no numbers", lambda: L.softmax_cross_entropy(MEAN, class_weights="balanced"),
            "LossLayer: class_weights are <U8 of shape ()"),
]
