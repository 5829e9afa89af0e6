"""A run's result is its own: results of earlier runs stay what they were, whatever runs later."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Value
from tests.nets import INFERENCE, LINK, SYNC, Array, Regression, adam, cpu, dense, normal

ENGINES = pytest.mark.parametrize("device", [cpu, lambda: mlc.Device(engine=Reference())], ids=["cpu", "reference"])
Make = Callable[[], mlc.Device]
QUEUED = mlc.ExecutionOptions.NONE
RUNS = pytest.mark.parametrize("options", [SYNC, QUEUED], ids=["synchronous", "queued"])


def data(step: int, rows: int = 4) -> tuple[Array, Array]:
    return normal(rows, 3, seed=step), normal(rows, 2, seed=100 + step)


def right_losses(device: mlc.Device, sizes: list[int] | None = None) -> list[Array]:
    """Each read right after its own run."""
    net = Regression(adam(0.1), device=device)
    found = []
    for step in range(6):
        rows = sizes[step] if sizes else 4
        run = net.step(*data(step, rows), batch_size=rows, options=SYNC)
        found.append(np.array(run.result.data))
    return found


@ENGINES
@RUNS
def test_every_run_keeps_its_loss(device: Make, options: mlc.ExecutionOptions) -> None:
    right = right_losses(device())
    net = Regression(adam(0.1), device=device())
    runs = [net.step(*data(step), options=options) for step in range(6)]
    assert len({run.result.data.item() for run in runs}) == 6
    np.testing.assert_array_equal([run.result.data for run in runs], right)
    again = Regression(adam(0.1), device=device())
    results = [again.step(*data(step), options=options).result for step in range(6)]  # the runs themselves are gone
    np.testing.assert_array_equal([result.data for result in results], right)
    assert runs[0].result is runs[0].result
    for result in results:
        assert (result.label, result.descriptor) == (results[0].label, results[0].descriptor)
        with pytest.raises(ValueError, match="read-only"):
            result.data[...] = 0


@ENGINES
@RUNS
def test_smaller_batches_and_other_programs_in_between(device: Make, options: mlc.ExecutionOptions) -> None:
    sizes = [4, 2, 4, 1, 3, 4]
    right = right_losses(device(), sizes)
    net = Regression(adam(0.1), device=device())
    runs = []
    for step, rows in enumerate(sizes):
        runs.append(net.step(*data(step, rows), batch_size=rows, options=options))
        net.training.execute({"x": data(9)[0]}, options=options | INFERENCE)  # nobody looks at it
    np.testing.assert_array_equal([run.result.data for run in runs], right)


@ENGINES
@RUNS
def test_predictions_of_an_inference_graph(device: Make, options: mlc.ExecutionOptions) -> None:
    net = Regression(device=device())
    graph = mlc.InferenceGraph([net.graph])
    graph.add_inputs({"x": net.x})
    graph.compile(device=net.device)
    right = [np.array(graph.execute({"x": data(k)[0]}).result.data) for k in range(6)]
    runs = [graph.execute({"x": data(k)[0]}, options=options) for k in range(6)]
    for run, expected in zip(reversed(runs), reversed(right), strict=True):
        np.testing.assert_array_equal(run.result.data, expected)
    np.testing.assert_array_equal(net.y.data, right[-1])  # the graph's own tensor has the latest


@ENGINES
@RUNS
def test_passes_run_one_by_one(device: Make, options: mlc.ExecutionOptions) -> None:
    right = right_losses(device())
    net = Regression(adam(0.1), device=device())
    runs = []
    for step in range(6):
        net.bind(*data(step))
        runs.append(net.training.execute_forward(options=options))
        gradient = net.training.execute_gradient(options=options)
        update = net.training.execute_optimizer_update(options=options)
        assert gradient.result is None
        assert update.result is None
    np.testing.assert_allclose([run.result.data for run in runs], right, rtol=1e-6)


@ENGINES
def test_runs_that_fail_take_nothing_from_others(device: Make) -> None:
    table = mlc.Tensor(shape=(4, 2), data=normal(4, 2))
    words = mlc.Tensor(shape=(2,), data_type=mlc.DataType.INT32)
    graph = mlc.InferenceGraph()
    graph.node(mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 2), table), source=words)
    graph.add_inputs({"words": words})
    graph.compile(device=device())
    for options in (SYNC, QUEUED):
        first = graph.execute({"words": np.int32([0, 1])}, options=options)
        with pytest.raises(mlc.ExecutionError):
            graph.execute({"words": np.int32([0, 9])}, options=options).wait()
        last = graph.execute({"words": np.int32([2, 3])}, options=options)
        np.testing.assert_array_equal(first.result.data, table.data[:2])
        np.testing.assert_array_equal(last.result.data, table.data[2:])


@ENGINES
@RUNS
def test_completion_handlers_get_the_runs_own(device: Make, options: mlc.ExecutionOptions) -> None:
    right = right_losses(device())
    net = Regression(adam(0.1), device=device())
    at_once: list[Any] = []
    kept: list[Any] = []

    def handler(result: Any, error: Any, seconds: float) -> None:
        kept.append(result)
        at_once.append(result.data.item())

    for step in range(6):
        net.step(*data(step), options=options, completion_handler=handler)
    net.training.synchronize_updates()
    np.testing.assert_array_equal(at_once, np.concatenate(right))
    np.testing.assert_array_equal([result.data for result in kept], right)


@ENGINES
def test_awaited_results(device: Make) -> None:
    net = Regression(adam(0.1), device=device())

    async def losses() -> list[Any]:
        runs = [net.step(*data(step)) for step in range(6)]
        return [(await run)[0] for run in runs]

    np.testing.assert_array_equal([result.data for result in asyncio.run(losses())], right_losses(device()))


@ENGINES
def test_linked_graphs(device: Make) -> None:
    x, h = mlc.Tensor(shape=(4, 3)), None
    first, second = mlc.TrainingGraph(), mlc.TrainingGraph()
    h = first.node(dense(3, 3), source=x)
    second.node(dense(3, 2, seed=5), source=h)
    first.link([second])
    where = device()
    for graph in (first, second):
        graph.compile(device=where, options=LINK)
    pairs, right = [], []
    for step in range(4):
        first.bind_and_write_data({"x": data(step)[0]}, for_inputs={"x": x}, to=where)
        pairs.append((first.execute_forward(), second.execute_forward()))
        if step == 3:
            right = [np.array(run.result.data) for run in pairs[-1]]
    found = [[run.result.data for run in pair] for pair in pairs]
    assert len({array.tobytes() for pair in found for array in pair}) == 8
    for a, b in zip(found[-1], right, strict=True):
        np.testing.assert_array_equal(a, b)


@ENGINES
@RUNS
def test_results_outlive_their_graph(device: Make, options: mlc.ExecutionOptions) -> None:
    right = right_losses(device())
    net = Regression(adam(0.1), device=device())
    runs = [net.step(*data(step), options=options) for step in range(6)]
    last = runs[-1].wait()
    del net
    gc.collect()
    np.testing.assert_array_equal(last.result.data, right[-1])
    np.testing.assert_array_equal([run.result.data for run in runs], right)


def test_a_result_nobody_holds_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Regression(adam())
    net.step(*data(0), options=SYNC)
    executable = net.training._session.last.executable
    assert executable is not None
    fetched: list[Value] = []
    keep = executable.keep

    def counting(value: Value) -> Any:
        fetched.append(value)
        return keep(value)

    monkeypatch.setattr(executable, "keep", counting)
    for step in range(3):
        net.step(*data(step), options=SYNC)
    assert not fetched
    run = net.step(*data(3), options=SYNC)
    net.step(*data(4), options=SYNC)
    assert len(fetched) == (0 if executable.sends else 1), "a device that sends results is not asked for them"
    assert run.result.data is run.result.data, "copied once"


def test_reading_while_others_run() -> None:
    """Every reader gets its own run's number, however the runs and the reads fall together."""
    net = Regression(adam(0.1))
    wanted: list[Any] = [None] * 200
    found: list[Any] = [None] * 200
    threads = []

    def read(number: int, run: mlc.Execution) -> None:
        found[number] = run.result.data.item()

    for number in range(200):
        run = net.step(
            *data(number % 7),
            completion_handler=lambda result, error, seconds, n=number: wanted.__setitem__(
                n, net.training._session.fetch(result.of).item()
            ),
        )
        threads.append(threading.Thread(target=read, args=(number, run)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    net.training.synchronize_updates()
    assert found == wanted
