"""A graph as plain data, and a graph from plain data: everything but the numbers in its tensors.

{"kind": "TrainingGraph",
 "tensors": {"x": {"shape": [32, 784], "type": "FLOAT32"}, "fc.weights": {..., "has_data": true}, ...},
 "graphs": 1,                                     how many Graphs it is made of
 "layers": [{"name": "fc", "graph": 0,            which of them the layer belongs to; null: added directly
             "layer": {"$kind": "FullyConnectedLayer", "weights": {"$tensor": "fc.weights"}, ...},
             "sources": ["x"], "results": ["fc.result"]}, ...],
 "inputs": {"x": "x"}, "labels": {}, "label_weights": {}, "outputs": {},
 "predictions": {"digit": "head.result"},         what a Trainer predicts; absent where it has to name nothing
 "options": ["LINK_GRAPHS"], "constants": [],
 "loss": {...}, "optimizer": {...}, "stopped": [], "training_parameters": [], "user_gradients": {},
 "linked": [0, 2]}                                the first of two linked graphs; the other is not in the description
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mlcompute.enums import DataType, GraphCompilationOptions
from mlcompute.errors import Error, FileError, GraphError
from mlcompute.graph import Graph, Node
from mlcompute.inference import InferenceGraph
from mlcompute.layers.layer import Layer
from mlcompute.layers.names import has_default_label
from mlcompute.layers.split import SplitLayer
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.runtime.definition import Learning, definition_of
from mlcompute.runtime.session import Session, session_of
from mlcompute.runtime.tensor_state import state_of
from mlcompute.saving.construction import constructed, described
from mlcompute.saving.custom import Custom, UnknownClassError
from mlcompute.saving.names import layer_names_of, names_of, nodes_of
from mlcompute.saving.plain import JSON, shortened, to_text
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter
from mlcompute.training import TrainingGraph

#: DEFER_SINGLE_PASSES says only when programs are built, and earlier versions could not read a file with it.
_SAVED_OPTIONS = [
    one for one in GraphCompilationOptions if one and one is not GraphCompilationOptions.DEFER_SINGLE_PASSES
]
_GRAPHS: dict[str, type[Graph]] = {"Graph": Graph, "InferenceGraph": InferenceGraph, "TrainingGraph": TrainingGraph}


def graph_hash(description: JSON) -> str:
    """SHA-256 of a description: equal for graphs that are built alike, whatever their predictions are called."""
    built = {key: entry for key, entry in description.items() if key != "predictions"}
    return hashlib.sha256(to_text(built).encode()).hexdigest()


# Graph -> data ----------------------------------------------------------------------------------------------------


def describe(graph: Graph) -> dict[str, JSON]:
    """The graph as plain data; GraphError when it has parts that a file cannot hold."""
    kind = next((name for name in ("TrainingGraph", "InferenceGraph") if isinstance(graph, _GRAPHS[name])), "Graph")
    names = names_of(graph)
    parts = _parts(graph)
    description: dict[str, JSON] = {
        "kind": kind,
        "tensors": {},
        "graphs": len(parts),
        "layers": _describe_layers(graph, parts, names),
    }
    session = session_of(graph)
    if session is not None:
        description.update(_describe_declarations(session, names))
        if session.links:
            description["linked"] = [session.links.index(session), len(session.links)]
        if session.definition.learning is not None:
            description.update(_describe_learning(session.definition.learning, names))
    description["tensors"] = {name: _describe_tensor(tensor) for tensor, name in names.items()}
    return description


def _parts(graph: Graph) -> list[Graph]:
    """The graphs a graph is made of, at any depth, each once. Each becomes a plain Graph with the nodes of its own."""
    found: dict[Graph, None] = {}

    def visit(whole: Graph) -> None:
        definition = definition_of(whole)
        for part in definition.graphs if definition is not None else ():
            if part not in found:
                visit(part)
                found[part] = None

    visit(graph)
    return list(found)


def _describe_layers(graph: Graph, parts: Sequence[Graph], names: Mapping[Tensor, str]) -> list[JSON]:
    owner: dict[Node, int | None] = {}
    for number, part in enumerate(parts):
        definition = definition_of(part)
        owner.update(dict.fromkeys(part.nodes if definition is None else definition.own, number))
        if definition is not None and definition.learning is not None:
            owner.update(dict.fromkeys(definition.learning.loss_nodes, number))
    layer_names = layer_names_of(graph)
    return [_describe_node(node, layer_names[node.layer], owner.get(node), names) for node in nodes_of(graph)]


def _describe_node(node: Node, name: str, owner: int | None, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    layer = node.layer
    entry: dict[str, JSON] = {
        "name": name,
        "graph": owner,
        **_describe_layer(layer, names),
        "sources": [names[tensor] for tensor in node.sources],
        "results": [names[tensor] for tensor in node.results],
    }
    if node.labels:
        entry["labels"] = [names[tensor] for tensor in node.labels]
    if not node.updates:
        entry["disable_update"] = True
    return entry


def _describe_layer(layer: Layer, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    entry: dict[str, JSON] = {"layer": described(layer, layer.who, names)}
    if layer.label != layer.default_label:
        entry["label"] = layer.label
    if layer.is_debugging_enabled:
        entry["is_debugging_enabled"] = True
    fixed = [slot for slot, parameter in layer.parameters.items() if not parameter.is_updatable]
    if fixed:
        entry["not_updatable"] = fixed
    return entry


def _describe_tensor(tensor: Tensor) -> dict[str, JSON]:
    d = tensor.descriptor
    entry: dict[str, JSON] = {"shape": list(d.shape), "type": d.data_type.name}
    if d.sequence_lengths is not None:
        entry["sequence_lengths"] = list(d.sequence_lengths)
        entry["sorted_sequences"] = d.sorted_sequences
    if tensor.varies:
        entry["varies"] = list(tensor.varies)
    if not has_default_label(tensor):
        entry["label"] = tensor.label
    if tensor.keeps_data:
        entry["has_data"] = True
    return entry


def _describe_declarations(session: Session, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    declared = session.definition.declared
    outputs: dict[str, JSON] = {}
    for name, tensor in declared.outputs.items():
        source = session.definition.source_of(tensor)
        known = names.get(tensor if source is None else source)
        if known is None:
            raise GraphError(f"mlcompute.save: output '{name}' is no tensor of the graph")
        outputs[name] = known if source is None else {"gradient_of": known}
    predictions = {name: names[tensor] for name, tensor in declared.predictions.items() if tensor in names}
    return {
        **({"predictions": predictions} if predictions else {}),
        "inputs": {name: names[tensor] for name, tensor in declared.inputs.items()},
        "labels": {name: names[tensor] for name, tensor in declared.labels.items()},
        "label_weights": {name: names[tensor] for name, tensor in declared.label_weights.items()},
        "outputs": outputs,
        "options": [option.name for option in _SAVED_OPTIONS if option in session.options],
        "constants": [names[tensor] for tensor in session.constants if tensor in names],
    }


def _describe_learning(learning: Learning, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    loss, optimizer = learning.loss_layer, learning.optimizer
    return {
        "loss": None if loss is None else _describe_layer(loss, names),
        "optimizer": None if optimizer is None else described(optimizer, type(optimizer).__name__, names),
        "stopped": sorted(names[tensor] for tensor in learning.stopped if tensor in names),
        "training_parameters": [
            {"tensor": names[parameter.tensor], "is_updatable": parameter.is_updatable}
            for parameter in learning.training_parameters
        ],
        "user_gradients": {names[tensor]: names[gradient] for tensor, gradient in learning.user_gradients.items()},
    }


# Data -> graph ----------------------------------------------------------------------------------------------------


class Rebuilt:
    """A graph built from a description, in which no tensor has data yet.

    graph      the graph
    tensors    its tensors by name
    constants  tensors whose data was folded in when it was compiled
    options    what it was compiled with
    """

    def __init__(self, description: JSON, custom: Custom = ()) -> None:
        self._custom = custom
        self._entries = _mapping(description, "the description")
        kind = _GRAPHS.get(_text(self._entries, "kind"))
        if kind is None:
            raise ValueError(f"there is no graph {self._entries['kind']!r}")
        self.tensors: dict[str, Tensor] = {}
        #: Names of the tensors that have data.
        self.valued: list[str] = []
        self.constants: list[Tensor] = []
        self.options = GraphCompilationOptions.NONE
        produced = {name for entry in _list(self._entries, "layers") for name in _names(entry, "results")}
        self._shapes = {
            name: self._descriptor(name, entry)
            for name, entry in _mapping(self._entries.get("tensors"), "tensors").items()
        }
        for name, descriptor in self._shapes.items():
            if name not in produced:
                self.tensors[name] = Tensor(descriptor)
                if "label" in self._entries["tensors"][name]:  # operators name their parameters by it
                    self.tensors[name].label = _text(self._entries["tensors"][name], "label")
        self._parts = [Graph() for _ in range(self._part_count())]
        self.graph = self._make_graph(kind)
        for entry in _list(self._entries, "layers"):
            self._add_layer(_mapping(entry, "a layer"))
        #: Input tensors the optimizer updates; the graph accepts them only when they have data.
        self.training_parameters: list[TensorParameter] = []
        if isinstance(self.graph, TrainingGraph):
            self._learn(self.graph)
        if isinstance(self.graph, (TrainingGraph, InferenceGraph)):
            self._declare(self.graph)
        for name, tensor in self.tensors.items():
            entry = self._entries["tensors"].get(name, {})
            if "label" in entry:
                tensor.label = _text(entry, "label")
            if "varies" in entry:
                state_of(tensor).varies = _axes(name, entry["varies"], len(tensor.descriptor.shape))
            if entry.get("has_data"):
                self.valued.append(name)

    def _part_count(self) -> int:
        count = self._entries.get("graphs")
        # Every part but empty ones has a layer; a handful of empty ones is no reason to refuse.
        if type(count) is not int or not 0 <= count <= len(_list(self._entries, "layers")) + 100:
            raise ValueError(f"graphs is {count!r}")
        return count

    def _descriptor(self, name: str, entry: JSON) -> TensorDescriptor:
        entry = _mapping(entry, f"tensor '{name}'")
        data_type = DataType.__members__.get(_text(entry, "type"))
        if data_type is None:
            raise ValueError(f"tensor '{name}' has the type {entry['type']!r}")
        return TensorDescriptor(
            _list(entry, "shape"),
            data_type=data_type,
            sequence_lengths=entry.get("sequence_lengths"),
            sorted_sequences=entry.get("sorted_sequences") is True,
        )

    def _make_graph(self, kind: type[Graph]) -> Graph:
        if kind is Graph:
            return Graph()
        if kind is InferenceGraph:
            return InferenceGraph(self._parts)
        loss, optimizer = self._entries.get("loss"), self._entries.get("optimizer")
        return TrainingGraph(
            self._parts,
            None if loss is None else self._layer(_mapping(loss, "loss")),
            None if optimizer is None else constructed(optimizer, {}, Optimizer, self._custom),
        )

    def _layer(self, entry: dict[str, JSON]) -> Layer:
        layer: Layer = constructed(entry.get("layer"), self.tensors, Layer, self._custom)
        if "label" in entry:
            layer.label = _text(entry, "label")
        layer.is_debugging_enabled = entry.get("is_debugging_enabled") is True
        for slot in entry.get("not_updatable", ()):
            if slot not in layer.parameters:
                raise ValueError(f"{layer.who} has no parameter {slot!r}")
            layer.parameters[slot].is_updatable = False
        return layer

    def _add_layer(self, entry: dict[str, JSON]) -> None:
        layer, owner, results = self._layer(entry), entry.get("graph"), _names(entry, "results")
        if owner is not None and (type(owner) is not int or not 0 <= owner < len(self._parts)):
            raise ValueError(f"{layer.who} belongs to graph {owner!r}, there are {len(self._parts)}")
        sources = [self._tensor(name) for name in _names(entry, "sources")]
        labels = [self._tensor(name) for name in _names(entry, "labels")] if "labels" in entry else []
        if isinstance(layer, SplitLayer) and len(sources) == 1 and layer.dimension < len(sources[0].descriptor.shape):
            # Pieces are counted before they are made: there may be as many as a shape has elements.
            pieces = min(layer.split_count, sources[0].descriptor.shape[layer.dimension])
            if pieces > 2 * len(results):
                raise ValueError(f"{layer.who} has {pieces} pieces, {len(results)} are listed")
        graph = self.graph if owner is None else self._parts[owner]
        updates = entry.get("disable_update") is not True
        graph.node(layer, sources=sources, loss_labels=labels, disable_update=not updates)
        made = graph.result_tensors(layer)
        if len(made) != len(results):
            raise ValueError(f"{layer.who} has {len(made)} results, {len(results)} are listed")
        for name, tensor in zip(results, made, strict=True):
            if name in self.tensors:
                raise ValueError(f"{layer.who}: there is a tensor '{name}' already, it cannot be a result too")
            if self._shapes.get(name) != tensor.descriptor:
                raise ValueError(f"{layer.who}: result '{name}' is {tensor.descriptor}, not {self._shapes.get(name)}")
            self.tensors[name] = tensor

    def _tensor(self, name: JSON) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise ValueError(f"tensor {str(name)[:100]!r} is used before it is there")
        return self.tensors[name]

    def _declare(self, graph: TrainingGraph | InferenceGraph) -> None:
        inputs, labels, weights = (
            {name: self._tensor(tensor) for name, tensor in _mapping(self._entries.get(group), group).items()}
            for group in ("inputs", "labels", "label_weights")
        )
        graph.add_inputs(inputs, labels, weights)
        outputs: dict[str, Tensor] = {}
        learning = definition_of(graph).learning
        for name, tensor in _mapping(self._entries.get("outputs"), "outputs").items():
            if isinstance(tensor, dict) and learning is not None:
                outputs[name] = learning.gradient_tensor(self._tensor(tensor.get("gradient_of")))
            else:
                outputs[name] = self._tensor(tensor)
        graph.add_outputs(outputs)
        predictions = _mapping(self._entries.get("predictions", {}), "predictions")
        definition_of(graph).declared.predictions = {name: self._tensor(one) for name, one in predictions.items()}
        for option in _list(self._entries, "options"):
            if option not in GraphCompilationOptions.__members__:
                raise ValueError(f"there is no compilation option {str(option)[:100]!r}")
            self.options |= GraphCompilationOptions[option]
        session_of(graph).options = self.options
        self.constants = [self._tensor(name) for name in _names(self._entries, "constants")]

    def _learn(self, graph: TrainingGraph) -> None:
        graph.stop_gradient([self._tensor(name) for name in _names(self._entries, "stopped")])
        for result, name in _mapping(self._entries.get("user_gradients"), "user_gradients").items():
            self._tensor(name)
            self.tensors[name] = graph.allocate_user_gradient(self._tensor(result))
        for entry in _list(self._entries, "training_parameters"):
            name = _text(_mapping(entry, "a training parameter"), "tensor")
            parameter = TensorParameter(self._tensor(name))
            if not self._entries["tensors"][name].get("has_data"):
                raise ValueError(f"the training parameter '{name}' has no data")
            parameter.is_updatable = entry.get("is_updatable") is not False
            self.training_parameters.append(parameter)


def rebuild(description: JSON, who: str, custom: Custom = ()) -> Rebuilt:
    """The graph a description stands for, without data; FileError when it stands for none."""
    try:
        return Rebuilt(description, custom)
    except UnknownClassError as error:
        raise FileError(f"{who}: the graph in it cannot be built: {error.args[0]}", fix=error.args[1]) from error
    except (Error, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise FileError(
            f"{who}: the graph in it cannot be built: {shortened(error)}",
            fix="the file was changed by hand, or written by a version that knows other layers",
        ) from error


def _axes(name: str, given: JSON, rank: int) -> tuple[int, ...]:
    """The axes of an input that vary."""
    axes = given if isinstance(given, list) else [None]
    if not all(type(axis) is int and 0 < axis < rank for axis in axes):
        raise ValueError(f"tensor '{name}' varies along {str(given)[:100]}")
    return tuple(axes)


def _mapping(value: JSON, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}, not a dictionary")
    return value


def _list(entry: dict[str, JSON], key: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is a {type(value).__name__}, not a list")
    return value


def _names(entry: JSON, key: str) -> list[str]:
    names = _list(_mapping(entry, "an entry"), key)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be names")
    return names


def _text(entry: dict[str, JSON], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {str(value)[:100]!r}, not text")
    return value
