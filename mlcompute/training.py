"""TrainingGraph: forward, gradient and optimizer update, in one call or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError, ExecutionError, GraphError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.foreign_names import answers_foreign_keywords, expect_no_foreign
from mlcompute.graph import Graph
from mlcompute.layers.arguments import listed
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.read_only import Settable, Shared
from mlcompute.ops.op import Array
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.runtime import apply_gradients, averages, calls, members
from mlcompute.runtime.compile_session import use_optimizer
from mlcompute.runtime.definition import Definition, Learning
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.run import Call
from mlcompute.runtime.session import Session, session_of
from mlcompute.runtime.tensor_state import reside
from mlcompute.tensor import Tensor, TensorOptimizerDeviceData, TensorParameter
from mlcompute.tensor_data import ArrayLike, TensorData


class TrainingGraph(Graph):
    """A graph with losses and an optimizer, which can be trained.

    graph_objects  the graphs to train; layers may also be added directly with `node`
    loss_layer     consumes the last result and the labels declared in `add_inputs`; or a function of these tensors,
                   lambda y, t: ((y - t) ** 2).mean(), whose result is minimised. `minimize` adds further losses
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

    @answers_foreign_keywords
    def __init__(
        self,
        graph_objects: Sequence[Graph] = (),
        loss_layer: Layer | Callable[..., Tensor] | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        who = type(self).__name__
        if loss_layer is not None and not (isinstance(loss_layer, LossLayer) or _is_function(loss_layer)):
            given = type(loss_layer).__name__
            raise TypeError(f"{who}: loss_layer must be a LossLayer or a function of tensors, not {given}")
        expect_no_foreign(who, "loss", loss_layer)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"{who}: optimizer must be an Optimizer, not {type(optimizer).__name__}")
        super().__init__()
        self._definition = Definition(who, self._contents.nodes, graph_objects, Learning(loss_layer, optimizer))
        self._session = Session(self._definition)

    # What training and inference graphs share ---------------------------------------------------------------------

    compile = members.compile
    add_inputs = members.add_inputs
    add_outputs = members.add_outputs
    wait = members.wait
    profile = members.profile
    node_of = members.node_of
    device = Shared(members.device)
    device_memory_size = Shared(members.device_memory_size)
    programs = Shared(members.programs)
    losses = Shared(members.losses)
    nodes = Shared(members.nodes)
    layers = Shared(members.layers)
    graph_objects = Shared(members.graph_objects)
    node_count = Shared(members.node_count)
    size_limit = Settable(members.size_limit, members.set_size_limit)
    __copy__ = members.copied
    _rows_per_sample = members.rows_per_sample
    _expect_fed = members.expect_fed

    @property
    def _learning(self) -> Learning:
        learning = self._definition.learning
        assert learning is not None
        return learning

    @property
    def stopped_tensors(self) -> frozenset[Tensor]:
        """Tensors no gradient passes: those given to `stop_gradient`."""
        return frozenset(self._learning.stopped)

    def link(self, graphs: Sequence[TrainingGraph]) -> bool:
        """Link later sub-graphs to this one, the first.

        Results of one graph may then be sources in a later one: values pass on in execute_forward (run in order),
        gradients come back in execute_gradient (run in reverse order). A parameter used in several graphs belongs
        to the first of them: it collects the gradients of all and is updated once.
        """
        who = type(self).__name__
        graphs = listed(f"{who}.link", "graphs", graphs, TrainingGraph)
        for graph in graphs:
            if not isinstance(graph, TrainingGraph):
                raise GraphError(f"{who}.link: {type(graph).__name__} cannot be linked with {who}")
        self._session.link([session_of(graph) for graph in graphs])
        return True

    # Declaring ------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer in use; None: gradients only. Change its learning_rate between runs to decay it."""
        return self._learning.optimizer

    def stop_gradient(self, tensors: Sequence[Tensor]) -> bool:
        """Gradients do not pass these tensors into the layers that produced them."""
        tensors = listed("TrainingGraph.stop_gradient", "tensors", tensors, Tensor)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"TrainingGraph.stop_gradient: needs Tensors, not {type(tensor).__name__}")
        self._learning.stopped.update(tensors)
        self._session.outdated()
        return True

    def set_training_tensor_parameters(self, parameters: Sequence[TensorParameter]) -> bool:
        """Input tensors the optimizer shall update besides the layers' own parameters. Replaces the previous list.

        They keep their values between runs; data fed or attached under their name replaces the values.
        """
        who = "TrainingGraph.set_training_tensor_parameters"
        parameters = listed(who, "parameters", parameters, TensorParameter)
        for parameter in parameters:
            if not isinstance(parameter, TensorParameter):
                raise TypeError(f"{who}: needs TensorParameters, not {type(parameter).__name__}")
            if not parameter.tensor.keeps_data:
                raise DataError(
                    f"{who}: {parameter.tensor!r} has no data",
                    fix="create it with data, fill_with_data or random_initializer_type",
                )
        self._learning.training_parameters = parameters
        self._session.outdated()
        return True

    def allocate_user_gradient(self, tensor: Tensor) -> Tensor:
        """A tensor to feed dL/d(tensor) to, for results consumed by the caller's own code.

        Attach the gradient with bind_and_write_data before execute_gradient; it adds to what layers contribute.
        """
        if not any(tensor in node.results for node in self.nodes):
            raise GraphError(
                f"TrainingGraph.allocate_user_gradient: {tensor!r} is no result of this graph",
                fix="pass a tensor that one of the graph's layers produces",
            )
        if tensor not in self._learning.user_gradients:
            gradient = self._learning.user_gradients[tensor] = Tensor(tensor.descriptor)
            gradient.label = f"user gradient of {tensor.label}"
            self._session.outdated()
        return self._learning.user_gradients[tensor]

    # Optimizer state --------------------------------------------------------------------------------------------

    def compile_optimizer(self, optimizer: Optimizer) -> bool:
        """Attach an optimizer, or replace the one there is; the state of a replaced one is dropped."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"TrainingGraph.compile_optimizer: needs an Optimizer, not {type(optimizer).__name__}")
        use_optimizer(self._session, optimizer)
        return True

    def bind_optimizer_data(
        self,
        data: Sequence[ArrayLike],
        *,
        device_data: Sequence[TensorOptimizerDeviceData] | None = None,
        tensor: Tensor,
    ) -> bool:
        """Use these buffers as the optimizer state of a parameter, in layout order. The memory stays the caller's."""
        who = f"TrainingGraph.bind_optimizer_data: '{tensor.label}'"
        data, state = listed(who, "data", data, TensorData), self._session.state
        if state is None:
            raise ExecutionError(f"{who}: the graph has no optimizer", fix="call compile_optimizer first")
        if tensor not in self._definition.updated_tensors():
            raise GraphError(f"{who} is not updated by this graph")
        state.check(tensor, data)
        return tensor.bind_optimizer_data(data, device_data=device_data)

    @property
    def averages(self) -> dict[str, Array]:
        """Averages of the weights by parameter name, as the optimizer's `average_decay` has kept them: copies."""
        return averages.averages(self._session)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Use the averages as weights inside a `with` block, for evaluating or saving:
        `with training.averaged_weights(): trainer.evaluate(x, y)`.
        """
        return averages.averaged_weights(self._session)

    # Gradients ------------------------------------------------------------------------------------------------

    def gradient_tensor(self, for_input: Tensor) -> Tensor | Any:
        """The tensor with the gradient of an input (or any tensor of the graph); None when none is computed.

        Inputs that feed only first layers have a gradient with COMPUTE_ALL_GRADIENTS. Its data is there after
        execute_gradient; after `execute` only when it was declared as an output.
        """
        if self._session.device is None:
            return None
        request = self._session.compile_if_needed()
        # Every style computes the same gradients; this one is compiled in any case, so asking costs no memory.
        program = self._session.program(self._session.main_style, self._session.main_batch(request))
        return self._gradient_tensor(for_input) if for_input in program.gradients else None

    def source_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """Gradients with respect to a layer's sources, one tensor each; empty for a foreign layer."""
        return [self._gradient_tensor(tensor) for tensor in self.source_tensors(layer)]

    def result_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """Gradients with respect to a layer's results, one tensor each; empty for a foreign layer."""
        return [self._gradient_tensor(tensor) for tensor in self.result_tensors(layer)]

    def _gradient_tensor(self, tensor: Tensor) -> Tensor:
        gradient = self._learning.gradient_tensor(tensor)
        reside([gradient], self._session)
        return gradient

    def gradients(self) -> dict[str, Array]:
        """The gradients of the last gradient pass by parameter name ("layer.slot"): copies.

        For `execute_forward` and `execute_gradient`; a fused `execute` keeps none.
        """
        return apply_gradients.gradients(self._session)

    def apply_gradients(
        self, gradients: Mapping[str | Tensor, ArrayLike], *, options: ExecutionOptions = ExecutionOptions.NONE
    ) -> Execution:
        """One update by the compiled optimizer with these gradients: summed over batches, projected, from elsewhere.

        gradients  one per parameter that is trained, by name ("layer.slot") or tensor, in the parameter's shape

        Clipping, groups, decay and the count of updates are those of any other update. Results of earlier
        passes cannot be read afterwards.
        """
        return apply_gradients.apply_gradients(self._session, gradients, options)

    def gradient_data(self, for_parameter: Tensor, layer: Layer) -> Array | Any:
        """The gradient of a layer's parameter, in the parameter's shape.

        None after a fused `execute` (run execute_forward and execute_gradient instead), for layers added with
        disable_update, and for tensors that are no parameter of the layer.
        """
        who = f"{type(self).__name__}.gradient_data"
        for what, given, kind in (("for_parameter", for_parameter, Tensor), ("layer", layer, Layer)):
            if not isinstance(given, kind):
                raise TypeError(f"{who}: {what} must be a {kind.__name__}, not {type(given).__name__}")
        self.wait()
        node = self.node_of(layer)
        if node is None or not node.updates:
            return None
        if not any(slot.tensor is for_parameter for slot in layer.parameters.values()):
            return None
        gradient = self._session.last.gradient(for_parameter)
        if gradient is not None:
            gradient.flags.writeable = False
        return gradient

    # Executing ------------------------------------------------------------------------------------------------

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

        Of several losses it is their sum, which is what is minimised; `losses` has each of them.

        Data is keyed by the names given to add_inputs, outputs by those of add_outputs. With FORWARD_FOR_INFERENCE
        only the forward pass runs, in inference mode; labels may then be left out.
        """
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        return calls.execute(self._session, given, batch_size, options, completion_handler, outputs_data)

    def execute_forward(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """The forward pass alone, on data attached with bind_and_write_data."""
        call = Call("execute_forward", options, completion_handler, outputs_data)
        return calls.execute_forward(self._session, call, batch_size)

    def execute_gradient(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """The gradient pass alone, after execute_forward with the same batch size. Gradients are then readable."""
        call = Call("execute_gradient", options, completion_handler, outputs_data)
        return calls.execute_gradient(self._session, call, batch_size)

    def execute_optimizer_update(
        self,
        *,
        options: ExecutionOptions = ExecutionOptions.NONE,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """Apply the optimizer to the gradients of the last gradient pass; may be repeated."""
        call = Call("execute_optimizer_update", options, completion_handler)
        return calls.execute_optimizer_update(self._session, call)

    async def execute_forward_async(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
    ) -> tuple[Tensor | None, float]:
        """`execute_forward` as a coroutine: (result, seconds)."""
        return await self.execute_forward(batch_size=batch_size, options=options, outputs_data=outputs_data)

    async def execute_gradient_async(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
    ) -> float:
        """`execute_gradient` as a coroutine: seconds."""
        return (await self.execute_gradient(batch_size=batch_size, options=options, outputs_data=outputs_data))[1]

    async def execute_optimizer_update_async(self, *, options: ExecutionOptions = ExecutionOptions.NONE) -> float:
        """`execute_optimizer_update` as a coroutine: seconds."""
        return (await self.execute_optimizer_update(options=options))[1]

    def synchronize_updates(self) -> None:
        """Wait for queued runs and bring memory the caller has bound up to date with the device."""
        self._session.synchronize()


def _is_function(given: object) -> TypeGuard[Callable[..., Tensor]]:
    """A function, and not a layer or a class that somebody forgot to make one of."""
    return callable(given) and not isinstance(given, (Layer, type))
