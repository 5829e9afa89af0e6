"""Pooling: the largest or the sum of every window, with their adjoints."""

from __future__ import annotations

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.elementwise import convert, equal, logical_and, logical_or, not_equal
from mlcompute.ops.images import either_layout
from mlcompute.ops.indexing import concatenate, gather, pad
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, register
from mlcompute.ops.reductions import argmax
from mlcompute.ops.views import reshape, slice_
from mlcompute.ops.windows import Pair, Sides, bordered, each_place, inner, window_counts

#: The index of an element in its window is kept in one byte; 255 means none.
INDEX_TYPE = np.dtype(np.uint8)
MOST_INDICES = 255


def _pooled(op: str, x: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Shape:
    if len(x) != 4:
        raise ShapeError(f"{op}: the image must have rank 4, not shape {x}")
    return (x[0], x[1], *window_counts(op, (x[2], x[3]), kernel, strides, dilations, padding))


class _Pool(Op):
    @staticmethod
    def result(x: Typed, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> ArrayType:
        return ArrayType(_pooled("pool", x.shape, kernel, strides, dilations, padding), x.dtype)


@register("max_pool", "contraction")
@either_layout((0,))
class MaxPool(_Pool):
    """y = largest x of every window; NaN wins, a window without any x gives -inf.   derivative: max_pool_gradient"""

    @staticmethod
    def meaning(x: Array, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Array:
        shape = _pooled("max_pool", x.shape, kernel, strides, dilations, padding)
        padded = bordered(x, padding, -np.inf)
        y = np.full(shape, -np.inf, x.dtype)
        for _, pixels in each_place(kernel, shape[2:], strides, dilations):
            np.maximum(y, padded[pixels], out=y)
        return y

    @staticmethod
    def derivative(
        dy: Value, y: Value, x: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
    ) -> Value:
        return max_pool_gradient(dy, x, kernel, strides, dilations, padding)


@register("max_pool_gradient", "contraction")
@either_layout((0, 1))
class MaxPoolGradient(Op):
    """y = dy of every window added to the first largest x in it, row-major; the first NaN counts as largest."""

    @staticmethod
    def result(dy: Typed, x: Typed, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> ArrayType:
        expected = _pooled("max_pool_gradient", x.shape, kernel, strides, dilations, padding)
        if dy.shape != expected:
            raise ShapeError(f"max_pool_gradient: dy is {dy.shape}, an image {x.shape} needs {expected}")
        return ArrayType(x.shape, dy.dtype)

    @staticmethod
    def meaning(dy: Array, x: Array, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Array:
        indices = _first_largest(x, dy.shape, kernel, strides, dilations, padding)
        return _spread(dy, indices, x.shape, kernel, strides, dilations, padding)

    @staticmethod
    def derivative(
        dy: Value, y: Value, d: Value, x: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
    ) -> tuple[Value, None]:
        # Linear in d: pick from dy what the same windows chose. x only chooses, so nothing flows to it.
        def windows(value: Value, fill: float) -> Value:
            top, bottom, left, right = padding
            padded = pad(value, (0, 0, top, left), (0, 0, bottom, right), fill)
            n, c = value.shape[:2]
            parts = [
                slice_(padded, (0, 0, r.start, a.start), (n, c, r.stop, a.stop), (1, 1, r.step, a.step))
                for _, (_, _, r, a) in each_place(kernel, d.shape[2:], strides, dilations)
            ]
            return concatenate([reshape(part, (n, c, 1, *part.shape[2:])) for part in parts], axis=2)

        seen = windows(x, -np.inf)
        inside = windows(x.trace.constant(np.ones(x.shape, np.int32)), 0.0)
        largest = reshape(max_pool(x, kernel, strides, dilations, padding), (*d.shape[:2], 1, *d.shape[2:]))
        is_largest = logical_or(equal(seen, largest), not_equal(seen, seen))
        first = argmax(convert(logical_and(is_largest, not_equal(inside, 0)), np.dtype(np.int32)), axis=2)
        return reshape(gather(windows(dy, 0.0), first, axis=2), d.shape), None


@register("max_pool_with_indices", "contraction")
@either_layout((0,))
class MaxPoolWithIndices(Op):
    """y = max_pool, and which element of each window it is: its number row-major, -1 (255) in a window without any x.

    With the indices a gradient needs no x. Made by the compiler after differentiation, so it has no derivative itself.
    """

    @staticmethod
    def result(x: Typed, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> tuple[ArrayType, ArrayType]:
        if kernel[0] * kernel[1] > MOST_INDICES:
            raise ShapeError(f"max_pool_with_indices: windows of {kernel} have more elements than {MOST_INDICES}")
        shape = _pooled("max_pool_with_indices", x.shape, kernel, strides, dilations, padding)
        return ArrayType(shape, x.dtype), ArrayType(shape, INDEX_TYPE)

    @staticmethod
    def meaning(x: Array, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> tuple[Array, Array]:
        y = MaxPool.meaning(x, kernel, strides, dilations, padding)
        return y, _first_largest(x, y.shape, kernel, strides, dilations, padding).astype(INDEX_TYPE)


@register("max_pool_indices_gradient", "contraction")
@either_layout((0, 1))
class MaxPoolIndicesGradient(Op):
    """y = dy of every window added to the element its index names: max_pool_gradient for max_pool_with_indices."""

    @staticmethod
    def result(
        dy: Typed, indices: Typed, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
    ) -> ArrayType:
        expected = _pooled("max_pool_indices_gradient", shape, kernel, strides, dilations, padding)
        if dy.shape != expected or indices.shape != expected:
            found = f"dy is {dy.shape}, indices {indices.shape}"
            raise ShapeError(f"max_pool_indices_gradient: {found}, an image {shape} needs {expected}")
        return ArrayType(shape, dy.dtype)

    @staticmethod
    def meaning(
        dy: Array, indices: Array, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
    ) -> Array:
        return _spread(dy, indices, shape, kernel, strides, dilations, padding)


def _first_largest(x: Array, pooled: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Array:
    """The number of the first largest element of every window, -1 where it has none."""
    padded = bordered(x, padding, -np.inf)
    # Padding never takes a gradient, not even from a window whose real elements are all -inf.
    inside = bordered(np.ones((1, 1, *x.shape[2:]), np.bool_), padding, 0.0)
    largest = np.full(pooled, -np.inf, x.dtype)
    winner = np.full(pooled, -1, np.int32)
    for number, (_, pixels) in enumerate(each_place(kernel, pooled[2:], strides, dilations)):
        found = padded[pixels]
        better = (winner < 0) | (found > largest) | (np.isnan(found) & ~np.isnan(largest))
        better &= inside[pixels]
        np.copyto(largest, found, where=better)
        np.copyto(winner, np.int32(number), where=better)
    return winner


def _spread(
    dy: Array, indices: Array, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
) -> Array:
    y = bordered(np.zeros(shape, dy.dtype), padding, 0.0)
    for number, (_, pixels) in enumerate(each_place(kernel, dy.shape[2:], strides, dilations)):
        y[pixels] += np.where(indices == number, dy, 0)
    return inner(y, padding)


@register("sum_pool", "contraction")
@either_layout((0,))
class SumPool(_Pool):
    """y = sum of x over every window, 0 outside x.   derivative: sum_pool_gradient"""

    @staticmethod
    def meaning(x: Array, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Array:
        shape = _pooled("sum_pool", x.shape, kernel, strides, dilations, padding)
        padded = bordered(x, padding, 0.0)
        y = np.zeros(shape, x.dtype)
        for _, pixels in each_place(kernel, shape[2:], strides, dilations):
            y += padded[pixels]
        return y

    @staticmethod
    def derivative(
        dy: Value, y: Value, x: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
    ) -> Value:
        return sum_pool_gradient(dy, x.shape, kernel, strides, dilations, padding)


@register("sum_pool_gradient", "contraction")
@either_layout((0,))
class SumPoolGradient(Op):
    """y = dy of every window added to each of its elements: the adjoint of sum_pool."""

    @staticmethod
    def result(dy: Typed, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> ArrayType:
        expected = _pooled("sum_pool_gradient", shape, kernel, strides, dilations, padding)
        if dy.shape != expected:
            raise ShapeError(f"sum_pool_gradient: dy is {dy.shape}, an image {shape} needs {expected}")
        return ArrayType(shape, dy.dtype)

    @staticmethod
    def meaning(dy: Array, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Array:
        padded = bordered(np.zeros(shape, dy.dtype), padding, 0.0)
        for _, pixels in each_place(kernel, dy.shape[2:], strides, dilations):
            padded[pixels] += dy
        return inner(padded, padding)

    @staticmethod
    def derivative(
        dy: Value, y: Value, d: Value, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides
    ) -> Value:
        return sum_pool(dy, kernel, strides, dilations, padding)


def max_pool(x: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Value:
    """y = largest x of every window, outside x counted as -inf.   x (N, C, H, W)   ->   y (N, C, OH, OW)

    padding (top, bottom, left, right); extents as in `convolution`
    """
    return emit("max_pool", x, kernel=kernel, strides=strides, dilations=dilations, padding=padding)


def max_pool_gradient(dy: Value, x: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Value:
    """dy of every window added to the first largest x in it.   dy (N, C, OH, OW)   x (N, C, H, W)   ->   like x"""
    return emit("max_pool_gradient", dy, x, kernel=kernel, strides=strides, dilations=dilations, padding=padding)


def sum_pool(x: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Value:
    """y = sum of x over every window, outside x counted as 0.   x (N, C, H, W)   ->   y (N, C, OH, OW)

    padding (top, bottom, left, right); extents as in `convolution`
    """
    return emit("sum_pool", x, kernel=kernel, strides=strides, dilations=dilations, padding=padding)


def sum_pool_gradient(dy: Value, shape: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Value:
    """dy of every window added to each of its elements.   dy (N, C, OH, OW)   ->   `shape` (N, C, H, W)"""
    return emit(
        "sum_pool_gradient", dy,
        shape=shape, kernel=kernel, strides=strides, dilations=dilations, padding=padding,
    )  # fmt: skip
