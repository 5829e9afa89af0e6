"""The embedding op against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

from mlcompute import ops
from mlcompute.ops.op import FLOAT32, Array, Trace, Value
from tests.harness import assert_close, check_expansion, check_gradients, forward, gradients

ROWS, DIMENSION = 6, 3
SHAPES = [(), (1,), (9,), (2, 5), (3, 1, 4), (0,)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("index_type", [np.int32, np.int64])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_torch(
    shape: tuple[int, ...], padding: int | None, by_frequency: bool, index_type: type, dtype: type
) -> None:
    rng = np.random.default_rng(0)
    table: Array = rng.standard_normal((ROWS, DIMENSION)).astype(dtype)
    indices: Array = rng.integers(0, ROWS, shape).astype(index_type)

    def described(table: Value, indices: Value) -> Value:
        return ops.embedding(table, indices, padding, by_frequency)

    expected_table = torch.tensor(table.astype(np.float64), requires_grad=True)
    expected = F.embedding(torch.tensor(indices), expected_table, padding_idx=padding, scale_grad_by_freq=by_frequency)
    (y,) = forward(described, table, indices)
    assert y.dtype == dtype
    assert_close(y, expected.detach().numpy())

    dy: Array = np.asarray(rng.standard_normal(y.shape), dtype)
    (expected_gradient,) = torch.autograd.grad(expected, expected_table, torch.tensor(dy.astype(np.float64)))
    d_table, d_indices = gradients(described, [table, indices], [dy])
    assert d_indices is None
    assert_close(d_table, expected_gradient.numpy())


def test_derivative_agrees_with_differences_where_it_is_one() -> None:
    indices = np.array([[1, 3], [3, 0]])
    table = np.eye(ROWS, DIMENSION)
    check_gradients(lambda values: ops.embedding(values, values.trace.constant(indices), 5, False), table)


@pytest.mark.parametrize("shape", SHAPES)
def test_expansion(shape: tuple[int, ...]) -> None:
    table = np.random.default_rng(1).standard_normal((ROWS, DIMENSION))
    indices = np.random.default_rng(2).integers(0, ROWS, shape)
    check_expansion("embedding", [table, indices], padding_index=2, scales_by_frequency=True)


def test_without_options_it_is_take() -> None:
    trace = Trace()
    table, indices = trace.value((ROWS, DIMENSION), FLOAT32), trace.value((2,), np.dtype(np.int32))
    ops.embedding(table, indices, None, False)
    assert [step.op.name for step in trace.steps] == ["take"]


@pytest.mark.parametrize("index", [-1, ROWS])
def test_index_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} at position"):
        forward(lambda t, i: ops.embedding(t, i, 1, False), np.zeros((ROWS, DIMENSION)), np.array([0, index]))
