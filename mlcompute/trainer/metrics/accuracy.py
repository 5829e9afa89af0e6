"""Accuracies."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.layers.arguments import number_of
from mlcompute.trainer.metrics.metric import Array, ClassMetric, Outputs


class Accuracy(ClassMetric):
    """The share of right answers: classes, or yes and no; pixels, steps and outputs are averaged within a sample.

    per_output, threshold, class_axis, ignore_index  as for every `ClassMetric`: by default the trainer's loss decides
    """

    tells_outputs_apart = False

    def __init__(
        self,
        name: str = "accuracy",
        threshold: float | None = None,
        per_output: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(name, class_axis, per_output, threshold, ignore_index)

    def values(self, prediction: Array, labels: Array) -> Any:
        if self.is_yes_or_no(prediction):
            given, right = self.decisions(prediction, labels)
            return self.per_sample(given == right, None)
        scores, classes, counted = self.class_labels(prediction, labels)
        return self.per_sample(scores.argmax(1) == classes, counted)


class TopKAccuracy(ClassMetric):
    """The share of samples whose right class is among the k largest."""

    def __init__(
        self, k: int = 5, name: str = "", class_axis: int | None = None, ignore_index: int | None = None
    ) -> None:
        self.k = number_of("TopKAccuracy", "k", k, 1)
        super().__init__(name or f"top_{k}_accuracy", class_axis, False, ignore_index=ignore_index)

    def set_up(self, outputs: Outputs) -> None:
        if self.class_axis is None:
            self.class_axis = outputs.class_axis(self.name)
        if self.ignore_index is None:
            self.ignore_index = outputs.ignore_index

    def values(self, prediction: Array, labels: Array) -> Any:
        scores, right, counted = self.class_labels(prediction, labels)
        score = np.take_along_axis(scores, np.expand_dims(right, 1), 1)
        # As many as k classes may be better; among equals the first counts as better, as in a sorted list.
        numbers = np.arange(scores.shape[1]).reshape(1, -1, *(1,) * (scores.ndim - 2))
        better = (scores > score) | ((scores == score) & (numbers < np.expand_dims(right, 1)))
        found = (better.sum(axis=1) < self.k) & np.isfinite(score[:, 0])
        return self.per_sample(found, counted)
