"""What `execute` and its parts do on many processes. Every process makes the same calls, with the same whole batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError, ExecutionError, ProcessError
from mlcompute.execution import Execution, has_option
from mlcompute.runtime.call_data import named_data
from mlcompute.runtime.group_step import GroupStep
from mlcompute.runtime.inputs import InputData, Named
from mlcompute.runtime.job import Job
from mlcompute.runtime.run import Call
from mlcompute.runtime.run_result import ResultState
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import write_target

if TYPE_CHECKING:
    from mlcompute.runtime.compiled_graph import CompiledGraph
    from mlcompute.runtime.group_training import GroupTraining
    from mlcompute.runtime.session import Session


def in_group(session: Session) -> GroupTraining:
    """The graph in its group."""
    session.compile_if_needed()
    assert session.in_group is not None
    return session.in_group


class GroupCall:
    """`execute` in a group, prepared for calls of one kind (see `CallCache`)."""

    __slots__ = ("_call", "_step", "specification")

    def __init__(self, step: GroupStep, specification: RunSpecification, call: Call) -> None:
        self._step, self._call, self.specification = step, call, specification

    def is_current(self, compiled: CompiledGraph) -> bool:
        """Does the group still have the memory that it was prepared with?"""
        return self._step.is_current()

    def submit(self, session: Session, compiled: CompiledGraph, inputs: InputData) -> Execution:
        """Run the step on one call's data."""
        training, step = session.in_group, self._step
        assert training is not None
        if session.unchecked:
            session.raise_unseen_error()
        if session.has_averaged_weights:
            session.expect_own_weights(self._call.method)

        def work() -> ResultState | None:
            training.pass_phases.clear()
            step.run(inputs)  # type: ignore[arg-type]  # arrays: nothing of them has yet to be computed
            return _result(training)

        return _carried_out(session, self._call, work)


def prepared(session: Session, options: ExecutionOptions) -> GroupCall | None:
    """The last whole step, for calls that ask for the same; None where there was none, or others may be lost in it."""
    training = session.in_group
    step = None if training is None or training.on_devices is not None or session.elastic else training.last_step
    if step is None or step.specification is None or not step.is_current():
        return None
    return GroupCall(step, step.specification, Call("execute", options))


def execute(session: Session, call: Call, batch: int, data: Mapping[Tensor, Any], phases: tuple[str, ...]) -> Execution:
    """One training step of the whole group."""
    training = in_group(session)
    if "update" in phases:
        session.expect_own_weights(call.method)

    def work() -> ResultState | None:
        training.pass_phases = set()
        while True:
            start = session.random.current().count
            try:
                if training.on_devices is not None and "update" in phases and not session.elastic:
                    training.under_way = training.on_devices.run(call, batch, data)
                    return _result(training)
                if session.elastic:
                    training.remember()
                step = training.step(batch, session.sizes_of(data), phases)
                if step is not None:
                    step.run(step.collect(call, data))
                    return _result(training)
                training.run_passes(call, batch, data, "slice", tuple(phase for phase in phases if phase != "update"))
                if "gradient" in phases:
                    training.finish(updates="update" in phases, is_whole_step=True)
                return _result(training)
            except ProcessError as error:
                if not (session.elastic and error.is_lost):
                    raise
                session.random.move_to(start)
                if training.go_on():  # others had finished the step
                    return _result(training)

    return _carried_out(session, call, work)


def execute_forward(session: Session, call: Call, batch: int) -> Execution:
    """The forward pass by itself."""
    training = in_group(session)

    def work() -> ResultState | None:
        training.slices.passes, training.pass_phases = {}, set()
        training.run_passes(call, batch, {}, "phases", ("forward",))
        training.results.exchange_statistics()
        training.pass_phases = {"forward"}
        return _result(training)

    return _carried_out(session, call, work)


