"""`execute` and the separate passes: which program, which phases, on what data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlcompute.compiler.accumulate_gradients import KEEP, SHARE
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import ExecutionError
from mlcompute.execution import Execution, GraphCompletionHandler, has_option
from mlcompute.graph import Node
from mlcompute.runtime import group_calls
from mlcompute.runtime.call_data import batch_of, collect_inputs, has_labels, named_data
from mlcompute.runtime.inputs import CallCache, InputData, Named, PreparedRun
from mlcompute.runtime.passes import Passes
from mlcompute.runtime.run import Call, Run, submit
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.runtime.session import Session
from mlcompute.runtime.tensor_state import state_of, storage_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import read_array


def execute(
    session: Session,
    given: Sequence[Named | None],
    batch_size: int,
    options: ExecutionOptions,
    completion_handler: GraphCompletionHandler | None,
    outputs_data: Named | None,
) -> Execution:
    """One whole run. `given` are inputs, labels and label weights by name."""
    compiled = session.compiled
    if compiled is not None and compiled.newest_node == Node.newest and completion_handler is None and not outputs_data:
        cache = compiled.call_cache  # another thread may replace it
        inputs = None if cache is None else cache.data(options, batch_size, given)
        if cache is not None and inputs is not None and cache.run.is_current(compiled):  # a small network gains by it
            return cache.run.submit(session, compiled, inputs)
    call = Call("execute", options, completion_handler, outputs_data)
    batch = batch_of(session, batch_size, call.method)
    data = named_data(session, call.method, *given)
    is_inference = session.definition.learning is None or has_option(
        call.options, ExecutionOptions.FORWARD_FOR_INFERENCE
    )
    if session.group is not None and not is_inference:
        execution = group_calls.execute(session, call, batch, data, phases_to_execute(session))
        _remember(session, group_calls.prepared(session, options), options, batch_size, given)
        return execution
    look_up = _inference if is_inference else _training_step
    specification, inputs = look_up(session, batch, data, call)
    again = Run(session, specification, Call("execute", options), are_arrays=True)
    _remember(session, again, options, batch_size, given)
    return submit(session, specification, inputs, call)


def _remember(
    session: Session,
    run: PreparedRun | None,
    options: ExecutionOptions,
    batch_size: int,
    given: Sequence[Named | None],
) -> None:
    """Cache a call, so that calls like it need no lookups."""
    compiled, definition = session.compiled, session.definition
    # Without a loss it depends on what is bound when a step runs whether it has a gradient pass.
    if run is not None and compiled is not None and (compiled.request.minimised or definition.learning is None):
        groups = (definition.declared.inputs, definition.declared.labels, definition.declared.label_weights)
        names = [{**definition.declared.undeclared, **group} for group in groups]
        compiled.call_cache = CallCache.after(run, options, batch_size, given, names)


def _inference(
    session: Session, batch: int, data: Mapping[Tensor, Any], call: Call
) -> tuple[RunSpecification, InputData]:
    """The forward pass in inference mode; up to the predictions when there are no labels."""
    skips = has_option(call.options, ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE)
    program = session.program("inference", batch, has_labels(session, data, skips), session.sizes_of(data))
    specification = session.current.specification(program, ("forward",), call.options)
    return specification, collect_inputs(session, specification, data, call.method)


def _training_step(
    session: Session, batch: int, data: Mapping[Tensor, Any], call: Call
) -> tuple[RunSpecification, InputData]:
    phases = phases_to_execute(session)
    program = session.program("fused", batch, sizes=session.sizes_of(data))
    specification = session.current.specification(program, phases, call.options)
    inputs = collect_inputs(session, specification, data, call.method)
    # Data fed for tensors the optimizer updates replaces their values when the run's turn has come.
    call.replaced = [
        (storage_of(tensor), read_array(data[tensor], tensor.descriptor, f"'{session.name_of(tensor)}'").copy())
        for tensor in session.definition.kept_inputs()
        if tensor in data and tensor.keeps_data
    ]
    return specification, inputs


def phases_to_execute(session: Session) -> tuple[str, ...]:
    """The phases of a training graph's `execute`."""
    request = session.compile_if_needed()
    expect_labels(session)
    fed = any(state_of(gradient).bound_data is not None for gradient in request.user_gradients)
    if not request.minimised and not fed:
        if request.optimizer is not None and request.parameters:
            raise ExecutionError(
                "TrainingGraph.execute: there is nothing to minimise",
                expected="a loss layer, or a gradient bound to a tensor of allocate_user_gradient",
                fix="give the graph a loss layer, or run execute_forward and execute_gradient by themselves",
            )
        return ("forward",)
    return ("forward", "gradient") if request.optimizer is None else ("forward", "gradient", "update")


