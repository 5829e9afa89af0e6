"""What changes while a graph learns, besides its tensors: optimizer state, time step, rates, random streams."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlcompute.errors import DataError, FileError
from mlcompute.graph import Graph
from mlcompute.optimizers.optimizer import checked_rate
from mlcompute.platform import Platform, check_rng_state
from mlcompute.runtime.session import session_of
from mlcompute.runtime.storage import Storage
from mlcompute.saving.checkpoint import OPTIMIZER, Checkpoint
from mlcompute.saving.plain import JSON, shortened
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array
from mlcompute.training import TrainingGraph


def optimizer_arrays(graph: Graph, names: Mapping[Tensor, str]) -> dict[str, Array]:
    """The optimizer's buffers by their names in a file."""
    session = session_of(graph)
    if session is None or session.state is None:
        return {}
    optimizer = session.state.optimizer
    arrays: dict[str, Array] = {}
    for tensor, name in names.items():
        buffers = optimizer.buffers.get(tensor)
        if tensor.has_callers_optimizer_data:
            # Bound by the caller, perhaps for a graph that is yet to be compiled.
            buffers = tensor.optimizer_storages
        if buffers is not None:
            session.state.check(tensor, buffers)
            for state, buffer in zip(optimizer.state_names, buffers, strict=True):
                arrays[f"{OPTIMIZER}{state}/{name}"] = buffer.array()
    return arrays


def describe_state(graph: Graph) -> dict[str, JSON]:
    """Numbers and random streams as plain data."""
    state: dict[str, JSON] = {"platform": Platform.rng_state()}
    session = session_of(graph)
    if session is not None and session.definition.learning is not None:
        state["random"] = session.random.current().state()
        if session.state is not None:
            optimizer = session.state.optimizer
            state["time_step"] = session.state.time_step
            state["learning_rate"] = optimizer.learning_rate
            state["applies_gradient_clipping"] = optimizer.applies_gradient_clipping
    return state


class SavedState:
    """The state in a file, read and checked against a training graph; `apply` then cannot fail."""

    def __init__(self, checkpoint: Checkpoint, graph: TrainingGraph, names: Mapping[Tensor, str]) -> None:
        self._session, self._state, self._tensors = session_of(graph), checkpoint.state, set(names)
        self._who = checkpoint.who
        self._buffers = self._read_buffers(checkpoint, names)
        self._check_numbers()

    def _read_buffers(self, checkpoint: Checkpoint, names: Mapping[Tensor, str]) -> dict[Tensor, list[Array]]:
        optimizer = self._session.state.optimizer if self._session.state is not None else None
        states = () if optimizer is None else optimizer.state_names
        by_name = {name: tensor for tensor, name in names.items()}
        found: dict[Tensor, dict[str, Array]] = {}
        for key, entry in checkpoint.entries.items():
            if not key.startswith(OPTIMIZER):
                continue
            _, state, name = key.split("/", 2) if key.count("/") >= 2 else ("", "", "")
            tensor = by_name.get(name)
            if tensor is None or state not in states:
                kind = type(optimizer).__name__ if optimizer is not None else "a graph without an optimizer"
                raise FileError(
                    f"{self._who}: '{key}' does not fit this graph",
                    expected=f"the state of {kind}: {', '.join(states) or 'none'}",
                    fix="give the graph the optimizer it was saved with, or restore the weights alone by name",
                )
            if entry.shape != tensor.descriptor.shape or entry.dtype != "F32":
                raise FileError(f"{self._who}: '{key}' is {entry}", expected=repr(tensor.state_descriptor))
            found.setdefault(tensor, {})[state] = checkpoint[key]
        for tensor, given in found.items():
            if len(given) != len(states):
                missing = ", ".join(state for state in states if state not in given)
                raise FileError(f"{self._who}: '{names[tensor]}' has no optimizer state {missing}")
        return {tensor: [given[state] for state in states] for tensor, given in found.items()}

    def _check_numbers(self) -> None:
        state, session = self._state, self._session
        try:
            check_rng_state(state.get("platform"))
            session.random.resumed(state.get("random"))
            if session.state is not None:
                checked_rate(type(session.state.optimizer).__name__, state.get("learning_rate"))  # type: ignore[arg-type]
                step = state.get("time_step")
                if type(step) is not int or not 1 <= step < 2**53:
                    raise DataError(f"the time step is {str(step)[:40]}", expected="a whole number from 1 on")
        except (DataError, TypeError) as error:
            raise FileError(
                f"{self._who}: its state does not fit a training graph: {shortened(error)}",
                fix="it may hold another kind of graph: restore the weights alone with exact=False",
            ) from error

    def apply(self) -> None:
        """Put everything into the graph and the process."""
        session, saved = self._session, self._state
        Platform.set_rng_state(saved["platform"])
        session.random = session.random.resumed(saved["random"])
        session.passes = None  # gradients that wait for their update belong to what was there before
        state = session.state
        if state is None:
            return
        state.time_step = saved["time_step"]
        state.optimizer.advance_to(state.time_step)
        state.optimizer.schedule_rate(saved["learning_rate"])
        state.optimizer.applies_gradient_clipping = saved.get("applies_gradient_clipping") is True
        for tensor in {*state.optimizer.buffers, *self._buffers} & self._tensors:
            values = self._buffers.get(tensor)
            present = state.optimizer.buffers.get(tensor)
            if present is None and values is not None:
                # Not compiled yet: these become the buffers when it is.
                state.optimizer.buffers[tensor] = tensor.optimizer_storages = [Storage(array) for array in values]
                tensor.has_callers_optimizer_data = False
            elif present is not None:
                for index, buffer in enumerate(present):
                    # State that is not in the file had not been made yet when it was saved.
                    buffer.write(np.zeros(buffer.shape, buffer.dtype) if values is None else values[index])
