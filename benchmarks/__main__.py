"""Measure mlcompute beside its peers: every workload in every contender that is installed, taking turns."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.contenders import CONTENDERS
from benchmarks.measure import Settings, available_cores, machine, measure
from benchmarks.scaling import scaling, section
from benchmarks.workloads import ALL, MODES, WORKLOADS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a first impression in under two minutes; see README.md")
    parser.add_argument("--only", help=f"workloads, separated by commas: {', '.join(ALL)}")
    parser.add_argument("--modes", help=f"what to run, separated by commas: {', '.join(MODES)}")
    parser.add_argument("--contenders", help=f"separated by commas: {', '.join(CONTENDERS)}")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="bf16: that, too")
    parser.add_argument("--threads", type=int, default=available_cores(), help="threads of every contender")
    parser.add_argument("--rounds", type=int, help="turns every contender has")
    parser.add_argument("--seconds", type=float, help="length of a turn")
    parser.add_argument("--limit", type=float, help="seconds a contender has for importing or building")
    parser.add_argument("--json", default="runs/benchmarks.json", help="where all numbers are written")
    parser.add_argument("--processes", help="instead: steps on so many processes, as 1,2,4, beside PyTorch DDP")
    parser.add_argument("--scaling", help="instead: training steps with so many threads, as 1,2,4,8,16")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    workloads = chosen(parser, "--only", options.only, ALL, list(WORKLOADS))
    if options.processes:
        from benchmarks.processes import compare

        counts = [int(word) for word in options.processes.split(",")]
        rounds, seconds = (3, 0.2) if options.quick else (9, 0.3)
        has_ddp = options.contenders is None or "torch" in options.contenders
        found = compare(workloads, counts, options.rounds or rounds, options.seconds or seconds, has_ddp=has_ddp)
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "processes": found}, indent=1))
        return 0
    modes = chosen(parser, "--modes", options.modes, MODES, ["train"] if options.quick else None)
    usual = [
        name
        for name, contender in CONTENDERS.items()
        if contender.precision in ("float32", options.precision) and not (options.quick and contender.slow)
    ]
    names = chosen(parser, "--contenders", options.contenders, CONTENDERS, usual)
    settings = Settings(
        modes=modes,
        threads=options.threads,
        rounds=options.rounds or (3 if options.quick else 9),
        seconds=options.seconds or (0.15 if options.quick else 1.0),
        limit=options.limit or (60.0 if options.quick else 300.0),
        compile_of=["mlcompute"] if options.quick else names,
    )
    facts = machine()
    print(table.heading(facts, options.threads), flush=True)
    for name in CONTENDERS:
        if name not in names:
            reason = "bfloat16: --precision bf16" if CONTENDERS[name].precision == "bf16" else "slow to build"
            print(f"left out: {name} ({'not asked for' if options.contenders else reason})")
    results: dict[str, Any] = {}
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = [int(word) for word in options.scaling.split(",")] if options.scaling else []

    def keep(workload: str, found: Any) -> None:
        """Written after every workload: a long run that is interrupted leaves what it has found."""
        results[workload] = found
        path.write_text(json.dumps({"machine": facts, "settings": vars(settings), "results": results}, indent=1))

    if counts:
        for workload, scaled in scaling(workloads, counts, names, settings, progress):
            print(section(workload, scaled), flush=True)
            keep(workload, scaled)
    for workload in [] if counts else workloads:
        modes_found = measure(ALL[workload], names, settings, progress)
        progress("")
        for mode, found in modes_found.items():
            print(table.section(workload, mode, found), flush=True)
        keep(workload, modes_found)
    if not counts:
        print(table.summary(results))
    print(f"all numbers: {path}")
    return 0


def chosen(
    parser: argparse.ArgumentParser, option: str, text: str | None, known: dict[str, Any], default: Any = None
) -> list[str]:
    """Names given to an option; by default all."""
    if text is None:
        return list(default or known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"{option}: unknown: {', '.join(unknown) or 'nothing given'}; known: {', '.join(known)}")
    return names


def progress(text: str) -> None:
    """What is going on, on one line of the terminal that the table then takes the place of."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
