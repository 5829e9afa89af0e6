"""Compiled graphs: what training and inference graphs share of compiling, feeding and queueing runs."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.collector import collector_paused
from mlcompute.compiler import Description
from mlcompute.compiler.program import Program
from mlcompute.described import DescribedGraph
from mlcompute.devices.device import Executable, Profile
from mlcompute.enums import DeviceType, ExecutionOptions, GraphCompilationOptions
from mlcompute.errors import CompileError, DataError, DeviceError, ExecutionError, GraphError, ShapeError
from mlcompute.execution import Execution, GraphCompletionHandler, asks
from mlcompute.feeding import Again, Feeding, Feeds, Named, resolved
from mlcompute.graph import Graph, Node
from mlcompute.interrupts import held
from mlcompute.ops.op import Array, Value, overwritten_by
from mlcompute.passes import Passes
from mlcompute.programs import Course, Programs, rows_per_sample
from mlcompute.run_result import RunResult
from mlcompute.runtime.storage import Storage
from mlcompute.seeing.profiled import Profiled
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import expect_apart, read_array, write_target

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.device import Device

_runs = itertools.count(1)


@dataclass(slots=True)
class Call:
    """What a caller asked for, besides the data that is fed.

    replaced   data given for tensors the optimizer updates: new values of them
    """

    method: str
    options: ExecutionOptions
    completion_handler: GraphCompletionHandler | None = None
    outputs_data: Named | None = None
    replaced: Sequence[tuple[Tensor, Array]] = ()


class CompiledGraph(Profiled, DescribedGraph):
    """Base of TrainingGraph and InferenceGraph: a described graph that can be compiled and run."""

    #: Does the graph have gradient and update phases?
    _trains = False
    #: The style whose memory `device_memory_size` speaks of right after compile.
    _main_style = "inference"

    def __init__(self, graph_objects: Sequence[Graph] = ()) -> None:
        super().__init__(graph_objects)
        self._has_not_run()

    def _has_not_run(self) -> None:
        super()._has_not_run()
        self._total = None
        #: None when there is nothing compiled, or something it depends on has changed since.
        self._compiled: Programs | None = None
        self._feeding = Feeding(self._linked)
        #: Runs that may still fail, or whose failure nobody may have seen.
        self._unsettled: deque[Execution] = deque()
        self._settling = threading.Lock()
        #: What ran last: the values of this run can be read.
        self._current: Executable | None = None
        #: The result of that run, whose values lie in the graph's memory. Held weakly: only what somebody may still
        #: read is copied before the next run.
        self._latest: weakref.ref[RunResult] | None = None
        self._latest_value: Value | None = None
        self._keeping = threading.Lock()
        #: The passes run one by one that were last asked for, and those that last ran; None: some other run.
        self._asked: Passes | None = None
        self._ran: Passes | None = None
        self.last_run = 0

    def __copy__(self) -> Self:
        """A graph of its own over the same weights, with the same names; it is compiled when it is first run.

        A training graph shares its optimizer, and so moments and step count, with its copy.
        """
        self.wait()
        return super().__copy__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same graph with weights, and of a training graph optimizer and state, of its own."""
        self.wait()
        return super().__deepcopy__(memo)

    @property
    def device(self) -> Device | None:
        """The device the graph was compiled for; None before."""
        return self._device

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
        from mlcompute.device import expect_device

        expect_device(f"{self._who}.compile", "device", device)
        if device.actual_device_type == DeviceType.ANE and self._trains:
            raise DeviceError(f"{self._who}.compile: the ANE runs inference graphs only")
        if not self._all_nodes():
            raise CompileError(f"{self._who}.compile: the graph has no layers", fix="add layers with node() first")
        self._declared.check("compile (input_tensors)", input_tensors or {})
        self._check_links(self._links, GraphCompilationOptions(options))
        for graph in self._links:
            if graph is not self and graph._device is not None and graph._device.engine.name != device.engine.name:
                raise GraphError(
                    f"{self._who}.compile: it is linked with a graph that was compiled for another device",
                    devices=f"{device!r} here, {graph._device!r} there",
                    fix="compile linked graphs for one device",
                )
        constants = {
            tensor: read_array((input_tensors_data or {})[name], tensor.descriptor, f"'{name}'").copy()
            for name, tensor in (input_tensors or {}).items()
            if name in (input_tensors_data or {})
        }
        self.wait()
        before = (self._device, self._options, self._constants)
        self._device, self._options, self._constants = device, GraphCompilationOptions(options), constants
        try:
            self._compile(builds=True)
        except BaseException:  # Ctrl-C too
            self._device, self._options, self._constants = before
            raise
        for layer in self.layers:
            layer._device_type = device.actual_device_type
        return True

    def outdated(self) -> None:
        """Something the programs depend on has changed: compile again before the next run."""
        self._compiled = None

    def _compile_if_needed(self) -> Description:
        if self._device is None:
            raise ExecutionError(f"{self._who}: the graph is not compiled", fix="call compile(device=...) first")
        if self._compiled is not None and self._compiled.newest_node != Node.newest:
            # Some graph has got a node; is it one of those this one is made of, or linked with?
            if self._compiled.size == self._linked_size():
                self._compiled.newest_node = Node.newest
            else:
                self._compiled = None
        if self._compiled is None:
            self._compile()
        assert self._compiled is not None
        return self._compiled.description

    def _linked_size(self) -> int:
        return sum(graph._size() for graph in self._links)

    @collector_paused()
    def _compile(self, *, builds: bool = False) -> None:
        """Describe and compile the graph; when that fails, everything stays as it was.

        builds  make kernels and memory, too, instead of when a run first needs them
        """
        assert self._device is not None
        size = self._linked_size()
        description = self._describe()
        compiled = Programs(description, self._device.engine, size)
        compiled.unbatched = self._unbatched(description)
        if not self._waits_for_labels():
            program = compiled.get(self._main_style, description.batch_size)
            if builds:
                compiled.executable(program)
        self._adopt(compiled)

    def _adopt(self, compiled: Programs) -> None:
        self._compiled = compiled
        self._asked = None
        for tensor in self._resident_tensors(compiled.description):
            if tensor.keeps_data:
                self._look_for_other_devices(tensor, compiled)
            tensor._reside(self)
            tensor._device = self._device

    def _look_for_other_devices(self, tensor: Tensor, compiled: Programs) -> None:
        """Runs on several devices that share a tensor must wait for each other."""
        for other in tensor._residents or ():
            others = other._compiled if isinstance(other, CompiledGraph) else None
            if others is not None and others.engine.name != compiled.engine.name:
                compiled.crosses_devices = others.crosses_devices = True

    def _resident_tensors(self, description: Description) -> set[Tensor]:
        tensors = {result for node in description.nodes for result in node.results} | {*self._declared.outputs.values()}
        if description.total is not None:
            tensors.add(description.total)
        for node in description.nodes:
            tensors.update(slot.tensor for slot in node.layer.parameters.values())
            tensors.update(node.layer.statistics.values())
            tensors.update(source for source in node.sources if source.keeps_data)
        return tensors

    # Programs and memory ----------------------------------------------------------------------------------------

    def _program(self, style: str, batch_size: int, with_losses: bool = True) -> Program:
        """The program for a style and batch size, compiled at its first use."""
        assert self._compiled is not None
        return self._compiled.get(style, batch_size, with_losses)

    @property
    def device_memory_size(self) -> int:
        """Bytes the device needs beyond parameters and fed data: intermediate results, gradients, optimizer state.

        Exact and known after compile; 0 before. It is what `execute` takes; running the passes one by one keeps
        every gradient readable and may take more from the first such run on.
        """
        if self._device is None:
            return 0
        self._compile_if_needed()
        assert self._compiled is not None
        return self._compiled.arena_size + self._state_bytes()

    def _state_bytes(self) -> int:
        return 0

    @property
    def programs(self) -> dict[str, Program]:
        """The compiled programs so far, by style and batch size. `print` one to read its steps, kernels and memory."""
        return {} if self._compiled is None else self._compiled.by_name()

    # Data -----------------------------------------------------------------------------------------------------

    def _batch(self, batch_size: int, method: str) -> int:
        description = self._compile_if_needed()
        full = description.batch_size
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)):
            raise TypeError(f"{self._who}.{method}: batch_size must be a whole number, not {batch_size!r}")
        if batch_size in (0, full):
            return full
        if batch_size < 0:
            raise ShapeError(
                f"{self._who}.{method}: batch_size is {batch_size}",
                expected=f"0 (the tensors' own, {full}) or the number of samples",
            )
        assert self._compiled is not None
        fixed = next((tensor for tensor, array in self._constants.items() if array.shape[0] == full > 1), None)
        if batch_size > full and fixed is not None and fixed not in description.shared:
            raise ShapeError(
                f"{self._who}.{method}: batch_size is {batch_size}, but '{self._name_of(fixed)}' was compiled as a "
                f"constant of {full} samples",
                fix=f"run at most {full} samples, or compile it again with more",
            )
        if self._compiled.unbatched is not None:
            raise ShapeError(
                f"{self._who}.{method}: batch_size is {batch_size}, "
                f"but {self._compiled.unbatched!r} does not share the batch axis",
                fix="pass batch_size=0 for graphs whose inputs have different first extents",
            )
        return int(batch_size)

    def _named_data(
        self, method: str, inputs: Named | None, labels: Named | None, weights: Named | None
    ) -> dict[Tensor, Any]:
        """Data by tensor; unknown names are refused."""
        found = self._declared.find(method, inputs, labels, weights, self._lengths_tensors())
        for tensor in self._constants:
            if tensor in found:
                self._check_constant(tensor, found[tensor], method)
        return found

    def _check_constant(self, tensor: Tensor, data: Any, method: str) -> None:
        who = f"{self._who}.{method}: '{self._name_of(tensor)}'"
        if not np.array_equal(read_array(data, tensor.descriptor, who), self._constants[tensor]):
            raise DataError(f"{who} was compiled as a constant and cannot be fed other data", fix="compile it again")

    def _rows_per_sample(self, tensor: Tensor) -> int:
        if self._compiled is None or tensor.keeps_data:
            return super()._rows_per_sample(tensor)
        return rows_per_sample(tensor, self._compiled.description)

    def _lengths_tensors(self) -> list[Tensor]:
        """Where variable-length recurrent layers read the lengths of their sequences."""
        assert self._compiled is not None
        return self._compiled.lengths

    def _name_of(self, tensor: Tensor) -> str:
        return self._declared.name_of(tensor)

    def _feed(self, course: Course, data: Mapping[Tensor, Any], method: str, copies: bool | None = None) -> Feeds:
        """Something for every input of the phases that will run.

        copies  by default when the run is queued: the caller may reuse the memory as soon as the call returns
        """
        assert self._compiled is not None
        spelled = self._compiled.spelled

        def who(tensor: Tensor) -> str:
            if (method, tensor) not in spelled:
                spelled[method, tensor] = f"{self._who}.{method}: '{self._name_of(tensor)}'"
            return spelled[method, tensor]

        copies = not course.synchronous if copies is None else copies
        return self._feeding.collect(course.fed, data, who, skips=course.skips, copies=copies)

    def _has_labels(self, data: Mapping[Tensor, Any], options: ExecutionOptions) -> bool:
        """Can the losses be computed in a run in inference mode?"""
        skips = asks(options, ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE)
        assert self._compiled is not None
        return not self._waits_for_labels() and all(
            label in self._constants or self._feeding.has(label, data, skips) for label in self._compiled.labels
        )

    def _linked(self, tensor: Tensor) -> Callable[[], Array | None] | None:
        """How to get a tensor that another graph, linked with this one, computes; None when none does."""
        return None

    def _storages(self, program: Program) -> dict[Value, Storage]:
        """Where parameters, statistics and states lie; looked up anew only when some tensor was rebound."""
        assert self._compiled is not None
        known = self._compiled.storages
        if program not in known:
            storages: dict[Value, Storage] = {}
            for tensor, value in program.persistent.items():
                if tensor._storage is None:
                    raise CompileError(f"{self._who}: {tensor!r} has no data")
                storages[value] = tensor._storage
            for tensor, values in program.states.items():
                storages.update(zip(values, self._states_of(tensor), strict=True))
            overwritten = {value for step in program.steps for value in overwritten_by(step)}
            for value, storage in storages.items():
                if value in overwritten:
                    storage.overwritten_by(self._compiled.clock)
            known[program] = storages
        return known[program]

    def _states_of(self, tensor: Tensor) -> list[Storage]:
        return []

    # Running --------------------------------------------------------------------------------------------------

    def _asked_for(self, call: Call, batch_size: int, given: Sequence[Named | None]) -> tuple[Course, Feeds]:
        """What an `execute` runs, and on what data: inputs, labels and label weights are `given`."""
        compiled = self._compiled
        if compiled is not None and compiled.newest_node == Node.newest:
            again = compiled.again  # another thread may replace it
            feeds = None if again is None else again.feeds(call.options, batch_size, given)
            if again is not None and feeds is not None:  # a small network gains by it
                return again.course, feeds
        batch = self._batch(batch_size, call.method)
        course, feeds = self._look_up(batch, self._named_data(call.method, *given), call)
        assert self._compiled is not None
        declared = (self._declared.inputs, self._declared.labels, self._declared.label_weights)
        # Without a loss it depends on what is bound when a step runs whether it has a gradient pass.
        if self._compiled.description.minimised or not self._trains:
            self._compiled.again = Again.after(course, call.options, batch_size, given, declared)
        return course, feeds

    def _look_up(self, batch: int, data: Mapping[Tensor, Any], call: Call) -> tuple[Course, Feeds]:
        """The forward pass in inference mode; up to the predictions when there are no labels."""
        program = self._program("inference", batch, self._has_labels(data, call.options))
        assert self._compiled is not None
        course = self._compiled.course(program, ("forward",), call.options)
        return course, self._feed(course, data, call.method)

    def _submit(
        self,
        course: Course,
        feeds: Feeds,
        call: Call,
        passes: Passes | None = None,
        *,
        accepted: Callable[[], None] | None = None,
        before: Callable[[dict[Value, Array]], None] = lambda fed: None,
        after: Callable[[bool], None] = lambda succeeded: None,
    ) -> Execution:
        """Queue a run of some phases.

        passes      what the run belongs to; None: it stands alone, and passes run before it lose their memory to it
        accepted    called when nothing can be refused any more, just before the run is queued
        before      called when the run's turn has come, with what it is fed: more may be added
        after       called when the run is over: did it succeed?
        """
        self._raise_unseen_error()
        device, compiled = self._device, self._compiled
        assert device is not None
        assert compiled is not None
        program, phases = course.program, course.phases
        targets = self._output_targets(program, phases, call) if call.outputs_data else ()
        storages = self._storages(program)
        if compiled.crosses_devices:
            # Runs of one device follow each other; what another one may still change must be waited for.
            for tensor in program.persistent:
                tensor._wait()
        executable = compiled.executable(program) if passes is None else passes.executable
        profile = Profile() if course.profiles else None

        def work() -> Tensor | None:
            try:
                fed = resolved(feeds)
                if passes is not None:
                    passes.begin(phases)
                before(fed)
                self._ran = passes
                if course.begins:  # what the last run left is about to be overwritten
                    self.keep_latest_result()
                    self._current = self._latest = None
                compiled.bind(executable, storages)
                for value, array in fed.items():
                    compiled.feed(executable, value, array)
                try:
                    completion = executable.run(phases, profile)
                    if completion is not None:
                        completion.wait()
                finally:
                    compiled.clock.tick()
                for value, target in targets:
                    np.copyto(target, executable.read(value))
            except BaseException:
                finish(False)
                raise
            self._current = executable
            self.last_run = next(_runs)
            finish(True)
            if course.prints:
                print(profile, file=sys.stderr)
            if course.result is None:
                return None
            result = RunResult(course.result, weakref.ref(self))
            self._latest, self._latest_value = weakref.ref(result), course.result_value
            return result

        def finish(succeeded: bool) -> None:
            if passes is not None:
                passes.end(phases, succeeded)
            after(succeeded)

        execution = Execution(
            device.queue,
            work,
            measures_time=course.measures,
            profile=profile,
            completion_handler=call.completion_handler,
        )
        with held:  # all of this or nothing: Ctrl-C must not leave passes that are asked for and never run
            self._feeding.remember(course.fed, feeds)
            if accepted is not None:
                accepted()
            self._asked = passes
            if passes is not None:
                passes.queued.update(phases)
            device.queue.submit(execution, course.synchronous, self._unsettled)
        return execution.wait() if course.synchronous else execution

    def _output_targets(self, program: Program, phases: Sequence[str], call: Call) -> list[tuple[Value, Array]]:
        """(value, the caller's memory it is written to) pairs."""
        targets: list[tuple[Value, Array]] = []
        for name, buffer in (call.outputs_data or {}).items():
            who = f"{self._who}.{call.method}: output '{name}'"
            declared = self._declared.outputs
            if name not in declared:
                raise DataError(
                    f"{self._who}.{call.method}: '{name}' is not a declared output",
                    declared=", ".join(declared) or "none",
                    fix="declare it with add_outputs",
                )
            tensor = declared[name]
            source = self._source_of(tensor)
            if source is not None and "gradient" not in phases:
                raise DataError(f"{who} is a gradient, which this call does not compute")
            value = program.values.get(tensor) if source is None else program.gradients.get(source)
            if value is None:
                reason = "needs labels that were not given" if source is None else "has no gradient"
                raise DataError(f"{who} {reason}")
            rows = value.shape[0] if value.shape != tensor.descriptor.shape else 0
            targets.append((value, write_target(buffer, tensor.descriptor, who, rows)))
        if len(targets) > 1:
            names = (f"output '{name}'" for name in call.outputs_data or {})
            memory = (target for _, target in targets)
            expect_apart(dict(zip(names, memory, strict=True)), f"{self._who}.{call.method}")
        return targets

    def _raise_unseen_error(self) -> None:
        with self._settling:
            while self._unsettled and self._unsettled[0].is_done:
                run = self._unsettled.popleft()
                if not run.error_was_seen:
                    run.raise_error()

    # Resident (see mlcompute.tensor) ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Return when all queued runs of this graph have finished; raises an error nobody has seen yet.

        Inside a completion handler it returns at once: what the run computed can be read there.
        """
        with self._settling:
            last = self._unsettled[-1] if self._unsettled else None
        if last is not None:
            if not last.queue.is_running_here():
                last.queue.wait_for(last)
            self._raise_unseen_error()

    def computes(self, tensor: Tensor) -> bool:
        """Did the last run compute this tensor?"""
        return self._current is not None and tensor in self._current.program.values

    def fetch(self, tensor: Tensor) -> Array | None:
        """The value a result tensor had in the last run; None when that run did not keep it."""
        if self._current is None:
            return None
        program = self._current.program
        value = program.values.get(tensor)
        if value is None or value not in program.kept or tensor in program.persistent:
            return None
        return self._current.read(value)

    def keep_latest_result(self) -> None:
        """Copy what the latest run gave out of the graph's memory, if somebody holds its result."""
        if self._latest is None or self._latest() is None:
            return
        with self._keeping:  # a reader and the queue's thread may both be here
            result = self._latest() if self._latest is not None else None
            if result is not None and not result.is_kept:
                value, executable = self._latest_value, self._current
                kept = executable.read(value) if value is not None and executable is not None else self.fetch(result.of)
                result.keep(kept)

    def __del__(self) -> None:
        """Outputs somebody still holds stay readable without the graph that computed them."""
        compiled = getattr(self, "_compiled", None)
        if compiled is not None and self._current is not None and not sys.is_finalizing():
            self.keep_latest_result()
            for tensor in compiled.description.kept:
                if self.computes(tensor) and tensor._left[0] < self.last_run:
                    tensor._left = (self.last_run, self.fetch(tensor))

    def latest(self, tensor: Tensor) -> Array | None:
        """The value of a result in the last run, for a linked graph."""
        self.wait()
        return self.fetch(tensor)

    def rebound(self, tensor: Tensor) -> None:
        """A parameter has got other memory: look it up again before the next run."""
        if self._compiled is not None:
            self._compiled.storages.clear()
