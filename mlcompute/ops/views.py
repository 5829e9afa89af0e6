"""Views: the same elements with another shape or strides. A device need not copy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, register
from mlcompute.ops.reductions import front_axis, sum_to


class _View(Op):
    is_view = True


@register("reshape", "view")
class Reshape(_View):
    """y = x with another shape, row-major."""

    @staticmethod
    def result(x: Typed, shape: Shape) -> ArrayType:
        if min(shape, default=0) < 0 or math.prod(shape) != math.prod(x.shape):
            raise ShapeError(f"reshape: {x.shape} and {shape} hold different numbers of elements")
        return ArrayType(shape, x.dtype)

    @staticmethod
    def meaning(x: Array, shape: Shape) -> Array:
        return x.reshape(shape)

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, shape: Shape) -> Value:
        return reshape(dy, x.shape)


@register("transpose", "view")
class Transpose(_View):
    """Axis k of y is axis axes[k] of x."""

    @staticmethod
    def result(x: Typed, axes: tuple[int, ...]) -> ArrayType:
        if sorted(axes) != list(range(len(x.shape))):
            raise ShapeError(f"transpose: {axes} does not name every axis of {x.shape} once")
        return ArrayType(tuple([x.shape[axis] for axis in axes]), x.dtype)

    @staticmethod
    def meaning(x: Array, axes: tuple[int, ...]) -> Array:
        return np.transpose(x, axes)

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, axes: tuple[int, ...]) -> Value:
        return emit("transpose", dy, axes=tuple(sorted(range(len(axes)), key=axes.__getitem__)))


def _check_slice(shape: Shape, start: Shape, end: Shape, stride: Shape) -> Shape:
    """Extents of x[start:end:stride]; a ShapeError when that reaches outside of x."""
    if not len(start) == len(end) == len(stride) == len(shape) or not all(
        0 <= s <= e <= n and k >= 1 for s, e, k, n in zip(start, end, stride, shape, strict=True)
    ):
        raise ShapeError(
            f"slice: {shape} cannot be sliced so", start=start, end=end, stride=stride,
            expected="0 <= start <= end <= extent and stride >= 1 on every axis",
        )  # fmt: skip
    return tuple(-(-(e - s) // k) for s, e, k in zip(start, end, stride, strict=True))


@register("slice", "view")
class Slice(_View):
    """y = x[start:end:stride] on every axis; end exclusive, stride positive."""

    @staticmethod
    def result(x: Typed, start: Shape, end: Shape, stride: Shape) -> ArrayType:
        return ArrayType(_check_slice(x.shape, start, end, stride), x.dtype)

    @staticmethod
    def meaning(x: Array, start: Shape, end: Shape, stride: Shape) -> Array:
        return x[tuple(slice(s, e, k) for s, e, k in zip(start, end, stride, strict=True))]

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, start: Shape, end: Shape, stride: Shape) -> Value:
        return emit("slice_gradient", dy, shape=x.shape, start=start, end=end, stride=stride)


@register("slice_gradient", "indexing")
class SliceGradient(Op):
    """y = zeros of the given shape with x written at [start:end:stride]: the adjoint of slice."""

    @staticmethod
    def result(x: Typed, shape: Shape, start: Shape, end: Shape, stride: Shape) -> ArrayType:
        if x.shape != _check_slice(shape, start, end, stride):
            raise ShapeError(f"slice_gradient: {x.shape} is not that slice of {shape}", start=start, end=end)
        return ArrayType(shape, x.dtype)

    @staticmethod
    def meaning(x: Array, shape: Shape, start: Shape, end: Shape, stride: Shape) -> Array:
        y = np.zeros(shape, x.dtype)
        y[tuple(slice(s, e, k) for s, e, k in zip(start, end, stride, strict=True))] = x
        return y

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, shape: Shape, start: Shape, end: Shape, stride: Shape) -> Value:
        return slice_(dy, start, end, stride)


@register("broadcast", "view")
class Broadcast(_View):
    """y = x repeated to a larger shape by NumPy's rules."""

    @staticmethod
    def result(x: Typed, shape: Shape) -> ArrayType:
        repeated = shape[len(shape) - len(x.shape) :]
        if len(shape) < len(x.shape) or any(n not in (1, m) for n, m in zip(x.shape, repeated, strict=True)):
            raise ShapeError(f"broadcast: {x.shape} cannot be repeated to {shape}")
        return ArrayType(shape, x.dtype)

    @staticmethod
    def meaning(x: Array, shape: Shape) -> Array:
        return np.broadcast_to(x, shape)

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, shape: Shape) -> Value:
        return sum_to(dy, x.shape)


def reshape(x: Value, shape: Iterable[int]) -> Value:
    """x with another shape; x itself when it already has it."""
    shape = tuple(shape)
    return x if x.shape == shape else emit("reshape", x, shape=shape)


def transpose(x: Value, axes: Iterable[int] | None = None) -> Value:
    """x with its axes in another order; without `axes`, the last two change places."""
    rank = x.rank
    if axes is None and rank >= 2:
        return emit("transpose", x, axes=(*range(rank - 2), rank - 1, rank - 2))
    order = tuple(front_axis("transpose", axis, rank) for axis in ((-1, -2) if axes is None else axes))
    return emit("transpose", x, axes=order)


def slice_(x: Value, start: Iterable[int], end: Iterable[int], stride: Iterable[int] | None = None) -> Value:
    """x[start:end:stride] on every axis."""
    return emit("slice", x, start=tuple(start), end=tuple(end), stride=tuple(stride or (1,) * x.rank))


def slice_axis(x: Value, axis: int, start: int, end: int) -> Value:
    """x[..., start:end, ...] along one axis."""
    starts, ends = [0] * x.rank, list(x.shape)
    axis = front_axis("slice", axis, x.rank)
    starts[axis], ends[axis] = start, end
    return slice_(x, starts, ends)


def broadcast(x: Value, shape: Iterable[int]) -> Value:
    """x repeated to a larger shape; x itself when it already has it."""
    shape = tuple(shape)
    return x if x.shape == shape else emit("broadcast", x, shape=shape)


def full(like: Value, shape: Iterable[int], number: Any, dtype: np.dtype[Any] | None = None) -> Value:
    """One number repeated to a shape, in the trace (and by default the dtype) of another value."""
    return broadcast(like.trace.constant(number, dtype or like.dtype), shape)
