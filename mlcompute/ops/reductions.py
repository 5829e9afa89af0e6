"""Reductions: extents along some axes become 1. The rank always stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import BOOL, Array, ArrayType, Op, Shape, Typed, Value, emit, emit_all, register

Axes = tuple[int, ...]


def reduced_shape(shape: Shape, axes: Axes) -> Shape:
    """The shape of a result: extents along the axes are 1."""
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def front_axis(op: str, axis: int, rank: int) -> int:
    """The axis counted from the front; a ShapeError when there is no such axis."""
    if not -rank <= axis < rank:
        raise ShapeError(f"{op}: axis {axis} does not exist, the value has rank {rank}")
    return axis % rank


def front_axes(op: str, axes: Iterable[int], rank: int) -> Axes:
    """The axes counted from the front; a ShapeError where one does not exist or is named twice."""
    found = tuple(front_axis(op, axis, rank) for axis in axes)
    if len(set(found)) < len(found):
        raise ShapeError(f"{op}: an axis is named twice in {found}")
    return found


def count_reduced(op: str, shape: Shape, axes: Axes) -> int:
    """How many elements become one; a ShapeError when there are none, for ops that then have no answer."""
    count = math.prod(shape[axis] for axis in axes)
    if not count:
        raise ShapeError(f"{op}: has no answer for zero elements, axes {axes} of {shape}")
    return count


class _Reduction(Op):
    @staticmethod
    def result(x: Typed, axes: Axes) -> ArrayType:
        return ArrayType(reduced_shape(x.shape, axes), computed_type(x.dtype))


@register("sum", "reduction")
class Sum(_Reduction):
    """y = sum of x over axes.   derivative: dy, broadcast"""

    @staticmethod
    def meaning(x: Array, axes: Axes) -> Array:
        return np.asarray(np.sum(x, axis=axes, keepdims=True, dtype=x.dtype))

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, axes: Axes) -> Value:
        return emit("broadcast", dy, shape=x.shape)


def _to_extremes(dy: Value, y: Value, x: Value, axes: Axes) -> Value:
    """The gradient goes to the extreme elements, in equal parts when several tie."""
    tied = emit("convert", emit("equal", x, y), to=x.dtype)
    return tied * (dy / emit("sum", tied, axes=axes))


class _Extreme(Op):
    @staticmethod
    def result(x: Typed, axes: Axes) -> ArrayType:
        count_reduced("max or min", x.shape, axes)
        return ArrayType(reduced_shape(x.shape, axes), computed_type(x.dtype))


@register("max", "reduction")
class Max(_Extreme):
    """y = largest x over axes; NaN wins."""

    derivative = staticmethod(_to_extremes)

    @staticmethod
    def meaning(x: Array, axes: Axes) -> Array:
        return np.asarray(np.max(x, axis=axes, keepdims=True))


@register("min", "reduction")
class Min(_Extreme):
    """y = smallest x over axes; NaN wins."""

    derivative = staticmethod(_to_extremes)

    @staticmethod
    def meaning(x: Array, axes: Axes) -> Array:
        return np.asarray(np.min(x, axis=axes, keepdims=True))


class _Index(Op):
    @staticmethod
    def result(x: Typed, axis: int) -> ArrayType:
        count_reduced("argmax or argmin", x.shape, (axis,))
        return ArrayType(reduced_shape(x.shape, (axis,)), np.dtype(np.int64))


@register("argmax", "reduction")
class ArgMax(_Index):
    """y = index of the first largest x along one axis."""

    @staticmethod
    def meaning(x: Array, axis: int) -> Array:
        return np.asarray(np.argmax(x, axis=axis, keepdims=True))


@register("argmin", "reduction")
class ArgMin(_Index):
    """y = index of the first smallest x along one axis."""

    @staticmethod
    def meaning(x: Array, axis: int) -> Array:
        return np.asarray(np.argmin(x, axis=axis, keepdims=True))


class _Logical(Op):
    @staticmethod
    def result(x: Typed, axes: Axes) -> ArrayType:
        return ArrayType(reduced_shape(x.shape, axes), BOOL)


@register("any", "reduction")
class AnyOf(_Logical):
    """y = true where some x over axes is not zero."""

    @staticmethod
    def meaning(x: Array, axes: Axes) -> Array:
        return np.asarray(np.any(x, axis=axes, keepdims=True))


@register("all", "reduction")
class AllOf(_Logical):
    """y = true where every x over axes is not zero."""

    @staticmethod
    def meaning(x: Array, axes: Axes) -> Array:
        return np.asarray(np.all(x, axis=axes, keepdims=True))


def _function(name: str) -> Callable[[Value, Iterable[int]], Value]:
    def call(x: Value, axes: Iterable[int]) -> Value:
        return emit(name, x, axes=front_axes(name, axes, x.rank))

    call.__name__ = name
    return call


sum_, max_, min_, any_, all_ = map(_function, ("sum", "max", "min", "any", "all"))


def argmax(x: Value, axis: int) -> Value:
    """Index of the first largest element along `axis`, as int64."""
    return emit("argmax", x, axis=front_axis("argmax", axis, x.rank))


def argmin(x: Value, axis: int) -> Value:
    """Index of the first smallest element along `axis`, as int64."""
    return emit("argmin", x, axis=front_axis("argmin", axis, x.rank))


def mean(x: Value, axes: Iterable[int]) -> Value:
    """Sum over axes divided by the number of elements summed."""
    axes = front_axes("mean", axes, x.rank)
    return sum_(x, axes) * (1.0 / count_reduced("mean", x.shape, axes))


def sum_to(x: Value, shape: Shape) -> Value:
    """Undo broadcasting: sum x over the axes along which `shape` had been repeated.

    Where x itself is narrower than `shape` (it does not depend on the operand along that axis), it is repeated.
    """
    if x.shape == shape:
        return x
    if x.rank < len(shape):
        x = emit("reshape", x, shape=(1,) * (len(shape) - x.rank) + x.shape)
    extra = x.rank - len(shape)
    padded = (1,) * extra + shape
    axes = tuple(axis for axis in range(x.rank) if padded[axis] == 1 and x.shape[axis] != 1)
    if axes:
        x = sum_(x, axes)
    if x.shape != padded:
        x = emit("broadcast", x, shape=padded)
    return emit("reshape", x, shape=shape) if extra else x


def softmax(x: Value, axis: int) -> Value:
    """e^x / sum e^x along one axis."""
    return emit("softmax", x, axis=front_axis("softmax", axis, x.rank))


def log_softmax(x: Value, axis: int) -> Value:
    """x - log sum e^x along one axis."""
    return emit("log_softmax", x, axis=front_axis("log_softmax", axis, x.rank))


def normalize(x: Value, axes: Iterable[int], epsilon: float) -> tuple[Value, Value, Value]:
    """(x - mean) / sqrt(variance + epsilon) over axes, with the mean and the biased variance."""
    axes = front_axes("normalize", axes, x.rank)
    y, mean_, variance = emit_all("normalize", x, axes=axes, epsilon=epsilon)
    return y, mean_, variance


@register("softmax", "reduction")
class Softmax(Op):
    """y = e^x / sum e^x along axis.   derivative: y (dy - sum dy y)"""

    @staticmethod
    def result(x: Typed, axis: int) -> ArrayType:
        count_reduced("softmax", x.shape, (axis,))
        return ArrayType(x.shape, computed_type(x.dtype))

    @staticmethod
    def meaning(x: Array, axis: int) -> Array:
        e = np.exp(x - np.max(x, axis=axis, keepdims=True))
        return np.asarray(e / np.sum(e, axis=axis, keepdims=True))

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, axis: int) -> Value:
        return y * (dy - sum_(dy * y, (axis,)))

    @staticmethod
    def expansion(x: Value, axis: int) -> Value:
        e = emit("exp", x - max_(x, (axis,)))
        return e / sum_(e, (axis,))


@register("log_softmax", "reduction")
class LogSoftmax(Op):
    """y = x - log sum e^x along axis.   derivative: dy - e^y sum dy"""

    @staticmethod
    def result(x: Typed, axis: int) -> ArrayType:
        count_reduced("log_softmax", x.shape, (axis,))
        return ArrayType(x.shape, computed_type(x.dtype))

    @staticmethod
    def meaning(x: Array, axis: int) -> Array:
        shifted = x - np.max(x, axis=axis, keepdims=True)
        return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)))

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value, axis: int) -> Value:
        return dy - emit("exp", y) * sum_(dy, (axis,))

    @staticmethod
    def expansion(x: Value, axis: int) -> Value:
        shifted = x - max_(x, (axis,))
        return shifted - emit("log", sum_(emit("exp", shifted), (axis,)))


def check_gradient_shapes(op: str, dy: Typed, y: Typed, v: Typed, *scale: Typed, axes: Axes) -> None:
    """A ShapeError unless y is like dy, v like the statistics, and a scale like those or broadcast to them."""
    statistics = reduced_shape(dy.shape, axes)
    fits = all(
        len(each.shape) == len(statistics) and np.broadcast_shapes(each.shape, statistics) == statistics
        for each in scale
    )
    if (y.shape, v.shape) != (dy.shape, statistics) or not fits:
        found = [each.shape for each in (y, v, *scale)]
        raise ShapeError(f"{op}: y, v and scale are {found}, dy needs {[dy.shape, statistics]}")


def with_statistics_gradients(
    dx: Value | None, x: Value, m: Value, dm: Value | None, dv: Value | None, count: int
) -> Value | None:
    """dx, and what the gradients of mean and variance over `count` elements add to it."""
    if dm is not None:
        part = emit("broadcast", dm * (1.0 / count), shape=x.shape)
        dx = part if dx is None else dx + part
    if dv is not None:
        part = (x - m) * (dv * (2.0 / count))
        dx = part if dx is None else dx + part
    return dx


@register("normalize", "reduction")
class Normalize(Op):
    """y = (x - m) / sqrt(v + epsilon), with m = mean and v = biased variance of x over axes; also m and v.

    derivative of y: (dy - mean dy - y mean(dy y)) / sqrt(v + epsilon); m and v carry their own.
    """

    @staticmethod
    def result(x: Typed, axes: Axes, epsilon: float) -> tuple[ArrayType, ArrayType, ArrayType]:
        count_reduced("normalize", x.shape, axes)
        statistics = ArrayType(reduced_shape(x.shape, axes), computed_type(x.dtype))
        return ArrayType(x.shape, x.dtype), statistics, statistics

    @staticmethod
    def meaning(x: Array, axes: Axes, epsilon: float) -> tuple[Array, Array, Array]:
        m = np.mean(x, axis=axes, keepdims=True, dtype=x.dtype)
        centred = x - m
        v = np.mean(centred * centred, axis=axes, keepdims=True, dtype=x.dtype)
        return centred / np.sqrt(v + epsilon), m, v

    @staticmethod
    def derivative(
        dy: tuple[Value | None, ...], y: tuple[Value, ...], x: Value, axes: Axes, epsilon: float
    ) -> Value | None:
        normalized, m, v = y
        dn, dm, dv = dy
        dx: Value | None = None
        if dn is not None:
            dx = emit_all("normalize_gradient", dn, normalized, v, axes=axes, epsilon=epsilon)[0]
        return with_statistics_gradients(dx, x, m, dm, dv, count_reduced("normalize", x.shape, axes))

    @staticmethod
    def expansion(x: Value, axes: Axes, epsilon: float) -> tuple[Value, Value, Value]:
        m = mean(x, axes)
        centred = x - m
        v = mean(centred * centred, axes)
        return centred * emit("rsqrt", v + epsilon), m, v


@register("normalize_gradient", "reduction")
class NormalizeGradient(Op):
    """dx = (dn - mean dn - y mean(dn y)) / sqrt(v + epsilon), with dn = scale dy; also sum dy and sum dy y.

    dy, y like x   v like the statistics   scale (1 if missing) like those, or broadcast to them   ->   dx, sums like v
    The sums are the gradients of a shift and of that scale, which a normalisation is usually followed by.
    """

    @staticmethod
    def result(
        dy: Typed, y: Typed, v: Typed, *scale: Typed, axes: Axes, epsilon: float
    ) -> tuple[ArrayType, ArrayType, ArrayType]:
        count_reduced("normalize_gradient", dy.shape, axes)
        check_gradient_shapes("normalize_gradient", dy, y, v, *scale, axes=axes)
        sums = ArrayType(v.shape, computed_type(dy.dtype))
        return ArrayType(dy.shape, dy.dtype), sums, sums

    @staticmethod
    def meaning(dy: Array, y: Array, v: Array, *scale: Array, axes: Axes, epsilon: float) -> tuple[Array, Array, Array]:
        count = count_reduced("normalize_gradient", dy.shape, axes)
        shift, slope = (np.sum(a, axis=axes, keepdims=True, dtype=dy.dtype) for a in (dy, dy * y))
        inner = dy - shift * (1.0 / count) - y * (slope * (1.0 / count))
        factor = (scale[0] if scale else 1.0) / np.sqrt(v + epsilon)
        return (inner * factor).astype(dy.dtype), shift, slope

    @staticmethod
    def expansion(
        dy: Value, y: Value, v: Value, *scale: Value, axes: Axes, epsilon: float
    ) -> tuple[Value, Value, Value]:
        count = count_reduced("normalize_gradient", dy.shape, axes)
        shift, slope = sum_(dy, axes), sum_(dy * y, axes)
        inner = dy - shift * (1.0 / count) - y * (slope * (1.0 / count))
        root = emit("rsqrt", v + epsilon)
        return inner * (root * scale[0] if scale else root), shift, slope
