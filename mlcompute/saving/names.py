"""Names for the layers and tensors of a graph, by the rule in layers/names.py, as files spell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlcompute.graph import Graph, Node
from mlcompute.layers.layer import Layer
from mlcompute.layers.names import (
    UniqueNames,
    file_name,
    has_default_label,
    layer_names,
    result_name,
    slot_name,
    slots_of,
)
from mlcompute.runtime.definition import Learning, definition_of
from mlcompute.tensor import Tensor


def layer_names_of(graph: Graph) -> dict[Layer, str]:
    """A name per layer, in the order of execution: its label, numbered from the second use of a label on.

    Labels that were never set give the kind of the layer: `fully_connected`, `fully_connected_1`.

    >>> import mlcompute as mlc
    >>> g, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    >>> y = g.node(mlc.ActivationLayer.relu(), source=g.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX), source=x))
    >>> list(layer_names_of(g).values())
    ['softmax', 'activation']
    """
    return {layer: file_name(name) for layer, name in layer_names(layers_of(graph)).items()}


def names_of(graph: Graph) -> dict[Tensor, str]:
    """A name per tensor: everything the graph reads, computes or keeps.

    x                   what is fed, under its declared name; `input`, `input_1` where none was declared
    conv.weights        a layer's own tensors: the layer's name and the slot; a shared tensor is called after its
                        first use
    conv.result         what a layer computes; `split.result_1` for its second result
    conv.result.gradient   what a caller's gradient is fed to

    No name contains a slash.

    >>> import mlcompute as mlc
    >>> g, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    >>> y = g.node(mlc.ActivationLayer.relu(), source=x)
    >>> list(names_of(g).values())
    ['input', 'activation.result']
    """
    names: dict[Tensor, str] = {}
    unique = UniqueNames("__metadata__")  # in a safetensors file this is no tensor

    def give(tensor: Tensor, name: str) -> None:
        if tensor not in names:
            names[tensor] = unique(name)

    for name, tensor in _declared(graph):
        give(tensor, file_name(name) or "input")
    names_of_layers = layer_names_of(graph)
    for node in nodes_of(graph):
        for tensor in (*node.sources, *node.labels):
            give(tensor, _label(tensor) or "input")
        _name_slots(node.layer, names_of_layers[node.layer], give)
        for index, tensor in enumerate(node.results):
            give(tensor, result_name(names_of_layers[node.layer], index))
    learning = _learning(graph)
    if learning is not None:
        if learning.loss_layer is not None:
            _name_slots(learning.loss_layer, names_of_layers[learning.loss_layer], give)
        for parameter in learning.training_parameters:
            give(parameter.tensor, _label(parameter.tensor) or "parameter")
        for tensor, gradient in learning.user_gradients.items():
            give(gradient, f"{names[tensor]}.gradient")
    return names


def nodes_of(graph: Graph) -> list[Node]:
    """All nodes that were added, in the order of execution; not that of the loss layer given to a training graph."""
    definition = definition_of(graph)
    if definition is None:
        return graph.nodes
    learning = definition.learning
    # What a function made of a prediction and its labels are layers like any others.
    made = learning.loss_nodes if learning is not None and learning.loss_function is not None else []
    return [*definition.nodes_before_loss(), *made]


def layers_of(graph: Graph) -> list[Layer]:
    """All layers in the order of execution; the loss given to a training graph comes last."""
    layers = [node.layer for node in nodes_of(graph)]
    learning = _learning(graph)
    if learning is not None and learning.loss_layer is not None:
        layers.append(learning.loss_layer)
    return list(dict.fromkeys(layers))


def _name_slots(layer: Layer, name: str, give: Callable[[Tensor, str], None]) -> None:
    for slot, tensor in slots_of(layer).items():
        give(tensor, file_name(slot_name(name, slot)))


def _declared(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    definition = definition_of(graph)
    if definition is not None:
        declared = definition.declared
        for group in (declared.inputs, declared.labels, declared.label_weights):
            yield from group.items()


def _learning(graph: Graph) -> Learning | None:
    definition = definition_of(graph)
    return None if definition is None else definition.learning


def _label(tensor: Tensor) -> str:
    return "" if has_default_label(tensor) else file_name(tensor.label)
