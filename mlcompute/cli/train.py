"""mlcompute train: train a model with progress, keep checkpoints, write a report."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.cli import datasets, models, run_choice, trainers
from mlcompute.cli.answer import INTERRUPTED, TERMINATED, Answer, fitted, summary_of
from mlcompute.cli.arguments import count
from mlcompute.cli.recipes import RECIPES
from mlcompute.cli.streams import stop_showing
from mlcompute.errors import DataError, ExecutionError
from mlcompute.runs.folders import clear
from mlcompute.trainer.last_batch import CHOICES
from mlcompute.trainer.progress import described
from mlcompute.trainer.signals import Interrupted, Terminated

#: What a recipe uses when nothing else is said.
BATCH, RATE = 64, 0.001
EXAMPLES = (
    "mlcompute train cnn --epochs 10 --report",
    "mlcompute train mlp --data fashion-mnist/",
    "mlcompute train net.py --epochs 20 --resume",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train, on what, how long, and where it goes."""
    parser.add_argument("model", help=trainers.HELP)
    parser.add_argument("--data", metavar="PATH", help=datasets.HELP)
    parser.add_argument("--epochs", type=count, default=5, metavar="N", help="times to go through the data (5)")
    parser.add_argument("--batch", type=count, metavar="N", help=f"samples per step of a recipe ({BATCH})")
    parser.add_argument("--rate", type=float, metavar="R", help=f"learning rate of a recipe ({RATE})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for weights, dropout, order of data (0)")
    parser.add_argument(
        "--last-batch",
        choices=CHOICES,
        default="smaller",
        help="a last batch with fewer samples is run as it is, filled up, or left out (smaller)",
    )
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), help="where it runs (cpu)")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="where checkpoints and report go (the next one of runs/0001-MODEL, runs/0002-MODEL ...)",
    )
    before = parser.add_mutually_exclusive_group()
    before.add_argument(
        "--resume", nargs="?", const="", metavar="FILE", help="go on from a checkpoint (the last one of the newest run)"
    )
    before.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    parser.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="write an HTML report (report.html in the folder)"
    )
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write event files for TensorBoard")


def run(args: argparse.Namespace) -> Answer:
    """Train; the best and the last checkpoint stay in the folder."""
    _expect_no_recipe_options(args)
    resume, folder = run_choice.chosen(args.model, args.out, args.resume, args.overwrite)
    with _saying("nothing was trained yet" + (f", {resume} is as it was" if resume else "; start it again")):
        mlc.Platform.set_rng_seed_to(args.seed)
        device = models.device_named(args.device or "cpu")
        rate = RATE if args.rate is None else args.rate
        trainer, data = trainers.trainer_and_data(args.model, args.data, args.batch or BATCH, rate, device)
        if args.device and trainer.device.actual_device_type != device.actual_device_type:
            raise DataError(
                f"{args.model}: its Trainer runs on {trainer.device.actual_device_type.name.lower()}",
                fix="give mlc.Trainer(...) a device in build(), or leave --device out",
            )
        validation = None if data.x_test is None else (data.x_test, data.y_test)
        if not args.json:
            held_out = "" if validation is None else f", {len(data.x_test):,} for validation"
            samples = f"{len(data.x):,} samples{held_out}"
            with _needing_a_reader("train with the output going to a file"):
                print(fitted(f"{data.name}: {samples}\n{summary_of(trainer.training)}\n"), flush=True)
    with run_choice.made(args.model, folder) as out:
        given = {"model": args.model, "seed": args.seed, "last_batch": args.last_batch}
        run = mlc.Run(
            Path(args.model).stem, folder=out, parameters=given, data=_data_facts(data, args.data), command=args.typed
        )
        with run:
            return _train(args, trainer, data, validation, resume, run)


