"""Runs in the background: their order, completion handlers, futures, awaiting, errors, profiling, and forks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices import queue_of
from tests.harness import assert_close
from tests.nets import (
    INFERENCE,
    MEAN,
    ON_GPU,
    SYNC,
    Array,
    CpuEngine,
    Regression,
    adam,
    assert_same,
    cpu,
    normal,
    parameters_of,
    sgd,
    tensor,
    values_of,
)

ASYNC = mlc.ExecutionOptions.NONE
PROFILING = mlc.ExecutionOptions.PROFILING
PER_LAYER = mlc.ExecutionOptions.PER_LAYER_PROFILING


class Gate(CpuEngine):
    """The CPU's engine, held at a gate: what is queued stays queued until the test opens it."""

    # A run that may start ahead is started by the caller, who would wait at the gate himself.
    traits = replace(CpuEngine.traits, runs_ahead=False)

    def __init__(self) -> None:
        super().__init__()
        self.name = "gate"  # and so with a queue of its own
        self.is_open = threading.Event()

    def build(self, *arguments: Any, **settings: Any) -> Any:
        executable = super().build(*arguments, **settings)
        run = executable.run

        def gated(*arguments: Any) -> Any:
            assert self.is_open.wait(30)
            return run(*arguments)

        executable.run = gated  # type: ignore[method-assign]
        return executable


def gated() -> tuple[mlc.Device, threading.Event]:
    engine = Gate()
    return mlc.Device(mlc.DeviceType.CPU, engine=engine), engine.is_open


class Lookup:
    """i (2,) -> rows of a table, with a loss: an index out of range makes a run fail."""

    def __init__(self, device: mlc.Device | None = None) -> None:
        self.i = mlc.Tensor(shape=(2,), data_type=mlc.DataType.INT32)
        self.t = mlc.Tensor(shape=(2, 3))
        self.optimizer = adam()
        self.training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), self.optimizer)
        table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 3), tensor(normal(4, 3)))
        self.y = self.training.node(table, source=self.i)
        self.training.add_inputs({"i": self.i}, {"t": self.t})
        self.device = device or cpu()
        self.training.compile(device=self.device)

    def step(self, *indices: int, **more: Any) -> mlc.Execution:
        return self.training.execute({"i": np.int32(indices)}, {"t": np.zeros((2, 3), np.float32)}, **more)


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


# Completion handlers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
def test_the_handler_gets_the_result(options: mlc.ExecutionOptions) -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    expected = net.torch().loss(x, t).item()
    seen: list[Any] = []

    def handler(result: mlc.Tensor | None, error: Exception | None, seconds: float) -> None:
        seen.append((result, None if result is None else result.data, error, seconds))

    run = net.step(x, t, options=options, completion_handler=handler).wait()
    ((result, data, error, seconds),) = seen
    assert result is run.result
    assert_close(data, np.float32([expected]))
    assert error is None
    assert seconds == 0.0


def test_every_pass_tells_its_handler() -> None:
    net = Regression(sgd())
    net.bind(normal(4, 3), normal(4, 2))
    seen: list[Any] = []

    def handler(*arguments: Any) -> None:
        seen.append(arguments)

    net.training.execute_forward(completion_handler=handler)
    net.training.execute_gradient(completion_handler=handler)
    net.training.execute_optimizer_update(completion_handler=handler, options=SYNC)
    loss = net.training.result_tensors(net.loss)[0]
    assert seen[0][0].of is loss
    assert [(error, seconds) for _, error, seconds in seen] == [(None, 0.0)] * 3
    assert [result for result, *_ in seen[1:]] == [None, None]


def test_a_handler_reads_its_own_run_though_others_are_queued() -> None:
    device, gate = gated()
    net, plain = Regression(sgd(), device=device), Regression(sgd())
    seen: list[Any] = []
    expected = []
    for number in range(3):
        x, t = normal(4, 3, seed=number), normal(4, 2, seed=number)
        net.step(x, t, completion_handler=lambda result, *_: seen.append(result.data))
        expected.append(plain.step(x, t).result.data)
    gate.set()
    net.training.wait()
    assert_same(seen, expected)


@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_handler_may_queue_the_next_run(options: mlc.ExecutionOptions) -> None:
    """Also one it waits for: its own run is over."""
    net, plain = Regression(sgd()), Regression(sgd())
    data = [(normal(4, 3, seed=number), normal(4, 2, seed=number)) for number in range(4)]
    done = threading.Event()
    losses: list[Array] = []

    def handler(result: mlc.Tensor, *_: Any) -> None:
        losses.append(result.data)
        if len(losses) == len(data):
            done.set()
        else:
            run = net.step(*data[len(losses)], options=options, completion_handler=handler)
            assert run.is_done == (options == SYNC)

    net.step(*data[0], completion_handler=handler)
    assert done.wait(30)
    net.training.wait()
    assert_same(losses, [plain.step(*each).result.data for each in data])
    assert_same(values_of(net.training), values_of(plain.training))


