"""Real images for `train_digits.py`: handwritten digits, or a folder in MNIST's file format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import mlcompute as mlc


@dataclass(frozen=True)
class Images:
    """Grey images (n, 1, height, width) from 0 to 1 and their classes (n,), to learn from and to test on."""

    name: str
    train: np.ndarray
    train_classes: np.ndarray
    test: np.ndarray
    test_classes: np.ndarray

    @property
    def class_count(self) -> int:
        return int(max(self.train_classes.max(), self.test_classes.max())) + 1


def load(folder: str | None = None) -> Images:
    """What the command line reads too; a message instead of a traceback when there is nothing to read."""
    try:
        data = mlc.data.read_idx(folder) if folder else mlc.data.digits()
    except mlc.DataError as error:
        raise SystemExit(str(error)) from error
    return Images(data.name, data.x, data.y, data.validation.x, data.validation.y)
