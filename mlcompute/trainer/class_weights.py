"""Class weights: the loss of every sample, pixel or step is weighted by its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.columns import Column
from mlcompute.trainer.data import Feed
from mlcompute.trainer.metrics import Array

#: By class, in order of classes, or "balanced": each class counts alike in all, n / (classes * its samples).
ClassWeight = Mapping[int, float] | Literal["balanced"] | Any


def class_numbers(who: str, labels: Column, feed: Feed) -> Array:
    """The integer class label of every sample, pixel or step, whatever form the labels have; others count nowhere.

    Refused where labels are no classes: numbers to be predicted, or several answers for a sample.
    """
    array, shape, class_axis = labels.array, (0, *labels.extents), feed.class_axes.get(labels.name, 1)
    if labels.class_axis or labels.tensor.descriptor.data_type.numpy.kind in "iu":
        return array
    if labels.name not in feed.probabilities:  # those are refused elsewhere where they are not from 0 to 1
        others = array[(array != 0) & (array != 1)]
        if others.size:
            raise DataError(
                f"{who}: class_weight is for classes, '{labels.name}' has {others.flat[0]:g}",
                expected="integer class labels, one-hot labels, or 0 for no and 1 for yes",
                fix="for numbers to be predicted, give sample_weight",
            )
    if len(shape) < 2 or shape[class_axis] == 1:
        return (array > 0.5).astype(np.int64)
    dense = array.reshape(len(array), *shape[1:])
    most = int((dense > 0.5).sum(axis=class_axis).max(initial=0))
    if most > 1:
        raise DataError(
            f"{who}: class_weight: a sample of '{labels.name}' has {most} classes, not one",
            fix="where samples have several labels, give sample_weight",
        )
    found: Array = np.where(dense.any(axis=class_axis), dense.argmax(axis=class_axis), -1)
    return found


def places_of(labels: Column, class_axis: int) -> tuple[int, ...]:
    """The extents of a sample's labels without that of the classes: one label per pixel or step."""
    extents = labels.extents
    return (*extents[: class_axis - 1], *extents[class_axis:]) if len(extents) >= class_axis else extents


def weight_table(who: str, given: Any, classes: int, numbers: Array | None) -> Array:
    """One weight per class.   (classes,)"""
    if isinstance(given, str):
        if given != "balanced":
            raise DataError(f"{who}: class_weight is {given!r}", expected="'balanced', or a weight for each class")
        if numbers is None:
            raise DataError(
                f"{who}: class_weight='balanced' needs labels that can be counted",
                fix="give arrays, or count yourself: class_weight={0: ..., 1: ...}",
            )
        counts = np.bincount(numbers[(numbers >= 0) & (numbers < classes)].astype(np.int64), minlength=classes)
        balanced: Array = (counts.sum() / (classes * np.maximum(counts, 1))).astype(np.float32)
        return balanced
    entries = dict(given) if isinstance(given, Mapping) else dict(enumerate(np.asarray(given).ravel().tolist()))
    unknown = [key for key in entries if not isinstance(key, (int, np.integer)) or not 0 <= key < classes]
    if unknown or (not isinstance(given, Mapping) and len(entries) != classes):
        what = f"names the class {unknown[0]!r}" if unknown else f"has {len(entries)} entries"
        raise DataError(f"{who}: class_weight {what}, the graph has {classes} classes", expected=f"0 to {classes - 1}")
    table = np.ones(classes, np.float32)
    for key, weight in entries.items():
        if not np.isfinite(float(weight)) or float(weight) < 0:
            raise DataError(f"{who}: class_weight of class {key} is {weight}", expected="0 or more")
        table[int(key)] = float(weight)
    return table


def weighed(who: str, numbers: Array, table: Array, sample_weight: Any) -> Array:
    """The weight of every sample or step, times the one given for it."""
    places = tuple(extent for extent in numbers.shape[1:] if extent != 1)
    known = (numbers >= 0) & (numbers < len(table))  # else the label is one that the loss ignores
    weights: Array = np.where(known, table[np.where(known, numbers, 0)], 1.0).astype(np.float32)
    weights = weights.reshape(len(numbers), *places)
    if sample_weight is None:
        return weights
    given = np.asarray(sample_weight, np.float32)
    if given.shape[:1] != weights.shape[:1]:
        raise DataError(f"{who}: {len(given)} weights for {len(weights)} samples")
    given = given.reshape(len(given), *(e for e in given.shape[1:] if e != 1))
    return weights * (given.reshape(len(given), *(1,) * len(places)) if given.ndim == 1 else given)
