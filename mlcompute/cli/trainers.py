"""Trainers on the command line: from a recipe, a Python file, or a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli import datasets
from mlcompute.cli.models import ModelFile, existing
from mlcompute.cli.parsing import meant
from mlcompute.cli.recipes import RECIPES, module, recipe_data, recipe_trainer
from mlcompute.data import Dataset
from mlcompute.errors import DataError, FileError
from mlcompute.layers.objective import is_loss
from mlcompute.runtime.definition import definition_of

HELP = f"a recipe ({', '.join(RECIPES)}), or a Python file that defines build() -> mlc.Trainer or TrainingGraph"


def trainer_and_data(args: argparse.Namespace, device: mlc.Device) -> tuple[mlc.Trainer, Dataset, int]:
    """What is to be trained, on what, and for how many epochs.

    A Python file may bring its own data: `def data()` that returns a Dataset of `mlc.data`, (x, y) or
    (x, y, x_test, y_test). Its `build` may take `data`, and `batch`, `rate` and `device` by name. Without
    --epochs, its EPOCHS counts.
    """
    if args.model in RECIPES:
        if args.data is None:
            datasets.expect_no_options(args, args.model)
            data = datasets.augmented(args, recipe_data(args.model))
        else:
            data = _for_recipe(args)
        trainer = recipe_trainer(args.model, data, device, batch=args.batch, rate=args.rate, **dict(args.set))
        return trainer, data, args.epochs or module(args.model).EPOCHS
    source = file_of(args.model)
    given = None
    if args.data is not None:
        is_npz = Path(args.data).suffix == ".npz"  # arrays are fed to a network of the user's as they are
        given = datasets.loaded(args, **({"images": False, "standardize": False} if is_npz else {}))
    else:
        datasets.expect_no_options(args, args.model)
    made, used = source.build(given, batch=args.batch, rate=args.rate, device=device, **dict(args.set))
    trainer = made if isinstance(made, mlc.Trainer) else trainer_of(made, device, args.model)
    if used is None:
        used = source.data() if source.has("data") else recipe_data("mlp")
    return trainer, datasets.augmented(args, used) if given is None else used, args.epochs or source.epochs()


def file_of(model: str) -> ModelFile:
    """The Python file that is to be trained."""
    if Path(model).suffix != ".py":
        near = meant(model, RECIPES).removeprefix("; ")
        raise FileError(f"{model}: neither a recipe nor a Python file", expected=HELP, fix=near)
    return ModelFile(existing(model, HELP))


def _for_recipe(args: argparse.Namespace) -> Dataset:
    """Arrays with two axes a sample are images for a network of images, and sequences for others."""
    options: dict[str, Any] = {}
    if Path(args.data).suffix == ".npz" and args.model in ("cnn", "resnet", "lstm"):
        options["images"] = args.model != "lstm" or None
    return datasets.loaded(args, **options)


def trainer_of(graph: Any, device: mlc.Device, who: str, metrics: Sequence[str] = ()) -> mlc.Trainer:
    """A trainer for a training graph, with accuracy where the loss is over classes.

    metrics  other ones, where it is not
    """
    if isinstance(graph, mlc.InferenceGraph):
        graph = _with_its_loss(graph, who)
    if not isinstance(graph, mlc.TrainingGraph):
        raise DataError(f"{who}: holds a {type(graph).__name__}", expected="a TrainingGraph or a Trainer")
    losses = [node.layer for node in graph.nodes if isinstance(node.layer, mlc.LossLayer)]
    learning = definition_of(graph).learning
    losses += [learning.loss_layer] if learning is not None and learning.loss_layer is not None else []
    over_classes = any(loss.descriptor.loss_type == mlc.LossType.SOFTMAX_CROSS_ENTROPY for loss in losses)
    chosen: Any = ["accuracy"] if over_classes else list(metrics)
    predictions = definition_of(graph).declared.predictions
    if len(predictions) > 1:
        classified = {
            node.sources[0]
            for node in graph.nodes
            if isinstance(node.layer, mlc.LossLayer)
            and node.layer.descriptor.loss_type == mlc.LossType.SOFTMAX_CROSS_ENTROPY
        }
        chosen = {name: ["accuracy"] for name, tensor in predictions.items() if tensor in classified}
    if graph.device is not None:  # it runs where it was compiled for
        return mlc.Trainer(graph, metrics=chosen)
    return mlc.Trainer(graph, metrics=chosen, device=device)


def _with_its_loss(graph: mlc.InferenceGraph, who: str) -> mlc.TrainingGraph:
    """A model without what only training needs, as folders of the Hub hold it, for a Trainer that evaluates it."""
    if not any(is_loss(node.layer) for node in graph.nodes):
        raise DataError(
            f"{who}: holds an InferenceGraph without a loss", fix="in Python: mlc.load(path).predict(x) needs none"
        )
    training = mlc.TrainingGraph([graph], optimizer=mlc.SGDOptimizer(learning_rate=0.01))  # never steps
    declared = definition_of(graph).declared
    training.add_inputs(declared.inputs, declared.labels, declared.label_weights)
    definition_of(training).declared.predictions = dict(declared.predictions)
    return training
