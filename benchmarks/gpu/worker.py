"""One contender in a process of its own: keeps all its jobs, and times the one it is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import worker
from benchmarks.gpu.contenders import GpuJob, workload_named
from benchmarks.workloads import Weights, Workload

#: Steps a job is ready after, whose losses are compared: what is compiled or captured late is compiled by then.
CHECKED_STEPS = 5


class Prepared(Workload):
    """A workload whose weights are drawn once, so that compile times do not contain it."""

    @functools.cached_property
    def drawn(self) -> Weights:
        return super().weights()

    def weights(self) -> Weights:
        return self.drawn


class Worker:
    """The jobs of one contender, by "workload precision"."""

    def __init__(self, file: str, variant: str) -> None:
        self.contender: Any = importlib.import_module(f"benchmarks.gpu.{file}")
        self.variant = variant
        self.jobs: dict[str, GpuJob] = {}
        #: Seconds per step in a stream, as far as known.
        self.pace: dict[str, float] = {}

    def build(self, job: str, limit: float) -> dict[str, Any]:
        """Describe, compile and run the first steps; gives up after `limit` seconds."""
        name, precision = job.split()
        workload = workload_named(name)
        prepared = Prepared(**{part.name: getattr(workload, part.name) for part in dataclasses.fields(workload)})
        assert prepared.drawn
        with gives_up_after(limit):
            start = time.perf_counter()
            built = self.contender.build(prepared, precision, self.variant)
            losses = []
            for _ in range(CHECKED_STEPS):
                built.enqueue()
                built.wait()
                losses.append(built.loss())
            seconds = time.perf_counter() - start
        prepared.drawn.clear()
        self.jobs[job] = built
        return {"ready_seconds": seconds, "losses": losses, "bytes": built.bytes()}

    def stream(self, job: str, seconds: float) -> dict[str, Any]:
        """Steps one after the other without waiting for any but the last, for about that long: seconds per step."""
        built = self.jobs[job]
        pace = self.pace.get(job)
        count = 3 if pace is None else max(3, round(seconds / pace))
        built.wait()
        start = time.perf_counter()
        for _ in range(count):
            built.enqueue()
        built.wait()
        self.pace[job] = found = (time.perf_counter() - start) / count
        return {"times": [found], "steps": count}

    def alone(self, job: str, seconds: float) -> dict[str, Any]:
        """Steps that are each waited for: seconds of every one."""
        built, clock, times = self.jobs[job], time.perf_counter, []
        built.wait()
        now = clock()
        end = now + seconds
        while now < end or len(times) < 3:
            start = now
            built.enqueue()
            built.wait()
            now = clock()
            times.append(now - start)
        return {"times": times}

    def drop(self, job: str) -> dict[str, Any]:
        """Free the memory of a job."""
        self.jobs.pop(job, None)
        gc.collect()
        return {}


@contextlib.contextmanager
def gives_up_after(seconds: float) -> Iterator[None]:
    """TimeoutError when what is inside takes longer, as soon as Python gets a turn."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"not compiled within the {seconds:.0f} s that were left")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


if __name__ == "__main__":
    worker.main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Worker)
