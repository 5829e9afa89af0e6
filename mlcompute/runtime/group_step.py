"""A training step of a group, prepared for calls of one kind: programs, memory and rows of the own slices.

While a program computes, the interpreter's own code and objects leave the caches of the core: whatever a step looks up
between two programs takes several times as long as in a loop by itself. So what calls of one kind share is found once,
as it is for a step of one process (`Run`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler.accumulate_gradients import SHARE
from mlcompute.compiler.exchange_gradients import SLICE
from mlcompute.compiler.program import Program
from mlcompute.devices.device import Executable, Profile
from mlcompute.enums import ExecutionOptions
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.run import Call
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.runtime.sizes import Sizes
from mlcompute.runtime.slice_passes import Part
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.group_training import GroupTraining

#: The data of a step, by the value that it has in `GroupStep.specification`.
WholeData = Mapping[Any, Array]


class GroupStep:
    """A step of the whole group on batches of one size.

    specification   what a call must bring, for the whole batch; None where this process has no slice of it
    """

    __slots__ = (
        *("_bank", "_batch", "_data", "_exchanges", "_keys", "_phases", "_queue", "_shared", "_sizes", "_slices"),
        *("_training", "_updates", "specification"),
    )

    def __init__(self, training: GroupTraining, batch: int, sizes: Sizes, phases: tuple[str, ...]) -> None:
        self._training, self._batch, self._sizes, self._phases = training, batch, sizes, phases
        self._queue, self._shared = training.session.queue, training.shared
        self._exchanges, self._updates = "gradient" in phases, "update" in phases
        self.specification: RunSpecification | None = None
        programs: dict[Program, _SliceProgram] = {}
        passes = tuple(phase for phase in phases if phase != "update")
        self._slices: list[_Slice] = []
        for part in training.slices.parts(batch):
            program = training.session.program("slice", part.last - part.first, sizes=sizes)
            if program not in programs:
                programs[program] = _SliceProgram(training, program, passes)
            of = programs[program]
            if self.specification is None:
                self.specification = training.slices.of_whole_batch(of.specification, batch)
            self._slices.append(_Slice(training, of, part, self.specification))
        self._keys = self._slices[0].of.program.random_keys if self._slices else ()
        self._bank = 0
        self._data: WholeData = {}

    def fits(self, batch: int, sizes: Sizes, phases: tuple[str, ...]) -> bool:
        """Is it the step that a call asks for?"""
        return (batch, sizes, phases) == (self._batch, self._sizes, self._phases) and self.is_current()

    def is_current(self) -> bool:
        """Does the group still have the memory that it was prepared with?"""
        training = self._training
        return training.shared is self._shared and training.session.in_group is training

    def collect(self, call: Call, data: Mapping[Tensor, Any]) -> WholeData:
        """What `run` is given, from the data of a call."""
        if self.specification is None:
            return {}
        whole = self._training.slices.whole_batch(self._slices[0].of.specification, call, self._batch, data)
        return {slot.value: whole[slot.tensor] for slot in self.specification.inputs}

    def run(self, data: WholeData) -> None:
        """All own slices, the exchange and the update."""
        training, specification = self._training, self.specification
        session = training.session
        training.results.begin("slice", self._batch)
        training.begin_passes(self._batch)
        buckets, random = training.buckets, session.random.current()
        session.random, session.passes, start = random, None, random.count
        self._bank, self._data = buckets[0].current if buckets else 0, data
        if specification is not None:
            session.inputs.remember(specification.inputs, data)  # type: ignore[arg-type]
            if self._keys:
                random.prepare(self._keys)
        if training.compiled.crosses_devices:
            # Runs of one device follow each other; what another one may still change must be waited for.
            for tensor in training.program.persistent:
                state_of(tensor).wait_for_runs()
        training.has_begun = True
        try:
            for one in self._slices:
                if self._keys:
                    random.move_to(start + one.part.number)
                self._queue.run_now(self._compute, one)
                if one.of.outputs:
                    training.results.add_rows(one.part.number, one.of.program, one.of.executables[self._bank].keep)
                if self._exchanges:
                    training.take_gradients(one.part.number, is_step=True)
        finally:
            random.move_to(start)
        random.move_to(start + training.group.slices)
        if self._slices:
            last = self._slices[-1].of
            session.last.finished(last.executables[self._bank], last.specification, None)
        training.results.is_shared = True
        if self._exchanges:
            training.finish(updates=self._updates, is_whole_step=True)

    def _compute(self, one: _Slice) -> None:
        """The passes of a slice; its turn on the device has come."""
        training, of = self._training, one.of
        compiled, last = training.compiled, training.session.last
        last.passes = None
        last.is_overwritten()
        if compiled.outgrown:
            compiled.move()
        executable = of.bound(self._bank)
        inputs = one.rows(self._data)
        if self._keys:
            inputs = {**inputs, **training.session.random.keys(of.program.random_keys)}
        for cell, number in one.scalars:
            cell[()] = number
        executable.feed(compiled.engine, inputs, None if compiled.shares_memory else of.scalars)
        profile = Profile() if of.specification.profiles else None
        try:
            completion = executable.run(of.begins_with, profile)
            if completion is not None:
                completion.wait()
        finally:
            compiled.clock.tick()
        if of.specification.prints:
            print(profile, file=sys.stderr)


class _SliceProgram:
    """The program of slices of one size, once for each bank that parameters may lie in (see `Bucket`)."""

    __slots__ = (
        *("_bound_at", "_session", "_storages", "begins_with", "executables", "outputs", "program", "scalars"),
        "specification",
    )

    def __init__(self, training: GroupTraining, program: Program, phases: tuple[str, ...]) -> None:
        compiled = training.compiled
        self.program, self._session = program, training.session
        self.specification = compiled.specification(program, phases, ExecutionOptions.SYNCHRONOUS)
        self.begins_with = program.parts(phases)[0][0]
        self.scalars = compiled.scalars_of(program)
        #: Does the program have outputs that can be read after the run?
        self.outputs = bool(training.results.outputs_of(program))
        self.executables = training.alternating.executables(program)
        self._storages: dict[Value, Storage] | None = None
        #: By bank: `Storage.rebindings` when its executable was bound.
        self._bound_at = [-1] * len(self.executables)

    def bound(self, bank: int) -> Executable:
        """The executable that reads a bank. Nothing is bound anew from step to step."""
        executable, compiled = self.executables[bank], self._session.current
        if compiled.storages.get(self.program) is not self._storages or self._storages is None:
            self._storages = self._session.storages(self.program)
            self._bound_at = [-1] * len(self.executables)
        if self._bound_at[bank] != Storage.rebindings:
            now = Storage.rebindings
            compiled.bind(executable, self._storages)
            self._bound_at[bank] = now
        return executable


class _Slice:
    """An own slice: its program, what it reads of the batch, and its share of it.

    scalars   (where to write, number): what its program takes besides inputs
    """

    __slots__ = ("_inputs", "_known", "_reads", "of", "part", "scalars")

    def __init__(self, training: GroupTraining, of: _SliceProgram, part: Part, whole: RunSpecification) -> None:
        self.of, self.part = of, part
        numbers = {SHARE: part.share, SLICE: part.share}
        self.scalars = [(cell, numbers[name]) for name, cell in of.scalars.cells]
        given = {slot.tensor: slot.value for slot in whole.inputs}
        self._inputs: dict[Value, Array] = {}
        #: (value, key of the whole batch's data, rows of it that the slice reads; None: all rows)
        self._reads: list[tuple[Value, Any, slice | None]] = []
        for tensor, value, _, _, per_sample in of.specification.inputs:
            if per_sample:
                self._reads.append((value, given[tensor], slice(part.first * per_sample, part.last * per_sample)))
            elif tensor in training.request.user_gradients and part.first > 0:
                # A gradient that the caller feeds to something without samples is the first slice's.
                self._inputs[value] = np.zeros(value.shape, value.dtype)
            else:
                self._reads.append((value, given[tensor], None))
        self._known: list[Array | None] = [None] * len(self._reads)

    def rows(self, data: WholeData) -> dict[Value, Array]:
        """What it reads; of the same array as in the last step the same view, which need not be bound again."""
        inputs, known = self._inputs, self._known
        for place, (value, given, rows) in enumerate(self._reads):
            array = data[given]
            if known[place] is not array:
                known[place], inputs[value] = array, array if rows is None else array[rows]
        return inputs
