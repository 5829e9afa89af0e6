"""Indexing: gather, scatter and counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.elementwise import equal, select
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, register
from mlcompute.ops.reductions import front_axis
from mlcompute.ops.views import full, slice_, slice_axis

INT64 = np.dtype(np.int64)
UINT32 = np.dtype(np.uint32)


def expect_integers(op: str, indices: Typed) -> None:
    """DataError for indices of another type."""
    if indices.dtype.kind not in "iu":
        raise DataError(f"{op}: indices must be integers, not {indices.dtype}")


def checked_indices(op: str, indices: Array, extent: int) -> Array:
    """The indices as NumPy wants them; an IndexError that names the first one outside 0..extent-1."""
    outside = (indices < 0) | (indices >= extent)
    if outside.any():
        place = tuple(int(i) for i in np.argwhere(outside)[0])
        valid = f"valid are 0 to {extent - 1}" if extent else "the indexed axis is empty"
        raise IndexError(f"{op}: index {indices[place]} at position {place} is out of range, {valid}")
    return indices.astype(np.intp, copy=False)


# Concatenate and pad ------------------------------------------------------------------------------------------


@register("concatenate", "indexing")
class Concatenate(Op):
    """y = the values one after the other along axis.   derivative: the slice of dy where each value went"""

    @staticmethod
    def result(*values: Typed, axis: int) -> ArrayType:
        first = values[0]
        for value in values[1:]:
            others = (value.shape[:axis], value.shape[axis + 1 :])
            if len(value.shape) != len(first.shape) or others != (first.shape[:axis], first.shape[axis + 1 :]):
                shapes = ", ".join(str(each.shape) for each in values)
                raise ShapeError(f"concatenate: extents may differ along axis {axis} only", shapes=shapes)
            if value.dtype != first.dtype:
                raise DataError(f"concatenate: values of {first.dtype} and {value.dtype} do not mix")
        total = sum(value.shape[axis] for value in values)
        return ArrayType((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype)

    @staticmethod
    def meaning(*values: Array, axis: int) -> Array:
        return np.concatenate(values, axis=axis)

    @staticmethod
    def derivative(dy: Value, y: Value, *values: Value, axis: int) -> tuple[Value, ...]:
        ends = list(accumulate(value.shape[axis] for value in values))
        return tuple(
            slice_axis(dy, axis, end - value.shape[axis], end) for value, end in zip(values, ends, strict=True)
        )


def concatenate(values: Sequence[Value], axis: int) -> Value:
    """y = the values one after the other along axis.   (.., n1, ..), (.., n2, ..) -> (.., n1 + n2, ..)"""
    if not values:
        raise ShapeError("concatenate: needs at least one value")
    axis = front_axis("concatenate", axis, values[0].rank)
    return values[0] if len(values) == 1 else emit("concatenate", *values, axis=axis)


@register("pad", "indexing")
class Pad(Op):
    """y = x with a border of one number.   derivative: the slice of dy where x went"""

    @staticmethod
    def result(x: Typed, before: Shape, after: Shape, value: float) -> ArrayType:
        if not len(before) == len(after) == len(x.shape) or min((*before, *after), default=0) < 0:
            raise ShapeError(f"pad: needs one width >= 0 per axis of {x.shape}", before=before, after=after)
        return ArrayType(tuple(b + n + a for b, n, a in zip(before, x.shape, after, strict=True)), x.dtype)

    @staticmethod
    def meaning(x: Array, before: Shape, after: Shape, value: float) -> Array:
        extents = tuple(b + n + a for b, n, a in zip(before, x.shape, after, strict=True))
        y = np.full(extents, value, x.dtype)
        y[tuple(slice(b, b + n) for b, n in zip(before, x.shape, strict=True))] = x
        return y

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, before: Shape, after: Shape, value: float) -> Value:
        return slice_(dy, before, tuple(b + n for b, n in zip(before, x.shape, strict=True)))


def pad(x: Value, before: Iterable[int], after: Iterable[int], value: float) -> Value:
    """y = x with before[k] elements of `value` in front of axis k and after[k] behind.   n_k -> before + n_k + after"""
    before, after = tuple(before), tuple(after)
    return emit("pad", x, before=before, after=after, value=value) if any(before) or any(after) else x


# Take: whole slices by index ----------------------------------------------------------------------------------


@register("take", "indexing")
class Take(Op):
    """y[a, i, b] = x[a, indices[i], b], i and b of any rank.   derivative: take_gradient"""

    @staticmethod
    def result(x: Typed, indices: Typed, axis: int) -> ArrayType:
        expect_integers("take", indices)
        return ArrayType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)

    @staticmethod
    def meaning(x: Array, indices: Array, axis: int) -> Array:
        return np.asarray(np.take(x, checked_indices("take", indices, x.shape[axis]), axis=axis))

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, indices: Value, axis: int) -> tuple[Value, None]:
        return take_gradient(dy, indices, axis, x.shape[axis]), None


def take(x: Value, indices: Value, axis: int) -> Value:
    """y[a, i, b] = x[a, indices[i], b].   x (*A, n, *B)   indices (*I) integers in 0..n-1   ->   y (*A, *I, *B)"""
    return emit("take", x, indices, axis=front_axis("take", axis, x.rank))


@register("take_gradient", "indexing")
class TakeGradient(Op):
    """y[a, r, b] = sum of dy[a, i, b] over all i with indices[i] = r: the adjoint of take."""

    @staticmethod
    def result(dy: Typed, indices: Typed, axis: int, extent: int) -> ArrayType:
        expect_integers("take_gradient", indices)
        end = axis + len(indices.shape)
        if dy.shape[axis:end] != indices.shape:
            raise ShapeError(f"take_gradient: indices {indices.shape} are not at axis {axis} of {dy.shape}")
        return ArrayType((*dy.shape[:axis], extent, *dy.shape[end:]), dy.dtype)

    @staticmethod
    def meaning(dy: Array, indices: Array, axis: int, extent: int) -> Array:
        outer, inner = dy.shape[:axis], dy.shape[axis + indices.ndim :]
        rows = checked_indices("take_gradient", indices, extent).reshape(-1)
        order = np.argsort(rows, kind="stable")
        # One row per index in front; runs of equal indices are then neighbours and add up in their own order.
        parts = np.moveaxis(dy.reshape((*outer, rows.size, *inner)), len(outer), 0)[order]
        y = np.zeros((extent, *outer, *inner), dy.dtype)
        if rows.size:
            found, starts = np.unique(rows[order], return_index=True)
            y[found] = np.add.reduceat(parts, starts, axis=0)
        return np.moveaxis(y, 0, len(outer))

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, indices: Value, axis: int, extent: int) -> tuple[Value, None]:
        return take(dy, indices, axis), None


def take_gradient(dy: Value, indices: Value, axis: int, extent: int) -> Value:
    """y[a, r, b] = sum of dy[a, i, b] where indices[i] = r.   dy (*A, *I, *B)   ->   y (*A, extent, *B)"""
    axis = front_axis("take_gradient", axis, dy.rank - indices.rank + 1)
    return emit("take_gradient", dy, indices, axis=axis, extent=extent)


# Gather and scatter: single elements by index -------------------------------------------------------------------


def _fits(op: str, axis: int, indices: Typed, along: Typed, updates: Typed | None = None) -> None:
    """Indices have the rank of the value they point into and reach no further than it on the other axes."""
    expect_integers(op, indices)
    rank = len(along.shape)
    if len(indices.shape) != rank or any(indices.shape[d] > along.shape[d] for d in range(rank) if d != axis):
        raise ShapeError(
            f"{op}: indices {indices.shape} do not fit {along.shape}: the rank must be equal and "
            f"no extent but that of axis {axis} may be larger"
        )
    if updates is None:
        return
    if len(updates.shape) != rank or any(i > u for i, u in zip(indices.shape, updates.shape, strict=True)):
        raise ShapeError(f"{op}: indices {indices.shape} must not be larger than the updates {updates.shape}")
    if updates.dtype != along.dtype:
        raise DataError(f"{op}: updates of {updates.dtype} do not go into {along.dtype}")


def _positions(op: str, indices: Array, shape: Shape, axis: int) -> Array:
    """Row-major positions in an array of `shape` that the indices along `axis` mean, flat."""
    positions = np.zeros(indices.shape, np.intp)
    stride = 1
    for d in reversed(range(len(shape))):
        along = np.arange(indices.shape[d]).reshape((-1,) + (1,) * (len(shape) - 1 - d))
        positions += stride * (checked_indices(op, indices, shape[axis]) if d == axis else along)
        stride *= shape[d]
    return positions.reshape(-1)


def _corner(x: Array, shape: Shape) -> Array:
    return x[tuple(slice(extent) for extent in shape)]


def _grown(x: Value, shape: Shape) -> Value:
    """x with zeros behind it on every axis, up to `shape`."""
    return pad(x, (0,) * x.rank, tuple(n - m for n, m in zip(shape, x.shape, strict=True)), 0.0)


@register("gather", "indexing")
class Gather(Op):
    """y[.., i, ..] = x[.., indices[.., i, ..], ..] along axis.   derivative: scatter_add into zeros"""

    @staticmethod
    def result(x: Typed, indices: Typed, axis: int) -> ArrayType:
        _fits("gather", axis, indices, x)
        return ArrayType(indices.shape, x.dtype)

    @staticmethod
    def meaning(x: Array, indices: Array, axis: int) -> Array:
        return np.reshape(np.ravel(x)[_positions("gather", indices, x.shape, axis)], indices.shape)

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, indices: Value, axis: int) -> tuple[Value, None]:
        return scatter_add(dy, indices, full(dy, x.shape, 0.0), axis), None


def gather(x: Value, indices: Value, axis: int) -> Value:
    """y[i, j, k] = x[i, indices[i, j, k], k] for axis 1.

    x (I, n, K)   indices (i <= I, j, k <= K)   ->   y (i, j, k)
    """
    return emit("gather", x, indices, axis=front_axis("gather", axis, x.rank))


@register("scatter", "indexing")
class Scatter(Op):
    """y = base, then y[.., indices[.., i, ..], ..] = updates[.., i, ..] in row-major order: the last write stays.

    derivative: dy where an update stayed, 0 for updates overwritten later; for base dy, 0 where anything was written.
    """

    @staticmethod
    def result(updates: Typed, indices: Typed, base: Typed, axis: int) -> ArrayType:
        _fits("scatter", axis, indices, base, updates)
        return ArrayType(base.shape, base.dtype)

    @staticmethod
    def meaning(updates: Array, indices: Array, base: Array, axis: int) -> Array:
        y = np.array(base).ravel()
        positions = _positions("scatter", indices, base.shape, axis)
        # NumPy does not promise which of several assignments to one place is the last, so find it.
        last = np.full(y.shape, -1, np.intp)
        np.maximum.at(last, positions, np.arange(positions.size))
        written = last >= 0
        y[written] = _corner(updates, indices.shape).reshape(-1)[last[written]]
        return np.reshape(y, base.shape)

    @staticmethod
    def derivative(
        dy: Value, y: Value, updates: Value, indices: Value, base: Value, axis: int
    ) -> tuple[Value, None, Value]:
        # Scatter the updates' own numbers to learn which of them stayed.
        own = dy.trace.constant(np.arange(indices.size).reshape(indices.shape), INT64)
        last = scatter(own, indices, full(own, base.shape, -1), axis)
        stayed = equal(gather(last, indices, axis), own)
        d_updates = select(stayed, gather(dy, indices, axis), 0.0)
        d_base = scatter(full(dy, indices.shape, 0.0), indices, dy, axis)
        return _grown(d_updates, updates.shape), None, d_base


def scatter(updates: Value, indices: Value, base: Value, axis: int) -> Value:
    """y = base with y[i, indices[i, j, k], k] = updates[i, j, k] for axis 1; of equal targets the last j stays.

    base (I, n, K)   indices (i <= I, j, k <= K)   updates at least as large as indices   ->   y (I, n, K)
    """
    return emit("scatter", updates, indices, base, axis=front_axis("scatter", axis, base.rank))


@register("scatter_add", "indexing")
class ScatterAdd(Op):
    """y = base, then y[.., indices[.., i, ..], ..] += updates[.., i, ..].   derivative: gather(dy) and dy"""

    @staticmethod
    def result(updates: Typed, indices: Typed, base: Typed, axis: int) -> ArrayType:
        _fits("scatter_add", axis, indices, base, updates)
        return ArrayType(base.shape, base.dtype)

    @staticmethod
    def meaning(updates: Array, indices: Array, base: Array, axis: int) -> Array:
        y = np.array(base).ravel()
        positions = _positions("scatter_add", indices, base.shape, axis)
        np.add.at(y, positions, _corner(updates, indices.shape).reshape(-1))
        return np.reshape(y, base.shape)

    @staticmethod
    def derivative(
        dy: Value, y: Value, updates: Value, indices: Value, base: Value, axis: int
    ) -> tuple[Value, None, Value]:
        return _grown(gather(dy, indices, axis), updates.shape), None, dy


def scatter_add(updates: Value, indices: Value, base: Value, axis: int) -> Value:
    """y = base, then y[i, indices[i, j, k], k] += updates[i, j, k] for axis 1.   shapes as in `scatter`"""
    return emit("scatter_add", updates, indices, base, axis=front_axis("scatter_add", axis, base.rank))


# Embedding tables -----------------------------------------------------------------------------------------------


@register("count_indices", "indexing")
class CountIndices(Op):
    """y[r] = how often r is among the indices, as int64."""

    @staticmethod
    def result(indices: Typed, extent: int) -> ArrayType:
        expect_integers("count_indices", indices)
        return ArrayType((extent,), INT64)

    @staticmethod
    def meaning(indices: Array, extent: int) -> Array:
        return np.bincount(checked_indices("count_indices", indices, extent).reshape(-1), minlength=extent)


def count_indices(indices: Value, extent: int) -> Value:
    """y[r] = how often r is among the indices.   indices of any shape, in 0..extent-1   ->   y (extent,) int64"""
    return emit("count_indices", indices, extent=extent)


# Random numbers -------------------------------------------------------------------------------------------------

# Philox4x32-10: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[Any], key: Sequence[int]) -> Array:
    """Four random uint32 words for every counter.   counter: four numbers or arrays (n,)   ->   (n, 4) or (4,)"""
    # Words are kept in uint64 so that products keep their high halves.
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(UINT32)


@register("random_uniform", "indexing")
class RandomUniform(Op):
    """y = float32 numbers in [0, 1): element i is word i % 4 of Philox block i // 4, its upper 24 bits times 2^-24."""

    @staticmethod
    def result(key: Typed, shape: Shape) -> ArrayType:
        if key.shape != (4,) or key.dtype != UINT32:
            raise DataError(f"random_uniform: the key must be uint32[4], not {key.dtype}{list(key.shape)}")
        return ArrayType(shape, np.dtype(np.float32))

    @staticmethod
    def meaning(key: Array, shape: Shape) -> Array:
        seed_low, seed_high, stream, count = (int(word) for word in key)
        size = int(np.prod(shape, dtype=np.int64))
        block = np.arange(-(-size // 4), dtype=np.uint64)
        words = philox((block & _LOW, block >> _HALF, stream, count), (seed_low, seed_high)).ravel()[:size]
        return np.reshape((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24), shape)


def random_uniform(key: Value, shape: Iterable[int]) -> Value:
    """Independent float32 numbers in [0, 1), the same for the same key.

    key   uint32[4]: seed (low, high), stream, counter; change the counter for fresh numbers
    """
    return emit("random_uniform", key, shape=tuple(shape))
