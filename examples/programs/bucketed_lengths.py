"""Sentences of different lengths: every batch has one length, so that nothing is padded; one set of weights."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, WORDS, LENGTHS, TAGS = 8, 20, (4, 7, 11), 3


def build() -> mlc.Graph:
    graph = mlc.Graph()
    words = graph.input((BATCH, LENGTHS[-1]), "words", data_type=mlc.DataType.INT64, varies=[1])
    x = graph.embedding(words, WORDS, 8, name="embed")
    x = graph.gru(x, 16, bidirectional=True, name="gru")
    graph.dense(x, TAGS, name="tags")
    return graph


def train(graph: mlc.Graph, data: tuple[list[np.ndarray], list[np.ndarray]], epochs: int = 5) -> list[float]:
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer="adam", learning_rate=1e-2)
    return trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def data(count: int = 48) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A word is larger than the one before it, or smaller, or the same."""
    rng = np.random.default_rng(0)
    sentences = [rng.integers(0, WORDS, LENGTHS[k % len(LENGTHS)]) for k in range(count)]
    return sentences, [np.sign(np.diff(words, prepend=words[0])) + 1 for words in sentences]


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    train(graph, data(240), epochs=20)
    scores = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"]).evaluate(*data(240))
    print(f"{scores['accuracy']:.0%} of the words are tagged right, in sentences of {LENGTHS} words")
    assert scores["accuracy"] > 0.9
