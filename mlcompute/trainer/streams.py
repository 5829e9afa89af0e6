"""An iterable of batches, or a dataset of samples by number, as data to train on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.tensor import Tensor
from mlcompute.trainer.arrays import Arrays
from mlcompute.trainer.columns import Column, as_array
from mlcompute.trainer.data import Batch, Data, Epoch, Feed, order_of
from mlcompute.trainer.feed_columns import columns_of
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.prefetch import Prefetch

#: What to do with samples of different shapes.
ONE_SHAPE = "give all samples one shape: cut or pad those that differ"
_SEVERAL_SIZES = "samples of several sizes are given as a list: fit([x0, x1, ...], labels)"
_AGAIN = (
    "pass something that can be iterated again (a list, a loader), or a function of the epoch that returns an iterator"
)


class Stream(Data):
    """Batches that somebody else makes: (inputs, labels) pairs, (inputs, labels, weights), or inputs alone; or one dict
    of them all. Single samples are put together to batches.

    source  an iterable that can be gone through again for every epoch, or a function of the number of the epoch
            that gives one
    only_inputs  labels and weights that come along are left alone
    """

    def __init__(self, who: str, feed: Feed, source: Any, only_inputs: bool = False) -> None:
        self._who, self._feed, self._source, self._only_inputs = who, feed, source, only_inputs
        self._is_used = False
        #: Items per epoch, where the source has a length.
        self._length = _length_of(source)
        #: Are the items single samples? Known when the first one was seen.
        self._gives_samples = False

    def batch_count(self, size: int, least: int = 1) -> int | None:
        if self._length is None or not self._gives_samples:
            return self._length
        return self._length // size + (self._length % size >= least)

    def check(self, epochs: int, batch_size: int | None) -> None:
        if batch_size is not None and not self._is_sample(self._first()):
            raise DataError(
                f"{self._who}: batch_size is {batch_size}, but the data comes in batches",
                fix="leave batch_size out, and let whoever makes the batches choose their size",
            )
        if epochs > 1 and isinstance(self._source, Iterator):
            raise DataError(
                f"{self._who}: an iterator can be gone through only once, and {epochs} epochs were asked for",
                fix=_AGAIN,
            )

    def batches(self, epoch: Epoch) -> Generator[Batch, None, None]:
        ahead = Prefetch(self._items(epoch), stops=epoch.stops)
        try:
            yield from ahead
        finally:
            ahead.close()

    def _first(self) -> Any:
        """The first item, looked at before its time."""
        if isinstance(self._source, Iterator):
            first = list(islice(self._source, 1))
            self._source = chain(first, self._source)
        else:
            first = list(islice(self._opened(0), 1))
        return first[0] if first else None

    def _opened(self, epoch: int) -> Iterable[Any]:
        source: Iterable[Any] = _called(self._source, epoch) if callable(self._source) else self._source
        return source

    def _items(self, epoch: Epoch) -> Iterator[Batch]:
        source = self._opened(epoch.number)
        if isinstance(source, Iterator) and not callable(self._source):
            if self._is_used:
                raise DataError(f"{self._who}: the iterator is exhausted, it can be gone through only once", fix=_AGAIN)
            self._is_used = True
        kept = 0
        for number, item in enumerate(_in_batches(self._who, source, epoch.size, self._feed, self._is_sample)):
            if kept < epoch.skip and epoch.least == 1:  # what is skipped need not be looked at
                kept += 1
                continue
            batch = self._batch(item, number)
            if batch.rows >= epoch.least:
                kept += 1
                if kept > epoch.skip:
                    yield batch

    def _is_sample(self, item: Any) -> bool:
        self._gives_samples = is_sample(self._feed, item)
        return self._gives_samples

    def _batch(self, item: Any, number: int) -> Batch:
        who = f"{self._who}: batch {number}"
        parts = item if isinstance(item, (tuple, list)) else (item,)
        if not 1 <= len(parts) <= 3:
            raise DataError(f"{who} has {len(parts)} parts", expected="(inputs, labels) or (inputs, labels, weights)")
        x, y, w = (*parts, None, None)[:3]
        if _is_sample_of_inputs(self._feed, x):
            raise DataError(
                f"{who}: nested lists may be samples of a batch, or the inputs and labels of one sample",
                fix="give arrays; or every sample with its labels as a tuple, (inputs, labels)",
            )
        if self._only_inputs:
            y = w = None
            if isinstance(x, Mapping):  # labels that come along
                x = {name: part for name, part in x.items() if name in self._feed.inputs}
        columns = columns_of(who, self._feed, x, y, w)
        whole = Arrays(who, *columns)
        if whole.count > self._feed.batch:
            fix = f"give batches of at most {self._feed.batch}, or build the graph's inputs for larger ones"
            if self._feed.labels and not columns[1]:
                fix = "arrays of all samples are two arguments: fit(x, y), not fit((x, y))"
            raise ShapeError(f"{who} has {whole.count} samples, the graph was built for {self._feed.batch}", fix=fix)
        batch = next(iter(whole.chunks(whole.count, 0, None, 0)))
        inputs, labels, weights = map(_owned, columns, batch[:3])
        return Batch(inputs, labels, weights, batch.rows)


class Samples(Stream):
    """A dataset that gives samples by number, as PyTorch's, or a list of them: batches in an order of their own."""

    def __init__(self, who: str, feed: Feed, source: Any, only_inputs: bool = False) -> None:
        super().__init__(who, feed, source, only_inputs)
        self.count: int = len(source)
        if not self.count:
            raise DataError(f"{who}: there are no samples")

    def check(self, epochs: int, batch_size: int | None) -> None:
        """It can be gone through again and again, in batches of any size."""
        first = self._source[0]
        if not self._is_sample(first):
            x = first[0] if isinstance(first, (tuple, list)) and first else first
            given, fix = "", "give (inputs, labels) pairs, or arrays"
            if isinstance(x, Mapping):
                given, fix = ", ".join(map(repr, x)), "call its parts so, or give (inputs, labels) pairs"
            elif _shape(x):
                given = f"'{next(iter(self._feed.inputs))}' {_shape(x)}"
                if len(x) and is_sample(self._feed, x[0]):
                    fix = f"batches come from an iterable: fit(lambda epoch: (batches[k] for k in range({self.count})))"
            wanted = {**self._feed.inputs, **self._feed.labels}
            raise DataError(
                f"{self._who}: what {type(self._source).__name__} gives by number is no sample of this graph",
                given=given,
                expected=", ".join(f"'{name}' {tensor.descriptor.shape[1:]}" for name, tensor in wanted.items()),
                fix=fix,
            )

    def batch_count(self, size: int, least: int = 1) -> int | None:
        return Data.batch_count(self, size, least)

    def _items(self, epoch: Epoch) -> Iterator[Batch]:
        size, seed = epoch.size, epoch.seed
        order = range(self.count) if seed is None else order_of(seed, epoch.number, self.count)
        samples = (self._source[int(index)] for index in order[epoch.skip * size :])
        for number, item in enumerate(_in_batches(self._who, samples, size, self._feed, self._is_sample)):
            batch = self._batch(item, number)
            if batch.rows >= epoch.least:
                yield batch


