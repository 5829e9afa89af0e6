"""Ctrl-C and SIGTERM (on Windows: Ctrl-Break) while training: the step is finished and saved first."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

_HANDLED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C arrived while training: the step was finished and the state saved.

    path  where the state lies; None when it could not be saved
    """

    def __init__(self, message: str, path: str | None) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.path)

    def _render_traceback_(self) -> list[str]:
        """What notebooks show of it: where the state lies, and not the way through the library."""
        return [f"Interrupted: {str(self).splitlines()[0]}"]


class Terminated(SystemExit):
    """SIGTERM arrived while training: as `Interrupted`, then the program ends with the usual exit code.

    path  where the state lies; None when it could not be saved
    """

    def __init__(self, message: str, path: str | None) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.path)


class Signals:
    """While in use, the first signal is only noted; a second Ctrl-C interrupts at once.

    What was ignored, as `nohup` and shells do it for programs in the background, stays ignored. Only the main thread
    may handle signals; elsewhere nothing is changed.
    """

    def __init__(self, is_shared: bool = False) -> None:
        #: Name of the signal that arrived; empty while none has.
        self.caught = ""
        #: Number of the signal that arrived here; `caught` follows at once, or when a group has agreed on it.
        self.noticed = 0
        self.is_shared = is_shared
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def interrupt(self) -> None:
        """As if Ctrl-C had come, from any thread; once more does nothing more."""
        if not self.noticed:
            self._note(signal.SIGINT, None, "stopped by the program")

    def agree(self, numbers: Iterable[int]) -> None:
        """What all processes of a group have noticed: the first of them counts, for everybody."""
        noticed = [number for number in numbers if number]
        if noticed and not self.caught:
            self.caught = signal.Signals(noticed[0]).name

    def _note(self, number: int, frame: FrameType | None, said: str = "") -> None:
        if self.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.noticed = self.noticed or number
        if self.is_shared:
            return  # it counts when all processes know of it
        self.caught = self.caught or signal.Signals(number).name
        with contextlib.suppress(Exception):  # a closed standard error is no reason to lose the run
            print(f"\n{said or self.caught}: finishing the step, then saving ...", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: somebody outside Python had set it, and it cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
