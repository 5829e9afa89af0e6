"""What a call costs in a process of its own: seconds of the processor, and memory beyond what was there before."""

from __future__ import annotations

import gc
import os
import resource
import struct
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

#: The peak of a process can be reset, and so measured, on Linux only.
needs_peak = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured on Linux")


@dataclass(frozen=True)
class Cost:
    """What became of a call: its answer, or why there is none."""

    seconds: float
    bytes: int
    answer: str


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


def cost_of(call: Callable[[], str], seconds: int = 60) -> Cost:
    """Run a call in a forked child. One that takes too long, or kills its process, answers with that."""
    there, here = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child only imports and ends
        child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # what the tests before left behind is not walked again in the middle of the call
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            before, start = _resident("VmRSS"), time.process_time()
            try:
                answer = call()
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            spent, grown = time.process_time() - start, _resident("VmHWM") - before
            os.write(here, struct.pack("dq", spent, grown) + answer.encode()[:2000])
        finally:
            os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    if len(told) < 16:
        return Cost(float("inf"), 1 << 62, "killed")
    return Cost(*struct.unpack("dq", told[:16]), told[16:].decode(errors="replace"))
