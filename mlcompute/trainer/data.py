"""Data to train on: arrays in memory, or an iterable of batches; both give batches ready to be fed."""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.tensor import Tensor
from mlcompute.trainer.class_weights import class_numbers, places_of, weighed
from mlcompute.trainer.columns import Column, are_class_labels, as_array, column
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.prefetch import Prefetch
from mlcompute.trainer.samples import by_number, in_batches
from mlcompute.trainer.shuffling import order_of

#: About how many bytes of samples are prepared at once: enough that the hand-over between threads costs nothing.
_CHUNK_BYTES = 4 << 20
_CHUNK_BATCHES = 64
#: By how much probabilities may miss 0 and 1.
_ROUNDING = 1e-3
_AGAIN = (
    "pass something that can be iterated again (a list, a loader), or a function of the epoch that returns an iterator"
)


class Batch(NamedTuple):
    """What one run is fed, by name, and how many samples it is.

    filling  samples after these that count nowhere: they only fill the batch up
    """

    inputs: dict[str, Array]
    labels: dict[str, Array]
    weights: dict[str, Array]
    rows: int
    filling: int = 0

    @property
    def size(self) -> int:
        """How many samples are run."""
        return self.rows + self.filling


@dataclass(frozen=True)
class Feed:
    """What a graph wants to be fed: tensors by name, and the number of samples it was built for.

    compared      the input that the loss compares the prediction with; empty: labels are fed
    probabilities labels that the loss compares as numbers from 0 to 1
    weighs_alike  without weights every sample weighs 1
    class_axes    where labels have their classes, if not on axis 1
    shared        tensors of which no axis counts samples, as a mask over queries and keys
    weighed       labels -> the weights of the loss that compares with them
    class_weights labels -> a weight per class, by which their classes are weighed; others weigh 1
    classes       integer class labels: how many classes there are, and which label is ignored
    dense         integer class labels: the tensor that dense ones are for, where such may be given instead
    """

    inputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    batch: int
    compared: str = ""
    probabilities: frozenset[str] = frozenset()
    weighs_alike: bool = False
    class_axes: Mapping[str, int] = field(default_factory=dict)
    shared: AbstractSet[Tensor] = frozenset()
    weighed: Mapping[str, str] = field(default_factory=dict)
    class_weights: Mapping[str, Array] = field(default_factory=dict)
    classes: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)

    def label_tensor(self, name: str, data: Any, who: str) -> Tensor:
        """The tensor that labels are for: dense ones may have another than integer class labels."""
        tensor = self.labels[name]
        dense = self.dense.get(name)
        return tensor if dense is None or are_class_labels(as_array(data, who), tensor, self.varies) else dense

    @property
    def varies(self) -> bool:
        """Do lengths or sizes of inputs vary?"""
        return any(tensor.varies for tensor in self.inputs.values())

    def counts_samples(self, tensor: Tensor) -> bool:
        """Does axis 0 of a tensor hold something for every sample?"""
        return tensor not in self.shared and tensor.descriptor.shape[0] % self.batch == 0


