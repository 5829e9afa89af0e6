"""Threads, processes, profilers and exits as ordinary programs use them: no hang, no crash, the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.runtime.queue import WorkQueue
from tests.nets import SYNC, Regression, adam, normal, parameters_of, sgd

ROOT = Path(__file__).parents[1]
POSIX = pytest.mark.skipif(os.name != "posix", reason="forks and signals as POSIX has them")

#: A network, and what its weights are after some steps.
PRELUDE = """
import hashlib, os, sys, threading, time
import numpy as np
import mlcompute as mlc

def make(threads=2):
    mlc.Platform.set_thread_count(threads)
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    y = graph.dense(graph.dense(graph.input((64, 128), "x"), 256, activation="relu"), 8)
    trainer = mlc.Trainer(graph, loss="mean_squared_error", optimizer="adam")
    return trainer

def digest(trainer):
    tensors = [slot.tensor for layer in trainer.training.layers for slot in layer.parameters.values()]
    return hashlib.sha256(b"".join(tensor.data.tobytes() for tensor in tensors)).hexdigest()

X = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
T = np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)

def train(steps=5, threads=2):
    trainer = make(threads)
    trainer.fit(X, T, epochs=steps, verbose=0, shuffle=False)
    return digest(trainer)
"""


def program(text: str, *arguments: str, seconds: float = 120) -> str:
    """What a program prints; it must end by itself, and well."""
    source = PRELUDE + textwrap.dedent(text)
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", source, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert "Exception ignored" not in ran.stderr, ran.stderr
    return ran.stdout


def same(printed: str) -> None:
    lines = printed.split()
    assert len(lines) > 1
    assert len({*lines}) == 1, lines


@POSIX
def test_children_of_every_kind() -> None:
    """Forked and spawned workers, threads, and the parent again afterwards."""
    same(
        program(
            """
            import multiprocessing, concurrent.futures, warnings
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a program with threads

            print(train())
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(*pool.map(train, [5, 5, 5]))
            with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
                print(*pool.map(train, [5, 5]))
            print(train())
            """
        )
    )


def test_threads_of_a_pool() -> None:
    same(
        program(
            """
            import concurrent.futures

            print(train())
            trainers = [make() for _ in range(4)]
            for each in trainers:
                each.fit(X, T, epochs=1, verbose=0, shuffle=False)
            def go_on(trainer):
                trainer.fit(X, T, epochs=4, verbose=0, shuffle=False)
                return digest(trainer)
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                found = [*pool.map(go_on, trainers)]
            assert len(set(found)) == 1
            print(train())
            """
        )
    )


@POSIX
def test_a_sampling_profiler() -> None:
    """SIGPROF at a high rate, its handler walking the frames."""
    same(
        program(
            """
            import signal
            samples = []
            def sample(number, frame):
                depth = 0
                while frame is not None:
                    frame, depth = frame.f_back, depth + 1
                samples.append(depth)
            print(train(50))
            signal.signal(signal.SIGPROF, sample)
            signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
            print(train(50), train(50, 1))
            signal.setitimer(signal.ITIMER_PROF, 0)
            assert samples
            """
        )
    )


def test_a_watchdog() -> None:
    same(
        program(
            """
            import faulthandler
            with open(os.devnull, "w") as nowhere:
                print(train(20))
                # Armed, as watchdogs are; one that fires every few milliseconds ends plain Python programs, too.
                faulthandler.dump_traceback_later(60, repeat=True, file=nowhere)
                print(train(20), train(20, 1))
                faulthandler.cancel_dump_traceback_later()
            """
        )
    )


@pytest.mark.parametrize("how", ["end", "sys.exit(0)", "threads"])
def test_leaving_with_runs_in_the_queue(how: str) -> None:
    start = time.monotonic()
    program(
        """
        graph = mlc.Graph()
        x, t = graph.input((64, 128), "x"), mlc.Tensor(shape=(64, 8))
        graph.dense(graph.dense(x, 256, activation="relu"), 8)
        sgd = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01))
        training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd)
        training.add_inputs({"x": x}, {"t": t})
        training.compile(device=mlc.Device.cpu())
        for _ in range(5000):
            training.execute({"x": X}, {"t": T})
        if sys.argv[1] == "sys.exit(0)":
            sys.exit(0)
        if sys.argv[1] == "threads":
            threading.Thread(target=lambda: time.sleep(0.05)).start()
        """,
        how,
    )
    assert time.monotonic() - start < 300  # it ends at all


def test_a_handler_that_exits_does_not_end_the_queue() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    run = net.step(x, t, completion_handler=lambda *_: sys.exit(3))
    with pytest.raises(mlc.ExecutionError, match="the completion handler raised SystemExit: 3"):
        run.wait()
    net.step(x, t).wait()
    net.step(x, t, options=SYNC)
    with pytest.raises(SystemExit):  # on the caller's own thread it is the caller's exit
        net.step(x, t, options=SYNC, completion_handler=lambda *_: sys.exit(3))
    net.step(x, t).wait()


def test_a_queue_whose_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Regression(adam())
    net.device._queue = WorkQueue()  # its own, as it is before its first job
    x, t = normal(4, 3), normal(4, 2)
    net.step(x, t, options=SYNC)  # the engine has its own threads

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            net.step(x, t)
        net.step(x, t, options=SYNC)
    net.step(x, t).wait()
    assert net.training.optimizer.time_step == 4


@POSIX
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("options", [SYNC, mlc.ExecutionOptions.NONE], ids=["sync", "async"])
def test_a_fork_inside_a_completion_handler(options: mlc.ExecutionOptions) -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    codes: list[int] = []

    def handler(*_: Any) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                net.step(x, t, options=SYNC)
                net.step(x, t).wait()
                code = 7
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    net.step(x, t, options=options, completion_handler=handler).wait()
    assert codes == [7]


@POSIX
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_that_goes_on_after_a_fork_inside_a_handler() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    children: list[int] = []
    parent = os.getpid()
    try:
        net.step(x, t, options=SYNC, completion_handler=lambda *_: children.append(os.fork()))
        net.step(x, t, options=SYNC)
        net.step(x, t).wait()
    finally:
        if os.getpid() != parent:
            os._exit(7 if sys.exc_info()[0] is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7


@POSIX
def test_ctrl_c_while_a_queued_run_is_waited_for() -> None:
    """The run goes on, waiting stops at once, and later steps are as if nothing had been."""
    net, quiet = Regression(sgd()), Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    go_on = threading.Event()
    run = net.step(x, t, completion_handler=lambda *_: go_on.wait(120))
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert time.monotonic() - start < 100
    go_on.set()
    net.step(x, t, options=SYNC)
    quiet.step(x, t, options=SYNC)
    quiet.step(x, t, options=SYNC)
    for one, two in zip(parameters_of(net.training), parameters_of(quiet.training), strict=True):
        assert one.data.tobytes() == two.data.tobytes()
