"""Sums in the memory of GPUs, and copies between them: by NCCL, or by the driver's own copies within a process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.cuda.input_blocks import KeptValue, SmallPart
from mlcompute.devices.cuda.memory import CudaBuffer
from mlcompute.devices.cuda.nccl import Communicator
from mlcompute.devices.device import Buffer, Completion
from mlcompute.devices.device_exchange import DeviceExchange, SumTree, Transfer
from mlcompute.devices.foreign_array import Lying
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

_THREADS = 256
_SOURCE = """
extern "C" __global__ void KERNEL(TYPE* target, PARAMETERS, long long count) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        target[i] = SUM;
}
"""
_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def joined(engines: Sequence[Cuda], rank: int, size: int, meet: Callable[[bytes], list[bytes]]) -> GpuExchange | None:
    """The exchange between these GPUs and those of other processes; None where nothing but the host connects them.

    meet   a message to all processes, and theirs, by rank
    """
    if size == len(engines):
        return GpuExchange(engines, 0, _communicators(engines))
    first = engines[0]
    try:
        library, said = first.nccl(), ""
        said = library.unique_id().hex() if rank == 0 else library.name
    except DeviceError:
        library, said = None, ""
    answers = [json.loads(one) for one in meet(json.dumps([said, first.driver.identity()]).encode())]
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
    return library.communicators(ordinals)


class GpuExchange(DeviceExchange):
    """GPUs of this process, and by NCCL those of others."""

    def __init__(
        self, engines: Sequence[Cuda], rank: int, communicators: Sequence[Communicator], size: int | None = None
    ) -> None:
        self.engines: Sequence[Cuda] = engines
        self.rank, self.size = rank, size or len(engines)
        self._communicators = communicators
        self.name = communicators[0].library.name if communicators else "copies between GPUs"
        if not communicators:
            for engine in engines:
                for other in engines:
                    engine.driver.allow_access(other.driver)
        self._sums: dict[object, _Sum] = {}

    def _engine(self, rank: int) -> Cuda:
        return self.engines[rank - self.rank]

    def part(self, buffer: Buffer, offset: int, nbytes: int) -> Buffer:
        assert isinstance(buffer, CudaBuffer)
        return buffer.part(offset, nbytes)

    def copy(self, rank: int, target: Buffer, source: Buffer) -> None:
        engine = self._engine(rank)
        assert target.nbytes == source.nbytes
        if source.nbytes:
            engine.driver.copy_on_device(_address(target), _address(source), source.nbytes, engine.stream)

    def add(self, rank: int, target: Buffer, tree: SumTree, dtype: np.dtype[Any]) -> None:
        terms: list[int] = []
        text = _written(tree, terms)
        key = (rank, _address(target), tuple(terms), text, target.nbytes)
        made = self._sums.get(key)
        if made is None:
            count = target.nbytes // dtype.itemsize
            made = self._sums[key] = _Sum(self._engine(rank), text, [_address(target), *terms], count, dtype)
        made.enqueue()

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
                    self._communicator(source).send(_address(read), read.nbytes, target, self._engine(source).stream)
                if written is not None:
                    stream = self._engine(target).stream
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

    def keep(self, rank: int, lying: Lying) -> Callable[[], Array]:
        engine = self._engine(rank)
        if 0 < lying.nbytes <= SmallPart.NBYTES:
            return KeptValue(engine, lying, _address(lying.buffer))
        values = np.empty(lying.shape, lying.dtype)
        lying.buffer.read(values)
        return lambda: values

    def mark(self) -> Completion:
        ranks = range(self.rank, self.rank + len(self.engines))
        return _Marks([(self._engine(rank), self._mark(rank)) for rank in ranks])

    def wait(self, seconds: float) -> None:
        if self.size == len(self.engines):
            self.mark().wait()
            return
        event, engine = self._mark(self.rank), self.engines[0]
        end = time.monotonic() + seconds
        while not engine.driver.is_reached(event):
            if time.monotonic() > end:
                for communicator in self._communicators:
                    communicator.abort()
                raise DeviceError(
                    f"device '{engine.name}': {self.name} has waited {seconds:g} s for the other processes",
                    fix="look for a process that has ended or hangs; Group.world(timeout=...) waits longer",
                )
            time.sleep(0)
        engine.events.append(event)


class _Marks(Completion):
    """Marks in the streams of several GPUs."""

    def __init__(self, marks: Sequence[tuple[Cuda, int]]) -> None:
        self._marks = marks

    def is_done(self) -> bool:
        return all(engine.driver.is_reached(event) for engine, event in self._marks)

    def wait(self) -> None:
        for engine, event in self._marks:
            engine.driver.wait(event)

    def __del__(self) -> None:
        for engine, event in self._marks:
            engine.events.append(event)


class _Sum:
    """A kernel that adds buffers, with its arguments."""

    def __init__(self, engine: Cuda, text: str, addresses: list[int], count: int, dtype: np.dtype[Any]) -> None:
        self._engine = engine
        self._function = _function(engine, text, len(addresses) - 1, dtype)
        self._values = np.array([*addresses, count], np.uint64)
        first = self._values.ctypes.data
        self._parameters = np.array([first + 8 * number for number in range(len(self._values))], np.uint64)
        most = 16 * engine.driver.multiprocessors
        self._grid = (max(1, min(most, -(-count // _THREADS))), 1, 1)

    def enqueue(self) -> None:
        driver, parameters = self._engine.driver, int(self._parameters.ctypes.data)
        driver.launch(self._function, self._grid, (_THREADS, 1, 1), 0, self._engine.stream, parameters)


def _function(engine: Cuda, text: str, terms: int, dtype: np.dtype[Any]) -> int:
    kind = _TYPES[dtype]
    parameters = ", ".join(f"const {kind}* p{number}" for number in range(terms))
    source = _SOURCE.replace("TYPE", kind).replace("PARAMETERS", parameters).replace("SUM", text)
    return engine.driver.functions([source])[0]


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
