"""The longest form of every call that compiles, feeds or runs: each argument does its part beside all the others."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

X = np.float32([[1, 2], [3, 4], [5, 6]])
T = np.float32([[1], [0], [2]])
LABEL_WEIGHTS = np.float32([[1], [2], [3]])
SYNCHRONOUS, PROFILING = mlc.ExecutionOptions.SYNCHRONOUS, mlc.ExecutionOptions.PROFILING
WEIGHTS = np.float32([[0.5, -1]])
PREDICTIONS = X @ WEIGHTS.T


def loss_of(rows: int, weighted: bool = True) -> float:
    errors = (PREDICTIONS[:rows] - T[:rows]) ** 2
    return float(np.sum(errors * LABEL_WEIGHTS[:rows] if weighted else errors))


class Net:
    """y = x wᵀ with a sum of squares as loss; runs in batches of up to three."""

    def __init__(self, optimizer: mlc.Optimizer | None = None) -> None:
        self.x, self.t = mlc.Tensor(shape=(3, 2)), mlc.Tensor(shape=(3, 1))
        self.v = mlc.Tensor(shape=(3, 1))
        self.w = mlc.Tensor(shape=(1, 2), data=WEIGHTS.copy())
        self.layer = mlc.FullyConnectedLayer(self.w, None, mlc.ConvolutionDescriptor(input_feature_channel_count=2))
        self.graph = mlc.Graph()
        self.y = self.graph.node(self.layer, source=self.x)
        self.device = mlc.Device.cpu()
        self.training = mlc.TrainingGraph(
            graph_objects=[self.graph],
            loss_layer=mlc.LossLayer.mean_squared_error(mlc.ReductionType.SUM),
            optimizer=optimizer,
        )
        self.training.add_inputs(inputs={"x": self.x}, loss_labels={"t": self.t}, loss_label_weights={"v": self.v})
        self.training.add_outputs({"y": self.y})

    def compile(self) -> Net:
        self.training.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=self.device)
        return self

    def bind(self, batch_size: int) -> None:
        assert self.training.bind_and_write_data(
            inputs_data={"x": X[:batch_size], "t": T[:batch_size], "v": LABEL_WEIGHTS[:batch_size]},
            for_inputs={"x": self.x, "t": self.t, "v": self.v},
            to=self.device,
            batch_size=batch_size,
            synchronous=True,
        )


class Told:
    """A completion handler that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Exception | None, float]] = []

    def __call__(self, result: mlc.Tensor | None, error: Exception | None, seconds: float) -> None:
        self.calls.append((None if result is None else result.data, error, seconds))


def sgd() -> mlc.Optimizer:
    return mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.125))


@pytest.mark.parametrize("rows", [3, 2, 1])
def test_execute_of_a_training_graph(rows: int) -> None:
    net, told, out = Net(sgd()).compile(), Told(), np.full((3, 1), 99, np.float32)
    run = net.training.execute(
        inputs_data={"x": X},
        loss_labels_data={"t": T},
        loss_label_weights_data={"v": LABEL_WEIGHTS},
        outputs_data={"y": out},
        batch_size=rows,
        options=SYNCHRONOUS | PROFILING,
        completion_handler=told,
    )
    ((loss, error, seconds),) = told.calls
    np.testing.assert_allclose(loss, [loss_of(rows)])
    assert error is None
    assert seconds == run.execution_time > 0
    np.testing.assert_array_equal(out[:rows], PREDICTIONS[:rows])
    np.testing.assert_array_equal(out[rows:], 99)
    gradient = 2 * ((PREDICTIONS - T) * LABEL_WEIGHTS)[:rows].T @ X[:rows]
    np.testing.assert_allclose(net.w.data, WEIGHTS - 0.125 * gradient)


@pytest.mark.parametrize("rows", [3, 2])
def test_the_passes_one_by_one(rows: int) -> None:
    net, told = Net(sgd()).compile(), Told()
    net.bind(rows)
    y, dx = np.zeros((3, 1), np.float32), np.zeros((3, 2), np.float32)
    net.training.execute_forward(batch_size=rows, options=SYNCHRONOUS, outputs_data={"y": y}, completion_handler=told)
    np.testing.assert_array_equal(y[:rows], PREDICTIONS[:rows])
    np.testing.assert_allclose(told.calls[0][0], [loss_of(rows)])
    net.training.execute_gradient(
        batch_size=rows, options=SYNCHRONOUS | PROFILING, outputs_data={"y": y}, completion_handler=told
    )
    assert told.calls[1][1] is None
    assert told.calls[1][2] > 0
    dy = 2 * ((PREDICTIONS - T) * LABEL_WEIGHTS)[:rows]
    np.testing.assert_allclose(net.training.gradient_data(for_parameter=net.w, layer=net.layer), dy.T @ X[:rows])
    gradient = net.training.gradient_tensor(net.x)
    assert gradient is not None
    gradient.copy_data_from_device_memory(dx, 8 * rows)
    np.testing.assert_allclose(dx[:rows], dy @ WEIGHTS)
    net.training.execute_optimizer_update(options=SYNCHRONOUS, completion_handler=told)
    assert len(told.calls) == 3
    np.testing.assert_allclose(net.w.data, WEIGHTS - 0.125 * dy.T @ X[:rows])


