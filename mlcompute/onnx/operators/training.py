"""The optimizers of ai.onnx.preview.training. `Gradient` itself is in the importer: it speaks of other nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlcompute import ops
from mlcompute.onnx.rows import Call, operator
from mlcompute.ops.op import Value

DOMAIN = "ai.onnx.preview.training"


def _per_tensor(groups: int, states: int, rule: Callable[..., tuple[Value, ...]]) -> Callable[[Call], list[Value]]:
    """Inputs R, T, then all X, all G and all of each state; outputs all new X, then all of each new state."""

    def describe(call: Call) -> list[Value]:
        count = (call.count - 2) // groups
        rate, time = ops.reshape(call[0], ()), call[1]
        answers = []
        for k in range(count):
            operands = [call[2 + group * count + k] for group in range(groups)]
            answers.append(rule(call, rate, ops.reshape(time, ()), *operands))
        return [answer[k] for k in range(1 + states) for answer in answers]

    return describe


def _regularized(call: Call, x: Value, g: Value) -> Value:
    factor = call.attribute("norm_coefficient", 0.0)
    return g + x * factor if factor else g


def _adagrad(call: Call, rate: Value, time: Value, x: Value, g: Value, h: Value) -> tuple[Value, ...]:
    decay = call.attribute("decay_factor", 0.0)
    r = rate / (1.0 + ops.convert(time, rate.dtype) * decay)
    g = _regularized(call, x, g)
    h = h + g * g
    return x - r * g / (ops.sqrt(h) + call.attribute("epsilon", 1e-6)), h


def _adam(call: Call, rate: Value, time: Value, x: Value, g: Value, v: Value, h: Value) -> tuple[Value, ...]:
    alpha, beta = call.attribute("alpha", 0.9), call.attribute("beta", 0.999)
    g = _regularized(call, x, g)
    v = alpha * v + (1.0 - alpha) * g
    h = beta * h + (1.0 - beta) * (g * g)
    t = ops.convert(time, rate.dtype)
    one = ops.full(rate, (), 1.0)
    later = ops.maximum(t, 1.0)  # at time 0 the correction has no meaning and is not used
    correction = ops.sqrt(1.0 - ops.pow_(one * beta, later)) / (1.0 - ops.pow_(one * alpha, later))
    adjusted = ops.select(t > 0.0, rate * correction, rate)
    new = x - adjusted * v / (ops.sqrt(h) + call.attribute("epsilon", 1e-6))
    return new * (1.0 - call.attribute("norm_coefficient_post", 0.0)), v, h


def _momentum(call: Call, rate: Value, time: Value, x: Value, g: Value, v: Value) -> tuple[Value, ...]:
    alpha = call.attribute("alpha")
    g = _regularized(call, x, g)
    beta = call.attribute("beta", 1.0)
    first = ops.full(rate, (), 1.0)
    factor = ops.select(ops.greater(ops.convert(time, np.dtype(np.int64)), 0), first * beta, first)
    v = alpha * v + factor * g
    if call.attribute("mode", "standard") == "nesterov":
        return x - rate * (g + alpha * v), v
    return x - rate * v, v


operator("Adagrad", domain=DOMAIN)(_per_tensor(3, 1, _adagrad))
operator("Adam", domain=DOMAIN)(_per_tensor(4, 2, _adam))
operator("Momentum", domain=DOMAIN)(_per_tensor(3, 1, _momentum))
