"""Areas under ROC and precision-recall curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.metrics.averaging import Average, averaged, checked_average, logged
from mlcompute.trainer.metrics.metric import Array, ClassMetric, Outputs, probabilities


class AUC(ClassMetric):
    """The area under the ROC curve, exact: the share of pairs (a yes, a no) with the larger score for the yes.

    curve        "roc", or "pr": the average precision, the area under the steps of the precision-recall curve
    average      of classes (each against the rest) or of outputs: "macro", "weighted", "micro" or None, as for `F1`.
                 Classes that no sample has, or all have, are NaN in `per_class` and do not count
    from_logits  scores of classes are logits, and become probabilities; None: the trainer's loss tells

    All scores are kept until the epoch ends, 4 bytes each for float32.
    """

    is_slow = True

    def __init__(
        self,
        name: str = "auc",
        curve: Literal["roc", "pr"] = "roc",
        average: Average = "macro",
        per_output: bool | None = None,
        class_axis: int | None = None,
        from_logits: bool | None = None,
        ignore_index: int | None = None,
    ) -> None:
        if curve not in ("roc", "pr"):
            raise DataError(f"AUC: curve is {curve!r}", expected="'roc' or 'pr'")
        self.curve, self.average = curve, checked_average("AUC", average)
        self.from_logits = from_logits
        super().__init__(name, class_axis, per_output, ignore_index=ignore_index)

    def set_up(self, outputs: Outputs) -> None:
        super().set_up(outputs)
        if self.from_logits is None and not self.per_output:
            self.from_logits = outputs.gives_logits(self.name)

    def reset(self) -> None:
        self._scores: list[Array] = []
        self._right: list[Array] = []

    def update(self, prediction: Array, labels: Array) -> None:
        if self.is_yes_or_no(prediction):
            right = self.decisions(prediction, labels)[1]
            scores = self.classes_first(prediction).reshape(right.shape)
        else:
            if self.from_logits is None:
                raise DataError(f"metric '{self.name}': are these logits or probabilities?", fix="pass from_logits=")
            scores, classes, counted = self.class_labels(prediction, labels)
            scores = probabilities(scores) if self.from_logits else scores
            right = np.expand_dims(classes, 1) == np.arange(scores.shape[1]).reshape(-1, *(1,) * (classes.ndim - 1))
            if counted is not None:
                scores, right = (np.moveaxis(part, 1, -1)[counted] for part in (scores, right))
        # A copy: the prediction's memory is the next batch's too.
        self._scores.append(np.moveaxis(scores, 1, -1).reshape(-1, scores.shape[1]).copy())
        self._right.append(np.moveaxis(right, 1, -1).reshape(-1, scores.shape[1]))

    def _all(self) -> tuple[Array, Array]:
        if not self._scores:
            return np.zeros((0, 0), np.float32), np.zeros((0, 0), np.bool_)
        return np.concatenate(self._scores), np.concatenate(self._right)

    def per_class(self) -> Array:
        scores, right = self._all()
        area = _roc_area if self.curve == "roc" else _average_precision
        return np.array([area(s, r) for s, r in zip(scores.T, right.T, strict=True)], np.float64)

    def result(self) -> float:
        return self._result(self.per_class())

    def _result(self, per_class: Array) -> float:
        scores, right = self._all()
        if self.average == "micro":
            return (_roc_area if self.curve == "roc" else _average_precision)(scores.ravel(), right.ravel())
        return averaged(per_class, self.average, right.sum(axis=0))

    def logs(self) -> dict[str, float]:
        found = self.per_class()
        return logged(self.name, self.average, self._result(found), found)

    def state(self) -> dict[str, Any]:
        scores, right = self._all()
        return {"scores": scores, "right": right.astype(np.uint8)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._scores, self._right = [np.array(state["scores"])], [np.array(state["right"]).astype(np.bool_)]


def _roc_area(scores: Array, right: Array) -> float:
    """Mann and Whitney's count of pairs in order, ties half; NaN where there are no pairs."""
    yes = int(right.sum())
    no = right.size - yes
    if not yes or not no or np.isnan(scores).any():
        return math.nan
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    first = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    last = np.concatenate([first[1:], [scores.size]])
    # Equal scores share the mean of their ranks, 1 ... n.
    ranks = np.repeat((first + 1 + last) / 2, last - first)
    return float((ranks[right[order]].sum() - yes * (yes + 1) / 2) / (yes * no))


def _average_precision(scores: Array, right: Array) -> float:
    """The sum over thresholds of (recall there - recall before) times precision; NaN without any yes."""
    yes = int(right.sum())
    if not yes or np.isnan(scores).any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(right[order])
    last = np.flatnonzero(np.concatenate([ranked[1:] != ranked[:-1], [True]]))
    hits = hits[last]
    return float((np.diff(hits, prepend=0) / yes * (hits / (last + 1))).sum())
