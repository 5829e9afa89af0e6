"""Softmax cross entropy with class indices: one pass over the logits forward, one back, and no probabilities between.

What is kept for the gradient are two numbers per row: its largest logit m, and l = log sum e^(x - m). Their sum is the
logarithm of the softmax's denominator; apart they lose no digits where logits are large.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.elementwise import convert, equal, exp, log, select
from mlcompute.ops.indexing import INT64, gather
from mlcompute.ops.op import Array, ArrayType, Op, Shape, Typed, Value, emit, emit_all, register
from mlcompute.ops.reductions import front_axis, max_, sum_


def valid_labels(classes: int, ignored: int | None) -> str:
    """Which labels are valid, for messages."""
    also = "; labels to be left out need ignore_index" if ignored is None else f", and {ignored}, which is ignored"
    return f"valid are 0 to {classes - 1}{also}"


def _label_shape(x: Typed, axis: int) -> Shape:
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def _total(keep: float, spread: float, classes: int) -> float:
    """What the probabilities of a smoothed label add up to; exactly 1 unless they are spread over another count."""
    total = keep + spread * classes
    return 1.0 if abs(total - 1.0) < 1e-9 else total


def _expect_fitting(op: str, x: Typed, labels: Typed, axis: int, others: dict[str, Typed]) -> None:
    if not x.shape[axis]:
        raise ShapeError(f"{op}: axis {axis} of {x.shape} has no classes")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{op}: labels must be integers, not {labels.dtype}")
    for name, value in {"labels": labels, **others}.items():
        if value.shape != _label_shape(x, axis):
            raise ShapeError(f"{op}: {name} have shape {value.shape}", expected=f"{_label_shape(x, axis)}")


@register("softmax_cross_entropy", "indexing")
class SoftmaxCrossEntropy(Op):
    """loss = keep (m + l - x[label]) + spread sum (m + l - x) along axis; also m = max x and l = log sum e^(x - m).

    keep     1, less what is taken from the label's class and spread over all (label smoothing)
    spread   how much of it each class gets
    ignored  the label whose loss is 0; any other must be the number of a class

    m is a shift that changes nothing: it carries no gradient, and that of l is the gradient of log sum e^x.
    """

    @staticmethod
    def result(
        x: Typed, labels: Typed, axis: int, keep: float, spread: float, ignored: int | None
    ) -> tuple[ArrayType, ArrayType, ArrayType]:
        _expect_fitting("softmax_cross_entropy", x, labels, axis, {})
        one = ArrayType(labels.shape, computed_type(x.dtype))
        return one, one, one

    @staticmethod
    def meaning(
        x: Array, labels: Array, axis: int, keep: float, spread: float, ignored: int | None
    ) -> tuple[Array, Array, Array]:
        classes = x.shape[axis]
        is_ignored = np.zeros(labels.shape, bool) if ignored is None else labels == ignored
        outside = ((labels < 0) | (labels >= classes)) & ~is_ignored
        if outside.any():
            place = tuple(int(i) for i in np.argwhere(outside)[0])
            known = valid_labels(classes, ignored)
            raise IndexError(f"softmax_cross_entropy: label {labels[place]} at position {place}: {known}")
        largest = np.max(x, axis=axis, keepdims=True)
        shifted = x - largest
        logarithm = np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))
        picked = np.take_along_axis(shifted, np.where(is_ignored, 0, labels).astype(np.intp), axis)
        loss = keep * (logarithm - picked)
        if spread:
            loss = loss + spread * (classes * logarithm - np.sum(shifted, axis=axis, keepdims=True))
        return np.where(is_ignored, 0, loss), largest, logarithm

    @staticmethod
    def derivative(
        dy: tuple[Value | None, ...], y: tuple[Value, ...],
        x: Value, labels: Value, axis: int, keep: float, spread: float, ignored: int | None,
    ) -> tuple[Value | None, None]:  # fmt: skip
        (d_loss, _, d_logarithm), (_, largest, logarithm) = dy, y
        if d_loss is None:
            return None if d_logarithm is None else d_logarithm * exp(x - largest - logarithm), None
        if ignored is not None:
            d_loss = select(equal(labels, ignored), 0.0, d_loss)
        total = _total(keep, spread, x.shape[axis])
        d_softmax = d_loss if total == 1.0 else d_loss * total
        if d_logarithm is not None:
            d_softmax = d_softmax + d_logarithm
        operands = (x, largest, logarithm, labels, d_loss, d_softmax)
        return emit("softmax_cross_entropy_gradient", *operands, axis=axis, keep=keep, spread=spread), None

    @staticmethod
    def expansion(
        x: Value, labels: Value, axis: int, keep: float, spread: float, ignored: int | None
    ) -> tuple[Value, Value, Value]:
        largest = max_(x, (axis,))
        shifted = x - largest
        logarithm = log(sum_(exp(shifted), (axis,)))
        is_ignored = None if ignored is None else equal(labels, ignored)
        picked = gather(shifted, labels if is_ignored is None else select(is_ignored, 0, labels), axis)
        loss = (logarithm - picked) * keep
        if spread:
            loss = loss + (logarithm * float(x.shape[axis]) - sum_(shifted, (axis,))) * spread
        return (loss if is_ignored is None else select(is_ignored, 0.0, loss)), largest, logarithm


def softmax_cross_entropy(
    x: Value, labels: Value, axis: int, smoothing: float = 0.0, spread_over: int = 0, ignored: int | None = None
) -> tuple[Value, Value, Value]:
    """-log softmax(x)[label] along axis, m = max x, and log sum e^(x - m).

    x (*A, n, *B)   labels (*A, 1, *B)   ->   (*A, 1, *B), three times

    smoothing    how much of every label is spread evenly over the classes
    spread_over  over how many classes; 0: all there are
    ignored      labels that are no class: their loss is 0
    """
    axis = front_axis("softmax_cross_entropy", axis, x.rank)
    attributes: dict[str, Any] = {
        "axis": axis,
        "keep": 1.0 - smoothing,
        "spread": smoothing / (spread_over or x.shape[axis]) if smoothing else 0.0,
        "ignored": ignored,
    }
    loss, largest, logarithm = emit_all("softmax_cross_entropy", x, labels, **attributes)
    return loss, largest, logarithm


@register("softmax_cross_entropy_gradient", "reduction")
class SoftmaxCrossEntropyGradient(Op):
    """dx = d_softmax e^(x - largest - logarithm) - d_loss (spread + keep where the class is the label).

    A label that is no class has no such place; it is never an error here.
    """

    #: dx may take the place of x: what else is read is the same for the whole row.
    elementwise = True

    @staticmethod
    def result(
        x: Typed, largest: Typed, logarithm: Typed, labels: Typed, d_loss: Typed, d_softmax: Typed,
        axis: int, keep: float, spread: float,
    ) -> ArrayType:  # fmt: skip
        others = {"largest": largest, "logarithm": logarithm, "d_loss": d_loss, "d_softmax": d_softmax}
        _expect_fitting("softmax_cross_entropy_gradient", x, labels, axis, others)
        return ArrayType(x.shape, x.dtype)

    @staticmethod
    def meaning(
        x: Array, largest: Array, logarithm: Array, labels: Array, d_loss: Array, d_softmax: Array,
        axis: int, keep: float, spread: float,
    ) -> Array:  # fmt: skip
        numbers = np.arange(x.shape[axis]).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
        share = np.where(labels == numbers, keep + spread, spread).astype(d_loss.dtype)
        return np.asarray(d_softmax * np.exp(x - largest - logarithm) - d_loss * share)

    @staticmethod
    def derivative(
        dy: Value, y: Value,
        x: Value, largest: Value, logarithm: Value, labels: Value, d_loss: Value, d_softmax: Value,
        axis: int, keep: float, spread: float,
    ) -> tuple[Value | None, ...]:  # fmt: skip
        p = exp(x - largest - logarithm)
        back = dy * p
        shares = _shares(labels, x, axis, keep, spread)
        d_x = back * d_softmax
        return d_x, None, -sum_(d_x, (axis,)), None, -sum_(dy * shares, (axis,)), sum_(back, (axis,))

    @staticmethod
    def expansion(
        x: Value, largest: Value, logarithm: Value, labels: Value, d_loss: Value, d_softmax: Value,
        axis: int, keep: float, spread: float,
    ) -> Value:  # fmt: skip
        return d_softmax * exp(x - largest - logarithm) - d_loss * _shares(labels, x, axis, keep, spread)


def _shares(labels: Value, x: Value, axis: int, keep: float, spread: float) -> Value:
    """The smoothed one-hot labels, like x."""
    numbers = x.trace.constant(np.arange(x.shape[axis]).reshape((-1,) + (1,) * (x.rank - 1 - axis)), INT64)
    return convert(equal(convert(labels, INT64), numbers), x.dtype) * keep + spread
