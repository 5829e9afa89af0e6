"""mlcompute runs: list training runs, or compare some of them."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import mlcompute as mlc
from mlcompute.cli.answer import Answer
from mlcompute.cli.parsing import meant
from mlcompute.errors import DataError, FileError
from mlcompute.runs.comparing import best_of, comparable, compared, known_orders, ordered
from mlcompute.runs.folders import found_run, is_run, run_folders
from mlcompute.seeing.setup import value_text
from mlcompute.seeing.table import Table

EXAMPLES = (
    "mlcompute runs",
    "mlcompute runs --sort val_accuracy",
    "mlcompute runs 3 5",
    "mlcompute runs runs/0007-sweep-cnn --sort val_loss",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which ones, in which order."""
    parser.add_argument("which", nargs="*", help="a folder of runs (runs/); or runs to compare, by folder or number")
    parser.add_argument("--sort", metavar="NAME", help="by a metric, best first, or by a hyperparameter, number, ...")


def run(args: argparse.Namespace) -> Answer:
    """A table: of all runs in a folder, or of what differs between some."""
    runs = chosen_runs(args.which)
    if args.sort:
        known = known_orders(runs)
        if args.sort not in known:
            raise DataError(f"--sort {args.sort}: unknown{meant(args.sort, known)}", known=", ".join(known))
        runs = ordered(runs, args.sort)
    data = {"runs": [{"folder": str(one.folder), **one.facts, "status": one.status} for one in runs]}
    if len(args.which) > 1:
        return Answer("", data, table=_fitting(_side_by_side(runs)))
    if not runs:
        return Answer(
            f"no runs in {args.which[0] if args.which else 'runs'} yet: `mlcompute train cnn` begins one", data
        )
    lines = []
    for group in comparable(runs):
        best = best_of(group)
        if best is not None and len(group) > 1:
            name = best[0].facts.get("data", {}).get("name")
            lines.append(f"best {best[1]}{f' on {name}' if name else ''}: {best[0].folder}")
    return Answer("\n".join(["", *lines]) if lines else "", data, table=_fitting(compared(runs)))


def chosen_runs(which: list[str]) -> list[mlc.Run]:
    """The runs that were named; one name may be a folder of runs; without any, all in runs/."""
    if not which:
        return _runs_in("runs") if Path("runs").is_dir() else []
    if len(which) == 1 and Path(which[0]).is_dir() and not is_run(Path(which[0])):
        return _runs_in(which[0])
    return [mlc.Run.read(found_run(text)) for text in which]


def _runs_in(folder: str) -> list[mlc.Run]:
    """All runs of a folder; one that cannot be read is told of, and does not hide the others."""
    runs = []
    for path in run_folders(folder):
        try:
            runs.append(mlc.Run.read(path))
        except FileError as error:
            print(f"left out: {error}", file=sys.stderr)
    return runs


def _side_by_side(runs: list[mlc.Run]) -> Table:
    """A column per run: what came of them, then every hyperparameter in which they differ."""
    rows = []
    for title, columns in (
        ("", [{"status": one.status, **_of_best(one)} for one in runs]),
        ("", [one.parameters for one in runs]),
        ("data ", [one.facts.get("data", {}) for one in runs]),
        ("version of ", [one.facts.get("versions", {}) for one in runs]),
    ):
        for name in dict.fromkeys(name for column in columns for name in column if name != "notes"):
            cells = [value_text(column.get(name)) for column in columns]
            if len(set(cells)) > 1 or (title == "" and columns[0].get("status")):
                rows.append([f"{title}{name}", *cells])
    return Table(["", *(one.folder.name for one in runs)], rows, frozenset(range(1, len(runs) + 1)))


def _of_best(run: mlc.Run) -> dict[str, float]:
    return {"best epoch" if name == "epoch" else name: value for name, value in run.best.items()}


def _fitting(table: Table) -> str:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return str(table if width is None else table.within(width))
