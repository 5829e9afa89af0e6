"""mlcompute train: train a model with progress, keep checkpoints, write a report."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.cli import datasets, models, run_choice, trainers
from mlcompute.cli.answer import INTERRUPTED, TERMINATED, Answer, fitted, summary_of
from mlcompute.cli.arguments import count, setting
from mlcompute.cli.recipes import RECIPES
from mlcompute.cli.streams import stop_showing
from mlcompute.data.text_file import TextPreprocessing
from mlcompute.errors import DataError, ExecutionError
from mlcompute.runs.folders import clear
from mlcompute.saving import Checkpoint
from mlcompute.trainer.last_batch import CHOICES
from mlcompute.trainer.progress import described
from mlcompute.trainer.signals import Interrupted, Terminated

EXAMPLES = (
    "mlcompute train cnn --epochs 10 --report",
    "mlcompute train tabular --data houses.csv --target price",
    "mlcompute train resnet --data photos/ --size 64 --augment flip,crop=4",
    "mlcompute train net.py --epochs 20 --resume",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train, on what, how long, and where it goes."""
    parser.add_argument("model", help=trainers.HELP)
    datasets.add_arguments(parser)
    parser.add_argument(
        "--epochs", type=count, metavar="N", help="times to go through the data (EPOCHS of the recipe or file; 5)"
    )
    parser.add_argument("--batch", type=count, metavar="N", help="samples per step (the recipe's)")
    parser.add_argument("--rate", type=float, metavar="R", help="learning rate (the recipe's)")
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of build(), of a recipe's or of your file's; may be given several times",
    )
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
    parser.add_argument(
        "--live",
        nargs="?",
        type=int,
        const=0,
        metavar="PORT",
        help="show it in a browser while it trains (a free port)",
    )
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write event files for TensorBoard")


def run(args: argparse.Namespace) -> Answer:
    """Train; the best and the last checkpoint stay in the folder."""
    resume, folder = run_choice.chosen(args.model, args.out, args.resume, args.overwrite)
    with _saying("nothing was trained yet" + (f", {resume} is as it was" if resume else "; start it again")):
        mlc.Platform.set_rng_seed_to(args.seed)
        device = models.device_named(args.device or "cpu")
        if resume is not None and args.rate is not None:
            _expect_same_rate(resume, args.rate)
        trainer, data, args.epochs = trainers.trainer_and_data(args, device)
        if args.device and trainer.device.actual_device_type != device.actual_device_type:
            raise DataError(
                f"{args.model}: its Trainer runs on {trainer.device.actual_device_type.name.lower()}",
                fix="give mlc.Trainer(...) a device in build(), or leave --device out",
            )
        if not args.json:
            with _needing_a_reader("train with the output going to a file"):
                print(fitted(f"{data}{_remarks(args, trainer, data)}\n\n{summary_of(trainer.training)}\n"), flush=True)
    with run_choice.made(args.model, folder) as out:
        given = {"model": args.model, "seed": args.seed, "last_batch": args.last_batch, **dict(args.set)}
        run = mlc.Run(
            Path(args.model).stem,
            folder=out,
            parameters=given,
            data=_data_facts(data, args.data),
            command=args.typed,
            overwrite=args.overwrite,
        )
        with run, _live(args, run, data, trainer) as live:
            return _train(args, trainer, data, resume, run, live)


def _expect_same_rate(resume: Path, rate: float) -> None:
    """A run goes on with the rates of its checkpoint: refuse one that would be ignored."""
    with Checkpoint(resume) as checkpoint:
        progress = checkpoint.progress
    rates = progress.get("trainer", {}).get("learning_rates", []) if isinstance(progress, dict) else []
    if rates and rate not in rates:
        raise DataError(
            f"{resume}: was saved with learning rate {rates[0]:g}, and goes on with it, not with --rate {rate:g}",
            fix="leave --rate out; in Python mlcompute.restore starts a new run from its weights, at any rate",
        )


def _remarks(args: argparse.Namespace, trainer: mlc.Trainer, data: mlc.data.Dataset) -> str:
    """What about the data is likely not meant, a line each."""
    steps = _steps(trainer, data)
    few = args.model in RECIPES and args.batch is None and len(data) >= 16 and steps < 4
    remarks = {
        "no sample is held out for validation (--validation SHARE or FILE)": not data.validation,
        f"an epoch has {steps} steps of up to {trainer.model.feed.batch} samples: try --batch 16": few,
    }
    return "".join(f"\n  {remark}" for remark, applies in remarks.items() if applies)


def _train(
    args: argparse.Namespace,
    trainer: mlc.Trainer,
    data: mlc.data.Dataset,
    resume: Path | None,
    run: mlc.Run,
    live: list[mlc.callbacks.Callback],
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
                data,
                epochs=args.epochs,
                shuffle_seed=args.seed,
                last_batch=args.last_batch,
                callbacks=[
                    *_callbacks(args, last, best if data.validation else None, _steps(trainer, data)),
                    run,
                    *live,
                ],
                resume=resume,
                checkpoint=last,
                verbose=0 if args.json else "auto",
            )
    except (Interrupted, Terminated) as stopped:  # fit has said where the state is, and how to go on
        code = TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
        run.end("stopped", trainer.history.stopped)
        answer |= {"checkpoint": stopped.path, "stopped": trainer.history.stopped, "go_on_with": trainer.resume_hint}
        text = _report(args, run, trainer, data, answer) if trainer.history.epochs else ""
        return Answer(text, answer, code=code)
    final = {name: values[-1] for name, values in history.history.items() if values}
    answer |= final
    report = _report(args, run, trainer, data, answer)
    lines = ["", described(final), *([f"but         {answer['remark']}"] if "remark" in answer else [])]
    lines.append(f"checkpoint  {last}")
    if data.validation is not None:
        lines.append(f"best        {best}")
        answer["best"] = str(best)
    lines += [report] if report else []
    used = best if data.validation is not None else last
    given = "--prompt TEXT" if isinstance(data.preprocessing, TextPreprocessing) else "FILE"
    lines.append(f"predict     mlcompute predict {shlex.quote(str(used))} {given}")
    lines.append(f"go on with  {_command(args, 2 * args.epochs)}")
    return Answer("\n".join(lines), answer)


