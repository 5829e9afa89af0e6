"""The workloads in tinygrad on its CPU backend (which needs clang): whole steps under TinyJit."""

from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import Context
from tinygrad.nn.optim import Adam

from benchmarks.contenders import Job
from benchmarks.workloads import (
    BETA1,
    BETA2,
    EPSILON,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    NORM_EPSILON,
    Workload,
    blocks,
)  # fmt: skip

Weights = dict[str, Tensor]


def dense(p: Weights, name: str, x: Tensor) -> Tensor:
    return x.linear(p[f"{name}.weight"].T, p[f"{name}.bias"])


def convolution(p: Weights, name: str, x: Tensor, stride: int = 1) -> Tensor:
    w = p[f"{name}.weight"]
    return x.conv2d(w, p.get(f"{name}.bias"), stride=stride, padding=w.shape[2] // 2)


def mlp(p: Weights, x: Tensor, training: bool) -> Tensor:
    last = len(p) // 2 - 1
    for index in range(last):
        x = dense(p, f"fc{index}", x).relu()
    return dense(p, f"fc{last}", x)


def lenet(p: Weights, x: Tensor, training: bool) -> Tensor:
    for name in ("conv0", "conv1"):
        x = convolution(p, name, x).relu().max_pool2d()
    return dense(p, "fc1", dense(p, "fc0", x.flatten(1)).relu())


def resnet(p: Weights, x: Tensor, training: bool) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        # Running statistics have their initial values here, 0 and 1; training does not read them.
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        else:
            mean, variance = Tensor.zeros(x.shape[1]), Tensor.ones(x.shape[1])
        return x.batchnorm(p[f"{name}.scale"], p[f"{name}.shift"], mean, (variance + NORM_EPSILON).rsqrt())

    x = norm("stem", convolution(p, "stem", x)).relu()
    for at, stride in blocks(p):
        h = norm(f"{at}.norm0", convolution(p, f"{at}.conv0", x, stride)).relu()
        h = norm(f"{at}.norm1", convolution(p, f"{at}.conv1", h))
        if f"{at}.shortcut.weight" in p:
            x = norm(f"{at}.shortcut", convolution(p, f"{at}.shortcut", x, stride))
        x = (h + x).relu()
    return dense(p, "fc", x.mean((2, 3)))


def lstm(p: Weights, x: Tensor, training: bool) -> Tensor:
    gates = x.linear(p["input.weight"].T, p["gates.bias"])
    h = c = Tensor.zeros(x.shape[0], HIDDEN)
    for time in range(x.shape[1]):
        i, f, g, o = (gates[:, time] + h @ p["hidden.weight"].T).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        # One time after the other: fused across times, the kernels would grow without bound.
        c = c.contiguous()
        h = (o.sigmoid() * c.tanh()).contiguous()
    return dense(p, "fc", h)


def transformer(p: Weights, x: Tensor, training: bool) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return x.layernorm(eps=NORM_EPSILON) * p[f"{name}.scale"] + p[f"{name}.shift"]

    def heads(a: Tensor) -> Tensor:
        return a.reshape(*a.shape[:2], HEADS, -1).transpose(1, 2)

    x = p["embedding"][x]
    for index in range(sum(name.endswith("qkv.weight") for name in p)):
        at = f"layer{index}"
        q, k, v = (heads(part) for part in dense(p, f"{at}.qkv", norm(f"{at}.norm0", x)).chunk(3, dim=-1))
        x = x + dense(p, f"{at}.out", q.scaled_dot_product_attention(k, v).transpose(1, 2).reshape(*x.shape))
        x = x + dense(p, f"{at}.down", dense(p, f"{at}.up", norm(f"{at}.norm1", x)).relu())
    return dense(p, "fc", x)


MODELS = {"mlp": mlp, "lenet": lenet, "resnet": resnet, "lstm": lstm, "transformer": transformer}


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    model = MODELS[workload.model]
    p = {name: Tensor(array).realize() for name, array in workload.weights().items()}
    inputs, classes = workload.batch()
    x, y = Tensor(inputs).realize(), Tensor(classes.reshape(-1).astype(np.int32)).realize()
    device, results = Device[Device.DEFAULT], [Tensor([0.0])]
    optimizer = Adam(list(p.values()), LEARNING_RATE, BETA1, BETA2, EPSILON)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Any = model(p, x, True).reshape(-1, workload.classes).sparse_categorical_crossentropy(y).backward()
        return loss.realize(*optimizer.schedule_step())

    @TinyJit
    def predict(x: Tensor) -> Tensor:
        return model(p, x, False).realize()

    def train() -> None:
        with Context(TRAINING=1):
            results[0] = step(x, y)
        device.synchronize()

    def infer() -> None:
        results[0] = predict(x)
        device.synchronize()

    return Job(infer if mode == "infer" else train, lambda: results[0].numpy())
