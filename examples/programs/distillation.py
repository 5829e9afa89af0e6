"""Distillation: a small network learns a large one's softened probabilities, and the labels beside them."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, FEATURES, CLASSES = 16, 8, 5
TEMPERATURE, SHARE = 2.0, 0.7


def network(width: int) -> mlc.Graph:
    graph = mlc.Graph()
    hidden = graph.dense(graph.input((BATCH, FEATURES), "x"), width, activation="relu", name="hidden")
    graph.dense(hidden, CLASSES, name="scores")
    return graph


def build() -> tuple[mlc.Graph, mlc.Graph]:
    return network(128), network(16)


def train(teacher: mlc.Graph, student: mlc.Graph, data: dict[str, np.ndarray], epochs: int = 6) -> list[float]:
    step = mlc.Graph()
    x, labels = step.input((BATCH, FEATURES), "x"), step.input((BATCH,), "labels", data_type=mlc.DataType.INT64)
    soft, scores = (teacher(x, updates=False) / TEMPERATURE).softmax(-1), student(x)
    step.minimize(step.cross_entropy(scores / TEMPERATURE, soft), weight=SHARE * TEMPERATURE**2)
    step.minimize(step.cross_entropy(scores, labels), weight=1 - SHARE)
    trainer = mlc.Trainer(step, optimizer="adam", learning_rate=1e-2)
    return trainer.fit(data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def data(count: int = 64) -> dict[str, np.ndarray]:
    """The class is the largest of the first numbers, whatever its sign."""
    x = np.random.default_rng(0).standard_normal((count, FEATURES)).astype(np.float32)
    return {"x": x, "labels": np.abs(x[:, :CLASSES]).argmax(1)}


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    teacher, student = build()
    known = data(512)
    teaching = mlc.Trainer(teacher, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=1e-2)
    teaching.fit(*known.values(), epochs=30, verbose=0)
    train(teacher, student, known, epochs=60)
    said, learned = (mlc.Trainer(graph, loss="mse").predict(known["x"]).argmax(1) for graph in (teacher, student))
    print(f"the student says what its teacher says of {(said == learned).mean():.0%} of the samples")
    assert (said == learned).mean() > 0.8
