"""A copy of everything that training changes, to return to."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np

from mlcompute.ops.bfloat16 import is_floating
from mlcompute.runtime.session import session_of
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import storage_of
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.model import Model
from mlcompute.trainer.weight_names import kept_tensors


class Snapshot:
    """Parameters, statistics, optimizer state, time step and random numbers of a model, as they are now."""

    def __init__(self, model: Model) -> None:
        self._model = model
        model.training.wait()
        self._copies = [(storage, storage.array().copy()) for storage in _storages(model)]
        session = session_of(model.training)
        state = session.state
        self._time_step = None if state is None else state.time_step
        # Dropout takes its key from the platform with the first pass; taken now, it is the same after restoring.
        random = session.random = session.random.current()
        random.prepare(session.program(session.main_style, session.main_rows(model.feed.batch)).random_keys)
        self._random = copy.copy(random)

    def restore(self) -> None:
        """Put everything back. The snapshot can be used again."""
        self._model.training.wait()
        for storage, kept in self._copies:
            storage.write(kept)
        session = session_of(self._model.training)
        session.random = copy.copy(self._random)
        if session.state is not None and self._time_step is not None:
            session.state.time_step = self._time_step
            session.state.optimizer.advance_to(self._time_step)


def is_finite(model: Model) -> bool:
    """Is there no NaN and no infinity in what a snapshot would hold?"""
    model.training.wait()
    return are_finite(storage.array() for storage in _storages(model))


def are_finite(arrays: Iterable[Array]) -> bool:
    """Is there no NaN and no infinity in arrays?"""
    return all(bool(np.isfinite(array).all()) for array in arrays if is_floating(array.dtype))


def _storages(model: Model) -> list[Storage]:
    """Where the values lie."""
    found = [storage_of(tensor) for tensor in kept_tensors(model.training) if tensor.keeps_data]
    state = session_of(model.training).state
    if state is not None:
        found += [buffer for tensor in model.parameters for buffer in state.of(tensor)]
    return found
