"""A loss that is no number any more: said once in a run, with the layer where the first bad number appears."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.callbacks.nan import TerminateOnNaN, find_nan_in
from mlcompute.trainer.metrics import Array

if TYPE_CHECKING:
    from mlcompute.trainer.steps import Outcome
    from mlcompute.trainer.trainer import Trainer

#: Seconds between two copies of the weights, which are taken when an epoch begins.
_PAUSE = 1.0
_HOW_TO_STOP = (
    "Training goes on with these weights. callbacks=[mlc.callbacks.TerminateOnNaN()] stops instead, leaves the weights "
    "as they were before the bad step, and names it"
)


class NaNWarning:
    """Watches the losses that are read anyway. Where TerminateOnNaN is used, there is nothing to add."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._is_wanted = not any(isinstance(callback, TerminateOnNaN) for callback in callbacks)
        #: Weights from before the loss went bad: with the data of the bad step they show where it happens.
        self._finite: list[Array] = []
        self._taken = -math.inf

    def epoch_begins(self) -> None:
        """Keep a copy of the weights, if they are finite."""
        now = time.monotonic()
        if self._is_wanted and now - self._taken > _PAUSE:
            weights = self._trainer.copy_weights()
            if _are_finite(weights):
                self._finite, self._taken = weights, now

    def look(self, outcome: Outcome, step: int) -> None:
        """A step is over."""
        if self._is_wanted and not math.isfinite(outcome.loss):
            where = self._first_bad_layer(outcome)
            self._warn(f"Trainer.fit: the loss of step {step} is {outcome.loss}: {where}. {_HOW_TO_STOP}")

    def validated(self, loss: float, epoch: int) -> None:
        """Validation is over."""
        if self._is_wanted and not math.isfinite(loss):
            bad = self._bad_weights()
            where = bad or "the weights are finite, so look at the validation data"
            self._warn(f"Trainer.fit: the validation loss of epoch {epoch} is {loss}: {where}. {_HOW_TO_STOP}")

    def run_ends(self) -> None:
        """What the last update wrote shows in no loss."""
        if self._is_wanted and (bad := self._bad_weights()):
            self._warn(f"Trainer.fit: after the last step {bad}. {_HOW_TO_STOP}")

    def _first_bad_layer(self, outcome: Outcome) -> str:
        trainer = self._trainer
        trainer.training.wait()
        now = trainer.copy_weights()
        try:
            trainer.set_weights(self._finite or now)
            finding = find_nan_in(trainer.training, outcome.batches)
        finally:
            trainer.set_weights(now)
        if finding is not None and finding.origin in ("step", "input"):
            return str(finding)
        bad = self._bad_weights() or "the weights have grown until numbers overflow"
        return f"{bad}; a lower learning rate or gradient clipping (OptimizerDescriptor) may help"

    def _bad_weights(self) -> str:
        names, weights = self._trainer.model.weight_names(), self._trainer.copy_weights()
        bad = [name for name, array in zip(names, weights, strict=True) if not _are_finite([array])]
        return f"{len(bad)} of {len(names)} weights hold NaN or infinity, the first is '{bad[0]}'" if bad else ""

    def _warn(self, text: str) -> None:
        self._is_wanted = False
        level, frame = 2, sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "mlcompute":
            level, frame = level + 1, frame.f_back
        warnings.warn(text, RuntimeWarning, stacklevel=level)


def _are_finite(arrays: list[Array]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")
