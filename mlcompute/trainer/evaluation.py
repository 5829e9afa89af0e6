"""Evaluating and predicting through the inference graph, which shares the weights."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.enums import ExecutionOptions, ReductionType
from mlcompute.errors import DataError, warn
from mlcompute.group.exchange import Kind
from mlcompute.runtime.session import session_of
from mlcompute.trainer.buckets import put_back
from mlcompute.trainer.data import Batch, Data, Epoch
from mlcompute.trainer.last_batch import expect_independent_samples, expect_weights, padded, short_batch, weights_of
from mlcompute.trainer.metrics import Array, ConfusionMatrix, Metric
from mlcompute.trainer.model import Model
from mlcompute.trainer.predictor import Predictor

_SYNCHRONOUS = ExecutionOptions.SYNCHRONOUS


class MeanLoss:
    """The loss over several batches: the mean over all samples, as one large batch would have it.

    Where a loss divides by what its labels count for, so does the mean. For sum losses it is the sum over all samples,
    divided by their number. The terms of a loss that has several are counted in the same way, each by itself.

    totals, counts   of the loss ("") and of its terms by name
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        means = {"": tuple(model.minimised)} | {name: (tensor,) for name, tensor in model.terms.items()}
        kinds = {"": model.reduction} | {name: model.reduction_of(tensor) for name, tensor in model.terms.items()}
        self._sums = {name for name, kind in kinds.items() if kind == ReductionType.SUM}
        #: What the means are divided by, where that is not the number of samples.
        self._divisors = {name: model.divisor(*parts) for name, parts in means.items() if name not in self._sums}
        self.rows = 0
        self.totals, self.counts = dict.fromkeys(means, 0.0), dict.fromkeys(means, 0.0)
        names = {tensor: name for name, tensor in model.terms.items()}
        differ = len(model.divisors(*model.minimised)) > 1 and all(part in names for part in model.minimised)
        #: Terms whose means divide by different things, and of which the loss is the sum.
        self._parts = [names[part] for part in model.minimised] if differ else []

    def update(self, loss: float, terms: Mapping[str, float], batches: Sequence[Batch]) -> None:
        """Count a step of one batch or several."""
        rows = sum([batch.rows for batch in batches])
        for name, value in {"": loss, **terms}.items():
            divisor = self._divisors.get(name)
            count = rows if divisor is None else sum([self._model.count(batch, divisor) for batch in batches])
            self.totals[name] += value if name in self._sums else value * count
            self.counts[name] += count
        self.rows += rows

    def result(self, name: str = "") -> float:
        """The mean so far, of the loss or of a term; NaN before the first batch."""
        if not name and self._parts:
            return sum(map(self.result, self._parts))
        # Where no label counted, the loss of every batch was 0.
        return self.totals[name] / (self.counts[name] or 1.0) if self.rows else math.nan

    def names(self, metrics: Sequence[Metric]) -> dict[str, str]:
        """What the loss ("") and its terms are called in the logs, beside metrics."""
        taken = {"loss", "learning_rate", *(metric.name for metric in metrics)}
        return {"loss": ""} | {f"{name}_loss" if name in taken else name: name for name in self._model.terms}

    def logs(self, metrics: Sequence[Metric]) -> dict[str, float]:
        """The loss, its terms by name, and metrics."""
        logs = {shown: self.result(name) for shown, name in self.names(metrics).items()}
        for metric in metrics:
            logs |= metric.logs()
        return logs


class Scores(dict[str, float]):
    """What `Trainer.evaluate` found: the loss and the metrics, by name.

    per_class         metric -> its number for every class or output, where it has several
    confusion_matrix  the counts of a `ConfusionMatrix` among the metrics, right classes in rows; else None
    """

    def __init__(self, logs: Mapping[str, float], metrics: Sequence[Metric]) -> None:
        super().__init__(logs)
        found = {metric.name: metric.per_class() for metric in metrics}
        self.per_class: dict[str, Array] = {name: part for name, part in found.items() if part is not None}
        matrices = [metric.matrix for metric in metrics if isinstance(metric, ConfusionMatrix)]
        self.confusion_matrix: Array | Any = matrices[0] if matrices else None

    def __missing__(self, name: str) -> float:
        known = ", ".join(self)
        raise KeyError(f"Trainer.evaluate: there is no {name!r}; it has {known}; Trainer(metrics=[...]) adds more")


def number(value: Array) -> float:
    """What is minimised where a tensor is: the sum of its elements."""
    return float(value.item()) if value.size == 1 else float(value.sum(dtype=np.float64))


def run(model: Predictor, batch: Batch, *, with_labels: bool) -> tuple[dict[str, Array], float, dict[str, float]]:
    """(predictions by output, loss, terms of the loss) of a batch; the loss is NaN without labels."""
    buffers: dict[str, Array] = {}
    kept: dict[str, Array] = {}
    for name, output in model.outputs.items():
        d = output.prediction.descriptor
        scale, rest = divmod(d.shape[0], model.feed.batch)
        if rest or not scale:
            raise _other_axis_first(model, name)
        buffers[name] = np.empty((batch.size * scale, *d.shape[1:]), d.data_type.numpy)
        kept[name] = buffers[name][: batch.rows * scale]
    graph = model.inference
    execution = graph.execute(
        batch.inputs,
        batch.labels if with_labels else None,
        batch.weights if with_labels else None,
        None if model.feed.varies else buffers,
        batch_size=batch.size,
        options=_SYNCHRONOUS,
    )
    if model.feed.varies:  # as large as the inputs made it
        outputs = model.outputs.items()
        kept = {name: np.array(session_of(graph).fetch(output.prediction)) for name, output in outputs}
    if not with_labels or not isinstance(model, Model):
        return kept, math.nan, {}
    result: Any = execution.result
    terms: dict[str, Any] = {name: session_of(graph).fetch(tensor) for name, tensor in model.terms.items()}
    parts = {name: number(value) for name, value in terms.items()}
    return kept, number(result.data), parts


