"""The learning rate while training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlcompute.errors import DataError
from mlcompute.trainer.callbacks.callback import Callback, Logs
from mlcompute.trainer.schedules import Schedule


class LearningRateScheduler(Callback):
    """Set the learning rate by a schedule, step by step, or by a function of (epoch, rate), epoch by epoch.

    >>> import mlcompute as mlc
    >>> cosine = mlc.callbacks.LearningRateScheduler(mlc.schedules.Cosine(final=1e-5, warmup=100))
    >>> halves = mlc.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    """

    def __init__(self, schedule: Schedule | Callable[[int, float], float]) -> None:
        if not isinstance(schedule, Schedule) and not callable(schedule):
            raise TypeError(f"LearningRateScheduler: needs a Schedule or a function, not {type(schedule).__name__}")
        self.schedule = schedule
        self._start = 0.0

    def on_train_begin(self, logs: Logs) -> None:
        self._start = self.trainer.learning_rate

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if not isinstance(self.schedule, Schedule):
            self._set(float(self.schedule(epoch, self.trainer.learning_rate)), f"epoch {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        if isinstance(self.schedule, Schedule):
            step = self.trainer.step
            self._set(self.schedule.rate(step, self._start, self.trainer.length), f"step {step}")

    def _set(self, rate: float, when: str) -> None:
        try:
            self.trainer.optimizer.schedule_rate(rate)
        except DataError as error:
            name = type(self.schedule).__name__ if isinstance(self.schedule, Schedule) else "function"
            raise DataError(
                f"LearningRateScheduler: the {name} gives {rate:g} as the learning rate of {when}",
                expected="a finite number, 0 or more",
            ) from error

    def state(self) -> dict[str, Any]:
        return {"start": self._start}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._start = float(state["start"])
