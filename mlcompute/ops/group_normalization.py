"""Group normalization: statistics of groups of neighbouring channels, repeated for each channel of a group.

Everything keeps the shape of the image, so that any memory layout will do, and what follows (scale, shift, activation)
is elementwise in the same shape. Devices without kernels get `normalize` of an image whose channel axis is split.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, emit_all, register
from mlcompute.ops.reductions import (
    Axes,
    check_gradient_shapes,
    count_reduced,
    front_axes,
    front_axis,
    reduced_shape,
    sum_,
    with_statistics_gradients,
)


def normalize_groups(x: Value, axes: Iterable[int], axis: int, size: int, epsilon: float) -> Value:
    """(x - mean) / sqrt(variance + epsilon) over axes and over groups of `size` neighbours along `axis`."""
    axes, axis = front_axes("normalize_groups", axes, x.rank), front_axis("normalize_groups", axis, x.rank)
    return emit_all("normalize_groups", x, axes=axes, axis=axis, size=size, epsilon=epsilon)[0]


def _check(op: str, shape: Shape, axes: Axes, axis: int, size: int) -> None:
    if axis in axes or size < 1 or shape[axis] % size:
        raise ShapeError(f"{op}: axis {axis} of {shape} has no groups of {size}, with axes {axes}")
    count_reduced(op, shape, axes)


def _split(shape: Shape, axis: int, size: int) -> Shape:
    """The shape with an axis of its own for the members of a group."""
    return (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])


def _split_axes(axes: Axes, axis: int) -> Axes:
    """The reduced axes of that shape: groups are reduced, too."""
    return (*(each + (each > axis) for each in axes), axis + 1)


def _repeated(statistic: Value, axis: int, size: int) -> Value:
    """One number per group -> one per channel."""
    wide = (*statistic.shape[: axis + 1], size, *statistic.shape[axis + 2 :])
    shape = (*wide[:axis], wide[axis] * size, *wide[axis + 2 :])
    return emit("reshape", emit("broadcast", statistic, shape=wide), shape=shape)


def _of_groups(statistic: Value, axis: int, size: int) -> Value:
    """The first number of each group; `_repeated` in reverse."""
    parts = emit("reshape", statistic, shape=_split(statistic.shape, axis, size))
    end = (*parts.shape[: axis + 1], 1, *parts.shape[axis + 2 :])
    return emit("slice", parts, start=(0,) * parts.rank, end=end, stride=(1,) * parts.rank)


def _summed(statistic: Value, axis: int, size: int) -> Value:
    """The sum over each group, for each of its channels."""
    parts = emit("reshape", statistic, shape=_split(statistic.shape, axis, size))
    return _repeated(sum_(parts, (axis + 1,)), axis, size)


def _group_means(statistic: Array, axis: int, size: int) -> Array:
    parts = statistic.reshape(_split(statistic.shape, axis, size))
    means = np.mean(parts, axis=axis + 1, keepdims=True, dtype=statistic.dtype)
    return np.asarray(np.broadcast_to(means, parts.shape).reshape(statistic.shape))


@register("normalize_groups", "reduction")
class NormalizeGroups(Op):
    """y = (x - m) / sqrt(v + epsilon), m and v over axes and over `size` neighbours along `axis`; also m and v.

    m and v have one number per channel (index along `axis`), the same within a group.
    """

    @staticmethod
    def result(x: Typed, axes: Axes, axis: int, size: int, epsilon: float) -> tuple[ArrayType, ArrayType, ArrayType]:
        _check("normalize_groups", x.shape, axes, axis, size)
        statistics = ArrayType(reduced_shape(x.shape, axes), computed_type(x.dtype))
        return ArrayType(x.shape, x.dtype), statistics, statistics

    @staticmethod
    def meaning(x: Array, axes: Axes, axis: int, size: int, epsilon: float) -> tuple[Array, Array, Array]:
        m = _group_means(np.mean(x, axis=axes, keepdims=True, dtype=x.dtype), axis, size)
        centred = x - m
        v = _group_means(np.mean(centred * centred, axis=axes, keepdims=True, dtype=x.dtype), axis, size)
        return centred / np.sqrt(v + epsilon), m, v

    @staticmethod
    def derivative(
        dy: tuple[Value | None, ...], y: tuple[Value, ...], x: Value, axes: Axes, axis: int, size: int, epsilon: float
    ) -> Value | None:
        normalized, m, v = y
        dn, dm, dv = dy
        dx: Value | None = None
        if dn is not None:
            kept = {"axes": axes, "axis": axis, "size": size, "epsilon": epsilon}
            dx = emit_all("normalize_groups_gradient", dn, normalized, v, **kept)[0]
        dm, dv = (None if each is None else _summed(each, axis, size) for each in (dm, dv))
        count = count_reduced("normalize_groups", x.shape, axes) * size
        return with_statistics_gradients(dx, x, m, dm, dv, count)

    @staticmethod
    def expansion(x: Value, axes: Axes, axis: int, size: int, epsilon: float) -> tuple[Value, Value, Value]:
        parts = emit("reshape", x, shape=_split(x.shape, axis, size))
        y, m, v = emit_all("normalize", parts, axes=_split_axes(axes, axis), epsilon=epsilon)
        return emit("reshape", y, shape=x.shape), _repeated(m, axis, size), _repeated(v, axis, size)


@register("normalize_groups_gradient", "reduction")
class NormalizeGroupsGradient(Op):
    """dx = (dn - mean dn - y mean(dn y)) / sqrt(v + epsilon), with dn = scale dy; also sum dy and sum dy y.

    dy, y like x   v as `normalize_groups` gives it   scale (1 if missing) like v, or broadcast to it
    Means are of groups, the sums of each channel: they are the gradients of a shift and of that scale.
    """

    @staticmethod
    def result(
        dy: Typed, y: Typed, v: Typed, *scale: Typed, axes: Axes, axis: int, size: int, epsilon: float
    ) -> tuple[ArrayType, ArrayType, ArrayType]:
        _check("normalize_groups_gradient", dy.shape, axes, axis, size)
        check_gradient_shapes("normalize_groups_gradient", dy, y, v, *scale, axes=axes)
        sums = ArrayType(v.shape, computed_type(dy.dtype))
        return ArrayType(dy.shape, dy.dtype), sums, sums

    @staticmethod
    def meaning(
        dy: Array, y: Array, v: Array, *scale: Array, axes: Axes, axis: int, size: int, epsilon: float
    ) -> tuple[Array, Array, Array]:
        count = count_reduced("normalize_groups_gradient", dy.shape, axes)
        shift, slope = (np.sum(a, axis=axes, keepdims=True, dtype=dy.dtype) for a in (dy, dy * y))
        factor = scale[0] if scale else np.ones((), v.dtype)
        means = [_group_means(each * factor, axis, size) * (1.0 / count) for each in (shift, slope)]
        dx = (dy * factor - means[0] - y * means[1]) / np.sqrt(v + epsilon)
        return dx.astype(dy.dtype), shift, slope

    @staticmethod
    def expansion(
        dy: Value, y: Value, v: Value, *scale: Value, axes: Axes, axis: int, size: int, epsilon: float
    ) -> tuple[Value, Value, Value]:
        dn = dy * scale[0] if scale else dy
        parts = [emit("reshape", value, shape=_split(dy.shape, axis, size)) for value in (dn, y)]
        kept = {"axes": _split_axes(axes, axis), "epsilon": epsilon}
        dx = emit_all("normalize_gradient", *parts, _of_groups(v, axis, size), **kept)[0]
        return emit("reshape", dx, shape=dy.shape), sum_(dy, axes), sum_(dy * y, axes)
