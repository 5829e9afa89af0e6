"""Fine-tuning in stages: a new head on a body that stays as it is; then all of it, the body with a lower rate."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, FEATURES, CLASSES = 16, 8, 4


def build() -> mlc.Graph:
    graph = mlc.Graph()
    x = graph.dense(graph.input((BATCH, FEATURES), "x"), 32, name="body.dense")
    x = graph.normalize(x, name="body.norm").relu()
    graph.dense(x, CLASSES, name="head")
    return graph


def stage(graph: mlc.Graph, optimizer: mlc.Optimizer, data: tuple[np.ndarray, np.ndarray], epochs: int) -> list[float]:
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=optimizer)
    return trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def train(graph: mlc.Graph, data: tuple[np.ndarray, np.ndarray], epochs: int = 4) -> list[float]:
    graph.freeze("body*")
    losses = stage(graph, mlc.AdamWOptimizer(learning_rate=1e-2, weight_decay=0.01), data, epochs)
    graph.unfreeze("body.dense")  # the normalization keeps its statistics
    body = mlc.ParameterGroup("body*", learning_rate=1e-3)
    optimizer = mlc.AdamWOptimizer(learning_rate=3e-3, weight_decay=0.01, groups=[body])
    return losses + stage(graph, optimizer, data, epochs)


def data(count: int = 64, task: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Which of some directions a point lies in; tasks are about different ones."""
    x = np.random.default_rng(0).standard_normal((count, FEATURES)).astype(np.float32)
    return x, (x[:, task : task + CLASSES] ** 2).argmax(1)


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    pretraining = mlc.Trainer(graph, loss="softmax_cross_entropy", learning_rate=1e-2)
    pretraining.fit(*data(512, task=0), epochs=40, verbose=0)
    losses = train(graph, data(512), epochs=30)
    print(f"loss {losses[0]:.3f} -> {losses[29]:.3f} with a new head -> {losses[-1]:.3f} with the body")
    assert losses[-1] < losses[29] < losses[0]
