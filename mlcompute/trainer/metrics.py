"""Metrics: how good predictions are, averaged over the samples of an epoch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.arguments import class_axis_of, whole

Array = np.ndarray[Any, np.dtype[Any]]


class Metric(ABC):
    """A number per sample, averaged. Subclasses say what the number is.

    The mean is kept as a sum and a count, batch after batch in order, so that a run that was stopped and resumed
    arrives at the same bits.
    """

    #: What the metric is called in logs and in the history.
    name: str

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    @abstractmethod
    def values(self, prediction: Array, labels: Array) -> Any:
        """One number per sample (n,), or one number for the whole batch."""

    def reset(self) -> None:
        """Forget everything: an epoch begins."""
        self.total, self.count = 0.0, 0

    def update(self, prediction: Array, labels: Array) -> None:
        """Count a batch. Both have samples on axis 0; labels are as the loss reads them (one-hot, not indices)."""
        values = np.asarray(self.values(prediction, labels))
        rows = len(prediction)
        if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
            raise DataError(
                f"metric '{self.name}': values of shape {values.shape} for {rows} samples",
                expected=f"({rows},), one per sample, or one number",
            )
        self.total += float(values.sum(dtype=np.float64)) if values.ndim else float(values) * rows
        self.count += rows

    def result(self) -> float:
        """The mean so far; NaN before the first batch."""
        return self.total / self.count if self.count else float("nan")


class ClassMetric(Metric):
    """A metric that looks at classes.

    class_axis  where they lie, negative from the end; None: where the trainer's loss has them, else axis 1
    """

    def __init__(self, name: str, class_axis: int | None) -> None:
        super().__init__(name)
        self.class_axis = class_axis

    def classes_first(self, prediction: Array, labels: Array) -> tuple[Array, Array]:
        """Both with the classes on axis 1."""
        labels = labels.reshape(prediction.shape)
        if prediction.ndim < 2:
            return prediction, labels
        axis = class_axis_of(prediction.shape, None) if self.class_axis is None else self.class_axis
        if axis is None or not -prediction.ndim < axis < prediction.ndim or axis == 0:
            raise DataError(
                f"metric '{self.name}': class_axis is {self.class_axis}, the prediction has shape {prediction.shape}",
                expected="-1 for sequences (n, length, classes), 1 for (n, classes, length)",
                fix=f"pass {type(self).__name__}(..., class_axis=-1), or 1",
            )
        return np.moveaxis(prediction, axis, 1), np.moveaxis(labels, axis, 1)


class Accuracy(ClassMetric):
    """The share of right answers: classes, or yes and no; pixels, steps and outputs are averaged within a sample.

    per_output  False: the largest output is the class. True: every output is a yes or no of its own, as for several
                labels per sample. None: the trainer decides by its loss, and refuses where the loss does not tell;
                without a trainer one output (n, 1) is a yes or no, several are classes
    threshold   above it an output is a yes. Losses on logits want 0, on probabilities 0.5; None lets the trainer
                choose by its loss
    """

    def __init__(
        self,
        name: str = "accuracy",
        threshold: float | None = None,
        per_output: bool | None = None,
        class_axis: int | None = None,
    ) -> None:
        super().__init__(name, class_axis)
        self.threshold, self.per_output = threshold, per_output

    def values(self, prediction: Array, labels: Array) -> Any:
        if self.per_output:
            labels = labels.reshape(prediction.shape)
        else:
            prediction, labels = self.classes_first(prediction, labels)
        if self.per_output or prediction.ndim < 2 or prediction.shape[1] == 1:
            border = 0.5 if self.threshold is None else self.threshold
            low, high = float(labels.min()), float(labels.max())
            if low < -1 or high > 1:
                raise DataError(
                    f"metric '{self.name}': labels go from {low:g} to {high:g}",
                    expected="0 for no and 1 for yes",
                    fix="for numbers to be predicted, use the metric 'mae' or 'mse'",
                )
            right = (prediction > border) == (labels > 0.5)
        else:
            _expect_one_class(self.name, labels)
            right = prediction.argmax(1) == labels.argmax(1)
        return right if right.ndim == 1 else right.reshape(len(right), -1).mean(axis=1)


class TopKAccuracy(ClassMetric):
    """The share of samples whose right class is among the k largest."""

    def __init__(self, k: int = 5, name: str = "", class_axis: int | None = None) -> None:
        self.k = whole("TopKAccuracy", "k", k, 1)
        super().__init__(name or f"top_{k}_accuracy", class_axis)

    def values(self, prediction: Array, labels: Array) -> Any:
        prediction, labels = self.classes_first(prediction, labels)
        _expect_one_class(self.name, labels)
        right = labels.argmax(1)
        score = np.take_along_axis(prediction, np.expand_dims(right, 1), 1)
        # As many as k classes may be better; among equals the first counts as better, as in a sorted list.
        numbers = np.arange(prediction.shape[1]).reshape(1, -1, *(1,) * (prediction.ndim - 2))
        better = (prediction > score) | ((prediction == score) & (numbers < np.expand_dims(right, 1)))
        found = (better.sum(axis=1) < self.k) & np.isfinite(score[:, 0])
        return found if found.ndim == 1 else found.reshape(len(found), -1).mean(axis=1)


class MeanAbsoluteError(Metric):
    """|prediction - label|, averaged."""

    def __init__(self, name: str = "mae") -> None:
        super().__init__(name)

    def values(self, prediction: Array, labels: Array) -> Any:
        return np.abs(_differences(prediction, labels)).mean(axis=1)


class MeanSquaredError(Metric):
    """(prediction - label)², averaged."""

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def values(self, prediction: Array, labels: Array) -> Any:
        return np.square(_differences(prediction, labels)).mean(axis=1)


class Mean(Metric):
    """The mean of a function of (prediction, labels): one number per sample, or one for the whole batch."""

    def __init__(self, function: Callable[[Array, Array], Any], name: str = "") -> None:
        super().__init__(name or getattr(function, "__name__", "metric"))
        self.function = function

    def values(self, prediction: Array, labels: Array) -> Any:
        return self.function(prediction, labels)


def _expect_one_class(metric: str, labels: Array) -> None:
    """A sample with several classes has no right one."""
    most = int((labels > 0.5).sum(axis=1).max(initial=0))
    if most > 1:
        raise DataError(
            f"metric '{metric}': a sample has {most} classes, the metric wants one",
            fix="where samples have several labels, use the metric 'binary_accuracy'",
        )


def _differences(prediction: Array, labels: Array) -> Array:
    rows = len(prediction)
    return prediction.reshape(rows, -1).astype(np.float64) - labels.reshape(rows, -1)


_NAMES: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": lambda: Accuracy("binary_accuracy", per_output=True),
    "categorical_accuracy": lambda: Accuracy("categorical_accuracy", per_output=False),
    "mae": MeanAbsoluteError,
    "mean_absolute_error": lambda: MeanAbsoluteError("mean_absolute_error"),
    "mse": MeanSquaredError,
    "mean_squared_error": lambda: MeanSquaredError("mean_squared_error"),
}


def metrics_from(given: Iterable[Metric | str | Callable[[Array, Array], Any]]) -> list[Metric]:
    """Metrics from what a user wrote; every name once."""
    if isinstance(given, (str, Metric)) or not isinstance(given, Iterable):
        raise TypeError(f"Trainer: metrics must be a list, not {given!r}")
    found: list[Metric] = []
    for one in given:
        if isinstance(one, Metric):
            found.append(one)
        elif isinstance(one, str):
            top = re.fullmatch(r"top_([1-9]\d*)_accuracy", one)
            if not top and one not in _NAMES:
                raise DataError(
                    f"Trainer: there is no metric named {one!r}",
                    expected=f"{', '.join(_NAMES)}, top_5_accuracy (or another number)",
                    fix="pass a Metric, or a function of (prediction, labels)",
                )
            found.append(TopKAccuracy(int(top[1])) if top else _NAMES[one]())
        elif isinstance(one, type):
            raise TypeError(f"Trainer: a metric must be an object, not the class: {one.__name__}()")
        elif callable(one):
            found.append(Mean(one))
        else:
            raise TypeError(f"Trainer: a metric must be a Metric, a name or a function, not {type(one).__name__}")
    names = [metric.name for metric in found]
    twice = {name for name in names if names.count(name) > 1 or name == "loss"}
    if twice:
        raise DataError(f"Trainer: metrics cannot share the name {sorted(twice)[0]!r}", fix="give each its own name=")
    return found
