"""Measuring: a process per contender, contenders taking turns, the same threads, data and weights for all."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS, YARDSTICK, Contender
from benchmarks.contenders.sgemm import FLOPS
from benchmarks.workloads import Workload

Found = dict[str, Any]
#: How far losses may differ, relatively: the first comes from the same weights; later ones pass through Adam, whose
#: first steps hardly depend on the size of a gradient and so turn rounding into small differences.
FIRST_TOLERANCE, LATER_TOLERANCE = 1e-4, 1e-2
#: The same of contenders in bfloat16, whose factors have 8 bits.
BF16_TOLERANCE = 5e-2
#: Seconds between turns: the OpenMP threads of whoever was before keep their cores busy for up to 0.2 after a step.
SETTLING = 0.25
#: A one-minute load above this many busy cores is not an idle machine.
IDLE_LOAD = 0.3


@dataclass(frozen=True)
class Settings:
    """How to measure.

    rounds, seconds   every contender runs `seconds` in each of `rounds` turns
    limit             seconds a contender has to import, or to build one workload
    compile_of        contenders whose time to the first step is measured, in two more processes each
    """

    modes: Sequence[str]
    threads: int
    rounds: int = 9
    seconds: float = 1.0
    limit: float = 300.0
    compile_of: Sequence[str] = ()


# Processes ----------------------------------------------------------------------------------------------------------


class Process:
    """A contender running in a process group of its own, so that its compilers end with it."""

    def __init__(
        self,
        contender: Contender,
        threads: int,
        limit: float,
        cache: Path,
        worker: str = "benchmarks.worker",
        settings: dict[str, str] | None = None,
    ) -> None:
        self.contender, self.limit = contender, limit
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._received = b""
        self._is_closed = False
        arguments = [contender.file, contender.framework, contender.variant, str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(threads, cache) | (settings or {}),
            start_new_session=True,
        )

    @functools.cached_property
    def ready(self) -> Found:
        """What the worker says when its framework is imported; waited for at its first use."""
        return self._answer()

    def ask(self, do: str, **request: Any) -> Found:
        """What the worker's method answers; {"error": ...} when it failed, ended or took too long."""
        if "error" in self.ready or self._is_closed:
            return {"error": self.ready.get("error", "gave up before")}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write((json.dumps({"do": do, **request}) + "\n").encode())
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Found:
        assert self._process.stdout is not None
        descriptor, end = self._process.stdout.fileno(), time.monotonic() + self.limit
        while b"\n" not in self._received:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                self.close()
                return {"error": f"gave up after {self.limit:.0f} s"}
            data = os.read(descriptor, 1 << 16)
            if not data:
                return {"error": f"the process ended: {self._last_words()}"}
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: Found = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.wait()}"

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()


