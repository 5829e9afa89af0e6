"""What notebooks show: curves of a history, a trainer, a layer, a program, a report inside the page."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mlcompute.seeing.table import Table, for_notebook
from mlcompute.seeing.units import shape, visible

if TYPE_CHECKING:
    from mlcompute.compiler.program import Program
    from mlcompute.layers.layer import Layer
    from mlcompute.trainer import History, Trainer

#: Colours that stand out from light and from dark paper alike; the rest takes the colour of the text around it.
_CHARTS = (
    "<style>.mlc-plots{display:flex;flex-wrap:wrap;gap:6px 26px}.mlc-plots svg{width:400px;max-width:100%;height:auto;"
    "font:12px system-ui,sans-serif}.mlc-plots text{fill:currentColor}.mlc-plots .tick{font-size:11px;opacity:.65}"
    ".mlc-plots .grid{stroke:currentColor;stroke-opacity:.14}"
    ".mlc-plots .c0{stroke:#3b82d8}.mlc-plots .c1{stroke:#d9762b}"
    ".mlc-plots polyline,.mlc-plots line{fill:none;stroke-width:2}.mlc-plots .grid{stroke-width:1}"
    ".mlc-plots circle.c0{fill:#3b82d8}.mlc-plots circle.c1{fill:#d9762b}"
    ".mlc-plots .dash:not(circle){stroke-dasharray:5 4}"
    ".mlc-plots .band{stroke:none;fill-opacity:.16}.mlc-plots .band.c0{fill:#3b82d8}.mlc-plots .bad{fill:#d9503c}"
    ".mlc-plots .lost{stroke:#d9503c;stroke-dasharray:2 3}</style>"
)


def is_notebook() -> bool:
    """Does this run in the kernel of a notebook? Asked without importing anything."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return hasattr(shell, "kernel")


def curves_html(history: object) -> str:
    """The curves of a history; empty where it has none."""
    from mlcompute.seeing.history import read_history
    from mlcompute.seeing.sections import learning_charts

    charts = learning_charts(read_history(history))
    return f'{_CHARTS}<div class="mlc-plots">{"".join(chart.svg for chart in charts)}</div>' if charts else ""


def history_html(history: History) -> str:
    """Curves, and the numbers of every epoch when they are unfolded."""
    rows = [
        [str(epoch), *(f"{row[name]:.4g}" if name in row else "" for name in history.history)]
        for epoch, row in enumerate(history.epochs, start=1)
    ]
    if not rows:
        return f"<pre>{escape(repr(history))}</pre>"
    table = Table(["epoch", *history.history], rows, frozenset(range(1, len(history.history) + 1)))
    numbers = f"<details><summary>{escape(repr(history))}</summary>{for_notebook(table.html())}</details>"
    return curves_html(history) + numbers


def trainer_html(trainer: Trainer) -> str:
    """What it trains and how, the table of layers, and how it went so far."""
    facts = {
        "minimises": ", ".join(trainer.training.losses),
        "optimizer": f"{type(trainer.optimizer).__name__}, learning rate {trainer.learning_rate:g}",
        "metrics": ", ".join(metric.name for metric in trainer.metrics),
        "device": trainer.device.actual_device_type.name,
    }
    table = Table(["Trainer", ""], [[name, fact] for name, fact in facts.items() if fact])
    layers = trainer.training.summary()
    parts = [for_notebook(table.html()), f"<details><summary>{layers.title}</summary>{layers._repr_html_()}</details>"]
    return "".join([*parts, history_html(trainer.history) if trainer.history.epochs else ""])


def layer_html(layer: Layer) -> str:
    """Its descriptor and its parameters."""
    rows = [["label", layer.label]]
    descriptor = getattr(layer, "descriptor", None)
    if descriptor is not None:
        settings = repr(descriptor).partition("(")[2].removesuffix(")")
        rows += [part.split("=", 1) for part in re.split(r", (?=\w+=)", settings) if "=" in part]
    rows += [[name, shape(slot.tensor.descriptor.shape)] for name, slot in layer.parameters.items()]
    return for_notebook(Table([type(layer).__name__, ""], rows).html())


def program_html(program: Program) -> str:
    """Its steps as printed, in a box that scrolls."""
    return f'<div style="overflow:auto;max-height:480px"><pre>{escape(visible(str(program)))}</pre></div>'


class ReportPath(type(Path())):  # type: ignore[misc]  # the kind of paths this system has
    """Where a report lies; a notebook shows the report itself."""

    def _repr_html_(self) -> str:
        try:
            text = self.read_text(encoding="utf-8")
        except OSError:
            return f"<pre>{escape(str(self))}</pre>"
        # A frame of its own: its style and script stay inside, and can reach nothing.
        style = "width:100%;height:720px;border:1px solid rgba(128,128,128,.4);border-radius:8px"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(text)}"></iframe>'
