"""Builders that change shapes or end a graph: flatten, slice, reduce, loss. (`reshape` and others are Graph's own.)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mlcompute.building.builder import build, chosen, expect_rank
from mlcompute.enums import LossType, ReductionType
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.shaping import ReshapeLayer, SliceLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_REDUCTIONS = {
    "sum": ReductionType.SUM,
    "mean": ReductionType.MEAN,
    "max": ReductionType.MAX,
    "min": ReductionType.MIN,
    "argmax": ReductionType.ARG_MAX,
    "argmin": ReductionType.ARG_MIN,
    "l1_norm": ReductionType.L1_NORM,
    "any": ReductionType.ANY,
    "all": ReductionType.ALL,
}
#: Losses by name; "mse" and "mae" as everybody calls them.
LOSSES = {
    "softmax_cross_entropy": LossType.SOFTMAX_CROSS_ENTROPY,
    "sigmoid_cross_entropy": LossType.SIGMOID_CROSS_ENTROPY,
    "categorical_cross_entropy": LossType.CATEGORICAL_CROSS_ENTROPY,
    "mean_squared_error": LossType.MEAN_SQUARED_ERROR,
    "mse": LossType.MEAN_SQUARED_ERROR,
    "mean_absolute_error": LossType.MEAN_ABSOLUTE_ERROR,
    "mae": LossType.MEAN_ABSOLUTE_ERROR,
    "huber": LossType.HUBER,
    "hinge": LossType.HINGE,
    "log": LossType.LOG,
    "cosine_distance": LossType.COSINE_DISTANCE,
}
_LOSS_REDUCTIONS = {"mean": ReductionType.MEAN, "sum": ReductionType.SUM, "none": ReductionType.NONE}


def flatten(self: Graph, x: Tensor, *, name: str = "") -> Tensor:
    """All axes but the first become one.   x (n, ...)   ->   (n, product of the others)"""
    shape = expect_rank(self, "flatten", x, range(1, 16), "a batch of anything").descriptor.shape
    return build(self, ReshapeLayer((shape[0], math.prod(shape[1:]))), [x], name, "flatten")


def slice(
    self: Graph,
    x: Tensor,
    start: Sequence[int],
    end: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    name: str = "",
) -> Tensor:
    """x[start:end:stride], one entry per axis; the end is not part of it."""
    return build(self, SliceLayer(start, end, stride), [x], name, "slice")


def reduce(self: Graph, x: Tensor, kind: str = "mean", *, dimensions: int | Sequence[int], name: str = "") -> Tensor:
    """The elements along some axes become one; their extents become 1.

    kind  "sum", "mean", "max", "min", "argmax", "argmin", "l1_norm", "any" or "all"
    """
    which = chosen(f"{type(self).__name__}.reduce", "kind", _REDUCTIONS, kind)
    axes = dimensions if isinstance(dimensions, Iterable) else [dimensions]
    return build(self, ReductionLayer(which, dimensions=axes), [x], name, f"reduce_{kind}")


def loss(
    self: Graph,
    prediction: Tensor,
    labels: Tensor,
    kind: str = "softmax_cross_entropy",
    *,
    reduction: str = "mean",
    weight: float = 1.0,
    label_smoothing: float = 0.0,
    delta: float = 1.0,
    weights: Tensor | None = None,
    class_axis: int | None = None,
    name: str = "",
) -> Tensor:
    """How far a prediction is from its labels, as a layer of the graph: for several losses, or intermediate ones.

    kind       "softmax_cross_entropy", "mean_squared_error" ("mse"), "huber" ... as LossLayer has them
    reduction  "mean", "sum" or "none"
    weight     multiplies the loss; `weights`, a tensor, weighs the labels
    class_axis where the classes are; by default axis 1, and the last of sequences (n, length, classes)

    Both sides are trained where layers compute them; `stop_gradient` makes one of them a fixed target.
    """
    who = f"{type(self).__name__}.loss"
    layer = LossLayer(
        LossDescriptor(
            chosen(who, "kind", LOSSES, kind),
            chosen(who, "reduction", _LOSS_REDUCTIONS, reduction),
            weight,
            label_smoothing,
            delta=delta,
            class_axis=class_axis,
        ),
        weights,
    )
    return build(self, layer, [prediction], name, "loss", labels=[labels])
