"""Kernels stay inside their memory: guard bytes stay as they are, and pages without access next to every value too."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.verify import verify_plan
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.device import Buffer
from tests.cases.case import Case
from tests.devices.guarded import run
from tests.devices.models import MODELS, Job, make
from tests.test_layers import CASES, Built

ROOT = Path(__file__).parents[2]
GUARD = 64


@functools.cache
def engine(threads: int) -> Cpu:
    return Cpu(threads)


class Watched(Cpu):
    """Keeps the arenas it hands out, filled with a pattern."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.arenas: list[np.ndarray] = []

    def allocate(self, nbytes: int) -> Buffer:
        buffer = super().allocate(nbytes)
        assert buffer.host is not None
        buffer.host[:] = 0xA5
        self.arenas.append(buffer.host)
        return buffer


def check_guard_bytes(built: Built | Job, cpu: Cpu) -> None:
    """Every value is followed by bytes that belong to nobody; values that do not meet still share memory."""
    graph = built.graph if isinstance(built, Built) else built.training
    for style in ("inference", "fused", "split"):
        built.bind()
        program = graph._session.program(style, graph._session.compile_if_needed().batch_size)
        expected = run(graph, program, cpu, None)
        before, watched = program.plan, Watched(cpu.threads)
        program.plan = plan = planned(
            program.steps, program.kept, rerunnable=style == "split", guard=GUARD, workspace=cpu.workspace
        )
        verify_plan(program.steps, plan)

        found = run(graph, program, watched, None)
        for value, array in found.items():
            assert array.tobytes() == expected[value].tobytes(), f"{style}: {value!r} differs"
        free = np.ones(plan.nbytes, bool)
        for place in plan.placements.values():
            free[place.offset : place.offset + place.nbytes] = False
        assert (watched.arenas[0][free] == 0xA5).all(), f"{style}: a step wrote outside its memory"
        program.plan = before


@pytest.mark.parametrize("case", CASES[::31])
def test_guard_bytes(case: Case) -> None:
    check_guard_bytes(Built(case, engine=engine(2)), engine(2))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_guard_bytes_of_networks(kind: str, threads: int) -> None:
    check_guard_bytes(make(kind, engine(threads)), engine(threads))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_guard_bytes_of_every_case(case: Case) -> None:
    for threads in (1, 5):
        check_guard_bytes(Built(case, engine=engine(threads)), engine(threads))


def check_guard_pages(side: str, threads: int, first: int, step: int) -> None:
    command = [sys.executable, "-m", "tests.devices.guarded", side, str(threads), str(first), str(step)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = ran.stdout.splitlines()[-1:]
    assert (ran.returncode, last) == (0, ["done"]), f"died in {last}: {ran.stderr[-2000:]}"


pages = pytest.mark.skipif(sys.platform != "linux", reason="protects pages the way Linux does")


@pages
@pytest.mark.parametrize(("side", "threads"), [("right", 5)])
def test_guard_pages(side: str, threads: int) -> None:
    check_guard_pages(side, threads, 3, 97)


@pages
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("first", range(8))
def test_guard_pages_of_every_case(side: str, threads: int, first: int) -> None:
    check_guard_pages(side, threads, first, 8)