def expect_labels(session: Session) -> None:
    """Refuse a run while the loss cannot be placed."""
    if session.definition.waits_for_labels:
        raise ExecutionError(
            "TrainingGraph: the loss layer has no labels", fix="declare them: add_inputs(..., loss_labels={...})"
        )


def execute_forward(session: Session, call: Call, batch_size: int) -> Execution:
    """The forward pass by itself, on data that was attached."""
    batch = batch_of(session, batch_size, call.method)
    if has_option(call.options, ExecutionOptions.FORWARD_FOR_INFERENCE):
        specification, inputs = _inference(session, batch, {}, call)
        return submit(session, specification, inputs, call)
    expect_labels(session)
    if session.group is not None:
        return group_calls.execute_forward(session, call, batch)
    program = session.program("split", batch)
    specification = session.current.specification(program, ("forward",), call.options)
    # The gradient pass needs the same numbers, whatever becomes of the caller's memory.
    copies = specification.copies or program.read_after_forward
    inputs = collect_inputs(session, specification, {}, call.method, copies=copies)
    passes = Passes(program, session.current.executable(program))
    return submit(session, specification, inputs, call, passes)


def execute_gradient(session: Session, call: Call, batch_size: int) -> Execution:
    """The gradient pass by itself, after a forward pass."""
    if session.group is not None:
        return group_calls.execute_gradient(session, call, batch_size)
    passes = _passes_after(session, "forward", call.method, batch_size)
    specification = session.current.specification(passes.program, ("gradient",), call.options)
    inputs = collect_inputs(session, specification, {}, call.method)
    return submit(session, specification, inputs, call, passes)


def execute_forward_and_gradient(
    session: Session,
    call: Call,
    batch_size: int,
    given: Sequence[Named | None],
    sums: tuple[float, bool] | None = None,
) -> Execution:
    """Both passes on data by name; `execute_optimizer_update` may follow.

    sums  (share, goes on): gradients times the share are added to the sums of the batches before, or begin new ones.
          The gradients that can then be read, and the update that follows, are those of the sums
    """
    batch = batch_of(session, batch_size, call.method)
    if session.group is not None:
        return group_calls.execute_forward_and_gradient(session, call, batch, given, sums)
    data = named_data(session, call.method, *given)
    expect_labels(session)
    program = session.program("split" if sums is None else "accumulate", batch, sizes=session.sizes_of(data))
    specification = session.current.specification(program, ("forward", "gradient"), call.options)
    inputs = collect_inputs(session, specification, data, call.method)
    if sums is not None:
        call.scalars = {SHARE: sums[0], KEEP: float(sums[1])}
    passes = Passes(program, session.current.executable(program))
    return submit(session, specification, inputs, call, passes)


def execute_optimizer_update(session: Session, call: Call) -> Execution:
    """The update by itself, after a gradient pass."""
    if session.group is not None:
        return group_calls.execute_optimizer_update(session, call)
    session.compile_if_needed()
    if session.state is None:
        raise ExecutionError(f"TrainingGraph.{call.method}: the graph has no optimizer", fix="call compile_optimizer")
    passes = _passes_after(session, "gradient", call.method)
    specification = session.current.specification(passes.program, ("update",), call.options)
    return submit(session, specification, {}, call, passes)


def _passes_after(session: Session, needed: str, method: str, batch_size: int = 0) -> Passes:
    """The passes asked for so far, of which `needed` must be one."""
    session.compile_if_needed()
    session.raise_unseen_error()
    passes = session.passes
    if passes is None or needed not in passes.queued:
        mode = ", in training mode" if needed == "forward" else ""
        raise ExecutionError(
            f"TrainingGraph.{method}: no {needed} pass was run",
            fix=f"call execute_{needed} before it{mode}, with no other run of the graph in between",
        )
    if batch_size not in (0, passes.program.batch_size):
        raise ExecutionError(
            f"TrainingGraph.{method}: batch_size is {batch_size}, the forward pass ran {passes.program.batch_size}"
        )
    return passes
