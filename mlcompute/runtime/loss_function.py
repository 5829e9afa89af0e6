"""A loss given as a plain function of tensors: what it computes becomes layers, and its result is minimised."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from mlcompute.graph import Graph, Node
from mlcompute.tensor import Tensor


def needs_no_labels(function: Callable[..., Tensor]) -> bool:
    """Can the function be called with the prediction alone?"""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):  # it needs more, or cannot tell
        return False
    return True


def apply_loss(
    who: str, function: Callable[..., Tensor], prediction: Tensor, labels: Sequence[Tensor], nodes: Sequence[Node]
) -> Graph:
    """The layers of function(prediction, *labels), in a graph of their own that ends with what is minimised.

    nodes  those of the graph it belongs to: their names are taken
    """
    graph = Graph()
    graph.layer_names.reserve(node.layer.label for node in nodes)
    with graph:
        loss = function(prediction, *labels)
        if not isinstance(loss, Tensor):
            raise TypeError(f"{who}: the loss function must return a Tensor, not {type(loss).__name__}")
        graph.minimize(loss, name="" if graph.layer_names.has("loss") else "loss")
    return graph
