"""Runs in progress: the queue of a device and the handle every `execute` call returns."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from mlcompute.errors import ExecutionError

if TYPE_CHECKING:
    from mlcompute.devices.device import Profile
    from mlcompute.tensor import Tensor

#: Called when a run has finished, with (result tensor or None, error or None, seconds).
GraphCompletionHandler = Callable[["Tensor | None", "Exception | None", float], None]

_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


class WorkQueue:
    """First in, first out: jobs of one device. A synchronous job with nothing before it runs on the caller's thread."""

    def __init__(self) -> None:
        self._reset()
        _queues.add(self)

    def _reset(self) -> None:
        self._condition = threading.Condition()
        self._jobs: deque[Execution] = deque()
        self._owner: int | None = None  # the thread that is running a job right now
        self._worker: threading.Thread | None = None

    def submit(self, job: Execution, synchronous: bool) -> None:
        """Run a job now (when nothing is queued and the caller wants to wait) or after those before it."""
        with self._condition:
            if synchronous and not self._jobs and self._owner is None:
                self._owner = threading.get_ident()
                here = True
            else:
                here = False
                self._jobs.append(job)
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work, name="mlcompute", daemon=True)
                    self._worker.start()
                self._condition.notify_all()
        if here:
            try:
                job._run()
            finally:
                self._release()

    def is_running_here(self) -> bool:
        """Is the calling thread inside a job (a completion handler, say)? Then waiting would never end."""
        return self._owner == threading.get_ident()

    def _release(self) -> None:
        with self._condition:
            self._owner = None
            self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._jobs or self._owner is not None:
                    # A worker with nothing to do goes away; the next job starts another one.
                    if not self._condition.wait(timeout=1.0) and not self._jobs:
                        self._worker = None
                        return
                job = self._jobs.popleft()
                self._owner = threading.get_ident()
            job._run()
            self._release()
            del job


def _after_fork() -> None:
    # Threads do not survive a fork: the child starts with empty queues and no worker.
    for queue in list(_queues):
        queue._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Execution:
    """One run of a graph: truthy, awaitable, waitable.

    result, seconds = await graph.execute_forward(...)
    graph.execute(...).wait().result
    """

    def __init__(
        self,
        queue: WorkQueue,
        work: Callable[[], Tensor | None],
        *,
        measures_time: bool = False,
        profile: Profile | None = None,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> None:
        self._queue = queue
        self._work: Callable[[], Tensor | None] | None = work
        self._measures_time = measures_time
        self._handler = completion_handler
        self._done = threading.Event()
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self._seconds = 0.0
        #: Time per layer and phase; only with PER_LAYER_PROFILING.
        self.profile = profile
        #: Has anybody been told about the error? If not, the next call on the graph raises it.
        self.error_was_seen = False

    def _run(self) -> None:
        assert self._work is not None
        start = time.perf_counter()
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        if self._measures_time:
            self._seconds = time.perf_counter() - start
        self._done.set()
        if self._handler is not None:
            handler, self._handler = self._handler, None
            self.error_was_seen = True
            error = self._error if isinstance(self._error, Exception) else None
            try:
                handler(None if error else self._result, error, self._seconds)
            except Exception as broken:
                if self._error is None:
                    self._error = ExecutionError(f"the completion handler raised {type(broken).__name__}: {broken}")
                    self._error.__cause__ = broken
                    self.error_was_seen = False

    @property
    def is_done(self) -> bool:
        """Has the run finished, well or not?"""
        return self._done.is_set()

    def join(self) -> None:
        """Return when the run has finished, well or not; at once when called from inside the run itself."""
        if not self._done.is_set() and not self._queue.is_running_here():
            self._done.wait()

    def raise_error(self) -> None:
        """Raise what the run failed with, if it did."""
        if self._error is not None:
            self.error_was_seen = True
            raise self._error

    def wait(self) -> Execution:
        """Return when the run has finished; raises what it failed with."""
        self.join()
        self.raise_error()
        return self

    @property
    def result(self) -> Tensor | None:
        """The final result (the loss, or the last layer's result), waiting for it."""
        return self.wait()._result

    @property
    def execution_time(self) -> float:
        """Seconds the run took; 0.0 unless PROFILING was asked for."""
        return self.wait()._seconds

    def __bool__(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, tuple[Tensor | None, float]]:
        if not self._done.is_set():
            import asyncio

            yield from asyncio.get_running_loop().run_in_executor(None, self._done.wait).__await__()
        self.raise_error()
        return self._result, self._seconds

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.is_done else "queued"
        return f"Execution({state})"
