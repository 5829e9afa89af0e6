"""A part of a report: what was run. Hyperparameters, data, versions; of several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from mlcompute.seeing.sections import Section
from mlcompute.seeing.units import number, visible

if TYPE_CHECKING:
    from mlcompute.runs import Run

#: Of a longer list only the beginning is shown.
MOST_VALUES = 12


def setup_section(runs: Sequence[Run]) -> Section:
    """A column per run; what differs between them stands out."""
    groups = {
        "Hyperparameters": [run.parameters for run in runs],
        "Data": [_data(run, len(runs) == 1) for run in runs],
        "Run": [_circumstances(run) for run in runs],
        "Versions": [run.facts.get("versions", {}) for run in runs],
    }
    tables = "".join(_table(title, columns, runs) for title, columns in groups.items() if any(columns))
    return Section("setup", "Setup", f'<div class="{"setup" if len(runs) == 1 else "setup many"}">{tables}</div>')


def _data(run: Run, alone: bool) -> dict[str, Any]:
    """What it learned from; the lines about each column are too long to stand side by side."""
    return {name: value for name, value in run.facts.get("data", {}).items() if alone or name != "notes"}


def _circumstances(run: Run) -> dict[str, Any]:
    facts, status = run.facts, run.status
    known = {
        # A page that is written while it trains is looked at afterwards, too.
        "status": None if status == "running" else f"{status}: {facts['reason']}" if facts.get("reason") else status,
        "started": str(facts.get("started") or "").replace("T", " ")[:19],
        "device": facts.get("device"),
        "random seed": facts.get("seed"),
        "folder": str(run.folder),
        "command": facts.get("command"),
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def _table(title: str, columns: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for column in columns for name in column)
    rows = []
    for name in names:
        cells = [value_text(column.get(name)) for column in columns]
        differs = len(set(cells)) > 1
        shown = "".join(f"<td>{escape(visible(cell))}</td>" for cell in cells)
        rows.append(
            f'<tr{" class=differs" if differs else ""}><th scope="row">{escape(visible(name))}</th>{shown}</tr>'
        )
    heads = "".join(f'<th scope="col">{escape(visible(run.folder.name))}</th>' for run in runs)
    head = f'<thead><tr><th scope="col"></th>{heads}</tr></thead>' if len(runs) > 1 else ""
    return f"<div><h3>{title}</h3><div class=wide><table>{head}<tbody>{''.join(rows)}</tbody></table></div></div>"


def value_text(value: Any) -> str:
    """A fact in a cell; sentences on lines of their own."""
    if value is None:
        return "-"
    if isinstance(value, list):
        shown = [value_text(one) for one in value[:MOST_VALUES]]
        joined = ("\n" if any(" " in one for one in shown) else ", ").join(shown)
        return joined if len(value) <= MOST_VALUES else f"{len(value):,}: {joined} …"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else number(value)
