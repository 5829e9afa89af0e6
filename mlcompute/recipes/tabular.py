"""A network for tables: numbers standardised, categories one-hot or embedded.

`python tabular.py` trains it; `mlcompute train tabular.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 30


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.iris()  # your own: mlc.data.read_csv("file.csv", target="column")


def build(
    data: mlc.data.Dataset, batch: int = 32, rate: float = 3e-3, hidden: int = 64, device: mlc.Device | None = None
) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)
    for name in ("hidden1", "hidden2"):
        x = graph.dropout(graph.dense(x, hidden, activation="relu", name=name), 0.1)
    graph.dense(x, data.outputs, name="scores")
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("tabular.safetensors")
    print("now: mlcompute predict tabular.safetensors FILE.csv")
