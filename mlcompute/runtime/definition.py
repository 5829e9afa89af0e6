"""What a training or inference graph is, before it is compiled: layers, names of its data, and what it learns."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import TYPE_CHECKING, overload

from mlcompute.building.contents import contents_of
from mlcompute.building.node_index import NodeIndex
from mlcompute.foreign_names import instead_of_graph
from mlcompute.graph import Graph, Node
from mlcompute.layers.arguments import listed
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.runtime.declarations import Declarations
from mlcompute.runtime.loss_function import apply_loss, needs_no_labels
from mlcompute.tensor import Tensor, TensorParameter

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.inference import InferenceGraph
    from mlcompute.training import TrainingGraph


class Learning:
    """What a training graph adds: a loss, an optimizer, what is updated, where gradients come from and where they end.

    loss_nodes           the loss given to the constructor with its source and labels, a layer or what a function made
                         of them; empty while those are not declared
    compared             what the function compares with the labels
    stopped              tensors no gradient passes
    training_parameters  inputs that the optimizer updates besides the layers' own parameters
    user_gradients       result -> the tensor the caller's gradient is fed to
    gradient_tensors     tensor -> the tensor that holds its gradient; `gradient_of` leads back
    """

    def __init__(self, loss: LossLayer | Callable[..., Tensor] | None, optimizer: Optimizer | None) -> None:
        self.loss_layer = loss if isinstance(loss, LossLayer) else None
        self.loss_function = None if isinstance(loss, LossLayer) else loss
        self.optimizer = optimizer
        self.loss_nodes: list[Node] = []
        self.compared: Tensor | None = None
        self.placed_on: list[Tensor] = []
        #: The graph of the layers that a loss function added.
        self.loss_graph = Graph()
        self.stopped: set[Tensor] = set()
        self.training_parameters: list[TensorParameter] = []
        self.user_gradients: dict[Tensor, Tensor] = {}
        self.gradient_tensors: dict[Tensor, Tensor] = {}
        self.gradient_of: dict[Tensor, Tensor] = {}
        #: Warnings that were given.
        self.warned: set[str] = set()

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(copied)[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
        return copied

    def gradient_tensor(self, tensor: Tensor) -> Tensor:
        """The tensor that holds a tensor's gradient."""
        if tensor not in self.gradient_tensors:
            gradient = Tensor(tensor.descriptor)
            gradient.label = f"gradient of {tensor.label}"
            self.gradient_tensors[tensor] = gradient
            self.gradient_of[gradient] = tensor
        return self.gradient_tensors[tensor]


