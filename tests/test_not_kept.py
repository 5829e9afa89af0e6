"""Reading a result that a step did not keep says what to do; naming it in add_outputs is enough."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices import engine_of
from mlcompute.devices.reference import Reference

ENGINES: dict[str, Any] = {"cpu": lambda: engine_of(mlc.Device.cpu()), "reference": Reference}
X, LABELS = np.ones((4, 3), np.float32), np.eye(2, dtype=np.float32)[[0, 1, 0, 1]]


def training_of(engine: str) -> tuple[mlc.TrainingGraph, mlc.Tensor, mlc.Graph, mlc.Tensor]:
    graph = mlc.Graph()
    x = graph.input((4, 3), "x")
    scores = graph.dense(x, 2, name="head")
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
    training = mlc.TrainingGraph([graph], loss, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.add_inputs({"x": x}, {"labels": mlc.Tensor(shape=(4, 2))})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=ENGINES[engine]()))
    return training, scores, graph, x


@pytest.mark.parametrize("engine", ENGINES)
def test_a_handler_that_reads_a_result(engine: str) -> None:
    training, scores, _, _ = training_of(engine)
    told = r"FullyConnected 'head' was not kept.*add_outputs\(\{'head': tensor\}\)"
    training.execute({"x": X}, {"labels": LABELS}).wait()
    with pytest.warns(UserWarning, match=told):
        assert scores.data is None
    training.execute({"x": X}, {"labels": LABELS}).wait()
    assert scores.data is None, "once is enough: another warning would fail the test"
    training.add_outputs({"head": scores})
    seen: list[Any] = []
    training.execute(
        {"x": X}, {"labels": LABELS}, completion_handler=lambda result, error, seconds: seen.append(scores.data)
    ).wait()
    assert seen[0].shape == (4, 2)


@pytest.mark.filterwarnings("ignore:the result of .* was not kept")
def test_errors_say_it_too() -> None:
    """Where a handler asks a tensor for its bytes, as ML Compute's programs do."""
    training, scores, _, _ = training_of("cpu")
    memory = np.empty((4, 2), np.float32)

    def copied(tensor: mlc.Tensor) -> Any:
        return lambda *_: tensor.copy_data_from_device_memory(memory, 32)

    with pytest.raises(mlc.DataError) as caught:
        copied(scores)()
    assert caught.value.fix == "run a graph that computes it first"
    with pytest.raises(mlc.ExecutionError, match=r"DataError.*has no data(?s:.*)add_outputs\(\{'head': tensor\}\)"):
        training.execute({"x": X}, {"labels": LABELS}, completion_handler=copied(scores)).wait()
    with pytest.raises(mlc.DataError, match=r"has no data(?s:.*)add_outputs\(\{'head': tensor\}\)"):
        np.asarray(scores)
    training.add_outputs({"head": scores})
    training.execute({"x": X}, {"labels": LABELS}, completion_handler=copied(scores)).wait()
    np.testing.assert_array_equal(memory, scores.data)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_kept_is_read_in_silence(engine: str) -> None:
    training, scores, graph, x = training_of(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scores.data is None, "before the first run there is nothing to say"
        training.bind_and_write_data({"x": X}, for_inputs={"x": x}, to=mlc.Device.cpu())
        run = mlc.InferenceGraph([graph])
        run.add_inputs({"x": x})
        run.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=ENGINES[engine]()))
        run.execute({"x": X}).wait()
        assert scores.data is not None
