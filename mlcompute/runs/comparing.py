"""Several runs as a table: their results, and the hyperparameters in which they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcompute.seeing.figures import clock
from mlcompute.seeing.setup import value_text
from mlcompute.seeing.table import Table
from mlcompute.seeing.units import number, percent

if TYPE_CHECKING:
    from mlcompute.runs.run import Run

#: Metrics of which more is better; of all others less is.
_MORE_IS_BETTER = ("accuracy", "auc", "f1", "precision", "recall", "r2", "iou", "dice")
#: Hyperparameters that say nothing of their own in a table.
_UNTOLD = ("weights", "last_batch", "epochs")


def is_more_better(metric: str) -> bool:
    """Is a larger number of this metric better?"""
    return metric.endswith(_MORE_IS_BETTER)


def main_metric(runs: Sequence[Run]) -> str | None:
    """What runs are compared by: accuracy before loss, validation before training; None when nothing was measured."""
    names = dict.fromkeys(name for run in runs for name in run.best)
    wanted = [
        *(name for name in names if name.startswith("val_") and is_more_better(name)),
        *(name for name in names if is_more_better(name)),
        "val_loss",
        "loss",
    ]
    return next((name for name in wanted if name in names), None)


def best_of(runs: Sequence[Run], metric: str | None = None) -> tuple[Run, str, float] | None:
    """(run, metric, number) of the best one."""
    metric = metric or main_metric(runs)
    found = [(run.best.get(metric, math.nan), run) for run in runs] if metric else []
    found = [(value, run) for value, run in found if math.isfinite(value)]
    if not metric or not found:
        return None
    value, run = (max if is_more_better(metric) else min)(found, key=lambda pair: pair[0])
    return run, metric, value


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs together whose numbers say something about each other: the same data, target and metric."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        data, metric = run.facts.get("data", {}), main_metric([run])
        if metric is not None:
            same = (metric, *(str(data.get(fact)) for fact in ("path", "name", "target", "classes")))
            groups.setdefault(same, []).append(run)
    return list(groups.values())


def ordered(runs: Sequence[Run], by: str) -> list[Run]:
    """Sorted: the best first by a metric, the smallest first by anything else; without a number at the end."""
    if by in {name for run in runs for name in run.best}:
        sign = -1 if is_more_better(by) else 1
        keys = {run.folder: sign * run.best.get(by, math.nan) for run in runs}
    else:
        values = {run.folder: _value(run, by) for run in runs}
        return sorted(runs, key=lambda run: (values[run.folder] is None, _ordering(values[run.folder])))
    return sorted(runs, key=lambda run: (math.isnan(keys[run.folder]), keys[run.folder]))


def known_orders(runs: Sequence[Run]) -> list[str]:
    """What `ordered` can sort by."""
    names = [name for run in runs for name in (*run.best, *run.parameters)]
    return list(dict.fromkeys(["number", "name", "status", "started", "seconds", *names]))


def _value(run: Run, by: str) -> object:
    own = {"number": run.number, "name": run.name, "status": run.status}
    return own[by] if by in own else run.parameters.get(by, run.facts.get(by))


def _ordering(value: object) -> tuple[int, float, str]:
    """Numbers before words."""
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def differing(runs: Sequence[Run]) -> list[str]:
    """The hyperparameters that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    return [name for name in names if len({value_text(run.parameters.get(name)) for run in runs}) > 1]


def compared(runs: Sequence[Run]) -> Table:
    """A row per run: status, the best epoch's numbers, time, and what differs."""
    metrics = dict.fromkeys(name for run in runs for name in run.best if name not in ("epoch", "learning_rate"))
    first = main_metric(runs)
    shown = sorted(metrics, key=lambda name: (name != first, not name.startswith("val_")))[:4]
    settings = [name for name in differing(runs) if name not in _UNTOLD]
    head = ["run", "status", *shown, "epochs", "time", *settings]
    rows = [
        [
            run.folder.name,
            run.status,
            *(_metric(name, run.best.get(name, math.nan)) for name in shown),
            _epochs(run),
            clock(run.facts["seconds"]) if run.facts.get("seconds") else "-",
            *(value_text(run.parameters.get(name)) for name in settings),
        ]
        for run in runs
    ]
    numeric = set(range(2, 4 + len(shown)))
    for column, name in enumerate(settings, start=4 + len(shown)):
        if all(isinstance(run.parameters.get(name, 0), (int, float)) for run in runs):
            numeric.add(column)
    return Table(head, rows, frozenset(numeric))


def _metric(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return percent(value) if name.endswith("accuracy") else number(value)


def _epochs(run: Run) -> str:
    done, wanted = run.facts.get("epochs", 0), run.parameters.get("epochs")
    return f"{done}" if wanted in (None, done) else f"{done}/{wanted}"
