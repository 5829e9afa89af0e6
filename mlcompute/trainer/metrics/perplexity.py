"""Perplexity of language models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.metrics.metric import Array, ClassMetric, Outputs


class Perplexity(ClassMetric):
    """exp(mean of -log p(right class)), the mean over all steps of all samples.

    from_logits   the prediction is logits, not probabilities; None: the trainer's loss tells
    ignore_index  the integer class label, of padding say, that counts nowhere
    """

    def __init__(
        self,
        name: str = "perplexity",
        class_axis: int | None = None,
        from_logits: bool | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(name, class_axis, False, ignore_index=ignore_index)
        self.from_logits = from_logits

    def set_up(self, outputs: Outputs) -> None:
        super().set_up(outputs)
        if self.from_logits is None:
            self.from_logits = outputs.gives_logits(self.name)

    def values(self, prediction: Array, labels: Array) -> Any:
        if self.from_logits is None:
            raise DataError(f"metric '{self.name}': are these logits or probabilities?", fix="pass from_logits=")
        scores, right, counted = self.class_labels(prediction, labels)
        picked = np.take_along_axis(scores, np.expand_dims(right, 1), 1)[:, 0].astype(np.float64)
        if self.from_logits:
            scores = scores.astype(np.float64)
            largest = scores.max(axis=1)
            powers = np.exp(scores - np.expand_dims(largest, 1))
            surprise = largest + np.log(powers.sum(axis=1)) - picked
        else:
            with np.errstate(divide="ignore"):
                surprise = -np.log(picked)
        rows = surprise.reshape(len(surprise), -1)
        if counted is None:
            return rows.mean(axis=1)
        seen = counted.reshape(rows.shape)
        many = seen.sum(axis=1)
        return np.where(seen, rows, 0).sum(axis=1) / np.maximum(many, 1), many.astype(np.float64)

    def result(self) -> float:
        mean = super().result()
        return math.exp(mean) if mean < 700 else (math.nan if math.isnan(mean) else math.inf)
