"""mlcompute predict: predictions of a trained model, on the screen or in a file."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.cli import datasets, models, trainers
from mlcompute.cli.answer import Answer
from mlcompute.cli.arguments import count
from mlcompute.data import Dataset, preprocessing_of
from mlcompute.data.table import TablePreprocessing
from mlcompute.data.target import Array, without_pixel
from mlcompute.data.text_file import TextPreprocessing, read_file
from mlcompute.errors import DataError
from mlcompute.ops.bfloat16 import computed
from mlcompute.runs.evaluation import probabilities_of
from mlcompute.saving.atomic import replace_file
from mlcompute.seeing.units import percent

HELP = (
    "samples like those it was trained with: a table without the target, an image or a folder of images, arrays in a "
    ".npy or .npz file (x_test or x), the beginning of a text; without it what was held out in training"
)
EXAMPLES = (
    "mlcompute predict runs/0001-tabular/best.safetensors new.csv --output predictions.csv",
    "mlcompute predict runs/0002-resnet/best.safetensors photo.jpg",
    "mlcompute predict runs/0003-gpt/best.safetensors --prompt 12+34= --count 3",
)
#: So many predictions are shown on the screen.
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what, and where the predictions go."""
    parser.add_argument("model", help="a checkpoint, a run by folder or number (its best one), or a folder of the Hub")
    parser.add_argument("data", nargs="?", metavar="FILE", help=HELP)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write all predictions: .csv with names and probabilities; .npy (several outputs: .npz) as they come out",
    )
    parser.add_argument(
        "--classes",
        action="store_true",
        help="into .npy: the number of the class instead of all scores; 0 or 1 for yes and no",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what a text begins with, instead of a file")
    parser.add_argument("--count", type=count, default=200, metavar="N", help="characters to write after it (200)")
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Predictions for all samples, in their order."""
    args.model = models.checkpoint_at(args.model)
    graph = models.trained(args.model)
    trainer = trainers.trainer_of(graph, models.device_named(args.device), args.model)
    preprocessing = preprocessing_of(args.model)
    if isinstance(preprocessing, TextPreprocessing):
        return _continued(args, trainer, preprocessing)
    if args.prompt is not None:
        raise DataError(f"{args.model}: --prompt is for models of text", fix="give a file of samples")
    if args.classes and Path(args.output or "").suffix != ".npy":
        raise DataError(f"{args.model}: --classes is about --output FILE.npy", fix="leave it out: classes are shown")
    suffix = Path(args.output).suffix if args.output else ".npy"
    if suffix not in (".npy", ".npz", ".csv"):
        raise DataError(
            f"{args.output}: predictions are not written as {suffix or 'that'}",
            expected=".csv or .npy; .npz for a model with several outputs",
        )
    outputs = trainer.model.outputs
    if args.output and suffix != ".csv" and (suffix == ".npz") != (len(outputs) > 1):
        raise DataError(
            f"{args.output}: the model has {len(outputs)} output{'s' * (len(outputs) > 1)}: {', '.join(outputs)}",
            expected=".csv, or .npz with an array for each" if len(outputs) > 1 else ".csv or .npy",
        )
    data, _ = datasets.read_for(args.model, graph, args.data, labels=False, everything=args.data is not None)
    with datasets.told(args.data, data):
        found = trainer.predict(data)
    if isinstance(found, dict):
        header, rows = _table_of_several(data, found)
        shape: Any = {name: list(array.shape) for name, array in found.items()}
    else:
        header, rows = _table(trainer, data, found)
        shape = list(found.shape)
    facts: dict[str, Any] = {"data": data.name, "shape": shape}
    if args.output is None:
        facts["predictions"] = [dict(zip(header, row, strict=True)) for row in rows]
        return Answer(_shown(data, header, rows), facts)
    if isinstance(found, dict) and suffix == ".npz":
        _write(args.output, lambda file: np.savez(file, **found))
    elif suffix == ".npy":
        array = _classes(trainer, found) if args.classes else found
        _write(args.output, lambda file: np.save(file, array))
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        replace_file(args.output, lambda file: file.write(text.getvalue().encode("utf-8")), "predict")
    return Answer(f"{len(rows):,} predictions in {args.output}", {**facts, "output": args.output})


def _names(data: Dataset) -> Sequence[Any]:
    """What samples are called: by their files, or counted from 1."""
    is_table = isinstance(data.preprocessing, TablePreprocessing)  # the first sample of which is 1, not "line 2"
    return range(1, len(data) + 1) if is_table or not data.sample_names else data.sample_names


def _table_of_several(data: Dataset, found: Mapping[str, Array]) -> tuple[list[str], list[list[Any]]]:
    """The numbers of every output as they come out, side by side."""
    header = ["sample"]
    columns: list[Array] = []
    for output, array in found.items():
        numbers = computed(array).reshape(len(array), -1)
        width = numbers.shape[1]
        header += [output] if width == 1 else [f"{output} {k + 1}" for k in range(width)]
        columns.append(numbers)
    return header, [
        [name, *(float(number) for numbers in columns for number in numbers[k])] for k, name in enumerate(_names(data))
    ]


def _table(trainer: mlc.Trainer, data: Dataset, found: Array) -> tuple[list[str], list[list[Any]]]:
    """Predictions as people read them: the class and its probability, numbers in their own units, or errors."""
    found = without_pixel(computed(found))
    names = _names(data)
    if trainer.model.feed.compared:  # what comes out is compared with what went in
        compared = trainer.model.feed.compared
        x = data.x[compared] if isinstance(data.x, Mapping) else data.values(np.arange(len(data)))
        errors = ((found - x.reshape(found.shape)) ** 2).reshape(len(found), -1).mean(axis=1)
        return ["sample", "error"], [[name, float(error)] for name, error in zip(names, errors, strict=True)]
    preprocessing = data.preprocessing
    shares = probabilities_of(found, trainer.model.is_on_logits) if data.classes and found.ndim < 3 else None
    if preprocessing is not None and shares is not None and shares.shape[1] == len(data.classes):
        classes = preprocessing.decode(shares)
        return ["sample", "prediction", "probability"], [
            [name, str(one), round(float(share), 6)]
            for name, one, share in zip(names, classes, shares.max(axis=1), strict=True)
        ]
    numbers = preprocessing.decode(found) if preprocessing is not None else found.reshape(len(found), -1)
    header = ["prediction"] if numbers.shape[1:] == (1,) else [f"output {k + 1}" for k in range(numbers.shape[1])]
    return ["sample", *header], [[name, *map(float, row)] for name, row in zip(names, numbers, strict=True)]


def _shown(data: Dataset, header: list[str], rows: list[list[Any]]) -> str:
    cells = [header, *([_cell(one, name) for one, name in zip(row, header, strict=True)] for row in rows[:_SHOWN])]
    widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = len(rows) - _SHOWN
    if more > 0:
        lines.append(f"... and {more:,} more: --output FILE.csv writes all")
    return "\n".join([*lines, *(f"note: {note}" for note in data.notes)])


def _cell(value: Any, name: str) -> str:
    if name == "probability":
        return percent(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write(path: str, save: Callable[[io.BytesIO], object]) -> None:
    raw = io.BytesIO()
    save(raw)
    replace_file(path, lambda file: file.write(raw.getvalue()), "predict")


def _classes(trainer: mlc.Trainer, found: Any) -> Any:
    """The class of every prediction; 0 or 1 where every output is a yes or no of its own."""
    model = trainer.model
    found = without_pixel(found)
    if found.ndim < 2 or found.shape[1] == 1 or model.is_on_logits:
        return (found > (0.0 if model.is_on_logits else 0.5)).astype(np.int64)
    return found.argmax(axis=model.class_axis("--classes"))


def _continued(args: argparse.Namespace, trainer: mlc.Trainer, preprocessing: TextPreprocessing) -> Answer:
    """How a text goes on; the model reads the last characters, as many as it was trained with."""
    if args.prompt is None and args.data is None:
        raise DataError(f"{args.model}: writes a text on", fix="say how it begins: --prompt TEXT, or a text file")
    prompt = args.prompt if args.prompt is not None else read_file(args.data, preprocessing.encoding).rstrip("\n")
    tokens = preprocessing.encode(prompt, args.data or "--prompt")
    if not len(tokens):
        raise DataError("--prompt: is empty", fix="give at least one character")
    for _ in range(args.count):
        read = tokens[-preprocessing.length :]
        padded = np.zeros((1, preprocessing.length), np.int64)
        padded[0, : len(read)] = read
        tokens = np.append(tokens, trainer.predict(padded)[0, len(read) - 1].argmax())
    text = preprocessing.decode(tokens)
    shown = tokens[-args.count - preprocessing.length :]  # of a long beginning what the model has read of it
    shortened = "…" * (len(shown) < len(tokens)) + preprocessing.decode(shown)
    if args.output is not None:
        replace_file(args.output, lambda file: file.write(text.encode("utf-8")), "predict")
    return Answer(shortened, {"text": text})
