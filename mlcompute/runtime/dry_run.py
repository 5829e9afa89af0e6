"""Runs on copies, which leave parameters, optimizer state and random numbers as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.inputs import resolved
from mlcompute.runtime.run_specification import InputSlot
from mlcompute.runtime.session import Session
from mlcompute.runtime.tensor_state import storage_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import read_array


def bindings_of_copies(
    method: str,
    session: Session,
    program: Program,
    phases: tuple[str, ...],
    data: dict[Tensor, Any],
    *,
    skips: bool = False,
) -> dict[Value, Array]:
    """Copies of everything a run of the program reads from outside.

    method  who asks, for messages
    skips   use what the graph was fed last
    """
    request = session.compile_if_needed()
    read = {value for step in program.steps if step.phase in phases for value in step.inputs}
    slots = [InputSlot.of(tensor, value, request) for tensor, value in program.inputs.items() if value in read]

    def who(tensor: Tensor) -> str:
        return f"{method}: '{session.name_of(tensor)}'"

    inputs = session.inputs.collect(slots, data, who, session.linked_value, skips=skips, copies=True)
    memory = resolved(inputs)
    for tensor, value in program.persistent.items():
        if tensor in data:
            memory[value] = read_array(data[tensor], tensor.descriptor, f"'{tensor.label}'").copy()
        else:
            memory[value] = storage_of(tensor).array().copy()
    memory.update(session.random.current().keys(program.random_keys))
    if session.state is not None:
        for tensor, values in program.states.items():
            memory.update(zip(values, [state.array().copy() for state in session.state.of(tensor)], strict=True))
        numbers = session.state.optimizer.scalars_of(session.state.time_step, session.state.combinations)
        memory.update({value: np.asarray(numbers[name], value.dtype) for name, value in program.scalars.items()})
    return memory
