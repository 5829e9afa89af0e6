"""Running training steps: one fused call each, queued a few at a time; or split, where gradients are wanted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlcompute.enums import ExecutionOptions, ReductionType
from mlcompute.errors import GraphError
from mlcompute.execution import Execution
from mlcompute.runtime.calls import execute_forward_and_gradient
from mlcompute.runtime.run import Call
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor
from mlcompute.trainer.data import Batch
from mlcompute.trainer.evaluation import number
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.model import Model

_SYNCHRONOUS = ExecutionOptions.SYNCHRONOUS
#: Steps shorter than this many seconds run on the caller's thread: handing them to another takes as long.
_SHORT = 5e-4
#: How many longer steps may be queued: one runs while the next ones are prepared.
_QUEUED = 3


@dataclass
class Outcome:
    """What became of a step (of several batches, where gradients are accumulated).

    loss         what was minimised: mean over the samples for mean losses, else the sum
    terms        losses it is made of, by name
    predictions  by output, for every batch, when metrics want them
    gradients    by parameter, when somebody asked for them
    """

    batches: Sequence[Batch]
    rows: int
    loss: float = float("nan")
    terms: dict[str, float] = field(default_factory=dict)
    predictions: list[dict[str, Array]] = field(default_factory=list)
    gradients: dict[Tensor, Array] | None = None
    execution: Execution | None = None


class Steps:
    """Runs steps and hands back their outcomes in order.

    keeps_predictions  read the prediction of every step
    may_queue          steps may be asked for before earlier ones have finished
    """

    def __init__(self, model: Model, *, keeps_predictions: bool, may_queue: bool) -> None:
        self._model = model
        self._training = model.training
        self._keeps = keeps_predictions
        self._may_queue = may_queue
        self._running: deque[Outcome] = deque()
        #: Seconds a step took at best, on the caller's thread; decides whether queueing pays.
        self._fastest = float("inf")
        self._timed = 0

    def start(self, batches: Sequence[Batch], *, wants_gradients: bool = False) -> None:
        """Run a step, or queue it."""
        if len(batches) > 1 or wants_gradients:
            self.wait()
            self._running.append(self._split(batches, wants_gradients))
            return
        (batch,) = batches
        outcome = Outcome(batches, batch.rows)
        self._running.append(outcome)
        if self._may_queue and self._timed >= 3 and self._fastest > _SHORT:
            outcome.execution = self._training.execute(
                batch.inputs,
                batch.labels,
                batch.weights,
                batch_size=batch.size,
                completion_handler=lambda result, error, seconds: None if error else self._read(outcome, batch),
            )
            return
        begun = time.perf_counter()
        self._training.execute(batch.inputs, batch.labels, batch.weights, batch_size=batch.size, options=_SYNCHRONOUS)
        self._fastest = min(self._fastest, time.perf_counter() - begun)
        self._timed += 1
        self._read(outcome, batch)

    def _read(self, outcome: Outcome, batch: Batch) -> None:
        """Take what is wanted out of the graph, before the next run overwrites it."""
        outcome.loss = number(self._fetched(self._model.loss))
        outcome.terms = {name: number(self._fetched(tensor)) for name, tensor in self._model.terms.items()}
        if self._keeps:
            found = {name: self._fetched(output.prediction) for name, output in self._model.outputs.items()}
            outcome.predictions.append(
                {name: one[: len(one) // batch.size * batch.rows] for name, one in found.items()}
            )

    def _fetched(self, tensor: Tensor) -> Array:
        value = session_of(self._training).fetch(tensor)
        assert value is not None
        return value

    def _split(self, batches: Sequence[Batch], wants_gradients: bool) -> Outcome:
        """Forward and gradient for every batch, then one update, from the gradient of all samples together."""
        rows = sum(batch.rows for batch in batches)
        outcome = Outcome(batches, rows)
        model, several = self._model, len(batches) > 1
        shares = _shares(model, batches) if several else [1.0]
        term_shares = {name: _shares_in_mean(model, tensor, batches) for name, tensor in model.terms.items()}
        session = session_of(self._training)
        loss, terms = 0.0, dict.fromkeys(model.terms, 0.0)
        for index, batch in enumerate(batches):
            sums = (shares[index], index > 0) if several else None
            call, data = Call("execute", _SYNCHRONOUS), (batch.inputs, batch.labels, batch.weights)
            execute_forward_and_gradient(session, call, batch.size, data, sums)
            self._read(outcome, batch)
            loss += outcome.loss * shares[index]
            for name, value in outcome.terms.items():
                terms[name] += value * term_shares[name][index]
        outcome.loss, outcome.terms = loss, terms
        if wants_gradients:
            outcome.gradients = {tensor: self._gradient(tensor) for tensor in self._model.parameters}
            for gradient in outcome.gradients.values():  # the update uses the graph's own: writing here would be lost
                gradient.flags.writeable = False
        self._training.execute_optimizer_update(options=_SYNCHRONOUS)
        return outcome

    def _gradient(self, tensor: Tensor) -> Array:
        gradient = session_of(self._training).last.gradient(tensor)
        if gradient is None:  # it does not reach the loss
            gradient = np.zeros(tensor.descriptor.shape, tensor.descriptor.data_type.numpy)
        return gradient

    def finished(self, at_most: int = _QUEUED) -> list[Outcome]:
        """Outcomes that are there, in order; waits until no more than `at_most` steps are still running."""
        done: list[Outcome] = []
        while self._running:
            execution = self._running[0].execution
            if execution is not None and not execution.is_done and len(self._running) <= at_most:
                break
            if execution is not None:
                execution.wait()
            done.append(self._running.popleft())
        return done

    def wait(self) -> None:
        """Return when nothing runs any more; raises what a run failed with."""
        for outcome in self._running:
            if outcome.execution is not None:
                outcome.execution.wait()


def _shares(model: Model, batches: Sequence[Batch]) -> list[float]:
    """What the gradients of batches are multiplied by, to become that of all their samples together."""
    for part in model.minimised:
        if model.reduction_of(part) is None:
            raise GraphError(
                f"Trainer: gradients of {part!r}, which is minimised, cannot be accumulated: it is neither a sum nor a "
                "mean over the samples",
                fix="give the losses the reduction mean or sum, and let layers after them only add, or multiply by "
                "constants; or accumulate=1, with a batch as large as memory allows",
            )
    if model.reduction is None:
        raise GraphError(
            "Trainer: gradients of losses with different reductions cannot be accumulated",
            fix="give all losses one reduction: mean or sum",
        )
    divisors = model.divisors(*model.minimised)
    if model.reduction == ReductionType.MEAN and (len(divisors) > 1 or not all(map(model.counts_are_fed, divisors))):
        where, known = "where labels are computed in the graph", "known only when they have run"
        if len(divisors) > 1:
            where, known = "beside others", "which is another number for every loss"
        raise GraphError(
            f"Trainer: gradients cannot be accumulated of losses that ignore labels or weigh classes, {where}",
            reason=f"the mean of all batches divides by the labels that count in them, {known}",
            fix="accumulate=1; or give the losses the reduction sum, with a weight",
        )
    return _shares_in_mean(model, model.minimised[0], batches)


def _shares_in_mean(model: Model, tensor: Tensor, batches: Sequence[Batch]) -> list[float]:
    """What a batch counts for in a mean over several; in a sum, 1."""
    if model.reduction_of(tensor) == ReductionType.SUM:
        return [1.0] * len(batches)
    divisor = model.divisor(tensor)
    counts = [model.count(batch, divisor) for batch in batches]
    if not any(counts):  # no label counts: the loss is 0, and so is its gradient
        counts = [float(batch.rows) for batch in batches]
    return [count / sum(counts) for count in counts]


def repeated_step(model: Model, batches: Sequence[Batch]) -> float:
    """The loss of one training step on these batches, outside the run: nothing is counted."""
    steps = Steps(model, keeps_predictions=False, may_queue=False)
    steps.start(batches)
    return steps.finished(0)[0].loss
