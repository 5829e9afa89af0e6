"""The live page of a training run: the report, parts of which change."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlcompute.live.news import Pace, news
from mlcompute.runs.memory import peak_memory, resident_memory
from mlcompute.seeing.figures import Figure, clock, headline, loss_figure
from mlcompute.seeing.history import Curve, Curves, read_history
from mlcompute.seeing.page import Page, policy
from mlcompute.seeing.report_page import report_page, training_sections
from mlcompute.seeing.sections import Section
from mlcompute.seeing.units import size

if TYPE_CHECKING:
    from mlcompute.runs import Run
    from mlcompute.trainer import Trainer
    from mlcompute.trainer.history import Curve as TrainedCurve
    from mlcompute.trainer.history import History

#: Parts that change while training, in this order; there from the beginning, so that the page does not jump.
_CHANGING = {"learning": "Learning", "gradients": "Gradient norms"}


class TrainingSite:
    """Shows a trainer at work; its buttons save and stop.

    trainer  what is shown; its history is copied, never held on to: the training thread goes on meanwhile
    save     called by the button: saves after the current step, and says where to; None: there is no such button
    """

    def __init__(self, trainer: Trainer, title: str, run: Run | None, save: Callable[[], str] | None) -> None:
        self.trainer = trainer
        self._save = save
        self._begun = time.monotonic()
        #: Set when nothing will change any more.
        self.over = threading.Event()
        self._stopping = False
        # All that stays the same is drawn once, before the first step.
        page = report_page(trainer.training, title=title, run=run)
        self._page = Page(page.heading, page.about, page.figures, page.sections, live="train")
        self._pace = Pace()
        self._progress: deque[tuple[float, int]] = deque([(self._begun, trainer.step)], maxlen=32)

    # The site -------------------------------------------------------------------------------------------------------

    def page(self, path: str) -> tuple[str, str] | None:
        """The whole page as it is now."""
        if path:
            return None
        page, _ = self._now()
        return page.html(), policy("train")

    def events(self, path: str) -> Iterator[str] | None:
        """News about once a second, as long as somebody looks."""
        return None if path else self._news()

    def act(self, path: str) -> str | None:
        """save, or stop."""
        if path not in ("save", "stop"):
            return None
        if not self.trainer.is_training:
            return "training has ended"
        if path == "save":
            return "saving is off here" if self._save is None else self._save()
        self._stopping = True
        self.trainer.interrupt()
        return "stopping: the step is finished and saved"

    # What changes ---------------------------------------------------------------------------------------------------

    def _news(self) -> Iterator[str]:
        told: Any = None
        while True:
            is_last = self.over.is_set() or not self.trainer.is_training
            seen = (self.trainer.step, len(self.trainer.history.epochs), self._stopping, is_last)
            if seen == told:
                yield ""
            else:
                told = seen
                with self._pace.measured():
                    page, state = self._now(is_last)
                    text = news(page, state, _CHANGING)
                yield text
            if is_last:
                return
            self.over.wait(self._pace.pause)

    def _now(self, is_over: bool | None = None) -> tuple[Page, dict[str, Any]]:
        is_over = not self.trainer.is_training if is_over is None else is_over
        curves = read_history(_copied(self.trainer.history))
        state = self._state(is_over)
        found = {part.name: part for part in training_sections(curves)}
        changing = [found.get(name) or _empty(name, title) for name, title in _CHANGING.items()]
        page = self._page
        return Page(
            page.heading,
            page.about,
            [*self._figures(curves), *page.figures],
            [*changing, *page.sections],
            score=headline(curves),
            live="train",
        ), state

    def _state(self, is_over: bool) -> dict[str, Any]:
        """One line about where it is, and how much is done."""
        trainer = self.trainer
        length = trainer.length
        total = None if length.steps_per_epoch is None else length.epochs * length.steps_per_epoch
        done = min(1.0, trainer.step / total) if total else min(1.0, trainer.epoch / length.epochs)
        now = time.monotonic()
        self._progress.append((now, trainer.step))
        then, before = self._progress[0]
        rate = (trainer.step - before) / (now - then) if now > then else 0.0
        if is_over:
            why = trainer.history.stopped
            if why and not self._stopping:
                how = f"stopped ({why})"
            else:
                how = "stopped" if why else "finished" if trainer.epoch >= length.epochs else "ended early"
            text = f"{how} after {trainer.step:,} steps"
        else:
            steps = f"step {trainer.step:,}" + (f" of {total:,}" if total else "")
            words = [f"epoch {min(trainer.epoch + 1, length.epochs)} of {length.epochs}", steps]
            if self._stopping:
                words.append("stopping")
            elif rate > 0:
                words.append(f"{rate:,.0f} steps/s" if rate >= 10 else f"{rate:.2g} steps/s")
                words += [f"{clock((total - trainer.step) / rate)} left"] if total else []
            text = " · ".join(words)
        kind = "over" if is_over else "on"
        return {"state": text, "kind": kind, "done": done, "over": is_over, "stopping": self._stopping}

    def _figures(self, curves: Curves) -> list[Figure]:
        loss, figures = loss_figure(curves), []
        if loss is not None:
            figures.append(loss)
        figures.append(Figure("time so far", clock(time.monotonic() - self._begun)))
        memory, peak = resident_memory(), peak_memory()
        if memory is not None or peak is not None:
            remark = f"{size(peak)} at most" if peak is not None else ""
            figures.append(Figure("process memory", size(memory or peak or 0), remark))
        return figures


def _empty(name: str, title: str) -> Section:
    what = "the first steps" if name == "learning" else "the first step that is watched"
    return Section(name, title, f"<p class=lead>Comes after {what}.</p>", {"charts": []} if name == "learning" else {})


def _copied(history: History) -> dict[str, Any]:
    """The numbers of this moment; the training thread adds more while they are drawn."""
    seconds = list(history.samples_per_second)
    epochs = list(history.epochs)
    return {
        "epochs": epochs,
        "samples_per_second": seconds[: len(epochs)],
        "loss": _curve(history.loss),
        "gradient_norms": {name: _curve(curve) for name, curve in list(history.gradient_norms.items())},
    }


def _curve(curve: TrainedCurve) -> Curve:
    while True:
        stride = curve.stride
        steps, values = curve.steps, curve.values
        if stride == curve.stride:  # else every second point went meanwhile
            count = min(len(steps), len(values))
            return Curve(values[:count], [float(step) for step in steps[:count]])
