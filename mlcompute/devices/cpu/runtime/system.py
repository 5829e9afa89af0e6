"""What native code asks of the operating system: to sleep, to wake a thread, to give up the core, to block signals.

Linux keeps a semaphore in a word of ours and its neighbours. macOS has no such ones and Windows none at all: there the
word holds the handle of one that the system has made.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NamedTuple

from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.interrupts import SIG_BLOCK, SIG_SETMASK, SIGNAL_SET


class System(NamedTuple):
    """Functions of an operating system, as native code declares them; semaphores come first in their arguments.

    rest_of_wait, rest_of_post   the arguments after the semaphore
    has_handles                  whether a semaphore's word holds a handle, and not the semaphore itself
    """

    give_up_core: str
    wait: str
    post: str
    rest_of_wait: str = ""
    rest_of_post: str = ""
    has_handles: bool = True
    has_signals: bool = True


LINUX = System("i32 @sched_yield()", "i32 @sem_wait(ptr)", "i32 @sem_post(ptr)", has_handles=False)
MACOS = System(
    "i32 @sched_yield()",
    "i64 @dispatch_semaphore_wait(ptr, i64)",
    "i64 @dispatch_semaphore_signal(ptr)",
    rest_of_wait=", i64 -1",  # without a time limit
)
WINDOWS = System(
    "i32 @SwitchToThread()",
    "i32 @WaitForSingleObject(ptr, i32)",
    "i32 @ReleaseSemaphore(ptr, i32, ptr)",
    rest_of_wait=", i32 -1",  # without a time limit
    rest_of_post=", i32 1, ptr null",
    has_signals=False,
)


def system() -> System:
    """This machine's."""
    return {"darwin": MACOS, "win32": WINDOWS}.get(sys.platform, LINUX)


# Native code ---------------------------------------------------------------------------------------------------------


def _call(code: Code, signature: str, arguments: str) -> None:
    code.declare(signature)
    code.let(f"call {signature.partition('(')[0]}({arguments})")


def _semaphore(code: Code, word: str) -> str:
    return code.let(f"load ptr, ptr {word}") if system().has_handles else word


def give_up_core(code: Code) -> None:
    """Let another thread have this core."""
    _call(code, system().give_up_core, "")


def wait(code: Code, word: str) -> None:
    """Sleep until somebody posts."""
    _call(code, system().wait, f"ptr {_semaphore(code, word)}{system().rest_of_wait}")


def post(code: Code, word: str) -> None:
    """Wake the thread that waits, or will."""
    _call(code, system().post, f"ptr {_semaphore(code, word)}{system().rest_of_post}")


def block_signals(code: Code) -> str:
    """Keep signals from this thread; where what was blocked before is written."""
    before = code.variable(f"[{len(SIGNAL_SET)} x i64]", "zeroinitializer")
    if system().has_signals:
        signals = code.variable(f"[{len(SIGNAL_SET)} x i64]", "zeroinitializer")
        for index, word in enumerate(SIGNAL_SET):
            code.do(f"store i64 {word}, ptr {code.at(signals, index, 'i64')}")
        _set_signals(code, SIG_BLOCK, signals, before)
    return before


def restore_signals(code: Code, before: str) -> None:
    """Let through again what `block_signals` has kept away."""
    if system().has_signals:
        _set_signals(code, SIG_SETMASK, before, "null")


def _set_signals(code: Code, how: int, signals: str, before: str) -> None:
    _call(code, "i32 @pthread_sigmask(i32, ptr, ptr)", f"i32 {how}, ptr {signals}, ptr {before}")


# Python --------------------------------------------------------------------------------------------------------------


def create_semaphore(address: int) -> None:
    """Make a semaphore at an address, or leave its handle there. It lives as long as the process."""
    if not system().has_handles:
        ctypes.CDLL(None).sem_init(ctypes.c_void_p(address), 0, 0)
        return
    if sys.platform == "win32":
        make, arguments = function("CreateSemaphoreW"), (None, 0, 0x7FFFFFFF, None)
        make.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
    else:
        make, arguments = function("dispatch_semaphore_create"), (0,)
        make.argtypes = [ctypes.c_long]
    make.restype = ctypes.c_void_p
    ctypes.c_void_p.from_address(address).value = make(*arguments)


def function(name: str) -> Any:
    """A function of the operating system or of the C library, for `ctypes`."""
    for library in _libraries():
        found = getattr(library, name, None)
        if found is not None:
            return found
    raise OSError(f"this system has no function {name}, which compiled kernels call")


def address_of_function(name: str) -> int:
    """Its address."""
    address = ctypes.cast(function(name), ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def _libraries() -> list[Any]:
    names: list[str | None] = [None]
    if sys.platform == "win32":
        names = ["kernel32", "ucrtbase", "ntdll"]
    elif sys.platform.startswith("linux"):
        names.append("libm.so.6")
    found = []
    for name in names:
        try:
            found.append(ctypes.CDLL(name))
        except OSError:  # another C library, with its mathematics in the process already
            continue
    return found
