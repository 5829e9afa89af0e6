"""lstm and lstm_gradient: against PyTorch, finite differences and their own expansions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Value
from tests.harness import assert_close, check_expansion, check_gradients, forward, gradients

# (batch, time, input, hidden, lengths): extents of one, odd sizes, lengths in no order, all full, all one.
SIZES: list[tuple[int, int, int, int, list[int] | None]] = [
    (1, 1, 1, 1, None),
    (1, 5, 3, 2, None),
    (3, 4, 1, 5, None),
    (2, 7, 5, 3, None),
    (4, 5, 3, 3, [5, 3, 2, 1]),
    (3, 4, 2, 3, [1, 4, 2]),
    (2, 3, 4, 1, [3, 3]),
    (3, 6, 2, 2, [1, 1, 1]),
    (2, 1, 3, 2, [1, 1]),
]
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True])
ALL_SIZES = pytest.mark.parametrize(("n", "t", "inputs", "hidden", "lengths"), SIZES)


def arrays(n: int, t: int, inputs: int, hidden: int, dtype: Any = np.float64) -> list[Any]:
    rng = np.random.default_rng([n, t, inputs, hidden])
    shapes = [(n, t, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (n, hidden), (n, hidden)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def described(lengths: list[int] | None, reverse: bool) -> Any:
    def fn(x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value, *more: Value) -> tuple[Value, Value, Value]:
        return ops.lstm(x, wx, wh, b, h0, c0, more[0] if lengths else None, reverse)

    return fn


def unrolled(reverse: bool) -> Any:
    def fn(x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value, lengths: Value) -> Any:
        return ops.unrolled_lstm(x, wx, wh, b, h0, c0, lengths, reverse)[:3]

    return fn


def feeds(given: list[Any], lengths: list[int] | None) -> list[Any]:
    return [*given, np.array(lengths, np.int32)] if lengths else given


def oracle(tensors: list[Any], lengths: list[int] | None, reverse: bool) -> Any:
    """torch.nn.LSTM, forward or the backward half, one sequence at a time so that lengths need no packing."""
    x, wx, wh, b, h0, c0 = tensors
    n, t, hidden = x.shape[0], x.shape[1], wh.shape[1]
    cell = torch.nn.LSTM(x.shape[2], hidden, batch_first=True).double()
    weights = {"weight_ih_l0": wx, "weight_hh_l0": wh, "bias_ih_l0": b, "bias_hh_l0": torch.zeros_like(b)}
    ys, hs, cs = [], [], []
    for k in range(n):
        length = lengths[k] if lengths else t
        seen = x[k : k + 1, :length]
        state = (h0[None, k : k + 1], c0[None, k : k + 1])
        y, (h, c) = torch.func.functional_call(cell, weights, (seen.flip(1) if reverse else seen, state))
        y = y.flip(1) if reverse else y
        ys.append(torch.nn.functional.pad(y, (0, 0, 0, t - length)))
        hs.append(h[0])
        cs.append(c[0])
    return torch.cat(ys), torch.cat(hs), torch.cat(cs)


@DIRECTIONS
@ALL_SIZES
def test_agrees_with_torch(n: int, t: int, inputs: int, hidden: int, lengths: list[int] | None, reverse: bool) -> None:
    given = arrays(n, t, inputs, hidden)
    tensors: list[Any] = [torch.tensor(array, requires_grad=True) for array in given]
    expected = oracle(tensors, lengths, reverse)
    actual = forward(described(lengths, reverse), *feeds(given, lengths))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.detach().numpy())
    rng = np.random.default_rng(1)
    dys: list[Any] = [rng.standard_normal(a.shape) for a in actual]
    sum((y * torch.tensor(dy)).sum() for y, dy in zip(expected, dys, strict=True)).backward()
    found = gradients(described(lengths, reverse), feeds(given, lengths), dys)
    for gradient, tensor in zip(found[:6], tensors, strict=True):
        assert gradient is not None
        assert_close(gradient, tensor.grad.numpy())


@DIRECTIONS
@ALL_SIZES
def test_gradients(n: int, t: int, inputs: int, hidden: int, lengths: list[int] | None, reverse: bool) -> None:
    check_gradients(described(lengths, reverse), *feeds(arrays(n, t, inputs, hidden), lengths))


@DIRECTIONS
@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_gradients_of_one_result_alone(chosen: int, reverse: bool) -> None:
    given = feeds(arrays(3, 4, 2, 3), [4, 2, 1])
    check_gradients(lambda *values: described([4, 2, 1], reverse)(*values)[chosen], *given)


@DIRECTIONS
@ALL_SIZES
def test_expansions(n: int, t: int, inputs: int, hidden: int, lengths: list[int] | None, reverse: bool) -> None:
    attributes = {"reverse": reverse, "has_lengths": lengths is not None}
    given = arrays(n, t, inputs, hidden)
    check_expansion("lstm", feeds(given, lengths), **attributes)
    y, h, c, gates, cells = ops.TABLE["lstm"].meaning(*feeds(given, lengths), **attributes)
    x, wx, wh, _, h0, c0 = given
    rng = np.random.default_rng(2)
    dys = [rng.standard_normal(result.shape) for result in (y, h, c)]
    check_expansion("lstm_gradient", feeds([*dys, x, wx, wh, h0, c0, y, gates, cells], lengths), **attributes)


@DIRECTIONS
def test_float32(reverse: bool) -> None:
    double, single = arrays(3, 6, 4, 5), arrays(3, 6, 4, 5, np.float32)
    expected, actual = forward(described(None, reverse), *double), forward(described(None, reverse), *single)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == np.float32
        # The same numbers were rounded to float32 first, so every step carries that rounding on.
        assert_close(a, e, scale=4)


@DIRECTIONS
@pytest.mark.parametrize("expanded", [False, True])
def test_padding_is_never_read(reverse: bool, expanded: bool) -> None:
    lengths = [2, 4, 1]
    given = arrays(3, 4, 2, 3)
    spoilt = [array.copy() for array in given]
    for k, length in enumerate(lengths):
        spoilt[0][k, length:] = np.nan

    run = unrolled(reverse) if expanded else described(lengths, reverse)

    clean = forward(run, *feeds(given, lengths))
    for a, e in zip(forward(run, *feeds(spoilt, lengths)), clean, strict=True):
        assert_close(a, e)
    dys = [np.ones_like(y) for y in clean]
    found, expected = gradients(run, feeds(spoilt, lengths), dys), gradients(run, feeds(given, lengths), dys)
    for gradient, wanted in zip(found[:6], expected[:6], strict=True):
        assert gradient is not None
        assert_close(gradient, wanted)


@pytest.mark.parametrize("wrong", [[0, 3], [4, 3], [-1, 1]])
def test_lengths_out_of_range(wrong: list[int]) -> None:
    given = feeds(arrays(2, 3, 2, 2), wrong)
    with pytest.raises(DataError, match=r"sequence lengths .* do not fit 3 time steps"):
        forward(described(wrong, False), *given)
    with pytest.raises(IndexError, match="out of range"):
        forward(unrolled(False), *given)


def stepped(tensors: list[Any], p: Any, gates: Any, output: Any, reverse: bool) -> Any:
    """The step written out in torch, with peepholes p (4h, h) or None."""
    x, wx, wh, b, h, c = tensors
    times = range(x.shape[1])
    ys = {}
    for t in reversed(times) if reverse else times:
        zi, zf, zg, zo = (x[:, t] @ wx.T + h @ wh.T + b).chunk(4, dim=1)
        pi, pf, pg, po = p.chunk(4, dim=0) if p is not None else [torch.zeros_like(wh[: wh.shape[1]])] * 4
        i, f, g = gates[0](zi + c @ pi.T), gates[1](zf + c @ pf.T), gates[2](zg + c @ pg.T)
        c = f * c + i * g
        h = gates[3](zo + c @ po.T) * output(c)
        ys[t] = h
    return torch.stack([ys[t] for t in times], dim=1), h, c


@DIRECTIONS
@pytest.mark.parametrize("peepholes", [False, True])
def test_unrolled_with_other_activations_and_peepholes(peepholes: bool, reverse: bool) -> None:
    # Small numbers: softplus lets the state grow, and differences of sin(large) say nothing.
    given = [0.3 * array for array in arrays(3, 4, 2, 3)]
    if peepholes:
        given.append(0.3 * np.random.default_rng(3).standard_normal((12, 3)))
    described_gates = (ops.sigmoid, ops.tanh, ops.softplus, ops.sin)
    # torch's own softplus turns linear above 20.
    torch_gates = (torch.sigmoid, torch.tanh, lambda z: torch.logaddexp(z, torch.zeros_like(z)), torch.sin)

    def fn(x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value, p: Value | None = None) -> Any:
        return ops.unrolled_lstm(x, wx, wh, b, h0, c0, None, reverse, described_gates, ops.atan, p)[:3]

    tensors: list[Any] = [torch.tensor(array, requires_grad=True) for array in given]
    p = tensors[6] if peepholes else None
    expected = stepped(tensors[:6], p, torch_gates, torch.atan, reverse)
    actual = forward(fn, *given)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.detach().numpy())
    sum(y.sum() for y in expected).backward()
    for gradient, tensor in zip(gradients(fn, given, [np.ones_like(y) for y in actual]), tensors, strict=True):
        assert gradient is not None
        assert_close(gradient, tensor.grad.numpy())
    check_gradients(fn, *given)


@pytest.mark.parametrize("wrong", [4, 5, 6])
def test_a_state_or_length_is_needed_for_each_sample(wrong: int) -> None:
    given = [*arrays(3, 4, 2, 5), np.array([4, 2, 1])]
    given[wrong] = given[wrong][:2]
    with pytest.raises(ShapeError, match="for 3 samples"):
        forward(described([4, 2, 1], reverse=False), *given)
