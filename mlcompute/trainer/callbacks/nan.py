"""Stopping on NaN, with the layer it came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mlcompute import debug
from mlcompute.errors import ExecutionError
from mlcompute.layers.arguments import number_of
from mlcompute.trainer.callbacks.callback import Callback, Logs
from mlcompute.trainer.data import Batch
from mlcompute.trainer.rates import Rates, rates_of, set_rates
from mlcompute.trainer.snapshot import Snapshot, is_finite
from mlcompute.trainer.steps import repeated_step


class NaNError(ExecutionError):
    """Training met NaN or infinity. The weights are those from before the step it appeared in.

    finding  where: layer, pass and what held the bad number (see mlcompute.debug.Finding); None when a repetition
             of the steps stays finite
    step     the step of the run, 1 is the first
    """

    finding: debug.Finding | None = None
    step: int = 0


class TerminateOnNaN(Callback):
    """Stop when the loss becomes NaN or infinite, and name the first layer with a bad value.

    The bad step may be earlier than the one that shows it, since bad parameters change the next loss only. So weights
    and state are copied every `every` steps, and the data since then is kept. When the loss becomes bad, training
    returns to the copy and repeats the steps, bitwise the same, checking all values. The weights stay as they were
    before the bad step.

    raises  True: fit raises NaNError; False: fit returns, `history.stopped` says "TerminateOnNaN", and `error` is
            kept here
    """

    runs_on_every_process: ClassVar[bool] = True

    def __init__(self, every: int = 16, *, raises: bool = True) -> None:
        self.every = number_of("TerminateOnNaN", "every", every, 1)
        self.raises = raises
        self.error: NaNError | None = None
        self._copy: Snapshot | None = None
        self._since: list[tuple[Sequence[Batch], Rates]] = []

    def on_train_begin(self, logs: Logs) -> None:
        self._copy, self._since, self.error = None, [], None

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        if self._copy is None or len(self._since) >= self.every:
            if self._copy is not None and not is_finite(self.trainer.model):
                self._stop(self.trainer.step)
                return
            self._copy, self._since = Snapshot(self.trainer.model), []
        self._since.append((self.trainer.batches, rates_of(self.trainer.optimizer)))

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if not math.isfinite(logs["loss"]):
            self._stop(self.trainer.step)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # The last update of an epoch shows in no loss before validation.
        if self._since and not is_finite(self.trainer.model):
            self._stop(self.trainer.step)

    def _stop(self, step: int) -> None:
        first = step - len(self._since) + 1
        now = Snapshot(self.trainer.model)
        error = self._explain(first)
        if error is None:
            now.restore()
            finding = find_nan_in(self.trainer.training, self.trainer.batches)
            error = NaNError(
                f"training met NaN or infinity after step {step}: {finding or 'its cause is gone'}",
                fix="repeating the steps since the last copy gave finite numbers: something outside the graph changed "
                "weights or data; TerminateOnNaN(every=1) looks at every step",
            )
            error.finding = finding
        error.step = error.step or step
        self._since, self._copy = [], None
        self.error = error
        if self.raises:
            raise error
        self.trainer.stop(type(self).__name__)

    def _explain(self, first: int) -> NaNError | None:
        """Repeat the steps since the copy; the weights are left as they were before the bad one."""
        model, trainer = self.trainer.model, self.trainer
        if self._copy is None:
            return None
        self._copy.restore()
        for number, (batches, rates) in enumerate(self._since):
            before = Snapshot(model)
            set_rates(trainer.optimizer, rates)
            loss = repeated_step(model, batches)
            if math.isfinite(loss) and is_finite(model):
                continue
            before.restore()
            finding = find_nan_in(model.training, batches)
            error = NaNError(
                f"training met {finding.number if finding else 'NaN'} in step {first + number}: "
                f"{finding or 'the loss is ' + repr(loss)}",
                step=str(first + number),
                fix="the weights are those from before this step; look at its data, the learning rate, and gradient "
                "clipping (OptimizerDescriptor.applies_gradient_clipping)",
            )
            error.finding, error.step = finding, first + number
            return error
        return None


def find_nan_in(training: Any, batches: Sequence[Batch]) -> debug.Finding | None:
    """Where the first bad number of a step on these batches appears."""
    with np.errstate(all="ignore"):
        for batch in batches:
            finding = debug.find_nan(training, batch.inputs, batch.labels, batch.weights, batch_size=batch.size)
            if finding is not None:
                return finding
    return None
