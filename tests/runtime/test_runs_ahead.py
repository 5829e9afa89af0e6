"""A device that runs programs in order is given the next before it has finished the last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.reference import ReferenceExecutable
from mlcompute.devices.remote import Remote
from tests.runtime.test_remote import Net, T, X


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The device computes only while the gate is open."""
    opened, run = threading.Event(), ReferenceExecutable.run

    def wait_and_run(self: ReferenceExecutable, phases: tuple[str, ...], profile: object = None) -> object:
        assert opened.wait(60.0)
        return run(self, phases, profile)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceExecutable, "run", wait_and_run)
    yield opened
    opened.set()


def batches(count: int) -> list[np.ndarray]:
    return [(X + 0.1 * number).astype(np.float32) for number in range(count)]


def test_steps_are_started_before_those_before_them_have_finished(gate: threading.Event) -> None:
    net, one_by_one = Net(Remote()), Net(Remote())
    held = []
    memory = np.empty_like(X)
    for x in batches(3):
        memory[...] = x
        net.training.execute({"x": memory}, {"t": T})  # nobody holds its result: nothing to wait for
        memory[...] = np.nan  # the caller's again as soon as the call has returned
    held.append(net.step())
    waiter = threading.Thread(target=net.training.wait)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive(), "wait() waits for the device"
    gate.set()
    waiter.join(60.0)
    for x in batches(3):
        one_by_one.training.execute({"x": x}, {"t": T}, options=mlc.ExecutionOptions.SYNCHRONOUS)
    expected = one_by_one.step(options=mlc.ExecutionOptions.SYNCHRONOUS).result.data
    np.testing.assert_array_equal(held[0].result.data, expected)
    for ours, theirs in zip(net.weights, one_by_one.weights, strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)


def test_results_stay_those_of_their_runs(gate: threading.Event) -> None:
    gate.set()
    net, one_by_one = Net(Remote()), Net(Remote())
    runs = [net.training.execute({"x": x}, {"t": T}) for x in batches(4)]
    losses = [run.result.data.item() for run in runs]
    sync = mlc.ExecutionOptions.SYNCHRONOUS
    expected = [one_by_one.training.execute({"x": x}, {"t": T}, options=sync).result.data.item() for x in batches(4)]
    assert losses == expected
    assert len(set(losses)) == 4


def test_awaiting_does_not_stop_the_event_loop(gate: threading.Event) -> None:
    net = Net(Remote())

    async def train() -> float:
        run = net.step()

        async def open_gate() -> None:
            gate.set()

        task = asyncio.create_task(open_gate())
        result, _ = await run
        await task
        assert result is not None
        return float(result.data.item())

    assert np.isfinite(asyncio.run(train()))


def test_what_somebody_must_be_told_of_is_queued(gate: threading.Event) -> None:
    net, told = Net(Remote()), threading.Event()
    run = net.training.execute({"x": X}, {"t": T}, completion_handler=lambda result, error, seconds: told.set())
    assert not told.is_set()
    gate.set()
    run.wait()
    assert told.wait(60.0)


def test_a_rate_counts_as_it_was_when_the_run_was_asked_for(gate: threading.Event) -> None:
    net, other = Net(Remote()), Net(Remote())
    net.training.execute({"x": X}, {"t": T}, completion_handler=lambda *_: None)  # the queue is busy: this one waits
    net.training.execute({"x": X}, {"t": T})
    assert net.training.optimizer is not None
    net.training.optimizer.learning_rate = 0.5
    gate.set()
    net.training.wait()
    for _ in range(2):
        other.step(options=mlc.ExecutionOptions.SYNCHRONOUS)
    for ours, theirs in zip(net.weights, other.weights, strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)
