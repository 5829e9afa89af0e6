"""mlcompute evaluate: measure a trained model on data."""

from __future__ import annotations

import argparse

import numpy as np

import mlcompute as mlc
from mlcompute.cli import datasets, models, trainers
from mlcompute.cli.answer import Answer
from mlcompute.runtime.definition import definition_of

EXAMPLES = (
    "mlcompute evaluate runs/0001-cnn/best.safetensors",
    "mlcompute evaluate runs/0001-net/best.safetensors --data test.npz --all",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what."""
    parser.add_argument("model", help="a checkpoint, a run by folder or number (its best one), or a folder of the Hub")
    parser.add_argument("--data", metavar="PATH", help=f"{datasets.HELP}; without it what was held out in training")
    parser.add_argument("--all", action="store_true", help="on all samples, not only those held out for testing")
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Loss and metrics, dropout off."""
    args.model = models.checkpoint_at(args.model)
    graph = models.trained(args.model)
    data, is_held_out = datasets.read_for(args.model, graph, args.data, labels=True, everything=args.all)
    is_labelled = isinstance(graph, mlc.TrainingGraph) and bool(definition_of(graph).declared.labels)
    metrics = data.metrics if data.preprocessing and is_labelled else ()
    trainer = trainers.trainer_of(graph, models.device_named(args.device), args.model, metrics)
    with datasets.told(args.data, data):
        found = trainer.evaluate(data)
    text = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
    facts, labels = {"data": data.name, "samples": len(data), **found}, np.asarray(data.y)
    if "accuracy" in found and data.classes and labels.ndim == 1 and len(labels):
        counts = np.bincount(labels)
        facts["baseline"] = float(counts.max() / len(labels))
        text += f"  (always answering {data.classes[counts.argmax()]!r}: {facts['baseline']:.4f})"
    part = f"{len(data):,} samples" + (" that were held out in training (--all takes all)" if is_held_out else "")
    notes = "".join(f"\nnote: {note}" for note in data.notes) if args.data is not None else ""
    return Answer(f"{data.name}, {part}\n{text}{notes}", facts)
