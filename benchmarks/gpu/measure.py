"""Measuring a GPU: everybody builds side by side, then all take turns at one job after the other."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.contenders import CONTENDERS, START
from benchmarks.measure import Found, Process, available_cores, machine

Say = Callable[[str], None]
#: Results by workload, precision and contender.
Results = dict[str, dict[str, dict[str, Found]]]
#: Seconds a process has to end a request beyond the limit it was told: compilers do not stop at once.
GRACE = 20.0


@dataclass(frozen=True)
class Settings:
    """How to measure.

    building      seconds everybody has to build all jobs
    rounds        turns of every contender at every job
    stream, alone  seconds of a turn: steps in a stream, steps waited for
    device        "gpu"; "cpu" to test the tool where there is none
    one_by_one    contenders build one after the other, undisturbed, each in `building` seconds
    """

    # 8 minutes in all: eight contenders take 4 1/2 turns of 0.37 s at each of 13 jobs, which is 173 s.
    building: float = 230.0
    rounds: int = 4
    stream: float = 0.25
    alone: float = 0.12
    device: str = "gpu"
    one_by_one: bool = False


def measure(jobs: Sequence[str], names: Sequence[str], settings: Settings, say: Say, done: Callable[[str], None],
            results: Results) -> None:  # fmt: skip
    """Fill `results`; `done` is told of every job whose numbers are complete."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        say(f"building {len(jobs)} jobs in {len(names)} contenders")
        deadline = time.monotonic() + settings.building
        lanes: dict[str, list[str]] = {}
        for name in names:
            lanes.setdefault("" if settings.one_by_one else CONTENDERS[name].lane, []).append(name)
        started: dict[str, Process] = {}

        def build_lane(lane: list[str]) -> None:
            for name in lane:
                until = time.monotonic() + settings.building if settings.one_by_one else deadline
                process = started[name] = start(name, folder / name, settings)
                stack.callback(process.close)
                build_all(process, jobs, until, settings, results, say)

        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(build_lane, lanes.values()))
        processes = [started[name] for name in names]
        for job in jobs:
            workload, precision = job.split()
            take_turns(job, processes, results[workload][precision], settings, say)
            done(job)


def start(name: str, cache: Path, settings: Settings) -> Process:
    """The process of a contender."""
    contender = CONTENDERS[name]
    environment = {
        "BENCHMARK_DEVICE": settings.device,
        "JAX_PLATFORMS": "cuda" if settings.device == "gpu" else "cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **contender.settings,
    }
    return Process(contender, available_cores(), settings.building, cache, "benchmarks.gpu.worker", environment)


def build_all(
    process: Process, jobs: Sequence[str], deadline: float, settings: Settings, results: Results, say: Say
) -> None:
    """Let a contender build what it can of all jobs; what comes of it stands in the results."""
    name = process.contender.name
    about = {key: process.ready[key] for key in ("version", "import_seconds") if key in process.ready}
    for job in (START, *jobs):
        workload, precision = job.split()
        left = deadline - time.monotonic()
        if "error" in process.ready:
            answer = process.ready
        elif left < 1:
            answer = {"error": f"the {settings.building:.0f} s for building were over"}
        else:
            process.limit = left + GRACE
            begin = time.monotonic()
            answer = process.ask("build", job=job, limit=left)
            spent = f"{time.monotonic() - begin:.1f} s"
            say(f"{name}: {job}: {spent}{': ' + answer['error'][:300] if 'error' in answer else ''}")
        if job == START:
            about["start_seconds"] = answer.get("ready_seconds")
        else:
            results[workload][precision][name] = about | answer
    process.limit = 60.0
    process.ask("drop", job=START)


def take_turns(job: str, processes: list[Process], found: dict[str, Found], settings: Settings, say: Say) -> None:
    """Let contenders run one after the other, again and again, so that noise hits everybody alike."""
    running = [process for process in processes if "error" not in found[process.contender.name]]
    say(f"{job}: {len(running)} contenders take turns")
    streams: dict[str, list[float]] = {process.contender.name: [] for process in running}
    alone: dict[str, list[list[float]]] = {process.contender.name: [] for process in running}
    # The first two rounds warm up, and find out how many steps a turn has.
    for number in range(-2, settings.rounds):
        shift = number % max(1, len(running))  # nobody always follows the same neighbour
        for process in running[shift:] + running[:shift]:
            name = process.contender.name
            for kind, seconds in (("stream", settings.stream), ("alone", settings.alone)):
                if number < 0:
                    seconds /= 4
                answer = process.ask(kind, job=job, seconds=seconds)
                if "error" in answer:
                    found[name].setdefault("error", answer["error"])
                elif number >= 0 and kind == "stream":
                    streams[name] += answer["times"]
                    found[name]["steps"] = found[name].get("steps", 0) + answer["steps"]
                elif number >= 0:
                    alone[name].append(answer["times"])
        running = [process for process in running if "error" not in found[process.contender.name]]
    for process in running:
        name = process.contender.name
        found[name] |= numbers(streams[name], alone[name])
        process.ask("drop", job=job)


def numbers(streams: list[float], alone: list[list[float]]) -> Found:
    """Seconds per step: in a stream, one number per turn; waited for, the median of every turn."""
    waits = [statistics.median(turn) for turn in alone]
    return {
        "median": statistics.median(streams),
        "minimum": min(streams),
        "maximum": max(streams),
        "turns": streams,
        "waiting_median": statistics.median(waits),
        "waiting_minimum": min(min(turn) for turn in alone),
        "waiting_turns": waits,
    }


def fastest_peer(found: dict[str, Found]) -> str | None:
    """The fastest contender that is not ours, in a stream of steps."""
    others = {
        name: entry["median"] for name, entry in found.items() if not name.startswith("mlcompute") and "median" in entry
    }
    return min(others, key=lambda name: others[name]) if others else None


def gpu_machine() -> Found:
    """What the numbers were measured on."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        asked: Any = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        gpus = asked.stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    return machine() | {"gpu": " ".join(gpus[0].split()) if gpus else "no GPU", "gpus": len(gpus)}