class Data(ABC):
    """Something that gives batches, epoch after epoch."""

    #: How many samples there are; None when only going through them tells.
    count: int | None = None
    #: How it was made from a file, as plain data that checkpoints keep; None: it came as it is.
    preprocessing: dict[str, Any] | None = None

    @abstractmethod
    def batches(
        self,
        size: int,
        epoch: int = 0,
        seed: int | None = None,
        skip: int = 0,
        stops: Callable[[], bool] = lambda: False,
        least: int = 1,
    ) -> Generator[Batch, None, None]:
        """The batches of one epoch, prepared ahead by a thread; the last may be short.

        seed   shuffles, None leaves the order alone
        least  batches with fewer samples are left out, before any are skipped
        skip   leaves out that many batches at the beginning
        stops  asked while waiting for data
        """

    def batch_count(self, size: int, least: int = 1) -> int | None:
        """How many batches an epoch has; None when nobody knows."""
        if self.count is None:
            return None
        return self.count // size + (self.count % size >= least)

    @abstractmethod
    def check(self, epochs: int, batch_size: int | None) -> None:
        """Refuse before training what could only fail in the middle of it, or be ignored."""

    def close(self) -> None:  # noqa: B027  most have nothing to let go of
        """Training has ended."""


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
                fix="give a label, and a weight, for every sample",
            )
        self.count: int = next(iter(counts.values()), 0)
        if not self.count:
            raise DataError(f"{who}: there are no samples")
        self._row_bytes = sum(one.row_bytes for one in every if not one.shared)

    def check(self, epochs: int, batch_size: int | None) -> None:
        """Arrays can be gone through again and again, in batches of any size."""

    def batches(
        self,
        size: int,
        epoch: int = 0,
        seed: int | None = None,
        skip: int = 0,
        stops: Callable[[], bool] = lambda: False,
        least: int = 1,
    ) -> Generator[Batch, None, None]:
        ahead = Prefetch(self.chunks(size, epoch, seed, skip * size), stops=stops)
        try:
            for chunk in ahead:
                for batch in self._cut(chunk, size):
                    if batch.rows >= least:
                        yield batch
        finally:
            ahead.close()

    def split(self, who: str, share: float) -> tuple[Arrays, Arrays]:
        """All but the last samples, and the last ones: a share of them all, as Keras holds out."""
        held = int(np.ceil(self.count * share)) if 0 < share < 1 else 0
        if not 0 < held < self.count:
            raise DataError(
                f"{who}: validation_split is {share} of {self.count} samples",
                expected="between 0 and 1, so that both parts have samples",
            )
        first, last = slice(0, self.count - held), slice(self.count - held, self.count)
        return self._part(who, first), self._part(who, last)

    def _part(self, who: str, rows: slice) -> Arrays:
        inputs, labels, weights = ([one.part(rows) for one in columns] for columns in self._columns)
        part = Arrays(who, inputs, labels, weights)
        part.preprocessing = self.preprocessing
        return part

    @property
    def labels(self) -> list[Column]:
        """The labels of all samples."""
        return self._columns[1]

    def first(self, rows: int) -> Batch:
        """The first samples."""
        return next(iter(self._cut(next(self.chunks(rows, 0, None, 0)), rows)))

    def chunks(self, size: int, epoch: int, seed: int | None, start: int) -> Iterator[Batch]:
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
        self._gives_samples = isinstance(source, Sequence) and len(source) > 0 and self._is_sample(source[0])

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

    def batches(
        self,
        size: int,
        epoch: int = 0,
        seed: int | None = None,
        skip: int = 0,
        stops: Callable[[], bool] = lambda: False,
        least: int = 1,
    ) -> Generator[Batch, None, None]:
        ahead = Prefetch(self._items(size, epoch, seed, skip, least), stops=stops)
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

    def _items(self, size: int, epoch: int, seed: int | None, skip: int, least: int) -> Iterator[Batch]:
        source = self._opened(epoch)
        if isinstance(source, Iterator) and not callable(self._source):
            if self._is_used:
                raise DataError(f"{self._who}: the iterator is exhausted, it can be gone through only once", fix=_AGAIN)
            self._is_used = True
        kept = 0
        for number, item in enumerate(in_batches(self._who, source, size, self._is_sample)):
            if kept < skip and least == 1:  # what is skipped need not be looked at
                kept += 1
                continue
            batch = self._batch(item, number)
            if batch.rows >= least:
                kept += 1
                if kept > skip:
                    yield batch

    def _is_sample(self, item: Any) -> bool:
        """Is an item one sample, with one axis less than a batch?"""
        x = item[0] if isinstance(item, (tuple, list)) and item else item
        inputs = self._feed.inputs
        if isinstance(x, Mapping):
            pairs = [(x[name], tensor) for name, tensor in inputs.items() if name in x]
        elif isinstance(x, (tuple, list)) and len(inputs) == len(x):
            pairs = list(zip(x, inputs.values(), strict=True))
        else:
            pairs = [(x, tensor) for tensor in inputs.values()] if len(inputs) == 1 else []
        found = bool(pairs) and all(
            hasattr(array, "shape") and tuple(array.shape) == tensor.descriptor.shape[1:] for array, tensor in pairs
        )
        self._gives_samples = found
        return found

    def _batch(self, item: Any, number: int) -> Batch:
        who = f"{self._who}: batch {number}"
        parts = item if isinstance(item, (tuple, list)) else (item,)
        if not 1 <= len(parts) <= 3:
            raise DataError(f"{who} has {len(parts)} parts", expected="(inputs, labels) or (inputs, labels, weights)")
        x, y, w = (*parts, None, None)[:3]
        if self._only_inputs:
            y = w = None
            if isinstance(x, Mapping):  # labels that come along
                x = {name: part for name, part in x.items() if name in self._feed.inputs}
        columns = _columns(who, self._feed, x, y, w)
        whole = Arrays(who, *columns)
        if whole.count > self._feed.batch:
            raise ShapeError(
                f"{who} has {whole.count} samples, the graph was built for {self._feed.batch}",
                fix=f"give batches of at most {self._feed.batch}, or build the graph's inputs for larger ones",
            )
        batch = next(iter(whole.chunks(whole.count, 0, None, 0)))
        inputs, labels, weights = map(_owned, columns, batch[:3])
        return Batch(inputs, labels, weights, batch.rows)


