"""The workloads in JAX: whole steps jitted, with donated state; images as (n, h, w, c), which suits XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.contenders import Job
from benchmarks.workloads import (
    BETA1,
    BETA2,
    EPSILON,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    NORM_EPSILON,
    Workload,
    blocks,
    bottleneck_stride,
    bottlenecks,
    channels_last,
    layer_count,
)  # fmt: skip

Weights = dict[str, jax.Array]


def dense(p: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def convolution(p: Weights, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    w = p[f"{name}.weight"]
    sides = [(side // 2, side // 2) for side in w.shape[:2]]
    return lax.conv_general_dilated(x, w, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    last = len(p) // 2 - 1
    for index in range(last):
        x = jax.nn.relu(dense(p, f"fc{index}", x))
    return dense(p, f"fc{last}", x)


def lenet(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    for name in ("conv0", "conv1"):
        x = pool(jax.nn.relu(convolution(p, name, x) + p[f"{name}.bias"]))
    return dense(p, "fc1", jax.nn.relu(dense(p, "fc0", x.reshape(x.shape[0], -1))))


def batch_norm(p: Weights, name: str, x: jax.Array, training: bool) -> jax.Array:
    # Running statistics have their initial values here, 0 and 1; training does not read them.
    wide = x.astype(jnp.float32)
    mean, variance = (wide.mean((0, 1, 2)), wide.var((0, 1, 2))) if training else (0.0, 1.0)
    y = (wide - mean) * lax.rsqrt(variance + NORM_EPSILON) * p[f"{name}.scale"] + p[f"{name}.shift"]
    return y.astype(x.dtype)


def layer_norm(p: Weights, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    y = (wide - mean) * lax.rsqrt(variance + NORM_EPSILON) * p[f"{name}.scale"] + p[f"{name}.shift"]
    return y.astype(x.dtype)


def resnet(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    def norm(name: str, x: jax.Array) -> jax.Array:
        return batch_norm(p, name, x, training)

    x = jax.nn.relu(norm("stem", convolution(p, "stem", x)))
    for at, stride in blocks(p):
        h = jax.nn.relu(norm(f"{at}.norm0", convolution(p, f"{at}.conv0", x, stride)))
        h = norm(f"{at}.norm1", convolution(p, f"{at}.conv1", h))
        if f"{at}.shortcut.weight" in p:
            x = norm(f"{at}.shortcut", convolution(p, f"{at}.shortcut", x, stride))
        x = jax.nn.relu(h + x)
    return dense(p, "fc", x.mean((1, 2)))


def resnet50(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    def normalized(x: jax.Array, name: str, stride: int = 1) -> jax.Array:
        return batch_norm(p, name, convolution(p, name, x, stride), training)

    x = jax.nn.relu(normalized(x, "stem", 2))
    sides = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), sides)
    for at, stage, index in bottlenecks(p):
        stride = bottleneck_stride(stage, index)
        h = jax.nn.relu(normalized(x, f"{at}.conv0"))
        h = jax.nn.relu(normalized(h, f"{at}.conv1", stride))
        h = normalized(h, f"{at}.conv2")
        x = jax.nn.relu(h + (normalized(x, f"{at}.shortcut", stride) if index == 0 else x))
    return dense(p, "fc", x.mean((1, 2)))


def lstm(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    def cell(state: Any, z: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(z + h @ p["hidden.weight"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
    (h, _), _ = lax.scan(cell, (zero, zero), (x @ p["input.weight"] + p["gates.bias"]).transpose(1, 0, 2))
    return dense(p, "fc", h)


def transformer(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    def norm(name: str, x: jax.Array) -> jax.Array:
        return layer_norm(p, name, x)

    def heads(a: jax.Array) -> jax.Array:
        return a.reshape(*a.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    x = p["embedding"][x]
    n, t, d = x.shape
    for index in range(layer_count(p)):
        at = f"layer{index}"
        q, k, v = (heads(part) for part in jnp.split(dense(p, f"{at}.qkv", norm(f"{at}.norm0", x)), 3, -1))
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(d // HEADS), -1) @ v
        x = x + dense(p, f"{at}.out", a.transpose(0, 2, 1, 3).reshape(n, t, d))
        x = x + dense(p, f"{at}.down", jax.nn.relu(dense(p, f"{at}.up", norm(f"{at}.norm1", x))))
    return dense(p, "fc", x)


def gpt2(p: Weights, x: jax.Array, training: bool) -> jax.Array:
    x = p["embedding"][x] + p["positions"]
    n, length, d = x.shape
    # cuDNN's attention knows 16-bit types only.
    implementation = "cudnn" if x.dtype == jnp.bfloat16 else "xla"
    for index in range(layer_count(p)):
        at = f"layer{index}"
        parts = dense(p, f"{at}.qkv", layer_norm(p, f"{at}.norm0", x)).reshape(n, length, 3, -1, HEAD_WIDTH)
        q, k, v = (parts[:, :, part] for part in range(3))
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        x = x + dense(p, f"{at}.out", a.reshape(n, length, d))
        h = jax.nn.gelu(dense(p, f"{at}.up", layer_norm(p, f"{at}.norm1", x)), approximate=True)
        x = x + dense(p, f"{at}.down", h)
    return layer_norm(p, "norm", x) @ p["embedding"].T  # the head shares the weights of the embedding


MODELS = {model.__name__: model for model in (mlp, lenet, resnet, lstm, transformer, resnet50, gpt2)}


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    model = MODELS[workload.model]
    arrays = channels_last(workload.weights(), (2, 3, 1, 0))
    parameters = {
        name: jnp.asarray(array.T if name.endswith(".weight") and array.ndim == 2 else array)
        for name, array in arrays.items()
    }
    inputs, classes = workload.batch()
    x, y = jnp.asarray(inputs.transpose(0, 2, 3, 1) if inputs.ndim == 4 else inputs), jnp.asarray(classes)

    def loss(p: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(model(p, x, True), -1)
        return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

    def adam(gradient: Weights, state: Any) -> Any:
        p, m, v, t = state
        t = t + 1
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, gradient)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, gradient)
        rate = LEARNING_RATE * jnp.sqrt(1 - BETA2**t) / (1 - BETA1**t)
        p = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + EPSILON), p, m, v)
        return p, m, v, t

    @functools.partial(jax.jit, donate_argnums=0)
    def whole(state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(state[0], x, y)
        return adam(gradient, state), value

    # What the forward pass leaves for the gradient pass is a function, which jit returns as a tree of arrays.
    forward = jax.jit(lambda p, x, y: jax.vjp(lambda q: loss(q, x, y), p))
    backward = jax.jit(lambda pull: pull(jnp.float32(1))[0])
    update = jax.jit(adam, donate_argnums=1)
    predict = jax.jit(lambda p, x: model(p, x, False))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state: Any = (parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0))
    result: Any = None

    def train() -> None:
        nonlocal state, result
        state, result = whole(state, x, y)
        jax.block_until_ready(state)

    def split() -> None:
        nonlocal state, result
        result, pull = forward(state[0], x, y)
        jax.block_until_ready(result)
        gradient = jax.block_until_ready(backward(pull))
        state = jax.block_until_ready(update(gradient, state))

    def infer() -> None:
        nonlocal result
        result = jax.block_until_ready(predict(parameters, x))

    return Job({"train": train, "split": split, "infer": infer}[mode], lambda: np.asarray(result))
