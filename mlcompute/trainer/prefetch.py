"""A background thread that prepares the next items while the current one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class StoppedError(Exception):
    """Waiting for an item was given up because somebody asked to stop."""


class Prefetch(Generic[Item]):
    """Items of an iterable, made ahead on a thread of their own. Errors it raises appear where the item is taken.

    depth  how many items may lie ready
    stops  asked while waiting: True gives up with `StoppedError`
    """

    def __init__(self, items: Iterable[Item], depth: int = 2, stops: Callable[[], bool] = lambda: False) -> None:
        self._queue: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._stops = stops
        self._thread = threading.Thread(target=self._work, args=(items,), name="mlcompute data", daemon=True)
        self._thread.start()

    def _work(self, items: Iterable[Item]) -> None:
        end: BaseException = StopIteration()
        try:
            for item in items:
                if not self._put(item, None):
                    return
        except BaseException as error:
            end = error
        self._put(None, end)

    def _put(self, item: Item | None, end: BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put((item, end), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Item]:
        while True:
            try:
                item, end = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._stops():
                    raise StoppedError from None
                continue
            if isinstance(end, StopIteration):
                return
            if end is not None:
                raise end
            yield item  # type: ignore[misc]

    def close(self) -> None:
        """Let the thread end; what it has prepared is dropped. An item in the making is not waited for."""
        self._closed.set()
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
