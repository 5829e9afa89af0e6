"""The workloads in mlcompute."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

import mlcompute as mlc
from benchmarks.workloads import EPSILON, LEARNING_RATE, WORKLOADS, Workload


def random(*shape: int, fan: int) -> mlc.Tensor:
    data = np.random.default_rng(0).standard_normal(shape) * np.sqrt(2.0 / fan)
    return mlc.Tensor(shape=shape, data=data.astype(np.float32))


def filled(*shape: int, value: float = 0.0) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, fill_with_data=value)


class Net:
    """A graph under construction: each method adds layers and gives the new last tensor."""

    def __init__(self) -> None:
        self.graph = mlc.Graph()

    def dense(self, x: mlc.Tensor, inputs: int, outputs: int) -> mlc.Tensor:
        sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
        layer = mlc.FullyConnectedLayer(random(outputs, inputs, fan=inputs), filled(outputs), sizes)
        return self.graph.node(layer, source=x)

    def convolution(self, x: mlc.Tensor, outputs: int, kernel: int, stride: int = 1, bias: bool = True) -> mlc.Tensor:
        inputs = x.descriptor.shape[1]
        sizes = mlc.ConvolutionDescriptor(
            kernel_sizes=(kernel, kernel),
            input_feature_channel_count=inputs,
            output_feature_channel_count=outputs,
            strides=(stride, stride),
            padding_policy=mlc.PaddingPolicy.USE_PADDING_SIZE,
            padding_sizes=(kernel // 2, kernel // 2),
        )
        weights = random(1, outputs * inputs, kernel, kernel, fan=inputs * kernel * kernel)
        biases = filled(1, outputs, 1, 1) if bias else None
        return self.graph.node(mlc.ConvolutionLayer(weights, biases, sizes), source=x)

    def relu(self, x: mlc.Tensor) -> mlc.Tensor:
        return self.graph.node(mlc.ActivationLayer.relu(), source=x)

    def pool(self, x: mlc.Tensor) -> mlc.Tensor:
        sizes = mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID)
        return self.graph.node(mlc.PoolingLayer(sizes), source=x)

    def batch_norm(self, x: mlc.Tensor) -> mlc.Tensor:
        c = x.descriptor.shape[1]
        layer = mlc.BatchNormalizationLayer(
            c, filled(1, c, 1, 1), filled(1, c, 1, 1, value=1.0), filled(1, c, 1, 1), filled(1, c, 1, 1, value=1.0),
            1e-5, 0.9,
        )  # fmt: skip
        return self.graph.node(layer, source=x)

    def layer_norm(self, x: mlc.Tensor) -> mlc.Tensor:
        d = x.descriptor.shape[-1]
        return self.graph.node(mlc.LayerNormalizationLayer((d,), filled(d), filled(d, value=1.0), 1e-5), source=x)

    def add(self, a: mlc.Tensor, b: mlc.Tensor) -> mlc.Tensor:
        return self.graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[a, b])


def mlp(net: Net, x: mlc.Tensor, sizes: tuple[int, ...]) -> mlc.Tensor:
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        x = net.dense(x, inputs, outputs)
        if index < len(sizes) - 2:
            x = net.relu(x)
    return x


def lenet(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.pool(net.relu(net.convolution(x, 32, 5)))
    x = net.pool(net.relu(net.convolution(x, 64, 5)))
    x = net.graph.reshape((x.descriptor.shape[0], 3136), source=x)
    return net.dense(net.relu(net.dense(x, 3136, 256)), 256, 10)


def resnet20(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.relu(net.batch_norm(net.convolution(x, 16, 3, bias=False)))
    channels = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            step = stride if block == 0 else 1
            h = net.relu(net.batch_norm(net.convolution(x, outputs, 3, step, bias=False)))
            h = net.batch_norm(net.convolution(h, outputs, 3, bias=False))
            if step > 1 or channels != outputs:
                x = net.batch_norm(net.convolution(x, outputs, 1, step, bias=False))
            x, channels = net.relu(net.add(h, x)), outputs
    x = net.graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, dimensions=[2, 3]), source=x)
    return net.dense(net.graph.reshape((x.descriptor.shape[0], 64), source=x), 64, 10)


def lstm(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    descriptor = mlc.LSTMDescriptor(64, 128, 1, returns_sequences=False)
    layer = mlc.LSTMLayer(
        descriptor,
        [random(128, 64, fan=64) for _ in range(4)],
        [random(128, 128, fan=128) for _ in range(4)],
        [filled(128) for _ in range(4)],
    )
    x = net.graph.node(layer, source=x)
    return net.dense(net.graph.reshape((x.descriptor.shape[0], 128), source=x), 128, 10)


def transformer(
    net: Net, x: mlc.Tensor, d: int = 128, heads: int = 4, layers: int = 2, vocabulary: int = 256
) -> mlc.Tensor:
    table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(vocabulary, d), random(vocabulary, d, fan=d))
    x = net.graph.node(table, source=x)
    for _ in range(layers):
        h = net.layer_norm(x)
        attention = mlc.MultiheadAttentionLayer(
            mlc.MultiheadAttentionDescriptor(d, heads),
            [random(d, d, fan=d) for _ in range(4)],
            [filled(d) for _ in range(4)],
        )
        x = net.add(x, net.graph.node(attention, sources=[h, h, h]))
        h = net.dense(net.relu(net.dense(net.layer_norm(x), d, 4 * d)), 4 * d, d)
        x = net.add(x, h)
    return net.dense(x, d, vocabulary)


def network(workload: Workload, net: Net, x: mlc.Tensor) -> mlc.Tensor:
    models: dict[str, Callable[[], mlc.Tensor]] = {
        "mlp1": lambda: mlp(net, x, (784, 128, 10)),
        "mlp32": lambda: mlp(net, x, (784, 128, 10)),
        "mlp64": lambda: mlp(net, x, (784, 512, 256, 10)),
        "lenet": lambda: lenet(net, x),
        "resnet20": lambda: resnet20(net, x),
        "lstm": lambda: lstm(net, x),
        "transformer": lambda: transformer(net, x),
    }
    return models[workload.name]()


Feeds = dict[str, np.ndarray]


def build(name: str, device: mlc.Device | None = None) -> tuple[mlc.TrainingGraph, Feeds, Feeds]:
    """A compiled training graph with the data of one step."""
    workload = WORKLOADS[name]
    kind = mlc.DataType.INT32 if workload.tokens else mlc.DataType.FLOAT32
    net, x = Net(), mlc.Tensor(shape=workload.input_shape, data_type=kind)
    y = network(workload, net, x)
    if workload.tokens:  # one prediction per token: samples and tokens form one axis for the loss
        y = net.graph.reshape((workload.input_shape[0] * workload.input_shape[1], workload.classes), source=y)
    t = mlc.Tensor(shape=y.descriptor.shape)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_count=workload.classes)
    optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=LEARNING_RATE), epsilon=EPSILON)
    graph = mlc.TrainingGraph([net.graph], loss, optimizer)
    graph.add_inputs({"x": x}, {"t": t})
    graph.compile(device=device or mlc.Device.cpu())
    inputs, classes = workload.batch()
    labels = np.eye(workload.classes, dtype=np.float32)[classes.reshape(-1)]
    return graph, {"x": inputs}, {"t": labels}


def step(name: str, variant: str = "") -> Callable[[], None]:
    """A function that runs one training step and returns when it is done."""
    graph, inputs, labels = build(name)
    options = mlc.ExecutionOptions.SYNCHRONOUS
    if variant == "split":
        feeds = {**inputs, **labels}
        tensors = {"x": graph._inputs["x"], "t": graph._labels["t"]}

        def split() -> None:
            graph.bind_and_write_data(feeds, for_inputs=tensors, to=graph.device)
            graph.execute_forward(options=options)
            graph.execute_gradient(options=options)
            graph.execute_optimizer_update(options=options)

        return split
    return lambda: graph.execute(inputs, labels, options=options)
