"""A triplet loss: one network applied to three inputs, same things closer together than different ones."""

import numpy as np

import mlcompute as mlc

BATCH, FEATURES, MARGIN = 32, 16, 1.0


def build() -> mlc.Graph:
    graph = mlc.Graph()
    h = graph.dense(graph.input((BATCH, FEATURES), "x"), 32, activation="relu", name="hidden")
    graph.dense(h, 4, biases=False, name="embedding")
    return graph


def distance(x: mlc.Tensor, y: mlc.Tensor) -> mlc.Tensor:
    return ((x - y + 1e-6) ** 2).sum(-1).sqrt()


def train(embed: mlc.Graph, batches) -> list[float]:
    step = mlc.TrainingGraph(optimizer=mlc.AdamOptimizer(learning_rate=1e-3))
    inputs = (step.input((BATCH, FEATURES), name) for name in ("anchor", "positive", "negative"))
    anchor, positive, negative = (embed(x) for x in inputs)
    step.minimize((distance(anchor, positive) - distance(anchor, negative) + MARGIN).relu())
    step.compile(device=mlc.Device())
    return [step.execute(batch).result.data.item() for batch in batches]


def data(steps: int = 10):
    """Six kinds of things, each a direction with much noise around it."""
    rng = np.random.default_rng(0)
    kinds = rng.standard_normal((6, FEATURES))
    for _ in range(steps):
        one = rng.integers(6, size=BATCH)
        other = (one + rng.integers(1, 6, size=BATCH)) % 6
        rows = {"anchor": kinds[one], "positive": kinds[one], "negative": kinds[other]}
        yield {k: (row + rng.standard_normal(row.shape)).astype(np.float32) for k, row in rows.items()}


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    losses = train(build(), data(1500))
    print(f"triplet loss with a margin of {MARGIN}: {losses[0]:.2f} before, {np.mean(losses[-50:]):.2f} after")
    assert np.mean(losses[-50:]) < 0.2
