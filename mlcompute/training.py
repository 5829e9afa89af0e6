"""TrainingGraph: forward, gradient and optimizer update, in one call or one by one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.compiled import CompiledGraph, Named
from mlcompute.compiler import Description
from mlcompute.compiler.program import Program
from mlcompute.enums import ExecutionOptions, GraphCompilationOptions, LossType, SoftmaxOperation
from mlcompute.errors import DataError, ExecutionError, GraphError, ShapeError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.graph import Graph, Node
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.ops.op import Array, Value
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.tensor import Tensor, TensorOptimizerDeviceData, TensorParameter
from mlcompute.tensor_data import ArrayLike, write_target


class TrainingGraph(CompiledGraph):
    """A graph that learns.

    graph_objects  the graphs to train; layers may also be added directly with `node`
    loss_layer     consumes the last result and the labels declared in `add_inputs`
    optimizer      updates the parameters; None: gradients only

    >>> import numpy as np, mlcompute as mlc
    >>> x, t = mlc.Tensor(shape=(4, 2)), mlc.Tensor(shape=(4, 1))
    >>> w = mlc.Tensor(shape=(1, 2), fill_with_data=0.5)
    >>> layer = mlc.FullyConnectedLayer(w, None, mlc.ConvolutionDescriptor(
    ...     input_feature_channel_count=2, output_feature_channel_count=1))
    >>> g = mlc.Graph(); y = g.node(layer, source=x)
    >>> training = mlc.TrainingGraph([g], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN),
    ...     mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    >>> training.add_inputs({"x": x}, {"t": t}), training.compile(device=mlc.Device.cpu())
    (True, True)
    >>> run = training.execute({"x": np.ones((4, 2))}, {"t": np.zeros((4, 1))})
    >>> run.result.data
    array([1.], dtype=float32)
    """

    _trains = True
    _main_style = "fused"

    def __init__(
        self,
        graph_objects: Sequence[Graph] = (),
        loss_layer: Layer | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(graph_objects)
        if loss_layer is not None and not isinstance(loss_layer, LossLayer):
            raise TypeError(f"TrainingGraph: loss_layer must be a LossLayer, not {type(loss_layer).__name__}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"TrainingGraph: optimizer must be an Optimizer, not {type(optimizer).__name__}")
        self._loss_layer = loss_layer
        self._loss_node: Node | None = None
        self._optimizer = optimizer
        self._stopped_tensors: set[Tensor] = set()
        self._user_gradients: dict[Tensor, Tensor] = {}
        self._gradient_tensors: dict[Tensor, Tensor] = {}
        self._gradient_of: dict[Tensor, Tensor] = {}
        self._training_parameters: list[TensorParameter] = []
        self._state: dict[Tensor, list[Array]] = {}
        self._time_step: int | None = None
        self._updates_pending = 0
        self._lock = threading.Lock()
        #: The split program whose values are in memory, and the phases that have been queued since its forward.
        self._split: Program | None = None
        self._phases_done: set[str] = set()

    # Declaring ------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer in use: change its learning_rate between runs to decay it."""
        return self._optimizer

    def _stopped(self) -> set[Tensor]:
        return self._stopped_tensors

    def stop_gradient(self, tensors: Sequence[Tensor]) -> bool:
        """Gradients do not pass these tensors into the layers that produced them."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"TrainingGraph.stop_gradient: needs Tensors, not {type(tensor).__name__}")
        self._stopped_tensors.update(tensors)
        self._outdate()
        return True

    def set_training_tensor_parameters(self, parameters: Sequence[TensorParameter]) -> bool:
        """Input tensors the optimizer shall update besides the layers' own parameters. Replaces the previous list."""
        for parameter in parameters:
            if not isinstance(parameter, TensorParameter):
                raise TypeError(
                    f"TrainingGraph.set_training_tensor_parameters: needs TensorParameters, not {type(parameter).__name__}"
                )
            if parameter.tensor._host is None:
                raise DataError(
                    f"TrainingGraph.set_training_tensor_parameters: {parameter.tensor!r} has no data",
                    fix="create it with data, fill_with_data or random_initializer_type",
                )
        self._training_parameters = list(parameters)
        self._outdate()
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
            self._outdate()
        return self._user_gradients[tensor]

    def link(self, graphs: Sequence[TrainingGraph]) -> bool:
        """Join later sub-graphs to this one, the first.

        Results of one graph may then be sources in a later one: values pass on in execute_forward (run in order),
        gradients come back in execute_gradient (run in reverse order). A parameter used in several graphs belongs
        to the first of them: it collects the gradients of all and is updated once.
        """
        for graph in graphs:
            if not isinstance(graph, TrainingGraph):
                raise GraphError(f"TrainingGraph.link: {type(graph).__name__} cannot be linked with a training graph")
        group: list[CompiledGraph] = list(dict.fromkeys([self, *graphs]))
        for graph in group:
            if graph._device is not None and GraphCompilationOptions.LINK_GRAPHS not in graph._options:
                raise GraphError(
                    "TrainingGraph.link: a graph was compiled without LINK_GRAPHS",
                    fix="compile every linked graph with options=GraphCompilationOptions.LINK_GRAPHS",
                )
        for graph in group:
            graph._links = group
            graph._outdate()
        return True

    def compile_optimizer(self, optimizer: Optimizer) -> bool:
        """Attach an optimizer, or replace the one there is; its state starts from zero."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"TrainingGraph.compile_optimizer: needs an Optimizer, not {type(optimizer).__name__}")
        if self._device is None:
            raise ExecutionError("TrainingGraph.compile_optimizer: the graph is not compiled", fix="call compile first")
        self.wait()
        self._optimizer = optimizer
        self._state.clear()
        self._time_step = None
        self._outdate()
        self._compile_if_needed()
        return True

    # Describing to the compiler ---------------------------------------------------------------------------------

    def _waits_for_labels(self) -> bool:
        return self._loss_layer is not None and self._loss_node is None

    def _describe(self) -> Description:
        self._loss_node = self._make_loss_node()
        description = super()._describe()
        description.optimizer = self._optimizer
        description.losses = [node for node in description.nodes if isinstance(node.layer, LossLayer)]
        description.stopped = self._stopped_tensors
        description.parameters = self._updated_tensors(description.nodes)
        description.user_gradients = dict(self._user_gradients)
        if not description.losses and not self._waits_for_labels():
            last = description.nodes[-1].results[0]
            description.user_gradients.setdefault(last, self._gradient_tensor(last))
        everything = GraphCompilationOptions.COMPUTE_ALL_GRADIENTS in self._options
        if everything or not description.parameters:
            description.wanted = [t for t in description.inputs if t.descriptor.data_type.is_floating]
        self._describe_links(description)
        self._warn_about_double_softmax(description)
        return description

    def _all_nodes(self) -> list[Node]:
        nodes = super()._all_nodes()
        return [*nodes, self._loss_node] if self._loss_node is not None else nodes

    @property
    def layers(self) -> list[Layer]:
        """The layers, each once, in the order they were added; the loss given to the constructor is not among them."""
        return [node.layer for node in super()._all_nodes()]

    def _make_loss_node(self) -> Node | None:
        """The node of the loss layer given to the constructor; None while its labels are not declared."""
        loss = self._loss_layer
        nodes = super()._all_nodes()
        taken = {label for node in nodes for label in node.labels}
        labels = [label for label in self._labels.values() if label not in taken]
        if loss is None or not nodes or not labels:
            return None
        source = nodes[-1].results[0]
        known = self._loss_node
        if known is not None and known.sources == [source] and known.labels == labels:
            return known
        descriptors = [tensor.descriptor for tensor in (source, *labels)]
        try:
            loss.check_sources(descriptors)
            results = [Tensor(descriptor) for descriptor in loss.results(descriptors)]
        except (ShapeError, DataError) as error:
            described = (f"{t.descriptor.shape} {self._producer_label(t)}" for t in (source, *labels))
            error.add_fact("sources", ", ".join(described))
            raise
        return Node(loss, [source], labels, results)

    def _updated_tensors(self, nodes: list[Node]) -> list[Tensor]:
        tensors: dict[Tensor, None] = {}
        for node in nodes:
            if node.updates:
                slots = node.layer.parameters.values()
                tensors.update(dict.fromkeys(slot.tensor for slot in slots if slot.is_updatable))
        tensors.update(dict.fromkeys(p.tensor for p in self._training_parameters if p.is_updatable))
        return list(tensors)

    def _kept_inputs(self) -> set[Tensor]:
        return {parameter.tensor for parameter in self._training_parameters}

    def _describe_links(self, description: Description) -> None:
        """Gradients that come from later graphs, and parameters that belong to earlier ones."""
        position = self._links.index(self)
        for other in self._links[position + 1 :]:
            sources = {t for node in other._all_nodes() for t in node.sources}
            slots = {s.tensor for node in other._all_nodes() for s in node.layer.parameters.values()}
            for node in description.nodes:
                for tensor in node.results:
                    if tensor in sources:
                        description.user_gradients.setdefault(tensor, self._gradient_tensor(tensor))
            for tensor in description.parameters:
                if tensor in slots:
                    description.user_gradients.setdefault(tensor, self._gradient_tensor(tensor))
        earlier: set[Tensor] = set()
        produced: set[Tensor] = set()
        for other in self._links[:position]:
            for node in other._all_nodes():
                earlier.update(slot.tensor for slot in node.layer.parameters.values())
                produced.update(node.results)
        elsewhere = [tensor for tensor in description.parameters if tensor in earlier]
        description.parameters = [tensor for tensor in description.parameters if tensor not in earlier]
        description.wanted += elsewhere + [tensor for tensor in description.inputs if tensor in produced]

    def _linked_value(self, tensor: Tensor) -> Array | None:
        position = self._links.index(self)
        for other in self._links[:position]:
            other.wait()
            value = other.fetch(tensor)
            if value is not None:
                return value
        source = self._gradient_of.get(tensor)
        total: Array | None = None
        if source is not None:
            for other in self._links[position + 1 :]:
                other.wait()
                part = other._gradient(source) if isinstance(other, TrainingGraph) else None
                if part is not None:
                    total = part if total is None else total + part
        return total

    def _warn_about_double_softmax(self, description: Description) -> None:
        producers = {result: node.layer for node in description.nodes for result in node.results}
        for node in description.losses:
            loss, source = node.layer, producers.get(node.sources[0])
            if (
                isinstance(loss, LossLayer)
                and loss.descriptor.loss_type == LossType.SOFTMAX_CROSS_ENTROPY
                and isinstance(source, SoftmaxLayer)
                and source.operation == SoftmaxOperation.SOFTMAX
            ):
                warnings.warn(
                    f"{source.who} feeds {loss.who}, which applies softmax itself: the softmax is taken twice. "
                    "Remove the softmax layer, or use a categorical cross entropy loss.",
                    UserWarning,
                    stacklevel=4,
                )

    # Optimizer state --------------------------------------------------------------------------------------------

    def _compile_if_needed(self, at_compile: bool = False) -> Description:
        was_outdated = self._description is None
        description = super()._compile_if_needed(at_compile)
        if was_outdated:
            self._split, self._phases_done = None, set()
            self._prepare_state(description)
        return description

    def _prepare_state(self, description: Description) -> None:
        """State buffers for every updated parameter: the caller's, this graph's from before, or zeros."""
        if self._optimizer is None:
            return
        if self._time_step is None:
            self._time_step = getattr(self._optimizer, "time_step", 1)
        count = len(self._optimizer.state_names)
        for tensor in description.parameters:
            if tensor._optimizer_data_is_callers and len(tensor._optimizer_data) == count:
                self._state[tensor] = tensor._optimizer_data
            elif len(self._state.get(tensor, ())) != count or tensor not in self._state:
                dtype = tensor.descriptor.data_type.numpy
                self._state[tensor] = [np.zeros(tensor.descriptor.shape, dtype) for _ in range(count)]
            tensor._optimizer_data = self._state[tensor]
        self._bindings.clear()

    def _states_of(self, tensor: Tensor) -> list[Array]:
        return self._state[tensor]

    def _state_bytes(self) -> int:
        return sum(state.nbytes for states in self._state.values() for state in states)

    def bind_optimizer_data(
        self,
        data: Sequence[ArrayLike],
        *,
        device_data: Sequence[TensorOptimizerDeviceData] | None = None,
        tensor: Tensor,
    ) -> bool:
        """Use these buffers as the optimizer state of a parameter, in layout order. The memory stays the caller's."""
        who = f"TrainingGraph.bind_optimizer_data: '{tensor.label}'"
        if self._optimizer is None:
            raise ExecutionError(f"{who}: the graph has no optimizer")
        names = self._optimizer.state_names
        if len(data) != len(names):
            raise DataError(
                f"{who}: {len(data)} buffers were given, {type(self._optimizer).__name__} has {len(names)} states",
                expected=", ".join(names) or "none",
            )
        for index, (name, state) in enumerate(zip(names, data, strict=True)):
            write_target(state, tensor.descriptor, f"{who}: state {index} ({name})")
        return tensor.bind_optimizer_data(data, device_data=device_data)

    def rebound(self, tensor: Tensor) -> None:
        super().rebound(tensor)
        if self._optimizer is not None and tensor in self._state and tensor._optimizer_data_is_callers:
            names = self._optimizer.state_names
            if len(tensor._optimizer_data) == len(names):
                self._state[tensor] = tensor._optimizer_data

    # Gradients ------------------------------------------------------------------------------------------------

    def _gradient_tensor(self, tensor: Tensor) -> Tensor:
        if tensor not in self._gradient_tensors:
            gradient = Tensor(tensor.descriptor)
            gradient.label = f"gradient of {tensor.label}"
            gradient._reside(self)
            self._gradient_tensors[tensor] = gradient
            self._gradient_of[gradient] = tensor
        return self._gradient_tensors[tensor]

    def gradient_tensor(self, for_input: Tensor) -> Tensor | None:
        """The tensor with the gradient of an input (or any tensor of the graph); None when none is computed.

        Inputs that feed only first layers have a gradient with COMPUTE_ALL_GRADIENTS. Its data is there after
        execute_gradient.
        """
        if self._device is None:
            return None
        description = self._compile_if_needed()
        program = self._program("split", description.batch_size)
        return self._gradient_tensor(for_input) if for_input in program.gradients else None

    def source_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """Gradients with respect to a layer's sources, one tensor each; empty for a foreign layer."""
        return [self._gradient_tensor(tensor) for tensor in self.source_tensors(layer)]

    def result_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """Gradients with respect to a layer's results, one tensor each; empty for a foreign layer."""
        return [self._gradient_tensor(tensor) for tensor in self.result_tensors(layer)]

    def _gradient(self, tensor: Tensor) -> Array | None:
        """The gradient of a tensor as of the last gradient pass that was run by itself."""
        if self._split is None or "gradient" not in self._phases_done or self._current is None:
            return None
        value = self._split.gradients.get(tensor)
        if value is None or self._current.program is not self._split:
            return None
        return self._current.read(value)

    def gradient_data(self, for_parameter: Tensor, layer: Layer) -> Array | None:
        """The gradient of a layer's parameter, in the parameter's shape.

        None after a fused `execute` (run execute_forward and execute_gradient instead), for layers added with
        disable_update, and for tensors that are no parameter of the layer.
        """
        self.wait()
        node = self._find(layer)
        if node is None or not node.updates:
            return None
        if not any(slot.tensor is for_parameter for slot in layer.parameters.values()):
            return None
        gradient = self._gradient(for_parameter)
        if gradient is not None:
            gradient.flags.writeable = False
        return gradient

    def fetch(self, tensor: Tensor) -> Array | None:
        """The value of a result or gradient tensor in the last run; None when that run did not keep it."""
        source = self._gradient_of.get(tensor)
        if source is None:
            return super().fetch(tensor)
        gradient = self._gradient(source)
        if gradient is not None or self._current is None:
            return gradient
        # A fused run keeps the gradients of layers being debugged.
        program = self._current.program
        value = program.gradients.get(source) if program.name == "fused" else None
        return self._current.read(value) if value is not None and value in program.kept else None

    # Executing ------------------------------------------------------------------------------------------------

    def _data(self, method: str, inputs: Named | None, labels: Named | None, weights: Named | None) -> dict[Tensor, Any]:
        return self._named_data(
            method,
            [
                ("inputs_data", self._inputs, inputs),
                ("loss_labels_data", self._labels, labels),
                ("loss_label_weights_data", self._label_weights, weights),
            ],
        )

    def _write_kept_inputs(self, data: Mapping[Tensor, Any]) -> None:
        """Data fed for a tensor the optimizer updates replaces its values."""
        from mlcompute.tensor_data import read_array

        for tensor in self._kept_inputs():
            if tensor in data and tensor._host is not None:
                array = read_array(data[tensor], tensor.descriptor, f"'{self._name_of(tensor)}'")
                self.wait()
                np.copyto(tensor._host, array)

    def execute(
        self,
        inputs_data: Named,
        loss_labels_data: Named | None = None,
        loss_label_weights_data: Named | None = None,
        outputs_data: Named | None = None,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """One training step: forward, gradient and, with an optimizer, update. The result is the loss.

        Data is keyed by the names given to add_inputs, outputs by those of add_outputs. With FORWARD_FOR_INFERENCE
        only the forward pass runs, in inference mode; labels may then be left out.
        """
        batch = self._batch(batch_size, "execute")
        data = self._data("execute", inputs_data, loss_labels_data, loss_label_weights_data)
        if ExecutionOptions.FORWARD_FOR_INFERENCE in options:
            return self._infer(batch, data, options, completion_handler, outputs_data, "execute")
        phases = self._phases_to_execute()
        program = self._program("fused", batch)
        feeds = self._feed(program, phases, data, options, "execute")
        self._write_kept_inputs(data)
        self._split, self._phases_done = None, set()
        return self._run(program, phases, feeds, options, completion_handler, outputs_data, "execute")

    def _phases_to_execute(self) -> tuple[str, ...]:
        description = self._compile_if_needed()
        if self._waits_for_labels():
            raise ExecutionError(
                "TrainingGraph: the loss layer has no labels", fix="declare them: add_inputs(..., loss_labels={...})"
            )
        bound = [gradient for gradient in description.user_gradients.values() if gradient._bound is not None]
        if not description.losses and not bound:
            if self._optimizer is not None and description.parameters:
                raise ExecutionError(
                    "TrainingGraph.execute: there is nothing to minimise",
                    expected="a loss layer, or a gradient bound to a tensor of allocate_user_gradient",
                    fix="give the graph a loss layer, or run execute_forward and execute_gradient by themselves",
                )
            return ("forward",)
        return ("forward", "gradient") if self._optimizer is None else ("forward", "gradient", "update")

    def execute_forward(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """The forward pass alone, on data attached with bind_and_write_data."""
        batch = self._batch(batch_size, "execute_forward")
        if ExecutionOptions.FORWARD_FOR_INFERENCE in options:
            return self._infer(batch, {}, options, completion_handler, outputs_data, "execute_forward")
        program = self._program("split", batch)
        feeds = self._feed(program, ("forward",), {}, options, "execute_forward")
        self._split, self._phases_done = program, {"forward"}
        return self._run(
            program, ("forward",), feeds, options, completion_handler, outputs_data, "execute_forward"
        )

    def execute_gradient(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """The gradient pass alone, after execute_forward with the same batch size. Gradients are then readable."""
        self._compile_if_needed()
        program = self._forward_program("execute_gradient", batch_size)
        feeds = self._feed(program, ("gradient",), {}, options, "execute_gradient")
        self._phases_done.add("gradient")
        return self._run(
            program, ("gradient",), feeds, options, completion_handler, outputs_data, "execute_gradient"
        )

    def _forward_program(self, method: str, batch_size: int) -> Program:
        if self._split is None:
            raise ExecutionError(
                f"TrainingGraph.{method}: no forward pass was run", fix="call execute_forward before it"
            )
        if batch_size not in (0, self._split.batch_size):
            raise ExecutionError(
                f"TrainingGraph.{method}: batch_size is {batch_size}, the forward pass ran {self._split.batch_size}"
            )
        return self._split

    def execute_optimizer_update(
        self,
        *,
        options: ExecutionOptions = ExecutionOptions.NONE,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """Apply the optimizer to the gradients of the last gradient pass; may be repeated."""
        self._compile_if_needed()
        if self._optimizer is None:
            raise ExecutionError(
                "TrainingGraph.execute_optimizer_update: the graph has no optimizer", fix="call compile_optimizer"
            )
        program = self._forward_program("execute_optimizer_update", 0)
        if "gradient" not in self._phases_done:
            raise ExecutionError(
                "TrainingGraph.execute_optimizer_update: no gradient pass was run", fix="call execute_gradient before it"
            )
        return self._run(program, ("update",), {}, options, completion_handler, None, "execute_optimizer_update")

    async def execute_forward_async(
        self, *, batch_size: int = 0, options: ExecutionOptions = ExecutionOptions.NONE, outputs_data: Named | None = None
    ) -> tuple[Tensor | None, float]:
        """`execute_forward` as a coroutine: (result, seconds)."""
        return await self.execute_forward(batch_size=batch_size, options=options, outputs_data=outputs_data)

    async def execute_gradient_async(
        self, *, batch_size: int = 0, options: ExecutionOptions = ExecutionOptions.NONE, outputs_data: Named | None = None
    ) -> float:
        """`execute_gradient` as a coroutine: seconds."""
        return (await self.execute_gradient(batch_size=batch_size, options=options, outputs_data=outputs_data))[1]

    async def execute_optimizer_update_async(self, *, options: ExecutionOptions = ExecutionOptions.NONE) -> float:
        """`execute_optimizer_update` as a coroutine: seconds."""
        return (await self.execute_optimizer_update(options=options))[1]

    def synchronize_updates(self) -> None:
        """Wait for queued runs, so that parameters and optimizer state hold the newest values."""
        self.wait()

    def _infer(
        self,
        batch: int,
        data: dict[Tensor, Any],
        options: ExecutionOptions,
        handler: GraphCompletionHandler | None,
        outputs_data: Named | None,
        method: str,
    ) -> Execution:
        """The forward pass in inference mode; up to the predictions when there are no labels."""
        labels = [label for node in self._all_nodes() for label in node.labels]
        has_labels = not self._waits_for_labels() and all(
            label in data or label._bound is not None or label in self._constants for label in labels
        )
        program = self._program("inference", batch, has_labels)
        feeds = self._feed(program, ("forward",), data, options, method)
        self._split, self._phases_done = None, set()
        return self._submit(program, ("forward",), feeds, options, handler, outputs_data, method)

    def _run(
        self,
        program: Program,
        phases: tuple[str, ...],
        feeds: dict[Value, Array],
        options: ExecutionOptions,
        handler: GraphCompletionHandler | None,
        outputs_data: Named | None,
        method: str,
    ) -> Execution:
        """Queue training phases, with the numbers that change from run to run fixed at this moment."""
        late = dict(feeds)
        if "forward" in phases:
            late.update(self._random_bindings(program))
        step = 0
        if "update" in phases:
            assert self._optimizer is not None and self._time_step is not None
            with self._lock:
                step = self._time_step + self._updates_pending
                self._updates_pending += 1
            numbers = self._optimizer.scalars(step)
            late.update({value: np.asarray(numbers[name], value.dtype) for name, value in program.scalars.items()})
        optimizer = self._optimizer

        def finished(succeeded: bool) -> None:
            if "update" not in phases:
                return
            with self._lock:
                self._updates_pending -= 1
                if succeeded:
                    self._time_step = step + 1
            if succeeded and optimizer is not None:
                optimizer._advance(step + 1)

        return self._submit(
            program, phases, late, options, handler, outputs_data, method, finished=finished
        )
