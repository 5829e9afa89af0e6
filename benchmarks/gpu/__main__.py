"""Measure training steps on a GPU beside PyTorch and JAX; see README.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import chosen
from benchmarks.gpu import table
from benchmarks.gpu.contenders import CONTENDERS, PRECISIONS
from benchmarks.gpu.measure import Results, Settings, gpu_machine, measure
from benchmarks.workloads import LARGE, WORKLOADS

KNOWN = {**WORKLOADS, **LARGE}
QUICK = Settings(building=100.0, rounds=3, stream=0.1, alone=0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under three minutes: without what compiles slowly")
    parser.add_argument("--only", help=f"workloads, separated by commas: {', '.join(KNOWN)}")
    parser.add_argument("--contenders", help=f"separated by commas: {', '.join(CONTENDERS)}")
    parser.add_argument("--precisions", help="tf32, bf16 or both; by default tf32, and for large networks both")
    parser.add_argument("--rounds", type=int, help="turns every contender has")
    parser.add_argument("--seconds", type=float, help="length of a turn")
    parser.add_argument("--limit", type=float, help="seconds for building everything")
    parser.add_argument("--one-by-one", action="store_true", help="contenders build one after the other: much longer")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: to test this tool without a GPU")
    parser.add_argument("--json", default="runs/gpu.json", help="where all numbers are written")
    options = parser.parse_args(arguments)
    workloads = chosen(parser, "--only", options.only, KNOWN)
    fast = [name for name, contender in CONTENDERS.items() if not contender.slow]
    names = chosen(parser, "--contenders", options.contenders, CONTENDERS, fast if options.quick else None)
    asked = chosen(parser, "--precisions", options.precisions, PRECISIONS)
    usual = QUICK if options.quick else Settings()
    settings = Settings(
        building=options.limit or usual.building,
        rounds=options.rounds or usual.rounds,
        stream=options.seconds or usual.stream,
        alone=(options.seconds or 2 * usual.alone) / 2,
        device=options.device,
        one_by_one=options.one_by_one,
    )
    # The small networks are bound by launches, which no precision changes.
    jobs = [
        f"{workload} {precision}"
        for workload in workloads
        for precision in asked
        if precision == "tf32" or workload in LARGE or options.precisions
    ]
    results: Results = {}
    for job in jobs:
        workload, precision = job.split()
        results.setdefault(workload, {})[precision] = {name: {} for name in names}
    facts, begin = gpu_machine(), time.monotonic()
    print(table.heading(facts), flush=True)
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)

    def done(job: str) -> None:
        workload, precision = job.split()
        print(table.section(job, results[workload][precision]), flush=True)
        # Written after every job: a run that is interrupted leaves what it has found.
        stored = {"machine": facts, "settings": vars(settings), "results": results}
        path.write_text(json.dumps(stored, indent=1))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    measure(jobs, names, settings, say, done, results)
    print(table.summary(results))
    print(f"all numbers: {path}; {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