class Samples(Stream):
    """A dataset that gives samples by number, as PyTorch's: put together to batches, in an order of their own."""

    def __init__(self, who: str, feed: Feed, source: Any, only_inputs: bool = False) -> None:
        super().__init__(who, feed, source, only_inputs)
        self.count: int = len(source)
        if not self.count:
            raise DataError(f"{who}: there are no samples")

    def check(self, epochs: int, batch_size: int | None) -> None:
        """It can be gone through again and again, in batches of any size."""
        if not self._is_sample(self._source[0]):
            raise DataError(
                f"{self._who}: what {type(self._source).__name__} gives by number is no sample of this graph",
                expected=", ".join(f"'{name}' {t.descriptor.shape[1:]}" for name, t in self._feed.inputs.items()),
                fix="give (inputs, labels) pairs, or arrays",
            )

    def batch_count(self, size: int, least: int = 1) -> int | None:
        return Data.batch_count(self, size, least)

    def _items(self, size: int, epoch: int, seed: int | None, skip: int, least: int) -> Iterator[Batch]:
        order = range(self.count) if seed is None else order_of(seed, epoch, self.count)
        batches = in_batches(self._who, by_number(self._source, order[skip * size :]), size, self._is_sample)
        for number, item in enumerate(batches):
            batch = self._batch(item, number)
            if batch.rows >= least:
                yield batch


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


def weights_that_come(x: Any) -> Any:
    """The weights of the first batch of a list, (inputs, labels, weights); None where none come."""
    first = x[0] if isinstance(x, (list, tuple)) and x else None  # a loader would go on to the next when it is asked
    return first[2] if isinstance(first, tuple) and len(first) == 3 else None


def data_from(who: str, feed: Feed, x: Any, y: Any = None, weights: Any = None, *, only_inputs: bool = False) -> Data:
    """The data a user gave: arrays (one, a list in the inputs' order, or by name), or an iterable of batches."""
    if isinstance(x, Data):
        return x
    if hasattr(type(x), "data_for"):  # a Dataset
        if y is not None or weights is not None:
            raise DataError(f"{who}: {type(x).__name__} has labels of its own", fix="leave y and sample_weight out")
        made: Data = x.data_for(who, feed, only_inputs)
        return made
    if only_inputs:
        feed = Feed(feed.inputs, {}, {}, feed.batch, shared=feed.shared)
    is_array = hasattr(x, "__array__") or hasattr(x, "__dlpack__") or hasattr(x, "shape")
    if y is None and weights is None and not is_array and not isinstance(x, (Mapping, str, bytes)):
        if isinstance(x, (list, tuple)) and not feed.labels:  # batches, or the samples or inputs themselves?
            makes_batches = _are_batches(x, feed)
        else:
            makes_batches = callable(x) or isinstance(x, Iterable)
        if makes_batches:
            return Stream(who, feed, x, only_inputs)
    if not is_array and not isinstance(x, (Mapping, Sequence)) and hasattr(x, "__getitem__") and hasattr(x, "__len__"):
        if y is None and weights is None:
            return Samples(who, feed, x, only_inputs)
        raise DataError(f"{who}: {type(x).__name__} gives samples by number, and y beside it", fix="leave y out")
    if feed.varies and not isinstance(x, np.ndarray):
        buckets = _buckets(who, feed, x, y, weights, only_inputs)
        if buckets is not None:
            return buckets
    columns = _columns(who, feed, x, y, weights)
    for one in columns[2]:
        if one.array.size and not one.array.any():
            raise DataError(f"{who}: all weights of '{one.name}' are 0, nothing would count", fix="check them")
    return Arrays(who, *columns)


