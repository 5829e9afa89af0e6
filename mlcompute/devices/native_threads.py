"""Starting threads that run native code, which needs more stack than some programs leave to theirs."""

from __future__ import annotations

import threading

#: Kernels keep up to 450 kB on the stack, LLVM somewhat more.
STACK_BYTES = 1 << 20

_lock = threading.Lock()


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
