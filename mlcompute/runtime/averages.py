"""Averages of the weights that the optimizer keeps: reading them, and computing with them for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mlcompute.errors import ExecutionError
from mlcompute.ops.op import Array
from mlcompute.optimizers.memory import memory_of
from mlcompute.optimizers.optimizer import AVERAGE
from mlcompute.runtime.group_members import parameter_names
from mlcompute.runtime.session import Session
from mlcompute.runtime.tensor_state import current_values, storage_of
from mlcompute.tensor import Tensor


def averages(session: Session) -> dict[str, Array]:
    """The average of every parameter that has one, by name: copies in the parameter's type."""
    session.wait()
    found = _averages(session)
    names = {tensor: name for name, (tensor, _, _) in parameter_names(session.definition).items()}
    return {names[tensor]: array for tensor, array in found.items()}


@contextlib.contextmanager
def averaged_weights(session: Session) -> Iterator[None]:
    """Within it the parameters are their averages, and nothing is trained; afterwards they are what they were."""
    session.wait()
    found = _averages(session)
    before = {tensor: current_values(tensor) for tensor in found}
    kept = {tensor: array.copy() for tensor, array in before.items() if array is not None}
    was, session.has_averaged_weights = session.has_averaged_weights, True
    try:
        for tensor, array in found.items():
            tensor.data = array
        yield
    finally:
        session.has_averaged_weights = was
        for tensor, array in kept.items():
            tensor.data = array


def _averages(session: Session) -> dict[Tensor, Array]:
    state = session.state
    request = session.compile_if_needed()
    found: dict[Tensor, Array] = {}
    for tensor in request.parameters if state is not None else ():
        assert state is not None
        names = list(state.layout(tensor))
        if AVERAGE not in names:
            continue
        is_fresh = tensor in memory_of(state.optimizer).fresh
        storage = storage_of(tensor) if is_fresh else state.of(tensor)[names.index(AVERAGE)]
        found[tensor] = storage.array().astype(storage_of(tensor).dtype)
    if not found:
        raise ExecutionError(
            "TrainingGraph.averages: the optimizer keeps no averages",
            fix="make it with average_decay=0.999",
        )
    return found