class Definition:
    """Layers and names of one training or inference graph.

    who       what messages call the graph
    own       nodes that were added to it directly; it grows as they are
    graphs    the graphs it is made of
    learning  None for a graph that runs forward only
    """

    def __init__(self, who: str, own: list[Node], graphs: Sequence[Graph], learning: Learning | None = None) -> None:
        graphs = listed(who, "graph_objects", graphs, Graph)
        for graph in graphs:
            if not isinstance(graph, Graph):
                raise TypeError(f"{who}: graph_objects must be Graphs, not {instead_of_graph(graph)}")
        self.who = who
        self.own = own
        self.graphs = graphs
        self.learning = learning
        self.declared = Declarations(who)
        #: The sum of several losses, once there are several.
        self._total: Tensor | None = None
        #: (id of this object and number of nodes, all nodes but the loss in order): sorted anew when the first differs.
        self._sorted: tuple[object, list[Node]] = (None, [])

    def copied(self, own: list[Node]) -> Definition:
        """The same layers and names for another graph."""
        copied = Definition(self.who, own, self.graphs, copy.copy(self.learning))
        copied.declared = copy.copy(self.declared)
        return copied

    # Nodes ----------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """All nodes in an order of execution, the loss last."""
        nodes = self.nodes_before_loss()
        return nodes if self.learning is None else [*nodes, *self.learning.loss_nodes]

    def nodes_before_loss(self) -> list[Node]:
        """All nodes but that of the loss given to the constructor."""
        state = (id(self), self.node_count)
        if self._sorted[0] != state:
            nodes = {node: None for graph in self.graphs for node in graph.nodes}
            nodes.update(dict.fromkeys(self.own))
            # Sources always exist before their consumers, so creation order is an order of execution.
            self._sorted = (state, sorted(nodes, key=attrgetter("order")))
        return list(self._sorted[1])

    def node_of(self, layer: Layer) -> Node | None:
        """The node of a layer; None for a layer the graph does not contain."""
        for node in self.learning.loss_nodes if self.learning is not None else ():
            if node.layer is layer:
                return node
        inner = (graph.node_of(layer) for graph in self.graphs)
        found = next((node for node in inner if node is not None), None)
        return found or next((node for node in self.own if node.layer is layer), None)

    @property
    def node_count(self) -> int:
        """Number of nodes without the loss: they are never removed, so more of them is all that can change."""
        return len(self.own) + sum(graph.node_count for graph in self.graphs)

    def place_loss(self) -> None:
        """Put the loss given to the constructor behind the last layer, as soon as its labels are declared."""
        self.index()

    def index(self) -> NodeIndex:
        """What all nodes read and compute, the loss behind the last layer as soon as its labels are declared."""
        found = NodeIndex(self.nodes_before_loss())
        if self.learning is not None:
            self.learning.loss_nodes = self._loss_nodes(self.learning, found.nodes, found.labels)
            found.add(self.learning.loss_nodes)
        return found

    def _loss_nodes(self, learning: Learning, nodes: list[Node], taken: AbstractSet[Tensor]) -> list[Node]:
        loss, function, known = learning.loss_layer, learning.loss_function, learning.loss_nodes
        labels = [label for label in self.declared.labels.values() if label not in taken]
        if not nodes or (loss is None and function is None):
            return []
        if not labels and (function is None or not needs_no_labels(function)):
            return []
        source = nodes[-1].results[0]
        if known and learning.placed_on == [source, *labels]:
            return known
        for graph in self.graphs:
            if (told := contents_of(graph).before_loss) is not None:
                told(source)
        if loss is not None:
            found = [Node.of(loss, [source], labels)]
        else:
            assert function is not None
            learning.loss_graph = apply_loss(self.who, function, source, labels, nodes, self.graphs)
            learning.compared, found = source, learning.loss_graph.nodes
        learning.placed_on = [source, *labels]
        return found

    @property
    def waits_for_labels(self) -> bool:
        """Is there a loss that cannot be placed before its labels are declared?"""
        learning = self.learning
        if learning is None or learning.loss_nodes:
            return False
        return learning.loss_layer is not None or learning.loss_function is not None

    @property
    def compared(self) -> Tensor | None:
        """What a loss given as a function compares with the labels, here or in a graph this one is made of."""
        if self.learning is not None and self.learning.loss_nodes:
            return self.learning.compared
        inner = (definition_of(graph) for graph in self.graphs)
        return next((one.compared for one in inner if one is not None and one.compared is not None), None)

    # Tensors --------------------------------------------------------------------------------------------------------

    def label_tensors(self) -> dict[Tensor, None]:
        """What losses compare with, as declared here and in the graphs this one is made of; inputs are none."""
        inner = (definition_of(graph) for graph in self.graphs)
        found = {tensor: None for one in inner if one is not None for tensor in one.label_tensors()}
        found.update(dict.fromkeys(self.declared.labels.values()))
        return {tensor: None for tensor in found if tensor not in self.declared.inputs.values()}

    @property
    def stopped(self) -> set[Tensor]:
        """Tensors no gradient passes, as the graph itself says."""
        return self.learning.stopped if self.learning is not None else set()

    def updated_tensors(self, nodes: Sequence[Node] | None = None) -> list[Tensor]:
        """What an optimizer shall update: parameters of layers and training parameters.

        nodes   those whose layers have tensors, where they are known
        """
        if self.learning is None:
            return []
        tensors: dict[Tensor, None] = {}
        for node in self.nodes() if nodes is None else nodes:
            if node.updates and (nodes is not None or has_tensors(type(node.layer))):
                for slot in node.layer.parameters.values():
                    if slot.is_updatable:
                        tensors[slot.tensor] = None
        parameters = self.learning.training_parameters
        tensors.update(dict.fromkeys(p.tensor for p in parameters if p.is_updatable))
        return list(tensors)

    def kept_inputs(self) -> set[Tensor]:
        """Inputs that live on between runs because an optimizer updates them."""
        return {p.tensor for p in self.learning.training_parameters} if self.learning is not None else set()

    def used_tensors(self) -> set[Tensor]:
        """Tensors of earlier linked graphs to whose gradients this one may contribute."""
        read = (tensor for node in self.nodes() for tensor in (*node.sources, *node.labels))
        return {*self.updated_tensors(), *read}

    def used_by_caller(self) -> set[Tensor]:
        """Results that the caller's own code goes on computing with."""
        inner = (definition_of(graph) for graph in self.graphs)
        found = {tensor for definition in inner if definition is not None for tensor in definition.used_by_caller()}
        return found | set(self.learning.user_gradients) if self.learning is not None else found

    def source_of(self, gradient: Tensor) -> Tensor | None:
        """The tensor whose gradient a gradient tensor holds; None for other tensors."""
        return self.learning.gradient_of.get(gradient) if self.learning is not None else None

    def total(self) -> Tensor:
        """The sum of several losses."""
        if self._total is None:
            self._total = Tensor(shape=(1,))
            self._total.label = "total loss"
        return self._total


@functools.cache  # large graphs ask it of every layer
def has_tensors(kind: type[Layer]) -> bool:
    """Are there layers of a class that have parameters or statistics?"""
    return kind.parameters is not Layer.parameters or kind.statistics is not Layer.statistics


@overload
def definition_of(graph: TrainingGraph | InferenceGraph) -> Definition: ...
@overload
def definition_of(graph: Graph) -> Definition | None: ...
def definition_of(graph: Graph) -> Definition | None:
    """What a training or inference graph is made of; None for a plain graph."""
    found: Definition | None = getattr(graph, "_definition", None)
    return found
