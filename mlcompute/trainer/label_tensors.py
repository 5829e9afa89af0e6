"""Tensors for labels that a Trainer feeds: integer class labels where the losses take them, dense ones elsewhere."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence

from mlcompute.enums import DataType
from mlcompute.errors import Error
from mlcompute.graph import Node
from mlcompute.layers.arguments import class_axis_of
from mlcompute.layers.class_labels import INDEXED
from mlcompute.layers.loss import LossLayer
from mlcompute.tensor import Tensor


def are_indices(labels: Tensor, prediction: Tensor) -> bool:
    """Has a label tensor an element where the prediction has one per class?"""
    return labels.descriptor.element_count != prediction.descriptor.element_count


def labels_of_layer(loss: LossLayer, prediction: Tensor, name: str) -> Tensor:
    """A tensor for the labels of a loss layer: integer class labels where it takes them, else dense ones."""
    return _named(_indices_of(loss, prediction) or Tensor(prediction.descriptor), name)


def labels_of_function(
    place: Callable[[Tensor], object], nodes: Callable[[], Iterable[Node]], prediction: Tensor, name: str
) -> tuple[Tensor, Tensor | None]:
    """(the labels that a loss function was placed with, integer class labels that can take their place or None).

    The function is given labels of the prediction's shape, or, where it takes no such, integer class labels. The second
    are there where only losses over classes look at the labels.

    place  calls the function with a label tensor; afterwards `nodes` has its layers
    """
    dense = _named(Tensor(prediction.descriptor), name)
    try:
        place(dense)
    except Error as refusal:
        indices = _without_classes(prediction, None)
        if indices is None:
            raise
        try:
            place(_named(indices, name))
        except Error:
            raise refusal from None
        return indices, None
    readers = [node for node in nodes() if dense in (*node.sources, *node.labels)]
    found = [
        _indices_of(node.layer, node.sources[0]) if isinstance(node.layer, LossLayer) and dense in node.labels else None
        for node in readers
    ]
    if not found or found[0] is None or any(one is None or one.shape != found[0].shape for one in found):
        return dense, None
    return dense, _named(found[0], name)


def relabel(nodes: Iterable[Node], old: Tensor, new: Tensor) -> None:
    """Let losses compare with other labels; all of them, or none where one refuses."""
    found = [node for node in nodes if old in node.labels]
    labels = [[new if label is old else label for label in node.labels] for node in found]
    for node, listed in zip(found, labels, strict=True):
        node.layer.results([tensor.descriptor for tensor in (*node.sources, *listed)])
    for node, listed in zip(found, labels, strict=True):
        node.labels[:] = listed


def takes_labels(function: Callable[..., Tensor]) -> bool:
    """Is a loss function one of prediction and labels, and not of the prediction alone?"""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        pass
    return True


def _indices_of(loss: LossLayer, prediction: Tensor) -> Tensor | None:
    """Integer class labels for a loss layer; None where it takes dense ones only."""
    d, shape = loss.descriptor, prediction.descriptor.shape
    weighs_classes = loss.weights is not None and loss.weights.descriptor.element_count == math.prod(shape)
    return None if d.loss_type not in INDEXED or weighs_classes else _without_classes(prediction, d.class_axis)


def _without_classes(prediction: Tensor, class_axis: int | None) -> Tensor | None:
    """A tensor for integer class labels of a prediction; None where it has no classes, or nobody knows where."""
    shape: Sequence[int] = prediction.descriptor.shape
    axis = class_axis if class_axis is not None else class_axis_of(tuple(shape), prediction.feature_axis)
    if len(shape) < 2 or axis is None or not -len(shape) < axis < len(shape) or shape[axis] == 1:
        return None
    axis %= len(shape)
    return Tensor(shape=(*shape[:axis], *shape[axis + 1 :]), data_type=DataType.INT64)


def _named(tensor: Tensor, name: str) -> Tensor:
    tensor.label = name
    return tensor
