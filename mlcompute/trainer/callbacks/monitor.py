"""Callbacks that watch one number from epoch to epoch."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.arguments import between, number_of
from mlcompute.trainer.callbacks.callback import Callback, Logs, expect_place
from mlcompute.trainer.rates import rates_of, set_rates

#: Is the watched number to fall or to rise?
Mode = Literal["auto", "min", "max"]


class Monitor(Callback):
    """Base: has the watched number become better?

    monitor    its name in the logs
    mode       "min", "max", or "auto": losses and errors are to fall, accuracies to rise; other names must say it
    min_delta  by how much it must change to count as better
    """

    runs_on_every_process: ClassVar[bool] = True

    def __init__(self, monitor: str = "val_loss", mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise DataError(f"{type(self).__name__}: mode is {mode!r}", expected="auto, min or max")
        if not isinstance(monitor, str):
            raise TypeError(f"{type(self).__name__}: monitor must be the name of a number in the logs, not {monitor!r}")
        self.monitor, self.min_delta = monitor, abs(between(type(self).__name__, "min_delta", min_delta))
        rises = mode == "max" or (mode == "auto" and self._is_to_rise())
        self._better = operator.gt if rises else operator.lt
        self._sign = 1.0 if rises else -1.0
        self.best = -math.inf if rises else math.inf

    def on_train_begin(self, logs: Logs) -> None:
        self.best = -math.inf * self._sign

    def _is_to_rise(self) -> bool:
        name = self.monitor.removeprefix("val_")
        if "acc" in name or name.startswith(("precision", "recall", "f1", "iou", "auc", "average_precision", "r2")):
            return True
        if name in ("mae", "mse", "rmse", "perplexity") or name.endswith(("loss", "error")):
            return False
        near = difflib.get_close_matches(self.monitor, ("loss", "val_loss", "accuracy", "val_accuracy"), 1)
        raise DataError(
            f"{type(self).__name__}: is {self.monitor!r} to rise or to fall?",
            fix='give mode="max" or mode="min"' + (f"; or is {near[0]!r} meant?" if near else ""),
        )

    def watched(self, logs: Logs) -> float:
        """The number; an error when there is none of that name."""
        if self.monitor not in logs:
            raise _not_in_the_logs(self, list(logs))
        return float(logs[self.monitor])

    @property
    def watches_validation(self) -> bool:
        """Is the number about the weights that validation uses, rather than those being trained?"""
        return self.monitor.startswith("val_")

    def is_better(self, value: float) -> bool:
        """Is it better than the best so far, by at least min_delta? The best is not changed."""
        return bool(self._better(value - self._sign * self.min_delta, self.best))


def expect_in_logs(
    callbacks: Sequence[Callback], names: Sequence[str], metrics: Sequence[str], validates: bool
) -> None:
    """Refuse callbacks that would look in vain for a number in the logs: before the first epoch, not after it.

    names      of the numbers that every epoch logs
    metrics    of the metrics; one of several classes logs its name with something behind it
    validates  does every number also have one of the validation, val_...?
    """
    if not all(type(one).__module__.startswith("mlcompute.") for one in callbacks):
        return  # others may put numbers into the logs
    rates = [name for name in names if name.startswith("learning_rate")]
    numbers = [*dict.fromkeys([*(name for name in names if name not in rates), *metrics])]
    every = [*numbers, *(f"val_{name}" for name in numbers if validates), *rates]

    def is_logged(name: str) -> bool:
        number = name.removeprefix("val_")
        if name != number and not validates:
            return False
        return name in every or number.startswith(("learning_rate", *metrics))

    for one in callbacks:
        if isinstance(one, ModelCheckpoint):
            for field in _fields(one.filepath):
                if field != "epoch" and (one.save_freq != "epoch" or not is_logged(field)):
                    raise _not_filled_in(one.filepath, repr(field), every if one.save_freq == "epoch" else [])
            if not one.save_best_only:
                continue
        if isinstance(one, Monitor) and not is_logged(one.monitor):
            raise _not_in_the_logs(one, every)


def _not_in_the_logs(callback: Monitor, names: Sequence[str]) -> DataError:
    fix = "monitor one of these"
    if callback.watches_validation and not any(name.startswith("val_") for name in names):
        fix = "give validation data to fit, or monitor another number"
    elif near := difflib.get_close_matches(callback.monitor, names, 1):
        fix = f"did you mean {near[0]!r}?"
    return DataError(
        f"{type(callback).__name__}: there is no {callback.monitor!r} in the logs", expected=", ".join(names), fix=fix
    )


def _fields(path: str) -> list[str]:
    """The names between braces in a path; refused where it cannot be read."""
    try:
        found = [field for _, field, _, _ in string.Formatter().parse(path) if field is not None]
    except ValueError as error:
        raise _not_filled_in(path, str(error), []) from None
    return [re.split(r"[.\[]", field)[0] for field in found]


def _not_filled_in(path: str, why: str, names: Sequence[str]) -> DataError:
    known = ", ".join(["epoch", *names])
    return DataError(f"ModelCheckpoint: {path!r} cannot be filled in: {why}", expected=known)


class EarlyStopping(Monitor):
    """Stop when the watched number has not become better for `patience` epochs. As in Keras.

    baseline              what it must beat to begin with
    restore_best_weights  put back the weights of the best epoch at the end: those that `monitor` was measured with, the
                          averages where ExponentialMovingAverage validates
    start_from_epoch      do not look at earlier epochs
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = number_of("EarlyStopping", "patience", patience)
        self.baseline, self.start_from_epoch = baseline, start_from_epoch
        self.restore_best_weights = restore_best_weights
        self._forget()

    def _forget(self) -> None:
        self.wait, self.best_epoch, self.stopped_epoch = 0, -1, -1
        self._weights: list[Any] = []

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._forget()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.watched(logs)
        if epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and not self._weights:
            self._weights = self._judged_weights()  # if nothing is ever better, the first epoch is the best
        self.wait += 1
        if self.is_better(value):
            self.best, self.best_epoch = value, epoch
            if self.restore_best_weights:
                self._weights = self._judged_weights()
            if self.baseline is None or self._better(value, self.baseline):
                self.wait = 0
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop(type(self).__name__)

    def _judged_weights(self) -> list[Any]:
        """Those the watched number is about."""
        return self.trainer.copy_weights(evaluated=self.watches_validation)

    def on_train_end(self, logs: Logs) -> None:
        if self.restore_best_weights and self._weights:
            self.trainer.set_final_weights(self._weights)

    def state(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "wait": self.wait,
            "best_epoch": self.best_epoch,
            "stopped_epoch": self.stopped_epoch,
            "weights": self._weights,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.wait = float(state["best"]), int(state["wait"])
        self.best_epoch, self.stopped_epoch = int(state["best_epoch"]), int(state["stopped_epoch"])
        self._weights = [np.array(array) for array in state["weights"]]


class ReduceLROnPlateau(Monitor):
    """Multiply the learning rate by `factor` when the watched number has not become better for `patience` epochs.

    cooldown  epochs to wait after a change before counting again
    min_lr    the rate does not go below it
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 <= factor < 1:
            raise DataError(f"ReduceLROnPlateau: factor is {factor}", expected="0 <= factor < 1")
        self.patience = number_of("ReduceLROnPlateau", "patience", patience)
        self.factor, self.cooldown, self.min_lr = factor, cooldown, min_lr
        self.wait = self.cooling = 0

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self.wait = self.cooling = 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.watched(logs)
        if self.cooling > 0:
            self.cooling -= 1
            self.wait = 0
        if self.is_better(value):
            self.best, self.wait = value, 0
        elif self.cooling <= 0:
            self.wait += 1
            rates = rates_of(self.trainer.optimizer)
            if self.wait >= self.patience and any(rate is not None and rate > self.min_lr for rate in rates):
                lower = [None if rate is None else min(rate, max(rate * self.factor, self.min_lr)) for rate in rates]
                set_rates(self.trainer.optimizer, lower)
                self.cooling, self.wait = self.cooldown, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "cooling": self.cooling}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.wait, self.cooling = float(state["best"]), int(state["wait"]), int(state["cooling"])


class ModelCheckpoint(Monitor):
    """Save the whole state of the run after every epoch, or after the best ones only. As in Keras.

    filepath        may name numbers of the epoch: "run-{epoch:02d}-{val_loss:.3f}.safetensors"; epochs count from 1.
                    Without them the file is replaced: the last (or best) checkpoint
    save_best_only  only when `monitor` has become better
    save_freq       "epoch", or a number of steps

    The file holds everything an exact resume needs, the state of all callbacks after this epoch included. Its weights
    are those that were validated: the averages where ExponentialMovingAverage validates, the weights being trained
    beside them.
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: Mode = "auto",
        save_freq: int | str = "epoch",
    ) -> None:
        super().__init__(monitor, mode)
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise DataError(f"ModelCheckpoint: save_freq is {save_freq!r}", expected='"epoch" or a number of steps')
        if save_best_only and save_freq != "epoch":
            raise DataError("ModelCheckpoint: what is best is known after an epoch only", fix="leave save_freq out")
        if not isinstance(filepath, (str, os.PathLike)):
            raise TypeError(f"ModelCheckpoint: filepath must be the name of a file, not {filepath!r}")
        self.filepath, self.save_best_only, self.save_freq = os.fspath(filepath), save_best_only, save_freq

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        if "{" not in os.path.dirname(self.filepath):
            expect_place("ModelCheckpoint", self.filepath, "last.safetensors")

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        # The step before this one is over, and the callbacks have seen it: its state is what is saved.
        if self.save_freq != "epoch" and self.trainer.step and self.trainer.step % int(self.save_freq) == 0:
            self.trainer.save_when_settled(self._path(self.trainer.epoch, {}))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.save_freq != "epoch":
            if self.trainer.step % int(self.save_freq) == 0:  # perhaps the last step: no other will begin
                self.trainer.save_when_settled(self._path(epoch, logs))
            return
        if self.save_best_only:
            value = self.watched(logs)
            if not self.is_better(value):
                return
            self.best = value
        # The best checkpoint holds the weights that were found best; any other those that validation would use.
        evaluated = self.watches_validation or not self.save_best_only
        self.trainer.save_when_settled(self._path(epoch, logs), evaluated=evaluated)

    def _path(self, epoch: int, logs: Logs) -> str:
        try:
            return self.filepath.format(epoch=epoch + 1, **logs)
        except (KeyError, IndexError, ValueError) as error:
            raise _not_filled_in(self.filepath, str(error), list(logs)) from None

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best = float(state["best"])
