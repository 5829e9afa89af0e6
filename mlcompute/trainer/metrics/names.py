"""Metrics by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from mlcompute.errors import DataError
from mlcompute.foreign_names import advice_for_choice
from mlcompute.trainer.metrics.accuracy import Accuracy, TopKAccuracy
from mlcompute.trainer.metrics.auc import AUC
from mlcompute.trainer.metrics.classification import F1, ConfusionMatrix, IoU, Precision, Recall
from mlcompute.trainer.metrics.metric import Array, Mean, Metric
from mlcompute.trainer.metrics.numbers import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from mlcompute.trainer.metrics.perplexity import Perplexity

#: Names of metrics; "top_N_accuracy" is understood for any number.
MetricName = Literal[
    "accuracy", "binary_accuracy", "categorical_accuracy", "top_2_accuracy", "top_3_accuracy", "top_5_accuracy",
    "top_10_accuracy", "precision", "recall", "f1", "iou", "auc", "average_precision", "confusion_matrix", "mae",
    "mean_absolute_error", "mse", "mean_squared_error", "rmse", "r2", "perplexity",
]  # fmt: skip

_NAMES: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": lambda: Accuracy("binary_accuracy", per_output=True),
    "categorical_accuracy": lambda: Accuracy("categorical_accuracy", per_output=False),
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "iou": IoU,
    "auc": AUC,
    "average_precision": lambda: AUC("average_precision", "pr"),
    "confusion_matrix": ConfusionMatrix,
    "mae": MeanAbsoluteError,
    "mean_absolute_error": lambda: MeanAbsoluteError("mean_absolute_error"),
    "mse": MeanSquaredError,
    "mean_squared_error": lambda: MeanSquaredError("mean_squared_error"),
    "rmse": RootMeanSquaredError,
    "r2": R2,
    "perplexity": Perplexity,
}


#: What a trainer takes as metrics.
Metrics = Iterable[Metric | MetricName | str | Callable[[Array, Array], Any]]


def metrics_by_output(given: Metrics | Mapping[str, Metrics]) -> list[Metric]:
    """Metrics from what a user wrote, a list or lists by output: those are called output_metric. All are copies."""
    if not isinstance(given, Mapping):
        return [copy.copy(metric) for metric in metrics_from(given)]
    found = []
    for output, some in given.items():
        _expect_list(f"metrics of {output!r}", some)
        for metric in metrics_from(some):
            one = copy.copy(metric)
            one.output, one.name = output, f"{output}_{metric.name}"
            found.append(one)
    return found


def metrics_from(given: Iterable[Metric | str | Callable[[Array, Array], Any]]) -> list[Metric]:
    """Metrics from what a user wrote; every name once."""
    _expect_list("metrics", given)
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
                    fix=advice_for_choice(one, _NAMES) or "pass a Metric, or a function of (prediction, labels)",
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


def _expect_list(what: str, given: object) -> None:
    if isinstance(given, (str, Metric)) or not isinstance(given, Iterable):
        raise TypeError(f"Trainer: {what} must be a list, [{given!r}], not {given!r}")
