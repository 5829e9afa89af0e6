"""Small networks and data the trainer's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlcompute as mlc


def points(count: int = 70, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points in a plane and which of three thirds of it they lie in."""
    x = np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)
    return x, np.stack([x[:, 0] + x[:, 1], x[:, 1] - x[:, 2], x[:, 3]], axis=1).argmax(1)


def classifier(batch: int = 16, *, dropout: float = 0.0, norm: bool = False, seed: int = 1) -> mlc.Graph:
    """Two dense layers for `points`, the same weights every time."""
    mlc.Platform.set_rng_seed_to(seed)
    graph = mlc.Graph()
    h = graph.dense(graph.input((batch, 4), "x"), 8, activation="tanh", name="hidden")
    if norm:
        h = graph.normalize(h, name="norm")
    if dropout:
        h = graph.dropout(h, dropout, name="drop")
    graph.dense(h, 3, name="head")
    return graph


def trainer(batch: int = 16, *, dropout: float = 0.0, norm: bool = False, **options: Any) -> mlc.Trainer:
    settings: dict[str, Any] = {"loss": "softmax_cross_entropy", "metrics": ["accuracy"], "learning_rate": 0.01}
    return mlc.Trainer(classifier(batch, dropout=dropout, norm=norm), **{**settings, **options})


def everything(trainer: mlc.Trainer) -> list[np.ndarray]:
    """Parameters, statistics and optimizer state."""
    weights = trainer.copy_weights()
    states = [np.frombuffer(s.bytes, np.uint8).copy() for t in trainer.parameters for s in t.optimizer_data]
    return [*weights, *states]


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one, other)
