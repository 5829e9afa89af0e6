"""The target: classes or numbers to predict."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mlcompute.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]
Task = Literal["classification", "regression"]
#: A column of whole numbers with at most so many different ones is taken for classes.
MOST_CLASSES = 20


def without_pixel(predictions: Array) -> Array:
    """(n, classes) of (n, classes, 1, 1), as convolutions and global pooling give; others as they are."""
    if predictions.ndim > 2 and predictions.size == len(predictions) * predictions.shape[1]:
        predictions = predictions.reshape(predictions.shape[:2])
    return predictions


@dataclass(frozen=True)
class Target:
    """Labels as they are written, and as a network is fed them.

    classes    names in the order of their numbers; empty: numbers are predicted
    mean, std  of the numbers in training, one for each output: y = (label - mean) / std
    """

    name: str
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def outputs(self) -> int:
        """How many outputs a network needs."""
        return len(self.classes) or len(self.mean)

    @classmethod
    def of(cls, who: str, name: str, labels: Array, task: Task | None, are_classes: bool) -> Target:
        """Decide what labels are.

        labels       (n,) of text or numbers, or (n, outputs) numbers
        are_classes  what whole numbers are, where `task` does not say
        """
        if task not in (None, "classification", "regression"):
            raise DataError(f"{who}: task is {task!r}", expected="'classification' or 'regression'")
        is_text = labels.dtype.kind not in "iuf"
        if is_text and task == "regression":
            raise DataError(
                f"{who}: '{name}' is not made of numbers (one is {str(labels[0])!r}): there is no regression on it",
                fix="make it numbers, or leave the task out: it is classification",
            )
        if task == "classification" or (task is None and (is_text or (labels.ndim == 1 and are_classes))):
            return cls(name, _classes(who, name, labels))
        width = 1 if labels.ndim == 1 else int(np.prod(labels.shape[1:]))
        if len(labels) > 1 and bool((labels == labels[:1]).all()):
            what = f"'{name}' is {labels.flat[0]} for every sample: there is nothing to learn"
            raise DataError(f"{who}: {what}", fix="choose another target")
        return cls(name, (), (0.0,) * width, (1.0,) * width)

    def standardized(self, y: Array) -> Target:
        """Numbers are predicted in units of their standard deviation, from their mean."""
        if self.classes:
            return self
        mean, std = y.mean(axis=0, dtype=np.float64), y.std(axis=0, dtype=np.float64)
        return replace(self, mean=_floats(mean), std=_floats(np.where(std > 0, std, 1.0)))

    def encode(self, who: str, labels: Array, places: Sequence[object] = ()) -> Array:
        """Labels as a network is fed them: integer class labels (n,), or float32 (n, outputs).

        places  where each label stands, for messages
        """
        if not self.classes:
            if labels.dtype.kind not in "iuf":
                labels = np.asarray([float(label) for label in labels])
            numbers = labels.reshape(len(labels), -1).astype(np.float64)
            return ((numbers - self.mean) / self.std).astype(np.float32)
        texts, which = np.unique(label_texts(labels), return_inverse=True)
        numbers = np.array([self._number(who, str(text), which == k, places) for k, text in enumerate(texts)], np.int64)
        return numbers[which.reshape(-1)] if len(texts) else np.zeros(0, np.int64)

    def _number(self, who: str, text: str, where: Array, places: Sequence[object]) -> int:
        if text in self.classes:
            return self.classes.index(text)
        first = int(np.flatnonzero(where)[0])
        place = places[first] if len(places) else f"sample {first}"
        raise DataError(
            f"{who}: {place}: the label {text!r} was not among the classes of the training data",
            classes=listed(self.classes),
            fix=f"{closest(text, self.classes)}; or train again with data that has it",
        )

    def decode(self, predictions: Array) -> Array:
        """Predictions as people write them: names of classes (n,), or numbers in their own units.

        predictions  (n, classes), or of convolutions and global pooling (n, classes, 1, 1)
        """
        if self.classes:
            scores, count = without_pixel(predictions), len(self.classes)
            if scores.shape[-1] != count:
                raise DataError(
                    f"decode: predictions of shape {predictions.shape} for {count} classes",
                    expected=f"{count} scores a sample: {listed(self.classes)}",
                    fix="of one yes or no: np.array(prepared.classes)[(logits[:, 0] > 0).astype(int)]"
                    if count == 2
                    else f"give the last layer {count} outputs",
                )
            names: Array = np.array(self.classes)[scores.argmax(axis=-1)]
            return names
        numbers: Array = predictions.reshape(len(predictions), -1) * np.array(self.std) + self.mean
        return numbers

    def described(self, y: Array | None = None) -> str:
        """'3 classes: cat (12), dog (14), owl (9)', or 'a number, mean 3.1, standard deviation 0.7'."""
        if self.classes:
            counts = np.bincount(y, minlength=len(self.classes)) if y is not None else None
            if counts is None or len(counts) > 6:
                each = "" if counts is None else f" of {counts.min()} to {counts.max()} samples"
                return f"{len(self.classes)} classes{each}: {listed(self.classes)}"
            each = listed([f"{short(one)} ({n:,})" for one, n in zip(self.classes, counts, strict=True)])
            return f"{len(counts)} classes: {each}"
        if len(self.mean) > 1:
            return f"{len(self.mean)} numbers"
        mean, std = shown(self.mean[0]), shown(self.std[0])
        return f"a number, mean {mean}, standard deviation {std}; learned as (y - mean) / std"


def label_texts(labels: Array) -> Array:
    """Every label as text: 3 for 3.0."""
    if labels.dtype.kind == "f" and bool((labels == np.round(labels)).all()):
        labels = labels.astype(np.int64)
    return labels.astype(str)


def _classes(who: str, name: str, labels: Array) -> tuple[str, ...]:
    if labels.ndim != 1:
        raise DataError(
            f"{who}: '{name}' has shape {labels.shape}, classes are one label per sample",
            fix=f"give an array of shape ({len(labels)},)",
        )
    if labels.dtype.kind == "f" and not (labels == np.round(labels)).all():
        odd = labels[labels != np.round(labels)][0]
        raise DataError(f"{who}: '{name}' has {odd:g}, which is no class", fix="leave the task out: it is regression")
    found = tuple(map(str, label_texts(np.unique(labels))))
    if len(found) == 1:
        raise DataError(
            f"{who}: every sample has the class {found[0]!r}: there is nothing to tell apart",
            fix="give samples of at least two classes, or choose another target",
        )
    if len(found) > MOST_CLASSES and 2 * len(found) > len(labels):
        raise DataError(
            f"{who}: '{name}' has {len(found)} classes in {len(labels)} samples",
            fix="choose another target; numbers to be predicted are task='regression' (--task regression)",
        )
    return found


def looks_like_classes(numbers: Array) -> bool:
    """Are numbers of a table classes? Whole ones close to each other, few different ones, each several times."""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf" or not (numbers == np.round(numbers)).all():
        return False
    different = np.unique(numbers)
    is_close = bool(different[-1] - different[0] < 2 * len(different))  # 3, 4, 5; prices are far apart
    return is_close and len(different) <= max(2, min(MOST_CLASSES, len(numbers) // 5))


def closest(word: str, known: Sequence[str], otherwise: str = "") -> str:
    """'did you mean price?', or `otherwise`, or all there are, where nothing is near."""
    lower = {one.lower(): one for one in reversed(known)}
    near = difflib.get_close_matches(word.lower(), list(lower), n=1)
    return f"did you mean {lower[near[0]]!r}?" if near else otherwise or f"known are {listed(known)}"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names one after the other; of many the first ones."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def short(text: str) -> str:
    """A value on one line, not longer than a word or two."""
    line = " ".join(str(text).split())
    return line if len(line) <= 40 else f"{line[:39]}…"


def shown(number: float) -> str:
    """A number as people read it."""
    return f"{number:,.0f}" if 10_000 <= abs(number) < 1e15 else f"{number:.4g}"


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in np.atleast_1d(values))
