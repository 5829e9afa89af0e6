"""An autoencoder: samples through a narrow code and back, without labels.

`python autoencoder.py` trains it; `mlcompute train autoencoder.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 10


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.digits()  # your own: mlc.data.images("folder", size=32)


def build(
    data: mlc.data.Dataset, batch: int = 64, rate: float = 1e-3, code: int = 16, device: mlc.Device | None = None
) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)
    width = x.descriptor.element_count // batch
    h = graph.dense(graph.flatten(x), 128, activation="relu", name="encoder")
    narrow = graph.dense(h, code, name="code")
    h = graph.dense(narrow, 128, activation="relu", name="decoder")
    again = graph.dense(h, width, name="decoded").reshape(x.descriptor.shape)
    graph.loss(again, x, "mse")  # compared with what went in
    return mlc.Trainer(graph, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("autoencoder.safetensors")
    print("now: mlcompute predict autoencoder.safetensors FILE")
