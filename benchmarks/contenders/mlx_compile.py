"""The workloads in MLX on its CPU backend: whole steps under mx.compile; images as (n, h, w, c), its own layout."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.optimizers import Adam

from benchmarks.contenders import Job
from benchmarks.workloads import (
    BETA1,
    BETA2,
    EPSILON,
    HEADS,
    LEARNING_RATE,
    NORM_EPSILON,
    Workload,
    blocks,
    channels_last,
)  # fmt: skip

Weights = dict[str, mx.array]


def dense(p: Weights, name: str, x: mx.array) -> mx.array:
    return mx.addmm(p[f"{name}.bias"], x, p[f"{name}.weight"].T)


def convolution(p: Weights, name: str, x: mx.array, stride: int = 1) -> mx.array:
    w = p[f"{name}.weight"]
    return mx.conv2d(x, w, stride, w.shape[1] // 2)


def mlp(p: Weights, x: mx.array, training: bool) -> mx.array:
    last = len(p) // 2 - 1
    for index in range(last):
        x = nn.relu(dense(p, f"fc{index}", x))
    return dense(p, f"fc{last}", x)


def lenet(p: Weights, x: mx.array, training: bool) -> mx.array:
    pool = nn.MaxPool2d(2, 2)
    for name in ("conv0", "conv1"):
        x = pool(nn.relu(convolution(p, name, x) + p[f"{name}.bias"]))
    return dense(p, "fc1", nn.relu(dense(p, "fc0", x.reshape(x.shape[0], -1))))


def resnet(p: Weights, x: mx.array, training: bool) -> mx.array:
    def norm(name: str, x: mx.array) -> mx.array:
        # Running statistics have their initial values here, 0 and 1; training does not read them.
        mean, variance = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if training else (mx.array(0.0), mx.array(1.0))
        return (x - mean) * mx.rsqrt(variance + NORM_EPSILON) * p[f"{name}.scale"] + p[f"{name}.shift"]

    x = nn.relu(norm("stem", convolution(p, "stem", x)))
    for at, stride in blocks(p):
        h = nn.relu(norm(f"{at}.norm0", convolution(p, f"{at}.conv0", x, stride)))
        h = norm(f"{at}.norm1", convolution(p, f"{at}.conv1", h))
        if f"{at}.shortcut.weight" in p:
            x = norm(f"{at}.shortcut", convolution(p, f"{at}.shortcut", x, stride))
        x = nn.relu(h + x)
    return dense(p, "fc", x.mean((1, 2)))


def lstm(p: Weights, x: mx.array, training: bool) -> mx.array:
    gates = mx.addmm(p["gates.bias"], x, p["input.weight"].T)
    h = c = None
    for time in range(x.shape[1]):
        z = gates[:, time] if h is None else mx.addmm(gates[:, time], h, p["hidden.weight"].T)
        i, f, g, o = mx.split(z, 4, axis=-1)
        new = mx.sigmoid(i) * mx.tanh(g)
        c = new if c is None else mx.sigmoid(f) * c + new
        h = mx.sigmoid(o) * mx.tanh(c)
    assert h is not None
    return dense(p, "fc", h)


def transformer(p: Weights, x: mx.array, training: bool) -> mx.array:
    def norm(name: str, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, p[f"{name}.scale"], p[f"{name}.shift"], NORM_EPSILON)

    def heads(a: mx.array) -> mx.array:
        return a.reshape(*a.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    x = p["embedding"][x]
    scale = (x.shape[-1] // HEADS) ** -0.5
    for index in range(sum(name.endswith("qkv.weight") for name in p)):
        at = f"layer{index}"
        q, k, v = (heads(part) for part in mx.split(dense(p, f"{at}.qkv", norm(f"{at}.norm0", x)), 3, axis=-1))
        a = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
        x = x + dense(p, f"{at}.out", a.transpose(0, 2, 1, 3).reshape(x.shape))
        x = x + dense(p, f"{at}.down", nn.relu(dense(p, f"{at}.up", norm(f"{at}.norm1", x))))
    return dense(p, "fc", x)


MODELS = {"mlp": mlp, "lenet": lenet, "resnet": resnet, "lstm": lstm, "transformer": transformer}


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    mx.set_default_device(mx.cpu)
    model = MODELS[workload.model]
    weights = channels_last(workload.weights(), (0, 2, 3, 1))
    p = {name: mx.array(array) for name, array in weights.items()}
    inputs, classes = workload.batch()
    x = mx.array(inputs.transpose(0, 2, 3, 1) if inputs.ndim == 4 else inputs)
    y = mx.array(classes.reshape(-1).astype(np.int32))
    results = [mx.array(0.0)]

    def loss(p: Weights, x: mx.array, y: mx.array) -> mx.array:
        scores = model(p, x, True).reshape(-1, workload.classes)
        return nn.losses.cross_entropy(scores, y, reduction="mean")

    optimizer = Adam(LEARNING_RATE, [BETA1, BETA2], EPSILON, bias_correction=True)
    optimizer.init(p)
    state: list[Any] = [p, optimizer.state]

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def step(x: mx.array, y: mx.array) -> mx.array:
        value, gradient = mx.value_and_grad(loss)(p, x, y)
        p.update(optimizer.apply_gradients(gradient, p))
        return value

    predict = mx.compile(lambda x: model(p, x, False), inputs=[p])

    def train() -> None:
        results[0] = step(x, y)
        mx.eval(state, results[0])

    def infer() -> None:
        results[0] = predict(x)
        mx.eval(results[0])

    return Job(infer if mode == "infer" else train, lambda: np.array(results[0]))
