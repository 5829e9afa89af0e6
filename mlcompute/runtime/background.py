"""A background thread that does one piece of work after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from mlcompute.devices import native_threads


class Background:
    """A thread for some work, started when there is any."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._begun = 0
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Run some work after all that was begun before."""
        if self._thread is None:
            # A daemon: a process that fails need not wait for what others may never send.
            self._thread = threading.Thread(target=_run, args=(self._work, self._done), daemon=True)
            native_threads.start(self._thread)
        self._begun += 1
        self._work.put(work)

    def finish(self) -> None:
        """Return when all is done; raises the first error there was."""
        count, self._begun = self._begun, 0
        errors = [error for error in [self._done.get() for _ in range(count)] if error is not None]
        if errors:
            raise errors[0]


def _run(work: queue.SimpleQueue[Callable[[], object]], done: queue.SimpleQueue[BaseException | None]) -> None:
    while True:
        try:
            work.get()()
            done.put(None)
        except BaseException as error:  # told to whoever waits
            done.put(error)
