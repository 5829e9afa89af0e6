"""Samples of different lengths or sizes: every batch has samples of one size, and each size is compiled once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.data import Batch, Data, Epoch, Feed, order_of
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.streams import Stream


class Buckets(Stream):
    """Lists of samples, put into buckets by their sizes; batches are cut from one bucket each, in shuffled order.

    Nothing is padded: pad samples to a few lengths yourself where there would be too many, as docs/trainer.md shows.
    """

    def __init__(self, who: str, feed: Feed, columns: Sequence[Mapping[str, Sequence[Any]]], only_inputs: bool) -> None:
        super().__init__(who, feed, (), only_inputs)
        self._parts = columns
        every = {name: column for part in columns for name, column in part.items()}
        counts = {name: len(column) for name, column in every.items()}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"'{name}' {count}" for name, count in counts.items())
            raise DataError(f"{who}: different numbers of samples", samples=said)
        self.count: int = next(iter(counts.values()))
        buckets: dict[tuple[Any, ...], list[int]] = {}
        shapes = [shapes_of(who, name, column) for name, column in every.items()]
        for index, key in enumerate(zip(*shapes, strict=True)):
            buckets.setdefault(key, []).append(index)
        #: Numbers of the samples of every size.
        self._buckets = [np.array(buckets[key]) for key in sorted(buckets)]

    def check(self, epochs: int, batch_size: int | None) -> None:
        """They can be gone through again and again, in batches of any size."""

    def batch_count(self, size: int, least: int = 1) -> int | None:
        return sum(len(one) // size + (len(one) % size >= least) for one in self._buckets)

    def groups(self, size: int, epoch: int, seed: int | None, least: int = 1) -> list[Array]:
        """The numbers of the samples of every batch."""
        found: list[Array] = []
        for number, bucket in enumerate(self._buckets):
            if seed is not None:  # orders of their own, or all buckets of one length would be shuffled alike
                bucket = bucket[order_of(seed + (number << 32), epoch, len(bucket))]
            found += [bucket[first : first + size] for first in range(0, len(bucket), size)]
        found = [group for group in found if len(group) >= least]
        return found if seed is None else [found[index] for index in order_of(seed, epoch, len(found))]

    def _items(self, epoch: Epoch) -> Iterator[Batch]:
        for number, group in enumerate(self.groups(epoch.size, epoch.number, epoch.seed, epoch.least)[epoch.skip :]):
            taken = [
                {name: np.stack([np.asarray(column[i]) for i in group]) for name, column in part.items()} or None
                for part in self._parts
            ]
            yield self._batch(taken, number)


def shapes_of(who: str, name: str, samples: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shape of every sample."""
    found = []
    for index, sample in enumerate(samples):
        try:
            found.append(np.shape(sample))
        except ValueError:
            raise DataError(
                f"{who}: '{name}': the rows of sample {index} have different lengths", fix="cut or pad them"
            ) from None
    return found


def put_back(parts: Sequence[Array], data: Data, size: int) -> Array:
    """Predictions of all samples in their order, as one array; of different shapes as an array of arrays."""
    samples = [sample for part in parts for sample in part]
    if isinstance(data, Buckets):
        order = np.argsort(np.concatenate(data.groups(size, 0, None)))
        samples = [samples[index] for index in order]
    elif len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    if len({sample.shape for sample in samples}) == 1:
        return np.stack(samples)
    found = np.empty(len(samples), object)
    found[:] = samples
    return found
