"""A table with words and numbers: an embedding for every column of categories, beside the numbers."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, NUMBERS = 32, 4
CATEGORIES = {"city": 12, "month": 12, "product": 30}


def build() -> mlc.Graph:
    graph = mlc.Graph()
    columns = [graph.normalize(graph.input((BATCH, NUMBERS), "numbers"), "layer", name="norm")]
    for name, count in CATEGORIES.items():
        column = graph.input((BATCH,), name, data_type=mlc.DataType.INT64)
        columns.append(graph.embedding(column, count, 6, name=f"embeddings.{name}"))
    x = graph.dense(mlc.concatenate(columns, 1), 32, activation="relu", name="hidden")
    graph.dense(x, 1, name="score")
    return graph


def train(graph: mlc.Graph, data: tuple[dict[str, np.ndarray], np.ndarray], epochs: int = 5) -> list[float]:
    optimizer = mlc.AdamWOptimizer(learning_rate=1e-2, weight_decay=0.01)
    trainer = mlc.Trainer(graph, loss="sigmoid_cross_entropy", optimizer=optimizer)
    return trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def data(count: int = 128) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Is it bought? In some cities, in summer, or for two numbers that go together."""
    rng = np.random.default_rng(0)
    table = {"numbers": rng.standard_normal((count, NUMBERS)).astype(np.float32)}
    table |= {name: rng.integers(0, most, count) for name, most in CATEGORIES.items()}
    score = (table["city"] % 3 == 0) + (abs(table["month"] - 6) < 2) + table["numbers"][:, :2].prod(1)
    return table, (score > 0.5)[:, None].astype(np.float32)


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    train(graph, data(1000), epochs=25)
    scores = mlc.Trainer(graph, loss="sigmoid_cross_entropy", metrics=["accuracy", "auc"]).evaluate(*data(1000))
    print(f"accuracy {scores['accuracy']:.0%}, area under the curve {scores['auc']:.3f}")
    assert scores["auc"] > 0.95
