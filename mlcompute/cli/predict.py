"""mlcompute predict: let a trained model answer, into a .npy file."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np

from mlcompute.cli import datasets, models, trainers
from mlcompute.cli.answer import Answer
from mlcompute.errors import DataError
from mlcompute.saving.atomic import replace_file

EXAMPLES = (
    "mlcompute predict runs/cnn/best.safetensors --classes",
    "mlcompute predict runs/net/best.safetensors --data x.npy --output y.npy",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what, and where the answers go."""
    parser.add_argument("model", help="a checkpoint of a training run")
    parser.add_argument("--data", metavar="PATH", help=f"samples in a .npy file; or {datasets.HELP}")
    parser.add_argument("--output", metavar="FILE", default="predictions.npy", help="for the answers (predictions.npy)")
    parser.add_argument("--classes", action="store_true", help="the class with the highest score instead of all scores")
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Answers for all samples, in their order."""
    trainer = trainers.trainer_of(models.trained(args.model), models.device_named(args.device), args.model)
    if args.data is not None and Path(args.data).suffix == ".npy":
        try:
            x = np.load(args.data, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{args.data}: cannot be read as .npy: {error}") from error
    else:
        x = datasets.load_data(args.data).x_test
    answers = trainer.predict(x)
    if args.classes:
        answers = answers.argmax(axis=1)
    raw = io.BytesIO()
    np.save(raw, answers)
    replace_file(args.output, lambda file: file.write(raw.getvalue()), "predict")
    shape = "x".join(map(str, answers.shape))
    data = {"output": args.output, "shape": list(answers.shape)}
    return Answer(f"{len(x):,} answers ({shape}) in {args.output}", data)
