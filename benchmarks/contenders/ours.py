"""The workloads in mlcompute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mlcompute as mlc
from benchmarks.contenders import Job
from benchmarks.workloads import (
    BETA1,
    BETA2,
    EPSILON,
    GROUPS,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    NORM_EPSILON,
    ImageLayer,
    Weights,
    Workload,
    blocks,
    bottleneck_stride,
    bottlenecks,
    layer_count,
)  # fmt: skip
from mlcompute.devices import engine_of


class Net:
    """A graph under construction: each method adds a layer with the weights of that name and gives its result."""

    def __init__(self, weights: Weights) -> None:
        self.graph, self.weights = mlc.Graph(), weights

    def tensor(self, name: str, *shape: int) -> mlc.Tensor:
        data = self.weights[name]
        return mlc.Tensor(shape=shape or data.shape, data=data.reshape(shape or data.shape).copy())

    def dense(self, x: mlc.Tensor, name: str) -> mlc.Tensor:
        w, b = self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias")
        outputs, inputs = w.descriptor.shape
        sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
        return self.graph.node(mlc.FullyConnectedLayer(w, b, sizes), source=x)

    def convolution(self, x: mlc.Tensor, name: str, stride: int = 1) -> mlc.Tensor:
        outputs, inputs, kernel, _ = self.weights[f"{name}.weight"].shape
        sizes = mlc.ConvolutionDescriptor(
            kernel_sizes=(kernel, kernel),
            input_feature_channel_count=inputs,
            output_feature_channel_count=outputs,
            strides=(stride, stride),
            padding_policy=mlc.PaddingPolicy.USE_PADDING_SIZE,
            padding_sizes=(kernel // 2, kernel // 2),
        )
        weights = self.tensor(f"{name}.weight", 1, outputs * inputs, kernel, kernel)
        biases = self.tensor(f"{name}.bias", 1, outputs, 1, 1) if f"{name}.bias" in self.weights else None
        return self.graph.node(mlc.ConvolutionLayer(weights, biases, sizes), source=x)

    def relu(self, x: mlc.Tensor) -> mlc.Tensor:
        return self.graph.node(mlc.ActivationLayer.relu(), source=x)

    def pool(self, x: mlc.Tensor, kernel: int = 2, padding: int = 0) -> mlc.Tensor:
        policy = mlc.PaddingPolicy.USE_PADDING_SIZE
        sizes = mlc.PoolingDescriptor.max_pooling((kernel, kernel), (2, 2), policy, (padding, padding))
        return self.graph.node(mlc.PoolingLayer(sizes), source=x)

    def global_average(self, x: mlc.Tensor) -> mlc.Tensor:
        n, c = x.descriptor.shape[:2]
        mean = mlc.ReductionLayer(mlc.ReductionType.MEAN, dimensions=[2, 3])
        return self.graph.reshape((n, c), source=self.graph.node(mean, source=x))

    def batch_norm(self, x: mlc.Tensor, name: str) -> mlc.Tensor:
        c = x.descriptor.shape[1]
        shape = (1, c, 1, 1)
        mean, variance = mlc.Tensor(shape=shape, fill_with_data=0.0), mlc.Tensor(shape=shape, fill_with_data=1.0)
        beta, gamma = self.tensor(f"{name}.shift", *shape), self.tensor(f"{name}.scale", *shape)
        layer = mlc.BatchNormalizationLayer(c, mean, variance, beta, gamma, NORM_EPSILON, 0.9)
        return self.graph.node(layer, source=x)

    def group_norm(self, x: mlc.Tensor, name: str) -> mlc.Tensor:
        c = x.descriptor.shape[1]
        beta, gamma = self.tensor(f"{name}.shift", 1, c, 1, 1), self.tensor(f"{name}.scale", 1, c, 1, 1)
        return self.graph.node(mlc.GroupNormalizationLayer(c, GROUPS, beta, gamma, NORM_EPSILON), source=x)

    def layer_norm(self, x: mlc.Tensor, name: str) -> mlc.Tensor:
        beta, gamma = self.tensor(f"{name}.shift"), self.tensor(f"{name}.scale")
        layer = mlc.LayerNormalizationLayer(beta.descriptor.shape, beta, gamma, NORM_EPSILON)
        return self.graph.node(layer, source=x)

    def embedding(self, x: mlc.Tensor, weights: mlc.Tensor) -> mlc.Tensor:
        sizes = mlc.EmbeddingDescriptor(*weights.descriptor.shape)
        return self.graph.node(mlc.EmbeddingLayer(sizes, weights), source=x)

    def attention(self, x: mlc.Tensor, at: str, heads: int, is_causal: bool = False) -> mlc.Tensor:
        layer = mlc.MultiheadAttentionLayer(
            mlc.MultiheadAttentionDescriptor(x.descriptor.shape[-1], heads, is_causal=is_causal),
            [*self.quarters(f"{at}.qkv.weight", 3), self.tensor(f"{at}.out.weight")],
            [*self.quarters(f"{at}.qkv.bias", 3), self.tensor(f"{at}.out.bias")],
        )
        return self.graph.node(layer, sources=[x, x, x])

    def add(self, a: mlc.Tensor, b: mlc.Tensor) -> mlc.Tensor:
        return self.graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[a, b])

    def quarters(self, name: str, parts: int = 4) -> list[mlc.Tensor]:
        """Weights that others keep as one matrix, as one tensor each."""
        return [mlc.Tensor(shape=part.shape, data=part.copy()) for part in np.split(self.weights[name], parts)]


def mlp(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    names = [name.removesuffix(".weight") for name in net.weights if name.endswith(".weight")]
    for name in names[:-1]:
        x = net.relu(net.dense(x, name))
    return net.dense(x, names[-1])


def lenet(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.pool(net.relu(net.convolution(x, "conv0")))
    x = net.pool(net.relu(net.convolution(x, "conv1")))
    x = net.graph.reshape((x.descriptor.shape[0], 3136), source=x)
    return net.dense(net.relu(net.dense(x, "fc0")), "fc1")


def resnet(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    has_wide_stem = net.weights["stem.weight"].shape[-1] == 7
    x = net.relu(net.batch_norm(net.convolution(x, "stem", 2 if has_wide_stem else 1), "stem"))
    x = net.pool(x, kernel=3, padding=1) if has_wide_stem else x
    for at, stride in blocks(net.weights):
        h = net.relu(net.batch_norm(net.convolution(x, f"{at}.conv0", stride), f"{at}.norm0"))
        h = net.batch_norm(net.convolution(h, f"{at}.conv1"), f"{at}.norm1")
        if f"{at}.shortcut.weight" in net.weights:
            x = net.batch_norm(net.convolution(x, f"{at}.shortcut", stride), f"{at}.shortcut")
        x = net.relu(net.add(h, x))
    return net.dense(net.global_average(x), "fc")


def resnet50(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    def normalized(x: mlc.Tensor, name: str, stride: int = 1) -> mlc.Tensor:
        return net.batch_norm(net.convolution(x, name, stride), name)

    x = net.pool(net.relu(normalized(x, "stem", 2)), kernel=3, padding=1)
    for at, stage, index in bottlenecks(net.weights):
        stride = bottleneck_stride(stage, index)
        h = net.relu(normalized(x, f"{at}.conv0"))
        h = net.relu(normalized(h, f"{at}.conv1", stride))
        h = normalized(h, f"{at}.conv2")
        x = net.relu(net.add(h, normalized(x, f"{at}.shortcut", stride) if index == 0 else x))
    return net.dense(net.global_average(x), "fc")


def lstm(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    descriptor = mlc.LSTMDescriptor(x.descriptor.shape[-1], HIDDEN, 1, returns_sequences=False)
    w, u, b = (net.quarters(name) for name in ("input.weight", "hidden.weight", "gates.bias"))
    x = net.graph.node(mlc.LSTMLayer(descriptor, w, u, b), source=x)
    return net.dense(net.graph.reshape((x.descriptor.shape[0], HIDDEN), source=x), "fc")


def transformer(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.embedding(x, net.tensor("embedding"))
    for index in range(layer_count(net.weights)):
        at = f"layer{index}"
        x = net.add(x, net.attention(net.layer_norm(x, f"{at}.norm0"), at, HEADS))
        h = net.relu(net.dense(net.layer_norm(x, f"{at}.norm1"), f"{at}.up"))
        x = net.add(x, net.dense(h, f"{at}.down"))
    return net.dense(x, "fc")


def gpt2(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    length = x.descriptor.shape[1]
    table = net.tensor("embedding")
    vocabulary, d = table.descriptor.shape
    numbers = np.arange(length, dtype=np.int32)[None]
    places = mlc.Tensor(shape=(1, length), data=numbers, data_type=mlc.DataType.INT32)
    x = net.add(net.embedding(x, table), net.embedding(places, net.tensor("positions")))
    for index in range(layer_count(net.weights)):
        at = f"layer{index}"
        x = net.add(x, net.attention(net.layer_norm(x, f"{at}.norm0"), at, d // HEAD_WIDTH, is_causal=True))
        h = net.dense(net.layer_norm(x, f"{at}.norm1"), f"{at}.up")
        x = net.add(x, net.dense(net.graph.node(mlc.ActivationLayer.gelu(), source=h), f"{at}.down"))
    # The head shares the weights of the embedding.
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=d, output_feature_channel_count=vocabulary)
    return net.graph.node(mlc.FullyConnectedLayer(table, None, sizes), source=net.layer_norm(x, "norm"))


def stacked_lstm(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    descriptor = mlc.LSTMDescriptor(x.descriptor.shape[-1], HIDDEN, 2, is_bidirectional=True)
    parts = [f"layer{layer}.{direction}" for direction in ("forward", "backward") for layer in range(2)]
    w, u, b = (
        [gate for part in parts for gate in net.quarters(f"{part}.{name}")]
        for name in ("input.weight", "hidden.weight", "gates.bias")
    )
    x = net.graph.node(mlc.LSTMLayer(descriptor, w, u, b), source=x)
    mean = net.graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, dimensions=[1]), source=x)
    return net.dense(net.graph.reshape((x.descriptor.shape[0], 2 * HIDDEN), source=mean), "fc")


def convnext(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    graph = net.graph
    w, b = net.tensor("stem.weight"), net.tensor("stem.bias")
    x = graph.convolution(x, w.descriptor.shape[0], 2, stride=2, padding="valid", weights=w, biases=b)
    for index in range(layer_count(net.weights, "depthwise.weight")):
        at = f"block{index}"
        w, b = net.tensor(f"{at}.depthwise.weight"), net.tensor(f"{at}.depthwise.bias")
        h = graph.depthwise_convolution(x, kernel=7, padding=3, weights=w, biases=b)
        h = net.dense(net.layer_norm(graph.transpose((0, 2, 3, 1), source=h), f"{at}.norm"), f"{at}.up")
        h = net.dense(graph.node(mlc.ActivationLayer.gelu(), source=h), f"{at}.down")
        x = net.add(x, graph.transpose((0, 3, 1, 2), source=h))
    return net.dense(net.global_average(x), "fc")


def wavenet(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    graph = net.graph

    def convolution(x: mlc.Tensor, name: str, dilation: int = 1) -> mlc.Tensor:
        w, b = net.tensor(f"{name}.weight"), net.tensor(f"{name}.bias")
        outputs, _, taps = w.descriptor.shape
        x = graph.pad(x, [dilation, 0]) if taps > 1 else x
        return graph.convolution(x, outputs, (taps,), dilation=(dilation,), padding="valid", weights=w, biases=b)

    x, skips = convolution(x, "stem"), []
    for index in range(layer_count(net.weights, "dilated.weight")):
        filtered, gate = convolution(x, f"layer{index}.dilated", 2**index).chunk(2, axis=1)
        skips.append(convolution(filtered.tanh() * gate.sigmoid(), f"layer{index}.out"))
        x = x + skips[-1]
    return net.dense(sum(skips[1:], skips[0]).relu().mean(2), "fc")


def image_network(net: Net, x: mlc.Tensor, layers: Sequence[ImageLayer]) -> mlc.Tensor:
    graph = net.graph
    kept: list[mlc.Tensor] = []
    for kind, name, outputs, stride in layers:
        match kind:
            case "convolution" | "pointwise":
                x = net.convolution(x, name, stride)
            case "dilated":
                w, b = net.tensor(f"{name}.weight"), net.tensor(f"{name}.bias")
                x = graph.convolution(x, outputs, 3, dilation=stride, weights=w, biases=b)
            case "halving":
                w, b = net.tensor(f"{name}.weight"), net.tensor(f"{name}.bias")
                x = graph.convolution(x, outputs, 4, stride=2, padding=1, weights=w, biases=b)
            case "depthwise":
                w, b = net.tensor(f"{name}.weight"), net.tensor(f"{name}.bias")
                x = graph.depthwise_convolution(x, stride=stride, padding=1, weights=w, biases=b)
            case "transposed":
                turned = net.weights[f"{name}.weight"].swapaxes(0, 1).copy()
                w, b = mlc.Tensor(shape=turned.shape, data=turned), net.tensor(f"{name}.bias")
                x = graph.convolution(x, outputs, 4, stride=2, padding=1, transposed=True, weights=w, biases=b)
            case "norm":
                x = net.batch_norm(x, name)
            case "groupnorm":
                x = net.group_norm(x, name)
            case "relu":
                x = net.relu(x)
            case "silu":
                x = graph.activation(x, "silu")
            case "pool":
                x = net.pool(x)
            case "upsample":
                x = graph.upsample(x)
            case "keep":
                kept.append(x)
            case "concatenate":
                x = mlc.concatenate([kept.pop(), x], axis=1)
            case "mean":
                x = net.global_average(x)
            case "dense":
                x = net.dense(x, name)
    return x


MODELS = {
    model.__name__: model
    for model in (mlp, lenet, resnet, lstm, transformer, resnet50, gpt2, stacked_lstm, convnext, wavenet)
}
SYNCHRONOUS = mlc.ExecutionOptions.SYNCHRONOUS


def described_network(workload: Workload) -> tuple[mlc.Graph, mlc.Tensor, mlc.Tensor]:
    """The graph, its input, its prediction."""
    kind = mlc.DataType.INT32 if workload.tokens else mlc.DataType.FLOAT32
    net, x = Net(workload.weights()), mlc.Tensor(shape=workload.input_shape, data_type=kind)
    y = image_network(net, x, workload.layers) if workload.layers else MODELS[workload.model](net, x)
    return net.graph, x, y


@dataclass
class Training:
    """A training graph that is not yet compiled, its inputs and labels, and a batch of both."""

    graph: mlc.TrainingGraph
    tensors: dict[str, mlc.Tensor]
    inputs: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


def training(workload: Workload) -> Training:
    graph, x, _ = described_network(workload)
    batch, labels = workload.batch()
    if workload.target:
        loss, kind = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), mlc.DataType.FLOAT32
    else:
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
        kind = mlc.DataType.INT32
    t = mlc.Tensor(shape=labels.shape, data_type=kind)
    rate = mlc.OptimizerDescriptor(learning_rate=LEARNING_RATE)
    adam = mlc.AdamOptimizer(rate, beta1=BETA1, beta2=BETA2, epsilon=EPSILON)
    trained = mlc.TrainingGraph([graph], loss, adam)
    trained.add_inputs({"x": x}, {"t": t})
    return Training(trained, {"x": x, "t": t}, {"x": batch}, {"t": labels.astype(kind.numpy)})


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    device = mlc.Device.cpu(precision="bf16" if variant == "bf16" else "float32")
    if mode == "infer":
        network, x, y = described_network(workload)
        images = {"x": workload.batch()[0]}
        inference = mlc.InferenceGraph([network])
        inference.add_inputs({"x": x})
        inference.compile(device=device)
        return Job(
            lambda: inference.execute(images, options=SYNCHRONOUS),
            lambda: data_of(y),
            bytes_planned=inference.device_memory_size,
        )
    described = training(workload)
    graph, inputs, labels = described.graph, described.inputs, described.labels
    given = inputs | labels
    begin = time.perf_counter()
    graph.compile(device=device)
    assert graph.programs  # asking for them makes their machine code
    compiling = time.perf_counter() - begin
    results: list[mlc.Tensor | None] = [None]

    def train() -> None:
        results[0] = graph.execute(inputs, labels, options=SYNCHRONOUS).result

    def split() -> None:
        graph.bind_and_write_data(given, for_inputs=described.tensors, to=device)
        results[0] = graph.execute_forward(options=SYNCHRONOUS).result
        graph.execute_gradient(options=SYNCHRONOUS)
        graph.execute_optimizer_update(options=SYNCHRONOUS)

    step = train if mode == "train" else split
    return Job(step, lambda: data_of(results[0]), lambda: outside_native(step), compiling, graph.device_memory_size)


def data_of(tensor: mlc.Tensor | None) -> np.ndarray:
    assert tensor is not None
    assert tensor.data is not None
    return tensor.data


def outside_native(step: Callable[[], None], seconds: float = 0.5) -> dict[str, float]:
    """Median seconds of a step outside its native calls: what feeding, queueing and Python cost."""
    engine: Any = engine_of(mlc.Device.cpu())
    if not hasattr(engine, "team_of"):  # another engine was asked for: it has no native call
        return {}
    team = engine.team_of(engine.threads)
    run, inside = team.run, [0.0]

    def timed(job: int, threads: int) -> Any:
        start = time.perf_counter()
        is_done = run(job, threads)
        inside[0] += time.perf_counter() - start
        return is_done

    team.run = timed
    outside: list[float] = []
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(outside) < 3:
            inside[0], start = 0.0, time.perf_counter()
            step()
            outside.append(time.perf_counter() - start - inside[0])
    finally:
        del team.run
    return {"seconds_outside_native": float(np.median(outside))} if inside[0] else {}