def _report(
    args: argparse.Namespace, run: mlc.Run, trainer: mlc.Trainer, data: mlc.data.Dataset, answer: dict[str, Any]
) -> str:
    """Write down what the model gets wrong and, if it is wanted, the report; the line that says where it is."""
    with _saying(f"the state is saved in {answer['checkpoint']}, the report is missing"):
        evaluation = _evaluated(run, trainer, data)
        if evaluation is not None and evaluation.remark:
            answer["remark"] = evaluation.remark
        if args.report is None:
            return ""
        report = Path(args.report) if args.report else run.report
        _write_report(report, run, trainer, data, evaluation)
    answer["report"] = str(report)
    return f"report      {report}"


@contextlib.contextmanager
def _live(
    args: argparse.Namespace, run: mlc.Run, data: mlc.data.Dataset, trainer: mlc.Trainer
) -> Iterator[list[mlc.callbacks.Callback]]:
    """The callback that serves the live page, if it is wanted; at the end the page is told how it went."""
    if args.live is None:
        yield []
        return
    every = max(1, _steps(trainer, data) * args.epochs // 64)
    live = mlc.callbacks.Live(args.live, every, run=run, title=f"{run.name} on {data.name}")
    try:
        yield [live]
    finally:
        live.close()


def _data_facts(data: mlc.data.Dataset, path: str | None) -> dict[str, Any]:
    """What the run learns from, for its record."""
    return {"path": None if path is None else str(Path(path).resolve()), **data.summary()}


def _steps(trainer: mlc.Trainer, data: mlc.data.Dataset) -> int:
    return -(-len(data) // trainer.model.feed.batch)


def _callbacks(args: argparse.Namespace, last: Path, best: Path | None, steps: int) -> list[Any]:
    callbacks = mlc.callbacks
    used: list[Any] = [_Replaces(last.parent)] if args.overwrite else []
    used += [callbacks.ModelCheckpoint(_literal(last)), callbacks.TerminateOnNaN()]
    if best is not None:
        used.append(callbacks.ModelCheckpoint(_literal(best), monitor="val_loss", save_best_only=True))
    if args.report is not None:  # a watched step takes longer: no more of them than the report shows
        used.append(callbacks.GradientWatch(every=max(1, steps * args.epochs // 64)))
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


#: Options that a resumed run must be given again.
_KEPT = (
    "data",
    *datasets.OPTIONS,
    "batch",
    "rate",
    "seed",
    "last_batch",
    "device",
    "out",
    "live",
    "tensorboard",
    "set",
)


def _command(args: argparse.Namespace, epochs: int) -> str:
    """What to type to go on: this command, with all that was not left at its default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["mlcompute", "train", args.model, "--epochs", str(epochs)]
    for name in _KEPT:
        value = getattr(args, name)
        if value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            several = value if isinstance(value, list) else [value]
            several = [f"{one[0]}={json.dumps(one[1])}" if isinstance(one, tuple) else str(one) for one in several]
            is_alone = value is True or (name == "live" and value == 0)  # any port
            words += [option] if is_alone else [word for one in several for word in (option, one)]
    if args.report is not None:
        words += ["--report", args.report] if args.report else ["--report"]
    return shlex.join([*words, "--resume"])


def _evaluated(run: mlc.Run, trainer: mlc.Trainer, data: mlc.data.Dataset) -> mlc.Evaluation | None:
    """Confusion matrix and mistakes of a classifier on what it has not learned from, kept in the run's folder."""
    if data.validation is None:
        return None
    found = mlc.Evaluation.of(trainer, data.validation)
    if found is not None:
        found.save(run.evaluation)
    return found


def _write_report(
    path: Path, run: mlc.Run, trainer: mlc.Trainer, data: mlc.data.Dataset, evaluation: mlc.Evaluation | None
) -> None:
    """The page about a run, with the time of its steps."""
    profile, feed = None, trainer.model.feed
    if len(data) >= feed.batch and len(feed.inputs) == len(feed.labels) == 1:
        x, y = data.batch(np.arange(feed.batch))
        name, tensor = next(iter(feed.labels.items()))
        profile = trainer.training.profile({next(iter(feed.inputs)): x}, {name: _labels(y, tensor)})
    title = f"{run.name} on {data.name}"
    mlc.report(path, trainer.training, trainer.history, profile, title=title, run=run, evaluation=evaluation)


def _labels(y: Any, tensor: mlc.Tensor) -> Any:
    shape = tensor.descriptor.shape
    y = np.asarray(y)
    return np.eye(shape[-1], dtype=np.float32)[y] if y.ndim == 1 and len(shape) == 2 and y.dtype.kind in "iu" else y
