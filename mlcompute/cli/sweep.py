"""mlcompute sweep: try settings, each in a process of its own, and say which is best."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlcompute.cli import train, trainers
from mlcompute.cli.answer import FAILED, INTERRUPTED, SUCCESS, TERMINATED, Answer
from mlcompute.cli.arguments import count, value_of
from mlcompute.cli.parsing import Parser, UsageError, meant
from mlcompute.cli.recipes import RECIPES, settings_of
from mlcompute.errors import DataError, ExecutionError
from mlcompute.runs.comparing import best_of, compared, ordered
from mlcompute.runs.folders import new_folder
from mlcompute.runs.processes import Processes, Stopped
from mlcompute.runs.search import Range, Rung, Settings, Space, drawn, grid, rungs
from mlcompute.runs.sweep import LOG, PLAN, Sweep
from mlcompute.seeing.setup import value_text
from mlcompute.seeing.units import number, percent

EXAMPLES = (
    "mlcompute sweep cnn --vary rate=0.001,0.003,0.01 --vary batch=32,64",
    "mlcompute sweep cnn --search random --trials 20 --vary rate=1e-4..1e-1:log --jobs 2",
    "mlcompute sweep net.py --search halving --trials 27 --epochs 27 --vary width=16..512:log --vary kind=relu,tanh",
    "mlcompute sweep cnn --vary rate=0.001,0.01 -- --data photos/ --size 64",
    "mlcompute sweep --resume runs/0007-sweep-cnn",
)
#: Options of train that a sweep decides about itself.
_OWN = {"epochs", "out", "resume", "overwrite", "report", "live", "json", "debug", "set", "help", "tensorboard"}
#: Those that `build` has to take.
_BUILT = {"batch", "rate"}
_RANGE = re.compile(r"(.+)\.\.(.+?)(:log)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is tried, how much of it, and how."""
    parser.add_argument("model", nargs="?", help=trainers.HELP)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="an option of train (rate, batch, seed ...) or an argument of build(): A,B,C or LOW..HIGH[:log]",
    )
    parser.add_argument(
        "--search",
        choices=("grid", "random", "halving"),
        help="all combinations, some at random, or many briefly and the best longer (grid; random for ranges)",
    )
    parser.add_argument("--trials", type=count, metavar="N", help="how many settings, of random and halving (10)")
    parser.add_argument(
        "--epochs", type=count, default=5, metavar="N", help="of every trial; of the last, with halving (5)"
    )
    parser.add_argument(
        "--factor", type=count, default=3, metavar="N", help="halving: one in N goes on, N times as long (3)"
    )
    parser.add_argument("--metric", default="", metavar="NAME", help="what decides (validation accuracy, else loss)")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes at a time (half the cores)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the settings that are drawn (0)")
    parser.add_argument("--out", metavar="FOLDER", help="where the runs go (the next one of runs/0001-sweep-MODEL ...)")
    parser.add_argument("--resume", metavar="FOLDER", help="go on with a sweep that was stopped")
    parser.set_defaults(rest=[])


