"""mlcompute report: write the report of a run again, or one page about several."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path

import mlcompute as mlc
from mlcompute.cli import models, samples
from mlcompute.cli.answer import Answer
from mlcompute.cli.runs import chosen_runs
from mlcompute.errors import DataError
from mlcompute.saving.atomic import write_text
from mlcompute.seeing.compare import compare_page
from mlcompute.seeing.page import Page
from mlcompute.seeing.report_page import report_page

EXAMPLES = ("mlcompute report runs/0001", "mlcompute report 1 2 5 --output three.html", "mlcompute report runs/")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of what, and where to."""
    parser.add_argument("runs", nargs="*", help="runs, by folder or number, or a folder of runs (runs/)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="for the page (report.html in the folder of one run; comparison.html of several)",
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")


def run(args: argparse.Namespace) -> Answer:
    """One page."""
    runs = chosen_runs(args.runs)
    if not runs:
        raise DataError("there are no runs to report on", fix="`mlcompute train cnn` begins one")
    if len(runs) == 1:
        path = Path(args.output) if args.output else runs[0].report
        page = page_of_run(runs[0])
    else:
        path = Path(args.output or "comparison.html")
        page = compare_page(runs, lambda one: _link(one, path))
    write_text(path, page.html(), "report")
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return Answer(f"report  {path}", {"report": str(path), "runs": [str(one.folder) for one in runs]})


def page_of_run(run: mlc.Run) -> Page:
    """The page about a run, from what is in its folder; timed on made-up numbers of the right shapes."""
    from mlcompute.runs import Evaluation

    graph = graph_of(run)
    profile = graph.profile(*samples.samples_for(graph, None)) if isinstance(graph, mlc.TrainingGraph) else None
    evaluation = Evaluation.load(run.evaluation) if run.evaluation.exists() else None
    return report_page(graph, run.history(), profile, title_of(run), run, evaluation)


def graph_of(run: mlc.Run) -> mlc.TrainingGraph | mlc.InferenceGraph:
    """The graph of its last checkpoint, compiled for the kind of device it was trained on, where there is one here."""
    if not run.last.exists():
        raise DataError(f"{run.folder}: has no checkpoint yet", fix="wait for the end of its first epoch")
    same = mlc.Device.gpu() if run.facts.get("device") == "gpu" else None
    return models.compiled(models.trained(str(run.last)), same or mlc.Device.cpu())


def _link(run: mlc.Run, page: Path) -> str:
    """Where a page finds the report of a run; empty where there is none."""
    if not run.report.exists():
        return ""
    return Path(os.path.relpath(run.report, page.resolve().parent)).as_posix()


def title_of(run: mlc.Run) -> str:
    """cnn on digits"""
    data = run.facts.get("data", {}).get("name")
    return f"{run.name} on {data}" if data else run.name