def _train(
    args: argparse.Namespace,
    trainer: mlc.Trainer,
    data: datasets.Dataset,
    validation: Any,
    resume: Path | None,
    run: mlc.Run,
) -> Answer:
    """Train into a folder."""
    last, best, page = run.last, run.best_checkpoint, run.report
    if resume is not None and args.report is None and page.exists():
        args.report = ""  # the report of the run so far would be out of date
    args.out = str(run.folder)
    trainer.resume_hint = _command(args, args.epochs)
    answer: dict[str, Any] = {"model": args.model, "data": data.name, "checkpoint": str(last)}
    try:
        # An epoch is saved before it is told of.
        with _needing_a_reader(f"go on with: {trainer.resume_hint}"):
            history = trainer.fit(
                data.x,
                data.y,
                epochs=args.epochs,
                validation=validation,
                shuffle_seed=args.seed,
                last_batch=args.last_batch,
                callbacks=[
                    *_callbacks(args, last, None if validation is None else best, _steps(trainer, data) * args.epochs),
                    run,
                ],
                resume=resume,
                checkpoint=last,
                verbose=0 if args.json else "auto",
            )
    except (Interrupted, Terminated) as stopped:  # fit has said where the state is, and how to go on
        code = TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
        run.end("stopped", trainer.history.stopped)
        answer |= {"checkpoint": stopped.path, "stopped": trainer.history.stopped, "go_on_with": trainer.resume_hint}
        return Answer("", answer, code=code)
    final = {name: values[-1] for name, values in history.history.items() if values}
    answer |= final
    lines = ["", described(final), f"checkpoint  {last}"]
    if validation is not None:
        lines.append(f"best        {best}")
        answer["best"] = str(best)
    if args.report is not None:
        report = Path(args.report) if args.report else page
        with _saying(f"training is complete and saved in {last}, the report is missing"):
            write_report(report, trainer, data, history)
        lines.append(f"report      {report}")
        answer["report"] = str(report)
    lines.append(f"go on with  {_command(args, 2 * args.epochs)}")
    return Answer("\n".join(lines), answer)


def _data_facts(data: datasets.Dataset, path: str | None) -> dict[str, Any]:
    """What the run learns from, for its record."""
    x, y = np.asarray(data.x), np.asarray(data.y)
    facts: dict[str, Any] = {"name": data.name, "path": None if path is None else str(Path(path).resolve())}
    facts |= {"samples": len(x), "validation": 0 if data.x_test is None else len(data.x_test)}
    facts |= {"shape": x.shape[1:], "type": str(x.dtype)}
    if y.ndim == 1 and y.dtype.kind in "iu":
        facts["classes"] = data.class_count
    return facts


def _expect_no_recipe_options(args: argparse.Namespace) -> None:
    """A file decides for itself; options that would change nothing are refused."""
    given = [f"--{name}" for name in ("batch", "rate") if getattr(args, name) is not None]
    if given and args.model not in RECIPES:
        raise DataError(f"{args.model}: only recipes have {' and '.join(given)}", fix="set it in build()")


def _steps(trainer: mlc.Trainer, data: datasets.Dataset) -> int:
    return -(-len(data.x) // trainer.model.feed.batch)


def _callbacks(args: argparse.Namespace, last: Path, best: Path | None, steps: int) -> list[Any]:
    callbacks = mlc.callbacks
    used: list[Any] = [_Replaces(last.parent)] if args.overwrite else []
    used += [callbacks.ModelCheckpoint(_literal(last)), callbacks.TerminateOnNaN()]
    if best is not None:
        used.append(callbacks.ModelCheckpoint(_literal(best), monitor="val_loss", save_best_only=True))
    if args.report is not None:  # a watched step takes longer: no more of them than the report shows
        used.append(callbacks.GradientWatch(every=max(1, steps // 64)))
    if args.tensorboard:
        used.append(callbacks.TensorBoard(args.tensorboard))
    return used


class _Replaces(mlc.callbacks.Callback):
    """Removes the earlier run when everything that could be refused has been looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, logs: Any) -> None:
        clear(self.folder)


def _literal(path: Path) -> str:
    """ModelCheckpoint fills in what stands in braces; a folder may have some of its own."""
    return str(path).replace("{", "{{").replace("}", "}}")


@contextlib.contextmanager
def _saying(text: str) -> Iterator[None]:
    """Ctrl-C in here says what it leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(text) from None


@contextlib.contextmanager
def _needing_a_reader(fix: str) -> Iterator[None]:
    """Training that writes into a pipe nobody reads any more ends as other programs do, but says what was lost."""
    try:
        yield
    except BrokenPipeError:
        stop_showing()
        raise ExecutionError("nobody reads the output any more: training was stopped", fix=fix) from None


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


#: Options that a resumed run must be given again.
_KEPT = ("data", "batch", "rate", "seed", "last_batch", "device", "out", "tensorboard")


def _command(args: argparse.Namespace, epochs: int) -> str:
    """What to type to go on: this command, with all that was not left at its default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["mlcompute", "train", args.model, "--epochs", str(epochs)]
    for name in _KEPT:
        value = getattr(args, name)
        if value != parser.get_default(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if args.report is not None:
        words += ["--report", args.report] if args.report else ["--report"]
    return shlex.join([*words, "--resume"])