def test_a_handler_may_wait_for_a_run_queued_behind_its_own() -> None:
    device, gate = gated()
    net = Regression(sgd(), device=device)
    x, t = normal(4, 3), normal(4, 2)
    later: list[mlc.Execution] = []
    seen: list[bool] = []
    first = net.step(x, t, completion_handler=lambda *_: seen.append(later[0].wait().is_done))
    later.append(net.step(x, t))
    gate.set()
    first.wait()
    assert seen == [True]


def test_waiting_ends_after_the_handler() -> None:
    net = Regression(sgd())
    seen = []

    def handler(*_: Any) -> None:
        time.sleep(0.05)
        seen.append(1)

    net.step(normal(4, 3), normal(4, 2), completion_handler=handler).wait()
    assert seen == [1]


# Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
def test_the_handler_gets_the_error(options: mlc.ExecutionOptions) -> None:
    net = Lookup()
    seen: list[Any] = []
    with pytest.raises(mlc.ExecutionError, match=r"layer 'embedding'.*index 9 at position"):
        net.step(0, 9, options=options, completion_handler=lambda *arguments: seen.append(arguments)).wait()
    ((result, error, _),) = seen
    assert result is None
    assert isinstance(error, mlc.ExecutionError)
    # Told once, it is not raised again.
    net.step(0, 1).wait()


def test_an_error_nobody_has_seen_is_raised_by_the_next_call() -> None:
    net = Lookup()
    net.step(0, 9)
    queue_of(net.device).wait_for(net.training._session.unsettled[-1])
    with pytest.raises(mlc.ExecutionError, match="index 9"):
        net.step(0, 1)
    net.step(0, 1).wait()


def test_an_error_nobody_has_seen_is_raised_when_data_is_read() -> None:
    net = Lookup()
    net.step(0, 1).wait()
    weights = parameters_of(net.training)[0]
    before = weights.data.copy()
    net.step(0, 9)
    with pytest.raises(mlc.ExecutionError, match="index 9"):
        _ = weights.data
    np.testing.assert_array_equal(weights.data, before)
    loss = net.training._definition.learning.loss_layer
    assert net.training.result_tensors(loss)[0].data is None, "the memory was reused"


def test_an_error_is_not_lost_behind_a_run_that_succeeds() -> None:
    net = Lookup()
    net.step(0, 9)
    steps = 0
    with pytest.raises(mlc.ExecutionError, match="index 9"):
        net.step(0, 1)  # a device that runs ahead may know already
        steps += 1
        net.training.synchronize_updates()
    net.training.synchronize_updates()
    assert net.optimizer.time_step == 1 + steps


def test_passes_queued_behind_a_failed_one_fail_too() -> None:
    """Gradient and update passes must not work on what a failed forward pass left behind."""
    device, gate = gated()
    net = Lookup(device)
    tensors = {"i": net.i, "t": net.t}
    data = {"i": np.int32([0, 9]), "t": np.zeros((2, 3), np.float32)}
    gate.set()
    before = values_of(net.training)
    gate.clear()
    net.training.bind_and_write_data(data, for_inputs=tensors, to=device)
    errors: list[Any] = []
    for call in (net.training.execute_forward, net.training.execute_gradient, net.training.execute_optimizer_update):
        call(completion_handler=lambda result, error, _: errors.append(str(error)))
    gate.set()
    net.training.wait()
    assert "index 9" in errors[0]
    assert "the forward pass before this gradient pass failed" in errors[1]
    assert "the gradient pass before this update pass failed" in errors[2]
    assert_same(values_of(net.training), before)
    assert net.optimizer.time_step == 1
    with pytest.raises(mlc.ExecutionError, match="no forward pass was run"):
        net.training.execute_gradient()


@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_handler_that_raises(options: mlc.ExecutionOptions) -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)

    def handler(*_: Any) -> None:
        raise ValueError("my own mistake")

    with pytest.raises(mlc.ExecutionError, match="completion handler raised ValueError: my own mistake") as caught:
        net.step(x, t, options=options, completion_handler=handler).wait()
    assert isinstance(caught.value.__cause__, ValueError)
    net.step(x, t).wait()


def test_a_handler_that_raises_unseen_is_raised_by_the_next_call() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    run = net.step(x, t, completion_handler=lambda *_: 1 / 0)
    queue_of(net.device).wait_for(run._job)
    with pytest.raises(mlc.ExecutionError, match="ZeroDivisionError"):
        net.step(x, t)
    net.step(x, t).wait()


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
