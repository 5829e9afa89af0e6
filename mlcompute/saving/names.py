"""Names for layers and tensors: readable, unique within a graph, and the same for the same graph every time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from mlcompute.graph import Graph, Node
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.runtime.definition import Learning, definition_of
from mlcompute.tensor import Tensor


class _Unique:
    """Gives every name once: the second `conv` becomes `conv_1`, the third `conv_2`."""

    def __init__(self, *taken: str) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        name = wanted
        while name in self._taken:
            number = self._next[wanted] = self._next.get(wanted, 0) + 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name


def layer_names_of(graph: Graph) -> dict[Layer, str]:
    """A name per layer, in the order of execution: its label, numbered from the second use of a label on.

    Labels that were never set give the kind of the layer: `fully_connected`, `fully_connected_1`.

    >>> import mlcompute as mlc
    >>> g, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    >>> y = g.node(mlc.ActivationLayer.relu(), source=g.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX), source=x))
    >>> list(layer_names_of(g).values())
    ['softmax', 'activation']
    """
    unique = _Unique()
    return {layer: unique(_base(layer)) for layer in layers_of(graph)}


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
    unique = _Unique("__metadata__")  # in a safetensors file this is no tensor

    def give(tensor: Tensor, name: str) -> None:
        if tensor not in names:
            names[tensor] = unique(name)

    for name, tensor in _declared(graph):
        give(tensor, _clean(name) or "input")
    layer_names = layer_names_of(graph)
    for node in nodes_of(graph):
        for tensor in (*node.sources, *node.labels):
            give(tensor, _label(tensor) or "input")
        _name_slots(node.layer, layer_names[node.layer], give)
        for index, tensor in enumerate(node.results):
            give(tensor, f"{layer_names[node.layer]}.result" + (f"_{index}" if index else ""))
    learning = _learning(graph)
    if learning is not None:
        if learning.loss_layer is not None:
            _name_slots(learning.loss_layer, layer_names[learning.loss_layer], give)
        for parameter in learning.training_parameters:
            give(parameter.tensor, _label(parameter.tensor) or "parameter")
        for tensor, gradient in learning.user_gradients.items():
            give(gradient, f"{names[tensor]}.gradient")
    return names


def nodes_of(graph: Graph) -> list[Node]:
    """All nodes that were added, in the order of execution; not the one a training graph makes for its own loss."""
    definition = definition_of(graph)
    return graph.nodes if definition is None else definition.nodes_before_loss()


def layers_of(graph: Graph) -> list[Layer]:
    """All layers in the order of execution; the loss given to a training graph comes last."""
    layers = [node.layer for node in nodes_of(graph)]
    learning = _learning(graph)
    if learning is not None and learning.loss_layer is not None:
        layers.append(learning.loss_layer)
    return list(dict.fromkeys(layers))


def slots_of(layer: Layer) -> dict[str, Tensor]:
    """A layer's own tensors by the name of their slot: parameters, statistics, and the label weights of a loss."""
    slots = {name: slot.tensor for name, slot in layer.parameters.items()} | layer.statistics
    if isinstance(layer, LossLayer) and layer.weights is not None:
        slots["weights"] = layer.weights
    return slots


def has_default_label(tensor: Tensor) -> bool:
    """Was the label never set? It then holds a number that differs from process to process."""
    return tensor.label == f"data{tensor.tensor_id}"


def _name_slots(layer: Layer, name: str, give: Callable[[Tensor, str], None]) -> None:
    for slot, tensor in slots_of(layer).items():
        give(tensor, _clean(f"{name}.{slot}"))


def _declared(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    definition = definition_of(graph)
    if definition is not None:
        declared = definition.declared
        for group in (declared.inputs, declared.labels, declared.label_weights):
            yield from group.items()


def _learning(graph: Graph) -> Learning | None:
    definition = definition_of(graph)
    return None if definition is None else definition.learning


def _base(layer: Layer) -> str:
    label = _clean(layer.label)
    if layer.label == layer.default_label or not label:
        # FullyConnected -> fully_connected, LSTM -> lstm.
        label = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", layer.default_label or type(layer).__name__).lower()
    return label


def _label(tensor: Tensor) -> str:
    return "" if has_default_label(tensor) else _clean(tensor.label)


def _clean(name: str) -> str:
    """A name without the slashes that set kinds of values apart in a file, and without what cannot be UTF-8."""
    return name.replace("/", ".").encode("utf-8", "replace").decode("utf-8")
