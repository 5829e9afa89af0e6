"""Progress: a moving line on a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlcompute.errors import DataError
from mlcompute.layers.read_only import ReadOnly
from mlcompute.seeing.notebook import is_notebook

#: Seconds between two updates of the moving line.
_PAUSE = 0.1


class Display:
    """Shows nothing; the other displays add to it."""

    def begin(self, epochs: int, steps: int | None, first_epoch: int, first_step: int) -> None:
        """Training begins, or goes on at a step of an epoch. `steps` per epoch; None: nobody knows."""

    def epoch_begins(self, epoch: int, first_step: int) -> None:
        """Epoch `epoch` (0 is the first) begins, or goes on."""

    def step(self, done: int, samples: int, logs: Callable[[], Mapping[str, float]]) -> None:
        """`done` steps of the epoch are over, with so many samples since it began or went on."""

    def epoch_ends(self, epoch: int, logs: Mapping[str, float], seconds: float, samples: int) -> None:
        """The epoch is over, validation included."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """Training is over, well or not."""


class Lines(Display):
    """One line per epoch, in plain characters."""

    def __init__(self, write: Callable[[str], Any] | None = None) -> None:
        self._write = write or (lambda text: print(text, flush=True))
        self._epochs = 0

    def begin(self, epochs: int, steps: int | None, first_epoch: int, first_step: int) -> None:
        self._epochs = epochs
        if first_epoch >= epochs:
            self._write(f"all {epochs} epochs were trained before; more of them go on from there")
        elif first_epoch or first_step:
            self._write(f"resuming at epoch {first_epoch + 1}, step {first_step + 1}")

    def epoch_ends(self, epoch: int, logs: Mapping[str, float], seconds: float, samples: int) -> None:
        width = len(str(self._epochs))
        line = f"epoch {epoch + 1:>{width}}/{self._epochs}  {described(logs)}"
        took, rate = f"  {seconds:.1f} s", f"  {samples / seconds if seconds else 0:,.0f} samples/s"
        # On a narrow terminal only what fits, rather than a second line for each epoch.
        more = next((part for part in (rate + took, took) if len(line + part) <= self._width()), "")
        self._write(line + more)

    def _width(self) -> int:
        return sys.maxsize

    def note(self, text: str) -> None:
        self._write(text)


class Bar(Lines):
    """A moving line under the lines: epoch, bar, steps, loss and metrics, samples/s, remaining time."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            raise DataError(
                "Trainer: the moving line needs rich, which is not installed", fix="pip install rich, or give verbose=2"
            ) from None

        self._console = Console(soft_wrap=True, highlight=False)
        super().__init__(lambda text: self._console.print(text, markup=False))
        self._bar = 20 if self._console.width >= 100 else 10 if self._console.width >= 60 else 4
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=self._bar),
            TextColumn("{task.fields[steps]}"),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            refresh_per_second=10,
        )
        self._shown = 0.0

    can_move = ReadOnly[bool]("Does the output show moving lines: a terminal, and not a file?", "_console.is_terminal")

    def _width(self) -> int:
        return self._console.width

    def begin(self, epochs: int, steps: int | None, first_epoch: int, first_step: int) -> None:
        super().begin(epochs, steps, first_epoch, first_step)
        self._steps = steps
        total = None if steps is None else epochs * steps
        self._task = self._progress.add_task("", total=total, epoch=f"{first_epoch + 1}/{epochs}", steps="", news="")
        self._progress.start()

    def epoch_begins(self, epoch: int, first_step: int) -> None:
        self._epoch, self._begun = epoch, time.perf_counter()
        done = epoch * self._steps + first_step if self._steps is not None else 0
        steps = str(first_step) if self._steps is None else f"{first_step}/{self._steps}"
        self._progress.update(self._task, epoch=f"{epoch + 1}/{self._epochs}", completed=done, steps=steps)

    def step(self, done: int, samples: int, logs: Callable[[], Mapping[str, float]]) -> None:
        now = time.perf_counter()
        if now - self._shown < _PAUSE:
            return
        self._shown = now
        rate = samples / max(now - self._begun, 1e-9)
        steps = f"{done}/{self._steps}" if self._steps is not None else str(done)
        others = len(f"epoch {self._epochs}/{self._epochs} {steps} ") + self._bar + len(" 0:00:00 ")
        self._progress.update(
            self._task,
            completed=self._epoch * self._steps + done if self._steps is not None else done,
            steps=steps,
            news=_fitting_in(self._console.width - others, logs(), f"{rate:,.0f} samples/s"),
        )

    def close(self) -> None:
        self._progress.stop()


def described(logs: Mapping[str, float]) -> str:
    """loss 0.1234  accuracy 0.9876"""
    shown = {name: value for name, value in logs.items() if not name.startswith("learning_rate")}
    return "  ".join(
        f"{name} {value:.4f}" if abs(value) < 1e5 else f"{name} {value:.4g}" for name, value in shown.items()
    )


def _fitting_in(room: int, logs: Mapping[str, float], rate: str) -> str:
    """The loss, as many metrics as there is room for, and the rate where it fits: the bar must not be pushed out."""
    shown = dict(logs)
    while len(shown) > 1 and len(f"{described(shown)}  {rate}") > room:
        shown.popitem()
    text = described(shown)
    return f"{text}  {rate}" if len(f"{text}  {rate}") <= room else text


def display_for(verbose: int | str) -> Display:
    """Keras's meaning: 0 shows nothing, 1 a moving line, 2 one line per epoch.

    "auto" is 1 on a terminal and in a notebook, else 2.
    """
    if verbose in ("auto", 1) and not isinstance(verbose, bool) and is_notebook():
        from mlcompute.trainer.notebook_progress import NotebookProgress

        return NotebookProgress()
    if verbose == "auto":
        is_terminal = hasattr(sys.stdout, "isatty") and sys.stdout.isatty()
        is_terminal = is_terminal and os.environ.get("TERM") != "dumb"
        can_move = is_terminal and importlib.util.find_spec("rich") is not None
        if is_terminal and not can_move:
            print("one line per epoch; pip install rich for a moving one", file=sys.stderr)
        verbose = 1 if can_move else 2
    if verbose not in (0, 1, 2):
        raise DataError(f"Trainer: verbose is {verbose!r}", expected="'auto', 0 (nothing), 1 (moving line), 2 (lines)")
    if verbose == 1:
        bar = Bar()
        return bar if bar.can_move else Lines()
    return Lines() if verbose == 2 else Display()
