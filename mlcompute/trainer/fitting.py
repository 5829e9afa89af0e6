"""One call of `fit`: epochs, steps, callbacks, and stopping so that a later call goes on with the same bits."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, Error, warn
from mlcompute.group.agreement import Rows
from mlcompute.layers.arguments import real
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.callbacks.rates import GroupSchedules
from mlcompute.trainer.data import Batch, Epoch
from mlcompute.trainer.evaluation import MeanLoss, evaluate
from mlcompute.trainer.history import History
from mlcompute.trainer.last_batch import (
    expect_independent_samples,
    expect_runs,
    padded,
    short_batch,
    weights_of,
)
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.nan_warning import NaNWarning
from mlcompute.trainer.plan import Plan
from mlcompute.trainer.prefetch import StoppedError
from mlcompute.trainer.progress import Display
from mlcompute.trainer.rates import Rates, rate_logs, rates_of, set_rates
from mlcompute.trainer.resume import check_settings, go_on, settings_of, state_of_run
from mlcompute.trainer.schedules import Length
from mlcompute.trainer.signals import Interrupted, Signals, Terminated
from mlcompute.trainer.snapshot import Snapshot
from mlcompute.trainer.steps import Outcome, Steps, repeated_step
from mlcompute.trainer.together import Together, describe_batch, describe_run

if TYPE_CHECKING:
    from mlcompute.trainer.trainer import Trainer

_DEFAULT_PATH = "training-stopped.safetensors"


class Fitting:
    """The state of a run, between its steps.

    epoch  finished epochs      batch    steps done in the current epoch      step  steps done in all
    mean   of the epoch's loss  counted  steps whose loss is in it
    """

    def __init__(self, trainer: Trainer, plan: Plan, display: Display) -> None:
        if any(group.schedule is not None for group in trainer.optimizer.groups):
            plan = replace(plan, callbacks=[GroupSchedules(), *plan.callbacks])
        self.trainer, self.plan, self.display = trainer, plan, display
        self.epoch = self.batch = self.step = 0
        #: Are all arguments and data checked?
        self.has_begun = False
        self.history = History()
        self.together = Together(trainer, plan.callbacks)
        self.signals = Signals(is_shared=self.together.is_shared)
        self._is_over = False
        self.counted = 0
        self.mean = MeanLoss(trainer.model)
        self._looked_at_filling = False
        self._nan = NaNWarning(trainer, plan.callbacks)
        self._samples_here = 0
        self._seconds_before = 0.0
        #: Checkpoints to save: path -> with the weights that validation uses?
        self._to_save: dict[str, bool] = {}
        #: Were the final weights chosen by a callback that judges them?
        self.has_final_weights = False
        #: Weights when the last step was over, and what callbacks then made of them; None when they left them alone.
        self._ended: tuple[list[Array], list[Array]] | None = None
        #: The learning rates it ended with; None while it goes on.
        self._last_rates: Rates | None = None
        #: The learning rates the run began with: the next one begins with them too.
        self.first_rates = rates_of(trainer.optimizer)
        hooks = {name: self._overriding(name) for name in _HOOKS}
        self._batch_begin, self._batch_end = hooks["on_train_batch_begin"], hooks["on_train_batch_end"]
        self._gradient_hooks = list(dict.fromkeys([*hooks["wants_gradients"], *hooks["on_gradients"]]))
        if trainer.metrics:
            trainer.model.keep_predictions()
        self._steps = Steps(trainer.model, keeps_predictions=bool(trainer.metrics), may_queue=not self._batch_end)

    def _overriding(self, name: str) -> list[Callback]:
        return [one for one in self.together.called if getattr(type(one), name) is not getattr(Callback, name)]

    @property
    def length(self) -> Length:
        """Epochs, and steps per epoch where the data tells."""
        batches = self.plan.data.batch_count(self.plan.batch_size, self.plan.least)
        return Length(self.plan.epochs, None if batches is None else -(-batches // self.plan.accumulate))

    @property
    def rates(self) -> Rates:
        """The learning rates of the run, also when it is over and the optimizer has its first ones back."""
        return rates_of(self.trainer.optimizer) if self._last_rates is None else self._last_rates

    # The run --------------------------------------------------------------------------------------------------------

    def run(self, resume: str | None) -> History:
        """Train; what is in the file `resume` comes first."""
        try:
            return self._run(resume)
        finally:
            # Schedules and callbacks change the rate of this run alone; its state remembers theirs.
            self._last_rates = rates_of(self.trainer.optimizer)
            set_rates(self.trainer.optimizer, self.first_rates)

    def _run(self, resume: str | None) -> History:
        from mlcompute.saving import restore

        trainer, plan = self.trainer, self.plan
        with self.signals:
            if resume is not None:
                check_settings(self, resume)  # before the callbacks forget the last run
            self.together.compare(self._described)
            # The graph first: what does not fit is refused before a callback has begun a log or a record.
            notes = [] if resume is None else restore(trainer.training, resume, exact=True).notes
            for callback in plan.callbacks:
                callback.trainer = trainer
            for callback in self.together.called:
                callback.on_train_begin({})
            if resume is not None:
                go_on(self, resume, notes)
            short = short_batch(plan.data, plan.batch_size, self._padded_size) if plan.last_batch == "pad" else None
            if short is not None:
                self._expect_harmless_filling(trainer.model.with_labels(short))
            self._expect_saveable()
            self.has_begun = True
            if plan.epochs:
                self._run_epochs()
            self.together.decide(self.signals)
            if self.signals.caught:  # while the last epoch was being saved: whoever sent it waits for an end
                self._stop()
            logs = self.history.epochs[-1] if self.history.epochs else {}
            self._end(logs)
        return self.history

    def _described(self) -> Rows:
        """What must be the same on all processes of a group."""
        plan = self.plan
        validation = None if plan.validation is None else plan.validation[0]
        return describe_run({"epochs": plan.epochs, **settings_of(self)}, plan.data, validation)

    def _expect_saveable(self) -> None:
        """Refuse now what could not be saved at the end; without anything that saves, say what Ctrl-C could not do."""
        from mlcompute.saving import check_saveable
        from mlcompute.trainer.callbacks.monitor import ModelCheckpoint

        try:
            check_saveable(self.trainer.training, state_of_run(self, None)[0])
        except Error as error:
            if self.plan.checkpoint is not None or any(isinstance(one, ModelCheckpoint) for one in self.plan.callbacks):
                raise
            warn(f"Trainer.fit: this run cannot be saved, also when it is interrupted: {error.message}")

    def _end(self, logs: dict[str, float]) -> None:
        """The last step is over: callbacks may change the weights, and a later run may still go on from these."""
        self._nan.run_ends()
        trainer, may_change = self.trainer, bool(self._overriding("on_train_end"))
        trained = trainer.copy_weights() if may_change else []
        for callback in self.together.called:
            callback.on_train_end(logs)
        final = trainer.copy_weights() if may_change else []
        self._ended = None if _are_same(trained, final) else (trained, final)
        self._is_over = True

    def _run_epochs(self) -> None:
        plan = self.plan
        self.display.begin(plan.epochs, self.length.steps_per_epoch, self.epoch, self.batch)
        try:
            while self.epoch < plan.epochs and not self.trainer.stop_training:
                self._run_epoch()
        finally:
            self.display.close()

    def _run_epoch(self) -> None:
        trainer = self.trainer
        begun = time.perf_counter()
        self._samples_here = 0
        if self.batch == 0:
            self.mean = MeanLoss(trainer.model)
            self._seconds_before = 0.0
            for metric in trainer.metrics:
                metric.reset()
            for callback in self.together.called:
                callback.on_epoch_begin(self.epoch, {})
            self.together.decide(self.signals)
        self._nan.epoch_begins()
        self.display.epoch_begins(self.epoch, self.batch)
        try:
            self._run_steps()
            logs = self.mean.logs(self.trainer.metrics)
            samples = self._samples_here
            logs |= self._validate()
        except StoppedError:
            self._stop()
        if self.signals.caught:
            self._stop()
        seconds = self._seconds_before + time.perf_counter() - begun
        self._end_epoch(logs, seconds, samples)

    def _run_steps(self) -> None:
        plan = self.plan
        skip = self.batch * plan.accumulate
        batches = plan.data.batches(
            Epoch(plan.batch_size, self.epoch, plan.seed, skip, plan.least, lambda: bool(self.signals.caught))
        )
        # Closed here, and not when some traceback lets go of it: a thread prepares its batches.
        with contextlib.closing(batches):
            self._run_steps_on(batches)

    def _run_steps_on(self, batches: Iterator[Batch]) -> None:
        trainer, plan, steps = self.trainer, self.plan, self._steps
        is_first = self.batch == 0
        for group in _grouped(map(self._runnable, batches), plan.accumulate):
            if not group[0].labels and trainer.model.feed.labels:
                raise DataError("Trainer.fit: the data has no labels", fix="give y, or batches of (inputs, labels)")
            if is_first and self.step == 0 and not plan.data.in_memory():
                self.together.compare_first(partial(describe_batch, group[0]))
            is_first = False
            if self.signals.caught:
                raise StoppedError
            if self._batch_begin:
                trainer.batches = group
                for callback in self._batch_begin:
                    callback.on_train_batch_begin(self.batch, {})
                self.together.decide(self.signals, in_step=True)
                self._save_asked()
                if trainer.stop_training:
                    break
            wants = bool(self._gradient_hooks) and any(c.wants_gradients(self.step) for c in self._gradient_hooks)
            self.together.before_step(self.signals)
            steps.start(group, wants_gradients=wants)
            self.together.after_step(self.signals)
            self.batch += 1
            self.step += 1
            for outcome in steps.finished(0 if self._batch_end else _IN_FLIGHT):
                self._count(outcome)
            self.together.decide(self.signals, in_step=True)
            if trainer.stop_training:
                break
            self.display.step(self.batch, self._samples_here, self._running_logs)
        self._settle()
        if is_first and not trainer.stop_training:
            raise DataError(f"Trainer.fit: epoch {self.epoch + 1} has no batches", fix="give data that can be repeated")

    def _runnable(self, batch: Batch) -> Batch:
        """A batch that the graph can run, with weights where the loss takes them."""
        plan, model = self.plan, self.trainer.model
        batch = model.with_labels(batch)
        if plan.last_batch == "pad" and batch.rows < self._padded_size:
            if not self._looked_at_filling:
                self._expect_harmless_filling(batch)
            return padded(batch, model, self._padded_size)
        if batch.rows < model.feed.batch and model.refusal(batch.rows, trains=True):
            expect_runs("Trainer.fit", model, batch.rows, f"a batch has {batch.rows} samples")
        if model.feed.weighs_alike and not batch.weights:
            return batch._replace(weights=weights_of(batch, model))
        return batch

    @property
    def _padded_size(self) -> int:
        size, model = self.plan.batch_size, self.trainer.model
        return size if not model.refusal(size, trains=True) else model.feed.batch

    def _expect_harmless_filling(self, batch: Batch) -> None:
        """Run a filled batch twice, filled differently: nothing that is learned may differ."""
        self._looked_at_filling = True
        trainer = self.trainer
        self._settle()
        before = Snapshot(trainer.model)

        def outcome(differently: bool) -> list[Any]:
            filled = padded(batch, trainer.model, self._padded_size, differently=differently)
            loss = repeated_step(trainer.model, [filled])
            weights = trainer.copy_weights()
            before.restore()
            return [loss, *weights]

        way_out = "last_batch='drop' leaves it out; or give a multiple of the batch size"
        expect_independent_samples("Trainer.fit", way_out, outcome)

    def _settle(self) -> None:
        """Wait for queued steps and count them."""
        for outcome in self._steps.finished(0):
            self._count(outcome)

    def _count(self, outcome: Outcome) -> None:
        """A step is over."""
        self.counted += 1
        loss = outcome.loss
        self.mean.update(loss, outcome.terms, outcome.batches)
        self._samples_here += outcome.rows
        self.history.loss.add(self.counted, loss)
        self._nan.look(outcome, self.counted)
        if self.trainer.metrics:
            for batch, predictions in zip(outcome.batches, outcome.predictions, strict=True):
                for metric in self.trainer.metrics:
                    labels = self.trainer.model.labels_in(batch, metric.output)
                    metric.update(predictions[metric.output], labels)
        if outcome.gradients is not None:
            for callback in self._gradient_hooks:
                callback.on_gradients(self.counted - 1, outcome.gradients)
        if self._batch_end:
            logs = {**outcome.terms, "loss": loss, "size": float(outcome.rows)}
            for callback in self._batch_end:
                callback.on_train_batch_end(self.batch - 1, logs)

    def _running_logs(self) -> dict[str, float]:
        return self.mean.logs([metric for metric in self.trainer.metrics if not metric.is_slow])

    def _validate(self) -> dict[str, float]:
        if self.plan.validation is None or self.signals.caught:
            return {}
        data, size = self.plan.validation
        try:
            for callback in self.together.called:
                callback.on_test_begin({})
            metrics = [copy.copy(metric) for metric in self.trainer.metrics]
            with self.evaluated_weights():
                found = evaluate(self.trainer.model, data, size, metrics, lambda: bool(self.signals.caught))
        finally:
            for callback in reversed(self.together.called):
                callback.on_test_end({})
        if self.signals.caught:  # in the middle of it: the means are of some batches, or of none
            return {}
        self._nan.validated(found["loss"], self.epoch + 1)
        return {f"val_{name}": value for name, value in found.items()}

    def _end_epoch(self, logs: dict[str, float], seconds: float, samples: int) -> None:
        trainer = self.trainer
        logs |= rate_logs(trainer.optimizer)
        ended = self.epoch
        for callback in self.together.called:
            callback.on_epoch_end(ended, logs)
        self.together.decide(self.signals)
        numbers = {name: real("Trainer.fit: the logs", repr(name), value) for name, value in logs.items()}
        self.history.epochs.append(numbers)
        self.history.seconds.append(seconds)
        self.history.samples_per_second.append(samples / seconds if seconds else 0.0)
        self.epoch, self.batch = ended + 1, 0
        self._save_asked()
        self.display.epoch_ends(ended, logs, seconds, samples)

    # Stopping and going on ------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """A signal came: save, say how to go on, and end."""
        self._settle()
        self.history.stopped = self.signals.caught
        path: str | None = self.plan.checkpoint or self._usual_path()
        assert path is not None
        try:
            self.trainer.save(path)
        except (OSError, Error) as error:
            path = None
            said = f"stopped after step {self.step}; the state could not be saved: {error}"
        else:
            said = (
                f"stopped after step {self.step} (epoch {min(self.epoch + 1, self.plan.epochs)}); saved to {path}\n"
                f"go on with: {self.trainer.resume_hint or f'trainer.fit(..., resume={path!r})'}"
            )
        if self.together.is_first:
            print(said, file=sys.stderr, flush=True)
        if self.signals.caught == "SIGTERM":
            raise Terminated(said, path) from None
        raise Interrupted(said, path) from None

    def _usual_path(self) -> str:
        from mlcompute.trainer.callbacks.monitor import ModelCheckpoint

        for callback in self.plan.callbacks:
            # The best checkpoint must stay the best; the last one is replaced.
            if isinstance(callback, ModelCheckpoint) and not callback.save_best_only and "{" not in callback.filepath:
                return callback.filepath
        return os.path.abspath(_DEFAULT_PATH)

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[list[Array] | None]:
        """Within it the model has the weights that validation uses; given are those being trained, None if the same."""
        if self._is_over:  # whatever the model has now is what is evaluated; the run would go on from where it ended
            trained, final = self._ended or (None, None)
            yield trained if final is not None and _are_same(self.trainer.copy_weights(), final) else None
            return
        given = [one.evaluated_parameters() for one in self.plan.callbacks]
        others = [parameters for parameters in given if parameters is not None]
        if not others:
            yield None
            return
        trained = self.trainer.copy_weights()
        try:
            self.trainer.set_parameters(others[-1])
            yield trained
        finally:
            self.trainer.set_weights(trained)

    def save_soon(self, path: str, evaluated: bool) -> None:
        """Save when all callbacks have seen this moment, so that the file holds the state of each after it."""
        self._to_save[path] = evaluated

    def save(self, path: str, evaluated: bool = True) -> None:
        """Write a checkpoint, with the weights that validation uses or those being trained."""
        from mlcompute.saving import save

        self._settle()
        with self.evaluated_weights() if evaluated else contextlib.nullcontext() as trained:
            progress, arrays = state_of_run(self, trained)
            save(path, self.trainer.training, progress=progress, arrays=arrays)

    def _save_asked(self) -> None:
        if self._to_save:
            self._settle()
            for path, evaluated in self._to_save.items():
                self.save(path, evaluated)
            self._to_save = {}


#: How many steps may be running when the next one is prepared.
_IN_FLIGHT = 3
_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "wants_gradients", "on_gradients")


def _are_same(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def _grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    if size == 1:
        for batch in batches:
            yield [batch]
        return
    while group := list(islice(batches, size)):
        yield group
