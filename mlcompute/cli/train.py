"""mlcompute train: train a model with progress, keep checkpoints, write a report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.cli import datasets, models, trainers
from mlcompute.cli.answer import Answer, fitted
from mlcompute.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train, on what, how long, and where it goes."""
    parser.add_argument("model", help=trainers.HELP)
    parser.add_argument("--data", metavar="PATH", help=datasets.HELP)
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="times to go through the data (5)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="samples per step of a recipe (64)")
    parser.add_argument("--rate", type=float, default=1e-3, metavar="R", help="learning rate of a recipe (0.001)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for weights, dropout, order of data (0)")
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu")
    parser.add_argument("--out", metavar="FOLDER", help="where checkpoints and report go (runs/MODEL)")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="FILE", help="go on from a checkpoint (the folder's last one)"
    )
    parser.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="write an HTML report (report.html in the folder)"
    )
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write event files for TensorBoard")


def run(args: argparse.Namespace) -> Answer:
    """Train; the best and the last checkpoint stay in the folder."""
    out = Path(args.out or Path("runs") / Path(args.model).stem)
    last, best = out / "last.safetensors", out / "best.safetensors"
    resume = _resumed(args.resume, last)
    mlc.Platform.set_rng_seed_to(args.seed)
    trainer, data = trainers.trainer_and_data(
        args.model, args.data, args.batch, args.rate, models.device_named(args.device)
    )
    out.mkdir(parents=True, exist_ok=True)
    validation = None if data.x_test is None else (data.x_test, data.y_test)
    callbacks = mlc.callbacks
    used: list[Any] = [callbacks.ModelCheckpoint(last), callbacks.TerminateOnNaN()]
    if validation is not None:
        used.append(callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True))
    if args.tensorboard:
        used.append(callbacks.TensorBoard(args.tensorboard))
    if not args.json:
        samples = f"{len(data.x):,} samples" + ("" if validation is None else f", {len(data.x_test):,} to judge by")
        print(fitted(f"{data.name}: {samples}\n{trainer.training.summary()}\n"), flush=True)
    history = trainer.fit(
        data.x,
        data.y,
        epochs=args.epochs,
        validation=validation,
        shuffle_seed=args.seed,
        callbacks=used,
        resume=resume,
        checkpoint=last,
        verbose=0 if args.json else "auto",
    )
    final = {name: values[-1] for name, values in history.history.items() if values}
    lines = ["", "  ".join(f"{name} {value:.4f}" for name, value in final.items()), f"checkpoint  {last}"]
    answer: dict[str, Any] = {"model": args.model, "data": data.name, "checkpoint": str(last), **final}
    if validation is not None:
        lines.append(f"best        {best}")
        answer["best"] = str(best)
    if args.report is not None:
        report = Path(args.report) if args.report else out / "report.html"
        write_report(report, trainer, data, history)
        lines.append(f"report      {report}")
        answer["report"] = str(report)
    lines.append(f"go on with  mlcompute train {args.model} --epochs {2 * args.epochs} --resume" + _out(args))
    return Answer("\n".join(lines), answer)


def write_report(path: Path, trainer: mlc.Trainer, data: datasets.Dataset, history: Any) -> None:
    """The page about a finished run, with the time of its steps."""
    batch = trainer.model.feed.batch
    inputs = {next(iter(trainer.model.feed.inputs)): data.x[:batch]}
    profile = None
    if len(data.x) >= batch and len(trainer.model.feed.inputs) == len(trainer.model.feed.labels) == 1:
        name, tensor = next(iter(trainer.model.feed.labels.items()))
        profile = trainer.training.profile(inputs, {name: _labels(data.y[:batch], tensor)})
    mlc.report(path, trainer.training, history, profile, title=f"Training on {data.name}")


def _labels(y: Any, tensor: mlc.Tensor) -> Any:
    shape = tensor.descriptor.shape
    y = np.asarray(y)
    return np.eye(shape[-1], dtype=np.float32)[y] if y.ndim == 1 and len(shape) == 2 and y.dtype.kind in "iu" else y


def _resumed(given: str | None, last: Path) -> Path | None:
    if given is None:
        return None
    path = Path(given) if given else last
    if not path.exists():
        raise DataError(f"{path}: there is no checkpoint to go on from", fix="train without --resume first")
    return path


def _out(args: argparse.Namespace) -> str:
    parts = [f" --data {args.data}"] if args.data else []
    return "".join([*parts, f" --out {args.out}"] if args.out else parts)
