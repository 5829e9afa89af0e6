"""Metric: gets batch after batch, and gives a number over all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from mlcompute.errors import DataError
from mlcompute.foreign_names import expect_prediction_first
from mlcompute.layers.arguments import class_axis_of
from mlcompute.ops.bfloat16 import is_numeric

Array = np.ndarray[Any, np.dtype[Any]]


class Outputs(Protocol):
    """What a trained graph tells metrics about its prediction. Each refuses where nobody can know."""

    def decides_per_output(self, metric: str) -> bool:
        """Is every output a yes or no, and not a class among others?"""

    def class_axis(self, metric: str) -> int:
        """Where the classes lie."""

    def gives_logits(self, metric: str) -> bool:
        """Logits, and not probabilities?"""

    @property
    def is_on_logits(self) -> bool:
        """Is 0, and not 0.5, the border between no and yes?"""

    @property
    def ignore_index(self) -> int | None:
        """The integer class label that counts nowhere."""


class Metric:
    """A number per sample, averaged over all samples: subclasses say in `values` what the number is.

    The mean is kept as a sum and a count, batch after batch in order, so that a run that was stopped and resumed
    arrives at the same bits. A metric that is no mean over samples has `reset`, `update` and `result` of its own;
    checkpoints keep what these set, unless `state` and `restore` say something else.
    """

    #: What the metric is called in logs and in the history.
    name: str
    #: The output it looks at.
    output: str = "prediction"
    #: `result` takes so long that it is asked for at the end of an epoch only, not for the progress line.
    is_slow = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def set_up(self, outputs: Outputs) -> None:
        """Called when a Trainer gets the metric: choose the settings that depend on the loss."""

    def values(self, prediction: Array, labels: Array) -> Any:
        """One number per sample (n,), or one number for the whole batch; or a pair of these and of their weights."""
        raise TypeError(f"metric '{self.name}': {type(self).__name__} needs values(prediction, labels), or an update")

    def reset(self) -> None:
        """Reset all counts at the beginning of an epoch."""
        self.total, self.count = 0.0, 0.0

    def update(self, prediction: Array, labels: Array) -> None:
        """Count a batch. Both have samples on axis 0; labels are dense, or integer class labels."""
        found, rows = self.values(prediction, labels), len(prediction)
        values, weights = (np.asarray(part) for part in (found if isinstance(found, tuple) else (found, np.ones(()))))
        if not (is_numeric(values.dtype) and is_numeric(weights.dtype)):
            raise TypeError(f"metric '{self.name}': must give a number, or one per sample, not {found!r}")
        if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
            raise DataError(
                f"metric '{self.name}': values of shape {values.shape} for {rows} samples",
                expected=f"({rows},), one per sample, or one number",
            )
        if weights.ndim:
            self.total += float((values * weights).sum(dtype=np.float64))
            self.count += float(weights.sum(dtype=np.float64))
        else:
            self.total += float(values.sum(dtype=np.float64)) if values.ndim else float(values) * rows
            self.count += rows

    def result(self) -> float:
        """The mean so far; NaN before the first batch."""
        return self.total / self.count if self.count else math.nan

    def per_class(self) -> Array | None:
        """The numbers of every class or output (classes,), where the metric has them."""
        return None

    def logs(self) -> dict[str, float]:
        """What goes into the logs and the history, by name."""
        return {self.name: self.result()}

    def state(self) -> dict[str, Any]:
        """What was counted, as plain numbers and arrays, for a checkpoint in the middle of an epoch.

        By default all attributes that are such.
        """
        found = {name: _plain(value) for name, value in vars(self).items() if name not in ("name", "output")}
        return {name: value for name, value in found.items() if value is not _NOT_PLAIN}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for name, value in state.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"


#: For attributes that no checkpoint keeps: functions, objects of other libraries.
_NOT_PLAIN: Any = object()


def _plain(value: Any) -> Any:
    """A value as numbers, text, arrays, lists and dicts of them."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts) else parts
    if isinstance(value, Mapping):
        entries = {key: _plain(entry) for key, entry in value.items()}
        is_plain = all(isinstance(key, str) and entry is not _NOT_PLAIN for key, entry in entries.items())
        return entries if is_plain else _NOT_PLAIN
    return value if value is None or isinstance(value, (bool, int, float, str, np.ndarray)) else _NOT_PLAIN


class Mean(Metric):
    """The mean of a function of (prediction, labels): one number per sample, or one for the whole batch."""

    def __init__(self, function: Callable[[Array, Array], Any], name: str = "") -> None:
        expect_prediction_first("Trainer: metrics", function)
        super().__init__(name or getattr(function, "__name__", "metric"))
        self.function = function

    def values(self, prediction: Array, labels: Array) -> Any:
        return self.function(prediction, labels)


