"""mlcompute predict: let a trained model answer, into a .npy file."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.cli import datasets, models, trainers
from mlcompute.cli.answer import Answer
from mlcompute.errors import DataError
from mlcompute.saving.atomic import replace_file

HELP = (
    "samples in a .npy file, or in a .npz file as x_test or x; or a folder of MNIST-format files, of which the test "
    "images are taken; without it handwritten digits that come with scikit-learn, those held out in training"
)
EXAMPLES = (
    "mlcompute predict runs/0001-cnn/best.safetensors --classes",
    "mlcompute predict runs/0001-net/best.safetensors --data x.npy --output y.npy",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what, and where the answers go."""
    parser.add_argument("model", help="a checkpoint of a training run")
    parser.add_argument("--data", metavar="PATH", help=HELP)
    parser.add_argument("--output", metavar="FILE", default="predictions.npy", help="for the answers (predictions.npy)")
    parser.add_argument(
        "--classes",
        action="store_true",
        help="the class with the highest score instead of all scores; 0 or 1 for yes and no",
    )
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Answers for all samples, in their order."""
    trainer = trainers.trainer_of(models.trained(args.model), models.device_named(args.device), args.model)
    x = _samples(args.data)
    with datasets.told(args.data):
        answers = trainer.predict(x)
    if args.classes:
        answers = _classes(trainer, answers)
    raw = io.BytesIO()
    np.save(raw, answers)
    replace_file(args.output, lambda file: file.write(raw.getvalue()), "predict")
    shape = "x".join(map(str, answers.shape))
    data = {"output": args.output, "shape": list(answers.shape)}
    return Answer(f"{len(x):,} answers ({shape}) in {args.output}", data)


def _classes(trainer: mlc.Trainer, answers: Any) -> Any:
    """The class of every answer; 0 or 1 where every output is a yes or no of its own."""
    model = trainer.model
    if answers.ndim < 2 or answers.shape[1] == 1 or model.is_on_logits:
        return (answers > (0.0 if model.is_on_logits else 0.5)).astype(np.int64)
    return answers.argmax(axis=model.class_axis("--classes"))


def _samples(path: str | None) -> Any:
    """Every sample of a file, in its order: predictions need no labels. Of other data, the test samples."""
    suffix = Path(path).suffix if path is not None else ""
    if suffix == ".npz" and Path(str(path)).is_file():
        arrays = datasets.read_arrays(str(path))
        name = "x_test" if "x_test" in arrays else "x"
        if name not in arrays:
            raise DataError(f"{path}: lacks x", found=", ".join(arrays) or "nothing", expected="samples as x or x_test")
        return arrays[name]
    if suffix == ".npy":
        try:
            return np.load(str(path), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read as .npy: {error}") from error
    return datasets.load_data(path).judged[0]