def environment(threads: int, cache: Path) -> dict[str, str]:
    """The same number of threads for everybody, whatever each calls it, and everything compiled kept in one folder."""
    cache.mkdir(parents=True, exist_ok=True)
    counts = ("OMP", "MKL", "OPENBLAS", "MLCOMPUTE")
    return {
        **os.environ,
        **{f"{name}_NUM_THREADS": str(threads) for name in counts},
        "NUM_CPU_THREADS": str(threads),  # tinygrad
        "NPROC": str(threads),  # XLA
        "JAX_PLATFORMS": "cpu",
        "DEV": "CPU",  # tinygrad
        "MLCOMPUTE_CACHE": str(cache / "mlcompute"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "CACHEDB": str(cache / "tinygrad.db"),
        "TMPDIR": str(cache),  # MLX keeps its kernels there
    }


# One workload -------------------------------------------------------------------------------------------------------


def measure(
    workload: Workload, names: Sequence[str], settings: Settings, say: Callable[[str], None] = lambda text: None
) -> dict[str, dict[str, Found]]:
    """Everything about one workload: {mode: {contender: numbers}}; the machine's own rate under "sgemm"."""
    found: dict[str, dict[str, Found]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        processes, begun = [], {}
        for contender in (*(CONTENDERS[name] for name in names), YARDSTICK):
            if contender.only and workload.name not in contender.only:
                continue
            say(f"{workload.name}: starting {contender.name}")
            cache = folder / contender.name
            first = first_steps(contender, workload, settings, cache) if contender.name in settings.compile_of else {}
            if "error" not in first:
                process = Process(contender, settings.threads, settings.limit, cache)
                stack.callback(process.close)
                processes.append(process)
                first |= process.ready
            begun[contender.name] = first
        for mode in settings.modes:
            # What concerns the start of a process stands with the first mode.
            found[mode] = begun if not found else {name: {} for name in begun}
            running = []
            for process in processes:
                say(f"{workload.name}: {mode}: building {process.contender.name}")
                entry = found[mode][process.contender.name]
                entry |= build(process, workload, mode)
                if "error" not in entry:
                    running.append(process)
            take_turns(running, found[mode], workload, mode, settings, say)
    return found


def first_steps(contender: Contender, workload: Workload, settings: Settings, cache: Path) -> Found:
    """Seconds to the end of the first step, in a new process with nothing compiled before, and in another one after."""
    found: Found = {}
    for state in ("cold", "cached"):
        process = Process(contender, settings.threads, settings.limit, cache)
        answer = process.ready
        if "error" not in answer:
            answer = process.ask("first", workload=workload.name, mode=settings.modes[0])
        process.close()
        if "error" in answer:
            return found | answer
        found[f"{state}_seconds"] = answer["first_seconds"]
        if answer["compiling_seconds"] is not None:
            found[f"{state}_compiling_seconds"] = answer["compiling_seconds"]
    return found


def build(process: Process, workload: Workload, mode: str) -> Found:
    if "error" in process.ready:
        return process.ready
    reason = dict(process.contender.lacks).get(mode)
    if reason is not None:
        return {"error": reason}
    # The yardstick has no losses to check.
    return process.ask("first" if process.contender is YARDSTICK else "build", workload=workload.name, mode=mode)


def take_turns(
    processes: list[Process],
    found: dict[str, Found],
    workload: Workload,
    mode: str,
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    """Let contenders run one after the other, again and again, so that noise hits everybody alike."""
    rounds: dict[str, list[list[float]]] = {process.contender.name: [] for process in processes}
    for process in processes:  # warm up
        process.ask("run", mode=mode, seconds=settings.seconds / 3)
    for number in range(settings.rounds):
        say(f"{workload.name}: {mode}: round {number + 1} of {settings.rounds}")
        # Nobody always follows the same neighbour.
        shift = number % max(1, len(processes))
        for process in processes[shift:] + processes[:shift]:
            time.sleep(SETTLING)
            seconds = settings.seconds * (0.2 if process.contender is YARDSTICK else 1.0)
            answer = process.ask("run", mode=mode, seconds=seconds)
            rounds[process.contender.name].append(answer.get("times", []))
            if "error" in answer:
                found[process.contender.name]["error"] = answer["error"]
    for process in processes:
        name = process.contender.name
        entry = found[name]
        entry |= summary([turn for turn in rounds[name] if turn])
        entry |= {key: value for key, value in process.ask("facts", mode=mode).items() if key != "error"}
    # The rate of the machine is that of the fastest product: others were disturbed.
    fastest = found.get(YARDSTICK.name, {}).get("minimum")
    for name, entry in found.items():
        if "median" in entry and fastest and name != YARDSTICK.name:
            entry["of_sgemm"] = workload.flops(mode) / entry["median"] / (FLOPS / fastest)


# Numbers ------------------------------------------------------------------------------------------------------------


def summary(rounds: list[list[float]]) -> Found:
    """Seconds per step: median and minimum of all, what 80 % lie between, and the median of every round."""
    every = sorted(seconds for turn in rounds for seconds in turn)
    if not every:
        return {}
    tenth = len(every) // 10
    return {
        "median": statistics.median(every),
        "minimum": every[0],
        "low": every[tenth],
        "high": every[-1 - tenth],
        "steps": len(every),
        "round_medians": [statistics.median(turn) for turn in rounds],
    }


def best_peer(found: dict[str, Found]) -> str | None:
    """The fastest contender that is not us."""
    others = {
        name: entry["median"]
        for name, entry in found.items()
        if not name.startswith("mlcompute") and name != YARDSTICK.name and "median" in entry
    }
    return min(others, key=lambda name: others[name]) if others else None


def disagreement(
    found: dict[str, Found], first: float = FIRST_TOLERANCE, later: float = LATER_TOLERANCE
) -> tuple[float, list[str]]:
    """(largest relative difference, who is out of tolerance) of the losses, against the first contender's."""
    losses = {name: e["losses"] for name, e in found.items() if "losses" in e and name != YARDSTICK.name}
    if not losses:
        return 0.0, []
    reference = next(iter(losses.values()))
    largest, wrong = 0.0, []
    for name, own in losses.items():
        apart = [abs(a - b) / abs(b) for a, b in zip(own, reference, strict=True)]
        largest = max(largest, *apart)
        contender = CONTENDERS.get(name.partition(" ")[0])  # a number of threads may follow
        coarse = BF16_TOLERANCE if contender is not None and contender.precision == "bf16" else 0.0
        # Not `apart > tolerance`: what is not a number agrees with nobody.
        if not (apart[0] <= max(first, coarse) and all(a <= max(later, coarse) for a in apart)):
            wrong.append(name)
    return largest, wrong


def machine() -> Found:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "processor": model,
        "cores": available_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
