"""Graph convolution: who belongs to which community, from who knows whom and a few known members."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

NODES, COMMUNITIES, UNKNOWN = 60, 3, -100


def build() -> mlc.Graph:
    graph = mlc.Graph()
    x, links = graph.input((NODES, NODES), "features"), graph.input((NODES, NODES), "links")
    x = (links @ graph.dense(x, 16, biases=False, name="conv1")).relu()
    links @ graph.dense(x, COMMUNITIES, biases=False, name="conv2")
    return graph


def train(graph: mlc.Graph, data: tuple[np.ndarray, np.ndarray, np.ndarray], steps: int = 10) -> list[float]:
    links, features, labels = data
    degree = links.sum(1)
    links = links / np.sqrt(degree[:, None] * degree)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, ignore_index=UNKNOWN)
    optimizer = mlc.AdamWOptimizer(learning_rate=1e-2, weight_decay=5e-4)
    trainer = mlc.Trainer(graph, loss=loss, optimizer=optimizer)
    given = {"features": features, "links": links}
    return trainer.fit(given, labels, epochs=steps, shuffle=False, verbose=0)["loss"]


def data(known: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Links, mostly within communities; nothing is known of a node but its number, of some their community."""
    rng = np.random.default_rng(0)
    labels = np.arange(NODES) % COMMUNITIES
    likely = np.where(labels[:, None] == labels, 0.4, 0.03)
    links = np.triu(rng.random((NODES, NODES)) < likely, 1)
    links = (links | links.T | np.eye(NODES, dtype=bool)).astype(np.float32)
    labels[known * COMMUNITIES :] = UNKNOWN
    return links, np.eye(NODES, dtype=np.float32), labels


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    links, features, labels = data()
    train(graph, (links, features, labels), steps=200)
    degree = links.sum(1)
    given = {"features": features, "links": links / np.sqrt(degree[:, None] * degree)}
    found = mlc.Trainer(graph, loss="softmax_cross_entropy").predict(given).argmax(1)
    right = (found == np.arange(NODES) % COMMUNITIES).mean()
    print(f"the communities of {(labels != UNKNOWN).sum()} nodes were known; {right:.0%} of {NODES} were found")
    assert right > 0.8
