"""Tensors for labels that a Trainer feeds: integer class labels where losses take them; functions see what is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mlcompute.enums import DataType
from mlcompute.errors import Error, ShapeError
from mlcompute.foreign_names import expect_prediction_first
from mlcompute.graph import Node
from mlcompute.layers.arguments import class_axis_of, takes_two
from mlcompute.layers.class_labels import INDEXED
from mlcompute.layers.loss import LossLayer
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array


class Place(NamedTuple):
    """A loss function: what calls it again with other labels, and the prediction it compares with them."""

    again: Callable[[Tensor], object]
    prediction: Tensor


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

    Before there is any data, the function is given labels of the prediction's shape, or, where it takes no such,
    integer class labels; later such as the data has (`labels_like`). The second are there where only losses over
    classes look at the labels: these take either kind.

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
            if not isinstance(refusal, ShapeError):
                raise refusal from None
            raise ShapeError(
                f"Trainer: the loss function takes neither labels of shape {dense.shape} nor integer class labels "
                f"{indices.shape}",
                reason=str(refusal).partition("\n")[0],
                fix="make labels of another shape an input of the graph, t = graph.input(shape, name), and minimise "
                "what the function gives: graph.minimize(function(y, t))",
            ) from refusal
        return indices, None
    readers = [node for node in nodes() if dense in (*node.sources, *node.labels)]
    found = [
        _indices_of(node.layer, node.sources[0]) if isinstance(node.layer, LossLayer) and dense in node.labels else None
        for node in readers
    ]
    if not found or found[0] is None or any(one is None or one.shape != found[0].shape for one in found):
        return dense, None
    return dense, _named(found[0], name)


def labels_like(array: Array, now: Tensor, prediction: Tensor, batch: int, varies: bool) -> Tensor:
    """The tensor a loss function is to be called with for such labels: the one it has, or one of their shape and type.

    Whole numbers of the tensor's shape may be floating ones to it. Where extents vary, labels have those of the
    prediction, or lack its axis of classes.
    """
    d, is_whole = now.descriptor, array.dtype.kind in "biu"
    given, wanted = ([extent for extent in shape[1:] if extent != 1] for shape in (array.shape, d.shape))
    fits = array.ndim == len(d.shape) if varies else given == wanted
    if fits and (is_whole or d.data_type.is_floating):
        return now
    if not varies:
        whole = {"b": DataType.BOOLEAN}.get(array.dtype.kind, DataType.INT64)
        data_type = whole if is_whole else prediction.descriptor.data_type
        return _named(Tensor(shape=(batch, *array.shape[1:]), data_type=data_type), now.label)
    usual = _without_classes(prediction, None) if is_whole else Tensor(prediction.descriptor)
    return now if usual is None or len(usual.shape) != array.ndim else _named(usual, now.label)


def relabel(nodes: Iterable[Node], old: Tensor, new: Tensor) -> None:
    """Let losses compare with other labels; all of them, or none where one refuses."""
    found = [node for node in nodes if old in node.labels]
    labels = [[new if label is old else label for label in node.labels] for node in found]
    for node, listed in zip(found, labels, strict=True):
        node.layer.results([tensor.descriptor for tensor in (*node.sources, *listed)])
    for node, listed in zip(found, labels, strict=True):
        node.labels = listed


def takes_labels(function: Callable[..., Tensor]) -> bool:
    """Is a loss function one of prediction and labels, and not of the prediction alone?"""
    expect_prediction_first("Trainer: loss", function)
    return takes_two(function)


def _indices_of(loss: LossLayer, prediction: Tensor) -> Tensor | None:
    """Integer class labels for a loss layer; None where it takes dense ones only."""
    d, shape = loss.descriptor, prediction.descriptor.shape
    weighs_classes = loss.weights is not None and loss.weights.descriptor.element_count == math.prod(shape)
    return None if d.loss_type not in INDEXED or weighs_classes else _without_classes(prediction, d.class_axis)


def _without_classes(prediction: Tensor, class_axis: int | None) -> Tensor | None:
    """A tensor for integer class labels of a prediction; None where it has no classes, or nobody knows where."""
    shape: Sequence[int] = prediction.descriptor.shape
    axis = class_axis if class_axis is not None else class_axis_of(tuple(shape), state_of(prediction).feature_axis)
    if len(shape) < 2 or axis is None or not -len(shape) < axis < len(shape) or shape[axis] == 1:
        return None
    axis %= len(shape)
    return Tensor(shape=(*shape[:axis], *shape[axis + 1 :]), data_type=DataType.INT64)


def _named(tensor: Tensor, name: str) -> Tensor:
    tensor.label = name
    return tensor
