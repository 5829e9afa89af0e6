"""Runs in the background: their order, awaiting, profiling, threads and forks."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.gates import Lookup, gated
from tests.harness import assert_close
from tests.nets import (
    INFERENCE,
    ON_GPU,
    SYNC,
    Regression,
    adam,
    assert_same,
    cpu,
    normal,
    sgd,
    values_of,
)

ASYNC = mlc.ExecutionOptions.NONE
PROFILING = mlc.ExecutionOptions.PROFILING
PER_LAYER = mlc.ExecutionOptions.PER_LAYER_PROFILING


def test_queued_runs_happen_later_and_in_order() -> None:
    device, gate = gated()
    net, plain = Regression(adam(), device=device), Regression(adam())
    finished: list[int] = []
    runs = []
    for number in range(5):
        x, t = normal(4, 3, seed=number), normal(4, 2, seed=number)
        runs.append(net.step(x, t, completion_handler=lambda *_, number=number: finished.append(number)))
        plain.step(x, t, options=SYNC)
    assert not any(run.is_done for run in runs)
    assert repr(runs[0]) == "Execution(queued)"
    assert finished == []
    gate.set()
    runs[-1].wait()
    assert finished == [0, 1, 2, 3, 4]
    assert all(run.is_done for run in runs)
    assert_same(values_of(net.training), values_of(plain.training))


def test_memory_may_be_reused_as_soon_as_the_call_returns() -> None:
    device, gate = gated()
    net, plain = Regression(sgd(), device=device), Regression(sgd())
    x, t = np.empty((4, 3), np.float32), np.empty((4, 2), np.float32)
    for number in range(4):
        x[:], t[:] = normal(4, 3, seed=number), normal(4, 2, seed=number)
        if number % 2:
            net.step(x, t)
        else:
            net.bind(x, t)
            net.training.execute_forward()
            net.training.execute_gradient()
            net.training.execute_optimizer_update()
        plain.step(x, t, options=SYNC)
        x.fill(np.nan)
        t.fill(np.nan)
    gate.set()
    assert_same(values_of(net.training), values_of(plain.training))


def test_settings_count_as_they_were_when_a_run_was_asked_for() -> None:
    device, gate = gated()
    net, plain = Regression(adam(), device=device), Regression(adam())
    for each in (net, plain):
        for number in range(4):
            each.training.optimizer.learning_rate = 0.1 / (number + 1)
            each.step(normal(4, 3, seed=number), normal(4, 2, seed=number))
            if each is plain:
                each.training.synchronize_updates()
    gate.set()
    assert_same(values_of(net.training), values_of(plain.training))
    assert net.training.optimizer.time_step == 5


def test_the_time_step_counts_the_updates_that_are_queued() -> None:
    """As the weights do that are saved with it."""
    net, seen = Regression(adam()), list[int]()

    def slow(*_: object) -> None:
        time.sleep(0.02)
        seen.append(net.training.optimizer.time_step)  # a handler is told what is done, and does not wait for itself

    for number in range(3):
        net.step(normal(4, 3, seed=number), normal(4, 2, seed=number), completion_handler=slow)
    assert net.training.optimizer.time_step == 4
    assert seen == [2, 3, 4]
    net.bind(normal(4, 3), normal(4, 2))
    net.training.execute_forward(completion_handler=slow)
    net.training.execute_gradient()
    net.training.execute_optimizer_update()
    assert net.training.optimizer.time_step == 5
    net.step(normal(4, 3), normal(4, 2), completion_handler=slow)
    assert copy.copy(net.training.optimizer).time_step == 6


def test_a_seed_set_while_runs_are_queued_is_for_later_ones() -> None:
    results = []
    for waits in (False, True):
        device, gate = gated()
        mlc.Platform.set_rng_seed_to(1)
        x = mlc.Tensor(shape=(4, 50))
        training = mlc.TrainingGraph()
        y = training.node(mlc.DropoutLayer(0.5, 0), source=x)
        training.add_inputs({"x": x})
        training.add_outputs({"y": y})
        training.compile(device=device)
        masks = [np.empty((4, 50), np.float32) for _ in range(4)]
        if waits:
            gate.set()
        for number, mask in enumerate(masks):
            if number == 2:
                mlc.Platform.set_rng_seed_to(1)
            run = training.execute({"x": np.ones((4, 50))}, outputs_data={"y": mask})
            if waits:
                run.wait()
        gate.set()
        run.wait()
        results.append(masks)
        assert_same(masks[:2], masks[2:])
        assert not np.array_equal(masks[0], masks[1])
    assert_same(*results)


def test_graphs_on_one_device_share_the_order() -> None:
    """An inference graph over weights that queued training steps change sees them after those steps."""
    device, gate = gated()
    net = Regression(sgd(), device=device)
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.add_outputs({"y": net.y})
    inference.compile(device=device)
    x, t = normal(4, 3), normal(4, 2)
    before, after = np.empty((4, 2), np.float32), np.empty((4, 2), np.float32)
    inference.execute({"x": x}, outputs_data={"y": before})
    net.step(x, t)
    inference.execute({"x": x}, outputs_data={"y": after})
    gate.set()
    inference.wait()
    plain = Regression(sgd())
    expected = plain.step(x, t, options=INFERENCE), plain.y.data
    np.testing.assert_array_equal(before, plain.training.execute({"x": x}, options=INFERENCE).result.data)
    plain.step(x, t).wait()
    np.testing.assert_array_equal(after, plain.training.execute({"x": x}, options=INFERENCE).result.data)
    assert expected[0].is_done


def test_a_synchronous_run_waits_for_those_before_it() -> None:
    device, gate = gated()
    net = Regression(sgd(), device=device)
    x, t = normal(4, 3), normal(4, 2)
    first = net.step(x, t)
    threading.Timer(0.05, gate.set).start()
    second = net.step(x, t, options=SYNC)
    assert first.is_done
    assert second.is_done


def test_reading_waits_for_what_it_depends_on() -> None:
    device, gate = gated()
    net = Regression(sgd(), device=device)
    x, t = normal(4, 3), normal(4, 2)
    before = net.first.weights.data.copy()
    expected = net.torch().loss(x, t).item()
    run = net.step(x, t)
    threading.Timer(0.05, gate.set).start()
    assert_close(net.training.result_tensors(net.loss)[0].data, np.float32([expected]))
    assert run.is_done
    assert not np.array_equal(net.first.weights.data, before)


# Awaiting ----------------------------------------------------------------------------------------------------------


def test_awaiting_a_run() -> None:
    async def train() -> tuple[mlc.Tensor | None, float]:
        net = Regression(sgd())
        return await net.step(normal(4, 3), normal(4, 2))

    result, seconds = asyncio.run(train())
    assert result.data.shape == (1,)
    assert seconds == 0.0


def test_coroutines_of_the_passes() -> None:
    net, plain = Regression(adam()), Regression(adam())
    x, t = normal(4, 3), normal(4, 2)

    async def train() -> list[Any]:
        net.bind(x, t)
        out = np.empty((4, 2), np.float32)
        result, seconds = await net.training.execute_forward_async(
            batch_size=4, options=PROFILING, outputs_data={"y": out}
        )
        assert result.of is net.training.result_tensors(net.loss)[0]
        times = [seconds]
        times.append(await net.training.execute_gradient_async(options=PROFILING))
        times.append(await net.training.execute_optimizer_update_async(options=PROFILING))
        np.testing.assert_array_equal(out, net.y.data)
        return times

    assert all(isinstance(seconds, float) and seconds > 0 for seconds in asyncio.run(train()))
    plain.step(x, t).wait()
    assert_same(values_of(net.training), values_of(plain.training))


def test_the_coroutine_of_inference() -> None:
    net = Regression()
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.compile(device=cpu())
    x = normal(4, 3)

    async def infer() -> tuple[mlc.Tensor | None, float]:
        return await inference.execute_async({"x": x}, batch_size=4)

    result, seconds = asyncio.run(infer())
    assert result.of is net.y
    assert seconds == 0.0


def test_the_event_loop_goes_on_while_runs_are_awaited() -> None:
    device, gate = gated()
    net = Regression(sgd(), device=device)
    x, t = normal(4, 3), normal(4, 2)

    async def train() -> list[str]:
        order: list[str] = []

        async def other() -> None:
            order.append("other")
            gate.set()

        runs = [net.step(x, t) for _ in range(20)]
        task = asyncio.create_task(other())
        await asyncio.gather(*runs)
        order.append("runs")
        await task
        return order

    assert asyncio.run(train()) == ["other", "runs"]


def test_awaiting_raises_the_error_and_survives_cancellation() -> None:
    device, gate = gated()
    net = Lookup(device)

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(net.training.execute_forward_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()

    data = {"i": np.int32([0, 1]), "t": np.zeros((2, 3), np.float32)}
    net.training.bind_and_write_data(data, for_inputs={"i": net.i, "t": net.t}, to=device)
    asyncio.run(cancelled())
    net.training.wait()

    async def failing() -> None:
        await net.step(0, 9)

    with pytest.raises(mlc.ExecutionError, match="index 9"):
        asyncio.run(failing())
    net.step(0, 1).wait()


# Time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
def test_times_are_measured_on_request(options: mlc.ExecutionOptions) -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    times: list[float] = []
    run = net.step(x, t, options=options | PROFILING, completion_handler=lambda *arguments: times.append(arguments[2]))
    assert 0 < run.execution_time < 10
    assert times == [run.execution_time]
    assert run.profile is None
    assert net.step(x, t, options=options).execution_time == 0.0


def test_times_per_layer_and_pass() -> None:
    net = Regression(sgd())
    net.first.label, net.second.label = "fc1", "fc2"
    net.training.compile(device=cpu())
    run = net.step(normal(4, 3), normal(4, 2), options=PER_LAYER)
    seconds = run.wait().profile.seconds
    assert run.execution_time > 0
    assert {("fc1", "forward"), ("fc1", "gradient"), ("fc2", "forward"), ("fc2", "gradient"), ("loss", "forward")} <= {
        *seconds
    }
    assert any(phase == "update" for _, phase in seconds)
    assert all(each >= 0 for each in seconds.values())
    assert sum(seconds.values()) <= run.execution_time
    lines = str(run.profile).splitlines()
    assert lines[0].split() == ["layer", "forward", "ms", "gradient", "ms", "update", "ms", "total", "ms"]
    assert lines[-1].startswith("total")
    assert any(line.startswith("fc1 ") for line in lines)


def test_times_per_layer_are_printed_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLC_DEBUG", "steps,time")
    net = Regression(sgd())
    net.step(normal(4, 3), normal(4, 2), options=PER_LAYER | SYNC)
    printed = capsys.readouterr().err
    assert "program 'fused'" in printed
    assert "total ms" in printed


# Threads and processes ---------------------------------------------------------------------------------------------


def test_one_graph_from_many_threads() -> None:
    """Each call's outputs are its own; the order is nobody's promise, the sum of all steps is."""
    net = Regression(None)
    twin = net.torch()
    failures: list[Any] = []

    def work(seed: int) -> None:
        x, t = normal(4, 3, seed=seed), normal(4, 2, seed=seed)
        out = np.empty((4, 2), np.float32)
        batch = 4 - seed % 3
        options = SYNC if seed % 2 else ASYNC
        net.training.execute({"x": x}, {"t": t}, outputs_data={"y": out}, batch_size=batch, options=options).wait()
        import torch

        expected = twin.forward(torch.tensor(x, dtype=torch.float64)).detach().numpy()
        if not np.allclose(out[:batch], expected[:batch], atol=1e-5):
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_run_and_is_told_what_it_lost() -> None:
    device, gate = gated()
    net = Regression(sgd(), device=device)
    x, t = normal(4, 3), normal(4, 2)
    lost = net.step(x, t)
    net.step(x, t)
    child = os.fork()
    if child == 0:  # nothing may escape into the child's copy of pytest
        code = 1
        try:
            gate.set()
            try:
                lost.wait()
            except mlc.ExecutionError as error:
                code = 2 if "before the process was forked" in str(error) else 3
            try:
                net.training.wait()
            except mlc.ExecutionError:
                code += 10
            try:
                net.step(x, t).wait()
                net.step(x, t, options=SYNC)
                code += 100
            except mlc.Error as error:
                code += 200 if "was in use when the process was forked" in str(error) else 0
        finally:
            os._exit(code)
    gate.set()
    _, status = os.waitpid(child, 0)
    # A GPU that was in use cannot be used by a forked child: it is told so.
    assert os.waitstatus_to_exitcode(status) == (212 if ON_GPU else 112)
    net.training.wait()
    assert lost.is_done
