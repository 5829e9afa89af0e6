"""Metrics of predicted numbers: errors and R²."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.metrics.averaging import Average, averaged, checked_average, logged
from mlcompute.trainer.metrics.metric import Array, Metric, Outputs


class _ErrorMetric(Metric):
    """A mean over differences from the labels; integer class labels differ by 1 from the output of their class."""

    #: Where the outputs of the classes lie, for integer class labels; the trainer's loss says so.
    class_axis: int | None = None

    def set_up(self, outputs: Outputs) -> None:
        with contextlib.suppress(DataError):  # needed for integer class labels only, and a loss that has them tells
            self.class_axis = outputs.class_axis(self.name)

    def differences(self, prediction: Array, labels: Array) -> Array:
        """Prediction - labels of every sample.   (n, outputs)"""
        if labels.size == prediction.size or labels.dtype.kind not in "iu" or self.class_axis is None:
            return _differences(prediction, labels)
        found = prediction.astype(np.float64)
        scores = np.moveaxis(found, self.class_axis, 1)
        places = np.expand_dims(labels.reshape(len(scores), *scores.shape[2:]), 1)
        known = (places >= 0) & (places < scores.shape[1])  # else the label is one that the loss ignores
        at = np.where(known, places, 0)
        np.put_along_axis(scores, at, np.take_along_axis(scores, at, 1) - known, 1)
        return found.reshape(len(found), -1)


class MeanAbsoluteError(_ErrorMetric):
    """|prediction - label|, averaged."""

    def __init__(self, name: str = "mae") -> None:
        super().__init__(name)

    def values(self, prediction: Array, labels: Array) -> Any:
        return np.abs(self.differences(prediction, labels)).mean(axis=1)


class MeanSquaredError(_ErrorMetric):
    """(prediction - label)², averaged."""

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def values(self, prediction: Array, labels: Array) -> Any:
        return np.square(self.differences(prediction, labels)).mean(axis=1)


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of (prediction - label)² over all samples."""

    def __init__(self, name: str = "rmse") -> None:
        super().__init__(name)

    def result(self) -> float:
        return math.sqrt(super().result())


class R2(Metric):
    """1 - sum (label - prediction)² / sum (label - mean of the labels)²: 1 is perfect, 0 no better than the mean.

    average  of several outputs: "macro", their mean; "weighted": by the variance of their labels; None: each by itself,
             in the logs as `r2_0`, `r2_1` ...

    Labels that are all the same give 1 where the prediction is right and 0 elsewhere, as in scikit-learn.
    """

    def __init__(self, name: str = "r2", average: Average = "macro") -> None:
        self.average = checked_average("R2", average)
        if average == "micro":
            raise DataError(
                "R2: average is 'micro', outputs have no decisions to pool", expected="macro, weighted, None"
            )
        super().__init__(name)

    def reset(self) -> None:
        self._count, self._mean, self._spread, self._error = 0, *(np.zeros(0) for _ in range(3))

    def update(self, prediction: Array, labels: Array) -> None:
        error = np.square(_differences(prediction, labels)).sum(axis=0)
        rows = labels.reshape(len(prediction), -1).astype(np.float64)
        mean = rows.mean(axis=0)
        spread, count = np.square(rows - mean).sum(axis=0), len(rows)
        if self._count:
            # Chan, Golub and LeVeque: means and spreads of two parts joined, without a difference of large squares.
            total, step = self._count + count, mean - self._mean
            spread = self._spread + spread + step * step * (self._count * count / total)
            mean = self._mean + step * (count / total)
            error, count = self._error + error, total
        self._count, self._mean, self._spread, self._error = count, mean, spread, error

    def per_class(self) -> Array:
        """R² of every output."""
        alike = self._spread == 0
        share = self._error / np.where(alike, 1.0, self._spread)
        return np.where(alike, np.where(self._error == 0, 1.0, 0.0), 1 - share)

    def result(self) -> float:
        return averaged(self.per_class(), self.average, self._spread) if self._count else math.nan

    def logs(self) -> dict[str, float]:
        return logged(self.name, self.average, self.result(), self.per_class())

    def state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "spread": self._spread, "error": self._error}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._mean, self._spread, self._error = (np.array(state[name]) for name in ("mean", "spread", "error"))


def _differences(prediction: Array, labels: Array) -> Array:
    rows = len(prediction)
    if labels.size != prediction.size:
        raise DataError(
            f"a metric of numbers: labels of shape {labels.shape} for a prediction of shape {prediction.shape}",
            fix="integer class labels have no difference from a prediction: use 'accuracy', or give one-hot labels",
        )
    return prediction.reshape(rows, -1).astype(np.float64) - labels.reshape(rows, -1)
