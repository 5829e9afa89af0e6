"""Learning-rate schedules: the rate as a function of the number of the step alone, so there is nothing to save."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from mlcompute.errors import DataError


@dataclass(frozen=True)
class Length:
    """How long a run is: what a schedule may stretch itself to.

    steps_per_epoch  None when the data does not tell how many there are
    """

    epochs: int
    steps_per_epoch: int | None

    @property
    def steps(self) -> int:
        """All steps of the run."""
        if self.steps_per_epoch is None:
            raise DataError(
                "a schedule needs the number of steps, which this data does not tell",
                fix="give the schedule its length in steps, or feed data with a length",
            )
        return self.epochs * self.steps_per_epoch


class Schedule(ABC):
    """Gives the learning rate of every step. Used with `LearningRateScheduler`."""

    @abstractmethod
    def rate(self, step: int, start: float, length: Length) -> float:
        """The rate of step `step` (0 is the first); `start` is the optimizer's rate when training began."""


@dataclass(frozen=True)
class Step(Schedule):
    """start * factor^(epoch // every): a lower rate every few epochs."""

    every: int
    factor: float = 0.1

    def rate(self, step: int, start: float, length: Length) -> float:
        """Constant within an epoch."""
        if length.steps_per_epoch is None:
            raise DataError("schedules.Step: this data does not tell how many steps an epoch has")
        return float(start * self.factor ** (step // length.steps_per_epoch // self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the start (after a linear warm-up from 0) down to `final`.

    steps   over how many steps; None: to the end of the run
    warmup  how many steps the rate first rises over
    """

    steps: int | None = None
    final: float = 0.0
    warmup: int = 0

    def rate(self, step: int, start: float, length: Length) -> float:
        """`final` once it is over."""
        total = length.steps if self.steps is None else self.steps
        if step < self.warmup:
            return start * (step + 1) / self.warmup
        done = min((step - self.warmup) / max(total - self.warmup, 1), 1.0)
        return self.final + (start - self.final) * (1.0 + math.cos(math.pi * done)) / 2.0


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up from maximum / divide to `maximum`, then down to that start / final_divide, both along half a cosine.

    steps   over how many steps; None: the whole run
    rising  the share of the steps that goes up
    """

    maximum: float
    steps: int | None = None
    rising: float = 0.3
    divide: float = 25.0
    final_divide: float = 1e4

    def rate(self, step: int, start: float, length: Length) -> float:
        """The optimizer's own rate does not count."""
        total = length.steps if self.steps is None else self.steps
        low = self.maximum / self.divide
        top = self.rising * total - 1.0
        if step <= top:
            return _along_cosine(low, self.maximum, step / top if top > 0 else 1.0)
        done = min((step - top) / max(total - 1.0 - top, 1e-12), 1.0)
        return _along_cosine(self.maximum, low / self.final_divide, done)


def _along_cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1.0 + math.cos(math.pi * done)) / 2.0
