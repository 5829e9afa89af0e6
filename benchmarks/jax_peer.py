"""The workloads in JAX: the whole training step jitted, with donated state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads import EPSILON, LEARNING_RATE, WORKLOADS

Parameters = Any


def init(shape: tuple[int, ...], fan: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape) * np.sqrt(2 / fan), jnp.float32)


def convolution(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(*sizes: int) -> tuple[Parameters, Callable[..., jax.Array]]:
    parameters = [(init((i, o), i), jnp.zeros(o)) for i, o in itertools.pairwise(sizes)]

    def forward(p: Parameters, x: jax.Array) -> jax.Array:
        for index, (w, b) in enumerate(p):
            x = x @ w + b
            if index < len(p) - 1:
                x = jax.nn.relu(x)
        return x

    return parameters, forward


def lenet() -> tuple[Parameters, Callable[..., jax.Array]]:
    parameters = [
        init((5, 5, 1, 32), 25), jnp.zeros(32), init((5, 5, 32, 64), 800), jnp.zeros(64),
        init((3136, 256), 3136), jnp.zeros(256), init((256, 10), 256), jnp.zeros(10),
    ]  # fmt: skip

    def forward(p: Parameters, x: jax.Array) -> jax.Array:
        x = pool(jax.nn.relu(convolution(x, p[0]) + p[1]))
        x = pool(jax.nn.relu(convolution(x, p[2]) + p[3])).reshape(x.shape[0], -1)
        return jax.nn.relu(x @ p[4] + p[5]) @ p[6] + p[7]

    return parameters, forward


def resnet20() -> tuple[Parameters, Callable[..., jax.Array]]:
    def norm(c: int) -> Parameters:
        return jnp.ones(c), jnp.zeros(c)

    parameters: list[Any] = [(init((3, 3, 3, 16), 27), norm(16))]
    strides, channels = [], 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            s = stride if block == 0 else 1
            part = [init((3, 3, channels, outputs), 9 * channels), norm(outputs)]
            part += [init((3, 3, outputs, outputs), 9 * outputs), norm(outputs)]
            if s > 1 or channels != outputs:
                part += [init((1, 1, channels, outputs), channels), norm(outputs)]
            parameters.append(part)
            strides.append(s)
            channels = outputs
    parameters.append((init((64, 10), 64), jnp.zeros(10)))

    def normalize(x: jax.Array, p: Parameters) -> jax.Array:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(variance + 1e-5) * p[0] + p[1]

    def forward(p: Parameters, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(normalize(convolution(x, p[0][0]), p[0][1]))
        for s, part in zip(strides, p[1:-1], strict=True):
            h = jax.nn.relu(normalize(convolution(x, part[0], s), part[1]))
            h = normalize(convolution(h, part[2]), part[3])
            x = jax.nn.relu(h + (normalize(convolution(x, part[4], s), part[5]) if len(part) > 4 else x))
        return x.mean((1, 2)) @ p[-1][0] + p[-1][1]

    return parameters, forward


def lstm() -> tuple[Parameters, Callable[..., jax.Array]]:
    parameters = [init((64, 512), 64), init((128, 512), 128), jnp.zeros(512), init((128, 10), 128), jnp.zeros(10)]

    def forward(p: Parameters, x: jax.Array) -> jax.Array:
        def cell(state: Any, z: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(z + h @ p[1], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((x.shape[0], 128))
        (h, _), _ = lax.scan(cell, (zero, zero), (x @ p[0] + p[2]).transpose(1, 0, 2))
        return h @ p[3] + p[4]

    return parameters, forward


def transformer(
    d: int = 128, heads: int = 4, layers: int = 2, v: int = 256
) -> tuple[Parameters, Callable[..., jax.Array]]:
    def block() -> dict[str, jax.Array]:
        return {
            "qkv": init((d, 3 * d), d), "qkv_b": jnp.zeros(3 * d), "out": init((d, d), d), "out_b": jnp.zeros(d),
            "up": init((d, 4 * d), d), "up_b": jnp.zeros(4 * d),
            "down": init((4 * d, d), 4 * d), "down_b": jnp.zeros(d),
            "g1": jnp.ones(d), "c1": jnp.zeros(d), "g2": jnp.ones(d), "c2": jnp.zeros(d),
        }  # fmt: skip

    parameters = [init((v, d), d), [block() for _ in range(layers)], init((d, v), d), jnp.zeros(v)]

    def norm(x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * g + b

    def forward(p: Parameters, x: jax.Array) -> jax.Array:
        x = p[0][x]
        n, t, _ = x.shape

        def split(a: jax.Array) -> jax.Array:
            return a.reshape(n, t, heads, d // heads).transpose(0, 2, 1, 3)

        for b in p[1]:
            q, k, w = jnp.split(norm(x, b["g1"], b["c1"]) @ b["qkv"] + b["qkv_b"], 3, -1)
            a = jax.nn.softmax(split(q) @ split(k).swapaxes(-1, -2) / np.sqrt(d // heads), -1) @ split(w)
            x = x + a.transpose(0, 2, 1, 3).reshape(n, t, d) @ b["out"] + b["out_b"]
            x = x + jax.nn.relu(norm(x, b["g2"], b["c2"]) @ b["up"] + b["up_b"]) @ b["down"] + b["down_b"]
        return x @ p[2] + p[3]

    return parameters, forward


MODELS: dict[str, Callable[[], Any]] = {
    "mlp1": lambda: mlp(784, 128, 10),
    "mlp32": lambda: mlp(784, 128, 10),
    "mlp64": lambda: mlp(784, 512, 256, 10),
    "lenet": lenet,
    "resnet20": resnet20,
    "lstm": lstm,
    "transformer": transformer,
}


def step(name: str, variant: str = "") -> Callable[[], None]:
    """A function that runs one training step and returns when it is done."""
    parameters, forward = MODELS[name]()
    inputs, classes = WORKLOADS[name].batch()
    if inputs.ndim == 4:
        inputs = inputs.transpose(0, 2, 3, 1)
    x, y = jnp.asarray(inputs), jnp.asarray(classes)

    def loss(p: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(forward(p, x), -1), y[..., None], -1))

    @functools.partial(jax.jit, donate_argnums=(0,))
    def update(state: Any, x: jax.Array, y: jax.Array) -> Any:
        p, m, v, t = state
        gradient = jax.grad(loss)(p, x, y)
        t = t + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradient)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradient)
        rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        p = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + EPSILON), p, m, v)
        return p, m, v, t

    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = [(parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0))]

    def run() -> None:
        state[0] = update(state[0], x, y)
        jax.block_until_ready(state[0])

    return run
