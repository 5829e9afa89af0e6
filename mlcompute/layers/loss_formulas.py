"""The formulas of losses: one term per element of a prediction, before anything is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mlcompute import ops
from mlcompute.enums import LossType
from mlcompute.ops.op import Value

if TYPE_CHECKING:
    from mlcompute.layers.loss import LossDescriptor

#: log(0) would be -infinity, and 0 times that NaN; probabilities are kept at or above the smallest normal float32.
_TINY = float(np.finfo(np.float32).tiny)


def loss_terms(d: LossDescriptor, y: Value, t: Value, axis: int) -> Value:
    """The terms of a loss for a prediction y and dense labels t.   y, t   ->   like y

    axis  where the classes are, for losses that sum over them
    """
    if d.loss_type == LossType.HUBER:
        return huber(y - t, d.delta)
    if d.loss_type == LossType.LOG:
        return -(t * ops.log(y + d.epsilon)) - (1.0 - t) * ops.log(1.0 - y + d.epsilon)
    if d.label_smoothing > 0.0 and d.loss_type in _CROSS_ENTROPIES:
        classes = 2 if d.loss_type == LossType.SIGMOID_CROSS_ENTROPY else d.class_count
        t = t * (1.0 - d.label_smoothing) + d.label_smoothing / (classes if classes > 1 else y.shape[axis])
    return _TERMS[d.loss_type](y, t, axis)


def huber(e: Value, delta: float) -> Value:
    """e² / 2 for |e| <= delta, delta (|e| - delta / 2) beyond, per element."""
    size = ops.abs_(e)
    inner = ops.minimum(size, delta)
    return inner * (size - inner * 0.5)


def sigmoid_cross_entropy(y: Value, t: Value) -> Value:
    """max(y, 0) - y t + log(1 + e^-|y|) per element: finite for every finite y."""
    # Written with one choice for both halves, so that their slopes at 0 add up to sigmoid(0) - t.
    positive = y >= 0.0
    return ops.select(positive, y, 0.0) - y * t + ops.softplus(ops.select(positive, -y, y))


def softmax_cross_entropy(y: Value, t: Value, axis: int) -> Value:
    """-t log softmax(y) per element, classes on one axis; the sum over it is left to the caller."""
    return -(t * ops.log_softmax(y, axis))


def _squared(y: Value, t: Value, axis: int) -> Value:
    e = y - t
    return e * e


def _categorical(y: Value, t: Value, axis: int) -> Value:
    return -(t * ops.log(ops.maximum(y, _TINY)))


def _cosine(y: Value, t: Value, axis: int) -> Value:
    # The 1 of 1 - y·t is dealt out over the classes, so that equal label weights scale the whole distance.
    return 1.0 / y.shape[axis] - y * t


_CROSS_ENTROPIES = frozenset(
    {LossType.SOFTMAX_CROSS_ENTROPY, LossType.SIGMOID_CROSS_ENTROPY, LossType.CATEGORICAL_CROSS_ENTROPY}
)

#: Loss per element of prediction, labels and the axis of the classes.
_TERMS: dict[LossType, Callable[[Value, Value, int], Value]] = {
    LossType.MEAN_ABSOLUTE_ERROR: lambda y, t, _: ops.abs_(y - t),
    LossType.MEAN_SQUARED_ERROR: _squared,
    LossType.SOFTMAX_CROSS_ENTROPY: softmax_cross_entropy,
    LossType.SIGMOID_CROSS_ENTROPY: lambda y, t, _: sigmoid_cross_entropy(y, t),
    LossType.CATEGORICAL_CROSS_ENTROPY: _categorical,
    LossType.HINGE: lambda y, t, _: ops.relu(1.0 - (2.0 * t - 1.0) * y),
    LossType.COSINE_DISTANCE: _cosine,
}
