"""The page about one graph and how it was trained."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlcompute.seeing import sections
from mlcompute.seeing.figures import headline, loss_figure, model_figures, run_figures
from mlcompute.seeing.history import read_history
from mlcompute.seeing.memory import memory_timeline
from mlcompute.seeing.mistakes import mistakes_section
from mlcompute.seeing.page import Page
from mlcompute.seeing.setup import setup_section
from mlcompute.seeing.summary import main_program, summarize

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.runs import Evaluation, Run
    from mlcompute.seeing.history import Curves
    from mlcompute.seeing.profile import GraphProfile
    from mlcompute.seeing.sections import Section


def report_page(
    graph: Graph,
    history: object = None,
    profile: GraphProfile | None = None,
    title: str = "",
    run: Run | None = None,
    evaluation: Evaluation | None = None,
) -> Page:
    """Everything there is to see, as a page."""
    from mlcompute import __version__

    curves, summary, program = read_history(history), summarize(graph), main_program(graph)
    parts = training_sections(curves)
    if evaluation is not None:
        parts.insert(1 if parts else 0, mistakes_section(evaluation))
    if run is not None:
        parts.append(setup_section([run]))
    if profile is not None:
        parts.append(sections.time_section(profile))
    if program is not None:
        parts.append(sections.memory_section(memory_timeline(graph, program), summary, run))
    parts.append(sections.graph_section(graph, summary, profile))
    parts.append(sections.layers_section(summary))
    score, loss = headline(curves, evaluation), loss_figure(curves)
    figures = ([] if loss is None else [loss]) + model_figures(summary, profile, run)
    return Page(
        title or summary.title,
        [score.remark if score else "", f"mlcompute {__version__}", summary.device, time.strftime("%Y-%m-%d %H:%M")],
        [*figures, *(run_figures(run) if run is not None else [])],
        parts,
        _missing(curves, profile, program),
        score,
    )


def training_sections(curves: Curves) -> list[Section]:
    """What changes while training: curves and gradient norms."""
    parts = []
    if curves.epochs or curves.steps:
        parts.append(sections.learning_section(curves))
    if curves.gradient_norms:
        parts.append(sections.gradient_section(curves))
    return parts


def _missing(curves: object, profile: object, program: object) -> str:
    """What the page would show more of, if it were told."""
    hints = []
    if not curves:
        hints.append("loss curves and gradient norms with history=...")
    if profile is None:
        hints.append("times with profile=graph.profile(...)")
    if program is None:
        hints.append("memory once the graph is compiled")
    return f"Also available: {'; '.join(hints)}." if hints else ""
