"""A small convolutional network for images.

`python cnn.py` trains it; `mlcompute train cnn.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 5


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.digits()  # your own: mlc.data.images("folder", size=32)


def build(
    data: mlc.data.Dataset, batch: int = 64, rate: float = 1e-3, hidden: int = 128, device: mlc.Device | None = None
) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)
    x = graph.pool(graph.convolution(x, 32, kernel=3, activation="relu", name="conv1"), name="pool1")
    x = graph.pool(graph.convolution(x, 64, kernel=3, activation="relu", name="conv2"), name="pool2")
    x = graph.dense(graph.flatten(x), hidden, activation="relu", name="hidden")
    graph.dense(graph.dropout(x, 0.25), data.outputs, name="scores")
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("cnn.safetensors")
    print("now: mlcompute predict cnn.safetensors IMAGE")
