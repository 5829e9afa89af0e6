"""An LSTM for sequences: time series, text, or images row by row.

`python lstm.py` trains it; `mlcompute train lstm.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 10


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.digits()  # your own: mlc.data.read_csv("file.csv", target="column", window=24)


def build(
    data: mlc.data.Dataset, batch: int = 32, rate: float = 3e-3, hidden: int = 64, device: mlc.Device | None = None
) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)
    if x.descriptor.data_type == mlc.DataType.INT64:  # a text: a score for every next character
        x = graph.lstm(graph.embedding(x, data.outputs, 64, name="letters"), hidden, name="memory")
    else:
        x = x if len(data.shape) == 2 else x.reshape(batch, -1, data.shape[-1])  # rows of an image, one after the other
        x = graph.lstm(x, hidden, returns_sequences=False, name="memory")
    graph.dense(x, data.outputs, name="scores")
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("lstm.safetensors")
    print("now: mlcompute predict lstm.safetensors FILE")
