"""A multilayer perceptron: one hidden layer, for tables and small images.

`python mlp.py` trains it; `mlcompute train mlp.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 5


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.digits()  # your own: mlc.data.read_csv("file.csv", target="column")


def build(
    data: mlc.data.Dataset, batch: int = 64, rate: float = 1e-3, hidden: int = 128, device: mlc.Device | None = None
) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)
    x = graph.dense(graph.flatten(x), hidden, activation="relu", name="hidden")
    graph.dense(x, data.outputs, name="scores")
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("mlp.safetensors")
    print("now: mlcompute predict mlp.safetensors FILE")
