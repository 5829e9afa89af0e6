"""Small networks that the tests of execution share, with the same network in PyTorch beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices import engine_of

torch.set_num_threads(1)

SYNC = mlc.ExecutionOptions.SYNCHRONOUS
INFERENCE = mlc.ExecutionOptions.FORWARD_FOR_INFERENCE
SKIP = mlc.ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE
ALL_GRADIENTS = mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS
LINK = mlc.GraphCompilationOptions.LINK_GRAPHS
MEAN, SUM, NONE = mlc.ReductionType.MEAN, mlc.ReductionType.SUM, mlc.ReductionType.NONE

Array = np.ndarray[Any, np.dtype[Any]]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> Array:
    return rng(seed).standard_normal(shape).astype(np.float32)


def cpu() -> mlc.Device:
    """The CPU with whatever engine MLCOMPUTE_ENGINE names: what these tests ask must hold on all of them."""
    return mlc.Device.cpu()


def shares_memory(device: mlc.Device) -> bool:
    """Does the device compute in the caller's memory?"""
    return engine_of(device).wrap(np.empty(0, np.uint8)) is not None


def needs_shared_memory(device: mlc.Device) -> None:
    """For tests of what is written into the caller's memory directly."""
    if not shares_memory(device):
        pytest.skip(f"'{engine_of(device).name}' has memory of its own: it cannot see what is written to the caller's")


#: Does it run on a real GPU?
ON_GPU = type(engine_of(cpu())).__module__ == "mlcompute.devices.cuda.device"


def _engine_class() -> Any:
    engine: Any = engine_of(cpu())
    if not ON_GPU:
        return type(engine)

    class AnotherOnTheSameGpu(type(engine)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(engine.driver)

    return AnotherOnTheSameGpu


#: The class of the engine behind `cpu()`, made without arguments, for tests that watch or hold one.
CpuEngine: Any = _engine_class()


def tensor(array: Array) -> mlc.Tensor:
    """A parameter over a copy of an array."""
    return mlc.Tensor(shape=array.shape, data=array.copy())


def dense(inputs: int, outputs: int, seed: int = 1, biases: bool = True) -> mlc.FullyConnectedLayer:
    w = tensor(normal(outputs, inputs, seed=seed) / np.float32(np.sqrt(inputs)))
    b = tensor(normal(outputs, seed=seed + 1000)) if biases else None
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
    return mlc.FullyConnectedLayer(w, b, d)


def shared_dense(weights: mlc.Tensor, inputs: int, outputs: int) -> mlc.FullyConnectedLayer:
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
    return mlc.FullyConnectedLayer(weights, None, d)


def batch_norm(channels: int, momentum: float = 0.9) -> mlc.BatchNormalizationLayer:
    mean, variance = (mlc.Tensor(shape=(channels,), fill_with_data=value) for value in (0.0, 1.0))
    beta, gamma = tensor(normal(channels, seed=7)), tensor(normal(channels, seed=8))
    return mlc.BatchNormalizationLayer(channels, mean, variance, beta, gamma, momentum=momentum)


def sgd(rate: float = 0.1, **more: Any) -> mlc.SGDOptimizer:
    return mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=rate), **more)


def adam(rate: float = 0.01, **more: Any) -> mlc.AdamOptimizer:
    return mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=rate), **more)


class Regression:
    """x (n, 3) -> dense 5 -> tanh -> dense 2, mean squared error; everything a test may want to reach."""

    def __init__(
        self,
        optimizer: mlc.Optimizer | None = None,
        batch: int = 4,
        options: mlc.GraphCompilationOptions = mlc.GraphCompilationOptions.NONE,
        reduction: mlc.ReductionType = MEAN,
        device: mlc.Device | None = None,
    ) -> None:
        self.x, self.t = mlc.Tensor(shape=(batch, 3)), mlc.Tensor(shape=(batch, 2))
        self.first, self.second = dense(3, 5, seed=1), dense(5, 2, seed=2)
        self.activation = mlc.ActivationLayer(mlc.ActivationDescriptor(mlc.ActivationType.TANH, a=1.0, b=1.0))
        self.graph = mlc.Graph()
        self.hidden = self.graph.node(self.first, source=self.x)
        self.active = self.graph.node(self.activation, source=self.hidden)
        self.y = self.graph.node(self.second, source=self.active)
        self.loss = mlc.LossLayer.mean_squared_error(reduction)
        self.training = mlc.TrainingGraph([self.graph], self.loss, optimizer)
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.training.add_outputs({"y": self.y})
        self.device = device or cpu()
        self.training.compile(options=options, device=self.device)

    @property
    def parameters(self) -> list[mlc.Tensor]:
        return parameters_of(self.training)

    def bind(self, x: Array, t: Array, batch_size: int = 0) -> None:
        tensors = {"x": self.x, "t": self.t}
        self.training.bind_and_write_data(
            {"x": x, "t": t}, for_inputs=tensors, to=self.device, batch_size=batch_size
        )

    def step(self, x: Array, t: Array, **more: Any) -> mlc.Execution:
        return self.training.execute({"x": x}, {"t": t}, **more)

    def torch(self) -> TorchRegression:
        return TorchRegression([parameter.data.astype(np.float64) for parameter in self.parameters])


class TorchRegression:
    """The same in PyTorch and float64: w1, b1, w2, b2."""

    def __init__(self, parameters: Sequence[Array]) -> None:
        self.parameters = [torch.tensor(array, requires_grad=True) for array in parameters]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w1, b1, w2, b2 = self.parameters
        return torch.tanh(x @ w1.T + b1) @ w2.T + b2

    def loss(self, x: torch.Tensor | Array, t: Array) -> torch.Tensor:
        x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)
        return ((self.forward(x) - torch.tensor(t, dtype=torch.float64)) ** 2).mean()


def parameters_of(graph: mlc.Graph) -> list[mlc.Tensor]:
    """Parameters in the order of their first use, each once."""
    slots = (slot.tensor for layer in graph.layers for slot in layer.parameters.values())
    return list(dict.fromkeys(slots))


def values_of(graph: mlc.Graph) -> list[Array]:
    """Copies of all parameters and statistics."""
    statistics = (tensor for layer in graph.layers for tensor in layer.statistics.values())
    return [tensor.data.copy() for tensor in (*parameters_of(graph), *statistics)]


def assert_same(first: Sequence[Array], second: Sequence[Array]) -> None:
    """Bit by bit."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
