"""The queue of a device: runs take turns, first in, first out."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mlcompute.devices import native_threads
from mlcompute.devices.interrupts import held
from mlcompute.errors import ExecutionError
from mlcompute.runtime.job import Job

T = TypeVar("T")
_get_ident = threading.get_ident
_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()
#: Seconds a fork, and the end of the process, wait for the job that is running.
_FORK_WAITS, _EXIT_WAITS = 1.0, 10.0


class WorkQueue:
    """First in, first out: jobs of one device. A synchronous job with nothing before it runs on the caller's thread,
    unless that has too little stack.

    Ctrl-C never stops a job half way: a job on the main thread is finished first, and waiting for a job on another
    thread stops while the job goes on. When the process ends, the running job is finished and queued ones are dropped.
    """

    def __init__(self) -> None:
        self._reset()
        _queues.add(self)

    def _reset(self) -> None:
        # Entered directly, and told only when somebody waits: a condition's own methods cost a small step microseconds.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0
        self._jobs: deque[Job] = deque()
        self._running: list[Job] = []  # more than one only when a handler waits for a later job
        self._owner: int | None = None  # the thread that is running a job right now
        self._worker: threading.Thread | None = None

    def submit(
        self,
        job: Job,
        here: bool,
        record: deque[Job] | None = None,
        otherwise: Callable[[Job], object] | None = None,
    ) -> None:
        """Run a job on this thread when that is wanted and nothing is queued; else after those before it.

        Signals must be held: whoever submits has records of its own that go with the queue's.

        record     gets the job if the queue does
        otherwise  called before a job that was wanted here is queued
        """
        here = here and native_threads.has_enough_stack()
        with self._lock:
            if here and not self._jobs and self._owner is None:
                self._owner = _get_ident()
            else:
                here = False
                if otherwise is not None:
                    otherwise(job)
                if self._worker is None:
                    # It may be that no more threads can be started: then the queue is as it was.
                    worker = threading.Thread(target=self._work, name="mlcompute", daemon=True)
                    native_threads.start(worker)
                    self._worker = worker
                self._jobs.append(job)
                self._tell_all()
            if record is not None:
                record.append(job)
        if here:
            try:
                self._run(job, releases=True)
            except BaseException:
                job.error_was_seen = True
                raise

    def run_now(self, work: Callable[[T], None], data: T) -> None:
        """Do something when its turn has come, on this thread if nothing is queued, and return when it is done."""
        job = None
        with held:
            with self._lock:
                is_free = not self._jobs and self._owner is None and native_threads.has_enough_stack()
                if is_free:
                    self._owner = _get_ident()
            if is_free:
                try:
                    work(data)
                finally:
                    with self._lock:
                        self._owner = None
                        self._tell_all()
            else:
                job = Job(self, lambda _: work(data))
                self.submit(job, True)
        if job is not None:
            job.wait()

    def is_running_here(self) -> bool:
        """Is the calling thread inside a job (a completion handler, say)?"""
        return self._owner == _get_ident()

    def wait_for(self, job: Job) -> None:
        """Return when a job has finished; at once inside the job's own handler."""
        if job.is_done:
            return
        if self.is_running_here():
            # The handler's own run is over, so those behind it may go on, on this thread.
            while not job.is_done and job not in self._running:
                with self._lock:
                    following = self._jobs.popleft()
                self._run(following, releases=False)
            return
        # Ctrl-C may stop the waiting anywhere, so it must not happen inside the queue's own lock.
        finished = threading.Lock()
        finished.acquire()
        self.when_done(job, finished.release)
        finished.acquire()

    def when_done(self, job: Job, tell: Callable[[], None]) -> None:
        """Call `tell` once the job has finished, on whatever thread that happens."""
        with held:
            with self._lock:
                if not job.is_done:
                    job.listeners = (*job.listeners, tell)
                    return
            tell()

    def _run(self, job: Job, releases: bool) -> None:
        self._running.append(job)
        try:
            job.run()
        finally:
            with self._lock:
                self._running.pop()
                job.is_done = True
                if releases:
                    self._owner = None
                if self._waiting:
                    self._condition.notify_all()
            for tell in job.listeners:
                tell()

    def _tell_all(self) -> None:
        if self._waiting:
            self._condition.notify_all()

    def _wait(self, timeout: float) -> bool:
        """Let others have the lock until they tell something; False when they did not in time."""
        self._waiting += 1
        try:
            return self._condition.wait(timeout)
        finally:
            self._waiting -= 1

    def _wait_until_idle(self, seconds: float) -> None:
        """Until no job is running, but not for ever."""
        end = time.monotonic() + seconds
        while self._owner is not None and (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._jobs or self._owner is not None:
                    # A worker with nothing to do goes away; the next job starts another one.
                    if not self._wait(1.0) and not self._jobs:
                        self._worker = None
                        return
                job = self._jobs.popleft()
                self._owner = _get_ident()
            # What ended a handler, `sys.exit` say, is the run's error: it must not end the thread that others wait for.
            with contextlib.suppress(BaseException):
                self._run(job, releases=True)
            del job

    def before_fork(self) -> None:
        """A process is about to fork."""
        # A child with half a step's numbers would be of no use: let the running job finish, and no other begin. One
        # that waits for something else to happen must not stop the fork, though.
        self._lock.acquire()
        if not self.is_running_here():
            self._wait_until_idle(_FORK_WAITS)

    def after_fork_in_parent(self) -> None:
        """A process has forked: in the parent."""
        self._lock.release()

    def at_exit(self) -> None:
        """The process is about to end."""
        # Memory goes away when the process ends, and native code must not be using it then.
        with self._lock:
            self._jobs.clear()
            if not self.is_running_here():
                self._wait_until_idle(_EXIT_WAITS)

    def after_fork(self) -> None:
        """A process has forked: in the child."""
        # Threads do not survive a fork: the child starts with an empty queue, and what was queued failed for it. The
        # run whose completion handler has forked did not: the child is still inside it.
        mine = self._running if self.is_running_here() else []
        lost = [*(self._running if not mine else ()), *self._jobs]
        owner, worker = self._owner, self._worker
        self._reset()
        if mine:
            self._running, self._owner = mine, owner
            self._worker = worker if worker is threading.current_thread() else None
        for job in lost:
            job.fail(ExecutionError("the run was queued before the process was forked", fix="run it in the child"))


def _each(method: Callable[[WorkQueue], None]) -> Callable[[], None]:
    def call() -> None:
        with held:  # a queue that is locked here and not released there would be locked for ever
            for queue in list(_queues):
                method(queue)

    return call


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_each(WorkQueue.before_fork),
        after_in_parent=_each(WorkQueue.after_fork_in_parent),
        after_in_child=_each(WorkQueue.after_fork),
    )
atexit.register(_each(WorkQueue.at_exit))
