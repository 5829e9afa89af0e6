"""The same numbers, bitwise: run after run, process after process, and with any number of threads."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.workloads import WORKLOADS
from mlcompute.devices.cpu.device import Cpu
from tests.devices.models import MODELS, Job, make, workload

ROOT = Path(__file__).parents[2]
#: Steps of the workloads in the slow test: a hundred of the small ones, a few of the large.
STEPS = {"mlp1": 100, "mlp32": 100, "mlp64": 100, "lstm": 30, "transformer": 30, "lenet": 10, "resnet20": 5}


@functools.cache
def engine(threads: int) -> Cpu:
    return Cpu(threads)


def digest(job: Job, steps: int) -> str:
    for _ in range(steps):
        job.step()
    return hashlib.sha256(job.bits()).hexdigest()


@pytest.mark.parametrize("kind", MODELS)
def test_run_after_run(kind: str) -> None:
    assert len({digest(make(kind, engine(2)), 3) for _ in range(5)}) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_thread_counts(kind: str) -> None:
    assert len({digest(make(kind, engine(threads)), 5) for threads in (1, 2, 4, 16)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_run_after_run(name: str) -> None:
    steps = max(2, STEPS[name] // 10)
    assert len({digest(workload(name, engine(2)), steps) for _ in range(20)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_with_any_number_of_threads(name: str) -> None:
    found = {threads: digest(workload(name, engine(threads)), STEPS[name]) for threads in (1, 2, 4, 16)}
    assert len(set(found.values())) == 1, found


PROCESS = """
import sys
from tests.devices.test_cpu_repeats import digest
from tests.devices.models import make
name = sys.argv[1]
print(digest(make(name), int(sys.argv[2])))
"""


def in_process(name: str, steps: int, threads: int, cores: set[int] | None = None) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS, name, str(steps)],
        cwd=ROOT,
        env={**os.environ, "MLCOMPUTE_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
    )
    return ran.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot bind processes to cores")
def test_processes_with_other_settings() -> None:
    """The number of threads may come from the environment, and the number of cores from the system."""
    found = {in_process("convolutions", 3, threads) for threads in (1, 3)}
    found.add(in_process("convolutions", 3, 2, {min(os.sched_getaffinity(0))}))
    assert len(found) == 1
