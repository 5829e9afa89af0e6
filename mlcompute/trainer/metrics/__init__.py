"""Metrics, computed over all samples of an epoch whatever the batches.

metric.py    what a metric is, and what those about classes share
accuracy.py  accuracies        classification.py  precision, recall, F1, IoU, confusion matrix
auc.py       areas under ROC and precision-recall curves
numbers.py   errors and R²     perplexity.py
averaging.py from classes to one number           names.py  "accuracy", "f1" ...
"""

from typing import TYPE_CHECKING

from mlcompute.foreign_names import no_member
from mlcompute.trainer.metrics.accuracy import Accuracy, TopKAccuracy
from mlcompute.trainer.metrics.auc import AUC
from mlcompute.trainer.metrics.averaging import Average as Average
from mlcompute.trainer.metrics.classification import F1, ConfusionMatrix, CountedMetric, IoU, Precision, Recall
from mlcompute.trainer.metrics.metric import Array as Array
from mlcompute.trainer.metrics.metric import ClassMetric, Mean, Metric
from mlcompute.trainer.metrics.names import MetricName as MetricName
from mlcompute.trainer.metrics.names import metrics_from
from mlcompute.trainer.metrics.numbers import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from mlcompute.trainer.metrics.perplexity import Perplexity

__all__ = [
    "AUC", "F1", "R2", "Accuracy", "ClassMetric", "ConfusionMatrix", "CountedMetric", "IoU", "Mean",
    "MeanAbsoluteError", "MeanSquaredError", "Metric", "Perplexity", "Precision", "Recall", "RootMeanSquaredError",
    "TopKAccuracy", "metrics_from",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> None:
        raise no_member(__name__, name, __all__)
