"""Gradients as arrays: reading those of the last gradient pass, and updating with any others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError, ExecutionError
from mlcompute.execution import Execution
from mlcompute.layers.arguments import named
from mlcompute.layers.names import no_match
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.group_members import parameter_names
from mlcompute.runtime.run import Call, submit
from mlcompute.runtime.session import Session
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import ArrayLike, read_array

_PHASES = ("gradient", "update")


def trained_parameters(session: Session) -> dict[str, Tensor]:
    """What a step updates, by name: parameters that are not frozen and that the loss depends on."""
    request = session.compile_if_needed()
    program = session.program(session.main_style, request.batch_size)
    parameters = set(request.parameters) & program.gradients.keys()
    names = parameter_names(session.definition)
    return {name: tensor for name, (tensor, _, _) in names.items() if tensor in parameters}


def gradients(session: Session) -> dict[str, Array]:
    """Copies of the gradients of the last gradient pass, by parameter name."""
    session.wait()
    if not session.last.has_gradients:
        raise ExecutionError(
            "TrainingGraph.gradients: no gradient pass was run by itself",
            fix="run execute_forward and execute_gradient; the fused execute keeps no gradients",
        )
    found = {name: session.last.gradient(tensor) for name, tensor in trained_parameters(session).items()}
    return {name: np.array(array) for name, array in found.items() if array is not None}


def apply_gradients(session: Session, given: Mapping[str | Tensor, ArrayLike], options: ExecutionOptions) -> Execution:
    """One update of all parameters with the caller's gradients."""
    who = "TrainingGraph.apply_gradients"
    session.compile_if_needed()
    if session.state is None:
        raise ExecutionError(f"{who}: the graph has no optimizer", fix="call compile_optimizer")
    parameters = trained_parameters(session)
    names = {tensor: name for name, tensor in parameters.items()}
    if session.group is not None and any(session.state.layout(tensor) for tensor in names):
        raise ExecutionError(
            f"{who}: in a group, every process has a part of the state of {type(session.state.optimizer).__name__}",
            fix="compile the graph without a group and for one device",
        )
    arrays: dict[Tensor, Array] = {}
    for key, gradient in named(who, "gradients", given).items():
        tensor = parameters.get(key) if isinstance(key, str) else key
        if tensor not in names:
            raise no_match(who, str(key) if isinstance(key, str) else key.label, parameters)
        arrays[tensor] = read_array(gradient, tensor.descriptor, f"{who}: '{names[tensor]}'")
    missing = [name for tensor, name in names.items() if tensor not in arrays]
    if missing:
        raise DataError(
            f"{who}: the gradient of '{missing[0]}' is missing"
            + (f", and {len(missing) - 1} more" * (len(missing) > 1)),
            fix="give every parameter one, zeros where it has none; freeze() leaves parameters alone",
        )
    learning, compiled = session.definition.learning, session.current
    assert learning is not None
    compiled.request.gradient_inputs = {tensor: learning.gradient_tensor(tensor) for tensor in names}
    program = session.program("apply", compiled.request.batch_size)
    # The update uses the memory of the graph: what somebody holds of the last run is copied out of it.
    session.wait()
    session.last.is_overwritten()
    session.passes = None
    specification = compiled.specification(program, _PHASES, options)
    feeds: dict[Value, Array] = {}
    for tensor, gradient in arrays.items():
        value = program.inputs.get(learning.gradient_tensor(tensor))
        if value is not None:
            feeds[value] = np.array(gradient) if specification.copies else gradient
    return submit(session, specification, dict(feeds), Call("apply_gradients", options))
