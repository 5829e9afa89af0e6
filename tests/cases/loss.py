"""Losses against the formulas written out in PyTorch, and against torch.nn.functional where it has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.enums import LossType, ReductionType
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Array, Case, Refusal, Source, numbers

NONE, SUM, MEAN = ReductionType.NONE, ReductionType.SUM, ReductionType.MEAN
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TINY = float(np.finfo(np.float32).tiny)


# Per element, in the prediction's shape; summed over axis 1 where the loss sums over classes.
def absolute(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(y, t, reduction="none")


def squared(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, t, reduction="none")


def softmax(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y, t, reduction="none").unsqueeze(1)


def sigmoid(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(y, t, reduction="none")


def categorical(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return -(t * y.clamp(min=TINY).log()).sum(1, keepdim=True)


def hinge(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.relu(1 - (2 * t - 1) * y)


def huber(delta: float) -> Loss:
    return lambda y, t: F.huber_loss(y, t, reduction="none", delta=delta)


def cosine(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return 1 - (y * t).sum(1, keepdim=True)


def log(epsilon: float) -> Loss:
    return lambda y, t: -t * (y + epsilon).log() - (1 - t) * (1 - y + epsilon).log()


def smoothed(loss: Loss, share: float, classes: int) -> Loss:
    return lambda y, t: loss(y, t * (1 - share) + share / classes)


def reduced(losses: torch.Tensor, reduction: ReductionType) -> torch.Tensor:
    if reduction == NONE:
        return losses
    return (losses.sum() if reduction == SUM else losses.mean()).reshape(1)


def oracle(loss: Loss, reduction: ReductionType, weight: float = 1.0, own: Array | None = None) -> Callable[..., Any]:
    """`own`: label weights the layer holds, or fed ones given last; one per loss or one per sample."""

    def check(_: dict[str, torch.Tensor], y: torch.Tensor, t: torch.Tensor, fed: Any = None) -> torch.Tensor:
        losses = loss(y, t.to(y.dtype).reshape(y.shape)) * weight
        w = torch.from_numpy(own[: len(y)]) if fed is None and own is not None else fed
        if w is not None:
            losses = losses * w.reshape(losses.shape if w.numel() == losses.numel() else (-1,) + (1,) * (y.ndim - 1))
        return reduced(losses, reduction)

    return check


def one_hot(*shape: int, seed: int = 0) -> Array:
    """Labels with one 1 along axis 1."""
    chosen = np.random.default_rng(seed).integers(0, shape[1], (shape[0], *shape[2:]))
    return np.ascontiguousarray(np.moveaxis(np.eye(shape[1], dtype=np.float32)[chosen], -1, 1))


def binary(*shape: int) -> Array:
    return (numbers(*shape, seed=50) > 0).astype(np.float32)


def chances(*shape: int) -> Array:
    """Probabilities away from 0 and 1."""
    return numbers(*shape, seed=51, low=0.05, high=0.95)


def tensor(array: Array) -> Tensor:
    return Tensor(shape=array.shape, data=array)


def shapes(
    name: str, build: Callable[..., LossLayer], loss: Loss, source: Any, label: Any, least_rank: int = 1
) -> list[Case]:
    """One loss over every reduction and a handful of shapes; of three axes a loss over classes is told which."""

    def made(reduction: ReductionType, shape: tuple[int, ...]) -> Callable[[], LossLayer]:
        said = {"class_axis": 1} if least_rank == 2 and len(shape) == 3 else {}
        return lambda: build(reduction, **said)

    several: dict[ReductionType, list[tuple[int, ...]]] = {
        NONE: [(4, 5), (2, 3, 2, 5), (1, 1, 1, 1), (6,)],
        SUM: [(2, 3, 4)],
        MEAN: [(1, 3), (3, 1), (2, 3, 2, 5)],
    }
    cases = [
        Case(f"{name} {reduction.name} {shape}", made(reduction, shape), [source(*shape)],
             oracle(loss, reduction), [label(*shape)])
        for reduction, listed in several.items()
        for shape in listed
        if len(shape) >= least_rank
    ]  # fmt: skip
    flat = Case(f"{name} labels without image axes", lambda: build(MEAN), [source(3, 4, 1, 1)], oracle(loss, MEAN),
                [label(3, 4)])  # fmt: skip
    return [*cases, flat]


def given(name: str, layer: Callable[[], LossLayer], source: Source, label: Source, check: Any, **rest: Any) -> Case:
    return Case(name, layer, [source], check, [label], **rest)


def logits(*values: float) -> Array:
    return np.array(values, np.float32).reshape(-1, 4)


EXTREME = logits(1e4, -1e4, 0, 1, -1e4, -1e4, 1e4, 1e4, 0, 0, 0, 0, 88, -88, 104, -104)
CERTAIN = logits(1, 0, 0, 0, 0, 0.5, 0.5, 0)
PER_SAMPLE, PER_LABEL = numbers(4, seed=60, low=0, high=2), numbers(4, 5, seed=61, low=0, high=2)
L = LossLayer


def weighted_classes(_: Any, y: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return -(w * t * y.log_softmax(1)).sum(1, keepdim=True)


def weighted_cosine(_: Any, y: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (w * (1 / y.shape[1] - y * t)).sum(1, keepdim=True)


TOKENS = numbers(3, 4, seed=62, low=0, high=2)

CASES = [
    *shapes("absolute", L.mean_absolute_error, absolute, numbers, lambda *s: numbers(*s, seed=9)),
    *shapes("squared", L.mean_squared_error, squared, numbers, lambda *s: numbers(*s, seed=9)),
    *shapes("softmax", L.softmax_cross_entropy, softmax, numbers, one_hot, least_rank=2),
    *shapes("sigmoid", L.sigmoid_cross_entropy, sigmoid, numbers, binary),
    *shapes("categorical", L.categorical_cross_entropy, categorical, chances, one_hot, least_rank=2),
    *shapes("hinge", L.hinge_loss, hinge, numbers, binary),
    *shapes("huber", L.huber_loss, huber(1.0), numbers, lambda *s: numbers(*s, seed=9) * 3),
    *shapes("cosine", L.cosine_distance, cosine, numbers, lambda *s: numbers(*s, seed=9), least_rank=2),
    *shapes("log", L.log, log(1e-7), chances, binary),
    # Options.
    given("huber delta 0.3", lambda: L.huber_loss(SUM, 0.3), (4, 5), (4, 5), oracle(huber(0.3), SUM)),
    given("log epsilon 0.1", lambda: L.log(NONE, 0.1), chances(4, 5), binary(4, 5), oracle(log(0.1), NONE)),
    given("weight", lambda: L.hinge_loss(MEAN, -2.5), (4, 5), binary(4, 5), oracle(hinge, MEAN, -2.5)),
    given(
        "weight without reduction", lambda: L.mean_squared_error(NONE, 0.5), (4, 5), (4, 5), oracle(squared, NONE, 0.5)
    ),
    given(
        "softmax, smoothed over the class axis",
        lambda: L.softmax_cross_entropy(MEAN, 0.1),
        (4, 5),
        one_hot(4, 5),
        lambda p, y, t: F.cross_entropy(y, t, label_smoothing=0.1).reshape(1),
    ),
    given(
        "softmax, smoothed over class_count",
        lambda: L.softmax_cross_entropy(SUM, 0.2, 8),
        (4, 5),
        one_hot(4, 5),
        oracle(smoothed(softmax, 0.2, 8), SUM),
    ),
    given(
        "softmax, smoothed to uniform",
        lambda: L.softmax_cross_entropy(NONE, 1.0, 3),
        (2, 3, 2, 2),
        one_hot(2, 3, 2, 2),
        oracle(smoothed(softmax, 1.0, 3), NONE),
    ),
    given(
        "sigmoid, smoothed",
        lambda: L.sigmoid_cross_entropy(NONE, 0.2),
        (4, 5),
        binary(4, 5),
        oracle(smoothed(sigmoid, 0.2, 2), NONE),
    ),
    given(
        "categorical, smoothed",
        lambda: L.categorical_cross_entropy(NONE, 0.3),
        chances(4, 5),
        one_hot(4, 5),
        oracle(smoothed(categorical, 0.3, 5), NONE),
    ),
    given(
        "constants of other losses do not count",
        lambda: LossLayer(LossDescriptor(LossType.MEAN_SQUARED_ERROR, SUM, 2.0, 0.5, 7, 0.5, 0.1)),
        (4, 5),
        (4, 5),
        oracle(squared, SUM, 2.0),
    ),
    given(
        "softmax of labels that do not sum to 1",
        lambda: L.softmax_cross_entropy(MEAN),
        (4, 5),
        (4, 5),
        oracle(softmax, MEAN),
    ),
    # Types of labels.
    *(
        given(
            f"labels of type {kind.__name__}",
            lambda: L.softmax_cross_entropy(MEAN),
            (4, 5),
            one_hot(4, 5).astype(kind),
            oracle(softmax, MEAN),
        )
        for kind in (np.int32, np.int64, np.int8, np.uint8, np.bool_, np.float16)
    ),
    given(
        "half precision prediction",
        lambda: L.mean_squared_error(MEAN),
        numbers(4, 5).astype(np.float16),
        (4, 5),
        oracle(squared, MEAN),
        smooth=False,
        note="finite differences do not reach through float16",
    ),
    # Weights, fed and held.
    given(
        "fed, one per sample",
        lambda: L.softmax_cross_entropy(MEAN),
        (4, 5),
        one_hot(4, 5),
        oracle(softmax, MEAN),
        weights=PER_SAMPLE,
    ),
    given(
        "fed, (n, 1)",
        lambda: L.softmax_cross_entropy(NONE),
        (4, 5),
        one_hot(4, 5),
        oracle(softmax, NONE),
        weights=PER_SAMPLE.reshape(4, 1),
    ),
    given(
        "fed, one per label",
        lambda: L.mean_absolute_error(MEAN),
        (4, 5),
        (4, 5),
        oracle(absolute, MEAN),
        weights=PER_LABEL,
    ),
    given(
        "fed, one per sample, no classes summed",
        lambda: L.hinge_loss(SUM),
        (4, 5),
        binary(4, 5),
        oracle(hinge, SUM),
        weights=PER_SAMPLE,
    ),
    given(
        "fed, one per pixel",
        lambda: L.softmax_cross_entropy(MEAN),
        (2, 3, 2, 5),
        one_hot(2, 3, 2, 5),
        oracle(softmax, MEAN),
        weights=(2, 1, 2, 5),
    ),
    given(
        "fed, one per image",
        lambda: L.log(NONE),
        chances(2, 3, 2, 5),
        binary(2, 3, 2, 5),
        oracle(log(1e-7), NONE),
        weights=(2,),
    ),
    given(
        "fed, one per label of a class sum",
        lambda: L.softmax_cross_entropy(NONE),
        (4, 5),
        one_hot(4, 5),
        weighted_classes,
        weights=PER_LABEL,
    ),
    given(
        "fed, one per label of a distance",
        lambda: L.cosine_distance(NONE),
        (4, 5),
        (4, 5),
        weighted_cosine,
        weights=PER_LABEL,
    ),
    given(
        "fed, whole numbers",
        lambda: L.mean_squared_error(MEAN),
        (4, 5),
        (4, 5),
        oracle(squared, MEAN),
        weights=np.arange(4, dtype=np.int32),
    ),
    given(
        "held, one per label",
        lambda: L.mean_squared_error(MEAN, weights=tensor(PER_LABEL)),
        (4, 5),
        (4, 5),
        oracle(squared, MEAN, own=PER_LABEL),
    ),
    given(
        "held, one per sample",
        lambda: L.categorical_cross_entropy(SUM, weights=tensor(PER_SAMPLE)),
        chances(4, 5),
        one_hot(4, 5),
        oracle(categorical, SUM, own=PER_SAMPLE),
    ),
    given(
        "held but others are fed",
        lambda: L.mean_squared_error(NONE, weights=tensor(PER_LABEL)),
        (4, 5),
        (4, 5),
        oracle(squared, NONE),
        weights=PER_LABEL + 1,
    ),
    # Edges of the formulas.
    given(
        "softmax of extreme logits",
        lambda: L.softmax_cross_entropy(NONE),
        EXTREME,
        one_hot(4, 4),
        oracle(softmax, NONE),
    ),
    given(
        "sigmoid of extreme logits", lambda: L.sigmoid_cross_entropy(NONE), EXTREME, binary(4, 4), oracle(sigmoid, NONE)
    ),
    given(
        "sigmoid at 0",
        lambda: L.sigmoid_cross_entropy(SUM),
        np.zeros((2, 3), np.float32),
        binary(2, 3),
        oracle(sigmoid, SUM),
    ),
    given(
        "categorical of impossible classes",
        lambda: L.categorical_cross_entropy(NONE),
        CERTAIN,
        logits(1, 0, 0, 0, 1, 0, 0, 0),
        oracle(categorical, NONE),
        smooth=False,
        note="log(0) is guarded: flat below the smallest normal float32",
    ),
    given(
        "absolute at 0",
        lambda: L.mean_absolute_error(SUM),
        np.ones((2, 3), np.float32),
        np.ones((2, 3), np.float32),
        oracle(absolute, SUM),
        smooth=False,
        note="a kink, where the gradient is 0",
    ),
    given(
        "huber at delta",
        lambda: L.huber_loss(NONE),
        logits(1, -1, 2, 0.5),
        logits(0, 0, 1, 0.5),
        oracle(huber(1.0), NONE),
        smooth=False,
        note="the slope has a kink there, so differences are off by half a step",
    ),
    given(
        "log of certain answers",
        lambda: L.log(NONE, 0.01),
        CERTAIN,
        logits(1, 0, 0, 1, 0, 0, 1, 1),
        oracle(log(0.01), NONE),
    ),
    given(
        "cosine of equal directions",
        lambda: L.cosine_distance(NONE),
        logits(1, 0, 0, 0),
        logits(1, 0, 0, 0),
        oracle(cosine, NONE),
        expect=0,
    ),
]


def make(kind: Any = LossType.MEAN_SQUARED_ERROR, reduction: Any = SUM, **options: Any) -> Callable[[], LossLayer]:
    return lambda: LossLayer(LossDescriptor(kind, reduction, **options))


def softmax_layer() -> LossLayer:
    return L.softmax_cross_entropy(MEAN)


REFUSALS = [
    Refusal("reduction without meaning", make(reduction=ReductionType.MAX), "cannot be reduced with MAX"),
    Refusal("reduction of any kind", make(reduction=ReductionType.ANY), "cannot be reduced with ANY"),
    Refusal("sentinel", make(LossType.COUNT), "loss_type is <LossType.COUNT"),
    Refusal("another enumeration", make(ReductionType.SUM), "loss_type is <ReductionType.SUM"),
    Refusal("loss in words", make("huber"), "loss_type must be a LossType", error=TypeError),
    Refusal("weight in words", make(weight="2"), "weight must be a number", error=TypeError),
    Refusal("infinite weight", make(weight=float("inf")), "weight is inf"),
    Refusal("too much smoothing", make(label_smoothing=1.5), "label_smoothing is 1.5"),
    Refusal("negative smoothing", make(label_smoothing=-0.1), "label_smoothing is -0.1"),
    Refusal("no classes", make(class_count=0), "class_count is 0"),
    Refusal("negative epsilon", make(epsilon=-1.0), "epsilon is -1"),
    Refusal("delta of 0", make(delta=0.0), "delta is 0"),
    Refusal(
        "weight and weights", lambda: L.hinge_loss(SUM, 2.0, tensor(PER_SAMPLE)), "both a weight, 2, and a weights"
    ),
    Refusal("weights in a list", lambda: L.hinge_loss(SUM, weights=[1.0]), "must be a Tensor", error=TypeError),  # type: ignore[arg-type]
    Refusal("no descriptor", lambda: LossLayer(SUM), "must be a LossDescriptor", error=TypeError),  # type: ignore[arg-type]
    Refusal("too few labels", make(), "the prediction has 20 elements, the labels have 15", [(4, 5)], [(3, 5)]),
    Refusal("no labels", make(), "takes a prediction and its labels, 1 tensor(s) were given", [(4, 5)]),
    Refusal("labels twice", make(), "3 tensor(s) were given", [(4, 5)], [(4, 5), (4, 5)]),
    Refusal(
        "labels with other axes first",
        make(),
        "the same extents as the prediction in another order",
        [(2, 4, 5)],
        [(2, 5, 4)],
    ),
    Refusal("no class axis", softmax_layer, "SOFTMAX_CROSS_ENTROPY needs a class axis", [(4,)], [(4,)]),
    Refusal(
        "weights of another batch",
        lambda: L.mean_squared_error(SUM, weights=tensor(PER_SAMPLE)),
        "label weights of shape (4,) do not fit a prediction of shape (3, 5)",
        [(3, 5)],
        [(3, 5)],
    ),
    Refusal(
        "whole-numbered prediction",
        make(),
        "a prediction of type INT32 is not supported",
        [np.zeros((4, 5), np.int32)],
        [(4, 5)],
    ),
]
