"""Integer class labels: the losses of a prediction whose labels are numbers of classes, never one-hot arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlcompute import ops
from mlcompute.enums import DataType, LossType
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor

if TYPE_CHECKING:
    from mlcompute.layers.loss import LossDescriptor

#: Types of labels that may be numbers of classes.
INTEGERS = frozenset({DataType.INT8, DataType.UINT8, DataType.INT32, DataType.INT64})
#: Losses that take them.
INDEXED = frozenset({LossType.SOFTMAX_CROSS_ENTROPY, LossType.CATEGORICAL_CROSS_ENTROPY})


def fit_without_classes(prediction: Shape, axis: int, labels: Shape) -> bool:
    """Have the labels one element where the prediction has one per class? Extents of 1 may be left out."""
    if prediction[axis] == 1:
        return False  # then they have as many elements, and are dense
    places = (*prediction[:axis], *prediction[axis + 1 :])
    return [extent for extent in labels if extent != 1] == [extent for extent in places if extent != 1]


def are_indices(kind: LossType, prediction: Shape, axis: int, labels: TensorDescriptor) -> bool:
    """Are labels numbers of classes: whole numbers, with no axis for the classes?"""
    return kind in INDEXED and labels.data_type in INTEGERS and fit_without_classes(prediction, axis, labels.shape)


def indexed_losses(
    d: LossDescriptor, x: Value, labels: Value, axis: int, class_weights: Value | None
) -> tuple[Value, Value | None]:
    """The loss of every label, and what each counts in their mean; None: all the same.

    x (*A, classes, *B)   labels (*A, 1, *B) integers   class_weights (classes,)   ->   losses and weights (*A, 1, *B)

    Ignored labels have no loss and do not count. With class weights a label counts as much as its class weighs; the
    share that label smoothing gives to another class weighs what that class does.
    """
    ignored = d.ignore_index
    if ignored is not None and not np.iinfo(labels.dtype).min <= ignored <= np.iinfo(labels.dtype).max:
        ignored = None  # no label of this type can be it
    counts = None if ignored is None else ops.not_equal(labels, ignored)
    chosen = labels if counts is None else ops.select(counts, labels, 0)
    smoothing, spread_over = d.label_smoothing, d.class_count if d.class_count > 1 else x.shape[axis]
    losses, others = _losses(d, x, labels, chosen, counts, ignored, axis, class_weights)
    if class_weights is None:
        weight = None if counts is None else ops.convert(counts, x.dtype)
    else:
        weight = ops.take(class_weights, chosen, 0)
        weight = weight if counts is None else ops.select(counts, weight, 0.0)
        losses = losses * weight
    if others is not None:
        losses = losses * (1.0 - smoothing) + others * (smoothing / spread_over)
    return losses, weight


def _losses(
    d: LossDescriptor,
    x: Value,
    labels: Value,
    chosen: Value,
    counts: Value | None,
    ignored: int | None,
    axis: int,
    class_weights: Value | None,
) -> tuple[Value, Value | None]:
    """-log p of the label's class; and, where smoothing is still to be applied, the weighed sum over all classes."""
    smoothing, spread_over = d.label_smoothing, d.class_count if d.class_count > 1 else 0
    if d.loss_type == LossType.SOFTMAX_CROSS_ENTROPY and (class_weights is None or not smoothing):
        return ops.softmax_cross_entropy(x, labels, axis, smoothing, spread_over, ignored)[0], None
    if d.loss_type == LossType.SOFTMAX_CROSS_ENTROPY:
        losses, largest, logarithm = ops.softmax_cross_entropy(x, labels, axis, ignored=ignored)
        every = logarithm - (x - largest)
    else:
        losses = -_log(ops.gather(x, chosen, axis))
        losses = losses if counts is None else ops.select(counts, losses, 0.0)
        every = -_log(x)
    if not smoothing:
        return losses, None
    if class_weights is not None:
        every = every * along_classes(class_weights, x, axis)
    others = ops.sum_(every, (axis,))
    return losses, others if counts is None else ops.select(counts, others, 0.0)


def along_classes(class_weights: Value, x: Value, axis: int) -> Value:
    """One number per class in a shape that repeats along the other axes of a prediction."""
    return ops.reshape(class_weights, (x.shape[axis],) + (1,) * (x.rank - 1 - axis))


def _log(y: Value) -> Value:
    # log(0) would be -infinity; probabilities are kept at or above the smallest normal float32.
    return ops.log(ops.maximum(y, float(np.finfo(np.float32).tiny)))
