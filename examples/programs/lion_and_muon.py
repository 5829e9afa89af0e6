"""Lion and Muon, two optimizers of recent years, on the same network; Muon leaves the last layer to AdamW."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, FEATURES, CLASSES = 32, 8, 4


def network() -> mlc.Graph:
    graph = mlc.Graph()
    x = graph.dense(graph.input((BATCH, FEATURES), "x"), 32, activation="tanh", name="hidden1")
    x = graph.dense(x, 32, activation="tanh", name="hidden2")
    graph.dense(x, CLASSES, name="scores")
    return graph


def build() -> tuple[mlc.Graph, mlc.Graph]:
    return network(), network()


def fit(graph: mlc.Graph, optimizer: mlc.Optimizer, data: tuple[np.ndarray, np.ndarray], epochs: int) -> list[float]:
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=optimizer)
    return trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def train(first: mlc.Graph, second: mlc.Graph, data: tuple[np.ndarray, np.ndarray], epochs: int = 5) -> list[float]:
    lion = mlc.LionOptimizer(learning_rate=1e-3, weight_decay=0.1)
    adamw = mlc.AdamWOptimizer(learning_rate=5e-3, weight_decay=0.1, beta2=0.95)
    last = mlc.ParameterGroup("scores", optimizer=adamw)
    muon = mlc.MuonOptimizer(learning_rate=5e-3, weight_decay=0.1, groups=[last])
    return fit(first, lion, data, epochs) + fit(second, muon, data, epochs)


def data(count: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """Which quarter of the plane the product of two pairs of numbers lies in."""
    x = np.random.default_rng(0).standard_normal((count, FEATURES)).astype(np.float32)
    return x, 2 * (x[:, 0] * x[:, 1] > 0) + (x[:, 2] * x[:, 3] > 0)


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    losses = train(*build(), data(512), epochs=60)
    print(f"loss with Lion {losses[0]:.3f} -> {losses[59]:.3f}, with Muon {losses[60]:.3f} -> {losses[-1]:.3f}")
    assert losses[59] < 0.5 * losses[0]
    assert losses[-1] < 0.5 * losses[60]
