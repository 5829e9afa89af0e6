"""Many graphs, many threads, other numbers of threads, forks: every run gives the numbers it gives alone."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mlcompute as mlc
from mlcompute.device import cpu_engine
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.runtime.threads import Team
from tests.devices.models import MODELS, make

ROOT = Path(__file__).parents[2]


@functools.cache
def alone(kind: str, steps: int) -> bytes:
    """Everything lasting after some steps of an undisturbed job on one thread."""
    job = make(kind, Cpu(1))
    for _ in range(steps):
        job.step()
    return job.bits()


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run all at once; what one of them raises, this raises."""
    errors: list[BaseException] = []
    together = threading.Barrier(len(works))

    def call(work: Callable[[], None]) -> None:
        try:
            together.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a run hangs"
    if errors:
        raise errors[0]


@pytest.fixture
def thread_count() -> Iterator[Callable[[int], None]]:
    engine = cpu_engine()
    if not isinstance(engine, Cpu):
        pytest.skip("asks about the native engine")
    before = engine.threads
    yield mlc.Platform.set_thread_count
    mlc.Platform.set_thread_count(before)


def test_sixteen_graphs_in_sixteen_threads(thread_count: Callable[[int], None]) -> None:
    thread_count(3)
    kinds = [list(MODELS)[number % len(MODELS)] for number in range(16)]

    def work(kind: str) -> None:
        job = make(kind)
        for _ in range(4):
            job.step()
        assert job.bits() == alone(kind, 4)

    for kind in MODELS:
        alone(kind, 4)
    in_threads([functools.partial(work, kind) for kind in kinds])


@pytest.mark.parametrize("kind", MODELS)
def test_one_graph_from_two_threads(kind: str) -> None:
    """Steps wait for each other: in the end there were as many as were asked for."""
    job = make(kind)

    def work() -> None:
        for _ in range(5):
            job.step()

    in_threads([work, work])
    assert job.bits() == alone(kind, 10)


def test_one_graph_from_two_threads_pass_by_pass() -> None:
    """Passes of different threads do not mix: a gradient pass follows its own forward pass or is refused."""
    job, refused = make("mlp"), []

    def work() -> None:
        for _ in range(20):
            try:
                job.forward()
                job.gradient()
                job.update()
            except mlc.ExecutionError as error:
                refused.append(error)

    in_threads([work, work])
    for error in refused:
        assert error.fix, error
    job.step()


@pytest.mark.parametrize("kind", MODELS)
def test_the_thread_count_changes_between_runs(kind: str, thread_count: Callable[[int], None]) -> None:
    job = make(kind)
    for count in (1, 4, 2, 16, 1, 5):
        thread_count(count)
        job.step()
    assert job.bits() == alone(kind, 6)


def test_the_thread_count_changes_while_others_run(thread_count: Callable[[int], None]) -> None:
    def train() -> None:
        job = make("convolutions")
        for _ in range(8):
            job.step()
        assert job.bits() == alone("convolutions", 8)

    def change() -> None:
        for count in (1, 3, 2, 7) * 8:
            thread_count(count)
            threading.Event().wait(0.005)

    alone("convolutions", 8)
    in_threads([train, train, change])


def test_a_team_that_is_stopped_before_a_run_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else compiles for another number of threads between the two."""
    engine = Cpu(3)
    job = make("convolutions", engine)
    team_of, stopped = engine.team_of, []

    def interrupted(threads: int) -> Team:
        team = team_of(threads)
        if threads == 3 and len(stopped) < 5:
            stopped.append(team)
            team_of(2)
        return team

    monkeypatch.setattr(engine, "team_of", interrupted)
    in_threads([lambda: [job.step() for _ in range(3)] and None])
    assert len(set(stopped)) == 5
    assert job.bits() == alone("convolutions", 3)


@pytest.mark.parametrize("kind", MODELS)
def test_more_threads_than_samples_and_cores(kind: str) -> None:
    job = make(kind, Cpu(33))
    for _ in range(3):
        job.step()
    assert job.bits() == alone(kind, 3)


#: A parent that trains, asynchronously too, while it forks children that compute; none of them may hang.
FORKING = """
import multiprocessing, os, sys, threading
import numpy as np
from tests.devices.models import make
import mlcompute as mlc

kind, forks = sys.argv[1], int(sys.argv[2])
mlc.Platform.set_thread_count(2)
expected = make(kind)
for _ in range(3):
    expected.step()
job = make(kind)
job.step()
early = make(kind)

def child(queue):
    work = make(kind)           # a graph of its own,
    for _ in range(3):
        work.step()
    early.step()                # and one from before the fork
    early.step()
    queue.put((work.bits() == expected.bits(), np.isfinite(np.frombuffer(early.bits(), "f")).all()))

early.step()
context = multiprocessing.get_context("fork")
for _ in range(forks):
    runs = [job.training.execute(job.inputs, job.labels) for _ in range(5)]
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    runs[-1].wait()
    job.step()
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    assert queue.get() == (True, True)
print("good")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize("kind", ["convolutions", "lstm"])
def test_forked_children_compute(kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, kind, "5"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stdout) == (0, "good\n"), ran.stderr


#: A program that ends while runs are queued.
ENDING = """
from tests.devices.models import make
job = make("convolutions")
for _ in range(200):
    job.training.execute(job.inputs, job.labels)
"""


def test_a_process_may_end_while_runs_are_queued() -> None:
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stderr) == (0, "")
