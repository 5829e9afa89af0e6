"""Is this version as fast as another? Both trees take turns in one run, on the CPU.

    git worktree add --detach ../before v1.0
    python -m benchmarks.against ../before [--only mlp1,lenet] [--rounds 3]

A round of a tree is a process of its own with a kernel cache of its own; the smallest time of all rounds counts, as
other work on the machine only ever adds to it. "outside" is what a step costs outside native code, a median within a
round: it says something for small networks, for large ones it is mostly caches that their kernels have emptied.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.workloads import WORKLOADS

#: Run inside either tree: seconds of a step, and of its part outside native code.
STEPS = """
import json, sys, time
from benchmarks.contenders import ours
from benchmarks.workloads import ALL
found = {}
for name in sys.argv[1:]:
    job = ours.build(ALL[name], "train")
    for _ in range(20):
        job.step()
    best, count, end = float("inf"), 1, time.perf_counter() + 2.0
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(count):
            job.step()
        best = min(best, (time.perf_counter() - start) / count)
        count = min(200, max(1, int(0.05 / best)))
    found[name] = best, ours.outside_native(job.step).get("seconds_outside_native", 0.0)
print(json.dumps(found))
"""


def measure(tree: Path, names: list[str], cache: Path) -> dict[str, list[float]]:
    """One round of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "MLCOMPUTE_CACHE": str(cache)}
    command = [sys.executable, "-c", STEPS, *names]
    output = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the folder of the other version's tree")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = options.only.split(",")
    trees = {"before": options.before.resolve(), "now": Path(__file__).parents[1]}
    rounds: dict[str, list[dict[str, list[float]]]] = {which: [] for which in trees}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for which, tree in trees.items():
                rounds[which].append(measure(tree, names, Path(folder) / which))
    print(f"{'workload':<14}{'before ms':>12}{'now ms':>12}{'speed':>8}{'outside us':>14}{'now':>8}")
    for name in names:
        (old, old_outside), (new, new_outside) = (
            [min(found[name][part] for found in rounds[which]) for part in (0, 1)] for which in trees
        )
        outside = f"{1e6 * old_outside:>14.1f}{1e6 * new_outside:>8.1f}"
        print(f"{name:<14}{1e3 * old:>12.4f}{1e3 * new:>12.4f}{old / new:>7.2f}x{outside}")


if __name__ == "__main__":
    main()