def is_sample(feed: Feed, item: Any) -> bool:
    """Is an item one sample, with one axis less than a batch?"""
    if not isinstance(item, (tuple, list)) or not item:
        return _is_sample_of_inputs(feed, item)
    x, *others = item
    # The others of nested lists may be the next samples of a batch, and not labels.
    may_be_batch = isinstance(x, (tuple, list)) and (isinstance(item, list) or not feed.labels)
    if may_be_batch and any(_is_sample_of_inputs(feed, other) for other in others):
        return False
    return len(item) <= 3 and _is_sample_of_inputs(feed, x)


def _is_sample_of_inputs(feed: Feed, x: Any) -> bool:
    """Is this one sample for all inputs?"""
    inputs = feed.inputs
    if len(inputs) == 1 and not isinstance(x, Mapping):
        (tensor,) = inputs.values()
        if _is_sample_of(tensor, x):
            return True
    if isinstance(x, Mapping):
        pairs = [(x[name], tensor) for name, tensor in inputs.items() if name in x]
    elif isinstance(x, (tuple, list)) and len(inputs) == len(x):
        pairs = list(zip(x, inputs.values(), strict=True))
    else:
        return False
    return bool(pairs) and all(_is_sample_of(tensor, array) for array, tensor in pairs)


def _is_sample_of(tensor: Tensor, x: Any) -> bool:
    """Has this the shape of a sample, in all axes that do not vary?"""
    given, wanted = _shape(x), tensor.descriptor.shape[1:]
    if given is None or len(given) != len(wanted):
        return False
    pairs = enumerate(zip(given, wanted, strict=True), 1)
    return all(one == other or axis in tensor.varies for axis, (one, other) in pairs)


