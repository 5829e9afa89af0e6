"""Recipes: networks for images that the command line can train without a file of yours."""

from __future__ import annotations

from collections.abc import Callable

import mlcompute as mlc
from mlcompute.cli.datasets import Dataset
from mlcompute.errors import DataError


def mlp(graph: mlc.Graph, x: mlc.Tensor, classes: int) -> None:
    """Pixels, 128 hidden units, classes."""
    graph.dense(graph.dense(graph.flatten(x), 128, activation="relu", name="hidden"), classes, name="scores")


def cnn(graph: mlc.Graph, x: mlc.Tensor, classes: int) -> None:
    """Two convolutions with pooling, 128 hidden units with dropout, classes."""
    x = graph.pool(graph.convolution(x, 32, kernel=3, activation="relu", name="conv1"), name="pool1")
    x = graph.pool(graph.convolution(x, 64, kernel=3, activation="relu", name="conv2"), name="pool2")
    x = graph.dense(graph.flatten(x), 128, activation="relu", name="hidden")
    graph.dense(graph.dropout(x, 0.25), classes, name="scores")


RECIPES: dict[str, Callable[[mlc.Graph, mlc.Tensor, int], None]] = {"mlp": mlp, "cnn": cnn}


def recipe_trainer(name: str, data: Dataset, batch: int, rate: float, device: mlc.Device) -> mlc.Trainer:
    """A recipe made to measure for some data."""
    shape = data.x.shape[1:]
    if name == "cnn" and (len(shape) != 3 or min(shape[1:]) < 4):
        raise DataError(f"{data.name}: the cnn needs images (n, channels, height, width)", given=str(data.x.shape))
    graph = mlc.Graph()
    RECIPES[name](graph, graph.input((batch, *shape), "x"), data.class_count)
    return mlc.Trainer(
        graph,
        loss="softmax_cross_entropy",
        optimizer="adam",
        metrics=["accuracy"],
        learning_rate=rate,
        device=device,
    )
