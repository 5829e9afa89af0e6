"""Operators that reduce, order and accumulate along axes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.budget import affordable
from mlcompute.onnx.operators.shapes import reversed_along
from mlcompute.onnx.rows import Call, front, operator, through_double
from mlcompute.ops.op import Value

Axes = tuple[int, ...]


def _axes(call: Call, x: Value) -> Axes:
    axes = call.integers(1, "axes", ())
    if not axes:
        return () if call.attribute("noop_with_empty_axes", 0) else tuple(range(x.rank))
    return tuple(front(axis, x.rank, call.kind) for axis in axes)


def dropped(x: Value, axes: Axes, keep: bool) -> Value:
    """Without the reduced axes, unless they are to be kept."""
    return x if keep else ops.reshape(x, [n for axis, n in enumerate(x.shape) if axis not in axes])


def _reduction(name: str, function: Callable[[Value, Axes], Value], empty: float | None = None) -> None:
    def describe(call: Call) -> Value:
        x = call[0]
        axes = _axes(call, x)
        keep = bool(call.attribute("keepdims", 1))
        if any(x.shape[axis] == 0 for axis in axes):
            kept = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
            if empty is None:
                raise ShapeError(f"{name}: has no answer for zero elements")
            number: float | bool = empty
            if x.dtype == np.bool_:
                number = empty > 0
            elif x.dtype.kind in "iu" and math.isinf(empty):
                info = np.iinfo(x.dtype.str)
                number = info.max if empty > 0 else info.min
            return dropped(ops.full(x, kept, number), axes, keep)
        return dropped(function(x, axes), axes, keep)

    operator(name, needs=(1,))(describe)


def product(x: Value, axes: Axes) -> Value:
    """The product over axes, halving the axis until one is left: whole numbers and zeros stay exact."""
    for axis in axes:
        while x.shape[axis] > 1:
            half = x.shape[axis] // 2
            joined = ops.slice_axis(x, axis, 0, half) * ops.slice_axis(x, axis, half, 2 * half)
            odd = x.shape[axis] % 2
            x = ops.concatenate([joined, ops.slice_axis(x, axis, 2 * half, 2 * half + 1)], axis) if odd else joined
    return x


def _mean(x: Value, axes: Axes) -> Value:
    if x.is_floating:
        return ops.mean(x, axes)
    return ops.sum_(x, axes) / math.prod(x.shape[axis] for axis in axes)


def _log_sum_exp(x: Value, axes: Axes) -> Value:
    if not axes:
        return x
    highest = ops.max_(x, axes)
    # Rows of -inf only: subtracting -inf from itself would give NaN.
    shift = ops.stop_gradient(ops.select(ops.equal(ops.abs_(highest), math.inf), 0.0, highest))
    return ops.log(ops.sum_(ops.exp(x - shift), axes)) + shift


def _extreme(function: Callable[[Value, Axes], Value]) -> Callable[[Value, Axes], Value]:
    def reduce(x: Value, axes: Axes) -> Value:
        if x.dtype == np.bool_:
            return ops.convert(function(ops.convert(x, np.dtype(np.int32)), axes), x.dtype)
        return function(x, axes) if axes else x

    return reduce


_reduction("ReduceSum", lambda x, axes: ops.sum_(x, axes) if axes else x, 0.0)
_reduction("ReduceMean", lambda x, axes: _mean(x, axes) if axes else x)
_reduction("ReduceMax", _extreme(ops.max_), -math.inf)
_reduction("ReduceMin", _extreme(ops.min_), math.inf)
_reduction("ReduceProd", product, 1.0)
_reduction("ReduceL1", lambda x, axes: ops.sum_(ops.abs_(x), axes), 0.0)
_reduction("ReduceL2", lambda x, axes: through_double(ops.sum_(x * x, axes), ops.sqrt), 0.0)
_reduction("ReduceSumSquare", lambda x, axes: ops.sum_(x * x, axes), 0.0)
_reduction("ReduceLogSum", lambda x, axes: ops.log(ops.sum_(x, axes) if axes else x), -math.inf)
_reduction("ReduceLogSumExp", _log_sum_exp, -math.inf)


def _index(name: str, function: Callable[[Value, int], Value]) -> None:
    def describe(call: Call) -> Value:
        x = call[0]
        axis = front(call.attribute("axis", 0), x.rank, name)
        if call.attribute("select_last_index", 0):
            found = x.shape[axis] - 1 - function(reversed_along(x, axis), axis)
        else:
            found = function(x, axis)
        return dropped(found, (axis,), bool(call.attribute("keepdims", 1)))

    operator(name, trains=False)(describe)


_index("ArgMax", ops.argmax)
_index("ArgMin", ops.argmin)


# Softmax and its relatives ------------------------------------------------------------------------------------------


def _softmax_like(name: str, choose: Callable[[Call], Callable[[Value, int], Value]], *, trains: bool = True) -> None:
    def describe(call: Call) -> Value:
        x, function = call[0], choose(call)
        if call.version >= 13:
            return function(x, front(call.attribute("axis", -1), x.rank, name))
        # Before version 13 everything from the axis on is one long axis.
        axis = front(call.attribute("axis", 1), x.rank, name)
        flat = ops.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
        return ops.reshape(function(flat, 1), x.shape)

    operator(name, trains=trains)(describe)


def _hardmax(x: Value, axis: int) -> Value:
    affordable(x.trace, x.shape[axis])
    places = [1] * x.rank
    places[axis] = x.shape[axis]
    numbers = x.trace.constant(np.arange(x.shape[axis]).reshape(places), np.dtype(np.int64))
    return ops.convert(ops.equal(numbers, ops.argmax(x, axis)), x.dtype)


def _softmax(call: Call) -> Callable[[Value, int], Value]:
    def masked(x: Value, axis: int) -> Value:
        # A row that is forbidden throughout is NaN, as it should be, but its gradient is 0 and not NaN:
        # models with such rows put something else in their place afterwards.
        empty = ops.equal(ops.max_(x, (axis,)), -math.inf)
        y = ops.softmax(ops.select(empty, 0.0, x), axis)
        return ops.select(empty, math.nan, y)

    return masked if call.attribute(MASKED) else ops.softmax


#: Attribute the importer sets on softmax operators inside attention, where masks can leave a row without any entry.
MASKED = "rows may be empty"

_softmax_like("Softmax", _softmax)
_softmax_like("LogSoftmax", lambda call: ops.log_softmax)
_softmax_like("Hardmax", lambda call: _hardmax, trains=False)


# Running sums and order ---------------------------------------------------------------------------------------------


def _running(name: str, function: Callable[[Value, Value], Value], neutral: float) -> None:
    """y[i] = x[0] o .. o x[i], in log2(n) steps: each joins runs of twice the length."""

    def describe(call: Call) -> Value:
        x = call[0]
        axis = front(int(call.array(1).reshape(-1)[0]), x.rank, name)
        extent = x.shape[axis]
        if call.attribute("reverse", 0):
            x = reversed_along(x, axis)
        if call.attribute("exclusive", 0):
            x = _shifted(x, axis, 1, neutral)
        reach = 1
        while reach < extent:
            x = function(x, _shifted(x, axis, reach, neutral))
            reach *= 2
        return reversed_along(x, axis) if call.attribute("reverse", 0) else x

    operator(name, needs=(1,))(describe)


def _shifted(x: Value, axis: int, count: int, neutral: float) -> Value:
    before = [count if k == axis else 0 for k in range(x.rank)]
    kept = ops.slice_axis(x, axis, 0, x.shape[axis] - count)
    return ops.pad(kept, before, (0,) * x.rank, neutral)


@operator("CumSum", needs=(1,))
def cum_sum(call: Call) -> Value:
    """y[i] = x[0] + .. + x[i], or the same from the other end."""
    x = call[0]
    axis = front(int(call.array(1).reshape(-1)[0]), x.rank, "CumSum")
    return ops.cumulative_sum(x, axis, bool(call.attribute("exclusive", 0)), bool(call.attribute("reverse", 0)))


_running("CumProd", ops.multiply, 1.0)


@operator("TopK", needs=(1,))
def top_k(call: Call) -> tuple[Value, Value]:
    """The k largest, or smallest, in order."""
    x = call[0]
    axis = front(call.attribute("axis", -1), x.rank, "TopK")
    k = int(call.attribute("k", 0) or call.array(1).reshape(-1)[0])
    if not 0 <= k <= x.shape[axis]:
        raise ShapeError(f"TopK: k is {k}, axis {axis} has {x.shape[axis]} elements")
    if not k:
        empty = ops.slice_axis(x, axis, 0, 0)
        return empty, ops.convert(empty, np.dtype(np.int64))
    return ops.sort(x, axis, bool(call.attribute("largest", 1)), k)
