"""Parameters and statistics of a group whose newest values lie in one bank of their lane or the other, turn by turn.

A step reads one bank and leaves new values in the other. So nobody copies them, and when a process is gone in the
middle of a step, the others still have all values from before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.ops.op import Array
from mlcompute.runtime.lanes import Lane
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import storage_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.devices.device import Buffer, Engine, Executable
    from mlcompute.runtime.compiled_graph import CompiledGraph


class _Kept(NamedTuple):
    """A tensor that keeps values, where these are in each bank, and what that is on devices."""

    tensor: Tensor
    views: list[Array]
    buffers: list[dict[Engine, Buffer]]


class AlternatingValues:
    """What the lanes of a group hold besides losses."""

    def __init__(self, compiled: CompiledGraph, lanes: Sequence[Lane]) -> None:
        self._compiled, self._lanes = compiled, lanes
        self._kept = [
            [
                _Kept(entry.tensor, lane.views[entry.tensor], [{} for _ in lane.banks])
                for entry in lane.entries
                if entry.role != "loss" and entry.tensor.keeps_data
            ]
            for lane in lanes
        ]
        #: Executables of this step; and those of steps before: how many rebindings there had been when they were bound.
        self._used: dict[tuple[Program, int], int] = {}
        self._bound: dict[tuple[Program, int], int] = {}

    def executable(self, program: Program) -> Executable:
        """A program that reads the current bank. One for each: nothing is bound anew from step to step."""
        bank = self._lanes[0].current if self._lanes else 0
        found = self._compiled.executable(program) if bank == 0 else self._compiled.twin(program)
        key = (program, bank)
        if self._bound.get(key) == Storage.rebindings:
            found.bound_at = Storage.changes
        self._used[key] = Storage.rebindings
        return found

    def switch(self) -> None:
        """A step has left new values in the other bank."""
        is_rebound = False
        for lane, kept in zip(self._lanes, self._kept, strict=True):
            current, coming = lane.current, lane.coming
            for tensor, views, buffers in kept:
                storage = storage_of(tensor)
                if storage.host_memory() is views[current]:
                    storage.alternate(views[coming], buffers[coming])
                elif storage.is_callers or storage.dtype != lane.dtype:
                    np.copyto(storage.memory(), views[coming], casting="same_kind")
                    storage.touched()
                else:
                    storage.alternate(views[coming], buffers[coming])
                    is_rebound = True
            lane.current = coming
        self._bound.update(self._used)
        self._used = {}
        if is_rebound:
            Storage.has_changed()
        else:
            Storage.changes += 1

    def release(self) -> None:
        """Values that lie in a bank get memory of their own: a step is about to overwrite the bank they lie in."""
        for kept in self._kept:
            for tensor, views, _ in kept:
                storage = storage_of(tensor)
                if any(storage.host_memory() is view for view in views):
                    storage.memory()  # not to be written where it is: it is copied
