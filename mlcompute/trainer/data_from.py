"""From what a user gave to data: arrays in memory, or an iterable of batches; both give batches ready to be fed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.arrays import Arrays
from mlcompute.trainer.data import Data, Feed
from mlcompute.trainer.feed_columns import by_kind, by_name, columns_of
from mlcompute.trainer.streams import Samples, Stream, by_part, is_sample


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
        feed = Feed(feed.inputs, {}, {}, feed.batch, shared=feed.shared, added=feed.added)
    x, y, weights = (_samples_of_objects(given) for given in (x, y, weights))
    is_array = hasattr(x, "__array__") or hasattr(x, "__dlpack__") or hasattr(x, "shape")
    if y is None and weights is None and not is_array and not isinstance(x, (Mapping, str, bytes)):
        if isinstance(x, (list, tuple)) and not feed.labels:  # batches, or the samples or inputs themselves?
            makes_batches = _are_batches(x, feed)
        else:
            makes_batches = callable(x) or isinstance(x, Iterable)
        if makes_batches:
            is_listed = isinstance(x, (list, tuple)) and len(x) > 0 and is_sample(feed, x[0])
            if not is_listed or not feed.varies:
                return (Samples if is_listed else Stream)(who, feed, x, only_inputs)
            x, y, weights = _in_lists(who, feed, x, only_inputs)
    if not is_array and not isinstance(x, (Mapping, Sequence)) and hasattr(x, "__getitem__") and hasattr(x, "__len__"):
        if y is None and weights is None:
            return Samples(who, feed, x, only_inputs)
        raise DataError(f"{who}: {type(x).__name__} gives samples by number, and y beside it", fix="leave y out")
    if feed.varies and not isinstance(x, np.ndarray):
        buckets = _buckets(who, feed, x, y, weights, only_inputs)
        if buckets is not None:
            return buckets
    columns = columns_of(who, feed, x, y, weights)
    for one in columns[2]:
        if one.array.size and not one.array.any():
            raise DataError(f"{who}: all weights of '{one.name}' are 0, nothing would count", fix="check them")
    return Arrays(who, *columns)


def _in_lists(who: str, feed: Feed, samples: Sequence[Any], only_inputs: bool) -> tuple[Any, Any, Any]:
    """Samples of any size, each an array, a dict, or (inputs, labels, weights), as lists of their parts."""
    try:
        parts = by_part(feed, samples, list)
    except (IndexError, KeyError, TypeError):
        raise DataError(f"{who}: samples have different parts", fix="give every sample in one form") from None
    x, y, weights = (*(parts if isinstance(parts, tuple) else (parts,)), None, None)[:3]
    if only_inputs and isinstance(x, Mapping):  # labels that come along
        x = {name: part for name, part in x.items() if name in feed.inputs}
    return (x, None, None) if only_inputs else (x, y, weights)


def _samples_of_objects(given: Any) -> Any:
    """Data as it was given; arrays of lists, in which NumPy and pandas keep samples of several sizes, as lists."""
    if isinstance(given, Mapping):
        return {name: _samples_of_objects(part) for name, part in given.items()}
    if str(getattr(given, "dtype", "")) != "object" or getattr(given, "ndim", 0) != 1 or not len(given):
        return given
    listed = list(given)
    return listed if all(isinstance(one, (list, tuple, np.ndarray)) for one in listed) else given


def _buckets(who: str, feed: Feed, x: Any, y: Any, weights: Any, only_inputs: bool) -> Data | None:
    """Lists of samples of different sizes, where the inputs' sizes vary; None for anything else."""
    from mlcompute.trainer.buckets import Buckets, shapes_of

    x, y, weights = by_kind(feed, x, y, weights)
    named = [
        by_name(who, kind, tensors, given)
        for kind, tensors, given in (
            ("input", feed.inputs, x),
            ("label", feed.labels, y),
            ("weight", feed.weights, weights),
        )
    ]
    lists = {name: part for name, part in named[0].items() if isinstance(part, (list, tuple))}
    if not any(len(set(shapes_of(who, name, part))) > 1 for name, part in lists.items()):
        return None
    return Buckets(who, feed, named, only_inputs)


def _are_batches(given: Sequence[Any], feed: Feed) -> bool:
    """Is a list one of batches or samples: pairs or dicts of arrays, or, for a single input, arrays with its axes?"""
    if given and isinstance(given[0], (tuple, Mapping)):
        return isinstance(given[0], Mapping) or is_sample(feed, given[0]) or any(_axes(part) > 1 for part in given[0])
    if not given or isinstance(given[0], list):
        return bool(given) and is_sample(feed, given[0])
    axes = {len(tensor.descriptor.shape) for tensor in feed.inputs.values()}
    return len(feed.inputs) == 1 and len(given) > 1 and getattr(given[0], "ndim", 0) in axes


def _axes(part: Any) -> int:
    """How many axes an array has, or the largest of several that are no array together."""
    try:
        return int(np.ndim(part))
    except ValueError:  # a list of arrays of different shapes
        return max(np.ndim(one) for one in part)
