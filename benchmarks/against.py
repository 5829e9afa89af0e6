"""Is this version as fast as another? Both trees take turns in one run, on the CPU.

    git worktree add --detach ../before v1.0
    python -m benchmarks.against ../before [--only mlp1,lenet] [--turns 20] [--threads 2]

A tree has a process and a kernel cache of its own. They take turns of a part of a second, so that whatever else the
machine does meets both. "speed" is the median, and in brackets the middle half, of the ratios of neighbouring turns,
each turn by its median step; the fastest step of each tree stands beside it. "outside" is what a step costs outside
native code, a median: it says something for small networks, for large ones it is mostly caches that their kernels have
emptied.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.printing import readers_may_leave
from benchmarks.workloads import WORKLOADS

#: Run inside either tree: reads what to do line by line, a workload's name or "turn", and answers in JSON.
STEPS = """
import json, sys, time
from benchmarks.contenders import ours
from benchmarks.workloads import ALL
job = count = None
for line in sys.stdin:
    what, *more = line.split()
    if what != "turn":
        job = ours.build(ALL[what], "train")
        for _ in range(20):
            job.step()
        start = time.perf_counter()
        job.step()
        count = max(1, int(0.002 / (time.perf_counter() - start)))
        found = ours.outside_native(job.step).get("seconds_outside_native", 0.0)
    else:
        times, end = [], time.perf_counter() + float(more[0])
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            for _ in range(count):
                job.step()
            times.append((time.perf_counter() - start) / count)
        found = min(times), sorted(times)[len(times) // 2]
    print(json.dumps(found), flush=True)
"""


class Tree:
    """One version: a process that steps when it is told to."""

    def __init__(self, folder: Path, cache: Path, threads: int) -> None:
        given = {"PYTHONPATH": str(folder), "MLCOMPUTE_CACHE": str(cache)}
        given |= {"MLCOMPUTE_NUM_THREADS": str(threads)} if threads else {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", STEPS],
            cwd=folder,
            env={**os.environ, **given},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"the process of a version ended with exit code {self._process.wait()}; its last words are above")
        return json.loads(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(before: Tree, now: Tree, name: str, turns: int, seconds: float) -> str:
    """One workload as a row of the table."""
    outside = [1e6 * tree.ask(name) for tree in (before, now)]
    found = np.array([[tree.ask(f"turn {seconds}") for tree in (before, now)] for _ in range(turns)])
    fastest = 1e3 * found[..., 0].min(0)
    low, middle, high = np.percentile(found[:, 0, 1] / found[:, 1, 1], [25, 50, 75])
    speed = f"{middle:>8.3f}x ({low:.3f} - {high:.3f})"
    return f"{name:<14}{fastest[0]:>12.4f}{fastest[1]:>12.4f}{speed}{outside[0]:>14.1f}{outside[1]:>8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the folder of the other version's tree")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    parser.add_argument("--threads", type=int, default=0, help="by default the cores this process may use")
    options = parser.parse_args()
    folders = {"before": options.before.resolve(), "now": Path(__file__).parents[1]}
    print(f"{'workload':<14}{'before ms':>12}{'now ms':>12}{'speed':>9}{'':>16}{'outside us':>14}{'now':>8}")
    with tempfile.TemporaryDirectory() as caches:
        for name in options.only.split(","):
            before, now = (Tree(folder, Path(caches) / which, options.threads) for which, folder in folders.items())
            with contextlib.closing(before), contextlib.closing(now):
                print(compare(before, now, name, options.turns, options.seconds), flush=True)


if __name__ == "__main__":
    with readers_may_leave():
        main()