def _other_axis_first(model: Predictor, name: str) -> DataError:
    shape = model.outputs[name].prediction.descriptor.shape
    return DataError(
        f"output '{name}' has shape {shape}: its first axis does not count the samples, {model.feed.batch} in a batch",
        fix="name other outputs, outputs={...}, or transpose this one",
    )


def _runnable(model: Predictor, batch: Batch, who: str, *, with_labels: bool, is_first: bool) -> Batch:
    """The batch, filled up where the graph runs full ones only; refused where the filling would be felt.

    is_first  the first batch of this kind: only then the filling is looked at, by running it twice
    """
    full = model.feed.batch
    labelled = model if with_labels and isinstance(model, Model) else None
    batch = batch if labelled is None else labelled.with_labels(batch)
    if batch.rows == full or not model.refusal(batch.rows, trains=False):
        return batch if labelled is None else batch._replace(weights=weights_of(batch, labelled))
    if labelled is not None:
        expect_weights(who, labelled)

    def outcome(differently: bool) -> list[Any]:
        filled = padded(batch, model, full, differently=differently, with_weights=with_labels)
        predictions, loss, _ = run(model, filled, with_labels=with_labels)
        return [*predictions.values(), loss]

    if is_first:
        expect_independent_samples(who, f"give a multiple of {full} samples", outcome)
    return padded(batch, model, full, with_weights=with_labels)


def check_evaluation(who: str, model: Model, data: Data, size: int) -> None:
    """Refuse before training what would be refused with the last batch of the validation data."""
    short = short_batch(data, size, model.feed.batch)
    if short is not None and short.labels:
        _runnable(model, short, who, with_labels=True, is_first=True)


def evaluate(
    model: Model, data: Data, size: int, metrics: Sequence[Metric], stops: Callable[[], bool] = lambda: False
) -> Scores:
    """Loss and metrics over all samples."""
    mean = MeanLoss(model)
    for metric in metrics:
        metric.reset()
    is_filled = False
    #: Batches that the processes of a group run at the same time, each one of them.
    taken: list[Batch] = []
    # Where processes may go, each runs all of them: a batch cannot be lost then.
    turns = 1 if model.group is None or session_of(model.training).elastic else model.group.size
    with contextlib.closing(data.batches(Epoch(size, stops=stops))) as batches:
        for batch in _counted(batches, data, size, "Trainer.evaluate"):
            if stops():
                break
            if not batch.labels and model.feed.labels:
                raise DataError(
                    "Trainer.evaluate: the data has no labels",
                    fix="give y, or batches of (inputs, labels); in fit: validation=(x, y)",
                )
            batch = _runnable(model, batch, "Trainer.evaluate", with_labels=True, is_first=not is_filled)
            is_filled = is_filled or bool(batch.filling)
            taken.append(batch)
            if len(taken) == turns:
                _count(model, taken, mean, metrics)
                taken = []
        _count(model, taken, mean, metrics)
    if not mean.rows and not stops():
        raise DataError("Trainer.evaluate: there are no samples")
    return Scores(mean.logs(metrics), metrics)


#: After so many batches of data that does not say how much it is, people are told that it must end.
_MANY_BATCHES = 10_000


def _counted(batches: Iterable[Batch], data: Data, size: int, who: str) -> Iterator[Batch]:
    """The same batches; a warning where they seem to have no end."""
    knows_end = data.batch_count(size) is not None
    for number, batch in enumerate(batches, 1):
        if number == _MANY_BATCHES and not knows_end:
            warn(
                f"{who}: {number:,} batches, and more are coming: nothing is known before the data ends. Generators "
                "that never end are cut off with itertools.islice(batches, number)"
            )
        yield batch


def _count(model: Model, batches: Sequence[Batch], mean: MeanLoss, metrics: Sequence[Metric]) -> None:
    """Run some batches, one on each process of a group, and count them in order, on all."""
    group = model.group
    if group is None or group.size == 1 or session_of(model.training).elastic:
        found = [run(model, batch, with_labels=True) for batch in batches]
    elif batches:
        mine = run(model, batches[group.rank], with_labels=True) if group.rank < len(batches) else None
        message = b"" if mine is None else pickle.dumps(mine)
        found = [pickle.loads(one) for one in group.exchange.gather_bytes(Kind.TRAINER, message) if one]
    else:
        found = []
    for batch, (predictions, loss, terms) in zip(batches, found, strict=True):
        mean.update(loss, terms, [batch])
        for metric in metrics:
            metric.update(predictions[metric.output], model.labels_in(batch, metric.output))


def predict(model: Predictor, data: Data, size: int, who: str) -> dict[str, Array]:
    """The predictions for all samples, in order, by output."""
    parts: dict[str, list[Array]] = {name: [] for name in model.outputs}
    count = 0
    is_filled = is_joined = False
    with contextlib.closing(data.batches(Epoch(size))) as batches:
        for batch in _counted(batches, data, size, who):
            if not is_joined and (count or batch.rows < model.feed.batch):
                is_joined = True
                for name, output in model.outputs.items():
                    if not model.counts_samples(output.prediction):
                        raise _other_axis_first(model, name)
            batch = _runnable(model, batch, who, with_labels=False, is_first=not is_filled)
            is_filled = is_filled or bool(batch.filling)
            for name, prediction in run(model, batch, with_labels=False)[0].items():
                parts[name].append(prediction)
            count += 1
    if not count:
        raise DataError(f"{who}: there are no samples")
    return {name: put_back(predictions, data, size) for name, predictions in parts.items()}
