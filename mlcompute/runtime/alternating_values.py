"""Parameters and statistics of a group whose newest values lie in one bank of their bucket or the other, turn by turn.

A step reads one bank and leaves new values in the other. So nobody copies them, and when a process is gone in the
middle of a step, the others still have all values from before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.ops.op import Array
from mlcompute.runtime.buckets import Bucket
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import storage_of

if TYPE_CHECKING:
    from mlcompute.devices.device import Executable
    from mlcompute.runtime.compiled_graph import CompiledGraph


class AlternatingValues:
    """Parameters and statistics in the buckets of a group, whose two banks are written in turns."""

    def __init__(self, compiled: CompiledGraph, buckets: Sequence[Bucket]) -> None:
        self._compiled, self._buckets = compiled, buckets
        #: By bucket: tensors with values of their own, and the arrays of these values in each bank.
        self._kept = [
            [
                (entry.tensor, bucket.views[entry.tensor])
                for entry in bucket.entries
                if entry.role != "loss" and entry.tensor.keeps_data
            ]
            for bucket in buckets
        ]
        #: By bucket: storages whose values lie in its banks, and storages whose values are copied from there. Valid for
        #: `_found_at` rebindings. `_is_rebound`: have storages moved into a bank since the last step?
        self._found: list[list[tuple[Storage, list[Array]]]] = []
        self._elsewhere: list[tuple[Storage, Bucket, list[Array]]] = []
        self._found_at, self._is_rebound = -1, False
        #: `Storage.rebindings` when the executables of this step, and those of earlier steps, were bound.
        self._used: dict[tuple[Program, int], int] = {}
        self._bound: dict[tuple[Program, int], int] = {}

    def executable(self, program: Program) -> Executable:
        """A program that reads the current bank. One for each: nothing is bound anew from step to step."""
        bank = self._buckets[0].current if self._buckets else 0
        found = self._compiled.executable(program) if bank == 0 else self._compiled.twin(program)
        key = (program, bank)
        bound_at = self._bound.get(key)
        if bound_at == Storage.rebindings:
            found.bound_at = Storage.changes
        elif bound_at is None:  # a new program may have taken the place of another
            kept = self._compiled.programs()
            self._bound = {known: at for known, at in self._bound.items() if known[0] in kept}
        self._used[key] = Storage.rebindings
        return found

    def executables(self, program: Program) -> list[Executable]:
        """The executables of a program, one for each bank it can read."""
        found = [self._compiled.executable(program)]
        if self._buckets and len(self._buckets[0].banks) > 1:
            found.append(self._compiled.twin(program))
        return found

    def switch(self) -> None:
        """After a step: its new values, in the other bank, are now the current ones."""
        if self._found_at != Storage.rebindings:
            self._find()
        for bucket, found in zip(self._buckets, self._found, strict=True):
            bucket.current = coming = bucket.coming
            for storage, views in found:
                storage.alternate(views[coming])
        for storage, bucket, views in self._elsewhere:
            np.copyto(storage.memory(), views[bucket.current], casting="same_kind")
            storage.touched()
        if self._used:
            self._bound.update(self._used)
            self._used = {}
        if self._is_rebound:
            self._is_rebound = False
            Storage.has_changed()
        else:
            Storage.changes += 1

    def _find(self) -> None:
        """Look up which storages lie in banks, after values were written or other memory was bound."""
        self._found_at, self._found, self._elsewhere = Storage.rebindings, [], []
        for bucket, kept in zip(self._buckets, self._kept, strict=True):
            found = []
            for tensor, views in kept:
                storage = storage_of(tensor)
                is_here = storage.host_memory() is views[bucket.current]
                if not is_here and (storage.is_callers or storage.dtype != bucket.dtype):
                    self._elsewhere.append((storage, bucket, views))
                    continue
                found.append((storage, views))
                self._is_rebound |= not is_here
            self._found.append(found)

    def release(self) -> None:
        """Values that lie in a bank get memory of their own: a step is about to overwrite the bank they lie in."""
        for kept in self._kept:
            for tensor, views in kept:
                storage = storage_of(tensor)
                if any(storage.host_memory() is view for view in views):
                    storage.memory()  # not to be written where it is: it is copied
