"""What a training graph learns: its loss, its parameters, where gradients come from and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from mlcompute.compiled import CompiledGraph
from mlcompute.compiler import Description
from mlcompute.enums import ActivationType, GraphCompilationOptions, LossType, ReductionType, SoftmaxOperation
from mlcompute.errors import DataError, GraphError, warn
from mlcompute.graph import Graph, Node
from mlcompute.layers.activation import ActivationLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.objective import nodes_behind, reached_from
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.seeing.layers import names_of
from mlcompute.tensor import Tensor, TensorParameter


class LearningGraph(CompiledGraph):
    """The part of a TrainingGraph that says what is to be learned; TrainingGraph adds the learning."""

    _trains = True
    _main_style = "fused"

    def __init__(
        self, graph_objects: Sequence[Graph] = (), loss_layer: Layer | None = None, optimizer: Optimizer | None = None
    ) -> None:
        super().__init__(graph_objects)
        if loss_layer is not None and not isinstance(loss_layer, LossLayer):
            raise TypeError(f"{self._who}: loss_layer must be a LossLayer, not {type(loss_layer).__name__}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"{self._who}: optimizer must be an Optimizer, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._loss_layer = loss_layer
        #: The loss layer with its source and labels; None while the labels are not declared.
        self._loss_node: Node | None = None
        self._stopped_tensors: set[Tensor] = set()
        #: Warnings that were given.
        self._said: set[str] = set()
        self._training_parameters: list[TensorParameter] = []
        #: Result -> the tensor the caller's gradient is fed to.
        self._user_gradients: dict[Tensor, Tensor] = {}
        #: Tensor -> the tensor that holds its gradient, and back.
        self._gradient_tensors: dict[Tensor, Tensor] = {}
        self._gradient_of: dict[Tensor, Tensor] = {}

    # Declaring ------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer in use: change its learning_rate between runs to decay it."""
        return self._optimizer

    def stop_gradient(self, tensors: Sequence[Tensor]) -> bool:
        """Gradients do not pass these tensors into the layers that produced them."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"TrainingGraph.stop_gradient: needs Tensors, not {type(tensor).__name__}")
        self._stopped_tensors.update(tensors)
        self.outdated()
        return True

    def set_training_tensor_parameters(self, parameters: Sequence[TensorParameter]) -> bool:
        """Input tensors the optimizer shall update besides the layers' own parameters. Replaces the previous list.

        They keep their values between runs; data fed or attached under their name replaces the values.
        """
        for parameter in parameters:
            if not isinstance(parameter, TensorParameter):
                given = type(parameter).__name__
                raise TypeError(f"TrainingGraph.set_training_tensor_parameters: needs TensorParameters, not {given}")
            if not parameter.tensor.keeps_data:
                raise DataError(
                    f"TrainingGraph.set_training_tensor_parameters: {parameter.tensor!r} has no data",
                    fix="create it with data, fill_with_data or random_initializer_type",
                )
        self._training_parameters = list(parameters)
        self.outdated()
        return True

    def allocate_user_gradient(self, tensor: Tensor) -> Tensor:
        """A tensor to feed dL/d(tensor) to, for results consumed by the caller's own code.

        Attach the gradient with bind_and_write_data before execute_gradient; it adds to what layers contribute.
        """
        if not any(tensor in node.results for node in self._all_nodes()):
            raise GraphError(
                f"TrainingGraph.allocate_user_gradient: {tensor!r} is no result of this graph",
                fix="pass a tensor that one of the graph's layers produces",
            )
        if tensor not in self._user_gradients:
            self._user_gradients[tensor] = Tensor(tensor.descriptor)
            self.outdated()
        return self._user_gradients[tensor]

    def _stopped(self) -> set[Tensor]:
        return self._stopped_tensors

    def _source_of(self, gradient: Tensor) -> Tensor | None:
        return self._gradient_of.get(gradient)

    def _gradient_tensor(self, tensor: Tensor) -> Tensor:
        if tensor not in self._gradient_tensors:
            gradient = Tensor(tensor.descriptor)
            gradient.label = f"gradient of {tensor.label}"
            gradient._reside(self)
            self._gradient_tensors[tensor] = gradient
            self._gradient_of[gradient] = tensor
        return self._gradient_tensors[tensor]

    # Nodes ----------------------------------------------------------------------------------------------------

    def _all_nodes(self) -> list[Node]:
        nodes = super()._all_nodes()
        return [*nodes, self._loss_node] if self._loss_node is not None else nodes

    def _find(self, layer: Layer) -> Node | None:
        return self._loss_node if layer is self._loss_layer else super()._find(layer)

    @property
    def layers(self) -> list[Layer]:
        """The layers, each once, in the order they were added; the loss given to the constructor is not among them."""
        return [node.layer for node in super()._all_nodes()]

    def _make_loss_node(self) -> Node | None:
        """The node of the loss layer given to the constructor; None while its labels are not declared."""
        loss = self._loss_layer
        nodes = super()._all_nodes()
        taken = {label for node in nodes for label in node.labels}
        labels = [label for label in self._declared.labels.values() if label not in taken]
        if loss is None or not nodes or not labels:
            return None
        source = nodes[-1].results[0]
        known = self._loss_node
        if known is not None and known.sources == [source] and known.labels == labels:
            return known
        for graph in self._graphs:
            graph._before_loss(source)
        return Node(loss, [source], labels, self._results(loss, [source], labels))

    def _updated_tensors(self) -> list[Tensor]:
        tensors: dict[Tensor, None] = {}
        for node in self._all_nodes():
            if node.updates:
                slots = node.layer.parameters.values()
                tensors.update(dict.fromkeys(slot.tensor for slot in slots if slot.is_updatable))
        tensors.update(dict.fromkeys(p.tensor for p in self._training_parameters if p.is_updatable))
        return list(tensors)

    def _kept_inputs(self) -> set[Tensor]:
        return {parameter.tensor for parameter in self._training_parameters}

    # Describing to the compiler ---------------------------------------------------------------------------------

    def _waits_for_labels(self) -> bool:
        return self._loss_layer is not None and self._loss_node is None

    def _compile(self, *, builds: bool = False) -> None:
        before = self._loss_node
        try:
            super()._compile(builds=builds)
        except BaseException:  # Ctrl-C too
            self._loss_node = before
            raise

    def _describe(self) -> Description:
        self._loss_node = self._make_loss_node()
        description = super()._describe()
        description.optimizer = self._optimizer
        description.stopped = self._stopped_tensors
        updated = self._updated_tensors()
        description.parameters = [tensor for tensor in updated if tensor not in self._stopped_tensors]
        description.user_gradients = {gradient: tensor for tensor, gradient in self._user_gradients.items()}
        everything = GraphCompilationOptions.COMPUTE_ALL_GRADIENTS in self._options
        if everything or not description.parameters:
            labels = {t for node in description.nodes for t in node.labels} - {
                t for node in description.nodes for t in node.sources
            }
            description.wanted = [
                tensor
                for tensor in description.inputs
                if tensor.descriptor.data_type.is_floating and tensor not in self._stopped_tensors | labels
            ]
        sources = (self._source_of(tensor) for tensor in self._declared.outputs.values())
        description.kept_gradients = [tensor for tensor in sources if tensor is not None]
        self._describe_links(description)
        if not description.minimised and not description.user_gradients and not self._waits_for_labels():
            # Nothing else starts a gradient pass: the gradient of the final result may be fed.
            last = description.nodes[-1].results[0]
            if last.descriptor.data_type.is_floating:
                description.user_gradients[self._gradient_tensor(last)] = last
        self._warn_about_functions_taken_twice(description)
        if self._optimizer is not None:
            if self._optimizer.gradient_rescale == 1.0:  # who rescales the gradient of a sum knows of the sum
                self._warn_about_sums(description)
            self._warn_about_branches(description)
        return description

    def _describe_links(self, description: Description) -> None:
        """Gradients that come from later graphs, and parameters that belong to earlier ones."""
        earlier, later = self._neighbours(LearningGraph)
        owned = {tensor for other in earlier for tensor in other._updated_tensors()}
        produced = {result for other in earlier for node in other._all_nodes() for result in node.results}
        description.wanted += [tensor for tensor in description.parameters if tensor in owned]
        passed_on = [tensor for tensor in description.inputs if tensor in produced]
        description.wanted += [tensor for tensor in passed_on if tensor not in self._stopped_tensors]
        description.parameters = [tensor for tensor in description.parameters if tensor not in owned]
        own = [*description.parameters, *(result for node in description.nodes for result in node.results)]
        used = {tensor for other in later for tensor in other._used_tensors()}
        description.user_gradients.update({self._gradient_tensor(tensor): tensor for tensor in own if tensor in used})

    def _used_tensors(self) -> set[Tensor]:
        """Tensors of earlier graphs to whose gradients this graph may contribute."""
        read = (tensor for node in self._all_nodes() for tensor in (*node.sources, *node.labels))
        return {*self._updated_tensors(), *read}

    def _used_by_caller(self) -> set[Tensor]:
        return super()._used_by_caller() | set(self._user_gradients)

    def _warn_about_functions_taken_twice(self, description: Description) -> None:
        producers = {result: node.layer for node in description.nodes for result in node.results}
        for node in description.nodes:
            loss, source = node.layer, producers.get(node.sources[0])
            if not isinstance(loss, LossLayer) or source is None:
                continue
            function, other = _FUNCTIONS_IN_LOSSES.get(loss.descriptor.loss_type, ("", ""))
            if function and function == _function_of(source):
                self._warn(
                    f"{source.who} feeds {loss.who}, which applies {function} itself: the {function} is taken twice. "
                    f"Remove the {function} layer, or use a {other} loss."
                )

    def _warn_about_sums(self, description: Description) -> None:
        """The sum of several elements is minimised: an easy thing to forget, as it grows with the batch."""
        for node in description.nodes:
            for tensor in node.results:
                if tensor in description.minimised and not _is_one_number(node, tensor):
                    count = tensor.descriptor.element_count
                    reports = "`result` is the sum of all losses"
                    if description.total is None:
                        reports = f"`result` holds the {count} elements as they are"
                    own = 'give the loss a reduction, "sum" or "mean", or ' if isinstance(node.layer, LossLayer) else ""
                    self._warn(
                        f"{node.layer.who} has {count} elements, shape {tensor.descriptor.shape}, and no layer "
                        f"consumes them: their sum is minimised; {reports}. To say what is meant, {own}end with a "
                        'reduction layer: graph.reduce(loss, "mean", dimensions=...).'
                    )

    def _warn_about_branches(self, description: Description) -> None:
        """Layers that were added to look at a loss look like a second goal."""
        layers = {result: node.layer for node in description.nodes for result in node.results}
        for node in description.nodes:
            if isinstance(node.layer, LossLayer):
                reached = reached_from({node}, description.nodes, self._stopped_tensors)
                ends = [layers[tensor].who for tensor in description.minimised if tensor in reached]
                if len(ends) > 1:
                    self._warn(
                        f"{node.layer.who} leads to {len(ends)} results that no layer consumes, {', '.join(ends)}: "
                        "the sum of all of them is minimised. Give those that are only to be looked at to "
                        "stop_gradient([...]), or join them with layers."
                    )

    def _warn_about_untrained(self, description: Description, trained: AbstractSet[Tensor]) -> None:
        """Parameters that are to be updated, but that no gradient reaches: most often a head without a loss."""
        starts = {*description.minimised, *description.user_gradients.values()}
        if not starts or len(self._links) > 1:  # of linked graphs, later ones may still be built
            return
        untrained = {tensor for tensor in description.parameters if tensor not in trained}
        if not untrained:
            return
        passing = nodes_behind(starts, description.nodes, self._stopped_tensors)
        unused = set(description.nodes) - nodes_behind(starts, description.nodes, frozenset())
        for kind, reason in (
            (unused, "nothing that is minimised is computed from it"),
            (passing, "no gradient passes the layers between it and what is minimised"),
        ):
            idle = [
                name
                for name, node in zip(names_of(description.nodes), description.nodes, strict=True)
                if node in kind and untrained & {slot.tensor for slot in node.layer.parameters.values()}
            ]
            if idle:
                shown = ", ".join(f"'{name}'" for name in idle[:5]) + (", ..." if len(idle) > 5 else "")
                each, leave = ("each ", "them") if len(idle) > 1 else ("", "it")
                self._warn(
                    f"{self._who}: {shown} will not be trained: {reason}. Add a loss for {each}result "
                    f"(graph.loss), or leave {leave} out of training on purpose: layer.updates = False."
                )

    def _warn(self, message: str) -> None:
        """Say something about the graph, once."""
        if message not in self._said:
            self._said.add(message)
            warn(message)


def _is_one_number(node: Node, tensor: Tensor) -> bool:
    """Is it one number, or by its nature a sum over samples, as the YOLO loss is?"""
    layer = node.layer
    is_sum = isinstance(layer, LossLayer) and layer.descriptor.reduction_type == ReductionType.SUM
    return is_sum or tensor.descriptor.element_count == 1


#: What a loss applies to its source, and the loss that does not.
_FUNCTIONS_IN_LOSSES = {
    LossType.SOFTMAX_CROSS_ENTROPY: ("softmax", "categorical cross entropy"),
    LossType.SIGMOID_CROSS_ENTROPY: ("sigmoid", "log"),
}


def _function_of(layer: Layer) -> str:
    if isinstance(layer, SoftmaxLayer) and layer.operation == SoftmaxOperation.SOFTMAX:
        return "softmax"
    is_sigmoid = isinstance(layer, ActivationLayer) and layer.descriptor.activation_type == ActivationType.SIGMOID
    return "sigmoid" if is_sigmoid else ""
