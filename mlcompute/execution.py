"""Execution: the handle every `execute` call returns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from mlcompute.errors import ExecutionError

if TYPE_CHECKING:
    from mlcompute.devices.device import Completion, Profile
    from mlcompute.enums import ExecutionOptions
    from mlcompute.runtime.queue import WorkQueue
    from mlcompute.runtime.run_result import RunResult
    from mlcompute.tensor import Tensor

#: Called when a run has finished, with (result tensor or None, error or None, seconds).
GraphCompletionHandler = Callable[["Tensor | None", "Exception | None", float], None]


def has_option(options: ExecutionOptions, option: ExecutionOptions) -> bool:
    """Is an option set? Whole numbers spare a small step the microseconds that arithmetic on enumerations takes."""
    return int.__and__(options, option) != 0


class Execution:
    """One run of a graph: truthy, awaitable, waitable. It is over when its completion handler has returned.

    result, seconds = await graph.execute_forward(...)
    graph.execute(...).wait().result
    """

    # Slots: a small step pays for every attribute, and for one that is found on the class most of all.
    __slots__ = (
        *("__weakref__", "_error", "_handler", "_result", "_seconds", "_work", "completion", "error_was_seen"),
        *("is_done", "listeners", "measures_time", "profile", "queue", "undo"),
    )

    def __init__(
        self,
        queue: WorkQueue,
        work: Callable[[], Tensor | None],
        completion_handler: GraphCompletionHandler | None = None,
    ) -> None:
        self.queue = queue
        self._work: Callable[[], Tensor | None] | None = work
        self._handler = completion_handler
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self._seconds = 0.0
        #: Set by a run that was started and not waited for.
        self.completion: Completion | None = None
        #: Takes back what was counted, should such a run turn out to have failed; None: it cannot fail any more.
        self.undo: Callable[[], None] | None = None
        #: Has the run finished, well or not? Set by the queue.
        self.is_done = False
        #: Called by the queue when the run has finished.
        self.listeners: Sequence[Callable[[], None]] = ()
        #: Is `execution_time` asked for?
        self.measures_time = False
        #: Time per layer and phase; only with PER_LAYER_PROFILING.
        self.profile: Profile | None = None
        #: Has anybody been told about the error? If not, the next call on the graph raises it.
        self.error_was_seen = False

    def run(self) -> None:
        """Do the work and tell the completion handler. Called by the queue, once."""
        assert self._work is not None
        start = time.perf_counter() if self.measures_time else 0.0
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        if self.measures_time:
            self._seconds = time.perf_counter() - start
        if self._handler is not None:
            self._call(self._handler)
            self._handler = None

    def _call(self, handler: GraphCompletionHandler) -> None:
        error = self._error
        if error is not None and not isinstance(error, Exception):  # the user pressed Ctrl-C
            error = ExecutionError(f"the run was interrupted by {type(error).__name__}")
        self.error_was_seen = isinstance(self._error, Exception)
        try:
            handler(self._result, error, self._seconds)
        except BaseException as broken:
            if self._error is None:
                self._error = ExecutionError(f"the completion handler raised {type(broken).__name__}: {broken}")
                self._error.__cause__ = broken
            if not isinstance(broken, Exception):  # Ctrl-C, or `sys.exit`
                raise

    def fail(self, error: Exception) -> None:
        """The run will never happen."""
        self._work, self._error, self.is_done = None, error, True

    def raise_error(self) -> None:
        """Raise what the run failed with, if it did."""
        if self._error is not None:
            self.error_was_seen = True
            raise self._error

    def wait(self) -> Execution:
        """Return when the run has finished; raises what it failed with."""
        if not self.is_done:
            self.queue.wait_for(self)
        if self.completion is not None:
            self.wait_for_device()
        if self._error is not None:
            self.raise_error()
        return self

    def wait_for_device(self) -> None:
        """Return when the device has done what was started."""
        completion, undo = self.completion, self.undo
        if completion is None:
            return
        try:
            completion.wait()
        except Exception as error:
            self._error = error
            if undo is not None:
                undo()
        self.completion = self.undo = None

    @property
    def is_settled(self) -> bool:
        """Is it known how the run went? Never waits."""
        if self.is_done and self.undo is not None and self.completion is not None and self.completion.is_done():
            self.wait_for_device()
        return self.is_done and self.undo is None

    @property
    def has_news(self) -> bool:
        """Is there something to learn about the run, as far as can be told without asking the device?"""
        completion = self.completion
        return self.is_done and (self.undo is None or completion is None or completion.may_have_failed())

    @property
    def result(self) -> RunResult:
        """The final result (the loss, or the last layer's result), waiting for it. Its data stays this run's.

        A pass that computes none, a gradient pass or an update by itself, has None here.
        """
        self.wait()
        return self._result  # type: ignore[return-value]  # so that nobody has to rule None out after a forward pass

    @property
    def execution_time(self) -> float:
        """Seconds the run took; 0.0 unless PROFILING was asked for."""
        self.wait()
        return self._seconds

    def __bool__(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, tuple[Tensor | None, float]]:
        if not self.is_done:
            import asyncio

            loop = asyncio.get_running_loop()
            finished = loop.create_future()

            def arrive() -> None:
                if not finished.done():  # the waiting task may have been cancelled
                    finished.set_result(None)

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody awaits the run any more
                    loop.call_soon_threadsafe(arrive)

            self.queue.when_done(self, tell)
            yield from finished.__await__()
        if self.completion is not None and not self.completion.is_done():
            import asyncio

            yield from asyncio.get_running_loop().run_in_executor(None, self.wait_for_device).__await__()
        self.raise_error()
        return self._result, self._seconds

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.is_done else "queued"
        return f"Execution({state})"
