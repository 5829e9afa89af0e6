"""The CPU engine: builds programs into tapes of native kernels and runs a full pass in one call."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices import register
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.kernels.table import KERNELS, READS, SUPPORTS, WORKSPACES, reads_bfloat16
from mlcompute.devices.cpu.kernels.widened import widened, widened_entries, widened_workspace
from mlcompute.devices.cpu.onednn.first_product import first_product
from mlcompute.devices.cpu.runtime.entry import Entry, KernelCall
from mlcompute.devices.cpu.runtime.like_steps import Kinds, LikeSteps
from mlcompute.devices.cpu.runtime.machine import default_thread_count
from mlcompute.devices.cpu.runtime.memory import address_of, touch
from mlcompute.devices.cpu.runtime.schedule import schedule, useful_threads
from mlcompute.devices.cpu.runtime.threads import ALONE, BARRIER_WORDS, FAILED, FLUSH, Team, team_codes
from mlcompute.devices.device import Buffer, Engine, Executable, Profile, Traits
from mlcompute.devices.host_memory import HostBuffer, allocate
from mlcompute.devices.interrupts import held
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.devices.scalars import Scalars
from mlcompute.enums import DeviceType
from mlcompute.errors import ExecutionError
from mlcompute.ops.op import Array, Step, Value, overwritten_by, run_meaning

#: How bfloat16 is multiplied, for people to read: with and without instructions for it.
_BFLOAT16_FACTS = {True: "multiplied by oneDNN (AVX512_BF16 or AMX)", False: "stored so, multiplied as float32"}

_engines: weakref.WeakSet[Cpu] = weakref.WeakSet()


def _after_fork() -> None:
    # Threads do not survive a fork: the child starts its own when it first needs them.
    for engine in list(_engines):
        engine.forget_team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Cpu(Engine):
    """oneDNN, where there is one, for matmul and convolution; LLVM loops for everything else."""

    name = "cpu"
    device_type = DeviceType.CPU
    traits = Traits(fuses_elementwise=True, channels_last=True, mixes_types=True, attention_by_token=True)
    precisions = ("float32", "bf16")
    smallest_bfloat16 = 1 << 14

    def __init__(self, threads: int | None = None) -> None:
        #: Threads that work together on one program.
        self.threads = threads or default_thread_count()
        self._team: Team | None = None
        self._team_lock = threading.Lock()
        self._stop_team: weakref.finalize[..., Cpu] | None = None
        _engines.add(self)

    def forget_team(self) -> None:
        """The worker threads are gone."""
        if self._team is not None:
            self._team.forget()
            self._team = None
        self._team_lock = threading.Lock()  # a thread that is gone may have held it

    @property
    def team(self) -> Team:
        """The worker threads."""
        return self.team_of(self.threads)

    def team_of(self, threads: int) -> Team:
        """A team of that many threads, started at its first use; one of another size is stopped."""
        team = self._team
        if team is None or team.size != threads:
            with self._team_lock:
                team = self._team
                if team is None or team.size != threads:
                    if self._stop_team is not None:
                        self._stop_team()
                    team = self._team = Team(threads)
                    self._stop_team = weakref.finalize(self, team.stop)
                    self._stop_team.atexit = False
        return team

    def run_together(self, threads: int, job: int, useful: int) -> None:
        """Run a program (the address of its run arguments) on some threads of a team.

        Whoever compiles for another number of threads meanwhile may have stopped the team before it was given the job.
        """
        while not self.team_of(threads).run(job, useful):
            pass

    def facts(self) -> dict[str, str]:
        import llvmlite.binding as llvm

        library = onednn.load()
        version = ".".join(map(str, llvm.llvm_version_info))
        facts = {
            "loops": f"LLVM {version} for {llvm.get_host_cpu_name()}",
            "libraries": library.name if library else "our own kernels",
            "bfloat16": _BFLOAT16_FACTS[onednn.has_bfloat16_instructions()],
            "threads": str(self.threads),
        }
        return facts if library else facts | {"note": f"can be slower; {onednn.why_missing()}"}

    def foresee(self, steps: Sequence[Step]) -> None:
        if not first_product.is_begun and any(step.op.name == "matmul" for step in steps):
            from mlcompute.devices.cpu.gemm.matmul import begin_sgemm  # imported where there is a product

            begin_sgemm(steps)

    def supports(self, step: Step) -> bool:
        supports = SUPPORTS[step.op.name]
        return supports is None or supports(step if reads_bfloat16(step) else widened(step))

    def needs_dense(self, steps: Sequence[Step], views: Mapping[Value, Value]) -> Mapping[Step, Sequence[Value]]:
        operands: Operands | None = None
        needed: dict[Step, Sequence[Value]] = {}
        readable: set[Hashable] = set()  # what operands of ops without attributes look like that kernels can read
        for step in steps:
            reads = READS[step.op.name]
            if reads is None or views.keys().isdisjoint(step.inputs):
                continue
            if operands is None:
                operands = Operands(steps, views)
            look: Hashable = None
            if not step.attributes:
                look = (step.op, *[operands.look(value) for value in step.inputs + step.results])
                if look in readable:
                    continue
            if not reads_bfloat16(step) or reads(step, operands):
                readable.add(look)
            else:
                needed[step] = [value for value in step.inputs if not operands[value].is_dense]
        return needed

    def workspace(self, step: Step) -> int:
        measure = WORKSPACES[step.op.name]
        if not reads_bfloat16(step):
            return widened_workspace(step, measure)
        return 0 if measure is None else measure(step)

    def allocate(self, nbytes: int) -> Buffer:
        buffer = allocate(nbytes)
        touch(buffer.host, self.threads)
        return buffer

    def wrap(self, array: Array) -> Buffer | None:
        return HostBuffer(array)

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        assert like is None or isinstance(like, CpuExecutable)
        with held:
            executable = CpuExecutable(self, program, like)
        if arena is not None:
            executable.place(arena)
        return executable


@dataclass(eq=False)
class _Segment:
    """Part of a pass: native entries run in one call, or one step by its NumPy meaning."""

    job: Array | None = None
    tape: Array | None = None
    address: int = 0
    threads: int = 1
    step: Step | None = None


class CpuExecutable(Executable):
    """A built program: its kernels, their arguments, and the tapes of the phase combinations that were requested."""

    def __init__(self, engine: Cpu, program: Program, like: CpuExecutable | None = None) -> None:
        self.engine, self.program = engine, program
        self.kernels: dict[Step, str] = {}
        self.notes: dict[Step, str] = {}
        self._arena: Array | None = None
        # The engine's number may change meanwhile: barriers are placed for this one.
        self._threads = engine.threads
        self._kinds: Kinds = {} if like is None or like._threads != self._threads else like._kinds  # noqa: SLF001
        self._build()

    def _build(self) -> None:
        program = self.program
        self._operands = Operands(program.steps, program.plan.views, program.plan.workspaces, self._threads)
        self._calls = _needed(self._made(), program, self._operands)
        native = [call for call in self._calls if isinstance(call, KernelCall)]
        entries = list(dict.fromkeys(call.entry for call in native))
        codes = [entry.code for entry in entries]
        codes += [argument for entry in entries for argument in entry.arguments if isinstance(argument, Code)]
        codes += team_codes()
        kernels = dict(zip(codes, kernel_cache.addresses(codes), strict=True))
        self._kernels = {entry: kernels[entry.code] for entry in entries}
        self._set_arguments(native, {entry: _numbers(entry, kernels) for entry in entries})
        self._setters: dict[Value, list[tuple[int, Callable[[int], None]]]] = {}
        self._arena_setters: list[tuple[int, Callable[[int], None]]] = []
        for entry in entries:
            for operand, setter in entry.pointers:
                place = program.plan.placements.get(operand.base)
                if place is None:
                    self._setters.setdefault(operand.base, []).append((operand.byte_offset, setter))
                else:
                    self._arena_setters.append((place.offset + operand.byte_offset, setter))
        self._watched = [call for call in native if call.status is not None]
        self._barrier = np.zeros(BARRIER_WORDS, np.int64)
        self._flags = self._barrier.data  # much cheaper to read than the array
        self._bound: dict[Value, int] = {}
        self._arrays: dict[Value, Array] = {}
        #: Views of values in the arena, which never moves: reading a loss after every step should cost nothing.
        self._views: dict[Value, Array] = {}
        for value, array in program.constants.items():
            self._bind_array(value, array)
        self._tapes: dict[tuple[str, ...], list[_Segment]] = {}

    def _set_arguments(self, calls: list[KernelCall], numbers: Mapping[Entry, list[int]]) -> None:
        """The arguments of all calls, one after the other; addresses are set when they are known.

        numbers  those of every entry, with 0 for addresses
        """
        by_entry: dict[Entry, list[KernelCall]] = {entry: [] for entry in numbers}
        end = 0
        for call in calls:
            entry, call.start = call.entry, end
            by_entry[entry].append(call)
            end += len(numbers[entry])
        self._words = np.zeros(max(end, 1), np.int64)
        self._patches: dict[Value, list[tuple[int, int]]] = {}
        places = {base: at.offset for base, at in self.program.plan.placements.items()}
        in_arena: list[tuple[Array, Array]] = []
        # Entry by entry, and for all its calls at once: large programs have few entries and very many calls.
        for entry, own in by_entry.items():
            starts = np.array([call.start for call in own], np.int64)
            self._words[starts[:, None] + np.arange(len(numbers[entry]))] = numbers[entry]
            for argument, base, offset in entry.layout.addresses:
                found = [places.get(call.bases[base], -1) for call in own]
                offsets = np.array(found, np.int64)
                lies = offsets >= 0
                in_arena.append((starts[lies] + argument, offsets[lies] + offset))
                for number in np.flatnonzero(~lies).tolist() if -1 in found else ():
                    call = own[number]
                    self._patches.setdefault(call.bases[base], []).append((call.start + argument, offset))
            status = entry.layout.status
            for call in own if status is not None else ():
                if call.status is not None and status is not None:
                    self._words[call.start + status] = address_of(call.status)
        #: Which words are addresses in the arena, and their offsets there.
        self._arena_words = np.concatenate([np.zeros((2, 0), np.int64), *map(np.array, in_arena)], axis=1)

    def _made(self) -> list[KernelCall | Step]:
        """The calls of all steps in order; steps without a kernel as they are."""
        views, like = self.program.plan.views, LikeSteps(self._operands, self.program.plan.workspaces, self._kinds)
        made: list[KernelCall | Step] = []
        for step in self.program.steps:
            if step.op.is_view and step.results[0] in views:
                continue
            kind, calls = like.calls(step, _entries)
            made += [step] if kind.entries is None else calls
            self.kernels[step], self.notes[step] = kind.texts
        return made

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
        for index, offset in self._patches.get(value, ()):
            self._words[index] = address + offset
        for offset, setter in self._setters.get(value, ()):
            setter(address + offset)

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
            run: list[KernelCall] = []
            for call in self._calls:
                if _step_of(call).phase not in phases:
                    continue
                if isinstance(call, KernelCall):
                    run.append(call)
                    continue
                if run:
                    segments.append(self._native(run))
                    run = []
                segments.append(_Segment(step=call))
            if run:
                segments.append(self._native(run))
            self._tapes[key] = segments  # only now: memory may not have sufficed for all of them
        return segments

    def _native(self, calls: list[KernelCall]) -> _Segment:
        threads = useful_threads(sum(call.entry.cost for call in calls), self._threads)
        turns = schedule(calls, self.program, threads)
        self.notes.update({call.step: "one thread" for call, turn in zip(calls, turns, strict=True) if turn & ALONE})
        # Columns: the kernel, where its arguments lie, whether threads wait, where it says that it failed.
        tape = np.zeros((len(calls), 4), np.int64)
        tape[:, 0] = [self._kernels[call.entry] for call in calls]
        tape[:, 1] = address_of(self._words) + 8 * np.array([call.start for call in calls], np.int64)
        tape[:, 2] = turns
        tape[:, 2] |= np.array([FLUSH if call.step.phase == "update" else 0 for call in calls], np.int64)
        tape[:, 3] = [0 if call.status is None else address_of(call.status) for call in calls]
        library = onednn.load()
        first_product.wait()
        openmp = (library.omp_get_max_threads, library.omp_set_num_threads) if library is not None else (0, 0)
        job = np.array([address_of(tape), len(calls), address_of(self._barrier), *openmp], np.int64)
        return _Segment(job, tape, address_of(job), threads)

    # Running ----------------------------------------------------------------------------------------------------

    def prepare(self, phases: Sequence[str]) -> None:
        self._segments(phases)
        self.engine.team_of(self._threads)

    def run(self, phases: Sequence[str], profile: Profile | None = None) -> None:
        if self._threads != self.engine.threads:  # slices of the batch depend on the number of threads
            known = self._arrays
            self._threads, self._kinds = self.engine.threads, {}
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
        statuses = {call: int(call.status[0]) for call in self._watched if call.status is not None}
        for call in self._watched:
            assert call.status is not None
            call.status[0] = 0
        failed = next(call for call, status in statuses.items() if status)
        step, meaning = failed.step, failed.entry.reason
        if meaning is None:
            self._fall_back(step)
        reason = "failed in native code" if meaning is None else meaning(statuses[failed])
        raise ExecutionError(
            f"layer '{step.layer}': {reason}",
            step=step.op.name,
            phase=step.phase,
            changed=", ".join(self._changed_before(failed, phases)),
        )

    def _changed_before(self, failed: KernelCall, phases: Sequence[str]) -> list[str]:
        """What a pass that ended at an entry had already written: an update does not wait for the last gradient."""
        steps = [_step_of(call) for call in self._calls]
        done = (step for step in steps[: steps.index(failed.step)] if step.phase in phases and not step.op.is_pure)
        return list(dict.fromkeys(f"{value.kind} '{value.label}'" for step in done for value in overwritten_by(step)))

    def _run_profiled(self, phases: Sequence[str], profile: Profile) -> None:
        """Entry by entry, each timed by itself; all are prepared before the first clock is read."""
        wanted = [call for call in self._calls if _step_of(call).phase in phases]
        alone = [(_step_of(call), None if isinstance(call, Step) else self._native([call])) for call in wanted]
        for step, segment in alone:
            start = time.perf_counter()
            if segment is None:
                self._fall_back(step)
            else:
                self.engine.run_together(self._threads, segment.address, segment.threads)
                if self._flags[FAILED]:
                    self._fail(phases)
            profile.add(step, time.perf_counter() - start)

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
    return maker(step, operands) if reads_bfloat16(step) else widened_entries(step, operands, maker)


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


def _step_of(call: KernelCall | Step) -> Step:
    return call if isinstance(call, Step) else call.step


def _needed(calls: list[KernelCall | Step], program: Program, operands: Operands) -> list[KernelCall | Step]:
    """Calls without those that only write results that are never read: a step may return more than is used."""
    read = {operands[value].base for value in program.kept}
    for call in calls:
        if isinstance(call, Step):
            read.update([operands[value].base for value in call.inputs])
        else:
            for number in call.entry.layout.reads:
                read.add(call.bases[number])
    read.update(program.plan.workspaces.values())
    placements, needed = program.plan.placements, []
    for call in calls:
        if isinstance(call, Step) or not call.entry.writes:
            needed.append(call)
            continue
        for number in call.entry.layout.writes:
            base = call.bases[number]
            if base in read or base not in placements:
                needed.append(call)
                break
    return needed


register("cpu", lambda: [Cpu()])
