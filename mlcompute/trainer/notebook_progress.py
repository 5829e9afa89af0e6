"""Progress in a notebook: one output that changes in place, with curves while training; no widgets needed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from mlcompute.seeing.notebook import curves_html
from mlcompute.trainer.progress import Lines, described

#: Seconds between two updates of the line, and of the curves.
_PAUSE, _CURVES = 0.25, 1.0
#: Lines that are kept: every update sends all of them to the page.
_MOST_LINES = 100


class NotebookProgress(Lines):
    """A bar and a line, and curves from the second epoch on; at the end one line, and those of the epochs unfolded."""

    def __init__(self) -> None:
        super().__init__(self._add)
        self._told: list[str] = []
        self._rows: dict[str, list[float]] = {}
        self._handle: Any = None
        self._line, self._share, self._curves = "", 0.0, ""
        self._shown = self._drawn = 0.0

    def begin(self, epochs: int, steps: int | None, first_epoch: int, first_step: int) -> None:
        self._begun, self._steps = time.perf_counter(), steps
        self._handle = importlib.import_module("IPython.display").display(self, display_id=True)
        super().begin(epochs, steps, first_epoch, first_step)

    def epoch_begins(self, epoch: int, first_step: int) -> None:
        self._epoch, self._epoch_begun = epoch, time.perf_counter()

    def step(self, done: int, samples: int, logs: Callable[[], Mapping[str, float]]) -> None:
        now = time.perf_counter()
        if now - self._shown < _PAUSE:
            return
        part = done / self._steps if self._steps else 0.0
        self._share = (self._epoch + part) / self._epochs
        steps = f"step {done:,}" + (f" of {self._steps:,}" if self._steps else "")
        rate = samples / max(now - self._epoch_begun, 1e-9)
        self._line = f"epoch {self._epoch + 1}/{self._epochs} · {steps} · {described(logs())} · {rate:,.0f} samples/s"
        self._show(now)

    def epoch_ends(self, epoch: int, logs: Mapping[str, float], seconds: float, samples: int) -> None:
        for name, value in logs.items():
            self._rows.setdefault(name, []).append(float(value))
        self._share = (epoch + 1) / self._epochs
        now = time.perf_counter()
        if len(next(iter(self._rows.values()), [])) > 1 and now - self._drawn > _CURVES:
            self._curves, self._drawn = curves_html(self._rows), now
        super().epoch_ends(epoch, logs, seconds, samples)

    def close(self) -> None:
        if self._handle is None:
            return
        done, seconds = len(next(iter(self._rows.values()), [])), time.perf_counter() - self._begun
        last = {name: values[-1] for name, values in self._rows.items()}
        self._line = f"{done} epoch{'' if done == 1 else 's'} in {seconds:.1f} s · {described(last)}"
        self._curves = ""  # the history has them, and is what the cell shows if nothing else is
        self._show(time.perf_counter())

    def _add(self, text: str) -> None:
        self._told.append(text)
        if self._handle is not None and time.perf_counter() - self._shown > _PAUSE:
            self._show(time.perf_counter())

    def _show(self, now: float) -> None:
        self._shown = now
        self._handle.update(self)

    def __repr__(self) -> str:
        return self._lines() or self._line

    def _lines(self) -> str:
        earlier = len(self._told) - _MOST_LINES
        first = [f"... {earlier:,} earlier lines: history.epochs has all numbers"] if earlier > 0 else []
        return "\n".join([*first, *self._told[-_MOST_LINES:]])

    def _repr_html_(self) -> str:
        told = escape(self._lines())
        lines = f"<details><summary>epochs</summary><pre>{told}</pre></details>" if told else ""
        bar = f'<progress value="{self._share:.4f}" max="1" style="width:220px;vertical-align:middle"></progress>'
        return f"<div>{bar} {escape(self._line)}</div>{self._curves}{lines}"
