"""GRU and simple recurrent layers: one direction of one layer as a single op, its gradient, and the same unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlcompute.ops import times
from mlcompute.ops.elementwise import relu, select, sigmoid, tanh
from mlcompute.ops.indexing import concatenate
from mlcompute.ops.matmul_and_convolution import matmul
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Typed, Value, emit_all, register
from mlcompute.ops.reductions import sum_
from mlcompute.ops.views import full, reshape, slice_axis, transpose


class Functions(NamedTuple):
    """What the cells are made of besides sums and products: of arrays, of values, or of a device's own."""

    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    #: where_positive(y, a): a where y > 0, else 0.
    where_positive: Callable[[Any, Any], Any]


Parts = Sequence[Any]


@dataclass(frozen=True)
class Cell:
    """What happens at one time, per hidden unit.

    name          of the layer, in messages
    gates         parts of the sum z = x wxᵀ + h whᵀ + b
    input_gates   how many of them, from the first, x takes part in
    hidden_gates  how many of them, up to the last, h takes part in
    forward       (functions, parts of z, h) -> parts to keep in their place, and the new h
    backward      (functions, dh', kept parts, h) -> gradients of the parts of z, and what of dh does not go through
                  them; None for nothing
    """

    name: str
    gates: int
    input_gates: int
    hidden_gates: int
    forward: Callable[[Functions, Parts, Any], tuple[Parts, Any]]
    backward: Callable[[Functions, Any, Parts, Any], tuple[Parts, Any]]


def _gru(f: Functions, z: Parts, h: Any) -> tuple[Parts, Any]:
    new_sum, reset_sum, update_sum, hidden = z
    reset, update = f.sigmoid(reset_sum), f.sigmoid(update_sum)
    new = f.tanh(new_sum + reset * hidden)
    return (new, reset, update, hidden), new + update * (h - new)


def _gru_back(f: Functions, dh: Any, kept: Parts, h: Any) -> tuple[Parts, Any]:
    new, reset, update, hidden = kept
    through = dh * update
    d_new = (dh - through) * (1.0 - new * new)
    d_reset = d_new * hidden * reset * (1.0 - reset)
    d_update = through * (h - new) * (1.0 - update)
    return (d_new, d_reset, d_update, d_new * reset), through


CELLS: dict[str, Cell] = {
    "gru": Cell("GRU", 4, 3, 3, _gru, _gru_back),
    "tanh": Cell(
        "RNN", 1, 1, 1,
        lambda f, z, h: ((y := f.tanh(z[0]),), y),
        lambda f, dh, kept, h: ((dh * (1.0 - kept[0] * kept[0]),), None),
    ),
    "relu": Cell(
        "RNN", 1, 1, 1,
        lambda f, z, h: ((y := f.relu(z[0]),), y),
        lambda f, dh, kept, h: ((f.where_positive(kept[0], dh),), None),
    ),
}  # fmt: skip

_NUMPY = Functions(
    TABLE["sigmoid"].meaning, np.tanh, lambda x: np.maximum(x, 0), lambda y, a: np.where(y > 0, a, 0)
)  # fmt: skip
_OPS = Functions(sigmoid, tanh, relu, lambda y, a: select(y > 0.0, a, 0.0))


