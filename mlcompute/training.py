"""TrainingGraph: forward, gradient and optimizer update, in one call or one by one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiled import Call
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import ExecutionError, GraphError
from mlcompute.execution import Execution, GraphCompletionHandler, asks
from mlcompute.feeding import Feeds, Named
from mlcompute.graph import Graph
from mlcompute.layers.layer import Layer
from mlcompute.learning import LearningGraph
from mlcompute.ops.op import Array, Value
from mlcompute.optimizer_state import OptimizerState
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.passes import Passes
from mlcompute.platform import RandomPasses
from mlcompute.programs import Course, Programs
from mlcompute.runtime.storage import Storage
from mlcompute.tensor import Tensor, TensorOptimizerDeviceData
from mlcompute.tensor_data import ArrayLike, read_array

if TYPE_CHECKING:
    from typing_extensions import Self


class TrainingGraph(LearningGraph):
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

    _state: OptimizerState | None

    def __init__(
        self,
        graph_objects: Sequence[Graph] = (),
        loss_layer: Layer | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(graph_objects, loss_layer, optimizer)
        if optimizer is not None:
            self._state = OptimizerState(optimizer)

    def _has_not_run(self) -> None:
        super()._has_not_run()
        self._state = None
        self._random = RandomPasses()

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._random = copy.copy(self._random)
        copied._state = None if self._state is None else self._state.shared()
        for gradient in copied._gradient_of:
            gradient._reside(copied)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied._random = copy.copy(self._random)
        if self._state is not None and copied._optimizer is not None:
            copied._state = self._state.copied(copied._optimizer, memo)
        for gradient in copied._gradient_of:
            gradient._reside(copied)
        return copied

    # Links ----------------------------------------------------------------------------------------------------

    def link(self, graphs: Sequence[TrainingGraph]) -> bool:
        """Join later sub-graphs to this one, the first.

        Results of one graph may then be sources in a later one: values pass on in execute_forward (run in order),
        gradients come back in execute_gradient (run in reverse order). A parameter used in several graphs belongs
        to the first of them: it collects the gradients of all and is updated once.
        """
        return self._link(graphs, TrainingGraph)

    def _linked(self, tensor: Tensor) -> Callable[[], Array | None] | None:
        earlier, later = self._neighbours(TrainingGraph)
        for other in earlier:
            if any(tensor in node.results for node in other._all_nodes()):
                return functools.partial(other.latest, tensor)
        source = self._gradient_of.get(tensor)
        users = [other for other in later if source in other._used_tensors()]
        return functools.partial(_sum_of_gradients, source, users) if source is not None and users else None

    # Optimizer state --------------------------------------------------------------------------------------------

    def compile_optimizer(self, optimizer: Optimizer) -> bool:
        """Attach an optimizer, or replace the one there is; the state of a replaced one is dropped."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"TrainingGraph.compile_optimizer: needs an Optimizer, not {type(optimizer).__name__}")
        self._compile_if_needed()
        self.wait()
        before = self._optimizer, self._state
        if self._state is not None:
            self._state.retire(self, self._updated_tensors())
        self._optimizer, self._state = optimizer, OptimizerState(optimizer)
        try:
            self._compile(builds=True)
        except BaseException:  # Ctrl-C too
            self._optimizer, self._state = before
            raise
        return True

    def _adopt(self, compiled: Programs) -> None:
        if self._state is not None:
            parameters = compiled.description.parameters
            self._state.check_callers(parameters)
            if not self._waits_for_labels():
                program = compiled.get(self._main_style, compiled.description.batch_size)
                self._warn_about_untrained(compiled.description, program.states.keys())
                self._state.claim(self, program.states.keys())
            self._state.prepare(parameters)
        super()._adopt(compiled)

    def _states_of(self, tensor: Tensor) -> list[Storage]:
        assert self._state is not None
        return self._state.of(tensor)

    def _state_bytes(self) -> int:
        if self._state is None or self._compiled is None:
            return 0
        return self._state.nbytes(self._compiled.description.parameters)

    def bind_optimizer_data(
        self,
        data: Sequence[ArrayLike],
        *,
        device_data: Sequence[TensorOptimizerDeviceData] | None = None,
        tensor: Tensor,
    ) -> bool:
        """Use these buffers as the optimizer state of a parameter, in layout order. The memory stays the caller's."""
        who = f"TrainingGraph.bind_optimizer_data: '{tensor.label}'"
        if self._state is None:
            raise ExecutionError(f"{who}: the graph has no optimizer", fix="call compile_optimizer first")
        if tensor not in self._updated_tensors():
            raise GraphError(f"{who} is not updated by this graph")
        self._state.check(tensor, data)
        return tensor.bind_optimizer_data(data, device_data=device_data)

    def rebound(self, tensor: Tensor) -> None:
        """A parameter or its optimizer state has got other memory."""
        if self._state is not None:
            self._state.rebound(tensor)
        super().rebound(tensor)

    # Gradients ------------------------------------------------------------------------------------------------

    def gradient_tensor(self, for_input: Tensor) -> Tensor | None:
        """The tensor with the gradient of an input (or any tensor of the graph); None when none is computed.

        Inputs that feed only first layers have a gradient with COMPUTE_ALL_GRADIENTS. Its data is there after
        execute_gradient; after `execute` only when it was declared as an output.
        """
        if self._device is None:
            return None
        description = self._compile_if_needed()
        # Every style computes the same gradients; this one is compiled in any case, so asking costs no memory.
        program = self._program(self._main_style, description.batch_size)
        return self._gradient_tensor(for_input) if for_input in program.gradients else None

    def source_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """Gradients with respect to a layer's sources, one tensor each; empty for a foreign layer."""
        return [self._gradient_tensor(tensor) for tensor in self.source_tensors(layer)]

    def result_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """Gradients with respect to a layer's results, one tensor each; empty for a foreign layer."""
        return [self._gradient_tensor(tensor) for tensor in self.result_tensors(layer)]

    def _gradient(self, tensor: Tensor) -> Array | None:
        """The gradient of a tensor as of the last gradient pass that was run by itself."""
        if self._ran is None or not self._has_gradients:
            return None
        value = self._ran.program.gradients.get(tensor)
        return None if value is None else self._ran.executable.read(value)

    @property
    def _has_gradients(self) -> bool:
        """Was the last run a gradient pass by itself, or an update after one?"""
        return self._ran is not None and "gradient" in self._ran.finished

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

    def computes(self, tensor: Tensor) -> bool:
        """Did the last run compute this result or gradient tensor?"""
        return tensor in self._gradient_of or super().computes(tensor)

    def fetch(self, tensor: Tensor) -> Array | None:
        """The value of a result or gradient tensor in the last run; None when that run did not keep it."""
        source = self._gradient_of.get(tensor)
        if source is None:
            return super().fetch(tensor)
        gradient = self._gradient(source)
        if gradient is not None or self._current is None:
            return gradient
        # A fused run keeps the gradients that were declared as outputs and those of layers being debugged.
        program = self._current.program
        value = program.gradients.get(source) if program.name == "fused" else None
        return self._current.read(value) if value is not None and value in program.kept else None

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
        call = Call("execute", options, completion_handler, outputs_data)
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        course, feeds = self._asked_for(call, batch_size, given)
        if asks(options, ExecutionOptions.FORWARD_FOR_INFERENCE):
            return self._submit(course, feeds, call)
        return self._run(course, feeds, call)

    def _look_up(self, batch: int, data: Mapping[Tensor, Any], call: Call) -> tuple[Course, Feeds]:
        if asks(call.options, ExecutionOptions.FORWARD_FOR_INFERENCE):
            return super()._look_up(batch, data, call)
        phases = self._phases_to_execute()
        assert self._compiled is not None
        course = self._compiled.course(self._program("fused", batch), phases, call.options)
        feeds = self._feed(course, data, call.method)
        call.replaced = self._replaced_values(data)
        return course, feeds

    def _phases_to_execute(self) -> tuple[str, ...]:
        description = self._compile_if_needed()
        self._expect_labels()
        fed = any(gradient._bound is not None for gradient in description.user_gradients)
        if not description.minimised and not fed:
            if self._optimizer is not None and description.parameters:
                raise ExecutionError(
                    "TrainingGraph.execute: there is nothing to minimise",
                    expected="a loss layer, or a gradient bound to a tensor of allocate_user_gradient",
                    fix="give the graph a loss layer, or run execute_forward and execute_gradient by themselves",
                )
            return ("forward",)
        return ("forward", "gradient") if self._optimizer is None else ("forward", "gradient", "update")

    def _expect_labels(self) -> None:
        if self._waits_for_labels():
            raise ExecutionError(
                "TrainingGraph: the loss layer has no labels", fix="declare them: add_inputs(..., loss_labels={...})"
            )

    def _replaced_values(self, data: Mapping[Tensor, Any]) -> list[tuple[Tensor, Array]]:
        """Data fed for tensors the optimizer updates: it replaces their values when the run's turn has come."""
        return [
            (tensor, read_array(data[tensor], tensor.descriptor, f"'{self._name_of(tensor)}'").copy())
            for tensor in self._kept_inputs()
            if tensor in data
        ]

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
        call = Call("execute_forward", options, completion_handler, outputs_data)
        if asks(options, ExecutionOptions.FORWARD_FOR_INFERENCE):
            return self._submit(*self._look_up(batch, {}, call), call)
        self._expect_labels()
        program = self._program("split", batch)
        assert self._compiled is not None
        course = self._compiled.course(program, ("forward",), options)
        # Copied in any case: the gradient pass needs the same numbers, whatever becomes of the caller's memory.
        feeds = self._feed(course, {}, "execute_forward", copies=True)
        return self._run(course, feeds, call, Passes(program, self._compiled.executable(program)))

    def execute_gradient(
        self,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        outputs_data: Named | None = None,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """The gradient pass alone, after execute_forward with the same batch size. Gradients are then readable."""
        passes = self._passes_after("forward", "execute_gradient", batch_size)
        assert self._compiled is not None
        course = self._compiled.course(passes.program, ("gradient",), options)
        feeds = self._feed(course, {}, "execute_gradient")
        return self._run(course, feeds, Call("execute_gradient", options, completion_handler, outputs_data), passes)

    def _passes_after(self, needed: str, method: str, batch_size: int = 0) -> Passes:
        """The passes asked for so far, of which `needed` must be one."""
        self._compile_if_needed()
        self._raise_unseen_error()
        passes = self._asked
        if passes is None or needed not in passes.queued:
            raise ExecutionError(
                f"TrainingGraph.{method}: no {needed} pass was run",
                fix=f"call execute_{needed} before it, with no other run of the graph in between",
            )
        if batch_size not in (0, passes.program.batch_size):
            raise ExecutionError(
                f"TrainingGraph.{method}: batch_size is {batch_size}, the forward pass ran {passes.program.batch_size}"
            )
        return passes

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
        passes = self._passes_after("gradient", "execute_optimizer_update")
        assert self._compiled is not None
        course = self._compiled.course(passes.program, ("update",), options)
        return self._run(course, {}, Call("execute_optimizer_update", options, completion_handler), passes)

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
        self.wait()
        for storages in self._compiled.storages.values() if self._compiled is not None else ():
            for storage in storages.values():
                if storage.is_callers:
                    storage.array()

    def _run(self, course: Course, feeds: Feeds, call: Call, passes: Passes | None = None) -> Execution:
        """Queue training phases. What counts runs (time step, random passes) moves on only when a run succeeds."""
        random = self._random = self._random.current()
        settings = self._optimizer if course.updates else None
        if settings is not None and not course.synchronous:
            # The caller may change the rate while the run is queued; what it was when the run was asked for counts.
            settings = settings._frozen()
        assert self._compiled is not None
        compiled, state = self._compiled, self._state
        scalars = compiled.scalars_of(course.program)
        replaced = [(tensor._storage, array) for tensor, array in call.replaced if tensor._storage is not None]
        keys = course.program.random_keys if course.begins else ()

        def before(fed: dict[Value, Array]) -> None:
            for index, (storage, array) in enumerate(replaced):
                replaced[index] = (storage, storage.array().copy())
                storage.write(array)
            if keys:
                fed.update(random.keys(keys))
            if settings is not None and state is not None:
                numbers = settings.scalars(state.time_step)
                for name, (_, array) in scalars.items():
                    array[()] = numbers[name]
                if not compiled.shares_memory:
                    fed.update(scalars.values())

        def after(succeeded: bool) -> None:
            if not succeeded:
                for storage, array in replaced:
                    storage.write(array)
                return
            if course.begins:
                random.advance()
            if settings is not None and state is not None:
                state.advance()

        accepted = functools.partial(random.prepare, keys) if keys else None
        return self._submit(course, feeds, call, passes, accepted=accepted, before=before, after=after)


def _sum_of_gradients(tensor: Tensor, users: Sequence[TrainingGraph]) -> Array | None:
    """What later linked graphs contribute to a tensor's gradient; None when one of them has yet to run its pass."""
    for graph in users:
        graph.wait()
        if not graph._has_gradients:
            return None
    parts = [part for graph in users if (part := graph._gradient(tensor)) is not None]
    return sum(parts[1:], parts[0]) if parts else np.zeros(tensor.descriptor.shape, tensor.descriptor.data_type.numpy)
