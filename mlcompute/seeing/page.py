"""The report as one HTML document."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from html import escape
from typing import TYPE_CHECKING, Any

from mlcompute.seeing import sections
from mlcompute.seeing.history import read_history
from mlcompute.seeing.memory import memory_timeline
from mlcompute.seeing.page_script import SCRIPT
from mlcompute.seeing.page_style import STYLE
from mlcompute.seeing.summary import main_program, summarize
from mlcompute.seeing.units import visible

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.seeing.profile import GraphProfile
    from mlcompute.seeing.sections import Section


def page_of(graph: Graph, history: object, profile: GraphProfile | None, title: str) -> str:
    """The text of the page."""
    from mlcompute import __version__

    curves, summary, program = read_history(history), summarize(graph), main_program(graph)
    parts: list[Section] = []
    if curves.epochs or curves.steps:
        parts.append(sections.learning_section(curves))
    if curves.gradient_norms:
        parts.append(sections.gradient_section(curves))
    if profile is not None:
        parts.append(sections.time_section(profile))
    if program is not None:
        parts.append(sections.memory_section(memory_timeline(graph, program), summary))
    parts.append(sections.graph_section(graph, summary, profile))
    parts.append(sections.layers_section(summary))
    heading = title or summary.title
    about = [f"mlcompute {__version__}", summary.device, time.strftime("%Y-%m-%d %H:%M")]
    figures = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd><dd class=remark>{escape(remark)}</dd></div>"
        for what, value, remark in sections.key_figures(summary, curves, profile)
    )
    links = "".join(f'<a href="#{part.name}">{part.title}</a>' for part in parts)
    body = "".join(
        f'<section id="{part.name}" aria-labelledby="h-{part.name}"><h2 id="h-{part.name}">{part.title}</h2>'
        f"{part.html}</section>"
        for part in parts
    )
    data = {name: value for part in parts for name, value in part.data.items()}
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(visible(heading))}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(visible(heading))}</h1>"
        f"<p>{' · '.join(escape(one) for one in about if one)}</p>"
        f'<dl class="figures">{figures}</dl></header>'
        f'<nav aria-label="Parts of this page">{links}</nav><main>{body}</main>'
        f"<footer>{escape(_missing(curves, profile, program))}</footer>"
        f'<script type="application/json" id="data">{_embedded(data)}</script><script>{SCRIPT}</script>'
        "</body></html>\n"
    )


def _policy() -> str:
    """Nothing may be loaded, and no script but ours may run, whatever a label contains."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in, nor holds anything that cannot be shown."""
    return json.dumps(_shown(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _shown(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _shown(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_shown(value) for value in data]
    return visible(data) if isinstance(data, str) else data


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
