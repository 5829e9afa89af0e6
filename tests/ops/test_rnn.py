"""rnn and rnn_gradient (GRU and simple recurrent layers): against PyTorch, finite differences and their expansions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Value
from mlcompute.ops.rnn import CELLS
from tests.harness import assert_close, check_expansion, check_gradients, forward, gradients

#: (batch, time, input, hidden, lengths)
SIZES: list[tuple[int, int, int, int, list[int] | None]] = [
    (1, 1, 1, 1, None),
    (3, 4, 1, 5, None),
    (4, 5, 3, 3, [5, 3, 2, 1]),
    (3, 4, 2, 3, [1, 4, 2]),
]
EVERY = [(cell, size, reverse) for cell in CELLS for size in SIZES for reverse in (False, True)]
ALL = pytest.mark.parametrize(("cell", "size", "reverse"), EVERY)


def arrays(cell: str, n: int, t: int, inputs: int, hidden: int, dtype: Any = np.float64) -> list[Any]:
    rng, c = np.random.default_rng([n, t, inputs, hidden]), CELLS[cell]
    widths = (c.input_gates * hidden, c.hidden_gates * hidden, c.gates * hidden)
    shapes = [(n, t, inputs), (widths[0], inputs), (widths[1], hidden), (widths[2],), (n, hidden)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def described(cell: str, lengths: list[int] | None, reverse: bool) -> Any:
    def fn(x: Value, wx: Value, wh: Value, b: Value, h0: Value, *more: Value) -> tuple[Value, Value]:
        return ops.rnn(cell, x, wx, wh, b, h0, more[0] if lengths else None, reverse)

    return fn


def feeds(given: list[Any], lengths: list[int] | None) -> list[Any]:
    return given if lengths is None else [*given, np.array(lengths, np.int32)]


def oracle(cell: str, tensors: list[Any], lengths: list[int] | None, reverse: bool) -> Any:
    """torch.nn.GRU or RNN, sample by sample; GRU's gates come there in the order r, z, n."""
    x, wx, wh, b, h0 = tensors
    (n, t, inputs), hidden = x.shape, wh.shape[1]
    if cell == "gru":
        module: Any = torch.nn.GRU(inputs, hidden, batch_first=True).double()
        new, reset, update = wx.chunk(3)
        b_new, b_reset, b_update, b_hidden = b.chunk(4)
        zeros = torch.zeros(2 * hidden, dtype=b.dtype)
        weights = {
            "weight_ih_l0": torch.cat([reset, update, new]), "weight_hh_l0": wh,
            "bias_ih_l0": torch.cat([b_reset, b_update, b_new]), "bias_hh_l0": torch.cat([zeros, b_hidden]),
        }  # fmt: skip
    else:
        module = torch.nn.RNN(inputs, hidden, nonlinearity=cell, batch_first=True).double()
        weights = {"weight_ih_l0": wx, "weight_hh_l0": wh, "bias_ih_l0": b, "bias_hh_l0": torch.zeros_like(b)}
    ys, hs = [], []
    for k in range(n):
        length = lengths[k] if lengths else t
        seen = x[k : k + 1, :length]
        y, h = torch.func.functional_call(module, weights, (seen.flip(1) if reverse else seen, h0[None, k : k + 1]))
        y = y.flip(1) if reverse else y
        ys.append(torch.nn.functional.pad(y, (0, 0, 0, t - length)))
        hs.append(h[0])
    return torch.cat(ys), torch.cat(hs)


@ALL
def test_agrees_with_torch(cell: str, size: Any, reverse: bool) -> None:
    *sizes, lengths = size
    given = arrays(cell, *sizes)
    tensors: list[Any] = [torch.tensor(array, requires_grad=True) for array in given]
    expected = oracle(cell, tensors, lengths, reverse)
    fn = described(cell, lengths, reverse)
    actual = forward(fn, *feeds(given, lengths))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.detach().numpy())
    rng = np.random.default_rng(1)
    dys: list[Any] = [rng.standard_normal(a.shape) for a in actual]
    sum((y * torch.tensor(dy)).sum() for y, dy in zip(expected, dys, strict=True)).backward()
    for gradient, tensor in zip(gradients(fn, feeds(given, lengths), dys)[:5], tensors, strict=True):
        assert gradient is not None
        assert_close(gradient, tensor.grad.numpy())


@ALL
def test_gradients(cell: str, size: Any, reverse: bool) -> None:
    *sizes, lengths = size
    check_gradients(described(cell, lengths, reverse), *feeds(arrays(cell, *sizes), lengths))


@ALL
def test_expansions(cell: str, size: Any, reverse: bool) -> None:
    *sizes, lengths = size
    attributes = {"cell": cell, "reverse": reverse, "has_lengths": lengths is not None}
    given = arrays(cell, *sizes)
    check_expansion("rnn", feeds(given, lengths), **attributes)
    y, h, gates = ops.TABLE["rnn"].meaning(*feeds(given, lengths), **attributes)
    x, wx, wh, _, h0 = given
    rng = np.random.default_rng(2)
    dys = [rng.standard_normal(result.shape) for result in (y, h)]
    check_expansion("rnn_gradient", feeds([*dys, x, wx, wh, h0, y, gates], lengths), **attributes)


@pytest.mark.parametrize("cell", CELLS)
def test_lengths_out_of_range(cell: str) -> None:
    with pytest.raises(DataError, match=rf"{CELLS[cell].name}: sequence lengths .* do not fit 3 time steps"):
        forward(described(cell, [4, 3], False), *feeds(arrays(cell, 2, 3, 2, 2), [4, 3]))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("wrong", [4, 5])
def test_a_state_or_length_is_needed_for_each_sample(cell: str, wrong: int) -> None:
    given = [*arrays(cell, 3, 4, 2, 5), np.array([4, 2, 1])]
    given[wrong] = given[wrong][:2]
    with pytest.raises(ShapeError, match="for 3 samples"):
        forward(described(cell, [4, 2, 1], reverse=False), *given)
