"""Runs in the background tell when they are over: completion handlers, and errors that nobody has seen."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices import queue_of
from tests.gates import Lookup, gated
from tests.harness import assert_close
from tests.nets import (
    SYNC,
    Array,
    Regression,
    assert_same,
    normal,
    parameters_of,
    sgd,
    values_of,
)

ASYNC = mlc.ExecutionOptions.NONE


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
    queue_of(net.device).wait_for(net.training._session.unchecked[-1])
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
