"""mlcompute evaluate: measure a trained model on data."""

from __future__ import annotations

import argparse

from mlcompute.cli import datasets, models, trainers
from mlcompute.cli.answer import Answer

EXAMPLES = (
    "mlcompute evaluate runs/0001-cnn/best.safetensors",
    "mlcompute evaluate runs/0001-net/best.safetensors --data test.npz --all",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what."""
    parser.add_argument("model", help="a checkpoint of a training run")
    parser.add_argument("--data", metavar="PATH", help=datasets.HELP)
    parser.add_argument("--all", action="store_true", help="on all samples, not only those held out for testing")
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Loss and metrics, dropout off."""
    trainer = trainers.trainer_of(models.trained(args.model), models.device_named(args.device), args.model)
    data = datasets.load_data(args.data)
    x, y = data.everything if args.all else data.judged
    with datasets.told(args.data):
        found = trainer.evaluate(x, y)
    text = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
    part = f"{len(x):,} samples"
    if data.held_out and not args.all:
        part = f"{len(x):,} of {len(x) + len(data.x):,} samples, a held-out fifth (--all takes all)"
    return Answer(f"{data.name}, {part}\n{text}", {"data": data.name, "samples": len(x), **found})
