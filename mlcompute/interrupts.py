"""Ctrl-C and its like, held back while they would do harm: Python raises them between any two operations."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType
from typing import Any

# The C functions: `signal`'s own convert numbers to enumerations, which takes longer than all the rest.
_signal: Any = importlib.import_module("_signal")

#: Signals whose handlers may raise: Ctrl-C always, the others where a program has set a handler.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGBREAK")
_get_ident = threading.get_ident
_NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]


class Held:
    """`with Held(): ...` makes signals wait for the end of the block.

    Handlers run on the main thread only, so on any other there is nothing to hold. A signal that comes a second time
    is heard at once: whoever presses Ctrl-C twice does not want to wait.
    """

    __slots__ = ("_came", "_handlers")

    def __init__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        if _get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._hold)
        except ValueError:  # not the main interpreter: no handlers run here either
            self._handlers.clear()
        except BaseException:  # a signal that was not held yet
            self.release()
            raise

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.release()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._came:
            self._handlers[number](number, frame)
        else:
            self._came.append(number)

    def release(self) -> None:
        """Signals are heard again, those that came meanwhile at once."""
        if not self._handlers and not self._came:
            return
        try:
            if self._handlers:
                number, handler = self._handlers.popitem()
                # A handler that was replaced meanwhile, by a completion handler say, stays replaced.
                if _signal.getsignal(number) == self._hold:
                    _signal.signal(number, handler)
            elif self._came:
                _signal.raise_signal(self._came.pop())
        finally:
            # Whatever a handler raises, none is forgotten.
            if self._handlers or self._came:
                self.release()
