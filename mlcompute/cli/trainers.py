"""Trainers on the command line: from a recipe, a Python file, or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli.datasets import Dataset, load_data
from mlcompute.cli.models import ModelFile, existing
from mlcompute.cli.recipes import RECIPES, recipe_trainer
from mlcompute.errors import DataError, FileError
from mlcompute.runtime.definition import definition_of

HELP = "a recipe (mlp, cnn), or a Python file that defines build() -> mlc.Trainer or TrainingGraph"


def trainer_and_data(
    model: str, path: str | None, batch: int, rate: float, device: mlc.Device
) -> tuple[mlc.Trainer, Dataset]:
    """What is to be trained, and on what.

    A Python file may bring its own data: `def data()` that returns (x, y) or (x, y, x_test, y_test).
    """
    if model in RECIPES:
        data = load_data(path)
        return recipe_trainer(model, data, batch, rate, device), data
    if Path(model).suffix != ".py":
        raise FileError(f"{model}: neither a recipe nor a Python file", expected=HELP)
    file = existing(model, HELP)
    source = ModelFile(file)
    made = source.call("build")
    trainer = made if isinstance(made, mlc.Trainer) else trainer_of(made, device, model)
    if path is None and source.has("data"):
        return trainer, _own_data(file, source.call("data"))
    return trainer, load_data(path)


def trainer_of(graph: Any, device: mlc.Device, who: str) -> mlc.Trainer:
    """A trainer for a training graph, with accuracy where the loss is over classes."""
    if not isinstance(graph, mlc.TrainingGraph):
        raise DataError(f"{who}: holds a {type(graph).__name__}", expected="a TrainingGraph or a Trainer")
    losses = [node.layer for node in graph.nodes if isinstance(node.layer, mlc.LossLayer)]
    learning = definition_of(graph).learning
    losses += [learning.loss_layer] if learning is not None and learning.loss_layer is not None else []
    over_classes = any(loss.descriptor.loss_type == mlc.LossType.SOFTMAX_CROSS_ENTROPY for loss in losses)
    metrics = ["accuracy"] if over_classes else []
    if graph.device is not None:  # it runs where it was compiled for
        return mlc.Trainer(graph, metrics=metrics)
    return mlc.Trainer(graph, metrics=metrics, device=device)


def _own_data(file: Path, given: Any) -> Dataset:
    if not isinstance(given, tuple) or len(given) not in (2, 4):
        raise DataError(f"{file}: data() must return (x, y) or (x, y, x_test, y_test)")
    return Dataset(file.stem, *given, *((None, None) if len(given) == 2 else ()))
