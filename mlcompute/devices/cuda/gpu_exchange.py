"""Sums in the memory of GPUs, and copies between them: by NCCL, or by the driver's own copies within a process.

NCCL's calls are a part of the captured graphs of a step (step_graphs.py). The driver's copies between GPUs are not.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.cuda.failure_flags import FailureFlags, Kernel
from mlcompute.devices.cuda.input_blocks import KeptValue, SmallPart
from mlcompute.devices.cuda.memory import CudaBuffer
from mlcompute.devices.cuda.nccl import Communicator
from mlcompute.devices.cuda.step_graphs import StepGraphs
from mlcompute.devices.device import Buffer, Completion, Executable
from mlcompute.devices.device_exchange import DeviceExchange, SumTree, Transfer, Work
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

_THREADS = 256
#: Seconds that giving up NCCL's calls may take.
_MOST_ABORTING = 5.0
_SOURCE = """
extern "C" __global__ void KERNEL(TYPE* target, PARAMETERS, long long count, const int* failed) {
    if (failed && *failed) return;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        target[i] = SUM;
}
"""
_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def joined(engines: Sequence[Cuda], rank: int, size: int, gather: Callable[[bytes], list[bytes]]) -> GpuExchange | None:
    """The exchange between these GPUs and those of other processes; None where nothing but the host connects them.

    gather   sends a message to all processes and returns theirs, by rank
    """
    if size == len(engines):
        return GpuExchange(engines, 0, _communicators(engines))
    first = engines[0]
    try:
        library, said = first.nccl(), ""
        said = library.unique_id().hex() if rank == 0 else library.name
    except DeviceError:
        library, said = None, ""
    answers = [json.loads(one) for one in gather(json.dumps([said, first.driver.identity()]).encode())]
    gpus = {identity for _, identity in answers}
    if library is None or not all(said for said, _ in answers) or len(gpus) < size:
        return None  # NCCL is missing somewhere, or processes share a GPU, which it refuses
    first.driver.activate()
    return GpuExchange(engines, rank, [library.communicator(bytes.fromhex(answers[0][0]), rank, size)], size)


def _communicators(engines: Sequence[Cuda]) -> list[Communicator]:
    """NCCL between the GPUs of this process; none where it is missing or refuses: two engines may be one GPU."""
    ordinals = [engine.driver.ordinal for engine in engines]
    if len(engines) == 1 or len(set(ordinals)) < len(ordinals):
        return []
    try:
        library = engines[0].nccl()
    except DeviceError:
        return []
    return library.communicators([engine.driver.activate for engine in engines])


class GpuExchange(DeviceExchange):
    """GPUs of this process, and by NCCL those of others."""

    def __init__(
        self, engines: Sequence[Cuda], rank: int, communicators: Sequence[Communicator], size: int | None = None
    ) -> None:
        self.engines: Sequence[Cuda] = engines
        self.rank, self.size = rank, size or len(engines)
        self._communicators = communicators
        self.name = "copies between GPUs"
        if communicators:
            library = communicators[0].library
            self.captures = len(engines) == 1 or library.captures_several
            self.name = f"{library.name} {'in' if self.captures else 'between'} CUDA graphs"
        else:
            for engine in engines:
                for other in engines:
                    engine.driver.allow_access(other.driver)
        self._graphs = StepGraphs(engines)
        self._is_given_up = False
        self._sums: dict[object, Kernel] = {}
        self._flags = [FailureFlags(engine, self.size) for engine in engines]

    def _engine(self, rank: int) -> Cuda:
        return self.engines[rank - self.rank]

    def _stream(self, rank: int) -> int:
        return self._graphs.streams[rank - self.rank]

    def reserve(self, rank: int, executable: Executable, slots: int) -> None:
        assert isinstance(executable, CudaExecutable)
        if self.captures:
            executable.reserve(slots)

    def overlaps(self, executable: Executable) -> bool:
        assert isinstance(executable, CudaExecutable)
        return executable.overlaps

    def feed(self, rank: int, executable: Executable, inputs: Mapping[Value, Array], slot: int) -> None:
        assert isinstance(executable, CudaExecutable)
        if self.captures:
            executable.feed_slot(inputs, slot)
        else:
            super().feed(rank, executable, inputs, slot)

    def run(self, rank: int, executable: Executable, phases: Sequence[str], slot: int) -> None:
        assert isinstance(executable, CudaExecutable)
        if self.captures:
            self._graphs.run(rank - self.rank, executable, phases, slot)
        else:
            super().run(rank, executable, phases, slot)

    def readiness(self, work: Work) -> int:
        return self._graphs.readiness(work) if self.captures else 0

    def perform(self, work: Work, readiness: int) -> None:
        if self._is_given_up:
            raise DeviceError(
                f"device '{self.engines[0].name}': {self.name} was given up after an error",
                fix="compile the graph again, in new processes where it runs in several",
            )
        if self.captures:
            self._graphs.perform(work, readiness)
        else:
            super().perform(work, readiness)

    def clear_failures(self) -> None:
        for flags, stream in zip(self._flags, self._graphs.streams, strict=True):
            flags.clear(stream)

    def note_failure(self, rank: int, executable: Executable) -> None:
        assert isinstance(executable, CudaExecutable)
        self._flags[rank - self.rank].note(executable, self._stream(rank))

    def failures(self) -> Sequence[Transfer]:
        def here(rank: int) -> FailureFlags | None:
            place = rank - self.rank
            return self._flags[place] if 0 <= place < len(self._flags) else None

        return [
            Transfer(source, target, sent.own if sent else None, received.received(source) if received else None)
            for source, sent in enumerate(map(here, range(self.size)))
            for target, received in enumerate(map(here, range(self.size)))
        ]

    def guard(self, rank: int, executable: Executable | None) -> None:
        assert executable is None or isinstance(executable, CudaExecutable)
        self._flags[rank - self.rank].combine(executable, self._stream(rank))

    def has_failed(self, executables: Sequence[Executable], phases: Sequence[str]) -> bool:
        self.mark().wait()
        if not self._flags[0].is_set():
            return False
        for executable in executables:
            assert isinstance(executable, CudaExecutable)
            error = executable.error_now(phases)
            if error is not None:
                raise error
        return True

    def part(self, buffer: Buffer, offset: int, nbytes: int) -> Buffer:
        assert isinstance(buffer, CudaBuffer)
        return buffer.part(offset, nbytes)

    def copy(self, rank: int, target: Buffer, source: Buffer) -> None:
        engine = self._engine(rank)
        assert target.nbytes == source.nbytes
        if source.nbytes:
            engine.driver.copy_on_device(_address(target), _address(source), source.nbytes, self._stream(rank))

    def add(self, rank: int, target: Buffer, tree: SumTree, dtype: np.dtype[Any], *, is_guarded: bool = False) -> None:
        terms: list[int] = []
        text = _written(tree, terms)
        failed = self._flags[rank - self.rank].any if is_guarded else 0
        key = (rank, _address(target), tuple(terms), text, target.nbytes, failed)
        made = self._sums.get(key)
        if made is None:
            count = target.nbytes // dtype.itemsize
            values = [_address(target), *terms, count, failed]
            made = self._sums[key] = _sum(self._engine(rank), text, len(terms), dtype, values, count)
        made.enqueue(self._stream(rank))

    def move(self, transfers: Sequence[Transfer]) -> None:
        wanted = [one for one in transfers if one.source != one.target and (one.read or one.written)]
        wanted = [one for one in wanted if (one.read or one.written).nbytes]  # type: ignore[union-attr]
        if self._communicators:
            self._move_by_nccl(wanted)
        elif wanted:
            self._move_by_copies(wanted)

    def _move_by_nccl(self, transfers: Sequence[Transfer]) -> None:
        with self._communicators[0].library.grouped():
            for source, target, read, written in transfers:
                if read is not None:
                    self._communicator(source).send(_address(read), read.nbytes, target, self._stream(source))
                if written is not None:
                    stream = self._stream(target)
                    self._communicator(target).receive(_address(written), written.nbytes, source, stream)

    def _communicator(self, rank: int) -> Communicator:
        self._engine(rank).driver.activate()
        return self._communicators[rank - self.rank]

    def _move_by_copies(self, transfers: Sequence[Transfer]) -> None:
        """Each target fetches what has been computed, and each source goes on when it has been fetched."""
        sources = {one.source: self._mark(one.source) for one in transfers}
        pairs = dict.fromkeys((one.source, one.target) for one in transfers)
        for source, target in pairs:
            engine = self._engine(target)
            engine.driver.wait_on_stream(engine.stream, sources[source])
        for source, target, read, written in transfers:
            assert read is not None
            assert written is not None
            engine = self._engine(target)
            engine.driver.copy_from(
                self._engine(source).driver, _address(written), _address(read), read.nbytes, engine.stream
            )
        targets = {one.target: self._mark(one.target) for one in transfers}
        for source, target in pairs:
            engine = self._engine(source)
            engine.driver.wait_on_stream(engine.stream, targets[target])
        for marks in (sources, targets):
            for rank, event in marks.items():
                self._engine(rank).events.append(event)

    def _mark(self, rank: int) -> int:
        engine = self._engine(rank)
        event = engine.take_event()
        engine.driver.record(event, engine.stream)
        return event

    def keep(self, rank: int, array: DeviceArray) -> Callable[[], Array]:
        engine = self._engine(rank)
        if 0 < array.nbytes <= SmallPart.NBYTES:
            return KeptValue(engine, array, _address(array.buffer))
        values = np.empty(array.shape, array.dtype)
        array.buffer.read(values)
        return lambda: values

    def mark(self) -> Completion:
        ranks = range(self.rank, self.rank + len(self.engines))
        return _Marks([(self._engine(rank), self._mark(rank)) for rank in ranks], self._expect_no_error)

    def wait(self, seconds: float) -> None:
        mark = self.mark()
        if self.size == len(self.engines):
            mark.wait()
            return
        end = time.monotonic() + seconds
        while not mark.is_done():
            self._expect_no_error()
            if time.monotonic() > end:
                self._give_up()
                raise DeviceError(
                    f"device '{self.engines[0].name}': {self.name} has waited {seconds:g} s for the other processes",
                    fix="look for a process that has ended or hangs; Group.world(timeout=...) waits longer",
                )
            time.sleep(0)

    def _expect_no_error(self) -> None:
        """Without an answer from another GPU, captured calls wait for ever: NCCL tells why there is none."""
        for communicator in self._communicators:
            reason = communicator.error()
            if reason:
                self._give_up()
                raise DeviceError(
                    f"device '{self.engines[0].name}': {self.name} cannot go on",
                    reason=reason,
                    fix="look for a process that has ended, or a network that fails; NCCL_DEBUG=WARN says more",
                )

    def _give_up(self) -> None:
        """End what is under way. NCCL waits until no graph with its calls is left, in a thread: this one goes on."""
        communicators, self._communicators, self._is_given_up = self._communicators, (), True
        self._graphs.free()

        def abort() -> None:
            for communicator in communicators:
                with contextlib.suppress(DeviceError):
                    communicator.abort()

        thread = threading.Thread(target=abort, name="mlcompute NCCL abort", daemon=True)
        thread.start()
        thread.join(_MOST_ABORTING)


class _Marks(Completion):
    """Marks in the streams of several GPUs.

    expect_no_error   raises what has gone wrong between them
    """

    def __init__(self, marks: Sequence[tuple[Cuda, int]], expect_no_error: Callable[[], None]) -> None:
        self._marks, self._expect_no_error = marks, expect_no_error

    def is_done(self) -> bool:
        return all(engine.driver.is_reached(event) for engine, event in self._marks)

    def wait(self) -> None:
        if len(self._marks) == 1:  # nothing here waits for another GPU
            engine, event = self._marks[0]
            engine.driver.wait(event)
        while not self.is_done():
            self._expect_no_error()
            time.sleep(0)

    def __del__(self) -> None:
        for engine, event in self._marks:
            engine.events.append(event)


def _sum(engine: Cuda, text: str, terms: int, dtype: np.dtype[Any], values: Sequence[int], count: int) -> Kernel:
    """A kernel that adds buffers, with its arguments."""
    kind = _TYPES[dtype]
    parameters = ", ".join(f"const {kind}* p{number}" for number in range(terms))
    source = _SOURCE.replace("TYPE", kind).replace("PARAMETERS", parameters).replace("SUM", text)
    blocks = max(1, min(16 * engine.driver.multiprocessors, -(-count // _THREADS)))
    return Kernel(engine, source, values, blocks, _THREADS)


def _written(tree: SumTree, terms: list[int]) -> str:
    """A sum as C++; addresses of its buffers are added to `terms`."""
    if isinstance(tree, tuple):
        first, second = (_written(part, terms) for part in tree)
        return f"({first} + {second})"
    terms.append(_address(tree))
    return f"p{len(terms) - 1}[i]"


def _address(buffer: Buffer) -> int:
    assert isinstance(buffer, CudaBuffer)
    return buffer.address
