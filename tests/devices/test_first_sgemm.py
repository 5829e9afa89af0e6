"""sgemm's machine code is made beside the rest of `compile`: once, waited for, and told about when it fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.onednn import first_sgemm
from mlcompute.devices.cpu.onednn.first_sgemm import FirstSgemm
from mlcompute.ops.op import Trace
from tests.nets import SYNC


@pytest.fixture
def library() -> onednn.OneDNN:
    found = onednn.load()
    if found is None:
        pytest.skip("without oneDNN")
    return found


def test_it_is_made_once(library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(first_sgemm, "_multiply", lambda _: made.append(threading.current_thread().name))
    sgemm = FirstSgemm()
    sgemm.wait()  # nothing was begun
    for _ in range(3):
        sgemm.need(library)
        sgemm.wait()
    assert made == ["mlcompute sgemm"]
    assert sgemm.is_begun


def test_nobody_waits_for_what_turned_out_not_to_be_needed(
    library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(first_sgemm, "_multiply", lambda _: may_end.wait())
    sgemm = FirstSgemm()
    sgemm.begin(library)
    sgemm.wait()
    may_end.set()
    sgemm.need(library)
    sgemm.wait()


@pytest.mark.parametrize(("trains", "begins"), [(True, True), (False, False)])
def test_it_is_begun_when_matmuls_are_announced(
    trains: bool, begins: bool, library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a dense layer's source is computed by sgemm, its prediction is not."""
    sgemm, made = FirstSgemm(), list[object]()
    for module in ("device", "executable", "gemm.matmul"):
        monkeypatch.setattr(f"mlcompute.devices.cpu.{module}.first_sgemm", sgemm)
    monkeypatch.setattr(first_sgemm, "_multiply", made.append)
    x, dy, w = (np.zeros(shape, np.float32) for shape in ((32, 24), (32, 40), (40, 24)))
    trace = Trace()
    values = [trace.value(array.shape, array.dtype, "input") for array in (x, dy, w)]
    ops.matmul(values[0], ops.transpose(values[2]))
    if trains:
        ops.matmul(values[1], values[2])
    Cpu(2).warm_up(trace.steps)
    assert sgemm.is_begun == begins
    sgemm.need(library)
    sgemm.wait()
    assert made == [library]


def test_an_error_is_raised_where_it_is_waited_for_and_the_next_tries_again(
    library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([mlc.DeviceError("out of memory"), None])

    def multiply(_: object) -> None:
        if (error := next(results)) is not None:
            raise error

    monkeypatch.setattr(first_sgemm, "_multiply", multiply)
    sgemm = FirstSgemm()
    sgemm.need(library)
    with pytest.raises(mlc.DeviceError, match="out of memory"):
        sgemm.wait()
    assert not sgemm.is_begun
    sgemm.need(library)
    sgemm.wait()
    assert next(results, "both were asked for") == "both were asked for"


def test_without_another_thread_it_is_made_on_this_one(
    library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[object] = []
    monkeypatch.setattr(first_sgemm.native_threads, "start", start)
    monkeypatch.setattr(first_sgemm, "_multiply", made.append)
    sgemm = FirstSgemm()
    sgemm.need(library)
    sgemm.wait()
    assert made == [library]


def test_compile_reports_its_failure(library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch) -> None:
    sgemm = FirstSgemm()
    for module in ("device", "executable", "gemm.matmul"):
        monkeypatch.setattr(f"mlcompute.devices.cpu.{module}.first_sgemm", sgemm)

    def fail(_: object) -> None:
        raise mlc.DeviceError("oneDNN: sgemm: out of memory")

    graph = mlc.Graph()
    x = graph.input((4, 32), "x")
    graph.dense(graph.dense(x, 32), 32)
    training = mlc.TrainingGraph(
        [graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), mlc.SGDOptimizer(learning_rate=0.1)
    )
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(4, 32))})
    with monkeypatch.context() as failing:
        failing.setattr(first_sgemm, "_multiply", fail)
        with pytest.raises(mlc.DeviceError, match="sgemm: out of memory"):
            training.compile(device=mlc.Device.cpu())
    training.compile(device=mlc.Device.cpu())
    ones = mlc.Tensor(shape=(4, 32), fill_with_data=1.0).data
    assert training.execute({"x": ones}, {"t": ones}, options=SYNC)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_it(library: onednn.OneDNN, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, events = threading.Event(), list[str]()

    def multiply(_: object) -> None:
        may_end.wait()
        events.append("made")

    monkeypatch.setattr(first_sgemm, "_multiply", multiply)
    sgemm = FirstSgemm()
    sgemm.need(library)

    def forks(then: Callable[[], None]) -> None:
        sgemm.before_fork()
        then()
        sgemm.after_fork()

    forking = threading.Thread(target=forks, args=(lambda: events.append("forked"),))
    forking.start()
    may_end.set()
    forking.join()
    assert events == ["made", "forked"]
    sgemm.wait()
