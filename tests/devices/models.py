"""Small training jobs of every kind, for tests of how an engine behaves rather than of what a layer means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import mlcompute as mlc
from benchmarks.contenders import ours
from benchmarks.workloads import WORKLOADS
from mlcompute.devices.device import Engine
from mlcompute.ops.op import Array
from mlcompute.runtime.tensor_state import state_of

SYNC = mlc.ExecutionOptions.SYNCHRONOUS


@dataclass(eq=False)
class Job:
    """A compiled training graph with the data of one step."""

    training: mlc.TrainingGraph
    inputs: dict[str, Array]
    labels: dict[str, Array]
    tensors: dict[str, mlc.Tensor]

    def step(self, options: mlc.ExecutionOptions = SYNC) -> None:
        self.training.execute(self.inputs, self.labels, options=options)

    def bind(self) -> None:
        self.training.bind_and_write_data(
            {**self.inputs, **self.labels}, for_inputs=self.tensors, to=self.training.device
        )

    def forward(self) -> None:
        self.bind()
        self.training.execute_forward(options=SYNC)

    def gradient(self) -> None:
        self.training.execute_gradient(options=SYNC)

    def update(self) -> None:
        self.training.execute_optimizer_update(options=SYNC)

    def lasting(self, statistics: bool = True) -> list[Array]:
        """Copies of parameters, optimizer state and statistics."""
        tensors = [slot.tensor for layer in self.training.layers for slot in layer.parameters.values()]
        states = [state.array() for t in tensors for state in state_of(t).optimizer_storages]
        arrays = [*(t.data for t in tensors), *states]
        if statistics:
            arrays += [t.data for layer in self.training.layers for t in layer.statistics.values()]
        return [np.array(array) for array in arrays]

    def bits(self, statistics: bool = True) -> bytes:
        return b"".join(array.tobytes() for array in self.lasting(statistics))


class Net:
    """A graph under construction: each method adds a layer and gives its result."""

    def __init__(self) -> None:
        self.graph, self.rng = mlc.Graph(), np.random.default_rng(0)

    def weights(self, *shape: int) -> mlc.Tensor:
        scale = np.sqrt(2.0 / max(1, int(np.prod(shape[1:]))))
        return mlc.Tensor(shape=shape, data=(self.rng.standard_normal(shape) * scale).astype(np.float32))

    def add(self, layer: mlc.Layer, *sources: mlc.Tensor, label: str = "") -> mlc.Tensor:
        if label:
            layer.label = label
        return self.graph.node(layer, sources=list(sources))

    def dense(self, x: mlc.Tensor, outputs: int, label: str = "") -> mlc.Tensor:
        inputs = x.descriptor.shape[-1]
        sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
        layer = mlc.FullyConnectedLayer(self.weights(outputs, inputs), self.weights(outputs), sizes)
        return self.add(layer, x, label=label)

    def convolution(self, x: mlc.Tensor, outputs: int, label: str = "") -> mlc.Tensor:
        inputs = x.descriptor.shape[1]
        sizes = mlc.ConvolutionDescriptor(
            kernel_sizes=(3, 3),
            input_feature_channel_count=inputs,
            output_feature_channel_count=outputs,
            padding_policy=mlc.PaddingPolicy.SAME,
        )
        layer = mlc.ConvolutionLayer(self.weights(outputs, inputs, 3, 3), self.weights(outputs), sizes)
        return self.add(layer, x, label=label)

    def batch_norm(self, x: mlc.Tensor) -> mlc.Tensor:
        c = x.descriptor.shape[1]
        mean, variance = (mlc.Tensor(shape=(c,), fill_with_data=value) for value in (0.0, 1.0))
        return self.add(mlc.BatchNormalizationLayer(c, mean, variance, self.weights(c), self.weights(c), 1e-3), x)

    def relu(self, x: mlc.Tensor) -> mlc.Tensor:
        return self.add(mlc.ActivationLayer.relu(), x)

    def flat(self, x: mlc.Tensor) -> mlc.Tensor:
        return self.graph.reshape((x.descriptor.shape[0], -1), source=x)


def _mlp(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.add(mlc.DropoutLayer(rate=0.1, seed=7), net.relu(net.dense(x, 48, "first")))
    return net.dense(x, 5, "last")


def _convolutions(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.relu(net.batch_norm(net.convolution(x, 16, "first")))
    x = net.add(mlc.PoolingLayer(mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID)), x)
    x = net.relu(net.convolution(x, 24, "second"))
    return net.dense(net.relu(net.dense(net.flat(x), 32, "third")), 5, "last")


def _lstm(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    width, hidden = x.descriptor.shape[2], 20
    shapes = ((hidden, width), (hidden, hidden), (hidden,))
    weights = ([net.weights(*shape) for _ in range(4)] for shape in shapes)
    layer = mlc.LSTMLayer(mlc.LSTMDescriptor(width, hidden, 1, returns_sequences=False), *weights)
    x = net.add(layer, x, label="first")
    return net.dense(net.flat(x), 5, "last")


def _transformer(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    d = 24
    x = net.add(mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(40, d), net.weights(40, d)), x, label="first")
    weights, biases = [net.weights(d, d) for _ in range(4)], [net.weights(d) for _ in range(4)]
    attention = mlc.MultiheadAttentionLayer(mlc.MultiheadAttentionDescriptor(d, 3), weights, biases)
    h = net.add(mlc.LayerNormalizationLayer((d,), net.weights(d), net.weights(d), 1e-5), x)
    x = net.add(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), x, net.add(attention, h, h, h))
    return net.dense(net.flat(net.relu(net.dense(x, 2 * d))), 5, "last")


#: Kind -> shape of its input, and its layers.
MODELS: dict[str, tuple[tuple[int, ...], Callable[[Net, mlc.Tensor], mlc.Tensor]]] = {
    "mlp": ((12, 40), _mlp),
    "convolutions": ((12, 3, 16, 16), _convolutions),
    "lstm": ((12, 9, 17), _lstm),
    "transformer": ((12, 11), _transformer),
}


def make(kind: str, engine: Engine | None = None) -> Job:
    """A job of some kind, always with the same weights, data and random numbers."""
    shape, layers = MODELS[kind]
    tokens = kind == "transformer"
    net = Net()
    x = mlc.Tensor(shape=shape, data_type=mlc.DataType.INT32 if tokens else mlc.DataType.FLOAT32)
    t = mlc.Tensor(shape=(shape[0], 5))
    y = layers(net, x)
    assert y.descriptor.shape == t.descriptor.shape
    training = mlc.TrainingGraph(
        [net.graph],
        mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_count=5),
        # Some gradients are nothing but rounding (of a bias before a normalisation): a small epsilon blows them up.
        mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3), epsilon=1e-2),
    )
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    rng = np.random.default_rng(3)
    data = rng.integers(0, 40, shape).astype(np.int32) if tokens else rng.standard_normal(shape).astype(np.float32)
    classes = np.eye(5, dtype=np.float32)[rng.integers(0, 5, shape[0])]
    return Job(training, {"x": data}, {"t": classes}, {"x": x, "t": t})


def workload(name: str, engine: Engine | None = None) -> Job:
    """One of the workloads that the benchmarks measure, at its full size."""
    w = WORKLOADS[name]
    net, kind = ours.Net(w.weights()), mlc.DataType.INT32 if w.tokens else mlc.DataType.FLOAT32
    x = mlc.Tensor(shape=w.input_shape, data_type=kind)
    y = ours.MODELS[w.model](net, x)
    data, classes = w.batch()
    if w.tokens:
        y = net.graph.reshape((classes.size, w.classes), source=y)
    t = mlc.Tensor(shape=y.descriptor.shape)
    training = mlc.TrainingGraph(
        [net.graph],
        mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_count=w.classes),
        mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3)),
    )
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    labels = np.eye(w.classes, dtype=np.float32)[classes.reshape(-1)]
    return Job(training, {"x": data}, {"t": labels}, {"x": x, "t": t})
