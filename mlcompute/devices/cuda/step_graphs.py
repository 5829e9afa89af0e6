"""Parts of a training step as CUDA graphs, one per GPU of this process: slices, exchange by NCCL, and update.

    first time     enqueued kernel after kernel: libraries load their kernels, and NCCL connects the GPUs
    second time    captured on every GPU, and launched
    from then on   launched: one call per GPU

NCCL wants all ranks to launch graphs that were captured together, so processes agree before (`readiness`). Graphs
contain addresses: they are captured again when a program has been bound to other memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.device_exchange import Work
from mlcompute.devices.interrupts import held
from mlcompute.errors import DeviceError

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

#: Batches of as many sizes, about, can take turns without being captured again.
_MOST = 16


class _Use(NamedTuple):
    """A run of a program: on which of the GPUs, and the slot it reads."""

    place: int
    executable: CudaExecutable
    slot: int


class _Captured(NamedTuple):
    """A graph per GPU, the runs in it, and how often their programs had been bound to other memory."""

    graphs: Sequence[int]
    uses: Sequence[_Use]
    rebindings: Sequence[int]


class StepGraphs:
    """What the GPUs of an exchange run again and again.

    streams   where each GPU's work is enqueued: a stream that is captured, or the one where everything runs
    """

    def __init__(self, engines: Sequence[Cuda]) -> None:
        self._engines = engines
        self.streams = [engine.stream for engine in engines]
        self._captured: dict[tuple[Hashable, int], _Captured] = {}
        weakref.finalize(self, _free, engines, self._captured).atexit = False
        self._enqueued: set[Hashable] = set()
        self._uses: list[_Use] = []
        #: Has a graph been launched that nobody has waited for?
        self._is_running = False
        self._threads = ThreadPoolExecutor(max(1, len(engines) - 1), "mlcompute launch")

    def readiness(self, work: Work) -> int:
        """See `DeviceExchange.readiness`."""
        if self._is_valid(self._captured.get((work.key, work.bank)), work):
            return 2
        executables = [each for each in work.executables if isinstance(each, CudaExecutable)]
        return int(work.key in self._enqueued and all(each.has_run for each in executables))

    def _is_valid(self, captured: _Captured | None, work: Work) -> bool:
        if captured is None:
            return False
        now = dict.fromkeys(work.executables)
        then = dict.fromkeys(use.executable for use in captured.uses)
        return list(now) == list(then) and list(captured.rebindings) == [each.rebindings for each in then]

    def run(self, place: int, executable: CudaExecutable, phases: Sequence[str], slot: int) -> None:
        """Enqueue some phases of a program."""
        is_first = all(use.executable is not executable for use in self._uses)
        self._uses.append(_Use(place, executable, slot))
        executable.enqueue_slot(phases, slot, self.streams[place], clears=is_first)

    def perform(self, work: Work, readiness: int) -> None:
        """Enqueue, capture and launch, or launch."""
        with held, contextlib.ExitStack() as stack:  # Ctrl-C must not leave a GPU that waits for another for ever
            for engine in sorted(self._engines, key=lambda engine: engine.driver.ordinal):  # as other exchanges do
                stack.enter_context(engine.lock)
            if readiness == 0:
                self._enqueue(work)
                return
            key = (work.key, work.bank)
            captured = self._captured.get(key)
            if captured is None or readiness == 1:
                captured = self._captured[key] = self._capture(work)
                self._evict_oldest()
            marks = [engine.take_event() for engine in self._engines]
            self._launch(captured.graphs, marks)
            self._is_running = True
            self._started(captured.uses, marks)

    def _launch(self, graphs: Sequence[int], marks: Sequence[int]) -> None:
        """Launch a graph on every GPU.

        A launch may have to wait for a graph that waits for the others to be launched: each has a thread for that.
        """
        engines = self._engines
        others = [
            self._threads.submit(engine.driver.launch_graph, graph, engine.stream, mark)
            for engine, graph, mark in zip(engines[1:], graphs[1:], marks[1:], strict=True)
        ]
        engines[0].driver.launch_graph(graphs[0], engines[0].stream, marks[0])
        for other in others:
            other.result()

    def _enqueue(self, work: Work) -> None:
        """Kernel after kernel. NCCL's calls must not overtake those of a graph that is running."""
        if self._is_running:
            for engine in self._engines:
                engine.synchronize()
            self._is_running = False
        if work.key not in self._enqueued:  # other programs may have got the arena another place
            self.free()
        self._uses = []
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.driver.account.taking("libraries"))
            work.enqueue()
        self._enqueued.add(work.key)
        marks = [engine.take_event() for engine in self._engines]
        for engine, mark in zip(self._engines, marks, strict=True):
            engine.driver.record(mark, engine.stream)
        self._started(self._uses, marks)

    def _capture(self, work: Work) -> _Captured:
        known = self._captured.pop((work.key, work.bank), None)
        if known is not None:
            _free_one(self._engines, known)
        self._uses = []
        capturing: list[Cuda] = []
        graphs: list[int] = []
        try:
            for engine in self._engines:
                engine.driver.begin_capture(engine.capture_stream)
                capturing.append(engine)
            self.streams = [engine.capture_stream for engine in self._engines]
            work.enqueue()
            while capturing:
                engine = capturing.pop(0)
                graphs.append(engine.driver.end_capture(engine.capture_stream))
        except BaseException:
            for engine in capturing:
                with contextlib.suppress(DeviceError):
                    engine.driver.abort_capture(engine.capture_stream)
            for engine, graph in zip(self._engines, graphs, strict=False):
                engine.driver.free_graph(graph)
            raise
        finally:
            self.streams = [engine.stream for engine in self._engines]
        # One GPU waits for the others inside of its graph: no launch may have to wait for a copy to the device first.
        for engine, graph in zip(self._engines, graphs, strict=True):
            engine.driver.upload_graph(graph, engine.stream)
        rebindings = [each.rebindings for each in dict.fromkeys(use.executable for use in self._uses)]
        return _Captured(graphs, self._uses, rebindings)

    def _started(self, uses: Sequence[_Use], marks: Sequence[int]) -> None:
        readers = [_Started(engine, mark) for engine, mark in zip(self._engines, marks, strict=True)]
        for place, executable, slot in uses:
            executable.slot_is_read(slot, readers[place])

    def _evict_oldest(self) -> None:
        while len(self._captured) > _MOST:
            _free_one(self._engines, self._captured.pop(next(iter(self._captured))))

    def free(self) -> None:
        """Give all graphs back. Does not wait: one that is running is given back when it has finished."""
        _free(self._engines, self._captured)


def _free(engines: Sequence[Cuda], captured: dict[tuple[Hashable, int], _Captured]) -> None:
    while captured:
        _free_one(engines, captured.popitem()[1])


def _free_one(engines: Sequence[Cuda], captured: _Captured) -> None:
    for engine, graph in zip(engines, captured.graphs, strict=True):
        engine.driver.free_graph(graph)


class _Started:
    """A part of a step that one GPU has been given."""

    report = b""

    def __init__(self, engine: Cuda, mark: int) -> None:
        self._engine, self._mark = engine, mark

    def finish(self) -> None:
        """Wait for it."""
        self._engine.driver.wait(self._mark)

    def __del__(self) -> None:
        self._engine.events.append(self._mark)
