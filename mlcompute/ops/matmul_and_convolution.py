"""Matmul and convolution, each with their adjoints."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.images import either_layout
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, register
from mlcompute.ops.reductions import sum_to
from mlcompute.ops.views import reshape, transpose
from mlcompute.ops.windows import Pair, Sides, bordered, each_place, inner, window_counts


def _any_result_type(cls: type[Op]) -> type[Op]:
    """Class decorator: the op also understands the attribute `to`, the type of its result; its operands' when absent.

    Products of bfloat16 operands are added up in float32, and need not be rounded.
    """
    rule, meaning = cls.result, cls.meaning

    def result(*inputs: Typed, to: np.dtype[Any] | None = None, **attributes: Any) -> ArrayType:
        found = rule(*inputs, **attributes)
        assert isinstance(found, ArrayType)
        return found if to is None else ArrayType(found.shape, to)

    def typed(*arrays: Array, to: np.dtype[Any] | None = None, **attributes: Any) -> Any:
        return meaning(*arrays, **attributes)

    cls.result, cls.meaning = staticmethod(result), staticmethod(typed)
    return cls


@register("matmul", "contraction")
@_any_result_type
class Matmul(Op):
    """y = a b, leading axes broadcast.   derivative: dy bᵀ and aᵀ dy, summed where an operand had been repeated"""

    @staticmethod
    def result(a: Typed, b: Typed) -> ArrayType:
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            raise ShapeError(f"matmul: {a.shape} times {b.shape} has no meaning: needs (.., n, k) times (.., k, m)")
        if computed_type(a.dtype) != computed_type(b.dtype):
            raise DataError(f"matmul: operands of {a.dtype} and {b.dtype} do not mix")
        leading = broadcast_shape(a.shape[:-2], b.shape[:-2])
        found = a.dtype if a.dtype == b.dtype else computed_type(a.dtype)
        return ArrayType((*leading, a.shape[-2], b.shape[-1]), found)

    @staticmethod
    def meaning(a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))

    @staticmethod
    def derivative(dy: Value, y: Value, a: Value, b: Value) -> tuple[Value, Value]:
        da = sum_to(matmul(dy, transpose(b)), a.shape)
        if b.rank == 2:
            a, dy = _as_rows(a), _as_rows(dy)
        return da, sum_to(matmul(transpose(a), dy), b.shape)


class MatmulOfTransposed(Op):
    """y = a wᵀ of a matrix w.   derivative: dy w and dyᵀ a, of which none has to be transposed back

    No step has this op: a matmul and the transpose before it are differentiated as if they were one.
    """

    name = "matmul_of_transposed"
    family = "contraction"

    @staticmethod
    def derivative(dy: Value, y: Value, a: Value, w: Value) -> tuple[Value, Value]:
        return matmul(dy, w), matmul(transpose(_as_rows(dy)), _as_rows(a))


def _as_rows(x: Value) -> Value:
    """x as a matrix. One for the whole batch: one product over all rows instead of one per sample and a sum."""
    return x if x.rank == 2 else reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def matmul(a: Value, b: Value) -> Value:
    """y = a b.   a (*, n, k)   b (*, k, m)   ->   y (*, n, m); leading axes broadcast as in NumPy"""
    return emit("matmul", a, b)


# Convolution --------------------------------------------------------------------------------------------------------


def _convolved(op: str, x: Shape, w: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> Shape:
    """Shape of the convolution of x with w; a ShapeError when they do not fit."""
    if len(x) not in (4, 5) or len(w) != len(x):
        raise ShapeError(f"{op}: image and kernel must have rank 4, or 5 for volumes", image=x, kernel=w)
    if groups < 1 or x[1] != w[1] * groups or w[0] % groups:
        raise ShapeError(
            f"{op}: an image of {x[1]} channels and a kernel of shape {w} do not fit with {groups} group(s)",
            expected=f"kernel (outputs, {x[1]} / groups, *sizes), outputs divisible by groups",
        )
    return (x[0], w[0], *window_counts(op, x[2:], w[2:], strides, dilations, padding))


def _columns(x: Array, w: Shape, strides: Pair, dilations: Pair, padding: Sides) -> Array:
    """Every window of x.   x (N, C, H, W)   ->   (N, C, kh, kw, OH, OW), a view of a padded copy; volumes alike"""
    rank = x.ndim - 2
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilations, w[2:], strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(bordered(x, padding, 0.0), reach, axis=tuple(range(2, 2 + rank)))
    steps = (slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations)))
    return np.transpose(windows[steps], (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)))


@register("convolution", "contraction")
@_any_result_type
@either_layout((0,))
class Convolution(Op):
    """y[n, o, i, j] = sum over c, u, v of w[o, c, u, v] x[n, c, i sy + u dy - top, j sx + v dx - left], 0 outside x.

    x (N, C, H, W)   w (O, C / groups, kh, kw)   ->   y (N, O, OH, OW); output group g sees input group g.
    Volumes have one axis more in front of H: x (N, C, D, H, W).
    """

    @staticmethod
    def result(x: Typed, w: Typed, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> ArrayType:
        return ArrayType(_convolved("convolution", x.shape, w.shape, strides, dilations, padding, groups), x.dtype)

    @staticmethod
    def meaning(x: Array, w: Array, strides: Pair, dilations: Pair, padding: Sides, groups: int) -> Array:
        shape = _convolved("convolution", x.shape, w.shape, strides, dilations, padding, groups)
        (n, o, *counts), inner = shape, math.prod(w.shape[1:])
        columns = _columns(x, w.shape, strides, dilations, padding).reshape((n, groups, inner, math.prod(counts)))
        y: Array = np.matmul(w.reshape((groups, o // groups, inner)), columns)
        return y.reshape(shape)

    @staticmethod
    def derivative(
        dy: Value, y: Value, x: Value, w: Value, strides: Pair, dilations: Pair, padding: Sides, groups: int
    ) -> tuple[Value, Value]:
        dx = convolution_input_gradient(dy, w, x.shape, strides, dilations, padding, groups)
        return dx, convolution_weight_gradient(x, dy, w.shape, strides, dilations, padding, groups)


@register("convolution_input_gradient", "contraction")
@_any_result_type
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
        (n, o, *counts), kernel = dy.shape, w.shape[2:]
        transposed = w.reshape((groups, o // groups, math.prod(w.shape[1:]))).transpose(0, 2, 1)
        columns = np.matmul(transposed, dy.reshape((n, groups, o // groups, math.prod(counts))))
        columns = columns.reshape((n, shape[1], math.prod(kernel), *counts))
        padded = bordered(np.zeros(shape, dy.dtype), padding, 0.0)
        for number, (_, pixels) in enumerate(each_place(kernel, counts, strides, dilations)):
            padded[pixels] += columns[:, :, number]
        return inner(padded, padding)

    @staticmethod
    def derivative(
        dy: Value, y: Value, x: Value, w: Value,
        shape: Shape, strides: Pair, dilations: Pair, padding: Sides, groups: int,
    ) -> tuple[Value, Value]:  # fmt: skip
        dx = convolution(dy, w, strides, dilations, padding, groups)
        return dx, convolution_weight_gradient(dy, x, w.shape, strides, dilations, padding, groups)


@register("convolution_weight_gradient", "contraction")
@_any_result_type
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
        (n, o), inner, windows = dy.shape[:2], math.prod(shape[1:]), math.prod(dy.shape[2:])
        # Windows as rows: one matrix product per group over all samples and all places.
        columns = _columns(x, shape, strides, dilations, padding).reshape((n, groups, inner, windows))
        columns = columns.transpose(1, 0, 3, 2).reshape((groups, n * windows, inner))
        outer = dy.reshape((n, groups, o // groups, windows)).transpose(1, 2, 0, 3)
        y: Array = np.matmul(outer.reshape((groups, o // groups, n * windows)), columns)
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
