"""Evaluating and predicting through the inference graph, which shares the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.enums import ExecutionOptions, ReductionType
from mlcompute.errors import DataError
from mlcompute.trainer.data import Batch, Data
from mlcompute.trainer.metrics import Array, Metric
from mlcompute.trainer.model import Model

_SYNCHRONOUS = ExecutionOptions.SYNCHRONOUS


class MeanLoss:
    """The loss over several batches: the mean over all samples, as one large batch would have it.

    For sum losses it is the sum over all samples, divided by their number.
    """

    def __init__(self, model: Model) -> None:
        self._sums = model.reduction == ReductionType.SUM
        self.total, self.rows = 0.0, 0

    def update(self, loss: float, rows: int) -> None:
        """Count a batch."""
        self.total += loss if self._sums else loss * rows
        self.rows += rows

    def result(self) -> float:
        """The mean so far; NaN before the first batch."""
        return self.total / self.rows if self.rows else math.nan


def run(model: Model, batch: Batch, *, with_labels: bool) -> tuple[Array, float]:
    """(prediction, loss) of a batch; the loss is NaN without labels."""
    rows, d = batch.rows, model.prediction.descriptor
    scale = d.shape[0] // model.feed.batch
    prediction = np.empty((rows * scale, *d.shape[1:]), d.data_type.numpy)
    graph = model.inference
    graph.execute(
        batch.inputs,
        batch.labels if with_labels else None,
        batch.weights if with_labels else None,
        {"prediction": prediction},
        batch_size=rows,
        options=_SYNCHRONOUS,
    )
    loss = math.nan
    if with_labels:
        loss = 0.0
        for tensor in model.losses:
            value: Any = graph.fetch(tensor)
            loss += value.item() if value.size == 1 else float(value.mean(dtype=np.float64))
    return prediction, loss


def evaluate(
    model: Model, data: Data, size: int, metrics: Sequence[Metric], stops: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Loss and metrics over all samples."""
    mean = MeanLoss(model)
    for metric in metrics:
        metric.reset()
    with contextlib.closing(data.batches(size, stops=stops)) as batches:
        for batch in batches:
            if stops():
                break
            if not batch.labels and model.feed.labels:
                raise DataError(
                    "Trainer.evaluate: the data has no labels", fix="give y, or batches of (inputs, labels)"
                )
            prediction, loss = run(model, batch, with_labels=True)
            mean.update(loss, batch.rows)
            for metric in metrics:
                metric.update(prediction, model.labels_in(batch))
    if not mean.rows and not stops():
        raise DataError("Trainer.evaluate: there are no samples")
    return {"loss": mean.result(), **{metric.name: metric.result() for metric in metrics}}


def predict(model: Model, data: Data, size: int) -> Array:
    """The predictions for all samples, in order."""
    with contextlib.closing(data.batches(size)) as batches:
        parts = [run(model, batch, with_labels=False)[0] for batch in batches]
    if not parts:
        raise DataError("Trainer.predict: there are no samples")
    return np.concatenate(parts)
