"""From the numbers of every class to one number."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.metrics.metric import Array

#: macro: the mean of the classes; weighted: the same, each class as often as it occurs; micro: all decisions pooled;
#: None: every class by itself, as `name_0`, `name_1` ... in the logs.
Average = Literal["macro", "micro", "weighted"] | None


def checked_average(who: str, given: Any) -> Average:
    """One of the four, or DataError."""
    if given not in ("macro", "micro", "weighted", None):
        raise DataError(f"{who}: average is {given!r}", expected="'macro', 'micro', 'weighted' or None")
    checked: Average = given
    return checked


def averaged(per_class: Array, average: Average, weights: Array) -> float:
    """One number; classes without one, NaN, do not count."""
    known = ~np.isnan(per_class)
    if not known.any():
        return math.nan
    if average == "weighted":
        total = weights[known].sum()
        return float((per_class[known] * weights[known]).sum() / total) if total else 0.0
    return float(per_class[known].mean())


def logged(name: str, average: Average, result: float, per_class: Array) -> dict[str, float]:
    """What goes into the logs: one number, or one per class."""
    if average is None and len(per_class) > 1:
        return {f"{name}_{index}": float(value) for index, value in enumerate(per_class)}
    return {name: result}
