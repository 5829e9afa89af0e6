"""The workloads in JAX: the whole step compiled, with donated state; images as (n, h, w, c)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders.jax_jit import MODELS
from benchmarks.gpu.contenders import GpuJob
from benchmarks.workloads import BETA1, BETA2, EPSILON, LEARNING_RATE, Workload, channels_last

jax.config.update("jax_default_matmul_precision", "tensorfloat32")


def build(workload: Workload, precision: str, variant: str = "") -> GpuJob:
    model = MODELS[workload.model]
    arrays = channels_last(workload.weights(), (2, 3, 1, 0))
    parameters = {
        name: jnp.asarray(array.T if name.endswith(".weight") and array.ndim == 2 else array)
        for name, array in arrays.items()
    }
    inputs, classes = workload.batch()
    batch = np.ascontiguousarray(inputs.transpose(0, 2, 3, 1)) if inputs.ndim == 4 else inputs
    labels = classes.astype(np.int32)

    def lowered(name: str, array: jax.Array) -> jax.Array:
        """Scales and shifts of normalizations stay float32, as their sums do."""
        keeps = precision != "bf16" or name.endswith((".scale", ".shift")) or array.dtype != jnp.float32
        return array if keeps else array.astype(jnp.bfloat16)

    def loss(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        scores = model({name: lowered(name, array) for name, array in p.items()}, lowered("x", x), True)
        logs = jax.nn.log_softmax(scores.astype(jnp.float32), -1)
        return -jnp.mean(jnp.take_along_axis(logs, y[..., None], -1))

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        p, m, v, t = state
        value, gradient = jax.value_and_grad(loss)(p, x, y)
        t = t + 1
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, gradient)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, gradient)
        rate = LEARNING_RATE * jnp.sqrt(1 - BETA2**t) / (1 - BETA1**t)
        p = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + EPSILON), p, m, v)
        return (p, m, v, t), value

    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state: Any = (parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0))
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch, labels).compile()
    result: Any = None

    def enqueue() -> None:
        nonlocal state, result
        x, y = jax.device_put((batch, labels))
        state, result = compiled(state, x, y)

    def bytes_needed() -> int | None:
        sizes = compiled.memory_analysis()
        if sizes is None:
            return None
        outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return int(sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + outputs)

    return GpuJob(enqueue, lambda: jax.block_until_ready((state, result)), lambda: float(result), bytes_needed)
