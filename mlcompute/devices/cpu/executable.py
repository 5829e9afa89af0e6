"""A built program of the CPU engine: tapes of native kernels, each run in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.kernels.table import KERNELS, READS, reads_bfloat16
from mlcompute.devices.cpu.kernels.widened import widened_entries
from mlcompute.devices.cpu.onednn.first_sgemm import first_sgemm
from mlcompute.devices.cpu.runtime.calls import ByEntry, Calls, Memory, numbers_of
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.like_steps import Kinds, LikeSteps
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.cpu.runtime.schedule import schedule, useful_threads
from mlcompute.devices.cpu.runtime.threads import ALONE, BARRIER_WORDS, BEGAN, ENDED, FAILED, FLUSH, STREAM, team_codes
from mlcompute.devices.device import Buffer, Engine, Executable, Profile
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.devices.scalars import Scalars
from mlcompute.errors import ExecutionError
from mlcompute.ops.op import Array, Step, Value, overwritten_by, run_meaning

if TYPE_CHECKING:
    from mlcompute.devices.cpu.device import Cpu

#: So few values are bound one by one.
_FEW = 64


@dataclass(eq=False)
class _Segment:
    """Part of a pass: native entries run in one call, or one step by its NumPy meaning.

    job, tape  what `tape_runner` reads; `address`: of the job
    rows       which calls of the program they are
    """

    job: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    tape: Array | None = None
    address: int = 0
    threads: int = 1
    rows: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    step: Step | None = None


class CpuExecutable(Executable):
    """A built program: its kernels, their arguments, and the tapes of the phase combinations that were requested."""

    def __init__(self, engine: Cpu, program: Program, like: CpuExecutable | None = None) -> None:
        self.engine, self.program = engine, program
        self._arena: Array | None = None
        # The engine's number may change meanwhile: barriers are placed for this one.
        self._threads = engine.threads
        self._kinds: Kinds = Kinds() if like is None or like._threads != self._threads else like._kinds  # noqa: SLF001
        self._build()

    def _build(self) -> None:
        program = self.program
        views, steps, phases = program.plan.views, list[Step](), list[str]()
        self._operands = Operands((), views, program.plan.workspaces, self._threads)
        for step in program.steps:
            if step.op.is_view and step.results[0] in views:
                self._operands.add_view(step)
            else:
                steps.append(step)
                phases.append(step.phase)
        #: Phases that have steps besides views, by number.
        self._phases = list(dict.fromkeys(phases))
        number_of = {phase: number for number, phase in enumerate(self._phases)}
        self._calls, self._memory = self._made(steps, np.array([number_of[phase] for phase in phases], np.int64))
        by_entry = self._calls.by_entry()
        entries = [entry for entry, _, _ in by_entry]
        codes = [entry.code for entry in entries]
        codes += [argument for entry in entries for argument in entry.arguments if isinstance(argument, Code)]
        codes += team_codes()
        kernels = dict(zip(codes, kernel_cache.addresses(codes), strict=True))
        self._kernels = {entry: kernels[entry.code] for entry in entries}
        #: Calls that write what other threads read.
        self._for_others = self._calls.writes_for_others(self._memory)
        self._set_statuses(by_entry)
        self._set_arguments(by_entry, {entry: _numbers(entry, kernels) for entry in entries})
        self._setters: dict[Value, list[tuple[int, Callable[[int], None]]]] = {}
        self._arena_setters: list[tuple[int, Callable[[int], None]]] = []
        for entry in entries:
            for operand, setter in entry.pointers:
                place = program.plan.placements.get(operand.base)
                if place is None:
                    self._setters.setdefault(operand.base, []).append((operand.byte_offset, setter))
                else:
                    self._arena_setters.append((place.offset + operand.byte_offset, setter))
        self._barrier = np.zeros(BARRIER_WORDS, np.int64)
        self._flags = self._barrier.data  # much cheaper to read than the array
        self._bound: dict[Value, int] = {}
        self._arrays: dict[Value, Array] = {}
        #: Views of values in the arena, which never moves: reading a loss after every step should cost nothing.
        self._views: dict[Value, Array] = {}
        self._bind_arrays(program.constants)
        self._tapes: dict[tuple[str, ...], list[_Segment]] = {}
        #: Calls that only the first thread runs.
        self._alone: list[Array] = []

    def _made(self, steps: list[Step], phases: Array) -> tuple[Calls, Memory]:
        """The calls of all steps in order, and where memory lies.

        phases   of each step, by number
        """
        plan = self.program.plan
        kinds, numbers, first, memory = LikeSteps(self._operands, plan.workspaces, self._kinds).kinds(steps, _entries)
        #: Steps besides views, the kinds they are of, and which one each is of.
        self._steps, self._kinds_of_steps, self._kind_numbers = steps, kinds, numbers
        each = [kind.entries or () for kind in kinds]
        counts = np.array([len(entries) for entries in each], np.int64)
        rows = np.repeat(np.arange(len(steps)), counts[numbers])
        ends = np.cumsum(counts[numbers])
        entry = (np.cumsum(counts) - counts)[numbers[rows]] + np.arange(len(rows)) - (ends - counts[numbers])[rows]
        calls = Calls(
            [entry for entries in each for entry in entries],
            [places for kind in kinds for places in kind.places],
            steps if len(rows) == len(steps) and (counts == 1).all() else [steps[row] for row in rows.tolist()],
            entry,
            first[rows],
            memory,
            phases[rows],
        )
        kept = numbers_of([self._operands.base(value) for value in self.program.kept])
        lies = Memory(plan, np.concatenate([memory, kept]))  # views of constants may be kept that no step reads
        read = lies.table()
        read[kept] = True
        read[numbers_of(list(plan.workspaces.values()))] = True
        #: Steps without a kernel, and how many calls there are before each.
        self._without: list[tuple[int, Step]] = []
        for number, kind in enumerate(kinds):
            for row in np.flatnonzero(numbers == number).tolist() if kind.entries is None else ():
                self._without.append((int(ends[row]), steps[row]))
                read[numbers_of([self._operands.base(value) for value in steps[row].inputs])] = True
        needed = calls.needed(read, lies)
        if not needed.all():
            calls = calls.only(np.flatnonzero(needed))
            left = np.cumsum(np.concatenate([[0], needed])).tolist()
            self._without = [(left[before], step) for before, step in self._without]
        self._without.sort(key=itemgetter(0))
        return calls, lies

    def _set_statuses(self, by_entry: ByEntry) -> None:
        """Words for all calls that can fail, each with its own, and where those lie."""
        self._status_of = np.zeros(len(self._calls), np.int64)  # addresses; 0: it cannot fail
        #: Calls that can fail, and where that can be read.
        self._watched: list[tuple[int, Array]] = []
        for entry, rows, _ in by_entry:
            if entry.status is None:
                continue
            size, shared = len(entry.status), entry.layout.status is not None
            words = np.zeros(len(rows) * size, np.int64) if shared else entry.status
            self._status_of[rows] = address_of(words) + 8 * size * np.arange(len(rows))
            self._watched += [(row, words[size * at : size * at + 1]) for at, row in enumerate(rows.tolist())]

    def _set_arguments(self, by_entry: ByEntry, numbers: Mapping[Entry, list[int]]) -> None:
        """The arguments of all calls, one after the other; addresses are set when they are known.

        numbers  those of every entry, with 0 for addresses
        """
        calls, offsets = self._calls, self._memory.offset
        lengths = np.array([len(numbers.get(entry, ())) for entry in calls.entries], np.int64)[calls.which]
        ends = np.cumsum(lengths)
        self._starts = ends - lengths
        self._words = np.zeros(max(int(lengths.sum()), 1), np.int64)
        in_arena, outside = [np.zeros((2, 0), np.int64)], [np.zeros((3, 0), np.int64)]
        # Entry by entry, and for all its calls at once: large programs have few entries and very many calls.
        for entry, rows, bases in by_entry:
            starts = self._starts[rows]
            self._words[starts[:, None] + np.arange(len(numbers[entry]))] = numbers[entry]
            for argument, base, offset in entry.layout.addresses:
                memory = bases[:, base]
                at = offsets[memory]
                lies = at >= 0
                if lies.any():
                    in_arena.append(np.stack([starts[lies] + argument, at[lies] + offset]))
                if not lies.all():
                    lies = ~lies
                    words = starts[lies] + argument
                    outside.append(np.stack([memory[lies], words, np.full(len(words), offset)]))
            if entry.layout.status is not None:
                self._words[starts + entry.layout.status] = self._status_of[rows]
        #: Which words are addresses in the arena, and their offsets there.
        self._arena_words = np.concatenate(in_arena, axis=1)
        #: Memory outside of it, by its number, which words are addresses there, and their offsets.
        patches = np.concatenate(outside, axis=1)
        self._outside = patches[:, np.argsort(patches[0], kind="stable")]
        #: The same by value, of those that were bound one by one.
        self._patches: dict[Value, list[tuple[int, int]] | tuple[Array, Array]] = {}

    @property
    def kernels(self) -> dict[Step, str]:  # type: ignore[override]  # nobody sets it
        """How each step is run, for people to read."""
        return self._texts(0)

    @property
    def notes(self) -> dict[Step, str]:  # type: ignore[override]
        """How threads share each step."""
        alone = {self._calls.steps[row]: "one thread" for rows in self._alone for row in rows.tolist()}
        return self._texts(1) | alone

    def _texts(self, which: int) -> dict[Step, str]:
        texts = [kind.texts[which] for kind in self._kinds_of_steps]
        return {step: texts[number] for step, number in zip(self._steps, self._kind_numbers.tolist(), strict=True)}

    # Addresses --------------------------------------------------------------------------------------------------

    def place(self, arena: Buffer) -> None:
        self._arena = arena.host
        self._use_arena()

    def _use_arena(self) -> None:
        """Point every kernel that uses a value in the arena there."""
        assert self._arena is not None
        address = address_of(self._arena)
        which, offsets = self._arena_words
        self._words[which] = address + offsets
        for offset, setter in self._arena_setters:
            setter(address + offset)
        self._views.clear()

    def bind(self, value: Value, buffer: Buffer) -> None:
        array = buffer.host
        assert array is not None
        if self._arrays.get(value) is not array:
            self._bind_array(value, array)

    def bind_all(self, engine: Engine, arrays: Mapping[Value, Array]) -> None:
        known = self._arrays
        self._bind_arrays({value: array for value, array in arrays.items() if known.get(value) is not array})

    def feed(self, engine: Engine, inputs: Mapping[Value, Array], scalars: Scalars | None = None) -> None:
        for value, array in (inputs if scalars is None else {**inputs, **scalars.arrays}).items():
            if self._arrays.get(value) is not array:
                self._bind_array(value, array)

    def _bind_array(self, value: Value, array: Array) -> None:
        """Point every kernel that uses an external value to its array."""
        address = address_of(array)
        self._arrays[value] = array
        if self._bound.get(value) == address:
            return
        self._bound[value] = address
        patches = self._patches.get(value)
        if patches is None:
            begin, end = np.searchsorted(self._outside[0], (value.index, value.index + 1))
            words, offsets = self._outside[1:, begin:end]
            few = list(zip(words.tolist(), offsets.tolist(), strict=True)) if len(words) < _FEW else None
            patches = self._patches[value] = (words, offsets) if few is None else few
        if isinstance(patches, tuple):  # what very many calls read, as updates read the learning rate
            self._words[patches[0]] = address + patches[1]
        else:
            for index, offset in patches:
                self._words[index] = address + offset
        for offset, setter in self._setters.get(value, ()):
            setter(address + offset)

    def _bind_arrays(self, arrays: Mapping[Value, Array]) -> None:
        """The same of many values at once."""
        if len(arrays) < _FEW:
            for value, array in arrays.items():
                self._bind_array(value, array)
            return
        addresses = [address_of(array) for array in arrays.values()]
        self._arrays.update(arrays)
        self._bound = {value: address for value, address in self._bound.items() if value not in arrays}
        values = list(arrays)
        known = np.zeros(max(value.index for value in values) + 1, np.int64)
        known[numbers_of(values)] = addresses
        numbers, words, offsets = self._outside[:, : np.searchsorted(self._outside[0], len(known))]
        given = known[numbers]
        bound = given != 0
        self._words[words[bound]] = (given + offsets)[bound]
        for value in self._setters:
            for offset, setter in self._setters[value] if value in arrays else ():
                setter(int(known[value.index]) + offset)

    def _array(self, value: Value) -> Array:
        """A value as a NumPy array over the memory it lies in."""
        if value in self._views:
            return self._views[value]
        operand = self._operands[value]
        placement = self.program.plan.placements.get(operand.base)
        if placement is not None:
            assert self._arena is not None
            base = self._arena[placement.offset : placement.offset + placement.nbytes].view(operand.base.dtype)
        else:
            base = self._arrays[operand.base].reshape(-1)
        strides = tuple(stride * operand.dtype.itemsize for stride in operand.strides)
        view = np.lib.stride_tricks.as_strided(base[operand.offset :], operand.shape, strides)
        if placement is not None:
            self._views[value] = view
        return view

    def read(self, value: Value) -> Array:
        copied: Array = self._array(value).copy()
        return copied

    keep = read

    # Tapes ------------------------------------------------------------------------------------------------------

    def _segments(self, phases: Sequence[str]) -> list[_Segment]:
        key = tuple(phases)
        segments = self._tapes.get(key)
        if segments is None and len(key) > 1 and self.program.runs_in_phases:  # as when they are run one by one
            return [segment for phase in key for segment in self._segments((phase,))]
        if segments is None:
            segments = []
            rows = np.flatnonzero(np.isin(self._calls.phases, self._numbers_of(phases)))
            begin = 0
            for before, step in [*self._without, (len(self._calls), None)]:
                if step is not None and step.phase not in phases:
                    continue
                end = int(np.searchsorted(rows, before))
                if end > begin:
                    segments.append(self._native(rows[begin:end]))
                if step is not None:
                    segments.append(_Segment(step=step))
                begin = end
            self._tapes[key] = segments  # only now: memory may not have sufficed for all of them
        return segments

    def _numbers_of(self, phases: Sequence[str]) -> list[int]:
        return [number for number, phase in enumerate(self._phases) if phase in phases]

    def _native(self, rows: Array) -> _Segment:
        """Some of the calls in one call of native code."""
        calls = self._calls.only(rows)
        threads = useful_threads(float(calls.costs().sum()), self._threads)
        turns = schedule(calls, self._memory, self._status_of[rows] != 0, threads)
        alone = (turns & ALONE) != 0
        self._alone.append(rows[alone])
        # Columns: the kernel, where its arguments lie, whether threads wait, where it says that it failed.
        tape = np.zeros((len(calls), 4), np.int64)
        tape[:, 0] = np.array([self._kernels.get(entry, 0) for entry in calls.entries], np.int64)[calls.which]
        tape[:, 1] = address_of(self._words) + 8 * self._starts[rows]
        updates = np.isin(calls.phases, self._numbers_of(["update"]))
        streams = np.array([entry.streams for entry in calls.entries], np.bool_)[calls.which]
        if threads > 1:
            streams |= updates & ~alone & self._for_others[rows]
        tape[:, 2] = turns | np.where(updates, FLUSH, 0) | np.where(streams, STREAM, 0)
        tape[:, 3] = self._status_of[rows]
        library = onednn.load()
        first_sgemm.wait()
        openmp = (library.omp_get_max_threads, library.omp_set_num_threads) if library is not None else (0, 0)
        job = np.array([address_of(tape), len(calls), address_of(self._barrier), *openmp], np.int64)
        return _Segment(job, tape, address_of(job), 1 if alone.all() else threads, rows)

    # Running ----------------------------------------------------------------------------------------------------

    def prepare(self, phases: Sequence[str]) -> None:
        self._segments(phases)
        self.engine.team_of(self._threads)

    def run(self, phases: Sequence[str], profile: Profile | None = None) -> None:
        if self._threads != self.engine.threads:  # slices of the batch depend on the number of threads
            known = self._arrays
            self._threads, self._kinds = self.engine.threads, Kinds()
            self._build()
            self._use_arena()
            for value, array in known.items():
                self._bind_array(value, array)
        if profile is not None:
            self._run_profiled(phases, profile)
            return
        for segment in self._segments(phases):
            if segment.step is not None:
                self._fall_back(segment.step)
            else:
                self.engine.run_together(self._threads, segment.address, segment.threads)
                if self._flags[FAILED]:
                    self._fail(phases)

    def _fail(self, phases: Sequence[str]) -> None:
        """Kernels cannot raise: one has stopped the pass. Say which and why, and be ready for the next pass."""
        self._barrier[:] = 0
        statuses = {row: int(status[0]) for row, status in self._watched}
        for _, status in self._watched:
            status[0] = 0
        failed = min(row for row, status in statuses.items() if status)
        step, meaning = self._calls.steps[failed], self._calls.entries[self._calls.which[failed]].reason
        if meaning is None:
            self._fall_back(step)
        reason = "failed in native code" if meaning is None else meaning(statuses[failed])
        raise ExecutionError(
            f"layer '{step.layer}': {reason}",
            step=step.op.name,
            phase=step.phase,
            changed=", ".join(self._changed_before(step, phases)),
        )

    def _changed_before(self, failed: Step, phases: Sequence[str]) -> list[str]:
        """What a pass that ended at a step had already written: an update does not wait for the last gradient."""
        steps = self.program.steps
        done = (step for step in steps[: steps.index(failed)] if step.phase in phases and not step.op.is_pure)
        return list(dict.fromkeys(f"{value.kind} '{value.label}'" for step in done for value in overwritten_by(step)))

    def _run_profiled(self, phases: Sequence[str], profile: Profile) -> None:
        """As it always runs, and every thread reads the clock at every entry.

        An entry takes until the calling thread begins the next one: with its wait for the others, if there is one.
        """
        for segment in self._segments(phases):
            start = time.perf_counter()
            if segment.step is not None:
                self._fall_back(segment.step)
                profile.add(segment.step, time.perf_counter() - start, start)
                continue
            times = self._traced(segment, phases)
            seconds = time.perf_counter() - start
            mine = np.append(times[0, :, BEGAN], times[0, -1, ENDED])
            # The clock has a unit of its own: from the first entry to the last it is the time the call took.
            mine = (mine - mine[0]) * (seconds / max(1, mine[-1] - mine[0]))
            for row, began, took in zip(segment.rows.tolist(), mine[:-1].tolist(), np.diff(mine).tolist(), strict=True):
                profile.add(self._calls.steps[row], took, start + began)

    def trace(self, phases: Sequence[str]) -> list[tuple[list[Entry], Array, Array]]:
        """Run, and say what every thread does: entries, their turns (see `threads`), and times as of `_traced`.

        Steps without a kernel are run, and left out.
        """
        found = []
        for segment in self._segments(phases):
            if segment.tape is None:
                assert segment.step is not None
                self._fall_back(segment.step)
                continue
            entries = [self._calls.entries[number] for number in self._calls.which[segment.rows].tolist()]
            found.append((entries, segment.tape[:, 2], self._traced(segment, phases)))
        return found

    def _traced(self, segment: _Segment, phases: Sequence[str]) -> Array:
        """Run a segment. When each thread arrived at, began and ended each of its entries, in ticks of a clock."""
        times = np.zeros((segment.threads, len(segment.rows), 3), np.int64)
        job = np.append(segment.job, address_of(times))
        self.engine.run_together(self._threads, address_of(job), segment.threads, traced=True)
        if self._flags[FAILED]:
            self._fail(phases)
        return times

    def _fall_back(self, step: Step) -> None:
        """A step without a native kernel, by its NumPy meaning; the printed plan says so."""
        try:
            with np.errstate(all="ignore"):
                results = run_meaning(step, [self._array(value) for value in step.inputs])
        except (ValueError, IndexError) as error:
            raise ExecutionError(f"layer '{step.layer}': {error}", step=step.op.name, phase=step.phase) from error
        for value, array in zip(step.results, results, strict=True):
            np.copyto(self._array(value), array)


def _entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """The kernels of a step; None where it has none."""
    if step.results and not any(value.size for value in step.results):
        return []
    maker = KERNELS[step.op.name]
    if maker is None:
        return None
    if reads_bfloat16(step):
        return maker(step, operands)
    return widened_entries(step, operands, maker, READS[step.op.name])


def _numbers(entry: Entry, kernels: Mapping[Code, int]) -> list[int]:
    """The arguments of an entry, with 0 for the addresses of operands."""
    numbers: list[int] = []
    for argument in entry.arguments:
        if isinstance(argument, np.ndarray):
            numbers.append(address_of(argument))
        elif isinstance(argument, Code):
            numbers.append(kernels[argument])
        else:
            numbers.append(0 if isinstance(argument, Operand) else argument)
    return numbers
