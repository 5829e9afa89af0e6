"""The page about several runs: side by side, with the same curves in one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from mlcompute.runs.comparing import best_of, comparable, compared, differing
from mlcompute.runs.evaluation import Evaluation
from mlcompute.seeing.charts import Line, condensed, line_chart
from mlcompute.seeing.figures import Figure
from mlcompute.seeing.history import Curve, Curves, read_history
from mlcompute.seeing.mistakes import MOST_CLASSES, confusion_matrix
from mlcompute.seeing.page import Page
from mlcompute.seeing.sections import Section, metric_and_part, plots
from mlcompute.seeing.setup import setup_section
from mlcompute.seeing.units import percent, visible

if TYPE_CHECKING:
    from mlcompute.runs import Run

COLOURS = 8
MOST_MATRICES = 4


def compare_page(runs: Sequence[Run], link: Callable[[Run], str], title: str = "") -> Page:
    """Several runs; `link`: the address of a page about one of them, empty where there is none."""
    histories = [read_history(run.history()) for run in runs]
    parts = [_table(runs, link)]
    learning = _learning(runs, histories)
    if learning is not None:
        parts.append(learning)
    evaluations = [(run, Evaluation.load(run.evaluation)) for run in runs if run.evaluation.exists()]
    drawn = [(run, one) for run, one in evaluations if len(one.classes) <= MOST_CLASSES]
    if 0 < len(drawn) <= MOST_MATRICES:
        parts.append(_mistakes(drawn))
    parts.append(setup_section(runs))
    alike = comparable(runs)
    best = best_of(runs) if len(alike) == 1 else None
    score = None
    if best is not None:
        run, name, value = best
        text = percent(value) if name.endswith("accuracy") else f"{value:.4g}"
        score = Figure(f"{name.replace('val_', 'validation ').replace('_', ' ')} at best, {run.folder.name}", text)
    return Page(title or f"{len(runs)} runs", [], [], parts, score=score)


def _table(runs: Sequence[Run], link: Callable[[Run], str]) -> Section:
    table = compared(runs)
    rows = []
    for run, row in zip(runs, table.rows, strict=True):
        name = escape(visible(row[0]))
        if link(run):
            name = f'<a href="{escape(link(run))}">{name}</a>'
        cells = "".join(
            f"<td{' class=n' if column in table.numeric else ''}>{escape(visible(cell))}</td>"
            for column, cell in enumerate(row[1:], start=1)
        )
        dot = f'<i class="dot d{runs.index(run) % COLOURS}"></i>'
        rows.append(f'<tr><th scope="row">{dot}{name}</th>{cells}</tr>')
    heads = "".join(
        f'<th scope="col"{" class=n" if column in table.numeric else ""}>{escape(visible(head))}</th>'
        for column, head in enumerate(table.head)
    )
    text = f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    notes = [] if differing(runs) else ["Their hyperparameters are the same."]
    notes.append("Numbers are those of the epoch with the lowest validation loss.")
    if len(comparable(runs)) > 1:
        notes.append("Not all of them learn the same from the same data: their numbers say nothing about each other.")
    note = f"<p class=lead>{' '.join(notes)}</p>"
    return Section("runs", "Runs", note + text)


def _learning(runs: Sequence[Run], histories: Sequence[Curves]) -> Section | None:
    """Per metric a chart with a line per run: of validation where there is one, else of training."""
    metrics = dict.fromkeys(metric_and_part(name)[0] for curves in histories for name in curves.epochs)
    charts = []
    for metric in metrics:
        if metric in ("learning rate", "samples per second"):
            continue
        lines = []
        for index, (run, curves) in enumerate(zip(runs, histories, strict=True)):
            found: dict[str, Curve] = {
                metric_and_part(name)[1]: curve
                for name, curve in curves.epochs.items()
                if metric_and_part(name)[0] == metric
            }
            part = "validation" if "validation" in found else ""
            if part in found:
                kind = f"c{index % COLOURS}" + (" dash" if index >= COLOURS else "")
                lines.append(Line(run.folder.name, condensed(found[part]), kind))
        is_validation = any(f"val_{metric.replace(' ', '_')}" in curves.epochs for curves in histories)
        title = f"validation {metric}" if is_validation else metric
        charts.append(line_chart(title, lines, "epoch", legend=title))
    return (
        Section("learning", "Learning", plots(charts), {"charts": [chart.data for chart in charts]}) if charts else None
    )


def _mistakes(evaluations: Sequence[tuple[Run, Evaluation]]) -> Section:
    body = "".join(
        f"<div><h3>{escape(visible(run.folder.name))}, {percent(one.accuracy)} after the last epoch</h3>"
        f"{confusion_matrix(one)}</div>"
        for run, one in evaluations
    )
    return Section("mistakes", "Mistakes", f'<div class="plots">{body}</div>')