class ClassMetric(Metric):
    """A metric that looks at classes, or at outputs that are each a yes or no.

    class_axis    where classes or outputs lie, negative from the end; None: where the trainer's loss has them, else
                  axis 1
    per_output    False: the largest output is the class. True: every output is a yes or no of its own, as for several
                  labels per sample. None: the trainer decides by its loss, and refuses where the loss does not tell;
                  without a trainer one output (n, 1) is a yes or no, several are classes
    threshold     above it an output is a yes. Losses on logits want 0, on probabilities 0.5; None lets the trainer
                  choose by its loss
    ignore_index  the integer class label that counts nowhere; None: the one of the trainer's loss, if it has one
    """

    #: Does it have to know which axis the outputs lie on, also where each is a yes or no?
    tells_outputs_apart = True

    def __init__(
        self,
        name: str,
        class_axis: int | None = None,
        per_output: bool | None = None,
        threshold: float | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(name)
        self.class_axis, self.per_output, self.threshold = class_axis, per_output, threshold
        self.ignore_index = ignore_index

    def set_up(self, outputs: Outputs) -> None:
        if self.per_output is None:
            self.per_output = outputs.decides_per_output(self.name)
        if self.threshold is None:
            self.threshold = 0.0 if outputs.is_on_logits else 0.5
        if self.class_axis is None and (self.tells_outputs_apart or not self.per_output):
            self.class_axis = outputs.class_axis(self.name)
        if self.ignore_index is None:
            self.ignore_index = outputs.ignore_index

    def is_yes_or_no(self, prediction: Array) -> bool:
        """Are these outputs to be compared with the threshold, each by itself?"""
        if self.per_output is not None:
            return self.per_output
        return prediction.ndim < 2 or prediction.shape[self._axis(prediction)] == 1

    def _axis(self, prediction: Array) -> int:
        axis = class_axis_of(prediction.shape, None) if self.class_axis is None else self.class_axis
        if axis is None or not -prediction.ndim < axis < prediction.ndim or axis == 0:
            raise DataError(
                f"metric '{self.name}': class_axis is {self.class_axis}, the prediction has shape {prediction.shape}",
                expected="-1 for sequences (n, length, classes), 1 for (n, classes, length)",
                fix=f"pass {type(self).__name__}(..., class_axis=-1), or 1",
            )
        return axis % prediction.ndim

    def classes_first(self, prediction: Array) -> Array:
        """The prediction with its classes on axis 1."""
        return np.moveaxis(prediction, self._axis(prediction), 1) if prediction.ndim > 1 else prediction[:, None]

    def decisions(self, prediction: Array, labels: Array) -> tuple[Array, Array]:
        """Yes or no for every output, given and right: both (n, outputs, ...), or of the prediction's shape."""
        low, high = float(labels.min(initial=0)), float(labels.max(initial=0))
        if low < -1 or high > 1:
            raise DataError(
                f"metric '{self.name}': labels go from {low:g} to {high:g}",
                expected="0 for no and 1 for yes",
                fix="for numbers to be predicted, use the metric 'mae' or 'mse'",
            )
        border = 0.5 if self.threshold is None else self.threshold
        given, right = prediction > border, labels.reshape(prediction.shape) > 0.5
        return (self.classes_first(given), self.classes_first(right)) if self.tells_outputs_apart else (given, right)

    def class_labels(self, prediction: Array, labels: Array) -> tuple[Array, Array, Array | None]:
        """(prediction (n, classes, ...), right classes (n, ...), which of them count or None for all)."""
        scores = self.classes_first(prediction)
        places, classes = (len(scores), *scores.shape[2:]), scores.shape[1]
        if labels.size == prediction.size and classes > 1:
            dense = self.classes_first(labels.reshape(prediction.shape))
            most = int((dense > 0.5).sum(axis=1).max(initial=0))
            if most > 1:
                raise DataError(
                    f"metric '{self.name}': a sample has {most} classes, the metric wants one",
                    fix="where samples have several labels, use the metric 'binary_accuracy', or per_output=True",
                )
            return scores, dense.argmax(1), None
        if labels.dtype.kind not in "iu" or labels.size * classes != prediction.size:
            raise DataError(
                f"metric '{self.name}': labels of shape {labels.shape} and type {labels.dtype} for a prediction of "
                f"shape {prediction.shape}",
                expected=f"dense labels {prediction.shape}, or integer class labels {places}",
            )
        right = labels.reshape(places)
        counted = None if self.ignore_index is None else right != self.ignore_index
        looked_at = right if counted is None else right[counted]
        if looked_at.size and not 0 <= int(looked_at.min()) <= int(looked_at.max()) < classes:
            raise DataError(
                f"metric '{self.name}': integer class labels go from {looked_at.min()} to {looked_at.max()}",
                expected=f"0 to {classes - 1}",
                fix="labels that are not to count: pass ignore_index=",
            )
        return scores, right if counted is None else np.where(counted, right, 0), counted

    @staticmethod
    def per_sample(right: Array, counted: Array | None) -> Any:
        """The mean of (n, ...) within each sample, and how many places of it count, where some do not."""
        rows = right.reshape(len(right), -1)
        if counted is None:
            return right if right.ndim == 1 else rows.mean(axis=1)
        seen = counted.reshape(rows.shape)
        many = seen.sum(axis=1)
        return (rows & seen).sum(axis=1) / np.maximum(many, 1), many.astype(np.float64)


def probabilities(logits: Array) -> Array:
    """Softmax over axis 1, in float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found
