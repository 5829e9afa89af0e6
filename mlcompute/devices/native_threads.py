"""Threads that run native code, which needs more stack than some programs leave to theirs."""

from __future__ import annotations

import ctypes
import sys
import threading

#: Kernels keep up to 450 kB on the stack, LLVM somewhat more.
STACK_BYTES = 1 << 20
#: What a thread that others have started needs at least: of `STACK_BYTES`, systems take some for themselves.
_LEAST_STACK = 3 << 18

_lock = threading.Lock()


class _Known(threading.local):
    """Of each thread, once it was looked up: has it enough stack?"""

    is_enough: bool | None = None


_known = _Known()


def has_enough_stack() -> bool:
    """Can the calling thread run native code itself?"""
    if _known.is_enough is None:
        _known.is_enough = _stack_bytes() >= _LEAST_STACK
    return _known.is_enough


def _stack_bytes() -> int:
    """The size of the calling thread's stack; that of `start`'s threads where the system does not say."""
    try:
        if sys.platform == "win32":
            low, high = ctypes.c_size_t(), ctypes.c_size_t()
            ctypes.windll.kernel32.GetCurrentThreadStackLimits(ctypes.byref(low), ctypes.byref(high))
            return high.value - low.value
        library = ctypes.CDLL(None)
        library.pthread_self.restype = ctypes.c_void_p
        thread = ctypes.c_void_p(library.pthread_self())
        if sys.platform == "darwin":
            library.pthread_get_stacksize_np.restype = ctypes.c_size_t
            return int(library.pthread_get_stacksize_np(thread))
        attributes, size = ctypes.create_string_buffer(512), ctypes.c_size_t()  # a pthread_attr_t has 64 bytes at most
        if library.pthread_getattr_np(thread, attributes):
            return STACK_BYTES
        library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        library.pthread_attr_destroy(attributes)
        return size.value
    except (AttributeError, OSError):
        return STACK_BYTES


def start(thread: threading.Thread) -> None:
    """Start a thread with a stack of at least `STACK_BYTES`, even where `threading.stack_size` is set to less.

    Without that setting stacks are larger on every system: Python asks macOS for 16 MB, Windows for 2 MB and more.
    """
    with _lock:
        set_by_others = threading.stack_size()
        is_small = 0 < set_by_others < STACK_BYTES
        if is_small:
            threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            if is_small:
                threading.stack_size(set_by_others)
