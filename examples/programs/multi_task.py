"""Several tasks: one body, a head for the kind of a thing and a head for its size, each with its loss."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, FEATURES, KINDS = 16, 8, 3


def build() -> mlc.Graph:
    graph = mlc.Graph()
    x = graph.dense(graph.input((BATCH, FEATURES), "x"), 32, activation="relu", name="body1")
    x = graph.dense(x, 32, activation="relu", name="body2")
    graph.dense(x, KINDS, name="kind")
    graph.dense(x, 1, name="size")
    return graph


def train(graph: mlc.Graph, data: tuple[np.ndarray, dict[str, np.ndarray]], epochs: int = 6) -> list[float]:
    losses = {"kind": "softmax_cross_entropy", "size": lambda y, t: abs(y - t).mean()}
    trainer = mlc.Trainer(graph, loss=losses, loss_weights={"size": 0.5}, optimizer="adam", learning_rate=5e-3)
    history = trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)
    return history["kind_loss"] + history["size_loss"]


def data(count: int = 64) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    x = np.random.default_rng(0).standard_normal((count, FEATURES)).astype(np.float32)
    return x, {"kind": x[:, :KINDS].argmax(1), "size": np.abs(x[:, KINDS:]).sum(1, keepdims=True)}


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    losses = train(build(), data(512), epochs=30)
    kinds, sizes = losses[:30], losses[30:]
    print(f"loss of the kind {kinds[0]:.3f} -> {kinds[-1]:.3f}, of the size {sizes[0]:.3f} -> {sizes[-1]:.3f}")
    assert kinds[-1] < 0.3 * kinds[0]
    assert sizes[-1] < 0.3 * sizes[0]
