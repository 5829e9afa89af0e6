"""Builders of losses: how far a prediction is from its labels, as a layer of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlcompute.building.builder import build, chosen
from mlcompute.enums import LossType, ReductionType
from mlcompute.errors import DataError
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import ArrayLike

if TYPE_CHECKING:
    from mlcompute.graph import Graph

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
    ignore_index: int | None = None,
    class_weights: Tensor | ArrayLike | None = None,
    name: str = "",
) -> Tensor:
    """How far a prediction is from its labels, as a layer of the graph: for several losses, or intermediate ones.

    kind          "softmax_cross_entropy", "mean_squared_error" ("mse"), "huber" ... as LossLayer has them
    reduction     "mean", "sum" or "none"
    weight        multiplies the loss; `weights`, a tensor, weighs the labels
    class_axis    where the classes are; by default axis 1, and the last of sequences (n, length, classes)
    ignore_index  integer class labels: the label that counts nowhere
    class_weights how much the losses of each class count, one number per class

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
            ignore_index=ignore_index,
        ),
        weights,
        _class_weights(who, class_weights),
    )
    return build(self, layer, [prediction], name, "loss", labels=[labels])


def cross_entropy(
    self: Graph,
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int | None = None,
    class_weights: Tensor | ArrayLike | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
    class_axis: int | None = None,
    name: str = "",
) -> Tensor:
    """-log softmax(logits)[label], averaged: `loss` with "softmax_cross_entropy".

    logits (n, c)            labels (n,) integers, or (n, c) dense
    logits (n, c, h, w)      labels (n, h, w) or (n, c, h, w)
    logits (n, length, c)    labels (n, length) or (n, length, c)

    ignore_index   integer labels: this one counts neither in the loss nor in what the mean divides by
    class_weights  one number per class; with integer labels the mean divides by the sum of the labels' weights
    weights        a tensor with a weight per label or per sample; the mean divides by the number of labels

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> words = graph.input((8, 16), "words", data_type=mlc.DataType.INT64)
    >>> logits = graph.dense(graph.embedding(words, 100, 32), 100)
    >>> following = graph.input((8, 16), "following", data_type=mlc.DataType.INT64)
    >>> graph.cross_entropy(logits, following, ignore_index=-100).descriptor.shape
    (1,)
    """
    return self.loss(
        logits, labels, reduction=reduction, label_smoothing=label_smoothing, weights=weights, class_axis=class_axis,
        ignore_index=ignore_index, class_weights=class_weights, name=name,
    )  # fmt: skip


def _class_weights(who: str, given: Tensor | ArrayLike | None) -> Tensor | None:
    """A tensor of the loss's own, from numbers."""
    if given is None or isinstance(given, Tensor):
        return given
    numbers = np.asarray(given)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise DataError(
            f"{who}: class_weights are {numbers.dtype} of shape {numbers.shape}", expected="one number per class"
        )
    return Tensor(shape=numbers.shape, data=numbers.astype(np.float32))
