"""LSTM: one direction of one layer as a single op, its gradient, and the same unrolled into smaller ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.ops import times
from mlcompute.ops.elementwise import select, sigmoid, tanh
from mlcompute.ops.indexing import concatenate
from mlcompute.ops.matmul_and_convolution import matmul
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Typed, Value, emit_all, register
from mlcompute.ops.reductions import sum_
from mlcompute.ops.views import full, reshape, slice_axis, transpose

Activation = Callable[[Value], Value]

_sigmoid = TABLE["sigmoid"].meaning


@register("lstm", "recurrent")
class Lstm(Op):
    """One direction of one LSTM layer, from the first time to the last; with `reverse`, from the last to the first.

    x (n, t, in)   wx (4h, in)   wh (4h, h)   b (4h)   h0, c0 (n, h)   lengths (n), whole, with `has_lengths`   ->
    y (n, t, h)   hT, cT (n, h)   gates (n, t, 4h)   cells (n, t, h)

        i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of  x wxᵀ + h whᵀ + b
        c' = f c + i g        h' = o tanh(c')

    Times at or beyond a sequence's length are not read: there y and the gates are 0 and the state stays as it is.
    The last two results (the gates after their activation, the cell state after each time) are there for the gradient
    only; a program without one need not store them.
    """

    @staticmethod
    def result(
        x: Typed, wx: Typed, wh: Typed, b: Typed, h0: Typed, c0: Typed, *lengths: Typed,
        reverse: bool, has_lengths: bool,
    ) -> tuple[ArrayType, ...]:  # fmt: skip
        (n, steps, _), hidden = x.shape, wh.shape[1]
        times.expect_samples("lstm", n, hidden, (h0, c0), lengths)
        shapes = ((n, steps, hidden), (n, hidden), (n, hidden), (n, steps, 4 * hidden), (n, steps, hidden))
        return tuple(ArrayType(shape, x.dtype) for shape in shapes)

    @staticmethod
    def meaning(
        x: Array, wx: Array, wh: Array, b: Array, h0: Array, c0: Array, *lengths: Array,
        reverse: bool, has_lengths: bool,
    ) -> tuple[Array, ...]:  # fmt: skip
        (n, steps, inputs), hidden = x.shape, wh.shape[1]
        valid = times.valid("LSTM", lengths[0] if has_lengths else None, n, steps)
        x = np.where(valid, x, 0)
        z = (x.reshape(n * steps, inputs) @ wx.T + b).reshape(n, steps, 4 * hidden)
        y, cells = np.zeros((n, steps, hidden), x.dtype), np.zeros((n, steps, hidden), x.dtype)
        gates = np.zeros((n, steps, 4 * hidden), x.dtype)
        h, c = h0, c0
        for t in times.order(steps, reverse):
            zi, zf, zg, zo = np.split(z[:, t] + h @ wh.T, 4, axis=1)
            i, f, g, o = _sigmoid(zi), _sigmoid(zf), np.tanh(zg), _sigmoid(zo)
            now = valid[:, t]
            c = np.where(now, f * c + i * g, c)
            h_next = o * np.tanh(c)
            h = np.where(now, h_next, h)
            y[:, t] = np.where(now, h_next, 0)
            gates[:, t] = np.where(now, np.concatenate([i, f, g, o], axis=1), 0)
            cells[:, t] = c
        return y, h, c, gates, cells

    @staticmethod
    def derivative(
        dy: tuple[Value | None, ...],
        y: tuple[Value, ...],
        x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value, *lengths: Value,
        reverse: bool, has_lengths: bool,
    ) -> tuple[Value | None, ...]:  # fmt: skip
        outputs, _, _, gates, cells = y
        assert dy[3:] == (None, None), "the gates and cells of an lstm step carry no gradient"
        given = [full(x, value.shape, 0.0) if d is None else d for d, value in zip(dy[:3], y[:3], strict=True)]
        parts = emit_all(
            "lstm_gradient", *given, x, wx, wh, h0, c0, outputs, gates, cells, *lengths,
            reverse=reverse, has_lengths=has_lengths,
        )  # fmt: skip
        return (*parts, *(None for _ in lengths))

    @staticmethod
    def expansion(
        x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value, *lengths: Value,
        reverse: bool, has_lengths: bool,
    ) -> tuple[Value, ...]:  # fmt: skip
        return unrolled_lstm(x, wx, wh, b, h0, c0, lengths[0] if has_lengths else None, reverse)


@register("lstm_gradient", "recurrent")
class LstmGradient(Op):
    """Gradients of `lstm` by back-propagation through time.

    dy (n, t, h)   dhT, dcT (n, h)   then x, wx, wh, h0, c0 and, of the results, y, gates and cells, then lengths   ->
    dx (n, t, in)   dwx (4h, in)   dwh (4h, h)   db (4h)   dh0, dc0 (n, h)

    With z the sum inside the gates, per time, latest visited first:
        dh += dy          dc += dh o (1 - tanh²c')
        dz = (dc g i(1-i),  dc c f(1-f),  dc i (1-g²),  dh tanh(c') o(1-o))
        dh = dz wh        dc = dc f
    """

    @staticmethod
    def result(
        dy: Typed, dh: Typed, dc: Typed, x: Typed, wx: Typed, wh: Typed, h0: Typed, c0: Typed, *saved: Typed, **_: Any
    ) -> tuple[ArrayType, ...]:
        shapes = (x.shape, wx.shape, wh.shape, wx.shape[:1], h0.shape, c0.shape)
        return tuple(ArrayType(shape, x.dtype) for shape in shapes)

    @staticmethod
    def meaning(
        dy: Array, dh: Array, dc: Array,
        x: Array, wx: Array, wh: Array, h0: Array, c0: Array,
        y: Array, gates: Array, cells: Array, *lengths: Array,
        reverse: bool, has_lengths: bool,
    ) -> tuple[Array, ...]:  # fmt: skip
        (n, steps, inputs), hidden = x.shape, wh.shape[1]
        valid = times.valid("LSTM", lengths[0] if has_lengths else None, n, steps)
        c_before, h_before = times.before(cells, c0, reverse), times.before(y, h0, reverse, valid)
        dz = np.zeros((n, steps, 4 * hidden), x.dtype)
        for t in reversed(times.order(steps, reverse)):
            i, f, g, o = np.split(gates[:, t], 4, axis=1)
            squashed = np.tanh(cells[:, t])
            dh_now = dh + dy[:, t]
            dc_now = dc + dh_now * o * (1 - squashed * squashed)
            dzi, dzf = dc_now * g * i * (1 - i), dc_now * c_before[:, t] * f * (1 - f)
            dzg, dzo = dc_now * i * (1 - g * g), dh_now * squashed * o * (1 - o)
            now = valid[:, t]
            dz[:, t] = np.where(now, np.concatenate([dzi, dzf, dzg, dzo], axis=1), 0)
            dh, dc = np.where(now, dz[:, t] @ wh, dh), np.where(now, dc_now * f, dc)
        rows = dz.reshape(n * steps, 4 * hidden)
        dx = (rows @ wx).reshape(x.shape)
        dwx = rows.T @ np.where(valid, x, 0).reshape(n * steps, inputs)
        dwh = rows.T @ h_before.reshape(n * steps, hidden)
        return dx, dwx, dwh, rows.sum(axis=0), dh, dc

    @staticmethod
    def expansion(
        dy: Value, dh: Value, dc: Value,
        x: Value, wx: Value, wh: Value, h0: Value, c0: Value,
        y: Value, gates: Value, cells: Value, *lengths: Value,
        reverse: bool, has_lengths: bool,
    ) -> tuple[Value, ...]:  # fmt: skip
        (n, steps, inputs), hidden = x.shape, wh.shape[1]
        valid = times.described_valid(lengths[0], steps) if has_lengths else None
        c_before = times.described_before(cells, c0, reverse)
        h_before = times.described_before(y, h0, reverse, valid)
        squashed = tanh(cells)
        dz: dict[int, Value] = {}
        for t in reversed(times.order(steps, reverse)):
            i, f, g, o = _quarters(times.at(gates, t))
            dh_now = dh + times.at(dy, t)
            dc_now = dc + dh_now * o * (1.0 - times.at(squashed, t) * times.at(squashed, t))
            dzi, dzf = dc_now * g * i * (1.0 - i), dc_now * times.at(c_before, t) * f * (1.0 - f)
            dzg, dzo = dc_now * i * (1.0 - g * g), dh_now * times.at(squashed, t) * o * (1.0 - o)
            now = None if valid is None else times.at(valid, t)
            dz[t] = times.where(now, concatenate([dzi, dzf, dzg, dzo], 1), 0.0)
            dh, dc = times.where(now, matmul(dz[t], wh), dh), times.where(now, dc_now * f, dc)
        rows = reshape(times.stacked(dz), (n * steps, 4 * hidden))
        columns = transpose(rows)
        x_read = x if valid is None else select(valid, x, 0.0)
        return (
            reshape(matmul(rows, wx), x.shape),
            matmul(columns, reshape(x_read, (n * steps, inputs))),
            matmul(columns, reshape(h_before, (n * steps, hidden))),
            reshape(sum_(rows, (0,)), (4 * hidden,)),
            dh,
            dc,
        )


def lstm(
    x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value, lengths: Value | None = None, reverse: bool = False
) -> tuple[Value, Value, Value]:
    """One direction of one LSTM layer: outputs (n, t, h), last hidden and last cell state (n, h); see `Lstm`."""
    more = () if lengths is None else (lengths,)
    y, h, c, _, _ = emit_all("lstm", x, wx, wh, b, h0, c0, *more, reverse=reverse, has_lengths=lengths is not None)
    return y, h, c


def unrolled_lstm(
    x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value,
    lengths: Value | None,
    reverse: bool,
    activations: Sequence[Activation] = (sigmoid, sigmoid, tanh, sigmoid),
    output_activation: Activation = tanh,
    peepholes: Value | None = None,
) -> tuple[Value, Value, Value, Value, Value]:  # fmt: skip
    """What `Lstm` computes, step by step in smaller ops, for any activations and with optional peepholes.

    peepholes (4h, h): full matrices through which i, f and g see the old cell state and o the new one.
    """
    (n, steps, inputs), hidden = x.shape, wh.shape[1]
    valid = None
    if lengths is not None:
        valid = times.described_valid(times.checked(lengths, steps), steps)
        x = select(valid, x, 0.0)
    z = reshape(matmul(reshape(x, (n * steps, inputs)), transpose(wx)) + b, (n, steps, 4 * hidden))
    wh = transpose(wh)
    act_i, act_f, act_g, act_o = activations
    from_old, from_new = None, None
    if peepholes is not None:
        from_old = transpose(slice_axis(peepholes, 0, 0, 3 * hidden))
        from_new = transpose(slice_axis(peepholes, 0, 3 * hidden, 4 * hidden))
    h, c = h0, c0
    y: dict[int, Value] = {}
    gates: dict[int, Value] = {}
    cells: dict[int, Value] = {}
    for t in times.order(steps, reverse):
        zi, zf, zg, zo = _quarters(times.at(z, t) + matmul(h, wh))
        if from_old is not None:
            seen = matmul(c, from_old)
            zi = zi + slice_axis(seen, 1, 0, hidden)
            zf = zf + slice_axis(seen, 1, hidden, 2 * hidden)
            zg = zg + slice_axis(seen, 1, 2 * hidden, 3 * hidden)
        i, f, g = act_i(zi), act_f(zf), act_g(zg)
        c_next = f * c + i * g
        if from_new is not None:
            zo = zo + matmul(c_next, from_new)
        o = act_o(zo)
        h_next = o * output_activation(c_next)
        now = None if valid is None else times.at(valid, t)
        h, c = times.where(now, h_next, h), times.where(now, c_next, c)
        y[t] = times.where(now, h_next, 0.0)
        gates[t] = times.where(now, concatenate([i, f, g, o], 1), 0.0)
        cells[t] = c
    return times.stacked(y), h, c, times.stacked(gates), times.stacked(cells)


def _quarters(z: Value) -> list[Value]:
    """(n, 4h) -> the four gates' (n, h)."""
    hidden = z.shape[1] // 4
    return [slice_axis(z, 1, k * hidden, (k + 1) * hidden) for k in range(4)]
