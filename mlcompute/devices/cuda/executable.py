"""A program on a GPU: its kernels and library calls, what they are given, and the graphs they are captured into."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.cuda.arguments import ArgumentBlock
from mlcompute.devices.cuda.branches import branches, enqueue_branches
from mlcompute.devices.cuda.completion import CudaCompletion, Statuses
from mlcompute.devices.cuda.exchange import GpuArray
from mlcompute.devices.cuda.failed_step import explain
from mlcompute.devices.cuda.input_blocks import RESULT_BYTES, InputBlocks, KeptValue, Reader, SmallPart
from mlcompute.devices.cuda.kernels.launch import Launch, LibraryCall, Work
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.cuda.memory import CudaBuffer, PlacedConstants
from mlcompute.devices.cuda.merge_launches import merge_launches, without_unused
from mlcompute.devices.cuda.pinned_copies import Copy, PinnedCopies
from mlcompute.devices.device import Buffer, Completion, Engine, Executable, Profile
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.devices.scalars import Scalars
from mlcompute.errors import DeviceError, ExecutionError
from mlcompute.ops.bfloat16 import is_numeric
from mlcompute.ops.op import Array, Step, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

#: Which inputs lie in memory of other libraries, and where: (number of the value, address).
Lent = tuple[tuple[int, int], ...]
#: Phases, block of inputs, and such memory.
_GraphKey = tuple[tuple[str, ...], int, Lent]
#: Each small result that is sent to the host is a node of its own.
_MOST_REPORTED = 2
#: Graphs contain addresses: there are graphs for so many sets of arrays that lie on the device already.
_MOST_LENT = 4


class CudaExecutable(Executable):
    """A built program.

    Phases that were prepared are graphs already, which runs launch. Else the first run enqueues one kernel after the
    other, and the second captures them. Graphs contain addresses: when other memory is bound, they are captured again.
    """

    def __init__(self, engine: Cuda, program: Program) -> None:
        self.engine, self.program = engine, program
        self.kernels: dict[Step, str] = {}
        self.notes: dict[Step, str] = {}
        self.inputs = {}
        self._driver, self._stream = engine.driver, engine.stream
        self._arena: CudaBuffer | None = None
        self._progress = engine.progress
        self._operands = Operands(program.steps, program.plan.views, program.plan.workspaces)
        self._buffers: dict[Value, CudaBuffer] = {}
        #: What could be fed, and is bound to memory of its own.
        self._bound_inputs: set[Value] = set()
        fed = [*program.inputs.values(), *(key for key, _ in program.random_keys)]
        scalars = list(program.scalars.values())
        self._blocks = InputBlocks(engine, list(dict.fromkeys(fed)), scalars, runs_at_once=program.runs_at_once)
        #: Where what was fed lies, and which block and arrays of others that is.
        self._fed: dict[Value, int] = {}
        self._fed_from: tuple[int, Lent] = (-1, ())
        #: Arrays of other libraries that are read in place, and where they lie.
        self._lent: dict[Value, GpuArray] = {}
        self._lent_from: Lent = ()
        #: Sets of such arrays for which there are graphs, the one used last at the end; and others seen before.
        self._known: dict[Lent, None] = {}
        self._seen: deque[Lent] = deque(maxlen=4 * _MOST_LENT)
        self._constants = PlacedConstants(self._driver, engine.staging, program.constants)
        needed = without_unused(self._made(), program, self._operands)
        self._work = merge_launches(needed, program.plan, runs_in_phases=not program.runs_at_once)
        self._name_merged()
        launches = [work for work in self._work if isinstance(work, Launch)]
        functions = self._driver.functions([launch.source for launch in launches])
        self._functions = dict(zip(launches, functions, strict=True))
        for launch, function in self._functions.items():
            if launch.shared_bytes:
                self._driver.allow_shared_memory(function, launch.shared_bytes)
        self._statuses = Statuses(engine, self._work, self._explain, self._blocks.turns)
        self._arguments = ArgumentBlock(launches, self._constants.address_of, self._statuses)
        self.can_fail, self.contains_failures = self._statuses.can_fail, True
        self.sends: dict[Value, int] = {}
        #: What is copied before and after the kernels of a run.
        self._copies: dict[tuple[bool, tuple[Copy, ...]], PinnedCopies] = {}
        #: Graphs by phases and block of inputs; None after the first run. Emptied when an address changes.
        self._graphs: dict[_GraphKey, _Graph | None] = {}
        #: How often an address has changed: what others have captured is good as long as it stays.
        self.rebindings = 0
        #: Has it been enqueued, so that libraries have loaded their kernels?
        self.has_run = False

    # Building ---------------------------------------------------------------------------------------------------

    def _made(self) -> list[Work]:
        work: list[Work] = []
        for step in self.program.steps:
            if step.op.is_view and step.results[0] in self.program.plan.views:
                continue
            made = KERNELS[step.op.name].make(step, self._operands)
            work += made
            self.kernels[step] = ", ".join(dict.fromkeys(each.kernel for each in made)) or "nothing to do"
            self.notes[step] = ", ".join(f"{each.grid[0]} blocks" for each in made if isinstance(each, Launch))
        return work

    def _name_merged(self) -> None:
        """Steps that share a launch say so."""
        for work in self._work:
            if isinstance(work, Launch):
                for number, step in enumerate(dict.fromkeys(work.steps if work.parts else ())):
                    self.notes[step] = f"{work.kernel}, {work.grid[0]} blocks" if number == 0 else "in the same launch"

    # Addresses --------------------------------------------------------------------------------------------------

    def place(self, arena: Buffer) -> None:
        assert isinstance(arena, CudaBuffer)
        with self.engine.lock:
            if self._arena is None:
                self._blocks.allocate()
            self._arena = arena
            for value, placement in self.program.plan.placements.items():
                self._arguments.bind(value, arena.address + placement.offset)
            if self._blocks.is_captured:
                self.sends = self._small_results(arena)
                self._blocks.send_back(self.sends)
            self._graphs = dict.fromkeys(self._graphs)
            self.rebindings += 1

    def _address(self, operand: Operand) -> int | None:
        """Where an operand lies; None for what has not been bound yet."""
        base = operand.base
        placement = self.program.plan.placements.get(base)
        if placement is not None:
            return None if self._arena is None else self._arena.address + placement.offset + operand.byte_offset
        buffer = self._buffers.get(base)
        address = self._fed.get(base) if buffer is None else buffer.address
        return self._constants.address_of(operand) if address is None else address + operand.byte_offset

    def bind(self, value: Value, buffer: Buffer) -> None:
        assert isinstance(buffer, CudaBuffer)
        known = self._buffers.get(value)
        if known is buffer:
            return
        with self.engine.lock:
            self._buffers[value] = buffer
            if value in self._blocks.offsets:
                self._bound_inputs.add(value)
            if known is None or known.address != buffer.address:
                self._arguments.bind(value, buffer.address)
                self._graphs = dict.fromkeys(self._graphs)
                self.rebindings += 1

    def feed(self, engine: Engine, inputs: Mapping[Value, Array], scalars: Scalars | None = None) -> None:
        if not inputs and scalars is None:
            return
        with self.engine.lock:
            if self._bound_inputs:
                self._unbind(inputs)
            for array in inputs.values():
                if type(array) is GpuArray:
                    self._feed_in_place(inputs, scalars)
                    return
            if self._lent:
                self._lend(inputs, {})
            self._blocks.send(inputs, scalars)

    def _feed_in_place(self, inputs: Mapping[Value, Array | GpuArray], scalars: Scalars | None) -> None:
        """Some arrays lie on the device already: read them there, or copy them there."""
        on_device = {value: array for value, array in inputs.items() if isinstance(array, GpuArray)}
        others = {value: array for value, array in inputs.items() if not isinstance(array, GpuArray)}
        self._lend(inputs, on_device)
        self._blocks.send(others, scalars)
        for value, array in on_device.items():
            if value not in self._lent:
                array.copy_to(self._blocks.address(value))

    def _unbind(self, inputs: Iterable[Value]) -> None:
        """Inputs that were bound to memory of their own lie in the block from now on."""
        for value in self._bound_inputs.intersection(inputs):
            self._bound_inputs.remove(value)
            del self._buffers[value]
            self._fed_from = (-1, ())
            self._graphs = dict.fromkeys(self._graphs)
            self.rebindings += 1

    def _lend(self, inputs: Mapping[Value, object], on_device: Mapping[Value, GpuArray]) -> None:
        """Decide which arrays are read where they lie: those kernels can read, and graphs were or may be captured for.

        An array that comes from another place every time is copied: a captured graph saves more than a copy costs.
        """
        kept = {value: array for value, array in self._lent.items() if value not in inputs}
        fitting = {value: array for value, array in on_device.items() if self._can_read_in_place(value, array)}
        lent = {**kept, **fitting}
        places: Lent = tuple(sorted((value.index, array.address) for value, array in lent.items()))
        if fitting and places not in self._known and len(self._known) >= _MOST_LENT:
            if places in self._seen:  # it comes again: one that has not been used for longest makes room
                self._evict(next(iter(self._known)))
            else:
                self._seen.append(places)
                lent = kept
                places = tuple(sorted((value.index, array.address) for value, array in lent.items()))
        if places:
            self._known.pop(places, None)
            self._known[places] = None
        if any(value not in lent for value in on_device) and self._blocks.is_captured:
            self._blocks.copy_directly()  # a captured copy would overwrite what is copied on the device
            self._graphs, self.sends = {}, {}
        for array in fitting.values() if lent is not kept else ():
            array.begin_reading()
        self._lent, self._lent_from = lent, places

    def _can_read_in_place(self, value: Value, array: GpuArray) -> bool:
        """Can it be read in place: by one run that reads it, and nobody afterwards?"""
        return array.is_aligned and self.program.runs_at_once and value not in self.program.kept

    def _evict(self, places: Lent) -> None:
        del self._known[places]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[2] != places}

    def _use_inputs(self) -> None:
        """Kernels read what was fed last from now on."""
        blocks = self._blocks
        if self._fed_from != (blocks.turn, self._lent_from):
            self._fed_from = (blocks.turn, self._lent_from)
            self._fed = {value: blocks.address(value) for value in blocks.offsets}
            self._fed |= {value: array.address for value, array in self._lent.items()}
            for value, address in self._fed.items():
                if value not in self._buffers:
                    self._arguments.bind(value, address)

    def _small_results(self, arena: CudaBuffer) -> dict[Value, int]:
        """Small results that every run sends to the host by itself, and where they lie: losses."""
        found: dict[Value, int] = {}
        for value in sorted(self.program.kept, key=lambda value: value.index):
            operand = self._operands[value]
            placement = self.program.plan.placements.get(operand.base)
            size = sum(each.nbytes for each in found) + value.nbytes
            if placement is not None and operand.is_dense and value.nbytes in (4, 8, 12, 16) and size <= RESULT_BYTES:
                found[value] = arena.address + placement.offset + operand.byte_offset
        return found if len(found) <= _MOST_REPORTED else {}

    def keep(self, value: Value) -> Array | Callable[[], Array]:
        operand = self._operands[value]
        address = self._address(operand)
        if address is None or not operand.is_dense or not 0 < value.nbytes <= SmallPart.NBYTES:
            return self.read(value)
        return KeptValue(self.engine, value, address)

    def device_array(self, value: Value) -> DeviceArray | None:
        operand = self._operands[value]
        address = self._address(operand)
        if address is None or not operand.is_dense or not is_numeric(operand.dtype):
            return None
        owners = self._arena, self._buffers.get(operand.base), self._lent
        buffer = CudaBuffer.over(self.engine.staging, address, value.nbytes, owners)
        return DeviceArray(buffer, operand.shape, operand.dtype)

    def read(self, value: Value) -> Array:
        operand = self._operands[value]
        address = self._address(operand)
        assert address is not None, f"{value} was never bound"
        if operand.is_dense:
            array = np.empty(operand.shape, operand.dtype)
            self.engine.staging.fetch(array, address)
            return array
        last = sum((extent - 1) * stride for extent, stride in zip(operand.shape, operand.strides, strict=True))
        flat = np.empty(last + 1 if operand.size else 0, operand.dtype)
        self.engine.staging.fetch(flat, address)
        strides = tuple(stride * operand.dtype.itemsize for stride in operand.strides)
        return np.array(np.lib.stride_tricks.as_strided(flat, operand.shape, strides))

    # Running ----------------------------------------------------------------------------------------------------

    def prepare(self, phases: Sequence[str]) -> None:
        """Let libraries load their kernels, and capture a graph for every turn: runs have only to launch them."""
        blocks, work = self._blocks, list(self._of(phases))
        calls = [each for each in work if isinstance(each, LibraryCall)]
        if self._arena is None or not all(map(self._may_be_tried, calls)):
            return
        with self.engine.lock:
            before = blocks.turn
            try:
                for turn in range(blocks.turns):
                    blocks.turn = turn
                    self._use_inputs()
                    with self._driver.account.taking("libraries"):
                        while calls:
                            self._enqueue_one(calls.pop(), self._stream)
                    graph = self._graphs[tuple(phases), turn, self._lent_from] = self._captured(phases)
                    self._driver.upload_graph(graph.handle, self._stream)
            finally:
                blocks.turn = before

    def _may_be_tried(self, call: LibraryCall) -> bool:
        """Does it write nothing but memory that holds nothing before the first run?"""
        return call.touched[1] <= self.program.plan.placements.keys()

    def run(self, phases: Sequence[str], profile: Profile | None = None) -> Completion | None:
        engine, blocks = self.engine, self._blocks
        with engine.lock:
            turn = blocks.turn
            if self.can_fail or blocks.is_captured:
                blocks.finish_turn(turn)
            key = (tuple(phases), turn, self._lent_from)
            graph = self._graphs.get(key) if profile is None else None
            try:
                if graph is None:
                    graph = self._run_or_capture(key, profile)
                mark = None if blocks.is_captured else engine.take_event()  # a small step would pay for a mark
                if graph is not None:
                    self._driver.launch_graph(graph.handle, self._stream, mark)
                elif mark is not None:
                    self._driver.record(mark, self._stream)
            except BaseException:
                self._progress.recount()
                raise
            completion = CudaCompletion(engine, self._progress, self._statuses, blocks, phases, turn, mark)
            blocks.is_read(completion, turn)
            if self._lent:
                for array in self._lent.values():
                    array.end_reading()
            return completion

    def _run_or_capture(self, key: _GraphKey, profile: Profile | None) -> _Graph | None:
        """Run some phases kernel by kernel; when that has been done once, return them as a graph instead."""
        phases = key[0]
        self._use_inputs()
        if profile is not None:
            self._run_profiled(phases, profile)
        elif key not in self._graphs:
            with self._driver.account.taking("libraries"):  # they load their kernels when these first run
                self._enqueue(phases, self._stream)
            self._graphs[key] = None
        else:
            graph = self._graphs[key] = self._captured(phases)
            return graph
        return None

    # As a part of a captured step (step_graphs.py) -----------------------------------------------------------------

    def reserve(self, slots: int) -> None:
        """Let so many runs be fed before the first of them is enqueued."""
        self._blocks.reserve(slots)

    @property
    def overlaps(self) -> bool:
        """Is what it is fed copied while other runs compute?"""
        return self._blocks.overlaps

    def feed_slot(self, inputs: Mapping[Value, Array], slot: int) -> None:
        """Let the run of a slot read these arrays."""
        with self.engine.lock:
            self._blocks.reserve(slot + 1)
            self._unbind(inputs)
            self._lend(inputs, {})
            self._blocks.send(inputs, None, slot)

    def enqueue_slot(self, phases: Sequence[str], slot: int, stream: int, *, clears: bool) -> None:
        """Enqueue kernel after kernel on a stream, which may be captured; they read what a slot was fed.

        clears   forget what kernels have said before: runs for several slots say together what they have found
        """
        self._blocks.turn = slot
        self._use_inputs()
        self._copy([*self._blocks.arrivals(), *(self._statuses.cleared() if clears else ())], stream)
        for work in self._of(phases):
            self._enqueue_one(work, stream)
        self.has_run = True

    @property
    def status_words(self) -> tuple[int, int]:
        """Where kernels say that they have found invalid data, and how many can."""
        return self._statuses.place

    @property
    def guard(self) -> int:
        """The address where guarded kernels look whether to change nothing."""
        return self._statuses.failed

    def error_now(self, phases: Sequence[str]) -> ExecutionError | None:
        """What kernels have said, now that they have finished."""
        return self._statuses.error_now(phases)

    def slot_is_read(self, slot: int, reader: Reader) -> None:
        """A step that reads what a slot was fed has been started."""
        self._blocks.is_read(reader, slot)

    def _of(self, phases: Sequence[str]) -> Iterable[Work]:
        return (work for work in self._work if work.step.phase in phases)

    def _enqueue(self, phases: Sequence[str], stream: int) -> None:
        self._begin(stream)
        for work in self._of(phases):
            self._enqueue_one(work, stream)
        self._end(phases, stream)

    def _begin(self, stream: int) -> None:
        """What stands before the first kernel."""
        copies = [*self._blocks.arrivals(), *self._statuses.cleared()]
        self._copy(copies, stream, begins=self._blocks.is_captured)

    def _end(self, phases: Sequence[str], stream: int) -> None:
        """What stands behind the last kernel."""
        results = self._blocks.departures() if "forward" in phases else []
        self._copy([*self._statuses.reported(self._blocks.turn), *results], stream)

    def _copy(self, copies: Sequence[Copy], stream: int, *, begins: bool = False) -> None:
        if copies:
            key = begins, tuple(copies)
            if key not in self._copies:
                self._copies[key] = PinnedCopies(self.engine, copies, begins=begins)
            self._copies[key].enqueue(stream)

    def _enqueue_one(self, work: Work, stream: int) -> None:
        if isinstance(work, LibraryCall):
            self._call_library(work, stream)
            return
        if work.guarded:
            self._statuses.combine(work, stream)
        parameters = self._arguments.address(work)
        self._driver.launch(self._functions[work], work.grid, work.block, work.shared_bytes, stream, parameters)

    def _call_library(self, call: LibraryCall, stream: int) -> None:
        addresses = [self._address(operand) for operand in call.operands]
        assert None not in addresses, f"{call.step}: memory was not bound"
        call.enqueue(stream, [address or 0 for address in addresses])

    def _captured(self, phases: Sequence[str]) -> _Graph:
        stream, work = self.engine.capture_stream, list(self._of(phases))
        places = branches(work, self.program.plan)
        self._driver.begin_capture(stream)
        try:
            self._begin(stream)
            enqueue_branches(work, places, self._driver, [stream, *self.engine.branch_streams], self._enqueue_one)
            self._end(phases, stream)
        except BaseException:
            self._driver.abort_capture(stream)
            raise
        return _Graph(self.engine, self._driver.end_capture(stream))

    def _explain(self, step: Step) -> str | None:
        return explain(self.program, self._operands, self.read, step)

    def _run_profiled(self, phases: Sequence[str], profile: Profile) -> None:
        """Kernel after kernel, with marks between them."""
        driver, stream = self._driver, self._stream
        work = list(self._of(phases))
        marks = [driver.create_event(timed=True) for _ in range(len(work) + 1)]
        try:
            self._begin(stream)
            driver.record(marks[0], stream)
            for each, mark in zip(work, marks[1:], strict=True):
                self._enqueue_one(each, stream)
                driver.record(mark, stream)
            self._end(phases, stream)
            driver.synchronize(stream)
            for each, start, end in zip(work, marks, marks[1:], strict=False):
                seconds = driver.seconds_between(start, end)
                for step, share in _shares(each):
                    profile.add(step, share * seconds)
        finally:
            for mark in marks:
                driver.free_event(mark)


class _Graph:
    """A captured graph, given back with the last reference to it."""

    def __init__(self, engine: Cuda, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, _release, engine, handle).atexit = False


def _release(engine: Cuda, graph: int) -> None:
    # Only after its last launch has finished; where that fails, the context is gone, and the graph with it.
    with contextlib.suppress(DeviceError):
        engine.synchronize()
        engine.driver.free_graph(graph)


def _shares(work: Work) -> list[tuple[Step, float]]:
    """Steps, and their parts of the time that a launch takes."""
    if not isinstance(work, Launch) or not work.parts:
        return [(work.step, 1.0)]
    blocks = sum(part.grid[0] for part in work.parts)
    return [(part.step, part.grid[0] / blocks) for part in work.parts]
