"""When a run has finished, and whether kernels found invalid data, which they report in status words."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.devices.cuda.kernels.launch import Launch, Status, Work
from mlcompute.devices.cuda.memory import CudaBuffer, Pinned, Staging
from mlcompute.devices.cuda.pinned_copies import Copy
from mlcompute.devices.device import Completion
from mlcompute.errors import DeviceError, ExecutionError
from mlcompute.ops.op import Array, Step, Value, overwritten_by

if TYPE_CHECKING:
    from mlcompute.devices.cuda.cuda_bindings import CudaDriver
    from mlcompute.devices.cuda.device import Cuda
    from mlcompute.devices.cuda.input_blocks import InputBlocks

#: Seconds to look again and again whether a run is over; and those after which the driver is asked to wait.
_SHORT, _LONG = 1e-4, 2e-2
#: failed = does any status say so?
_COMBINE = """
extern "C" __global__ void KERNEL(int* words, int count) {
    for (int number = 0; number < count; ++number)
        if (words[2 + 2 * number]) words[0] = 1;
}
"""


class Statuses:
    """The status words of a program: two of `failed` for guarded kernels, then two of each status.

    A run begins with zeros and ends with a copy in pinned memory, of which there is a part for each of several turns:
    as many runs may be under way.

    explain   what the NumPy meaning of a step says to the data that was found invalid; None when that is gone
    """

    def __init__(
        self,
        engine: Cuda,
        work: Sequence[Work],
        explain: Callable[[Step], str | None],
        turns: int = 1,
    ) -> None:
        self._driver, self._work = engine.driver, work
        # Held weakly: a program that nobody uses any more goes at once, and its memory with it.
        self._explain = weakref.WeakMethod(explain)
        self._places: dict[tuple[Launch, int], int] = {}
        self._found: list[tuple[Launch, Status]] = []
        for launch in work:
            if isinstance(launch, Launch):
                for argument in launch.arguments:
                    if isinstance(argument, Status):
                        self._places[launch, id(argument)] = 2 + 2 * len(self._found)
                        self._found.append((launch, argument))
        guarded = any(isinstance(each, Launch) and each.guarded for each in work)
        self.can_fail = bool(self._found)
        size = 4 * (2 + 2 * len(self._found)) if self._found or guarded else 0
        self._words = CudaBuffer(self._driver, engine.staging, size)
        if size:
            self._driver.fill(self._words.address, 0, size, engine.stream)
        #: The address guarded kernels look at. With a single status that is its own first word.
        self.failed = self._words.address + (8 if len(self._found) == 1 else 0)
        self._size = size
        self._pinned = Pinned(self._driver, turns * size) if self._found else None
        #: The same memory, cheap to compare: nearly all runs end as they began.
        self._reports = memoryview(b"")
        if self._pinned is not None:
            self._pinned.memory[:] = 0
            self._reports = self._pinned.memory.data.cast("Q")
        self._nothing = memoryview(bytes(self._reports.nbytes)).cast("Q")
        #: Guarded launches before which several statuses must be combined: the first after each that may fail.
        self._combined: set[Launch] = set()
        if len(self._found) > 1:
            self._prepare_combining()
        self.lock = threading.RLock()

    def _prepare_combining(self) -> None:
        self._function = self._driver.functions([_COMBINE])[0]
        self._values = np.array([self._words.address, len(self._found)], np.uint64)
        first = self._values.ctypes.data
        self._parameters = np.array([first, first + 8], np.uint64)
        may_fail = {launch for launch, _ in self._found}
        news = False
        for each in self._work:
            if each in may_fail:
                news = True
            elif isinstance(each, Launch) and each.guarded and news:
                self._combined.add(each)
                news = False

    def address(self, launch: Launch, status: Status) -> int:
        """Where a launch's status lies."""
        return self._words.address + 4 * self._places[launch, id(status)]

    # In a stream ------------------------------------------------------------------------------------------------

    def cleared(self) -> list[Copy]:
        """Before the first kernel: nothing has failed."""
        return [Copy(0, self._words.address, self._words.nbytes)] if self._found else []

    def combine(self, launch: Launch, stream: int) -> None:
        """Before a guarded kernel: has anything failed?"""
        if launch in self._combined:
            parameters = int(self._parameters.ctypes.data)
            self._driver.launch(self._function, (1, 1, 1), (1, 1, 1), 0, stream, parameters)

    def reported(self, turn: int) -> list[Copy]:
        """After the last kernel: tell the host."""
        if self._pinned is None:
            return []
        return [Copy(self._words.address, self._pinned.address + turn * self._size, self._size)]

    # On the host ------------------------------------------------------------------------------------------------

    def _report(self, turn: int) -> Array:
        assert self._pinned is not None
        return self._pinned.memory[turn * self._size : (turn + 1) * self._size].view(np.int32)

    def is_read(self, turn: int) -> None:
        """The failure that was reported is known."""
        self._report(turn)[:] = 0

    def has_failure(self) -> bool:
        """Has a run reported a failure that nobody has read? Looks at memory and asks no device."""
        return self._reports != self._nothing

    def error(self, phases: Sequence[str], turn: int) -> ExecutionError | None:
        """What a run reports, now that it has finished."""
        return self._error_from(self._report(turn), phases)

    @property
    def place(self) -> tuple[int, int]:
        """Where they lie, and how many statuses there are."""
        return self._words.address, len(self._found)

    def error_now(self, phases: Sequence[str]) -> ExecutionError | None:
        """What the last run says, which has finished."""
        words = np.zeros(self._words.nbytes // 4, np.int32)
        self._words.read(words)
        return self._error_from(words, phases)

    def _error_from(self, words: Array, phases: Sequence[str]) -> ExecutionError | None:
        for number, (launch, status) in enumerate(self._found):
            failed, index = words[2 + 2 * number : 4 + 2 * number]
            if failed and launch.step.phase in phases:
                step = launch.step
                return ExecutionError(
                    f"layer '{step.layer}': {self._explained(step) or status.reason(int(index))}",
                    step=step.op.name,
                    phase=step.phase,
                    changed=", ".join(self._changed_before(launch, phases)),
                )
        return None

    def _explained(self, step: Step) -> str | None:
        explain = self._explain()
        return None if explain is None else explain(step)

    def _changed_before(self, failed: Launch, phases: Sequence[str]) -> list[str]:
        """What had been overwritten when a kernel failed: an update does not wait for the last gradient."""
        before = self._work[: self._work.index(failed)]
        done = [step for each in before for step in each.steps if step.phase in phases]
        return list(dict.fromkeys(f"{value.kind} '{value.label}'" for step in done for value in overwritten_by(step)))


class Progress:
    """How many runs a device has finished, in the order of its stream: the first kernel of the next one tells.

    Runs that do not begin by copying their inputs do not count.

    started    how many it was given
    finished   how many it has told the host of: memory, cheap to read
    addresses  where the device counts those that have begun, and where it tells the host
    """

    def __init__(self, driver: CudaDriver, staging: Staging) -> None:
        self.started = 0
        self._count, self._pinned = CudaBuffer(driver, staging, 8), Pinned(driver, 8)
        self._count.write(np.zeros(8, np.uint8))
        self._pinned.memory[:] = 0
        self.finished = self._pinned.memory.data.cast("Q")
        self.addresses = self._count.address, self._pinned.address

    def wait_for(self, number: int) -> bool:
        """Wait until so many runs are over; False if that takes long."""
        start = time.perf_counter()
        while self.finished[0] < number:
            waited = time.perf_counter() - start
            if waited > _LONG:
                return False
            time.sleep(0.0 if waited < _SHORT else _SHORT)
        return True

    def recount(self) -> None:
        """A run could not be started, or only in part: the device may have counted it, or not."""
        begun = np.zeros(1, np.uint64)
        with contextlib.suppress(DeviceError):  # a device that is lost finishes nothing any more
            self._count.read(begun)
            self.started = int(begun[0])


class CudaCompletion(Completion):
    """A run in the engine's stream.

    mark   behind it; None: it counts, and the next run will tell that it is over. Until there is one, whoever asks or
           waits sets a mark
    """

    __slots__ = (
        *("_blocks", "_engine", "_error", "_event", "_finished", "_is_finished", "_number", "_phases", "_progress"),
        *("_statuses", "_turn", "report"),
    )

    def __init__(
        self,
        engine: Cuda,
        progress: Progress,
        statuses: Statuses,
        blocks: InputBlocks,
        phases: Sequence[str],
        turn: int,
        mark: int | None,
    ) -> None:
        self._engine = engine
        self._event = mark
        self._statuses = statuses
        self._blocks = blocks
        self._phases = phases
        self._turn = turn
        self._progress, self._finished = progress, progress.finished
        #: When so many runs of the device have finished, it has.
        self._number = progress.started + 1
        if mark is None:
            progress.started = self._number
        self._is_finished = False
        self._error: ExecutionError | None = None
        #: What it has sent, once its place in pinned memory belongs to another run.
        self.report = b""

    def has_news(self) -> bool:
        # That one which counts has finished well is looked for when many have.
        return (self._is_finished and self._event is not None) or self._statuses.has_failure()

    def has_succeeded(self) -> bool:
        is_over = self._is_finished or self._number <= self._finished[0]
        return is_over and self._error is None and not self._statuses.has_failure()

    def is_done(self) -> bool:
        if not self._is_finished:
            is_over = self._number <= self._finished[0]
            if is_over or (not self._next_reports and self._engine.driver.is_reached(self._mark())):
                self._read_error()
        return self._is_finished

    @property
    def _next_reports(self) -> bool:
        """Will another run tell that it is over? It was started after this one."""
        return self._event is None and self._number < self._progress.started

    def _mark(self) -> int:
        """The mark behind it, set now if need be."""
        event, engine = self._event, self._engine
        if event is None:
            event = engine.take_event()
            engine.driver.record(event, engine.stream)
            self._event = event  # of two threads that come here at once, one loses its mark: no harm is done
        return event

    def finish(self) -> None:
        """Wait, and learn how it went."""
        if not self._is_finished:
            if self._number > self._finished[0] and not (self._next_reports and self._progress.wait_for(self._number)):
                self._engine.driver.wait(self._mark())
            self._read_error()

    def _read_error(self) -> None:
        statuses = self._statuses
        if statuses.has_failure():
            with statuses.lock:
                if not self._is_finished:
                    self._error = statuses.error(self._phases, self._turn)
                    statuses.is_read(self._turn)  # last: whoever sees no failure must find the error
        self._is_finished = True

    def result(self, value: Value) -> Array:
        self.finish()
        return self._blocks.result(self, self._turn, value)

    def wait(self) -> None:
        self.finish()
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        if self._event is not None:
            self._engine.events.append(self._event)
