"""Learning-rate schedules: the rate as a function of the number of the step alone, so there is nothing to save."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlcompute.errors import DataError
from mlcompute.foreign_names import no_member
from mlcompute.layers.arguments import real


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

    def __post_init__(self) -> None:
        _expect_numbers(self)
        _expect("Step", "every", self.every, self.every >= 1, "1 epoch or more")
        _expect("Step", "factor", self.factor, 0.0 <= self.factor < math.inf, "a number, 0 or more")

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

    def __post_init__(self) -> None:
        _expect_numbers(self)
        _expect("Cosine", "steps", self.steps, self.steps is None or self.steps >= 1, "1 step or more, or None")
        _expect("Cosine", "final", self.final, 0.0 <= self.final < math.inf, "a learning rate, 0 or more")
        _expect("Cosine", "warmup", self.warmup, self.warmup >= 0, "0 steps or more")

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

    def __post_init__(self) -> None:
        _expect_numbers(self)
        _expect("OneCycle", "maximum", self.maximum, 0.0 < self.maximum < math.inf, "a learning rate, more than 0")
        _expect("OneCycle", "steps", self.steps, self.steps is None or self.steps >= 1, "1 step or more, or None")
        _expect("OneCycle", "rising", self.rising, 0.0 <= self.rising <= 1.0, "a share of the steps, 0 to 1")
        for name, value in (("divide", self.divide), ("final_divide", self.final_divide)):
            _expect("OneCycle", name, value, 0.0 < value < math.inf, "a number, more than 0")

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


def _expect_numbers(schedule: Schedule) -> None:
    for name, value in vars(schedule).items():
        if value is not None or name != "steps":
            real(f"schedules.{type(schedule).__name__}", name, value)


def _expect(schedule: str, name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:  # NaN fits nowhere
        raise DataError(f"schedules.{schedule}: {name} is {value}", expected=expected)


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> None:
        raise no_member(__name__, name, ("Cosine", "OneCycle", "Schedule", "Step"))
