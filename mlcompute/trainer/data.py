"""Data to train on: arrays in memory, or an iterable of batches; both give batches ready to be fed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.tensor import Tensor
from mlcompute.trainer.columns import Column, column
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.prefetch import Prefetch
from mlcompute.trainer.shuffling import order_of

#: About how many bytes of samples are prepared at once: enough that the hand-over between threads costs nothing.
_CHUNK_BYTES = 4 << 20
_CHUNK_BATCHES = 64


class Batch(NamedTuple):
    """What one run is fed, by name, and how many samples it is."""

    inputs: dict[str, Array]
    labels: dict[str, Array]
    weights: dict[str, Array]
    rows: int


@dataclass(frozen=True)
class Feed:
    """What a graph wants to be fed: tensors by name, and the number of samples it was built for."""

    inputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    batch: int


class Data(ABC):
    """Something that gives batches, epoch after epoch."""

    #: How many samples there are; None when only going through them tells.
    count: int | None = None

    @abstractmethod
    def batches(
        self,
        size: int,
        epoch: int = 0,
        seed: int | None = None,
        skip: int = 0,
        stops: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        """The batches of one epoch, prepared ahead by a thread; the last may be short.

        seed   shuffles, None leaves the order alone
        skip   leaves out that many batches at the beginning
        stops  asked while waiting for data
        """

    def batch_count(self, size: int) -> int | None:
        """How many batches an epoch has; None when nobody knows."""
        return None if self.count is None else -(-self.count // size)


class Arrays(Data):
    """Samples in memory, on axis 0 of arrays of one length."""

    def __init__(self, who: str, inputs: list[Column], labels: list[Column], weights: list[Column]) -> None:
        self._columns = (inputs, labels, weights)
        every = [one for columns in self._columns for one in columns]
        counts = {one.name: one.count for one in every if not one.shared}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"{who}: different numbers of samples",
                samples=", ".join(f"'{name}' {count}" for name, count in counts.items()),
            )
        self.count: int = next(iter(counts.values()), 0)
        if not self.count:
            raise DataError(f"{who}: there are no samples")
        self._row_bytes = sum(one.row_bytes for one in every if not one.shared)

    def batches(
        self,
        size: int,
        epoch: int = 0,
        seed: int | None = None,
        skip: int = 0,
        stops: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        ahead = Prefetch(self._chunks(size, epoch, seed, skip * size), stops=stops)
        try:
            for chunk in ahead:
                yield from self._cut(chunk, size)
        finally:
            ahead.close()

    def _chunks(self, size: int, epoch: int, seed: int | None, start: int) -> Iterator[Batch]:
        order = None if seed is None else order_of(seed, epoch, self.count)
        per_chunk = min(max(_CHUNK_BYTES // max(self._row_bytes * size, 1), 1), _CHUNK_BATCHES) * size
        for first in range(start, self.count, per_chunk):
            last = min(first + per_chunk, self.count)
            picked = slice(first, last) if order is None else order[first:last]
            inputs, labels, weights = ({one.name: one.rows(picked) for one in columns} for columns in self._columns)
            yield Batch(inputs, labels, weights, last - first)

    def _cut(self, chunk: Batch, size: int) -> Iterator[Batch]:
        """Batches that are views of a chunk."""
        if chunk.rows <= size:
            yield chunk
            return
        inputs, labels, weights = (
            [(one.name, part[one.name], 0 if one.shared else one.scale) for one in columns]
            for columns, part in zip(self._columns, chunk[:3], strict=True)
        )
        for first in range(0, chunk.rows, size):
            rows = min(size, chunk.rows - first)
            last = first + rows
            yield Batch(
                {n: a[first * k : last * k] if k else a for n, a, k in inputs},
                {n: a[first * k : last * k] if k else a for n, a, k in labels},
                {n: a[first * k : last * k] if k else a for n, a, k in weights},
                rows,
            )


class Stream(Data):
    """Batches that somebody else makes: (inputs, labels) pairs, (inputs, labels, weights), or inputs alone.

    source  an iterable that can be gone through again for every epoch, or a function of the number of the epoch
            that gives one
    """

    def __init__(self, who: str, feed: Feed, source: Any) -> None:
        self._who, self._feed, self._source = who, feed, source
        self._is_used = False
        #: Batches per epoch, where the source has a length.
        self._length = len(source) if hasattr(source, "__len__") else None

    def batch_count(self, size: int) -> int | None:
        return self._length

    def batches(
        self,
        size: int,
        epoch: int = 0,
        seed: int | None = None,
        skip: int = 0,
        stops: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        ahead = Prefetch(self._items(epoch, skip), stops=stops)
        try:
            yield from ahead
        finally:
            ahead.close()

    def _items(self, epoch: int, skip: int) -> Iterator[Batch]:
        source = self._source(epoch) if callable(self._source) else self._source
        if isinstance(source, Iterator) and not callable(self._source):
            if self._is_used:
                raise DataError(
                    f"{self._who}: the iterator is exhausted, it can be gone through only once",
                    fix="pass something that can be iterated again (a list, a loader), or a function of the epoch "
                    "that returns an iterator",
                )
            self._is_used = True
        for number, item in enumerate(source):
            if number >= skip:
                yield self._batch(item, number)

    def _batch(self, item: Any, number: int) -> Batch:
        who = f"{self._who}: batch {number}"
        parts = item if isinstance(item, (tuple, list)) else (item,)
        if not 1 <= len(parts) <= 3:
            raise DataError(f"{who} has {len(parts)} parts", expected="(inputs, labels) or (inputs, labels, weights)")
        x, y, w = (*parts, None, None)[:3]
        columns = _columns(who, self._feed, x, y, w)
        whole = Arrays(who, *columns)
        if whole.count > self._feed.batch:
            raise ShapeError(
                f"{who} has {whole.count} samples, the graph was built for {self._feed.batch}",
                fix=f"give batches of at most {self._feed.batch}, or build the graph's inputs for larger ones",
            )
        return next(iter(whole._chunks(whole.count, 0, None, 0)))


def data_from(who: str, feed: Feed, x: Any, y: Any = None, weights: Any = None) -> Data:
    """The data a user gave: arrays (one, a list in the inputs' order, or by name), or an iterable of batches."""
    if isinstance(x, Data):
        return x
    is_array = hasattr(x, "__array__") or hasattr(x, "__dlpack__") or hasattr(x, "shape")
    if y is None and weights is None and not is_array and not isinstance(x, Mapping):
        makes_batches = callable(x) or isinstance(x, Iterator) or (isinstance(x, Iterable) and feed.labels)
        if makes_batches and not isinstance(x, (str, bytes)):
            return Stream(who, feed, x)
    return Arrays(who, *_columns(who, feed, x, y, weights))


def _columns(who: str, feed: Feed, x: Any, y: Any, weights: Any) -> tuple[list[Column], list[Column], list[Column]]:
    found = []
    for kind, tensors, given in (
        ("input", feed.inputs, x),
        ("label", feed.labels, y),
        ("weight", feed.weights, weights),
    ):
        named = _named(who, kind, tensors, given)
        found.append(
            [
                column(name, tensors[name], data, who, batch=feed.batch, is_label=kind == "label")
                for name, data in named.items()
            ]
        )
    return found[0], found[1], found[2]


def _named(who: str, kind: str, tensors: Mapping[str, Tensor], given: Any) -> dict[str, Any]:
    """Data by name: from a mapping, from a list in order, or for the only one."""
    expected = ", ".join(f"'{name}' {tensor.descriptor.shape}" for name, tensor in tensors.items()) or "none"
    if given is None:
        named: dict[str, Any] = {}
    elif isinstance(given, Mapping):
        named = dict(given)
    elif len(tensors) == 1:
        ((name, tensor),) = tensors.items()
        if isinstance(given, (tuple, list)) and len(given) == 1 and np.ndim(given[0]) >= len(tensor.descriptor.shape):
            (given,) = given  # a list of the only one
        named = {name: given}
    elif isinstance(given, (tuple, list)) and len(given) == len(tensors):
        named = dict(zip(tensors, given, strict=True))
    else:
        raise DataError(
            f"{who}: the graph has {len(tensors)} {kind}s", expected=expected, fix="give a dict: name -> array"
        )
    unknown = [name for name in named if name not in tensors]
    if unknown:
        raise DataError(f"{who}: there is no {kind} named {unknown[0]!r}", expected=expected)
    missing = [name for name in tensors if name not in named]
    if missing and (named or kind == "input"):
        raise DataError(f"{who}: no data for {kind} {missing[0]!r}", expected=expected)
    return named
