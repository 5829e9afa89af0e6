"""Contractions: matrix products, convolutions and pooling, each with its adjoints."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.images import either_layout
from mlcompute.ops.indexing import concatenate, gather, pad
from mlcompute.ops.maps import broadcast_shape, convert, equal, logical_and, logical_or, not_equal
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, register
from mlcompute.ops.reductions import argmax, sum_to
from mlcompute.ops.views import reshape, slice_, transpose

#: (y, x)
Pair = tuple[int, int]
#: (top, bottom, left, right)
Sides = tuple[int, int, int, int]


@register("matmul", "contraction")
class Matmul(Op):
    """y = a b, leading axes broadcast.   derivative: dy bᵀ and aᵀ dy, summed where an operand had been repeated"""

    @staticmethod
    def result(a: Typed, b: Typed) -> ArrayType:
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            raise ShapeError(f"matmul: {a.shape} times {b.shape} has no meaning: needs (.., n, k) times (.., k, m)")
        if a.dtype != b.dtype:
            raise DataError(f"matmul: operands of {a.dtype} and {b.dtype} do not mix")
        leading = broadcast_shape(a.shape[:-2], b.shape[:-2])
        return ArrayType((*leading, a.shape[-2], b.shape[-1]), a.dtype)

    @staticmethod
    def meaning(a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))

    @staticmethod
    def derivative(dy: Value, y: Value, a: Value, b: Value) -> tuple[Value, Value]:
        da = sum_to(matmul(dy, transpose(b)), a.shape)
        if b.rank == 2 and a.rank > 2:
            # One matrix for the whole batch: one product over all rows instead of one per sample and a sum.
            rows = math.prod(y.shape[:-1])
            a, dy = reshape(a, (rows, a.shape[-1])), reshape(dy, (rows, dy.shape[-1]))
        return da, sum_to(matmul(transpose(a), dy), b.shape)


def matmul(a: Value, b: Value) -> Value:
    """y = a b.   a (*, n, k)   b (*, k, m)   ->   y (*, n, m); leading axes broadcast as in NumPy"""
    return emit("matmul", a, b)


# Windows: what convolution and pooling share ----------------------------------------------------------------------


def _window_counts(op: str, image: Pair, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Pair:
    """How many windows fit, down and across; a ShapeError when none does."""
    if min(*kernel, *strides, *dilations) < 1 or min(padding) < 0:
        raise ShapeError(
            f"{op}: kernel, strides and dilations must be at least 1, padding at least 0",
            kernel=kernel, strides=strides, dilations=dilations, padding=padding,
        )  # fmt: skip
    counts = []
    for d in (0, 1):
        padded = image[d] + padding[2 * d] + padding[2 * d + 1]
        reach = dilations[d] * (kernel[d] - 1) + 1
        if reach > padded:
            raise ShapeError(f"{op}: a window of {reach} does not fit into a padded extent of {padded}", image=image)
        counts.append((padded - reach) // strides[d] + 1)
    return counts[0], counts[1]


def _bordered(x: Array, padding: Sides, fill: float) -> Array:
    top, bottom, left, right = padding
    n, c, h, w = x.shape
    padded = np.full((n, c, top + h + bottom, left + w + right), fill, x.dtype)
    padded[:, :, top : top + h, left : left + w] = x
    return padded


def _inner(x: Array, padding: Sides) -> Array:
    top, bottom, left, right = padding
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


def _each(kernel: Pair, counts: Shape, strides: Pair, dilations: Pair) -> Iterable[tuple[int, int, slice, slice]]:
    """For every kernel position, row-major: (u, v) and the padded pixels it meets, one per window."""
    for u in range(kernel[0]):
        for v in range(kernel[1]):
            top, left = u * dilations[0], v * dilations[1]
            rows = slice(top, top + (counts[0] - 1) * strides[0] + 1, strides[0])
            columns = slice(left, left + (counts[1] - 1) * strides[1] + 1, strides[1])
            yield u, v, rows, columns


# Convolution --------------------------------------------------------------------------------------------------------


def _convolved(op: str, x: Shape, w: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> Shape:
    """Shape of the convolution of x with w; a ShapeError when they do not fit."""
    if len(x) != 4 or len(w) != 4:
        raise ShapeError(f"{op}: image and kernel must have rank 4", image=x, kernel=w)
    if groups < 1 or x[1] != w[1] * groups or w[0] % groups:
        raise ShapeError(
            f"{op}: an image of {x[1]} channels and a kernel of shape {w} do not fit with {groups} group(s)",
            expected=f"kernel (outputs, {x[1]} / groups, height, width), outputs divisible by groups",
        )
    counts = _window_counts(op, (x[2], x[3]), (w[2], w[3]), strides, dilations, padding)
    return (x[0], w[0], *counts)


def _columns(x: Array, w: Shape, strides: Pair, dilations: Pair, padding: Sides) -> Array:
    """Every window of x.   x (N, C, H, W)   ->   (N, C, kh, kw, OH, OW), a view of a padded copy"""
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilations, w[2:], strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(_bordered(x, padding, 0.0), reach, axis=(2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    return np.transpose(windows, (0, 1, 4, 5, 2, 3))


@register("convolution", "contraction")
@either_layout((0,))
class Convolution(Op):
    """y[n, o, i, j] = sum over c, u, v of w[o, c, u, v] x[n, c, i sy + u dy - top, j sx + v dx - left], 0 outside x.

    x (N, C, H, W)   w (O, C / groups, kh, kw)   ->   y (N, O, OH, OW); output group g sees input group g.
    """

    @staticmethod
    def result(x: Typed, w: Typed, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> ArrayType:
        return ArrayType(_convolved("convolution", x.shape, w.shape, strides, dilations, padding, groups), x.dtype)

    @staticmethod
    def meaning(x: Array, w: Array, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> Array:
        shape = _convolved("convolution", x.shape, w.shape, strides, dilations, padding, groups)
        (n, o, oh, ow), inner = shape, math.prod(w.shape[1:])
        columns = _columns(x, w.shape, strides, dilations, padding).reshape((n, groups, inner, oh * ow))
        y: Array = np.matmul(w.reshape((groups, o // groups, inner)), columns)
        return y.reshape(shape)

    @staticmethod
    def derivative(
        dy: Value, y: Value, x: Value, w: Value, strides: Pair, dilations: Pair, padding: Sides, groups: int
    ) -> tuple[Value, Value]:
        dx = convolution_input_gradient(dy, w, x.shape, strides, dilations, padding, groups)
        return dx, convolution_weight_gradient(x, dy, w.shape, strides, dilations, padding, groups)


@register("convolution_input_gradient", "contraction")
@either_layout((0,))
class ConvolutionInputGradient(Op):
    """y = the gradient of a convolution with respect to its input; also the transposed convolution of dy with w."""

    @staticmethod
    def result(
        dy: Typed, w: Typed, shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int
    ) -> ArrayType:
        expected = _convolved("convolution_input_gradient", shape, w.shape, strides, dilations, padding, groups)
        if dy.shape != expected:
            raise ShapeError(f"convolution_input_gradient: dy is {dy.shape}, an input {shape} needs {expected}")
        return ArrayType(shape, dy.dtype)

    @staticmethod
    def meaning(
        dy: Array, w: Array, shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int
    ) -> Array:
        (n, o, oh, ow), (_, _, kh, kw) = dy.shape, w.shape
        transposed = w.reshape((groups, o // groups, math.prod(w.shape[1:]))).transpose(0, 2, 1)
        columns = np.matmul(transposed, dy.reshape((n, groups, o // groups, oh * ow)))
        columns = columns.reshape((n, shape[1], kh, kw, oh, ow))
        padded = _bordered(np.zeros(shape, dy.dtype), padding, 0.0)
        for u, v, rows, across in _each((kh, kw), (oh, ow), strides, dilations):
            padded[:, :, rows, across] += columns[:, :, u, v]
        return _inner(padded, padding)

    @staticmethod
    def derivative(
        dy: Value, y: Value, x: Value, w: Value,
        shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int,
    ) -> tuple[Value, Value]:  # fmt: skip
        dx = convolution(dy, w, strides, dilations, padding, groups)
        return dx, convolution_weight_gradient(dy, x, w.shape, strides, dilations, padding, groups)


@register("convolution_weight_gradient", "contraction")
@either_layout((0, 1), result_is_image=False)
class ConvolutionWeightGradient(Op):
    """y = the gradient of a convolution with respect to its kernel."""

    @staticmethod
    def result(
        x: Typed, dy: Typed, shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int
    ) -> ArrayType:
        expected = _convolved("convolution_weight_gradient", x.shape, shape, strides, dilations, padding, groups)
        if dy.shape != expected:
            raise ShapeError(f"convolution_weight_gradient: dy is {dy.shape}, a kernel {shape} needs {expected}")
        return ArrayType(shape, x.dtype)

    @staticmethod
    def meaning(
        x: Array, dy: Array, shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int
    ) -> Array:
        (n, o, oh, ow), (_, c, kh, kw) = dy.shape, shape
        # Windows as rows: one matrix product per group over all samples and all places.
        columns = _columns(x, shape, strides, dilations, padding).reshape((n, groups, c, kh, kw, oh, ow))
        columns = columns.transpose(1, 0, 5, 6, 2, 3, 4).reshape((groups, n * oh * ow, c * kh * kw))
        outer = dy.reshape((n, groups, o // groups, oh * ow)).transpose(1, 2, 0, 3)
        y: Array = np.matmul(outer.reshape((groups, o // groups, n * oh * ow)), columns)
        return y.reshape(shape)

    @staticmethod
    def derivative(
        dy: Value, y: Value, a: Value, b: Value,
        shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int,
    ) -> tuple[Value, Value]:  # fmt: skip
        da = convolution_input_gradient(b, dy, a.shape, strides, dilations, padding, groups)
        return da, convolution(a, dy, strides, dilations, padding, groups)


def convolution(x: Value, w: Value, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> Value:
    """y[n, o, i, j] = sum over c, u, v of w[o, c, u, v] x[n, c, i sy + u dy - top, j sx + v dx - left].

    x (N, C, H, W)   w (O, C / groups, kh, kw)   padding (top, bottom, left, right)   ->   y (N, O, OH, OW)
    with OH = floor((H + top + bottom - dy (kh - 1) - 1) / sy) + 1, OW alike
    """
    return emit("convolution", x, w, strides=strides, dilations=dilations, padding=padding, groups=groups)


def convolution_input_gradient(
    dy: Value, w: Value, shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int
) -> Value:
    """What each input of a convolution adds up: y[n, c, p, q] = sum of w[o, c, u, v] dy[n, o, i, j] with p, q met.

    dy (N, O, OH, OW)   w (O, C / groups, kh, kw)   ->   y of `shape` (N, C, H, W); a transposed convolution
    """
    return emit(
        "convolution_input_gradient", dy, w,
        shape=shape, strides=strides, dilations=dilations, padding=padding, groups=groups,
    )  # fmt: skip


def convolution_weight_gradient(
    x: Value, dy: Value, shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int
) -> Value:
    """What each kernel element adds up: y[o, c, u, v] = sum over n, i, j of dy[n, o, i, j] x[n, c, ..].

    x (N, C, H, W)   dy (N, O, OH, OW)   ->   y of `shape` (O, C / groups, kh, kw)
    """
    return emit(
        "convolution_weight_gradient", x, dy,
        shape=shape, strides=strides, dilations=dilations, padding=padding, groups=groups,
    )  # fmt: skip


# Pooling ------------------------------------------------------------------------------------------------------------


def _pooled(op: str, x: Shape, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Shape:
    if len(x) != 4:
        raise ShapeError(f"{op}: the image must have rank 4, not shape {x}")
    return (x[0], x[1], *_window_counts(op, (x[2], x[3]), kernel, strides, dilations, padding))


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
        padded = _bordered(x, padding, -np.inf)
        y = np.full(shape, -np.inf, x.dtype)
        for _, _, rows, across in _each(kernel, shape[2:], strides, dilations):
            np.maximum(y, padded[:, :, rows, across], out=y)
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
        padded = _bordered(x, padding, -np.inf)
        # Padding never takes a gradient, not even from a window whose real elements are all -inf.
        inside = _bordered(np.ones((1, 1, *x.shape[2:]), np.bool_), padding, 0.0)
        largest = np.full(dy.shape, -np.inf, x.dtype)
        winner = np.full(dy.shape, -1, np.int32)
        places = list(_each(kernel, dy.shape[2:], strides, dilations))
        for number, (_, _, rows, across) in enumerate(places):
            found = padded[:, :, rows, across]
            better = (winner < 0) | (found > largest) | (np.isnan(found) & ~np.isnan(largest))
            better &= inside[:, :, rows, across]
            np.copyto(largest, found, where=better)
            np.copyto(winner, np.int32(number), where=better)
        y = np.zeros(padded.shape, dy.dtype)
        for number, (_, _, rows, across) in enumerate(places):
            y[:, :, rows, across] += np.where(winner == number, dy, 0)
        return _inner(y, padding)

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
                for _, _, r, a in _each(kernel, d.shape[2:], strides, dilations)
            ]
            return concatenate([reshape(part, (n, c, 1, *part.shape[2:])) for part in parts], axis=2)

        seen = windows(x, -np.inf)
        inside = windows(x.trace.constant(np.ones(x.shape, np.int32)), 0.0)
        largest = reshape(max_pool(x, kernel, strides, dilations, padding), (*d.shape[:2], 1, *d.shape[2:]))
        is_largest = logical_or(equal(seen, largest), not_equal(seen, seen))
        first = argmax(convert(logical_and(is_largest, not_equal(inside, 0)), np.dtype(np.int32)), axis=2)
        return reshape(gather(windows(dy, 0.0), first, axis=2), d.shape), None


@register("sum_pool", "contraction")
@either_layout((0,))
class SumPool(_Pool):
    """y = sum of x over every window, 0 outside x.   derivative: sum_pool_gradient"""

    @staticmethod
    def meaning(x: Array, kernel: Pair, strides: Pair, dilations: Pair, padding: Sides) -> Array:
        shape = _pooled("sum_pool", x.shape, kernel, strides, dilations, padding)
        padded = _bordered(x, padding, 0.0)
        y = np.zeros(shape, x.dtype)
        for _, _, rows, across in _each(kernel, shape[2:], strides, dilations):
            y += padded[:, :, rows, across]
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
        padded = _bordered(np.zeros(shape, dy.dtype), padding, 0.0)
        for _, _, rows, across in _each(kernel, dy.shape[2:], strides, dilations):
            padded[:, :, rows, across] += dy
        return _inner(padded, padding)

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
