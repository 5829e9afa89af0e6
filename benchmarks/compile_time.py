"""Seconds `compile` takes on the CPU in a process that has compiled nothing yet, everything built.

    python -m benchmarks.compile_time [--only mlp64,lenet] [--rounds 7] [--whole-steps]

cold: with an empty kernel cache. cached: with the kernels that the cold round has left. A round of a network is a new
process each; modules are imported and the network is described before the clock starts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.printing import readers_may_leave

NETWORKS = ("mlp64", "lenet", "resnet20", "lstm", "transformer")

#: Run in a process of its own.
COMPILE = """
import sys, time
import mlcompute as mlc
from benchmarks.contenders import ours
from benchmarks.workloads import WORKLOADS
graph = ours.training(WORKLOADS[sys.argv[1]]).graph
options = mlc.GraphCompilationOptions.DEFER_SINGLE_PASSES if sys.argv[2] else mlc.GraphCompilationOptions(0)
start = time.perf_counter()
graph.compile(options=options, device=mlc.Device.cpu())
print(time.perf_counter() - start)
"""


def measure(name: str, whole_steps: bool, cache: Path) -> float:
    """Seconds of one process."""
    environment = {**os.environ, "MLCOMPUTE_CACHE": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as for a user, modules are read as they were compiled before
    command = [sys.executable, "-c", COMPILE, name, "whole" if whole_steps else ""]
    root = Path(__file__).parents[1]
    found = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
    return float(found.stdout)


def main() -> None:
    """Print a line per network: minimum and median."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(NETWORKS), help="workloads, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--whole-steps", action="store_true", help="leave the passes run one by one for later")
    options = parser.parse_args()
    print(f"{'seconds':<14}{'cold min':>10}{'median':>10}{'cached min':>12}{'median':>10}")
    for name in options.only.split(","):
        cold, cached = [], []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(measure(name, options.whole_steps, Path(folder)))
                cached.append(measure(name, options.whole_steps, Path(folder)))
        row = (min(cold), statistics.median(cold), min(cached), statistics.median(cached))
        print(f"{name:<14}{row[0]:>10.3f}{row[1]:>10.3f}{row[2]:>12.3f}{row[3]:>10.3f}", flush=True)


if __name__ == "__main__":
    with readers_may_leave():
        main()
