"""Job: one piece of work for a device's queue, and how it went. Users have an `Execution` of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlcompute.errors import ExecutionError
from mlcompute.runtime.run_result import ResultState, RunResult

if TYPE_CHECKING:
    from mlcompute.devices.device import Completion, Profile
    from mlcompute.execution import GraphCompletionHandler
    from mlcompute.runtime.queue import WorkQueue


class Job:
    """What is to be done once, when its turn has come. It is over when its completion handler has returned."""

    # Slots: a small step pays for every attribute, and for one that is found on the class most of all.
    __slots__ = (
        *("__weakref__", "_handler", "_outcome", "_result", "_work", "completion", "data", "error", "error_was_seen"),
        *("is_done", "listeners", "measures_time", "number", "profile", "queue", "seconds", "undo"),
    )

    def __init__(
        self,
        queue: WorkQueue,
        work: Callable[[Job], ResultState | None],
        completion_handler: GraphCompletionHandler | None = None,
        data: Any = None,
    ) -> None:
        self.queue = queue
        self._work: Callable[[Job], ResultState | None] | None = work
        #: The data of the work; None after it has finished.
        self.data = data
        #: Counts the runs that were carried out, over all graphs.
        self.number = 0
        self._handler = completion_handler
        self._outcome: ResultState | None = None
        self._result: RunResult | None = None
        #: The exception it failed with.
        self.error: BaseException | None = None
        #: Was the error raised or returned to a caller? If not, the next call on the graph raises it.
        self.error_was_seen = False
        #: Seconds the work took, where `measures_time` says so.
        self.seconds = 0.0
        self.measures_time = False
        #: Time per layer and phase; only with PER_LAYER_PROFILING.
        self.profile: Profile | None = None
        #: Set when the work was started without waiting for its end.
        self.completion: Completion | None = None
        #: Takes back what the run has counted, if it turns out to have failed; None: it cannot fail any more.
        self.undo: Callable[[Job], None] | None = None
        #: Has the work finished, well or not? Set by the queue.
        self.is_done = False
        #: Called by the queue when the work has finished.
        self.listeners: Sequence[Callable[[], None]] = ()

    def run(self) -> None:
        """Do the work and tell the completion handler. Called by the queue, once."""
        assert self._work is not None
        start = time.perf_counter() if self.measures_time else 0.0
        try:
            self._outcome = self._work(self)
        except BaseException as error:
            self.error = error
        self._work = None
        if self.undo is None:
            self.data = None
        if self.measures_time:
            self.seconds = time.perf_counter() - start
        if self._handler is not None:
            self._call(self._handler)
            self._handler = None

    def _call(self, handler: GraphCompletionHandler) -> None:
        error = self.error
        if error is not None and not isinstance(error, Exception):  # the user pressed Ctrl-C
            error = ExecutionError(f"the run was interrupted by {type(error).__name__}")
        self.error_was_seen = isinstance(self.error, Exception)
        try:
            handler(self.result, error, self.seconds)
        except BaseException as broken:
            if self.error is None:
                self.error = ExecutionError(f"the completion handler raised {type(broken).__name__}: {broken}")
                self.error.__cause__ = broken
            if not isinstance(broken, Exception):  # Ctrl-C, or `sys.exit`
                raise

    @property
    def result(self) -> RunResult | None:
        """What the work gave, if it did; made when it is first asked for."""
        if self._result is None and self._outcome is not None:
            self._result = RunResult(self._outcome)
        return self._result

    def fail(self, error: Exception) -> None:
        """The work will never be done."""
        self._work, self.data, self.error, self.is_done = None, None, error, True

    def raise_error(self) -> None:
        """Raise what the work failed with, if it did."""
        if self.error is not None:
            self.error_was_seen = True
            raise self.error

    def wait(self) -> None:
        """Return when the work is done; raises what it failed with."""
        if not self.is_done:
            self.queue.wait_for(self)
        if self.completion is not None:
            self.wait_for_device()
        if self.error is not None:
            self.raise_error()

    def wait_for_device(self) -> None:
        """Return when the device has done what was started."""
        completion, undo = self.completion, self.undo
        if completion is None:
            return
        try:
            completion.wait()
        except Exception as error:
            self.error = error
            if undo is not None:
                undo(self)
        self.completion = self.undo = self.data = None

    @property
    def is_checked(self) -> bool:
        """Is it known how it went? Never waits."""
        completion = self.completion
        if self.is_done and self.undo is not None and completion is not None:
            if completion.has_succeeded():
                self.completion = self.undo = self.data = None
            elif completion.has_news() and completion.is_done():
                self.wait_for_device()
        return self.is_done and self.undo is None

    def has_news(self) -> bool:
        """Is there something to learn about it, as far as can be told without asking the device?"""
        completion = self.completion
        return self.is_done and (self.undo is None or completion is None or completion.has_news())