def _buckets(who: str, feed: Feed, x: Any, y: Any, weights: Any, only_inputs: bool) -> Data | None:
    """Lists of samples of different sizes, where the inputs' sizes vary; None for anything else."""
    from mlcompute.trainer.buckets import Buckets

    named = [
        _named(who, kind, tensors, given)
        for kind, tensors, given in (
            ("input", feed.inputs, x),
            ("label", feed.labels, y),
            ("weight", feed.weights, weights),
        )
    ]
    lists = {name: part for name, part in named[0].items() if isinstance(part, (list, tuple))}
    if not any(len({np.shape(sample) for sample in part}) > 1 for part in lists.values()):
        return None
    return Buckets(who, feed, named, only_inputs)


def _are_batches(given: Sequence[Any], feed: Feed) -> bool:
    """Is a list one of batches: pairs or dicts of arrays, or, for a single input, arrays with as many axes as it?"""
    if not given or isinstance(given[0], (tuple, Mapping)):
        return bool(given) and (isinstance(given[0], Mapping) or any(np.ndim(part) > 1 for part in given[0]))
    axes = {len(tensor.descriptor.shape) for tensor in feed.inputs.values()}
    return len(feed.inputs) == 1 and len(given) > 1 and getattr(given[0], "ndim", 0) in axes