def execute_gradient(session: Session, call: Call, batch_size: int) -> Execution:
    """The gradient pass by itself, after a forward pass."""
    training = in_group(session)
    _expect(training, "forward", call.method)
    if batch_size not in (0, training.batch):
        raise ExecutionError(
            f"TrainingGraph.{call.method}: batch_size is {batch_size}, the forward pass ran {training.batch}"
        )

    def work() -> None:
        training.run_passes(call, training.batch, {}, "phases", ("gradient",))
        training.pass_phases |= {"gradient"}
        training.results.gradients_changed()

    return _carried_out(session, call, work)


def execute_forward_and_gradient(
    session: Session, call: Call, batch: int, given: Sequence[Named | None], sums: tuple[float, bool] | None
) -> Execution:
    """Both passes; gradients of several batches are added up where `sums` says so (see `runtime.calls`)."""
    training = in_group(session)
    data = named_data(session, call.method, *given)
    factor, goes_on = sums or (1.0, False)

    def work() -> ResultState | None:
        training.slices.passes = {}
        training.run_passes(call, batch, data, "phases", goes_on=goes_on, factor=factor)
        training.results.exchange_statistics()
        training.pass_phases = {"forward", "gradient"}
        training.results.gradients_changed()
        return _result(training)

    return _carried_out(session, call, work)


def execute_optimizer_update(session: Session, call: Call) -> Execution:
    """The update, of gradients that are exchanged now."""
    training = in_group(session)
    if session.state is None:
        raise ExecutionError(f"TrainingGraph.{call.method}: the graph has no optimizer", fix="call compile_optimizer")
    _expect(training, "gradient", call.method)
    session.expect_own_weights(call.method)
    return _carried_out(session, call, training.finish_passes)


def _expect(training: GroupTraining, needed: str, method: str) -> None:
    if needed not in training.pass_phases:
        raise ExecutionError(
            f"TrainingGraph.{method}: no {needed} pass was run",
            fix=f"call execute_{needed} before it, with no other run of the graph in between",
        )


def _result(training: GroupTraining) -> ResultState | None:
    """What the step gives: the loss of the whole batch."""
    tensor, last = training.request.result, training.session.last
    if tensor is None:
        return None
    result = ResultState(tensor, weakref.ref(last))
    result.kept = training.results.later(tensor)
    return result


def _carried_out(session: Session, call: Call, work: Callable[[], ResultState | None]) -> Execution:
    """Run it now, on this thread: the order of calls must be the same on all processes, which hear of errors."""
    training = session.in_group
    assert training is not None

    def told(_: Job) -> ResultState | None:
        training.has_begun, training.under_way = False, None
        try:
            result = work()
            if call.outputs_data:
                _write_outputs(training, call, call.outputs_data)
        except ProcessError:
            raise
        except Exception as error:
            if training.has_begun:  # else nothing has happened, and another call may follow
                training.exchange.abort(f"rank {training.group.rank} failed: {type(error).__name__}: {error}")
            raise
        return result

    job = Job(session.queue, told, call.completion_handler)
    job.measures_time = has_option(call.options, ExecutionOptions.PROFILING)
    job.run()
    job.is_done = True
    job.raise_error()
    if training.under_way is not None:
        job.completion = training.under_way
        session.unchecked.append(job)
    return Execution(job)


def _write_outputs(training: GroupTraining, call: Call, outputs: Named) -> None:
    """Values of the whole batch into the caller's memory."""
    session = training.session
    definition = session.definition
    who = f"{definition.who}.{call.method}"
    for name, buffer in outputs.items():
        tensor = definition.declared.output(call.method, name)
        values = session.fetch(tensor)
        if values is None:
            raise DataError(f"{who}: output '{name}' is not computed by this call")
        rows = values.shape[0] if values.shape != tensor.descriptor.shape else 0
        np.copyto(write_target(buffer, tensor.descriptor, f"{who}: output '{name}'", rows), values)