@register("rnn", "recurrent")
class Rnn(Op):
    """One direction of one GRU or simple recurrent layer; with `reverse`, from the last time to the first.

    x (n, t, in)   wx (input gates * h, in)   wh (hidden gates * h, h)   b (gates * h)   h0 (n, h)
    lengths (n), whole, with `has_lengths`   ->   y (n, t, h)   hT (n, h)   gates (n, t, gates * h)

        cell "tanh", "relu"     h' = tanh or relu of  x wxᵀ + h whᵀ + b
        cell "gru"              parts of the sum: n, r, z of x, and r, z, m of h, so that b has n, r, z, m
                                h' = (1 - sigmoid(z)) tanh(n + sigmoid(r) m) + sigmoid(z) h

    Times at or beyond a sequence's length are not read: there y and the gates are 0 and the state stays as it is.
    The gates (for "gru" tanh(..), sigmoid(r), sigmoid(z) and m) are there for the gradient only.
    """

    @staticmethod
    def result(
        x: Typed, wx: Typed, wh: Typed, b: Typed, h0: Typed, *lengths: Typed,
        cell: str, reverse: bool, has_lengths: bool,
    ) -> tuple[ArrayType, ...]:  # fmt: skip
        (n, steps, _), hidden = x.shape, wh.shape[1]
        times.expect_samples("rnn", n, hidden, (h0,), lengths)
        shapes = ((n, steps, hidden), (n, hidden), (n, steps, CELLS[cell].gates * hidden))
        return tuple(ArrayType(shape, x.dtype) for shape in shapes)

    @staticmethod
    def meaning(
        x: Array, wx: Array, wh: Array, b: Array, h0: Array, *lengths: Array,
        cell: str, reverse: bool, has_lengths: bool,
    ) -> tuple[Array, ...]:  # fmt: skip
        (n, steps, inputs), hidden, rule = x.shape, wh.shape[1], CELLS[cell]
        valid = times.valid(rule.name, lengths[0] if has_lengths else None, n, steps)
        sums = np.where(valid, x, 0).reshape(n * steps, inputs) @ wx.T
        sums = sums.reshape(n, steps, rule.input_gates * hidden)
        y, gates = np.zeros((n, steps, hidden), x.dtype), np.zeros((n, steps, rule.gates * hidden), x.dtype)
        first, h = (rule.gates - rule.hidden_gates) * hidden, h0
        for t in times.order(steps, reverse):
            z = np.tile(b, (n, 1))
            z[:, : sums.shape[2]] += sums[:, t]
            z[:, first:] += h @ wh.T
            kept, h_next = rule.forward(_NUMPY, np.split(z, rule.gates, axis=1), h)
            now = valid[:, t]
            h = np.where(now, h_next, h)
            y[:, t] = np.where(now, h_next, 0)
            gates[:, t] = np.where(now, np.concatenate(kept, axis=1), 0)
        return y, h, gates

    @staticmethod
    def derivative(
        dy: tuple[Value | None, ...],
        y: tuple[Value, ...],
        x: Value, wx: Value, wh: Value, b: Value, h0: Value, *lengths: Value,
        **attributes: Any,
    ) -> tuple[Value | None, ...]:  # fmt: skip
        assert dy[2] is None, "the gates of an rnn step carry no gradient"
        given = [full(x, value.shape, 0.0) if d is None else d for d, value in zip(dy[:2], y[:2], strict=True)]
        parts = emit_all("rnn_gradient", *given, x, wx, wh, h0, y[0], y[2], *lengths, **attributes)
        return (*parts, *(None for _ in lengths))

    @staticmethod
    def expansion(
        x: Value, wx: Value, wh: Value, b: Value, h0: Value, *lengths: Value,
        cell: str, reverse: bool, has_lengths: bool,
    ) -> tuple[Value, ...]:  # fmt: skip
        (n, steps, inputs), hidden, rule = x.shape, wh.shape[1], CELLS[cell]
        valid = None
        if has_lengths:
            valid = times.described_valid(times.checked(lengths[0], steps), steps)
            x = select(valid, x, 0.0)
        sums = matmul(reshape(x, (n * steps, inputs)), transpose(wx))
        sums = reshape(sums, (n, steps, rule.input_gates * hidden))
        first, wh = rule.gates - rule.hidden_gates, transpose(wh)
        biases = [slice_axis(b, 0, k * hidden, (k + 1) * hidden) for k in range(rule.gates)]
        h, y, gates = h0, {}, {}
        for t in times.order(steps, reverse):
            of_x = _parts(times.at(sums, t), rule.input_gates)
            of_h = _parts(matmul(h, wh), rule.hidden_gates)
            z = biases
            z = [bias + of_x[k] if k < len(of_x) else bias for k, bias in enumerate(z)]
            z = [part + of_h[k - first] if k >= first else part for k, part in enumerate(z)]
            kept, h_next = rule.forward(_OPS, z, h)
            now = None if valid is None else times.at(valid, t)
            h = times.where(now, h_next, h)
            y[t] = times.where(now, h_next, 0.0)
            gates[t] = times.where(now, concatenate(list(kept), 1), 0.0)
        return times.stacked(y), h, times.stacked(gates)


