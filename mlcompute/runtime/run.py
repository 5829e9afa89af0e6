"""One call, from its arguments to its result: it is accepted, queued, and carried out when its turn has come."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.device import Executable, Profile
from mlcompute.devices.interrupts import held
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.ops.op import Array, Value
from mlcompute.optimizers.optimizer import Optimizer
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


class Run:
    """Some phases of a program on some data.

    passes      the passes run one by one it belongs to; None: it stands alone, passes run before it lose their memory
    are_arrays  all inputs are there, none has yet to be computed by a run before it
    begins_with   what is run now, where `go_on` runs the rest: parts of the phases
    executable    where it is not the program's own
    """

    __slots__ = (
        *("are_arrays", "begins_with", "call", "compiled", "executable", "inputs", "is_ahead", "job", "keys"),
        *("number", "passes", "profile", "random", "replaced", "session", "settings", "specification", "storages"),
        "targets",
    )

    def __init__(
        self,
        session: Session,
        specification: RunSpecification,
        inputs: InputData,
        call: Call,
        passes: Passes | None = None,
        *,
        are_arrays: bool = False,
        begins_with: Sequence[str] | None = None,
        executable: Executable | None = None,
    ) -> None:
        if session.unsettled:
            session.raise_unseen_error()
        compiled, program = session.compiled, specification.program
        assert compiled is not None
        if passes is not None:
            executable = passes.executable
        elif executable is None:
            executable = compiled.executable(program)
        self.session = session
        self.specification = specification
        self.inputs = inputs
        self.call = call
        self.passes = passes
        self.are_arrays = are_arrays
        self.begins_with = begins_with or specification.phases
        self.compiled = compiled
        self.storages = compiled.storages.get(program) or session.storages(program)
        self.executable = executable
        self.profile = Profile() if specification.profiles else None
        #: What the caller's memory gets: (value, memory) pairs.
        self.targets: Sequence[tuple[Value, Array]] = ()
        #: Started on this thread and not waited for: where nobody has to be told anything when it has finished.
        self.is_ahead = False
        if call.outputs_data:
            self.targets = output_targets(session, specification, call)
        elif specification.runs_ahead and call.completion_handler is None:
            self.is_ahead = not executable.can_fail or (executable.contains_failures and not call.replaced)
        #: What the storages held whose values the call replaces.
        self.replaced: list[tuple[Storage, Array]] = []
        #: What a training pass moves on: random numbers, and with an update the time step.
        self.keys: Sequence[tuple[Value, int]] = ()
        self.settings: Optimizer | None = None
        if specification.trains:
            self.random = session.random = session.random.current()
            if specification.begins:
                self.keys = program.random_keys
        if specification.updates and session.state is not None:
            session.expect_own_weights(call.method)
            self.settings = session.state.optimizer
            if not specification.synchronous and not self.is_ahead:
                # The caller may change the rate while the run is queued; what it was when it was asked for counts.
                self.settings = self.settings.frozen()

    def _copy_inputs(self) -> None:
        """The run will be queued, and the caller may reuse the memory."""
        arrays = self.inputs.items()
        self.inputs = {value: array.copy() if isinstance(array, np.ndarray) else array for value, array in arrays}
        if self.settings is not None:
            self.settings = self.settings.frozen()

    def submit(self) -> Execution:
        """Queue the run. Nothing can be refused any more; what can fail now fails in the run."""
        session, specification = self.session, self.specification
        device, is_ahead, is_synchronous = session.device, self.is_ahead, specification.synchronous
        assert device is not None
        if self.compiled.crosses_devices:
            # Runs of one device follow each other; what another one may still change must be waited for.
            for tensor in specification.program.persistent:
                state_of(tensor).wait_for_runs()
        if not is_synchronous and not is_ahead and not specification.copies:
            self._copy_inputs()
        job = Job(device.queue, self.carry_out, self.call.completion_handler)
        otherwise = None
        if is_ahead:
            self.job, otherwise = job, self._copy_inputs
        if specification.measures:
            job.measures_time, job.profile = True, self.profile
        with held:  # all of this or nothing: Ctrl-C must not leave passes that are asked for and never run
            session.inputs.remember(specification.inputs, self.inputs)
            if self.keys:
                self.random.prepare(self.keys)
            session.passes = self.passes
            if self.passes is not None:
                self.passes.queued.update(specification.phases)
            device.queue.submit(job, is_synchronous or is_ahead, session.unsettled, otherwise)
        if is_synchronous:
            job.wait()
            session.has_seen(job)
        return Execution(job)

    def carry_out(self) -> ResultState | None:
        """The run's turn has come. Its result, if it has one."""
        specification, session = self.specification, self.session
        try:
            self._compute()
        except BaseException:
            self._take_back()
            raise
        last = session.last
        result = last.finished(self.executable, specification)
        self.number = last.number
        if self.passes is not None:
            self.passes.end(specification.phases, True)
        if specification.trains:  # what counts runs moves on only when a run succeeds
            if specification.begins:
                self.random.advance()
            if self.settings is not None and session.state is not None:
                session.state.advance()
        if specification.prints:
            print(self.profile, file=sys.stderr)
        return result

    def _compute(self) -> None:
        specification, compiled, executable = self.specification, self.compiled, self.executable
        last = self.session.last
        inputs: Any = self.inputs if self.are_arrays else resolved(self.inputs)
        if self.passes is not None:
            self.passes.begin(specification.phases)
        if specification.trains:
            self._prepare_training(inputs)
        last.passes = self.passes
        if specification.begins:
            last.is_overwritten()
        if executable.bound_to is not self.storages or executable.bound_at != Storage.changes:
            compiled.bind(executable, self.storages)
        executable.feed(compiled.engine, inputs)
        try:
            completion = executable.run(self.begins_with, self.profile)
            if completion is not None:
                if self.is_ahead:
                    self.job.completion = completion
                    if executable.can_fail:
                        self.job.undo = self._undo
                else:
                    completion.wait()
        finally:
            compiled.clock.tick()
        for value, target in self.targets:
            np.copyto(target, executable.read(value))

    def go_on(self, phases: Sequence[str]) -> None:
        """Run a further part, with the same data; wait for it."""
        device = self.session.device
        assert device is not None
        job = Job(device.queue, lambda: self._carry_on(phases))
        device.queue.submit(job, True, None)
        job.wait()

    def _carry_on(self, phases: Sequence[str]) -> None:
        if self.executable.bound_to is not self.storages or self.executable.bound_at != Storage.changes:
            self.compiled.bind(self.executable, self.storages)
        try:
            completion = self.executable.run(phases, self.profile)
            if completion is not None:
                completion.wait()
        finally:
            self.compiled.clock.tick()

    def _prepare_training(self, inputs: dict[Value, Array]) -> None:
        if self.call.replaced:
            for storage, array in self.call.replaced:
                self.replaced.append((storage, storage.array().copy()))
                storage.write(array)
        if self.keys:
            inputs.update(self.random.keys(self.keys))
        numbers = self.call.scalars
        if self.settings is not None and self.session.state is not None:
            numbers = self.session.state.scalars_of(self.settings)
        if numbers is not None:
            scalars = self.compiled.scalars_of(self.specification.program)
            for name, cell in scalars.cells:
                if name in numbers:
                    cell[()] = numbers[name]
            if not self.compiled.shares_memory:
                inputs.update(scalars.arrays)

    def _take_back(self) -> None:
        """The run has failed."""
        if self.passes is not None:
            self.passes.end(self.specification.phases, False)
        for storage, array in self.replaced:
            storage.write(array)

    def _undo(self) -> None:
        """The run was taken for finished when it was started, and has failed."""
        if self.specification.begins:
            self.session.last.has_failed(self.number)
        if not self.specification.trains:
            return
        if self.specification.begins:
            self.random.retreat()
        if self.settings is not None and self.session.state is not None:
            self.session.state.retreat()


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
        if value.shape[1:] != wanted.shape[1:] and session.has_varying_inputs:
            wanted = TensorDescriptor(value.shape, data_type=wanted.data_type)
        rows = value.shape[0] if value.shape != wanted.shape else 0
        targets.append((value, write_target(buffer, wanted, who, rows)))
    if len(targets) > 1:
        names = (f"output '{name}'" for name in call.outputs_data or {})
        memory = (target for _, target in targets)
        expect_apart(dict(zip(names, memory, strict=True)), f"{definition.who}.{call.method}")
    return targets
