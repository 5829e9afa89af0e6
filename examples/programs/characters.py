"""A character model with truncated backpropagation: the state goes on from piece to piece, the gradient does not."""

import numpy as np

import mlcompute as mlc

BATCH, PIECE, HIDDEN = 8, 16, 64
TEXT = "she sells sea shells by the sea shore, the shells she sells are sea shells for sure. "
LETTERS = sorted(set(TEXT))


def build() -> mlc.Graph:
    graph = mlc.Graph()
    tokens = graph.input((BATCH, PIECE), "tokens", data_type=mlc.DataType.INT64)
    start = graph.input((1, 1, BATCH, HIDDEN), "state")
    x = graph.embedding(tokens, len(LETTERS), 16, name="letters")
    y, _ = graph.gru(x, HIDDEN, state=start, returns_states=True, name="memory")
    graph.dense(y, len(LETTERS), name="head")
    return graph


def train(graph: mlc.Graph, pieces) -> list[float]:
    training = mlc.TrainingGraph([graph], optimizer=mlc.AdamOptimizer(learning_rate=5e-3, clip_norm=1.0))
    labels = training.input((BATCH, PIECE), "labels", data_type=mlc.DataType.INT64)
    training.cross_entropy(graph.result_tensors(graph.layer("head"))[0], labels)
    last = graph.result_tensors(graph.layer("memory"))[1]
    training.add_outputs({"last": last})
    training.compile(device=mlc.Device())

    state = np.zeros((1, 1, BATCH, HIDDEN), np.float32)
    losses = []
    for piece in pieces:
        step = training.execute({"tokens": piece[:, :-1], "labels": piece[:, 1:], "state": state})
        losses.append(step.result.data.item())
        state = last.data.copy()
    return losses


def data(steps: int = 10):
    """Eight readers of one long text, each somewhere else; every piece goes on where the last one ended."""
    text = np.array([LETTERS.index(letter) for letter in TEXT])
    starts = np.arange(BATCH)[:, None] * 11
    for k in range(steps):
        yield text[(starts + k * PIECE + np.arange(PIECE + 1)) % len(text)]


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    losses = train(graph, data(300))
    print(f"nats per letter: {losses[0]:.2f} before, {losses[-1]:.2f} after")
    assert losses[-1] < 0.1