def test_the_passes_as_coroutines() -> None:
    net = Net(sgd()).compile()
    net.bind(2)
    y = np.zeros((3, 1), np.float32)

    async def step() -> tuple[mlc.Tensor | None, float, float, float]:
        result, forward = await net.training.execute_forward_async(
            batch_size=2, options=PROFILING, outputs_data={"y": y}
        )
        gradient = await net.training.execute_gradient_async(batch_size=2, options=PROFILING, outputs_data={"y": y})
        return result, forward, gradient, await net.training.execute_optimizer_update_async(options=PROFILING)

    result, *seconds = asyncio.run(step())
    assert result is not None
    np.testing.assert_allclose(result.data, [loss_of(2)])
    np.testing.assert_array_equal(y[:2], PREDICTIONS[:2])
    assert min(seconds) > 0
    gradient = 2 * ((PREDICTIONS - T) * LABEL_WEIGHTS)[:2].T @ X[:2]
    np.testing.assert_allclose(net.w.data, WEIGHTS - 0.125 * gradient)


@pytest.mark.parametrize("labelled", [False, True])
def test_execute_of_an_inference_graph(labelled: bool) -> None:
    x, t, v = mlc.Tensor(shape=(3, 2)), mlc.Tensor(shape=(3, 1)), mlc.Tensor(shape=(3, 1))
    graph = mlc.InferenceGraph(graph_objects=[])
    w = mlc.Tensor(shape=(1, 2), data=WEIGHTS.copy())
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=2)
    y = graph.node(mlc.FullyConnectedLayer(w, None, d), source=x)
    if labelled:
        graph.node(mlc.LossLayer.mean_squared_error(mlc.ReductionType.SUM), sources=[y], loss_labels=[t])
        graph.add_inputs(inputs={"x": x}, loss_labels={"t": t}, loss_label_weights={"v": v})
    else:
        graph.add_inputs(inputs={"x": x})
    graph.add_outputs(outputs={"y": y})
    graph.compile(options=mlc.GraphCompilationOptions.NONE, device=mlc.Device.cpu())
    told, out = Told(), np.zeros((2, 1), np.float32)
    labels = {"loss_labels_data": {"t": T}, "loss_label_weights_data": {"v": LABEL_WEIGHTS}} if labelled else {}
    run = graph.execute(
        inputs_data={"x": X},
        outputs_data={"y": out},
        batch_size=2,
        options=SYNCHRONOUS | PROFILING,
        completion_handler=told,
        **labels,
    )
    expected = [loss_of(2)] if labelled else PREDICTIONS[:2]
    np.testing.assert_array_equal(out, PREDICTIONS[:2])
    np.testing.assert_allclose(told.calls[0][0], expected)
    assert told.calls[0][1:] == (None, run.execution_time)
    out[:] = 0
    result, seconds = asyncio.run(
        graph.execute_async(
            inputs_data={"x": X},
            loss_labels_data=labels.get("loss_labels_data"),
            loss_label_weights_data=labels.get("loss_label_weights_data"),
            outputs_data={"y": out},
            batch_size=2,
            options=PROFILING,
        )
    )
    assert result is not None
    np.testing.assert_allclose(result.data, expected)
    np.testing.assert_array_equal(out, PREDICTIONS[:2])
    assert seconds > 0


@pytest.mark.parametrize("kind", [mlc.TrainingGraph, mlc.InferenceGraph])
def test_inputs_that_are_constant(kind: type[mlc.TrainingGraph] | type[mlc.InferenceGraph]) -> None:
    """They are given when compiling, are folded in, and need not be fed; later changes of the memory do not count."""
    a, b = mlc.Tensor(shape=(3, 2)), mlc.Tensor(shape=(3, 2))
    graph = kind()
    y = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.MULTIPLY), sources=[a, b])
    graph.add_inputs({"a": a, "b": b})
    constant = np.full((3, 2), 3, np.float32)
    assert graph.compile(
        options=mlc.GraphCompilationOptions.NONE,
        device=mlc.Device.cpu(),
        input_tensors={"b": b},
        input_tensors_data={"b": mlc.TensorData(constant)},
    )
    constant[:] = 7
    for rows in (3, 2):
        graph.execute({"a": X}, batch_size=rows).wait()
        np.testing.assert_array_equal(y.data, 3 * X[:rows])


def test_the_state_of_an_optimizer() -> None:
    momentum = np.float32([[1, -1]])
    rate = mlc.OptimizerDescriptor(learning_rate=0.125)
    net = Net(mlc.SGDOptimizer(rate, momentum_scale=0.5)).compile()
    assert net.training.bind_optimizer_data(
        data=[mlc.TensorData(momentum)], device_data=net.w.optimizer_device_data, tensor=net.w
    )
    gradient = 2 * ((PREDICTIONS - T) * LABEL_WEIGHTS).T @ X
    net.training.execute({"x": X}, {"t": T}, {"v": LABEL_WEIGHTS}).wait()
    expected = 0.5 * np.float32([[1, -1]]) + 0.125 * gradient
    np.testing.assert_allclose(momentum, expected)
    np.testing.assert_allclose(net.w.data, WEIGHTS - expected)
    with pytest.raises(mlc.DataError, match="2 buffers were given"):
        net.training.bind_optimizer_data([momentum, momentum], tensor=net.w)
