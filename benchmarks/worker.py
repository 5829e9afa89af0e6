"""One contender in a process of its own: imports its framework, builds jobs on request, times them, tells its memory.

Requests come as lines of JSON on standard input, answers leave the same way: see `measure.Process` for the other end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

#: Steps whose losses are compared between contenders.
CHECKED_STEPS = 5


def main(file: str, framework: str, variant: str, threads: int, kind: type[Any] | None = None) -> None:
    """Answer requests by the methods of a `kind` of worker."""
    # Frameworks print to standard output; the conversation keeps a descriptor of its own.
    out = os.dup(1)
    os.dup2(2, 1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:threads])

    def answer(message: dict[str, Any]) -> None:
        os.write(out, (json.dumps(message) + "\n").encode())

    try:
        start = time.perf_counter()
        importlib.import_module(framework)
        seconds = time.perf_counter() - start
        worker = (kind or Worker)(file, variant)
    except ImportError as error:
        answer({"error": f"cannot be imported: {error}"})
        return
    answer({"import_seconds": seconds, "version": version(framework)})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(getattr(worker, request.pop("do"))(**request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def version(framework: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(framework.partition(".")[0])
    return str(getattr(sys.modules[framework], "__version__", "unknown"))


class Worker:
    """The jobs of one contender, by mode."""

    def __init__(self, file: str, variant: str) -> None:
        self.contender: Any = importlib.import_module(f"benchmarks.contenders.{file}")
        self.variant = variant
        self.jobs: dict[str, Any] = {}

    def first(self, workload: str, mode: str) -> dict[str, Any]:
        """Seconds from nothing to the end of the first step: whatever is compiled or loaded is inside."""
        start = time.perf_counter()
        self.jobs[mode] = self._build(workload, mode)
        self.jobs[mode].step()
        return {"first_seconds": time.perf_counter() - start, "compiling_seconds": self.jobs[mode].compiling}

    def build(self, workload: str, mode: str) -> dict[str, Any]:
        """Build a job, in the place of the one before, and run the steps that are checked.

        Growth of the process is told of the first job only: others use memory that was freed.
        """
        is_fresh = not self.jobs
        if self.jobs.pop(mode, None) is not None:
            gc.collect()
        if is_fresh:
            # Libraries loaded and threads started at first use are not what a network needs.
            tiny = self._build("tiny", mode)
            for _ in range(3):
                tiny.step()
            del tiny
            gc.collect()
        before = resident_bytes()
        start = time.perf_counter()
        job = self.jobs[mode] = self._build(workload, mode)
        job.step()
        found: dict[str, Any] = {"build_seconds": time.perf_counter() - start}
        losses = [loss_of(job, workload, mode)]
        while mode != "infer" and len(losses) < CHECKED_STEPS:
            job.step()
            losses.append(loss_of(job, workload, mode))
        if is_fresh and before:
            reset_peak()
            for _ in range(2):
                job.step()
            found["rss_bytes"] = max(0, peak_bytes() - before)
        if job.bytes_planned is not None:
            found["bytes_planned"] = job.bytes_planned
        return found | {"losses": losses}

    def run(self, mode: str, seconds: float) -> dict[str, Any]:
        """Step for some time, at least once; seconds of every step."""
        step, clock = self.jobs[mode].step, time.perf_counter
        times: list[float] = []
        now = clock()
        end = now + seconds
        while now < end or not times:
            start = now
            step()
            now = clock()
            times.append(now - start)
        return {"times": times}

    def facts(self, mode: str) -> dict[str, Any]:
        return dict(self.jobs[mode].facts())

    def _build(self, workload: str, mode: str) -> Any:
        from benchmarks.workloads import ALL, TINY

        return self.contender.build(ALL.get(workload, TINY), mode, self.variant)


def loss_of(job: Any, workload: str, mode: str) -> float:
    from benchmarks.workloads import ALL, TINY

    result = job.result()
    return ALL.get(workload, TINY).loss(result) if mode == "infer" else float(result.mean())


# Memory of this process -------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """What the process has in memory now; 0 where the system does not tell."""
    return status("VmRSS")


def reset_peak() -> None:
    """Let the most memory held so far be forgotten, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most memory held since the last reset."""
    return status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
