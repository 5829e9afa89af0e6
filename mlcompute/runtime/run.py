"""Run: a call is prepared, accepted, queued and executed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.devices.device import Completion, Executable, Profile
from mlcompute.devices.interrupts import held
from mlcompute.devices.scalars import Scalars
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.layers.arguments import flags, named
from mlcompute.ops.op import Array, Value
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.platform import RandomPasses
from mlcompute.runtime.inputs import InputData, Named, resolved
from mlcompute.runtime.job import Job
from mlcompute.runtime.passes import Passes
from mlcompute.runtime.run_result import ResultState
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import TensorDescriptor
from mlcompute.tensor_data import expect_apart, write_target

if TYPE_CHECKING:
    from mlcompute.runtime.compiled_graph import CompiledGraph
    from mlcompute.runtime.last_run import LastRun
    from mlcompute.runtime.session import Session


@dataclass(slots=True)
class Call:
    """What a caller asked for, besides the data that is fed.

    replaced   data given for tensors the optimizer updates: new values of them
    scalars    numbers the program takes besides the optimizer's
    """

    method: str
    options: ExecutionOptions
    completion_handler: GraphCompletionHandler | None = None
    outputs_data: Named | None = None
    replaced: Sequence[tuple[Storage, Array]] = ()
    scalars: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        self.options = flags(self.method, ExecutionOptions, self.options)
        if self.completion_handler is not None and not callable(self.completion_handler):
            raise TypeError(
                f"{self.method}: completion_handler must be a function, not {type(self.completion_handler).__name__}"
            )
        if self.outputs_data is not None:
            named(self.method, "outputs_data", self.outputs_data)


class Run:
    """Some phases of a program, prepared for calls of one kind: `submit` runs them on one call's data.

    It knows no session, so that a compiled graph can keep the one of its last call.

    passes      the passes run one by one it belongs to; None: it stands alone, passes run before it lose their memory
    are_arrays  all inputs are there, none has yet to be computed by a run before it
    begins_with   what is run now, where `go_on` runs the rest: parts of the phases
    executable    where it is not the program's own
    """

    __slots__ = (
        *("are_arrays", "begins_with", "call", "clock", "executable", "is_ahead", "keys", "passes", "replaced"),
        *("scalars", "specification", "storages", "targets", "updates"),
    )

    def __init__(
        self,
        session: Session,
        specification: RunSpecification,
        call: Call,
        passes: Passes | None = None,
        *,
        are_arrays: bool = False,
        begins_with: Sequence[str] | None = None,
        executable: Executable | None = None,
    ) -> None:
        compiled, program = session.current, specification.program
        if passes is not None:
            executable = passes.executable
        elif executable is None:
            executable = compiled.executable(program)
        self.specification = specification
        self.call = call
        self.passes = passes
        self.are_arrays = are_arrays
        self.begins_with = begins_with or specification.phases
        self.storages = session.storages(program)
        self.executable = executable
        #: Outputs to copy into the caller's memory: (value, memory) pairs.
        self.targets: Sequence[tuple[Value, Array]] = ()
        #: Is the run started on the caller's thread, without waiting for its end? Only without a completion handler.
        self.is_ahead = False
        if call.outputs_data:
            self.targets = output_targets(session, specification, call)
        elif specification.runs_ahead and call.completion_handler is None:
            self.is_ahead = not executable.can_fail or (executable.contains_failures and not call.replaced)
        #: The values that storages had before the call replaced them.
        self.replaced: list[tuple[Storage, Array]] = []
        #: What a training pass advances: random keys, and with an update the time step.
        self.keys = program.random_keys if specification.trains and specification.begins else ()
        self.updates = specification.updates and session.state is not None
        self.scalars = compiled.scalars_of(program)
        self.clock = compiled.clock_of(program)

    def is_current(self, compiled: CompiledGraph) -> bool:
        """Does the graph still have the memory and the program it was prepared with?"""
        program = self.specification.program
        return compiled.storages.get(program) is self.storages and compiled.executable(program) is self.executable

    def submit(self, session: Session, compiled: CompiledGraph, inputs: InputData) -> Execution:
        """Queue a run. Nothing can be refused any more; what can fail now fails in the run."""
        if session.unchecked:
            session.raise_unseen_error()
        specification, is_ahead, queue = self.specification, self.is_ahead, session.queue
        is_synchronous, settings = specification.synchronous, None
        if self.updates and session.state is not None:
            if session.has_averaged_weights:
                session.expect_own_weights(self.call.method)
            settings = session.state.optimizer
        random = session.random
        if specification.trains:
            random = session.random = random.current()
        if compiled.crosses_devices:
            # Runs of one device follow each other; what another one may still change must be waited for.
            for tensor in specification.program.persistent:
                state_of(tensor).wait_for_runs()
        data = session, compiled, inputs, settings, random
        job = Job(queue, self.carry_out, self.call.completion_handler, data)
        if not is_synchronous and not is_ahead:
            inputs = self._detach(job)
        if specification.measures:
            job.measures_time = True
            job.profile = Profile() if specification.profiles else None
        with held:  # all of this or nothing: Ctrl-C must not leave passes that are asked for and never run
            session.inputs.remember(specification.inputs, inputs)
            if self.keys:
                random.prepare(self.keys)
            session.passes = self.passes
            if self.passes is not None:
                self.passes.queued.update(specification.phases)
            otherwise = self._detach if is_ahead else None
            queue.submit(job, is_synchronous or is_ahead, session.unchecked, otherwise)
        if is_synchronous:
            job.wait()
            session.has_seen(job)
        return Execution(job)

    def _detach(self, job: Job) -> InputData:
        """Before queueing: copy inputs and settings that the caller may change before the run begins."""
        session, compiled, inputs, settings, random = job.data
        if not self.specification.copies:
            arrays = inputs.items()
            inputs = {value: array.copy() if isinstance(array, np.ndarray) else array for value, array in arrays}
        job.data = session, compiled, inputs, None if settings is None else settings.frozen(), random
        detached: InputData = inputs
        return detached

    def carry_out(self, job: Job) -> ResultState | None:
        """Carry out the run. Returns its result, if it has one."""
        specification = self.specification
        session, compiled, inputs, settings, random = job.data
        last: LastRun = session.last
        try:
            if not self.are_arrays:
                inputs = resolved(inputs)
            if self.passes is not None:
                self.passes.begin(specification.phases)
            scalars = None
            if specification.trains:
                scalars = self._prepare_training(session, compiled, inputs, settings, random)
            last.passes = self.passes
            if specification.begins:
                last.is_overwritten()
                if compiled.outgrown:
                    compiled.move()
            completion = self._compute(job, compiled, inputs, scalars)
        except BaseException:
            self._take_back()
            raise
        result = last.finished(self.executable, specification, completion)
        job.number = last.number
        if self.passes is not None:
            self.passes.end(specification.phases, True)
        if specification.trains:  # what counts runs moves on only when a run succeeds
            if specification.begins:
                random.advance()
            if settings is not None:
                session.state.advance()
        if specification.prints:
            print(job.profile, file=sys.stderr)
        return result

    def _compute(
        self, job: Job, compiled: CompiledGraph, inputs: dict[Value, Array], scalars: Scalars | None
    ) -> Completion | None:
        executable = self.executable
        if executable.bound_to is not self.storages or executable.bound_at != Storage.changes:
            compiled.bind(executable, self.storages)
        executable.feed(compiled.engine, inputs, scalars)
        try:
            completion = executable.run(self.begins_with, job.profile)
            if completion is not None:
                if self.is_ahead:
                    job.completion = completion
                    if executable.can_fail:
                        job.undo = self._undo
                else:
                    completion.wait()
        finally:
            self.clock.tick()
        for value, target in self.targets:
            np.copyto(target, executable.read(value))
        return completion

    def go_on(self, session: Session, compiled: CompiledGraph, phases: Sequence[str]) -> None:
        """Run a further part, with the same data; wait for it."""
        job = Job(session.queue, lambda _: self._carry_on(compiled, phases))
        session.queue.submit(job, True, None)
        job.wait()

    def _carry_on(self, compiled: CompiledGraph, phases: Sequence[str]) -> None:
        executable = self.executable
        if executable.bound_to is not self.storages or executable.bound_at != Storage.changes:
            compiled.bind(executable, self.storages)
        try:
            completion = executable.run(phases, None)
            if completion is not None:
                completion.wait()
        finally:
            self.clock.tick()

    def _prepare_training(
        self,
        session: Session,
        compiled: CompiledGraph,
        inputs: dict[Value, Array],
        settings: Optimizer | None,
        random: RandomPasses,
    ) -> Scalars | None:
        """Determine what a training pass depends on besides its data. Returns the scalars to send to the device."""
        for storage, array in self.call.replaced:
            self.replaced.append((storage, storage.array().copy()))
            storage.write(array)
        if self.keys:
            inputs.update(random.keys(self.keys))
        numbers = self.call.scalars
        if settings is not None and session.state is not None:
            numbers = session.state.scalars_of(settings)
        if numbers is None:
            return None
        scalars = self.scalars
        for name, cell in scalars.cells:
            if name in numbers:
                cell[()] = numbers[name]
        return None if compiled.shares_memory else scalars

    def _take_back(self) -> None:
        """The run has failed."""
        if self.passes is not None:
            self.passes.end(self.specification.phases, False)
        for storage, array in self.replaced:
            storage.write(array)

    def _undo(self, job: Job) -> None:
        """The run was taken for finished when it was started, and has failed."""
        session, _, _, settings, random = job.data
        if self.specification.begins:
            session.last.has_failed(job.number)
        if not self.specification.trains:
            return
        if self.specification.begins:
            random.retreat()
        if settings is not None:
            session.state.retreat()


def submit(
    session: Session, specification: RunSpecification, inputs: InputData, call: Call, passes: Passes | None = None
) -> Execution:
    """Prepare a run of some phases and queue it."""
    return Run(session, specification, call, passes).submit(session, session.current, inputs)


def output_targets(session: Session, specification: RunSpecification, call: Call) -> list[tuple[Value, Array]]:
    """(value, the caller's memory it is written to) pairs."""
    definition, program = session.definition, specification.program
    targets: list[tuple[Value, Array]] = []
    for name, buffer in (call.outputs_data or {}).items():
        who = f"{definition.who}.{call.method}: output '{name}'"
        tensor = definition.declared.output(call.method, name)
        source = definition.source_of(tensor)
        if source is not None and "gradient" not in specification.phases:
            raise DataError(f"{who} is a gradient, which this call does not compute")
        value = program.values.get(tensor) if source is None else program.gradients.get(source)
        if value is None:
            reason = "needs labels that were not given" if source is None else "has no gradient"
            raise DataError(f"{who} {reason}")
        wanted = tensor.descriptor
        if value.shape[1:] != wanted.shape[1:]:  # a varying axis, or a batch that does not come first
            wanted = TensorDescriptor(value.shape, data_type=wanted.data_type)
        rows = value.shape[0] if value.shape != wanted.shape else 0
        targets.append((value, write_target(buffer, wanted, who, rows)))
    if len(targets) > 1:
        names = (f"output '{name}'" for name in call.outputs_data or {})
        memory = (target for _, target in targets)
        expect_apart(dict(zip(names, memory, strict=True)), f"{definition.who}.{call.method}")
    return targets
