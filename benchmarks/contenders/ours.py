"""The workloads in mlcompute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mlcompute as mlc
from benchmarks.contenders import Job
from benchmarks.workloads import (
    BETA1,
    BETA2,
    BLOCKS,
    EPSILON,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    NORM_EPSILON,
    Weights,
    Workload,
)  # fmt: skip


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

    def pool(self, x: mlc.Tensor) -> mlc.Tensor:
        sizes = mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID)
        return self.graph.node(mlc.PoolingLayer(sizes), source=x)

    def batch_norm(self, x: mlc.Tensor, name: str) -> mlc.Tensor:
        c = x.descriptor.shape[1]
        shape = (1, c, 1, 1)
        mean, variance = mlc.Tensor(shape=shape, fill_with_data=0.0), mlc.Tensor(shape=shape, fill_with_data=1.0)
        beta, gamma = self.tensor(f"{name}.shift", *shape), self.tensor(f"{name}.scale", *shape)
        layer = mlc.BatchNormalizationLayer(c, mean, variance, beta, gamma, NORM_EPSILON, 0.9)
        return self.graph.node(layer, source=x)

    def layer_norm(self, x: mlc.Tensor, name: str) -> mlc.Tensor:
        beta, gamma = self.tensor(f"{name}.shift"), self.tensor(f"{name}.scale")
        layer = mlc.LayerNormalizationLayer(beta.descriptor.shape, beta, gamma, NORM_EPSILON)
        return self.graph.node(layer, source=x)

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


def resnet20(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    x = net.relu(net.batch_norm(net.convolution(x, "stem"), "stem"))
    for index, (_, stride) in enumerate(BLOCKS):
        at = f"block{index}"
        h = net.relu(net.batch_norm(net.convolution(x, f"{at}.conv0", stride), f"{at}.norm0"))
        h = net.batch_norm(net.convolution(h, f"{at}.conv1"), f"{at}.norm1")
        if f"{at}.shortcut.weight" in net.weights:
            x = net.batch_norm(net.convolution(x, f"{at}.shortcut", stride), f"{at}.shortcut")
        x = net.relu(net.add(h, x))
    x = net.graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, dimensions=[2, 3]), source=x)
    return net.dense(net.graph.reshape((x.descriptor.shape[0], 64), source=x), "fc")


def lstm(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    descriptor = mlc.LSTMDescriptor(x.descriptor.shape[-1], HIDDEN, 1, returns_sequences=False)
    w, u, b = (net.quarters(name) for name in ("input.weight", "hidden.weight", "gates.bias"))
    x = net.graph.node(mlc.LSTMLayer(descriptor, w, u, b), source=x)
    return net.dense(net.graph.reshape((x.descriptor.shape[0], HIDDEN), source=x), "fc")


def transformer(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    vocabulary, d = net.weights["embedding"].shape
    table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(vocabulary, d), net.tensor("embedding"))
    x = net.graph.node(table, source=x)
    for index in range(sum(name.endswith("qkv.weight") for name in net.weights)):
        at = f"layer{index}"
        h = net.layer_norm(x, f"{at}.norm0")
        attention = mlc.MultiheadAttentionLayer(
            mlc.MultiheadAttentionDescriptor(d, HEADS),
            [*net.quarters(f"{at}.qkv.weight", 3), net.tensor(f"{at}.out.weight")],
            [*net.quarters(f"{at}.qkv.bias", 3), net.tensor(f"{at}.out.bias")],
        )
        x = net.add(x, net.graph.node(attention, sources=[h, h, h]))
        h = net.relu(net.dense(net.layer_norm(x, f"{at}.norm1"), f"{at}.up"))
        x = net.add(x, net.dense(h, f"{at}.down"))
    return net.dense(x, "fc")


MODELS = {"mlp": mlp, "lenet": lenet, "resnet20": resnet20, "lstm": lstm, "transformer": transformer}
SYNCHRONOUS = mlc.ExecutionOptions.SYNCHRONOUS


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    kind = mlc.DataType.INT32 if workload.tokens else mlc.DataType.FLOAT32
    net, x = Net(workload.weights()), mlc.Tensor(shape=workload.input_shape, data_type=kind)
    y = MODELS[workload.model](net, x)
    inputs, classes = workload.batch()
    device = mlc.Device.cpu()
    if mode == "infer":
        inference = mlc.InferenceGraph([net.graph])
        inference.add_inputs({"x": x})
        inference.compile(device=device)
        return Job(
            lambda: inference.execute({"x": inputs}, options=SYNCHRONOUS),
            lambda: data_of(y),
            lambda: {"bytes_planned": inference.device_memory_size},
        )
    if workload.tokens:  # one prediction per token: samples and tokens form one axis for the loss
        y = net.graph.reshape((classes.size, workload.classes), source=y)
    t = mlc.Tensor(shape=y.descriptor.shape)
    labels = np.eye(workload.classes, dtype=np.float32)[classes.reshape(-1)]
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_count=workload.classes)
    rate = mlc.OptimizerDescriptor(learning_rate=LEARNING_RATE)
    adam = mlc.AdamOptimizer(rate, beta1=BETA1, beta2=BETA2, epsilon=EPSILON)
    graph = mlc.TrainingGraph([net.graph], loss, adam)
    graph.add_inputs({"x": x}, {"t": t})
    begin = time.perf_counter()
    graph.compile(device=device)
    assert graph.programs  # asking for them makes their machine code
    compiling = time.perf_counter() - begin
    results: list[mlc.Tensor | None] = [None]

    def train() -> None:
        results[0] = graph.execute({"x": inputs}, {"t": labels}, options=SYNCHRONOUS).result

    def split() -> None:
        graph.bind_and_write_data({"x": inputs, "t": labels}, for_inputs={"x": x, "t": t}, to=device)
        results[0] = graph.execute_forward(options=SYNCHRONOUS).result
        graph.execute_gradient(options=SYNCHRONOUS)
        graph.execute_optimizer_update(options=SYNCHRONOUS)

    step = train if mode == "train" else split

    def facts() -> dict[str, float]:
        return {"bytes_planned": graph.device_memory_size, **outside_native(step)}

    return Job(step, lambda: data_of(results[0]), facts, compiling)


def data_of(tensor: mlc.Tensor | None) -> np.ndarray:
    assert tensor is not None
    assert tensor.data is not None
    return tensor.data


def outside_native(step: Callable[[], None], seconds: float = 0.5) -> dict[str, float]:
    """Median seconds of a step outside its native calls: what feeding, queueing and Python cost."""
    team: Any = getattr(mlc.Device.cpu().engine, "team", None)
    if team is None:  # another engine was asked for: it has no native call
        return {}
    run, inside = team.run, [0.0]

    def timed(job: int, threads: int) -> None:
        start = time.perf_counter()
        run(job, threads)
        inside[0] += time.perf_counter() - start

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