def _columns(who: str, feed: Feed, x: Any, y: Any, weights: Any) -> tuple[list[Column], list[Column], list[Column]]:
    if isinstance(x, Mapping) and y is None:  # one dict of everything
        y = {name: part for name, part in x.items() if name in feed.labels and name not in feed.inputs} or None
        if weights is None:
            weights = {name: part for name, part in x.items() if name in feed.weights} or None
        x = {name: part for name, part in x.items() if name not in {*(y or ()), *(weights or ())}}
    if feed.compared and not feed.labels and y is not None:
        _expect_the_input(who, feed, x, y)
        y = None
    found: list[list[Column]] = []
    for kind, tensors, given in (
        ("input", feed.inputs, x),
        ("label", feed.labels, y),
        ("weight", feed.weights, weights),
    ):
        if kind == "weight" and feed.weighs_alike:
            given = weights = _weights(who, feed, found[1], given)
        named = _named(who, kind, tensors, given)
        if kind == "label":
            tensors = {name: feed.label_tensor(name, data, f"{who}: '{name}'") for name, data in named.items()}
        axes = {name: feed.class_axes.get(name, 1) for name in tensors} if kind == "label" else {}
        found.append(
            [
                column(
                    name,
                    tensors[name],
                    data,
                    who,
                    batch=feed.batch if feed.counts_samples(tensors[name]) else 0,
                    class_axis=axes.get(name, 0),
                    is_weight=kind == "weight",
                    follows=feed.varies and kind != "input",
                    classes=feed.classes.get(name) if kind == "label" else None,
                )
                for name, data in named.items()
            ]
        )
    for one in found[1]:
        is_dense = not one.class_axis and (one.name not in feed.classes or one.tensor is not feed.labels[one.name])
        if one.name in feed.probabilities and is_dense:
            _expect_probabilities(who, one)
    if feed.weighs_alike:
        count = next(one.count for one in found[0] if not one.shared)
        for name, tensor in feed.weights.items():
            if any(one.name == name for one in found[2]):
                continue
            rows, *extents = tensor.descriptor.shape
            labels = [one for one in found[1] if feed.weighed.get(one.name) == name]
            if feed.varies and extents and labels:  # a weight for every step: as many as there are labels
                extents = list(places_of(labels[0], feed.class_axes.get(labels[0].name, 1)))
            ones = np.broadcast_to(np.float32(1), (count * (rows // feed.batch), *extents))
            found[2].append(column(name, tensor, ones, who, batch=feed.batch, follows=feed.varies))
    return found[0], found[1], found[2]


def _weights(who: str, feed: Feed, labels: list[Column], given: Any) -> dict[str, Any] | None:
    """The weights of samples by name, times those of their classes: one array is for every loss."""
    if given is not None and not isinstance(given, Mapping):
        is_listed = isinstance(given, (tuple, list)) and any(np.ndim(part) for part in given)
        if is_listed and len(given) == len(feed.weights):
            given = dict(zip(feed.weights, given, strict=True))
        else:
            given = dict.fromkeys(feed.weights, given)
    found = dict(given or {})
    unknown = [name for name in found if name not in feed.weights]
    if unknown:
        raise DataError(f"{who}: there is no weight named {unknown[0]!r}", expected=", ".join(feed.weights))
    for label in labels:
        if label.name in feed.class_weights:
            numbers = class_numbers(label, feed.class_axes.get(label.name, 1))
            name = feed.weighed[label.name]
            found[name] = weighed(who, numbers, feed.class_weights[label.name], found.get(name))
    return found or None


def _expect_probabilities(who: str, labels: Column) -> None:
    """Labels outside of 0 to 1 give cross entropies without a least value, and hinge losses of another margin."""
    low, high = float(labels.array.min()), float(labels.array.max())
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        raise DataError(
            f"{who}: '{labels.name}' goes from {low:g} to {high:g}, the loss compares with numbers from 0 to 1",
            fix="give 0 for no and 1 for yes, or integer class labels; for numbers to be predicted, use the loss 'mse'",
        )


def _expect_the_input(who: str, feed: Feed, x: Any, y: Any) -> None:
    """Labels for a loss that compares with an input: only that input itself can be meant."""
    data = _named(who, "input", feed.inputs, x)[feed.compared]
    if isinstance(y, Mapping):
        y = y.get(feed.compared)
    if y is not data and (y is None or not np.array_equal(np.asarray(y), np.asarray(data))):
        raise DataError(
            f"{who}: labels were given, but the loss compares with the input '{feed.compared}' itself",
            fix="leave y out; for a target that differs from the input, make it a tensor of its own: "
            "graph.loss(prediction, graph.input(shape, 'target'), ...)",
        )


def _named(who: str, kind: str, tensors: Mapping[str, Tensor], given: Any) -> dict[str, Any]:
    """Data by name: from a mapping, from a list in order, or for the only one."""
    if given is not None and not tensors:
        raise DataError(
            f"{who}: {kind}s were given, the graph takes none",
            fix="give sample_weight, or a list of batches; or declare them: TrainingGraph.add_inputs(inputs, labels, "
            "label weights)"
            if kind == "weight"
            else "",
        )
    expected = ", ".join(f"'{name}' {tensor.descriptor.shape}" for name, tensor in tensors.items()) or "none"
    if given is None:
        named: dict[str, Any] = {}
    elif isinstance(given, Mapping):
        named = dict(given)
    elif len(tensors) == 1:
        ((name, tensor),) = tensors.items()
        if isinstance(given, (tuple, list)) and len(given) == 1 and _are_samples(given[0], tensor):
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
        near = difflib.get_close_matches(unknown[0], list(tensors), n=1)
        only = list(tensors) if len(tensors) == 1 else near
        fix = f"call it {only[0]!r}" if only else ""
        raise DataError(f"{who}: there is no {kind} named {unknown[0]!r}", expected=expected, fix=fix)
    missing = [name for name in tensors if name not in named]
    if missing and (kind == "input" or (named and kind == "label")):
        raise DataError(f"{who}: no data for {kind} {missing[0]!r}", expected=expected)
    return named


def _are_samples(array: Any, tensor: Tensor) -> bool:
    """Could this be the samples for a tensor, or integer class labels for it, rather than one sample?"""
    shape = tensor.descriptor.shape
    axes = getattr(array, "ndim", None)
    if axes is None:
        return isinstance(array, (list, tuple)) and as_array(array, f"'{tensor.label}'").ndim >= len(shape)
    given, sample = (tuple(extent for extent in extents if extent != 1) for extents in (array.shape, shape[1:]))
    return bool(axes >= len(shape) or (axes and given != sample))