def run(args: argparse.Namespace) -> Answer:
    """Try them; a table of all, the best first."""
    if args.resume is not None:
        if args.model or args.vary:
            raise DataError("--resume goes on with what was begun", fix="leave the model and --vary out")
        folder = Path(args.resume)
        sweep = Sweep.load(folder)
    else:
        sweep = _planned(args)
        if args.out is not None and (Path(args.out) / PLAN).exists():
            raise DataError(
                f"{args.out}: holds a sweep already",
                fix=f"mlcompute sweep --resume {shlex.quote(args.out)}, or another --out",
            )
        folder = Path(args.out) if args.out else new_folder(f"sweep-{Path(sweep.model).stem}")
        sweep.save(folder)
    jobs = min(args.jobs or max(1, (os.cpu_count() or 2) // 2), len(sweep.trials))
    if not args.json:
        print(
            f"{len(sweep.trials)} trial{'' if len(sweep.trials) == 1 else 's'} in {folder}, {jobs} at a time",
            flush=True,
        )
    code, stopped = SUCCESS, ""
    try:
        with Processes(jobs) as processes:
            _follow(sweep, folder, processes, jobs, args.json)
    except Stopped as signalled:
        code = TERMINATED if signalled.number == signal.SIGTERM else INTERRUPTED
        stopped = f"stopped; go on with: mlcompute sweep --resume {shlex.quote(str(folder))}"
    return _answer(sweep, folder, code, stopped)


def _follow(sweep: Sweep, folder: Path, processes: Processes, jobs: int, is_quiet: bool) -> None:
    """Say of every trial how it ended; where none can be trained at all, stop."""
    failures = successes = 0
    for trial, found, code in sweep.go(folder, processes):
        settings = "  ".join(f"{name} {value_text(value)}" for name, value in sweep.trials[trial].items())
        if code == SUCCESS and found is not None:
            successes += 1
            best = best_of([found], sweep.metric or None)
            result = "" if best is None else f"{best[1]} {_number(best[1], best[2])}"
        elif code in (INTERRUPTED, TERMINATED, -signal.SIGINT, -signal.SIGTERM):
            result = "stopped"
        else:
            failures += 1
            result = f"failed: {_last_line(sweep.folder_of(folder, trial) / LOG)}"
        if not is_quiet:
            print(f"{sweep.folder_of(folder, trial).name}  {settings}  {result}", flush=True)
        if failures >= max(2, jobs) and not successes:
            raise ExecutionError(
                f"the first {failures} trials failed: {_last_line(sweep.folder_of(folder, trial) / LOG)}",
                log=str(sweep.folder_of(folder, trial) / LOG),
            )


def _answer(sweep: Sweep, folder: Path, code: int, stopped: str) -> Answer:
    runs = sweep.runs(folder)
    best = best_of(runs, sweep.metric or None)
    data: dict[str, Any] = {"folder": str(folder), "trials": [one.facts for one in runs], "stopped": bool(stopped)}
    if best is None:
        return Answer(stopped or "no trial has a result", data, code=code or FAILED)
    table = compared(ordered(runs, best[1]))
    lines = ["", f"best        {best[0].folder}  ({best[1]} {_number(best[1], best[2])})"]
    lines.append(f"compare     mlcompute report {shlex.quote(str(folder))}")
    data |= {"best": str(best[0].folder), "metric": best[1], "value": best[2]}
    return Answer("\n".join([*lines, *([stopped] if stopped else [])]), data, table=f"\n{table}", code=code)


def _planned(args: argparse.Namespace) -> Sweep:
    if not args.model:
        raise DataError("no model was given", expected=trainers.HELP)
    if not args.vary:
        raise DataError("nothing varies", fix="say what: --vary rate=0.001,0.01")
    given = list(map(_read, args.vary))
    space = dict(given)
    if len(space) < len(given):
        twice = next(name for name in space if [one for one, _ in given].count(name) > 1)
        raise DataError(f"--vary {twice}: is given more than once", fix=f"give all values together: {twice}=A,B")
    parser = Parser(add_help=False)
    train.add_arguments(parser)
    options = {name.removeprefix("--").replace("-", "_") for name in parser.options()}
    for name in space:
        if name in _OWN:
            raise DataError(
                f"--vary {name}: a sweep decides about it itself", fix=f"--{name}" if name == "epochs" else ""
            )
    has_range = any(isinstance(values, Range) for values in space.values())
    search = args.search or ("random" if has_range else "grid")
    if search == "grid" and args.trials:
        raise DataError("--trials is for --search random and halving", fix="a grid tries all combinations")
    trials = _trials(search, space, args)
    stages = [Rung(len(trials), args.epochs)]
    if search == "halving":
        if args.factor < 2:
            raise DataError(f"--factor is {args.factor}", expected="2 or more")
        stages = rungs(len(trials), args.epochs, args.factor)
    _expect_known(parser, args.rest)
    _expect_settings(args.model, space, options - _OWN)
    _expect_readable(parser, [args.model, *args.rest], "")
    for name, values in space.items():
        if name in options:
            for value in (values.low, values.high) if isinstance(values, Range) else values:
                text = value if isinstance(value, str) else json.dumps(value)
                words = [args.model, f"--{name.replace('_', '-')}={text}"]
                _expect_readable(parser, words, f"--vary {name}={text}: ")
    return Sweep(args.model, trials, stages, args.rest, args.metric, sorted(options - _OWN), args.typed)


def _trials(search: str, space: Space, args: argparse.Namespace) -> list[Settings]:
    if search == "grid":
        return grid(space)
    is_finite = not any(isinstance(values, Range) for values in space.values())
    if search == "halving" and args.trials is None and is_finite:
        return grid(space)
    return drawn(space, args.trials or 10, args.seed)


def _expect_settings(model: str, names: Iterable[str], options: set[str]) -> None:
    """Refuse what neither `mlcompute train` nor the recipe or the file knows, before the first trial."""
    if model not in RECIPES:
        trainers.file_of(model).expect_taken(name for name in names if name not in options - _BUILT)
        return
    known = sorted(options | set(settings_of(model)))
    for name in names:
        if name not in known:
            near = meant(name, known)
            raise DataError(f"--vary {name}: {model} has no such setting{near}", known=", ".join(known))


def _expect_readable(parser: Parser, words: list[str], where: str) -> None:
    """Refuse what `mlcompute train` would refuse."""
    try:
        parser.parse_args(words)
    except UsageError as error:
        raise DataError(f"{where}{error}") from None


def _expect_known(parser: Parser, words: list[str]) -> None:
    known = parser.options()
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise DataError(f"mlcompute train has no option {name}{meant(name, known)}")


def _read(text: str) -> tuple[str, list[Any] | Range]:
    name, equals, values = text.partition("=")
    if not equals or not values or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise DataError(
            f"--vary {text}: is not of the form NAME=VALUES", expected="rate=0.001,0.01 or rate=1e-4..1e-1:log"
        )
    found = _RANGE.fullmatch(values)
    if found is None:
        listed = [value_of(one) for one in values.split(",")]
        return name.replace("-", "_"), [one for index, one in enumerate(listed) if one not in listed[:index]]
    low, high, log = value_of(found[1]), value_of(found[2]), bool(found[3])
    if not all(isinstance(one, (int, float)) for one in (low, high)) or not low < high or (log and low <= 0):
        above = ", above 0 for :log" if log else ""
        raise DataError(f"--vary {text}: no range", expected=f"two numbers, the smaller one first{above}")
    return name.replace("-", "_"), Range(low, high, log)


def _last_line(path: Path) -> str:
    """What a process said last that says something."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if '"message"' in line:  # an error as `--json` writes it
            return str(json.loads(line)["message"])
    return lines[-1].strip() if lines else ""


def _number(metric: str, value: float) -> str:
    return percent(value) if metric.endswith("accuracy") else number(value)
