"""Times of recurrent ops, in NumPy and in ops: their order, padding, and states shifted by one time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.elementwise import select
from mlcompute.ops.indexing import concatenate, take
from mlcompute.ops.op import Array, Typed, Value
from mlcompute.ops.views import full, reshape, slice_axis


def order(steps: int, reverse: bool) -> range:
    """Times in the order the recurrence visits them."""
    return range(steps - 1, -1, -1) if reverse else range(steps)


def expect_samples(op: str, n: int, hidden: int, states: Sequence[Typed], lengths: Sequence[Typed]) -> None:
    """A state and a length for each sample: kernels read as many as there are samples."""
    given = [*((state.shape, (n, hidden)) for state in states), *((length.shape, (n,)) for length in lengths)]
    for shape, expected in given:
        if shape != expected:
            raise ShapeError(f"{op}: a state or lengths of shape {shape}, for {n} samples", expected=f"{expected}")


def valid(who: str, lengths: Array | None, n: int, steps: int) -> Array:
    """(n, t, 1): does time t belong to the sequence?"""
    if lengths is None:
        return np.ones((n, steps, 1), bool)
    if not np.all((lengths >= 1) & (lengths <= steps)):
        raise DataError(
            f"{who}: sequence lengths {lengths.tolist()} do not fit {steps} time steps",
            expected=f"every length from 1 to {steps}",
        )
    return np.arange(steps)[None, :, None] < lengths.reshape(n, 1, 1)


def checked(lengths: Value, steps: int) -> Value:
    """The same lengths, of which the device refuses those that are not from 1 to `steps`."""
    # Looking each length up among 1..steps changes none, but any device refuses an index out of range.
    legal = lengths.trace.constant(np.arange(1, steps + 1), lengths.dtype)
    return take(legal, lengths - 1, 0)


def described_valid(lengths: Value, steps: int) -> Value:
    """`valid`, in ops."""
    (n,) = lengths.shape
    times = lengths.trace.constant(np.arange(steps).reshape(1, steps, 1), lengths.dtype)
    return times < reshape(lengths, (n, 1, 1))


def before(states: Array, first: Array, reverse: bool, valid: Array | None = None) -> Array:
    """(n, t, *): the state each time starts from, given the states after each time and the first one (n, *).

    valid   of states that are 0 in the padding: with `reverse`, the last time of a sequence starts from the first state
    """
    first = first[:, None]
    found = np.concatenate([states[:, 1:], first] if reverse else [first, states[:, :-1]], axis=1)
    if valid is None or not reverse:
        return found
    return np.where(before(valid, np.zeros((len(valid), 1), bool), reverse), found, first)


def described_before(states: Value, first: Value, reverse: bool, valid: Value | None = None) -> Value:
    """`before`, in ops."""
    (n, steps, width) = states.shape
    start = reshape(first, (n, 1, width))
    if steps == 1:
        return start
    if not reverse:
        return concatenate([start, slice_axis(states, 1, 0, steps - 1)], 1)
    found = concatenate([slice_axis(states, 1, 1, steps), start], 1)
    if valid is None:
        return found
    return select(described_before(valid, full(valid, (n, 1), False), reverse), found, start)


def at(x: Value, t: int) -> Value:
    """(n, t, *) -> (n, *) at one time."""
    return reshape(slice_axis(x, 1, t, t + 1), (x.shape[0], x.shape[2]))


def stacked(pieces: dict[int, Value]) -> Value:
    """One (n, h) per time -> (n, t, h)."""
    rows = [reshape(pieces[t], (pieces[t].shape[0], 1, pieces[t].shape[1])) for t in range(len(pieces))]
    return concatenate(rows, 1)


def where(now: Value | None, a: Value, b: Value | float) -> Value:
    """a where a time belongs to the sequence, else b."""
    return a if now is None else select(now, a, b)
