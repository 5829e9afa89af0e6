"""mlc.report(...): an HTML page about a graph and its training that needs no network."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.runs import Evaluation, Run
    from mlcompute.seeing.profile import GraphProfile


def report(
    path: str | PathLike[str],
    graph: Graph,
    history: object = None,
    profile: GraphProfile | None = None,
    *,
    title: str = "",
    run: Run | None = None,
    evaluation: Evaluation | None = None,
) -> Path:
    """Write one self-contained HTML page about a graph: its layers, memory, time, and how it learned. Gives the path.

    graph    any graph; memory and kernels are shown once it is compiled
    history  curves: a mapping of names to lists of numbers, or an object with such lists (a Trainer's or Keras's
             history); gradient norms per layer under a name with "grad" in it
    profile  what graph.profile(...) gave
    title    the heading; by default what kind of graph it is
    run      the mlc.Run it belongs to: hyperparameters, data, versions, time and the memory of the process
    evaluation  mlc.Evaluation.of(trainer, x, y): confusion matrix and the worst mistakes, as pictures where they are

    The page works offline, in light and dark; without JavaScript everything but pointing at things still works.
    Long graphs and long trainings are summed up: the page stays below a few hundred kilobytes.
    """
    from mlcompute.foreign_names import instead_of_graph
    from mlcompute.graph import Graph as GraphClass
    from mlcompute.saving.atomic import write_text
    from mlcompute.seeing.notebook import ReportPath
    from mlcompute.seeing.profile import GraphProfile as ProfileClass
    from mlcompute.seeing.report_page import report_page

    if not isinstance(graph, GraphClass):
        raise TypeError(f"report: graph must be a Graph, not {instead_of_graph(graph)}")
    if profile is not None and not isinstance(profile, ProfileClass):
        raise TypeError(f"report: profile must be what graph.profile() gives, not {type(profile).__name__}")
    return ReportPath(
        write_text(Path(path), report_page(graph, history, profile, title, run, evaluation).html(), "report")
    )