@register("rnn_gradient", "recurrent")
class RnnGradient(Op):
    """Gradients of `rnn` by back-propagation through time.

    dy (n, t, h)   dhT (n, h)   then x, wx, wh, h0 and, of the results, y and gates, then lengths   ->
    dx (n, t, in)   dwx, dwh, shaped like wx, wh   db (gates * h)   dh0 (n, h)
    """

    @staticmethod
    def result(dy: Typed, dh: Typed, x: Typed, wx: Typed, wh: Typed, h0: Typed, *saved: Typed, **attributes: Any
    ) -> tuple[ArrayType, ...]:  # fmt: skip
        shapes = (x.shape, wx.shape, wh.shape, (CELLS[attributes["cell"]].gates * wh.shape[1],), h0.shape)
        return tuple(ArrayType(shape, x.dtype) for shape in shapes)

    @staticmethod
    def meaning(
        dy: Array, dh: Array, x: Array, wx: Array, wh: Array, h0: Array, y: Array, gates: Array, *lengths: Array,
        cell: str, reverse: bool, has_lengths: bool,
    ) -> tuple[Array, ...]:  # fmt: skip
        (n, steps, inputs), hidden, rule = x.shape, wh.shape[1], CELLS[cell]
        valid = times.valid(rule.name, lengths[0] if has_lengths else None, n, steps)
        h_before = times.before(y, h0, reverse, valid)
        first = (rule.gates - rule.hidden_gates) * hidden
        dz = np.zeros((n, steps, rule.gates * hidden), x.dtype)
        for t in reversed(times.order(steps, reverse)):
            kept = np.split(gates[:, t], rule.gates, axis=1)
            parts, through = rule.backward(_NUMPY, dh + dy[:, t], kept, h_before[:, t])
            now = valid[:, t]
            dz[:, t] = np.where(now, np.concatenate(parts, axis=1), 0)
            back = dz[:, t, first:] @ wh
            dh = np.where(now, back if through is None else back + through, dh)
        rows = dz.reshape(n * steps, -1)
        of_x, of_h = rows[:, : rule.input_gates * hidden], rows[:, first:]
        dwx = of_x.T @ np.where(valid, x, 0).reshape(n * steps, inputs)
        dwh = of_h.T @ h_before.reshape(n * steps, hidden)
        return (of_x @ wx).reshape(x.shape), dwx, dwh, rows.sum(axis=0), dh

    @staticmethod
    def expansion(
        dy: Value, dh: Value, x: Value, wx: Value, wh: Value, h0: Value, y: Value, gates: Value, *lengths: Value,
        cell: str, reverse: bool, has_lengths: bool,
    ) -> tuple[Value, ...]:  # fmt: skip
        (n, steps, inputs), hidden, rule = x.shape, wh.shape[1], CELLS[cell]
        valid = times.described_valid(lengths[0], steps) if has_lengths else None
        h_before = times.described_before(y, h0, reverse, valid)
        first, width = (rule.gates - rule.hidden_gates) * hidden, rule.gates * hidden
        dz: dict[int, Value] = {}
        for t in reversed(times.order(steps, reverse)):
            kept = _parts(times.at(gates, t), rule.gates)
            parts, through = rule.backward(_OPS, dh + times.at(dy, t), kept, times.at(h_before, t))
            now = None if valid is None else times.at(valid, t)
            dz[t] = times.where(now, concatenate(list(parts), 1), 0.0)
            back = matmul(slice_axis(dz[t], 1, first, width), wh)
            dh = times.where(now, back if through is None else back + through, dh)
        rows = reshape(times.stacked(dz), (n * steps, width))
        of_x, of_h = slice_axis(rows, 1, 0, rule.input_gates * hidden), slice_axis(rows, 1, first, width)
        x_read = x if valid is None else select(valid, x, 0.0)
        return (
            reshape(matmul(of_x, wx), x.shape),
            matmul(transpose(of_x), reshape(x_read, (n * steps, inputs))),
            matmul(transpose(of_h), reshape(h_before, (n * steps, hidden))),
            reshape(sum_(rows, (0,)), (width,)),
            dh,
        )


def _parts(z: Value, count: int) -> list[Value]:
    """(n, count * h) -> count times (n, h)."""
    hidden = z.shape[1] // count
    return [slice_axis(z, 1, k * hidden, (k + 1) * hidden) for k in range(count)]


def rnn(
    cell: str, x: Value, wx: Value, wh: Value, b: Value, h0: Value, lengths: Value | None = None, reverse: bool = False
) -> tuple[Value, Value]:
    """One direction of one recurrent layer: outputs (n, t, h) and the last state (n, h); see `Rnn`.

    cell  "tanh", "relu" or "gru"
    """
    more = () if lengths is None else (lengths,)
    options = {"cell": cell, "reverse": reverse, "has_lengths": lengths is not None}
    y, h, _ = emit_all("rnn", x, wx, wh, b, h0, *more, **options)
    return y, h
