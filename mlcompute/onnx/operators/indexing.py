"""Operators that pick and place elements by number."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.rows import Call, front, operator, whole, wrapped
from mlcompute.ops.op import Array, Value


def _indices(call: Call, index: int, extent: int) -> Value:
    """Operand `index` as numbers from the front."""
    known = call.known(index)
    if known is None:
        return wrapped(call[index], extent)
    if np.any((known < -extent) | (known >= extent)):
        raise ShapeError(f"{call.kind}: an index lies outside of -{extent}..{extent - 1}")
    return call.constant(np.where(known < 0, known + extent, known), np.int64)


@operator("Gather", weights=(0,))
def gather(call: Call) -> Value:
    x = call[0]
    axis = front(call.attribute("axis", 0), x.rank, "Gather")
    return ops.take(x, _indices(call, 1, x.shape[axis]), axis)


@operator("GatherElements")
def gather_elements(call: Call) -> Value:
    x = call[0]
    axis = front(call.attribute("axis", 0), x.rank, "GatherElements")
    return ops.gather(x, _indices(call, 1, x.shape[axis]), axis)


def _flat_places(indices: Value, extents: tuple[int, ...]) -> Value:
    """The last axis of indices, as one number each in row-major order.   (*, k) -> (*)"""
    k = indices.shape[-1]
    indices = whole(indices)
    sizes = indices.trace.constant(np.array(extents[:k], np.int64))
    indices = ops.select(indices < 0, indices + sizes, indices)
    strides = [math.prod(extents[axis + 1 : k]) for axis in range(k)]
    scaled = indices * indices.trace.constant(np.array(strides, np.int64))
    return ops.reshape(ops.sum_(scaled, (indices.rank - 1,)), indices.shape[:-1])


@operator("GatherND", weights=(0,))
def gather_nd(call: Call) -> Value:
    x, indices = call[0], call[1]
    batch = call.attribute("batch_dims", 0)
    k = indices.shape[-1]
    if not 0 <= batch < min(x.rank, indices.rank) or not 1 <= k <= x.rank - batch:
        raise ShapeError(f"GatherND: indices {indices.shape} do not fit {x.shape} with {batch} batch axes")
    outer = math.prod(x.shape[:batch])
    rows, rest = x.shape[batch : batch + k], x.shape[batch + k :]
    flat = ops.reshape(x, (outer * math.prod(rows), *rest))
    places = ops.reshape(_flat_places(indices, rows), (outer, -(-indices.size // k // max(outer, 1))))
    call.affordable(outer)
    offsets = call.constant(np.arange(outer)[:, None] * math.prod(rows), np.int64)
    found = ops.take(flat, ops.reshape(places + offsets, (places.size,)), 0)
    return ops.reshape(found, (*x.shape[:batch], *indices.shape[batch:-1], *rest))


# Scatter --------------------------------------------------------------------------------------------------------------


def scattered(kind: str, updates: Value, indices: Value, base: Value, axis: int, reduction: str) -> Value:
    """base with updates put, added, multiplied or compared in along an axis."""
    if reduction == "none":
        return ops.scatter(updates, indices, base, axis)
    if reduction == "add":
        return ops.scatter_add(updates, indices, base, axis)
    if reduction not in ("mul", "max", "min"):
        raise ShapeError(f"{kind}: there is no reduction {reduction!r}")
    # Updates with different numbers along the axis may share a target, so they go in one after the other.
    join = {"mul": ops.multiply, "max": ops.maximum, "min": ops.minimum}[reduction]
    if indices.shape[axis] > 4096:
        raise ShapeError(f"{kind}: {indices.shape[axis]} updates one after the other", expected="at most 4096")
    corner = ops.slice_(updates, (0,) * updates.rank, indices.shape)
    for k in range(indices.shape[axis]):
        one = ops.slice_axis(indices, axis, k, k + 1)
        now = ops.gather(base, one, axis)
        base = ops.scatter(join(now, ops.slice_axis(corner, axis, k, k + 1)), one, base, axis)
    return base


@operator("ScatterElements", "Scatter")
def scatter_elements(call: Call) -> Value:
    base = call[0]
    axis = front(call.attribute("axis", 0), base.rank, call.kind)
    indices = _indices(call, 1, base.shape[axis])
    return scattered(call.kind, call[2], indices, base, axis, call.attribute("reduction", "none"))


@operator("ScatterND")
def scatter_nd(call: Call) -> Value:
    base, updates = call[0], call[2]
    k, extents = call[1].shape[-1], base.shape
    rest = math.prod(extents[k:])
    rows = math.prod(extents[:k])
    known = call.known(1)
    if known is not None:
        wrapped_ = np.where(known < 0, known + np.array(extents[:k]), known).astype(np.int64)
        if np.any((wrapped_ < 0) | (wrapped_ >= np.array(extents[:k]))):
            raise ShapeError(f"ScatterND: an index lies outside of {extents[:k]}")
        strides = np.array([math.prod(extents[axis + 1 : k]) for axis in range(k)])
        flat = np.sum(wrapped_ * strides, axis=-1).reshape(-1, 1)
        places = call.constant(np.broadcast_to(flat, (flat.size, rest)), np.int64)
    else:
        found = _flat_places(call[1], extents)
        places = ops.broadcast(ops.reshape(found, (found.size, 1)), (found.size, rest))
    answer = scattered(
        "ScatterND",
        ops.reshape(updates, (places.shape[0], rest)),
        places,
        ops.reshape(base, (rows, rest)),
        0,
        call.attribute("reduction", "none"),
    )
    return ops.reshape(answer, base.shape)


@operator("OneHot", trains=False, needs=(1,))
def one_hot(call: Call) -> Value:
    indices, depth = call[0], int(call.array(1).reshape(-1)[0])
    axis = front(call.attribute("axis", -1), indices.rank + 1, "OneHot")
    if depth < 1:
        raise ShapeError(f"OneHot: depth is {depth}")
    call.affordable(depth)
    indices = wrapped(indices, depth)
    numbers = call.constant(np.arange(depth).reshape((depth,) + (1,) * (indices.rank - axis)), np.int64)
    hot = ops.equal(ops.reshape(indices, (*indices.shape[:axis], 1, *indices.shape[axis:])), numbers)
    off, on = (ops.slice_axis(call[2], 0, k, k + 1) for k in (0, 1))
    return ops.select(hot, ops.reshape(on, ()), ops.reshape(off, ()))


# Operators whose result has a shape that depends on numbers: for constants only -------------------------------------


@operator("NonZero", trains=False, needs=(0,), note="of constants only")
def non_zero(call: Call) -> Array:
    return np.array(np.nonzero(call.array(0)), np.int64).reshape(call.array(0).ndim, -1)


@operator("Compress", needs=(1,), note="the condition must be known")
def compress(call: Call) -> Value:
    x, condition = call[0], call.array(1).reshape(-1).astype(bool)
    axis = call.attribute("axis")
    if axis is None:
        x, axis = ops.reshape(x, (x.size,)), 0
    axis = front(axis, x.rank, "Compress")
    chosen = np.nonzero(condition[: x.shape[axis]])[0]
    return ops.take(x, call.constant(chosen, np.int64), axis)


@operator("Unique", trains=False, needs=(0,), note="of constants only")
def unique(call: Call) -> list[Array]:
    x, axis = call.array(0), call.attribute("axis")
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not call.attribute("sorted", 1):
        order = np.argsort(first, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], back[inverse]
    return [values, *(array.astype(np.int64) for array in (first, inverse, counts))][: call.output_count]


@operator("TensorScatter")
def tensor_scatter(call: Call) -> Value:
    """A cache of past keys or values with new ones written at the position of each sample."""
    cache, update = call[0], call[1]
    axis = front(call.attribute("axis", -2), cache.rank, "TensorScatter")
    length, new = cache.shape[axis], update.shape[axis]
    batch = cache.shape[0]
    call.affordable(new)
    steps = call.constant(np.arange(new).reshape(1, new), np.int64)
    start: Any = ops.reshape(whole(call[2]), (batch, 1)) if call.has(2) else call.constant(np.zeros((1, 1)), np.int64)
    places = ops.broadcast(start + steps, (batch, new))
    if call.attribute("mode", "linear") == "circular":
        places = places - (places / length) * length
    shape = [1] * cache.rank
    shape[0], shape[axis] = batch, new
    return ops.scatter(update, ops.broadcast(ops.reshape(places, shape), update.shape), cache, axis)


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(call: Call) -> Value:
    x = call[0]
    return ops.take(x, ops.reshape(whole(call[1]), (call[1].size,)), x.rank - 1)
