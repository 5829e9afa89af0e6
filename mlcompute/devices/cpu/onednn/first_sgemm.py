"""The first call of sgemm makes its machine code, for all shapes: on a thread of its own, while programs are built."""

from __future__ import annotations

import os
import threading

import numpy as np

from mlcompute.devices import native_threads
from mlcompute.devices.cpu.onednn.library import OneDNN


class FirstSgemm:
    """Begun when a program may need it, and waited for before a program runs that does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_needed = False

    @property
    def is_begun(self) -> bool:
        """Is it being made, or was it?"""
        return self._thread is not None

    def begin(self, library: OneDNN) -> None:
        """Make sgemm's machine code, unless that was begun before."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, args=(library,), name="mlcompute sgemm")
            try:
                native_threads.start(thread)
            except RuntimeError:  # the system lets this process have no more of them
                _multiply(library)
            else:
                self._thread = thread

    def need(self, library: OneDNN) -> None:
        """A program that is being built will call sgemm."""
        self._is_needed = True
        self.begin(library)

    def wait(self) -> None:
        """Return when it is done, if it is needed; raises what it failed with, and the next program tries again."""
        thread = self._thread
        if thread is None or not self._is_needed:
            return
        thread.join()
        if self._error is not None:
            with self._lock:
                error, self._error = self._error, None
                if error is not None:
                    self._thread = None
                    raise error

    def _run(self, library: OneDNN) -> None:
        try:
            _multiply(library)
        except BaseException as error:  # told to whoever waits
            self._error = error

    def before_fork(self) -> None:
        """A process is about to fork: oneDNN has locks of its own, which nobody would release in the child."""
        self._lock.acquire()
        if self._thread is not None:
            self._thread.join()

    def after_fork(self) -> None:
        """A process has forked: in the parent, and in the child."""
        self._lock.release()


def _multiply(library: OneDNN) -> None:
    zeros = np.zeros((16, 16), np.float32)
    at = zeros.ctypes.data
    with library.threads(1):
        library.call("sgemm", b"N", b"N", 16, 16, 16, 1.0, at, 16, at, 16, 0.0, at, 16)


first_sgemm = FirstSgemm()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=first_sgemm.before_fork,
        after_in_parent=first_sgemm.after_fork,
        after_in_child=first_sgemm.after_fork,
    )
