"""The passes of the slices of a batch that this process runs, one slice after the other.

Where a layer needs sums over all slices (`compiler/exchange_sums.py`), all own slices run up to there, each in memory
of its own, the processes add up what they have left, and all go on with the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlcompute.compiler.accumulate_gradients import SHARE
from mlcompute.compiler.exchange_gradients import SLICE
from mlcompute.compiler.program import Program
from mlcompute.enums import ExecutionOptions
from mlcompute.group.slices import cut
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.call_data import collect_inputs
from mlcompute.runtime.inputs import InputData, resolved
from mlcompute.runtime.passes import Passes
from mlcompute.runtime.run import Call, Run
from mlcompute.runtime.run_specification import InputSlot, RunSpecification
from mlcompute.runtime.sizes import Sizes
from mlcompute.runtime.storage import Storage
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.group_training import GroupTraining

_SYNCHRONOUS = ExecutionOptions.SYNCHRONOUS


class Part(NamedTuple):
    """A slice of a batch that this process runs: samples from `first` to before `last`, and what share they are."""

    number: int
    first: int
    last: int
    share: float


class WholeBatch:
    """Stands for the data of a whole batch, of which programs read slices: its shape and type."""

    __slots__ = ("dtype", "shape")

    def __init__(self, value: Value, rows: int) -> None:
        self.shape = (rows, *value.shape[1:]) if rows else value.shape
        self.dtype = value.dtype


class SlicePasses:
    """Runs passes of own slices.

    passes   of the last forward pass that was run by itself, by slice
    """

    def __init__(self, training: GroupTraining) -> None:
        self._training = training
        self.passes: dict[int, Passes] = {}
        self._parts: dict[int, list[Part]] = {}
        self._whole_batches: dict[tuple[RunSpecification, int], RunSpecification] = {}
        #: What runs of a program share.
        self._planned: dict[tuple[Program, tuple[str, ...]], tuple[RunSpecification, tuple[str, ...]]] = {}
        #: The rows that slices read of the last batch: (tensor, slice) -> the whole, and its rows.
        self._views: dict[tuple[Tensor, int], tuple[Array, Array]] = {}
        #: Sums over all slices, by the phase that ends with them.
        self._sums: dict[str, Storage] = {}

    def parts(self, batch: int) -> list[Part]:
        """The slices of a batch that this process runs. A short batch may leave some empty."""
        found = self._parts.get(batch)
        if found is None:
            group = self._training.group
            first, last = group.slices_of(group.rank)
            slices = cut(batch, group.slices)
            found = [Part(n, a, b, (b - a) / batch) for n, (a, b) in enumerate(slices) if first <= n < last and b > a]
            self._parts[batch] = found
        return found

    def forget(self) -> None:
        """The group has changed: other slices are this process's."""
        self._parts.clear()
        self._planned.clear()
        self._views.clear()

    def _drop_old(self) -> None:
        """Drop what was planned for programs that no longer exist."""
        kept = self._training.compiled.programs()
        self._planned = {key: one for key, one in self._planned.items() if key[0] in kept}
        self._whole_batches = {key: one for key, one in self._whole_batches.items() if key[0].program in kept}

    def sum_storage(self, phase: str, value: Value) -> Storage:
        """Where a slice writes its part of a sum, and then reads the sum."""
        if phase not in self._sums:
            self._sums[phase] = Storage(np.zeros(value.shape, value.dtype), is_callers=True)
        return self._sums[phase]

    def run(
        self,
        call: Call,
        batch: int,
        data: Mapping[Tensor, Any],
        style: str,
        phases: tuple[str, ...],
        factor: float,
    ) -> None:
        """Some phases of every own slice; whatever a slice leaves is taken before the next one overwrites it."""
        training, begins = self._training, "forward" in phases
        session, compiled = training.session, training.compiled
        random = session.random = session.random.current()
        start = random.count
        parts, own = training.program.parts(phases), self.parts(batch)
        of_forward = [place for place, (names, _) in enumerate(parts) if names[0].startswith("forward")]
        try:
            runs = self._runs(call, batch, data, style, phases, factor)
            for place, (names, total) in enumerate(parts):
                for part, (run, inputs) in zip(own, runs, strict=True):
                    if place > 0:
                        run.go_on(session, compiled, run.specification.program.parts(phases)[place][0])
                    else:
                        if begins:
                            random.move_to(start + part.number)
                        training.has_begun = True
                        run.submit(session, compiled, inputs)
                        for number, name in enumerate(self._rest(run)):
                            training.send_early(number)
                            run.go_on(session, compiled, (name,))
                    if total is not None:
                        training.results.add_sum(part.number, self.sum_storage(names[-1], total).array())
                    if begins and place == of_forward[-1]:
                        training.take_values(part.number, run)
                    if "gradient" in phases and place == len(parts) - 1:
                        training.take_gradients(part.number, is_step=style == "slice")
                if total is not None:
                    self.sum_storage(names[-1], total).write(training.results.take_sum(total.shape, total.dtype))
        finally:
            if begins:
                random.move_to(start)
        if begins:
            random.move_to(start + training.group.slices)

    def _runs(
        self,
        call: Call,
        batch: int,
        data: Mapping[Tensor, Any],
        style: str,
        phases: tuple[str, ...],
        factor: float,
    ) -> list[tuple[Run, InputData]]:
        """A run for every own slice."""
        training, session = self._training, self._training.session
        begins, sizes, own = "forward" in phases, session.sizes_of(data), self.parts(batch)
        whole: dict[Tensor, Array] | None = None
        runs = []
        for part in own:
            if begins:
                program = session.program(style, part.last - part.first, sizes=sizes)
            else:
                program = self.passes[part.number].program
            planned = self._planned.get((program, phases))
            if planned is None:
                self._drop_old()
                planned = self._planned[program, phases] = self._plan(program, style, phases, len(own))
            specification, begins_with = planned
            if whole is None:
                whole = self.whole_batch(specification, call, batch, data)
            inputs = self.sliced(specification.inputs, whole, part)
            passes = executable = None
            if style == "phases":
                passes = self._passes_of(part, program, begins)
            elif program.sums and len(own) > 1:
                passes = Passes(program, training.compiled.executable_of_slice(program, part.number))
            else:
                executable = training.alternating.executable(program)
            one = Call(call.method, _SYNCHRONOUS, scalars={SHARE: part.share * factor, SLICE: part.share})
            run = Run(
                session, specification, one, passes, are_arrays=True, begins_with=begins_with, executable=executable
            )
            runs.append((run, inputs))
        return runs

    def _plan(
        self, program: Program, style: str, phases: tuple[str, ...], count: int
    ) -> tuple[RunSpecification, tuple[str, ...]]:
        """What all runs of some phases share, and what they begin with."""
        begins_with = program.parts(phases)[0][0]
        if self._sends_early(program, style, phases, count):
            begins_with = begins_with[: begins_with.index("gradient") + 1]
        return self._training.compiled.specification(program, phases, _SYNCHRONOUS), begins_with

    def sends_early(self, batch: int, sizes: Sizes, phases: Sequence[str]) -> bool:
        """Are gradients of a whole step sent while others are computed?"""
        own, session = self.parts(batch), self._training.session
        programs = (session.program("slice", part.last - part.first, sizes=sizes) for part in own)
        return any(self._sends_early(program, "slice", phases, len(own)) for program in programs)

    def _sends_early(self, program: Program, style: str, phases: Sequence[str], count: int) -> bool:
        """Not where slices are still to be added to them."""
        training = self._training
        is_step = style == "slice" and "gradient" in phases and count == 1
        # Programs of other batch sizes might compute gradients in another order than they are exchanged in.
        fits = bool(program.chunks) and program.chunks == training.program.chunks
        return is_step and fits and not training.shared.is_shared

    def _rest(self, run: Run) -> Sequence[str]:
        """The parts of the gradient pass that are yet to be run."""
        program = run.specification.program
        return program.parts(run.specification.phases)[0][0][len(run.begins_with) :] if program.chunks else ()

    def _passes_of(self, part: Part, program: Program, begins: bool) -> Passes:
        if begins:
            executable = self._training.compiled.executable_of_slice(program, part.number)
            self.passes[part.number] = Passes(program, executable)
        return self.passes[part.number]

    def whole_batch(
        self, specification: RunSpecification, call: Call, batch: int, data: Mapping[Tensor, Any]
    ) -> dict[Tensor, Array]:
        """The data of the whole batch, as arrays."""
        asked = self.of_whole_batch(specification, batch)
        known = {
            slot.tensor: data[slot.tensor] for slot in asked.inputs if _is_as_wanted(data.get(slot.tensor), slot.value)
        }
        if len(known) == len(asked.inputs):  # nothing to be converted, as nearly always
            return known
        arrays = resolved(collect_inputs(self._training.session, asked, data, call.method, copies=False))
        return {slot.tensor: np.asarray(arrays[slot.value]) for slot in asked.inputs}

    def of_whole_batch(self, specification: RunSpecification, batch: int) -> RunSpecification:
        """The same for the data of a whole batch."""
        key = (specification, batch)
        asked = self._whole_batches.get(key)
        if asked is None:
            self._drop_old()
            full = self._training.request.batch_size
            slots = [
                InputSlot(
                    tensor,
                    WholeBatch(value, per_sample * batch),  # type: ignore[arg-type]
                    descriptor,
                    per_sample * batch if per_sample and batch != full else 0,
                    per_sample,
                )
                for tensor, value, descriptor, _, per_sample in specification.inputs
            ]
            asked = self._whole_batches[key] = dataclasses.replace(specification, inputs=slots)
        return asked

    def sliced(self, slots: Sequence[InputSlot], whole: Mapping[Tensor, Array], part: Part) -> InputData:
        """What one slice reads of the whole batch. What all samples share is read by every slice.

        A gradient that the caller feeds to something without samples is not one per slice: the first slice gets it.
        """
        inputs: InputData = {}
        for tensor, value, _, _, per_sample in slots:
            array = whole[tensor]
            if per_sample:
                array = self._rows(array, (tensor, part.number), part.first * per_sample, part.last * per_sample)
            elif tensor in self._training.request.user_gradients and part.first > 0:
                array = np.zeros_like(array)
            inputs[value] = array
        return inputs

    def _rows(self, array: Array, key: tuple[Tensor, int], first: int, last: int) -> Array:
        """Some rows; of the same array as in the last step they are the same view, which need not be bound again."""
        known = self._views.get(key)
        if known is not None and known[0] is array and len(known[1]) == last - first:
            return known[1]
        view = array[first:last]
        self._views[key] = array, view
        return view


def _is_as_wanted(given: Any, value: Value) -> bool:
    return (
        type(given) is np.ndarray
        and given.shape == value.shape
        and given.dtype == value.dtype
        and given.flags.c_contiguous
    )


def largest_slice(batch: int, slices: int) -> int:
    """Samples of the largest slice of a batch."""
    return max(last - first for first, last in cut(batch, slices))
