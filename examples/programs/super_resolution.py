"""Super-resolution: an image three times as large, from convolutions whose channels become pixels."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, SIZE, FACTOR = 8, 8, 3


def build() -> mlc.Graph:
    graph = mlc.Graph()
    x = graph.convolution(graph.input((BATCH, 1, SIZE, SIZE), "small"), 16, 5, activation="tanh", name="conv1")
    x = graph.convolution(x, 16, activation="tanh", name="conv2")
    graph.pixel_shuffle(graph.convolution(x, FACTOR**2, name="conv3"), FACTOR)
    return graph


def train(graph: mlc.Graph, data: tuple[np.ndarray, np.ndarray], epochs: int = 5) -> list[float]:
    trainer = mlc.Trainer(graph, loss="mse", optimizer="adam", learning_rate=3e-3)
    return trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def data(count: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Waves of any direction; the small images are means of 3 x 3 pixels."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[: FACTOR * SIZE, : FACTOR * SIZE]
    a, b, c = rng.uniform(-0.6, 0.6, (3, count, 1, 1, 1))
    large = np.sin(a * x + b * y + 9 * c)
    small = large.reshape(count, 1, SIZE, FACTOR, SIZE, FACTOR).mean((3, 5))
    return small.astype(np.float32), large.astype(np.float32)


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    train(graph, data(256), epochs=30)
    small, large = data(64)
    made = ((mlc.Trainer(graph, loss="mse").predict(small) - large) ** 2).mean()
    repeated = ((np.kron(small, np.ones((FACTOR, FACTOR))) - large) ** 2).mean()
    print(f"squared error {made:.4f}, of repeated pixels {repeated:.4f}")
    assert made < 0.5 * repeated
