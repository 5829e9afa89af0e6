"""Ops along one axis: sort, top-k, cumulative sum."""

from __future__ import annotations

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.indexing import INT64, scatter
from mlcompute.ops.op import Array, ArrayType, Op, Typed, Value, emit, emit_all, register
from mlcompute.ops.reductions import front_axis
from mlcompute.ops.views import full


@register("sort", "ordering")
class Sort(Op):
    """values, indices = the first `count` elements of x in order along axis, and where they came from.

    Of equal elements the first comes first; NaN counts as larger than any number.
    derivative: every gradient goes back to where its value came from
    """

    @staticmethod
    def result(x: Typed, axis: int, descending: bool, count: int) -> tuple[ArrayType, ArrayType]:
        if not 1 <= count <= x.shape[axis]:
            raise ShapeError(f"sort: the first {count} of {x.shape[axis]} elements")
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        return ArrayType(shape, x.dtype), ArrayType(shape, INT64)

    @staticmethod
    def meaning(x: Array, axis: int, descending: bool, count: int) -> tuple[Array, Array]:
        if descending:  # backwards, so that of equal elements the first comes last; then backwards again
            order = np.flip(x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        else:
            order = np.argsort(x, axis, kind="stable")
        indices = np.take(order, range(count), axis)
        return np.take_along_axis(x, indices, axis), indices

    @staticmethod
    def derivative(
        dy: tuple[Value | None, Value | None], y: tuple[Value, Value], x: Value, axis: int, descending: bool, count: int
    ) -> Value | None:
        return None if dy[0] is None else scatter(dy[0], y[1], full(dy[0], x.shape, 0.0), axis)


def sort(x: Value, axis: int, descending: bool = False, count: int | None = None) -> tuple[Value, Value]:
    """x in order along an axis, and the indices of its elements; or only the first `count` of both.

    x (*, n, *)   ->   values (*, count, *)   indices (*, count, *) int64
    """
    axis = front_axis("sort", axis, x.rank)
    values, indices = emit_all("sort", x, axis=axis, descending=descending, count=count or x.shape[axis])
    return values, indices


@register("cumulative_sum", "ordering")
class CumulativeSum(Op):
    """y[i] = x[0] + ... + x[i] along axis, float32 added up in float64.   derivative: the same from the other end

    exclusive   without x[i] itself
    reverse     from the end
    """

    @staticmethod
    def result(x: Typed, axis: int, exclusive: bool, reverse: bool) -> ArrayType:
        return ArrayType(x.shape, x.dtype)

    @staticmethod
    def meaning(x: Array, axis: int, exclusive: bool, reverse: bool) -> Array:
        seen = np.flip(x, axis) if reverse else x
        y = np.cumsum(seen, axis, np.float64 if x.dtype.kind == "f" else x.dtype)
        if exclusive:
            y = np.roll(y, 1, axis)
            y[tuple([slice(None)] * axis + [slice(0, 1)])] = 0
        return (np.flip(y, axis) if reverse else y).astype(x.dtype)

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, axis: int, exclusive: bool, reverse: bool) -> Value | None:
        return cumulative_sum(dy, axis, exclusive, not reverse) if x.is_floating else None


def cumulative_sum(x: Value, axis: int, exclusive: bool = False, reverse: bool = False) -> Value:
    """y[i] = x[0] + ... + x[i] along an axis.   x (*, n, *)   ->   y (*, n, *)"""
    axis = front_axis("cumulative_sum", axis, x.rank)
    return emit("cumulative_sum", x, axis=axis, exclusive=exclusive, reverse=reverse)
