"""Splits into training, validation and test samples: a function of seed, labels and shares only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlcompute.data.target import Array
from mlcompute.errors import DataError
from mlcompute.layers.arguments import number_of, real


class Parts(NamedTuple):
    """Numbers of samples, each part in their order."""

    train: Array
    validation: Array
    test: Array


@dataclass(frozen=True)
class Split:
    """Shares of the samples that are held out.

    in_order  the last samples are, as of a text or a time series; else random ones, of every class its share
    other     a file of its own for validation, as it was named
    """

    validation: float = 0.2
    test: float = 0.0
    seed: int = 0
    in_order: bool = False
    other: str = ""

    def __post_init__(self) -> None:
        number_of("mlcompute.data", "seed", self.seed)
        for name in ("validation", "test"):
            object.__setattr__(self, name, share_of("mlcompute.data", name, getattr(self, name)))

    def parts(self, who: str, count: int, classes: Array | None = None) -> Parts:
        """The samples of each part; a share of less than one sample is none."""
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise DataError(
                f"{who}: {self.validation:g} of the samples for validation and {self.test:g} for testing",
                expected="shares from 0, together below 1, so that some are left to learn from",
            )
        held = int(count * self.validation), int(count * self.test)
        if self.in_order:
            first, second = count - sum(held), count - held[1]
            return Parts(np.arange(first), np.arange(first, second), np.arange(second, count))
        order = np.random.default_rng(self.seed).permutation(count)
        alone = np.zeros(count, bool)
        if classes is not None:
            order = order[np.argsort(classes[order], kind="stable")]
            alone = (np.bincount(classes)[classes] == 1)[order]
        test = _every(order[~alone], held[1])
        rest = order[~np.isin(order, test) & ~alone]
        validation = _every(rest, min(held[0], max(len(rest) - 1, 0)))
        taken = np.concatenate([test, validation])
        return Parts(np.setdiff1d(np.arange(count), taken), np.sort(validation), np.sort(test))


def share_of(who: str, name: str, share: Any) -> float:
    """A share of the samples as a number; refused where it is a file or the samples themselves."""
    if isinstance(share, (str, os.PathLike)):
        raise DataError(
            f"{who}: {name} is {os.fspath(share)!r}, which is no share of the samples",
            expected="a number from 0 to 1; files are for tables, images, .npz and texts",
        )
    try:
        return real(who, name, share)
    except TypeError as error:
        raise TypeError(f"{error}; samples of their own are given to fit: trainer.fit(data, validation=...)") from None


def _every(order: Array, held: int) -> Array:
    """So many of a list, evenly along it: sorted by class, every class gives its share."""
    steps = np.arange(len(order) + 1) * held // max(len(order), 1)
    return order[np.diff(steps) > 0]
