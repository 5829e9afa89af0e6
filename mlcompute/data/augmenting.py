"""Data augmentation: random changes of an image that depend only on seed, epoch and its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.data.target import Array
from mlcompute.errors import DataError
from mlcompute.layers.arguments import number_of, real

if TYPE_CHECKING:
    from mlcompute.data.dataset import Dataset

#: Uniform numbers drawn for every image, whatever is done with them.
_DRAWN = 8


@dataclass(frozen=True)
class Augment:
    """What is done to images (n, channels, height, width) with values from 0 to 1.

    flip    left and right are exchanged in half of them
    crop    moved by up to so many pixels, in both directions; the border is repeated
    rotate  rotated by up to so many degrees, in both directions
    colour  brightness, contrast and saturation changed by up to this share: 0.2 is 0.8 to 1.2 times
    mixup   each is mixed with another, λ image + (1 - λ) other, and so are the labels; λ is from Beta(mixup, mixup)
    seed    another seed, other changes

    >>> import mlcompute as mlc
    >>> data = mlc.data.digits().augmented(crop=1, rotate=10)
    >>> first, again = (data.batch([0, 1, 2], epoch=3)[0] for _ in range(2))
    >>> bool((first == again).all()), bool((first == data.batch([0, 1, 2], epoch=4)[0]).all())
    (True, False)
    """

    flip: bool = False
    crop: int = 0
    rotate: float = 0.0
    colour: float = 0.0
    mixup: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        number_of("Augment", "crop", self.crop)
        for name in ("rotate", "colour", "mixup"):
            if not real("Augment", name, getattr(self, name)) >= 0:
                raise DataError(f"Augment: {name} is {getattr(self, name)}", expected="0 or more")
        if self.colour >= 1:
            raise DataError(f"Augment: colour is {self.colour}", expected="a share below 1, e.g. 0.2")

    def apply(self, x: Array, y: Array | None, indices: Array, epoch: int, data: Dataset) -> tuple[Array, Array | None]:
        """Some images of an epoch, by their indices, and their labels: with mixup a share for every class."""
        streams = [self._stream(int(number), epoch) for number in indices]
        x = self._changed(x, np.array([stream.random(_DRAWN) for stream in streams]))
        if not self.mixup or y is None:
            return x, y
        share = np.array([stream.beta(self.mixup, self.mixup) for stream in streams], np.float32)
        others = np.array([stream.integers(len(data)) for stream in streams])
        drawn = np.array([self._stream(int(other), epoch).random(_DRAWN) for other in others])
        mixed = self._changed(data.values(others), drawn)
        by_image, by_label = share[:, None, None, None], share[:, None]
        labels = np.eye(data.outputs, dtype=np.float32)
        return x * by_image + mixed * (1 - by_image), labels[y] * by_label + labels[data.y[others]] * (1 - by_label)

    def _stream(self, number: int, epoch: int) -> np.random.Generator:
        # Philox counts in the lowest word: images lie 2^64 numbers apart.
        key = np.array([self.seed % 2**64, epoch], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, number, 0, 0], np.uint64)))

    def _changed(self, x: Array, drawn: Array) -> Array:
        x = x.copy()
        if self.flip:
            flipped = drawn[:, 0] < 0.5
            x[flipped] = x[flipped, :, :, ::-1]
        if self.crop:
            x = _moved(x, self.crop, drawn[:, 1:3])
        if self.rotate:
            x = _turned(x, np.radians(self.rotate * (2 * drawn[:, 3] - 1)))
        if self.colour:
            x = _coloured(x, 1 + self.colour * (2 * drawn[:, 4:7] - 1))
        return x


def _moved(x: Array, most: int, drawn: Array) -> Array:
    height, width = x.shape[2:]
    wide = np.pad(x, ((0, 0), (0, 0), (most, most), (most, most)), "edge")
    tops, lefts = (drawn * (2 * most + 1)).astype(int).T
    return np.stack(
        [one[:, top : top + height, left : left + width] for one, top, left in zip(wide, tops, lefts, strict=True)]
    )


def _turned(x: Array, angles: Array) -> Array:
    """Around the middle, between pixels linearly; what comes from outside repeats the border."""
    height, width = x.shape[2:]
    down, right = np.mgrid[:height, :width].reshape(2, 1, -1)
    down, right = down - (height - 1) / 2, right - (width - 1) / 2
    sine, cosine = np.sin(angles)[:, None], np.cos(angles)[:, None]
    rows = np.clip(cosine * down - sine * right + (height - 1) / 2, 0, height - 1)
    columns = np.clip(sine * down + cosine * right + (width - 1) / 2, 0, width - 1)
    top, left = rows.astype(int), columns.astype(int)
    bottom, beside = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    by_row, by_column = ((a - b).astype(np.float32)[:, None] for a, b in ((rows, top), (columns, left)))
    flat = x.reshape(*x.shape[:2], -1)

    def at(row: Array, column: Array) -> Array:
        return np.take_along_axis(flat, (row * width + column)[:, None], axis=2)

    upper = at(top, left) * (1 - by_column) + at(top, beside) * by_column
    lower = at(bottom, left) * (1 - by_column) + at(bottom, beside) * by_column
    rotated: Array = (upper * (1 - by_row) + lower * by_row).reshape(x.shape)
    return rotated


def _coloured(x: Array, factors: Array) -> Array:
    bright, contrast, saturation = factors.astype(np.float32).T[:, :, None, None, None]
    x = x * bright
    middle = x.mean(axis=(1, 2, 3), keepdims=True)
    x = middle + (x - middle) * contrast
    if x.shape[1] == 3:
        grey = x.mean(axis=1, keepdims=True)
        x = grey + (x - grey) * saturation
    return np.clip(x, 0, 1)
