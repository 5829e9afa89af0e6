"""A small GPT for text, character by character.

`python gpt.py` trains it; `mlcompute train gpt.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 5


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.sums()  # your own: mlc.data.text("book.txt", length=128)


def build(
    data: mlc.data.Dataset, batch: int = 32, rate: float = 3e-3, width: int = 64, device: mlc.Device | None = None
) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)
    x = graph.embedding(x, data.outputs, width, name="letters")
    x = x + graph.parameter((*data.shape, width), 0.0, name="places")
    for k in range(2):
        h = graph.normalize(x, "layer", name=f"blocks.{k}.norm")
        x = x + graph.attention(h, heads=4, causal=True, name=f"blocks.{k}.attention")
        h = graph.normalize(x, "layer", name=f"blocks.{k}.mlp_norm")
        h = graph.dense(h, 4 * width, activation="gelu", name=f"blocks.{k}.wide")
        x = x + graph.dense(h, width, name=f"blocks.{k}.narrow")
    graph.dense(graph.normalize(x, "layer", name="norm"), data.outputs, name="scores")
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("gpt.safetensors")
    print("now: mlcompute predict gpt.safetensors --prompt 12+34= --count 3")
