"""Learning rate schedules and ReduceLROnPlateau."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mlcompute.errors import DataError
from mlcompute.layers.arguments import real, takes_two
from mlcompute.trainer.callbacks.callback import Callback, Logs
from mlcompute.trainer.rates import Rates, rates_of, set_rates
from mlcompute.trainer.schedules import Schedule


class LearningRateScheduler(Callback):
    """Set the learning rate by a schedule, step by step, or by a function of (epoch, rate), or of the epoch alone.

    A function is called when an epoch begins. Parameter groups with a learning rate of their own, and no schedule,
    follow it from that rate; a function of the epoch alone gives all the same rate.

    >>> import mlcompute as mlc
    >>> cosine = mlc.callbacks.LearningRateScheduler(mlc.schedules.Cosine(final=1e-5, warmup=100))
    >>> halves = mlc.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    """

    runs_on_every_process: ClassVar[bool] = True

    def __init__(self, schedule: Schedule | Callable[[int, float], float] | Callable[[int], float]) -> None:
        if not isinstance(schedule, Schedule) and not callable(schedule):
            raise TypeError(f"LearningRateScheduler: needs a Schedule or a function, not {type(schedule).__name__}")
        self.schedule = schedule
        self._takes_rate = isinstance(schedule, Schedule) or takes_two(schedule)
        self._start: Rates = [0.0]

    def on_train_begin(self, logs: Logs) -> None:
        self._start = rates_of(self.trainer.optimizer)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if not isinstance(self.schedule, Schedule):
            now = rates_of(self.trainer.optimizer)
            self._set([None if rate is None else self._called(epoch, rate) for rate in now], f"epoch {epoch}")

    def _called(self, epoch: int, rate: float) -> float:
        """What the function gives."""
        function: Callable[..., Any] = self.schedule  # type: ignore[assignment]
        return real("LearningRateScheduler", "the rate", function(epoch, rate) if self._takes_rate else function(epoch))

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        if isinstance(self.schedule, Schedule):
            step, schedule, length = self.trainer.step, self.schedule, self.trainer.length
            starts = self._start
            self._set([None if rate is None else schedule.rate(step, rate, length) for rate in starts], f"step {step}")

    def _set(self, rates: Rates, when: str) -> None:
        optimizer = self.trainer.optimizer
        before = rates_of(optimizer)
        scheduled = [False, *(group.schedule is not None for group in optimizer.groups)]
        rates = [old if keeps else new for old, new, keeps in zip(before, rates, scheduled, strict=True)]
        try:
            set_rates(optimizer, rates)
        except DataError as error:
            rate = next(rate for rate in rates if rate is not None and not 0.0 <= rate <= 3e38)
            name = type(self.schedule).__name__ if isinstance(self.schedule, Schedule) else "function"
            raise DataError(
                f"LearningRateScheduler: the {name} gives {rate:g} as the learning rate of {when}",
                expected="a finite number, 0 or more",
            ) from error

    def state(self) -> dict[str, Any]:
        first, *others = self._start
        return {"start": first, "groups": others}

    def restore(self, state: Mapping[str, Any]) -> None:
        others = state.get("groups", [])
        self._start = [float(state["start"]), *(None if rate is None else float(rate) for rate in others)]


class GroupSchedules(Callback):
    """Sets the rates of parameter groups that have a schedule of their own; `fit` adds it where there are any."""

    runs_on_every_process: ClassVar[bool] = True

    def __init__(self) -> None:
        self._start: list[float] = []

    def on_train_begin(self, logs: Logs) -> None:
        own = self.trainer.learning_rate
        groups = self.trainer.optimizer.groups
        self._start = [own if group.learning_rate is None else group.learning_rate for group in groups]

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        step, length = self.trainer.step, self.trainer.length
        for group, start in zip(self.trainer.optimizer.groups, self._start, strict=True):
            if group.schedule is not None:
                group.learning_rate = group.schedule.rate(step, start, length)

    def state(self) -> dict[str, Any]:
        return {"start": self._start}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._start = [float(rate) for rate in state["start"]]
