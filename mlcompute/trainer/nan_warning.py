"""The warning about a NaN or infinite loss: once per run, with the layer of the first bad value."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcompute.errors import warn
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.callbacks.nan import TerminateOnNaN, find_nan_in
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.snapshot import are_finite
from mlcompute.trainer.weight_names import weight_names

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
            if are_finite(weights):
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
            where = f"{bad}. {_HOW_TO_STOP}" if bad else "the weights are finite, so look at the validation data"
            self._warn(f"Trainer.fit: the validation loss of epoch {epoch} is {loss}: {where}")

    def run_ends(self) -> None:
        """What the last update wrote shows in no loss."""
        if self._is_wanted and (bad := self._bad_weights()):
            self._warn(f"Trainer.fit: after the last step {bad}. {_HOW_TO_STOP}")

    def _first_bad_layer(self, outcome: Outcome) -> str:
        trainer = self._trainer
        trainer.training.wait()
        now = trainer.copy_weights()
        advice = "a lower learning rate or gradient clipping (OptimizerDescriptor) may help"
        try:
            for weights in (self._finite, now):
                if weights and are_finite(weights):
                    trainer.set_weights(weights)
                    finding = find_nan_in(trainer.training, outcome.batches)
                    if finding is not None and finding.origin in ("step", "input"):
                        return str(finding) if weights is self._finite else f"{finding}; {advice}"
        finally:
            trainer.set_weights(now)
        return f"{self._bad_weights() or 'the weights have grown until numbers overflow'}; {advice}"

    def _bad_weights(self) -> str:
        names, weights = weight_names(self._trainer.training), self._trainer.copy_weights()
        bad = [name for name, array in zip(names, weights, strict=True) if not are_finite([array])]
        return f"{len(bad)} of {len(names)} weights hold NaN or infinity, the first is '{bad[0]}'" if bad else ""

    def _warn(self, text: str) -> None:
        self._is_wanted = False
        warn(text)
