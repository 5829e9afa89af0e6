"""Evaluation of a classifier: the confusion matrix and its worst mistakes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.data import Dataset
from mlcompute.data.target import without_pixel
from mlcompute.errors import DataError, FileError
from mlcompute.ops.bfloat16 import computed
from mlcompute.runs.folders import write_json
from mlcompute.seeing.png import picture_of
from mlcompute.seeing.units import percent

if TYPE_CHECKING:
    from mlcompute.trainer import Trainer

#: Mistakes that are kept.
MOST_MISTAKES = 24


@dataclass(frozen=True)
class Mistake:
    """A sample that was taken for another class.

    sample       its place among those evaluated      label, predicted  integer class labels
    probability  the model's, of the class it predicted, and of the label
    picture      a data: address where the sample is an image; else empty
    name         what the sample is called, where it has a name: its file, or its line
    """

    sample: int
    label: int
    predicted: int
    probability: float
    label_probability: float
    picture: str = ""
    name: str = ""


@dataclass(frozen=True)
class Evaluation:
    """The confusion matrix of a classifier and its worst mistakes.

    classes    names of the classes
    confusion  [label][predicted] -> number of samples
    mistakes   sorted by the probability of the label, the lowest first
    """

    classes: list[str]
    confusion: list[list[int]]
    mistakes: list[Mistake]

    @classmethod
    def of(cls, trainer: Trainer, x: Any, y: Any = None, classes: Sequence[str] | None = None) -> Evaluation | None:
        """Of a trained classifier on samples x with integer class labels y, or on a Dataset; None for other labels."""
        samples: Any = x
        sample_names: tuple[str, ...] = ()
        if isinstance(x, Dataset):
            sample_names = x.sample_names
            y, classes, samples = x.y, classes or x.classes or None, x.values if not isinstance(x.x, Mapping) else None
        labels = np.asarray(y)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
            return None
        predicted = trainer.predict(x)
        if not isinstance(predicted, np.ndarray):
            return None
        predicted = without_pixel(predicted)
        if predicted.ndim > 2 or len(predicted) != len(labels):
            return None
        probabilities = probabilities_of(predicted.astype(np.float64), trainer.model.is_on_logits)
        if labels.max() >= probabilities.shape[1]:
            return None
        names = classes if classes is not None and len(classes) == probabilities.shape[1] else None
        found = cls.from_probabilities(probabilities, labels, samples, names)
        if not sample_names:
            return found
        return replace(found, mistakes=[replace(one, name=str(sample_names[one.sample])) for one in found.mistakes])

    @classmethod
    def from_probabilities(
        cls, probabilities: Any, labels: Any, x: Any = None, classes: Sequence[str] | None = None
    ) -> Evaluation:
        """Of probabilities (n, classes) and integer class labels (n,); x, or x(numbers), are samples, for pictures."""
        count = probabilities.shape[1]
        if classes is not None and len(classes) != count:
            raise DataError(f"Evaluation: {len(classes)} names for {count} classes", fix="give a name for every class")
        guesses = probabilities.argmax(axis=1)
        confusion = np.zeros((count, count), np.int64)
        np.add.at(confusion, (labels, guesses), 1)
        wrong = np.flatnonzero(guesses != labels)
        worst = wrong[np.argsort(probabilities[wrong, labels[wrong]], kind="stable")][:MOST_MISTAKES]
        if isinstance(x, np.ndarray):
            x = x.__getitem__
        mistakes = [
            Mistake(
                int(at),
                int(labels[at]),
                int(guesses[at]),
                round(float(probabilities[at, guesses[at]]), 4),
                round(float(probabilities[at, labels[at]]), 4),
                picture_of(x([at])[0]) if callable(x) else "",
            )
            for at in worst
        ]
        names = [str(name) for name in classes] if classes is not None else [str(index) for index in range(count)]
        return cls(names, confusion.tolist(), mistakes)

    @property
    def samples(self) -> int:
        """How many were evaluated."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """The share of samples whose class was predicted."""
        return sum(row[index] for index, row in enumerate(self.confusion)) / max(1, self.samples)

    @property
    def commonest(self) -> str:
        """The class that most samples have."""
        counts = [sum(row) for row in self.confusion]
        return self.classes[counts.index(max(counts))]

    @property
    def baseline(self) -> float:
        """The accuracy of always answering the commonest class, which needs no model."""
        return max(map(sum, self.confusion)) / max(1, self.samples)

    @property
    def remark(self) -> str:
        """What the accuracy is to be compared with, where the baseline's errors are not even halved; else empty."""
        if 1 - self.accuracy <= 0.5 * (1 - self.baseline):
            return ""
        return f"always answering {self.commonest!r} would be right for {percent(self.baseline)}"

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_json(Path(path), asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """What `save` wrote."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(found["classes"], found["confusion"], [Mistake(**one) for one in found["mistakes"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{path}: cannot be read: {error}", fix="remove it, and train or evaluate again") from error


def probabilities_of(predicted: Any, is_on_logits: bool) -> Any:
    """(n, classes): as they are where they are probabilities already, else the softmax; yes and no are two classes."""
    predicted = computed(predicted)
    if predicted.ndim == 1 or predicted.shape[1] == 1:
        yes = predicted.reshape(-1)
        yes = 1 / (1 + np.exp(-np.clip(yes, -700, 700))) if is_on_logits else np.clip(yes, 0, 1)
        return np.stack([1 - yes, yes], axis=1)
    if (predicted >= 0).all() and np.allclose(predicted.sum(axis=1), 1, atol=1e-3):
        return predicted
    scaled = np.exp(predicted - predicted.max(axis=1, keepdims=True))
    return scaled / scaled.sum(axis=1, keepdims=True)
