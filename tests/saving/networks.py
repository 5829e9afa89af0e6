"""A network with a bit of everything that must survive a file, and the optimizers to train it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from tests.nets import MEAN, Array, batch_norm, dense, normal, shared_dense, tensor

#: words (4, 5) -> embedding -> LSTM -> attention -> layer norm -> dropout -> dense, twice the same weights -> 3 classes
BATCH, STEPS, WIDTH, CLASSES = 4, 5, 6, 3


def reference() -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=Reference())


def settings(rate: float = 0.05, **more: Any) -> mlc.OptimizerDescriptor:
    return mlc.OptimizerDescriptor(learning_rate=rate, **more)


OPTIMIZERS: dict[str, Callable[[], mlc.Optimizer]] = {
    "sgd": lambda: mlc.SGDOptimizer(settings()),
    "momentum": lambda: mlc.SGDOptimizer(settings(), momentum_scale=0.9),
    "nesterov": lambda: mlc.SGDOptimizer(settings(), momentum_scale=0.9, uses_nesterov_momentum=True),
    "adam": lambda: mlc.AdamOptimizer(settings(0.01), beta1=0.85, epsilon=1e-6),
    "amsgrad": lambda: mlc.AdamOptimizer(settings(0.01), uses_amsgrad=True, time_step=7),
    "adamw": lambda: mlc.AdamWOptimizer(
        settings(0.01, regularization_type=mlc.RegularizationType.L2, regularization_scale=0.1)
    ),
    "rmsprop": lambda: mlc.RMSPropOptimizer(settings(0.01)),
    "rmsprop, centred": lambda: mlc.RMSPropOptimizer(settings(0.01), is_centered=True, momentum_scale=0.5, alpha=0.9),
    "clipped": lambda: mlc.AdamOptimizer(
        settings(
            0.01,
            applies_gradient_clipping=True,
            gradient_clipping_type=mlc.GradientClippingType.BY_GLOBAL_NORM,
            maximum_clipping_norm=0.3,
        )
    ),
}


def lstm(inputs: int, hidden: int) -> mlc.LSTMLayer:
    weights = [tensor(normal(hidden, inputs, seed=20 + k) / 3) for k in range(4)]
    recurrent = [tensor(normal(hidden, hidden, seed=30 + k) / 3) for k in range(4)]
    biases = [tensor(normal(hidden, seed=40 + k)) for k in range(4)]
    return mlc.LSTMLayer(mlc.LSTMDescriptor(inputs, hidden), weights, recurrent, biases)


def attention(width: int, heads: int) -> mlc.MultiheadAttentionLayer:
    weights = [tensor(normal(width, width, seed=50 + k) / 3) for k in range(4)]
    biases = [tensor(normal(width, seed=60 + k)) for k in range(4)]
    return mlc.MultiheadAttentionLayer(mlc.MultiheadAttentionDescriptor(width, heads, dropout=0.1), weights, biases)


def everything(optimizer: mlc.Optimizer | None) -> mlc.TrainingGraph:
    """Words and images into classes: embedding, LSTM, attention, dropout, convolution, batch norm, shared weights."""
    words = mlc.Tensor(shape=(BATCH, STEPS), data_type=mlc.DataType.INT32)
    images = mlc.Tensor(shape=(BATCH, 2, 4, 4))
    labels = mlc.Tensor(shape=(BATCH, CLASSES))
    reading, looking = mlc.Graph(), mlc.Graph()
    table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(9, WIDTH, padding_index=0), tensor(normal(9, WIDTH, seed=1)))
    h = reading.node(lstm(WIDTH, WIDTH), source=reading.node(table, source=words))
    h = reading.node(attention(WIDTH, 2), sources=[h, h, h])
    norm = mlc.LayerNormalizationLayer((WIDTH,), tensor(normal(WIDTH, seed=2)), tensor(normal(WIDTH, seed=3)))
    h = reading.node(mlc.DropoutLayer(0.3, 0), source=reading.node(norm, source=h))
    h = reading.node(mlc.DropoutLayer(0.2, 11), source=h)
    shared = tensor(normal(WIDTH, WIDTH, seed=4) / 3)
    for _ in range(2):
        h = reading.node(shared_dense(shared, WIDTH, WIDTH), source=h)
    h = reading.reshape((BATCH, STEPS * WIDTH), source=h)
    d = mlc.ConvolutionDescriptor((3, 3), 2, 3)
    conv = mlc.ConvolutionLayer(tensor(normal(3, 2, 3, 3, seed=5) / 3), tensor(normal(3, seed=6)), d)
    conv.label = "eyes"
    y = looking.node(batch_norm(3), source=looking.node(conv, source=images))
    y = looking.reshape((BATCH, 48), source=looking.node(mlc.ActivationLayer.relu(), source=y))
    training = mlc.TrainingGraph(
        [reading, looking], mlc.LossLayer.softmax_cross_entropy(MEAN, label_smoothing=0.1), optimizer
    )
    both = training.concatenate([h, y], dimension=1)
    training.node(dense(STEPS * WIDTH + 48, CLASSES, seed=9), source=both)
    training.add_inputs({"words": words, "images": images}, {"classes": labels})
    return training


def batch(number: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """The data of one step."""
    rng = np.random.default_rng(number)
    words = rng.integers(0, 9, (BATCH, STEPS)).astype(np.int32)
    labels = np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, BATCH)]
    return {"words": words, "images": normal(BATCH, 2, 4, 4, seed=number)}, {"classes": labels}


def train(training: mlc.TrainingGraph, first: int, last: int) -> list[float]:
    """Losses of the steps first, ..., last - 1. The rate falls from step to step."""
    losses = []
    for step in range(first, last):
        assert training.optimizer is not None
        training.optimizer.learning_rate = 0.05 / (1 + step)
        losses.append(float(training.execute(*batch(step)).result.data[0]))
    return losses


def memory(training: mlc.TrainingGraph) -> dict[str, Array]:
    """Everything that learning changes, by name: a copy."""
    from mlcompute.saving import names_of

    found: dict[str, Array] = {}
    for value, name in names_of(training).items():
        if value.keeps_data:
            found[name] = value.data.copy()
            for index, state in enumerate(value.optimizer_data):
                found[f"{name} state {index}"] = np.frombuffer(state.bytes, np.float32).copy()
    return found


def assert_same_memory(first: dict[str, Array], second: dict[str, Array]) -> None:
    """Bit by bit."""
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


def small(value: float = 0.0, size: int = 2) -> mlc.TrainingGraph:
    """A quick training graph, not compiled, whose weights are all `value`."""
    x, t = mlc.Tensor(shape=(2, size)), mlc.Tensor(shape=(2, size))
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=size, output_feature_channel_count=size)
    w, b = (mlc.Tensor(shape=shape, fill_with_data=value) for shape in ((size, size), (size,)))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), mlc.AdamOptimizer(settings()))
    training.node(mlc.FullyConnectedLayer(w, b, d), source=x)
    training.add_inputs({"x": x}, {"t": t})
    return training
