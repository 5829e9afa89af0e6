"""Precision, recall, F1 and IoU, and the confusion matrix: counted over all samples, then divided once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.read_only import ReadOnly
from mlcompute.trainer.metrics.averaging import Average, averaged, checked_average, logged
from mlcompute.trainer.metrics.metric import Array, ClassMetric


class _Counts(ClassMetric):
    """A metric that adds up an array of counts."""

    counts: Array

    def update(self, prediction: Array, labels: Array) -> None:
        counts = self._counted(prediction, labels)
        self.counts = self.counts + counts if self.counts.size else counts

    @abstractmethod
    def _counted(self, prediction: Array, labels: Array) -> Array:
        """The counts of a batch."""

    def _classes(self, prediction: Array, labels: Array) -> tuple[Array, Array, int]:
        """The class given and the right one, of every label that counts; and how many classes there are."""
        scores, right, counted = self.class_labels(prediction, labels)
        given, right = (part.ravel() if counted is None else part[counted] for part in (scores.argmax(1), right))
        return given, right, scores.shape[1]

    def state(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts = np.array(state["counts"])


class CountedMetric(_Counts):
    """A ratio of counts: t found rightly, p predicted, a there actually, of every class or yes-or-no output.

    name     in the logs; that of the class unless given
    average  "macro": the mean over the classes that occur or are predicted, as in scikit-learn; "weighted": each class
             as often as it occurs; "micro": counts of all classes together; None: every class by itself, in the logs
             as `name_0`, `name_1` ... One yes-or-no output has one number, that of the yes, whatever the average

    `per_class` is NaN for a class that neither occurs nor is predicted. A ratio over nothing is 0 otherwise.
    """

    def __init__(
        self,
        name: str = "",
        average: Average = "macro",
        threshold: float | None = None,
        per_output: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.average = checked_average(type(self).__name__, average)
        super().__init__(name or type(self).__name__.lower(), class_axis, per_output, threshold, ignore_index)

    @staticmethod
    @abstractmethod
    def ratio(t: Array, p: Array, a: Array) -> tuple[Array, Array]:
        """Numerator and denominator."""

    def reset(self) -> None:
        self.counts = np.zeros((3, 0), np.int64)

    def _counted(self, prediction: Array, labels: Array) -> Array:
        if self.is_yes_or_no(prediction):
            given, right = (_by_output(part) for part in self.decisions(prediction, labels))
            return np.stack([part.sum(axis=1) for part in (given & right, given, right)])
        given, right, classes = self._classes(prediction, labels)
        return np.stack([np.bincount(part, minlength=classes) for part in (given[given == right], given, right)])

    def per_class(self) -> Array:
        t, p, a = self.counts
        above, below = self.ratio(t, p, a)
        return np.where(p + a > 0, above / np.maximum(below, 1), math.nan)

    def result(self) -> float:
        if self.average == "micro":
            above, below = self.ratio(*self.counts.sum(axis=1, keepdims=True))
            return float(above[0] / below[0]) if below[0] else (0.0 if self.counts.any() else math.nan)
        if self.counts.shape[1] == 1 and self.counts.size:
            return float(np.nan_to_num(self.per_class()[0], nan=0.0))
        return averaged(self.per_class(), self.average, self.counts[2])

    def logs(self) -> dict[str, float]:
        return logged(self.name, self.average, self.result(), self.per_class())


class Precision(CountedMetric):
    """t / p: the share of what was predicted that is right."""

    @staticmethod
    def ratio(t: Array, p: Array, a: Array) -> tuple[Array, Array]:
        return t, p


class Recall(CountedMetric):
    """t / a: the share of what is there that was found."""

    @staticmethod
    def ratio(t: Array, p: Array, a: Array) -> tuple[Array, Array]:
        return t, a


class F1(CountedMetric):
    """2 t / (p + a): the harmonic mean of precision and recall."""

    @staticmethod
    def ratio(t: Array, p: Array, a: Array) -> tuple[Array, Array]:
        return 2 * t, p + a


class IoU(CountedMetric):
    """t / (p + a - t): intersection over union, the Jaccard index; of pixels, where the prediction is an image."""

    @staticmethod
    def ratio(t: Array, p: Array, a: Array) -> tuple[Array, Array]:
        return t, p + a - t


class ConfusionMatrix(_Counts):
    """How often each class was predicted for each class: (classes, classes), right classes in rows.

    One yes-or-no output gives (2, 2): no and yes; several give (outputs, 2, 2). It is no number, so it is in no log:
    `trainer.evaluate(x, y).confusion_matrix`.
    """

    def __init__(
        self,
        name: str = "confusion_matrix",
        threshold: float | None = None,
        per_output: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(name, class_axis, per_output, threshold, ignore_index)

    def reset(self) -> None:
        self.counts = np.zeros((0, 0), np.int64)

    def _counted(self, prediction: Array, labels: Array) -> Array:
        if self.is_yes_or_no(prediction):
            given, right = (_by_output(part) for part in self.decisions(prediction, labels))
            counts = np.stack([_table(r, g, 2) for r, g in zip(right, given, strict=True)])
            return counts[0] if len(counts) == 1 else counts
        given, right, classes = self._classes(prediction, labels)
        return _table(right, given, classes)

    matrix = ReadOnly[Array]("The counts.", "counts")

    def result(self) -> float:
        raise DataError(f"metric '{self.name}': a confusion matrix is no number", fix="read its matrix")

    def logs(self) -> dict[str, float]:
        return {}


def _by_output(decisions: Array) -> Array:
    """(n, outputs, ...) -> (outputs, all others)."""
    return np.moveaxis(decisions, 1, 0).reshape(decisions.shape[1], -1)


def _table(right: Array, given: Array, classes: int) -> Array:
    numbers = right.astype(np.int64) * classes + given
    return np.bincount(numbers, minlength=classes * classes).reshape(classes, classes)
