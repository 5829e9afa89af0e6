"""What training and inference graphs share: declared inputs and outputs, programs per batch size, feeding, running."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler import Description, compile_program
from mlcompute.compiler.program import Program
from mlcompute.devices.device import Executable, Profile
from mlcompute.enums import DataType, DeviceType, ExecutionOptions, GraphCompilationOptions
from mlcompute.errors import CompileError, DataError, DeviceError, ExecutionError, GraphError, ShapeError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.graph import Graph, Node
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.ops.op import Array, Value
from mlcompute.platform import stream
from mlcompute.tensor import Tensor, moments
from mlcompute.tensor_data import ArrayLike, read_array, write_target

if TYPE_CHECKING:
    from mlcompute.device import Device

#: Data by the names given to add_inputs or add_outputs.
Named = Mapping[str, ArrayLike]

_runs = itertools.count(1)

#: Under this name the lengths of variable-length sequences are fed, whether declared or not.
SEQUENCE_LENGTHS = "sortedSequenceLength"


class CompiledGraph(Graph):
    """Base of TrainingGraph and InferenceGraph: a graph over other graphs that can be compiled and run."""

    def __init__(self, graph_objects: Sequence[Graph] = ()) -> None:
        super().__init__()
        for graph in graph_objects:
            if not isinstance(graph, Graph):
                raise TypeError(f"{self._who}: graph_objects must be Graphs, not {type(graph).__name__}")
        self._graphs = list(graph_objects)
        self._inputs: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        self._label_weights: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._links: list[CompiledGraph] = [self]
        self._options = GraphCompilationOptions.NONE
        self._device: Device | None = None
        self._constants: dict[Tensor, Array] = {}
        self._description: Description | None = None
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self._executables: dict[Program, Executable] = {}
        self._bindings: dict[Program, dict[Value, Array]] = {}
        self._arena: Any = None
        self._arena_size = 0
        #: What the last runs were fed, and when: SKIP_WRITING_INPUT_DATA_TO_DEVICE uses it again.
        self._fed: dict[Tensor, tuple[int, Array]] = {}
        self._last: Execution | None = None
        self._current: Executable | None = None
        self.last_run = 0
        self._random_key: tuple[int, int] | None = None
        self._random_passes = 0

    # Structure ------------------------------------------------------------------------------------------------

    def _all_nodes(self) -> list[Node]:
        nodes = {node: None for graph in self._graphs for node in graph._all_nodes()}
        nodes.update(dict.fromkeys(self._nodes))
        # Sources always exist before their consumers, so creation order is an order of execution.
        return sorted(nodes, key=lambda node: node.order)

    def _find(self, layer: Layer) -> Node | None:
        for graph in self._graphs:
            node = graph._find(layer)
            if node is not None:
                return node
        return self._node_of.get(layer)

    def _add(self, layer: Layer, sources: list[Tensor], labels: list[Tensor], updates: bool) -> list[Tensor]:
        results = super()._add(layer, sources, labels, updates)
        self._outdate()
        return results

    @property
    def device(self) -> Device | None:
        """The device the graph was compiled for; None before."""
        return self._device

    def add_inputs(
        self,
        inputs: Mapping[str, Tensor],
        loss_labels: Mapping[str, Tensor] | None = None,
        loss_label_weights: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Name the tensors fed at every run: inputs, labels and label weights. Further calls add to them."""
        declared = (
            ("inputs", self._inputs, inputs or {}),
            ("loss_labels", self._labels, loss_labels or {}),
            ("loss_label_weights", self._label_weights, loss_label_weights or {}),
        )
        for kind, _, given in declared:
            self._check_tensors(f"add_inputs ({kind})", given)
        for _, known, given in declared:
            known.update(given)
        self._outdate()
        return True

    def add_outputs(self, outputs: Mapping[str, Tensor]) -> bool:
        """Name tensors whose values are wanted after a run: they stay readable and can be written to buffers."""
        self._check_tensors("add_outputs", outputs)
        self._outputs.update(outputs)
        self._outdate()
        return True

    def _check_tensors(self, method: str, given: Mapping[str, Tensor]) -> None:
        for name, tensor in given.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(f"{self._who}.{method}: needs names and Tensors, not {name!r}: {type(tensor).__name__}")

    # Compiling ------------------------------------------------------------------------------------------------

    def compile(
        self,
        *,
        options: GraphCompilationOptions = GraphCompilationOptions.NONE,
        device: Device,
        input_tensors: Mapping[str, Tensor] | None = None,
        input_tensors_data: Named | None = None,
    ) -> bool:
        """Turn the graph into programs for a device. Needed before anything can run; may be repeated.

        input_tensors, input_tensors_data   inputs that are constant, with their data: folded in, never fed again
        """
        from mlcompute.device import Device as DeviceClass

        if not isinstance(device, DeviceClass):
            raise TypeError(f"{self._who}.compile: device must be a Device, not {type(device).__name__}")
        if device.actual_device_type == DeviceType.ANE and self._trains:
            raise DeviceError(f"{self._who}.compile: the ANE runs inference graphs only")
        if not self._all_nodes():
            raise CompileError(f"{self._who}.compile: the graph has no layers", fix="add layers with node() first")
        constants: dict[Tensor, Array] = {}
        for name, tensor in (input_tensors or {}).items():
            if name in (input_tensors_data or {}):
                data = (input_tensors_data or {})[name]
                constants[tensor] = read_array(data, tensor.descriptor, f"'{name}'").copy()
        self.wait()
        before = (self._options, self._device, self._constants, self._description)
        self._options, self._device, self._constants = GraphCompilationOptions(options), device, constants
        self._outdate()
        try:
            self._compile_if_needed(at_compile=True)
        except Exception:
            self._options, self._device, self._constants, self._description = before
            raise
        for layer in self.layers:
            layer._device_type = device.actual_device_type
        return True

    #: Does the graph have gradient and update phases?
    _trains = False
    #: The style whose memory `device_memory_size` speaks of right after compile.
    _main_style = "inference"

    def _outdate(self) -> None:
        """Something the programs depend on has changed: compile again before the next run."""
        self._description = None

    def _compile_if_needed(self, at_compile: bool = False) -> Description:
        if self._device is None:
            raise ExecutionError(f"{self._who}: the graph is not compiled", fix="call compile(device=...) first")
        if self._description is None:
            self.wait()
            description = self._describe()
            self._programs.clear()
            self._executables.clear()
            self._bindings.clear()
            self._current = None
            self._arena, self._arena_size = None, 0
            for node in description.nodes:
                self._check_parameters(node.layer)
            self._description = description
            if not (at_compile and self._waits_for_labels()):
                try:
                    self._program(self._main_style, description.batch_size)
                except Exception:
                    self._description = None
                    raise
            for tensor in self._resident_tensors(description):
                tensor._reside(self)
                tensor._device = self._device
        return self._description

    def _waits_for_labels(self) -> bool:
        """Compiled before add_inputs: the loss cannot be built yet."""
        return False

    def _resident_tensors(self, description: Description) -> set[Tensor]:
        tensors = {result for node in description.nodes for result in node.results}
        for node in description.nodes:
            tensors.update(slot.tensor for slot in node.layer.parameters.values())
            tensors.update(node.layer.statistics.values())
            tensors.update(source for source in node.sources if source._host is not None)
        return tensors

    def _check_parameters(self, layer: Layer) -> None:
        slots = {name: slot.tensor for name, slot in layer.parameters.items()} | layer.statistics
        for name, tensor in slots.items():
            if tensor._host is None:
                raise CompileError(
                    f"{layer.who}: {name} has no data",
                    tensor=repr(tensor),
                    fix="create it with data, fill_with_data or random_initializer_type",
                )

    def _describe(self) -> Description:
        """What to compile, from what was declared. Subclasses add what they know."""
        description = Description(nodes=self._all_nodes(), constants=self._constants)
        produced = {result for node in description.nodes for result in node.results}
        declared = dict.fromkeys([*self._inputs.values(), *self._labels.values(), *self._label_weights.values()])
        used = dict.fromkeys(t for node in description.nodes for t in (*node.sources, *node.labels))
        for tensor in used:
            # What nobody computes and nobody gave data to must be fed, declared or not.
            if tensor not in produced and tensor._host is None:
                declared.setdefault(tensor)
        inputs = [t for t in declared if t not in produced and t not in self._constants and t not in self._kept_inputs()]
        description.batch_size = self._batch_extent(inputs)
        axes = self._source_axes(description.nodes)
        for tensor in inputs:
            extent, batch = tensor.descriptor.shape[0], description.batch_size
            scales = extent % batch == 0 and all(axis == 0 for axis in axes.get(tensor, {0}))
            description.inputs[tensor] = extent // batch if scales else 0
        description.label_weights = self._weights_by_layer(description.nodes)
        description.kept = list(self._outputs.values())
        result = self._result_tensor(description.nodes)
        if result is not None:
            description.kept.append(result)
        debugs = GraphCompilationOptions.DEBUG_LAYERS in self._options
        if debugs:
            description.debugged = [
                tensor
                for node in description.nodes
                if node.layer.is_debugging_enabled
                for tensor in (*node.results, *node.sources)
            ]
        description.fuses = not debugs and GraphCompilationOptions.DISABLE_LAYER_FUSION not in self._options
        for name, tensor in self._outputs.items():
            if tensor not in produced and tensor not in description.inputs:
                raise GraphError(f"{self._who}: output '{name}' is computed by no layer of the graph")
        return description

    def _kept_inputs(self) -> set[Tensor]:
        """Inputs that live on between runs because an optimizer updates them."""
        return set()

    def _batch_extent(self, inputs: list[Tensor]) -> int:
        named = [tensor for tensor in self._inputs.values() if tensor in inputs]
        return (named or inputs)[0].descriptor.shape[0] if inputs else 1

    @staticmethod
    def _source_axes(nodes: list[Node]) -> dict[Tensor, set[int]]:
        axes: dict[Tensor, set[int]] = {}
        for node in nodes:
            for index, tensor in enumerate(node.sources):
                axes.setdefault(tensor, set()).add(node.layer.source_batch_axis(index, len(node.sources)))
        return axes

    def _weights_by_layer(self, nodes: list[Node]) -> dict[Layer, Tensor]:
        """Which tensor weighs the labels of which loss: its own, or the one declared for the only loss."""
        losses = [node.layer for node in nodes if isinstance(node.layer, LossLayer)]
        weights: dict[Layer, Tensor] = {loss: loss.weights for loss in losses if loss.weights is not None}
        spare = [tensor for tensor in self._label_weights.values() if tensor not in weights.values()]
        without = [loss for loss in losses if loss not in weights]
        if spare and len(spare) != len(without):
            raise GraphError(
                f"{self._who}: {len(spare)} label weights were declared for {len(without)} losses without weights"
            )
        weights.update(zip(without, spare, strict=False))
        return weights

    def _result_tensor(self, nodes: list[Node]) -> Tensor | None:
        """What a run answers: the last loss if there is one, else the last layer's first result."""
        losses = [node for node in nodes if isinstance(node.layer, LossLayer)]
        return (losses or nodes)[-1].results[0] if nodes else None

    # Programs and memory ----------------------------------------------------------------------------------------

    def _program(self, style: str, batch_size: int, with_losses: bool = True) -> Program:
        """The program for a style and batch size, compiled at its first use."""
        description = self._description
        assert description is not None and self._device is not None
        key = (style, batch_size, with_losses)
        if key not in self._programs:
            full = None
            if batch_size != description.batch_size:
                full = self._program(style, description.batch_size, with_losses)
            wanted = description if with_losses else self._without_losses(description)
            self._programs[key] = compile_program(wanted, self._device.engine, style, batch_size, full)
            self._debug(self._programs[key])
            if self._programs[key].plan.nbytes > self._arena_size:
                # Programs of one graph never run at the same time: the largest plan is enough for all of them.
                self.wait()
                self._arena_size = self._programs[key].plan.nbytes
                self._arena = None
                self._executables.clear()
                self._current = None
        return self._programs[key]

    def _without_losses(self, description: Description) -> Description:
        """The same graph up to the predictions, for runs without labels."""
        dropped: set[Tensor] = set()
        nodes = []
        for node in description.nodes:
            if isinstance(node.layer, LossLayer) or any(source in dropped for source in node.sources):
                dropped.update(node.results)
            else:
                nodes.append(node)
        labels = {t for node in description.nodes for t in node.labels} | set(description.label_weights.values())
        used = {t for node in nodes for t in node.sources}
        result = self._result_tensor(nodes)
        return Description(
            nodes=nodes,
            batch_size=description.batch_size,
            inputs={t: s for t, s in description.inputs.items() if t in used or t not in labels},
            constants=description.constants,
            kept=[t for t in description.kept if t not in dropped] + ([result] if result is not None else []),
            debugged=[t for t in description.debugged if t not in dropped],
            fuses=description.fuses,
        )

    @staticmethod
    def _debug(program: Program) -> None:
        wanted = os.environ.get("MLC_DEBUG", "").split(",")
        if "steps" in wanted:
            print(program, file=sys.stderr)
        if "plan" in wanted:
            print(program.plan, file=sys.stderr)

    def _executable(self, program: Program) -> Executable:
        if program not in self._executables:
            assert self._device is not None
            if self._arena is None:
                self._arena = self._device.engine.allocate(self._arena_size)
            self._executables[program] = self._device.engine.build(program, self._arena)
        return self._executables[program]

    @property
    def device_memory_size(self) -> int:
        """Bytes the device needs beyond parameters and fed data: intermediate results, gradients, optimizer state.

        Exact and known after compile; 0 before. It is what `execute` takes; running the passes one by one keeps
        every gradient readable and may take more from the first such run on.
        """
        if self._device is None:
            return 0
        self._compile_if_needed()
        return self._arena_size + self._state_bytes()

    def _state_bytes(self) -> int:
        return 0

    @property
    def programs(self) -> dict[str, Program]:
        """The compiled programs so far, by style and batch size. `print` one to read its steps and memory."""
        return {f"{style} {batch}": program for (style, batch, _), program in self._programs.items()}

    # Running --------------------------------------------------------------------------------------------------

    def _batch(self, batch_size: int, method: str) -> int:
        description = self._compile_if_needed()
        full = description.batch_size
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)):
            raise TypeError(f"{self._who}.{method}: batch_size must be a whole number, not {batch_size!r}")
        if not 0 <= batch_size <= full:
            raise ShapeError(
                f"{self._who}.{method}: batch_size is {batch_size}, the graph was built for {full}",
                expected=f"0 (the tensors' own) or 1 to {full}",
            )
        if batch_size in (0, full):
            return full
        fixed = [
            tensor
            for tensor, scale in description.inputs.items()
            if scale == 0 and tensor.descriptor.shape[0] != 1 and tensor in self._inputs.values()
            and all(axis == 0 for axis in self._source_axes(description.nodes).get(tensor, {0}))
        ]  # fmt: skip
        if fixed:
            raise ShapeError(
                f"{self._who}.{method}: batch_size is {batch_size}, but input {fixed[0]!r} does not share the batch axis",
                fix="pass batch_size=0 for graphs whose inputs have different first extents",
            )
        return int(batch_size)

    def _named_data(self, method: str, groups: Sequence[tuple[str, dict[str, Tensor], Named | None]]) -> dict[Tensor, Any]:
        """Data by tensor; unknown names are refused."""
        found: dict[Tensor, Any] = {}
        for kind, declared, given in groups:
            for name, data in (given or {}).items():
                if name in declared:
                    found[declared[name]] = data
                    continue
                lengths = self._lengths_tensors() if name == SEQUENCE_LENGTHS else []
                if not lengths:
                    raise DataError(
                        f"{self._who}.{method}: '{name}' is not a declared name in {kind}",
                        declared=", ".join(declared) or "none",
                        fix="declare it with add_inputs first",
                    )
                found.update(dict.fromkeys(lengths, data))
        return found

    def _lengths_tensors(self) -> list[Tensor]:
        named = {*self._inputs.values(), *self._labels.values(), *self._label_weights.values()}
        description = self._compile_if_needed()
        return [
            tensor
            for tensor in description.inputs
            if tensor not in named
            and tensor.descriptor.data_type == DataType.INT32
            and tensor.descriptor.dimension_count == 1
        ]

    def _name_of(self, tensor: Tensor) -> str:
        for names in (self._inputs, self._labels, self._label_weights):
            for name, known in names.items():
                if known is tensor:
                    return name
        return tensor.label

    def _feed(
        self, program: Program, phases: Sequence[str], data: Mapping[Tensor, Any], options: ExecutionOptions, method: str
    ) -> dict[Value, Array]:
        """Arrays for every fed value of the phases that will run."""
        skips = ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE in options
        copies = ExecutionOptions.SYNCHRONOUS not in options
        needed = {value for step in program.steps if step.phase in phases for value in step.inputs}
        feeds: dict[Value, Array] = {}
        for tensor, value in program.inputs.items():
            # An input may itself be an output; then it is needed although no step reads it.
            arrives_with = "forward" if program.values.get(tensor) is value else "gradient"
            if value not in needed and not (value in program.kept and arrives_with in phases):
                continue
            who = f"{self._who}.{method}: '{self._name_of(tensor)}'"
            rows = value.shape[0] if value.shape != tensor.descriptor.shape else 0
            if tensor in data and not skips:
                array = read_array(data[tensor], tensor.descriptor, who, rows)
                # A queued run reads its data later; the caller may reuse the memory as soon as this call returns.
                feeds[value] = array.copy() if copies else array
            else:
                feeds[value] = self._standing(tensor, value, who, skips)
            self._fed[tensor] = (next(moments), feeds[value])
        return feeds

    def _standing(self, tensor: Tensor, value: Value, who: str, skips: bool) -> Array:
        """What was fed or bound before, for runs that bring no data of their own."""
        array = tensor._bound
        when, fed = self._fed.get(tensor, (0, None))
        if skips and fed is not None and (array is None or when > tensor._bound_at):
            array = fed
        if array is None:
            array = self._linked_value(tensor)
        if array is None:
            raise DataError(
                f"{who} was not given",
                expected=repr(tensor.descriptor),
                fix="pass its data by name, or attach it with bind_and_write_data first",
            )
        if len(array.shape) != len(value.shape) or any(a < b for a, b in zip(array.shape, value.shape, strict=True)):
            raise DataError(f"{who}: the attached data has shape {array.shape}, {value.shape} is needed")
        leading = array[tuple(slice(extent) for extent in value.shape)]
        return np.ascontiguousarray(leading, dtype=value.dtype)

    def _linked_value(self, tensor: Tensor) -> Array | None:
        """The tensor's value in another graph this one is linked with."""
        return None

    def _static_bindings(self, program: Program) -> dict[Value, Array]:
        """Host memory of parameters, statistics and states; looked up anew only when some tensor was rebound."""
        if program not in self._bindings:
            writes = {*program.writes, *program.states}
            bindings: dict[Value, Array] = {}
            for tensor, value in program.persistent.items():
                if tensor._host is None:
                    raise CompileError(f"{self._who}: {tensor!r} has no data")
                if tensor in writes and not tensor._host.flags.writeable:
                    tensor._host = tensor._host.copy()
                bindings[value] = tensor._host
            for tensor, values in program.states.items():
                bindings.update(zip(values, self._states_of(tensor), strict=True))
            self._bindings[program] = bindings
        return self._bindings[program]

    def _states_of(self, tensor: Tensor) -> list[Array]:
        return []

    def _random_bindings(self, program: Program) -> dict[Value, Array]:
        """A key per random stream: (seed low, seed high, stream, pass)."""
        if self._random_key is None or self._random_key[0] != stream.restarts:
            self._random_key = (stream.restarts, stream.key())
            self._random_passes = 0
        self._random_passes += 1
        keys: dict[Value, Array] = {}
        for number, (value, seed) in enumerate(program.random_keys):
            key = seed or self._random_key[1]
            words = (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, number, self._random_passes & 0xFFFFFFFF)
            keys[value] = np.array(words, np.uint32)
        return keys

    def _submit(
        self,
        program: Program,
        phases: Sequence[str],
        feeds: dict[Value, Array],
        options: ExecutionOptions,
        completion_handler: GraphCompletionHandler | None,
        outputs_data: Named | None,
        method: str,
        finished: Callable[[bool], None] | None = None,
    ) -> Execution:
        """Queue a run of some phases; `finished` is told whether it succeeded."""
        self._raise_unseen_error()
        assert self._device is not None and self._description is not None
        executable = self._executable(program)
        targets = self._output_targets(program, outputs_data, method)
        result = self._answer(program, phases)
        measures = bool(options & (ExecutionOptions.PROFILING | ExecutionOptions.PER_LAYER_PROFILING))
        profile = Profile() if ExecutionOptions.PER_LAYER_PROFILING in options else None

        def work() -> Tensor | None:
            succeeded = False
            try:
                executable.run(phases, {**self._static_bindings(program), **feeds}, profile)
                self._current = executable
                self.last_run = next(_runs)
                for value, target in targets:
                    np.copyto(target, executable.read(value))
                succeeded = True
            finally:
                if finished is not None:
                    finished(succeeded)
            if profile is not None and "time" in os.environ.get("MLC_DEBUG", "").split(","):
                print(profile, file=sys.stderr)
            return result

        execution = Execution(
            self._device.queue,
            work,
            measures_time=measures,
            profile=profile,
            completion_handler=completion_handler,
        )
        self._last = execution
        synchronous = ExecutionOptions.SYNCHRONOUS in options
        self._device.queue.submit(execution, synchronous)
        return execution.wait() if synchronous else execution

    def _answer(self, program: Program, phases: Sequence[str]) -> Tensor | None:
        description = self._description
        if description is None or "forward" not in phases:
            return None
        nodes = [node for node in description.nodes if all(result in program.values for result in node.results)]
        return self._result_tensor(nodes)

    def _output_targets(
        self, program: Program, outputs_data: Named | None, method: str
    ) -> list[tuple[Value, Array]]:
        targets: list[tuple[Value, Array]] = []
        for name, buffer in (outputs_data or {}).items():
            if name not in self._outputs:
                raise DataError(
                    f"{self._who}.{method}: '{name}' is not a declared output",
                    declared=", ".join(self._outputs) or "none",
                    fix="declare it with add_outputs before compiling",
                )
            tensor = self._outputs[name]
            if tensor not in program.values:
                raise DataError(f"{self._who}.{method}: output '{name}' needs labels that were not given")
            value = program.values[tensor]
            rows = value.shape[0] if value.shape != tensor.descriptor.shape else 0
            target = write_target(buffer, tensor.descriptor, f"{self._who}.{method}: output '{name}'", rows)
            targets.append((value, target))
        return targets

    def _raise_unseen_error(self) -> None:
        last = self._last
        if last is not None and last.is_done and last._error is not None and not last.error_was_seen:
            last.raise_error()

    # Resident (see mlcompute.tensor) ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Return when all queued runs of this graph have finished; raises an error nobody has seen yet."""
        if self._last is not None:
            self._last.join()
            self._raise_unseen_error()

    def fetch(self, tensor: Tensor) -> Array | None:
        """The value a result tensor had in the last run; None when that run did not keep it."""
        if self._current is None:
            return None
        value = self._current.program.values.get(tensor)
        if value is None or value not in self._current.program.kept or tensor in self._current.program.persistent:
            return None
        return self._current.read(value)

    def rebound(self, tensor: Tensor) -> None:
        """A parameter has got other memory: look it up again before the next run."""
        self._bindings.clear()
