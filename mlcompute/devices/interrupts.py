"""Delaying signals: `Held` delays Python's handlers, `Blocked` blocks them in the operating system.

A handler in Python runs on the main thread, between any two operations, and may raise there, as that of Ctrl-C does.
What must not end half way (a job, the queue's own records, memory that changes hands) therefore runs inside `Held`.

- Blocking signals would not do: one that reaches any other thread of the process, or comes from
  `_thread.interrupt_main`, runs its handler on the main thread just the same. And what a handler raised cannot be
  taken back and the work continued where it was. So while something is held, Python's handlers are replaced by one
  that notes the number, and the handlers of what was noted run at the end.
- Python looks for signals when a function begins or has returned, and where a loop jumps back; nowhere else. Lines
  below that belong together contain none of these, so no signal, however many come, finds them half done.
- A handler that raises while others are being replaced or put back leaves the stand-in for those. It passes on to
  the true handler whatever comes outside of `Held`, and the next block puts the true one back.

Native code runs with signals blocked: the operating system lets a handler use the stack below the stack pointer, and
generated kernels of oneDNN let that point into memory of the heap. Programs block them in their own code
(`devices/cpu/runtime/threads.py`), calls from Python run inside `Blocked`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

# The C functions: `signal`'s own convert numbers to enumerations, which takes longer than all the rest.
_signal: Any = importlib.import_module("_signal")
_get_ident, _getsignal, _setsignal = threading.get_ident, _signal.getsignal, _signal.signal
_interrupt_main: Callable[[int], None] = importlib.import_module("_thread").interrupt_main

#: Signals whose handlers may raise: Ctrl-C always, the others where a program has set a handler.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
#: Seconds after which a second Ctrl-C is heard at once: whoever presses it will not wait any longer.
_PATIENCE = 1.0

Handler = Callable[[int, FrameType | None], object]


class _MainThread:
    """What is held on the main thread, the only one that handlers run on."""

    __slots__ = ("came", "delivered", "delivery", "depth", "handlers", "ident", "known", "seen", "since")

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident
        #: Blocks that were entered and not left.
        self.depth = 0
        #: The handlers as they were last seen, those of them that are functions, and all that ever were.
        self.seen: list[Any] = []
        self.handlers: list[tuple[int, Handler]] = []
        self.known: dict[int, Handler] = {}
        #: Numbers that came, when the first did, and what has Python run their handlers once it is iterated over.
        self.came: list[int] = []
        self.since = 0.0
        self.delivery: Iterable[None] | None = None
        self.delivered: list[None] = []

    def look(self, seen: list[Any]) -> None:
        """Some handler was set since the last time."""
        numbered = zip(_NUMBERS, seen, strict=True)
        true = ((number, self.known.get(number) if handler is _note else handler) for number, handler in numbered)
        handlers = [(number, handler) for number, handler in true if callable(handler)]
        known = self.known | dict(handlers)
        self.seen, self.handlers, self.known = seen, handlers, known


_main = _MainThread()


def _note(number: int, frame: FrameType | None) -> None:
    """The handler of all signals while they are held."""
    if _main.depth == 0:
        _main.known[number](number, frame)
    elif number not in _main.came:
        if not _main.came:
            _main.since = time.monotonic()
        _main.came.append(number)
    elif number == signal.SIGINT and time.monotonic() - _main.since > _PATIENCE:
        with contextlib.suppress(ValueError):
            _main.came.remove(number)
        _main.known[number](number, frame)


class Held:
    """`with held: ...` makes Python's signal handlers wait for the end of the block.

    They run on the main thread only, so on any other there is nothing to hold.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        main = _main
        if _get_ident() != main.ident:
            return
        if main.depth:
            main.depth += 1
            return
        seen = [*map(_getsignal, _NUMBERS)]
        if seen != main.seen:
            main.look(seen)
        if main.delivery is None:
            main.delivery = map(_interrupt_main, main.came)
        is_held = False
        main.depth = 1
        try:
            for number, _ in main.handlers:
                _setsignal(number, _note)
            is_held = True
        except ValueError as error:
            if "main interpreter" not in str(error):
                raise
            # Some other interpreter of the process: no handlers run here either.
        finally:
            if not is_held:
                main.depth = 0
                if main.came:
                    delivery, main.delivery, main.came = main.delivery, None, []
                    main.delivered = [*delivery]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        main = _main
        if main.depth == 0 or _get_ident() != main.ident:
            return
        if main.depth > 1:
            main.depth -= 1
            return
        try:
            for number, handler in main.handlers:
                if _getsignal(number) is _note:  # one that was set meanwhile, by a completion handler say, stays
                    _setsignal(number, handler)
        finally:
            main.depth = 0
            if main.came:
                delivery, main.delivery, main.came = main.delivery, None, []
                main.delivered = [*delivery] if delivery is not None else []
                _get_ident()  # any call: Python looks for signals after it, so that handlers run here, not anywhere


held = Held()


def _after_fork() -> None:
    # In a child that another thread has started, that thread is the main one, and nobody is left to end a block.
    if _get_ident() != _main.ident:
        _main.ident, _main.depth = _get_ident(), min(_main.depth, 1)
        _main.came.clear()  # a child has no signals of its parent's
        held.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Delivery by the operating system --------------------------------------------------------------------------------

SIG_BLOCK, SIG_SETMASK = (int(getattr(signal, name, 0)) for name in ("SIG_BLOCK", "SIG_SETMASK"))
#: Signals that an instruction raises rather than somebody else: blocking them would end the process.
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS")
_FAULT_BITS = sum(1 << (int(getattr(signal, name)) - 1) for name in _FAULTS if hasattr(signal, name))
#: All other signals, as a `sigset_t`: 64-bit words, more of them than any system reads.
SIGNAL_SET = [~_FAULT_BITS, *[-1] * 15]
_Set = ctypes.c_int64 * len(SIGNAL_SET)
_ALL = _Set(*SIGNAL_SET)


@functools.cache
def _sigmask() -> Any:
    """pthread_sigmask, called without letting other threads of Python run; None where there is none."""
    function = getattr(ctypes.PyDLL(None), "pthread_sigmask", None) if os.name == "posix" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return function


class Blocked:
    """`with Blocked(): ...` keeps signals from this thread until the end of the block.

    A thread that starts inside inherits that, and keeps it.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = _Set()

    def __enter__(self) -> None:
        change, before = _sigmask(), self._before
        if change is None:
            return
        is_blocked = False
        try:
            change(SIG_BLOCK, _ALL, before)
            is_blocked = True
        finally:
            if not is_blocked:  # something that had come before has raised
                change(SIG_SETMASK, before, None)

    def __exit__(self, *error: object) -> None:
        change = _sigmask()
        if change is not None:
            change(SIG_SETMASK, self._before, None)
