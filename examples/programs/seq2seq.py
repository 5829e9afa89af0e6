"""Sequence to sequence: an encoder, a decoder that starts from its state, and greedy decoding."""

import numpy as np

import mlcompute as mlc

BATCH, LENGTH, WORDS, HIDDEN, BEGIN = 32, 6, 10, 64, 0


def build() -> mlc.Graph:
    graph = mlc.Graph()
    source = graph.input((BATCH, LENGTH), "source", data_type=mlc.DataType.INT64)
    tokens = graph.input((BATCH, LENGTH), "tokens", data_type=mlc.DataType.INT64)
    read = graph.embedding(source, WORDS, 16, name="source_words")
    _, state = graph.gru(read, HIDDEN, returns_states=True, name="encoder")
    written = graph.embedding(tokens, WORDS, 16, name="target_words")
    graph.dense(graph.gru(written, HIDDEN, state=state, name="decoder"), WORDS, name="head")
    return graph


def train(graph: mlc.Graph, batches) -> list[float]:
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=mlc.AdamOptimizer(learning_rate=3e-3))
    # Epochs of one step: the losses of all steps are wanted.
    history = trainer.fit(batches, epochs=len(batches), steps_per_epoch=1, shuffle=False, verbose=0)
    return history["loss"]


def predict(graph: mlc.Graph, batch) -> np.ndarray:
    begin = np.full((BATCH, 1), BEGIN)
    return mlc.generate(graph, begin, LENGTH, tokens="tokens", inputs={"source": batch[0]["source"]})[:, 1:]


def data(steps: int = 10):
    """Digits, to be said backwards; the decoder sees what it should have said before."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(steps):
        source = rng.integers(1, WORDS, (BATCH, LENGTH))
        target = source[:, ::-1]
        tokens = np.concatenate([np.full((BATCH, 1), BEGIN), target[:, :-1]], 1)
        batches.append(({"source": source, "tokens": tokens}, target.copy()))
    return batches


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    batches = data(1201)
    train(graph, batches[:-1])
    said = predict(graph, batches[-1])
    print(*batches[-1][0]["source"][0], "backwards:", *said[0])
    print(f"{(said == batches[-1][1]).mean():.0%} of the digits are right")
    assert (said == batches[-1][1]).mean() > 0.9