def _shape(array: Any) -> tuple[int, ...] | None:
    """The shape of an array or of nested lists; None: it has none."""
    if not isinstance(array, (tuple, list)):
        return tuple(array.shape) if hasattr(array, "shape") else None
    try:
        return np.shape(array)
    except ValueError:  # of different lengths
        return None


def _in_batches(who: str, items: Iterable[Any], size: int, feed: Feed, fits: Callable[[Any], bool]) -> Iterator[Any]:
    """Single samples stacked to batches of a size, the last perhaps smaller; batches pass through as they are."""
    waiting: list[Any] = []
    for item in items:
        if not fits(item):
            if waiting:
                fix = _SEVERAL_SIZES if feed.varies else f"give one or the other; {ONE_SHAPE}"
                raise DataError(f"{who}: single samples and batches come mixed", fix=fix)
            yield item
            continue
        waiting.append(item)
        if len(waiting) == size:
            yield _batched(who, feed, waiting)
            waiting = []
    if waiting:
        yield _batched(who, feed, waiting)


def _batched(who: str, feed: Feed, samples: list[Any]) -> Any:
    """Samples, each an array, a dict, or (inputs, labels, weights), as one batch of the same form."""

    def stacked(parts: list[Any]) -> Array:
        is_number = not isinstance(parts[0], (tuple, list)) and np.ndim(parts[0]) == 0
        arrays = [as_array([part] if is_number else part, who) for part in parts]
        if len({array.shape for array in arrays}) > 1:
            shapes = sorted({array.shape for array in arrays})
            raise DataError(
                f"{who}: samples of shapes {shapes[0]} and {shapes[-1]} cannot be one batch",
                fix=_SEVERAL_SIZES if feed.varies else ONE_SHAPE,
            )
        return np.concatenate(arrays) if is_number else np.stack(arrays)

    return by_part(feed, samples, stacked)


def by_part(feed: Feed, samples: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Samples, each an array, a dict, or (inputs, labels, weights), as one such of what `join` makes of their parts."""
    if not isinstance(samples[0], (tuple, list)):
        return _joined(list(samples), 1, join)
    counts = (len(feed.inputs), len(feed.labels), len(feed.weights))
    parts = range(len(samples[0]))
    return tuple(_joined([one[part] for one in samples], counts[part], join) for part in parts)


def _joined(parts: list[Any], count: int, join: Callable[[list[Any]], Any]) -> Any:
    """Arrays or nested lists of samples joined, or tuples or dicts of them; for so many tensors."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    is_listed = isinstance(first, (tuple, list))
    if is_listed and (any(hasattr(entry, "shape") for entry in first) or len(first) == count > 1):
        return tuple(join([part[index] for part in parts]) for index in range(len(first)))
    return join(parts)


def _called(function: Callable[..., Any], epoch: int) -> Any:
    """What a function gives for an epoch; one without parameters, as a generator function, gives the same for all."""
    try:
        takes_none = not inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not tell
        takes_none = False
    return function() if takes_none else function(epoch)


def _length_of(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:  # PyTorch's loader has a length, and refuses to tell it for an IterableDataset
        return None


def _owned(columns: list[Column], part: dict[str, Array]) -> dict[str, Array]:
    """Memory of our own: who makes batches may fill one array again and again, long before we have used it."""
    return {
        one.name: part[one.name].copy() if np.may_share_memory(part[one.name], one.array) else part[one.name]
        for one in columns
    }
