"""A loss given as a function of tensors: its operations become layers, and its result is minimised."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from mlcompute.building.contents import contents_of, undone_on_error
from mlcompute.errors import GraphError
from mlcompute.graph import Graph, Node
from mlcompute.layers.loss import LossLayer
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor


def needs_no_labels(function: Callable[..., Tensor]) -> bool:
    """Can the function be called with the prediction alone?"""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):  # it needs more, or cannot tell
        return False
    return True


def apply_loss(
    who: str,
    function: Callable[..., Tensor],
    prediction: Tensor,
    labels: Sequence[Tensor],
    nodes: Sequence[Node],
    parts: Sequence[Graph] = (),
) -> Graph:
    """The layers of function(prediction, *labels), in a graph of their own that ends with what is minimised.

    nodes  those of the graph it belongs to: their names are taken
    parts  the graphs that one is made of: a function that adds to them is refused, it may be called again
    """
    graph = Graph()
    names = contents_of(graph).names
    names.reserve(node.layer.label for node in nodes)
    with ExitStack() as stack:
        for part in parts:  # what cannot be placed leaves nothing behind
            stack.enter_context(undone_on_error(part))
        stack.enter_context(graph)
        counts = [part.node_count for part in parts]
        loss = function(prediction, *labels)
        if counts != [part.node_count for part in parts]:
            raise GraphError(
                f"{who}: the loss function adds layers to the graph that it is the loss of",
                fix="write it without that graph: mlc.cross_entropy(y, t) for graph.cross_entropy(y, t), y - t for "
                "graph.subtract(y, t); or build the loss in the graph, with graph.minimize(loss), and give none",
            )
        minimize_result(f"{who}: the loss function", graph, loss, "" if names.has("loss") else "loss")
    return graph


def minimize_result(who: str, graph: Graph, loss: Tensor, name: str, weight: float | None = None) -> None:
    """Minimise what a loss function returned. A loss layer's result is minimised already, under its layer's name."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"{who} must return a Tensor, not {type(loss).__name__}")
    node = state_of(loss).node
    is_loss = node is not None and isinstance(node.layer, LossLayer) and loss.descriptor.element_count == 1
    if node is None or not is_loss or weight is not None:
        graph.minimize(loss, name=name, weight=1.0 if weight is None else weight)
    elif name:
        node.layer.label = loss.label = name
