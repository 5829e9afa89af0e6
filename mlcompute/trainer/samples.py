"""Samples given one by one, put together to batches: by number from a dataset, or in order from an iterable."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.columns import as_array


def in_batches(who: str, items: Iterable[Any], size: int, is_sample: Callable[[Any], bool]) -> Iterator[Any]:
    """Single samples stacked to batches of a size, the last perhaps smaller; batches pass through as they are."""
    waiting: list[Any] = []
    for item in items:
        if not is_sample(item):
            if waiting:
                raise DataError(f"{who}: single samples and batches come mixed", fix="give one or the other")
            yield item
            continue
        waiting.append(item)
        if len(waiting) == size:
            yield stacked(who, waiting)
            waiting = []
    if waiting:
        yield stacked(who, waiting)


def stacked(who: str, parts: list[Any]) -> Any:
    """Samples, each an array or a tuple or dict of them, as one batch of the same form."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: stacked(who, [part[name] for part in parts]) for name in first}
    if isinstance(first, (tuple, list)) and any(hasattr(entry, "shape") for entry in first):
        return tuple(stacked(who, [part[index] for part in parts]) for index in range(len(first)))
    arrays = [as_array([part] if np.ndim(part) == 0 else part, who) for part in parts]
    if len({array.shape for array in arrays}) > 1:
        shapes = sorted({array.shape for array in arrays})
        raise DataError(f"{who}: samples of shapes {shapes[0]} and {shapes[-1]} cannot be one batch")
    return np.concatenate(arrays) if np.ndim(first) == 0 else np.stack(arrays)


def by_number(dataset: Any, order: Iterable[int]) -> Generator[Any, None, None]:
    """Samples of a dataset that has __getitem__, in some order."""
    for index in order:
        yield dataset[int(index)]
