"""sort and cumulative_sum: values against PyTorch, gradients against differences, shapes they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.ops.op import Trace, Value
from tests.harness import check_gradients, forward

SHAPES = [((5,), 0), ((3, 4), 1), ((4, 3), 0), ((2, 5, 3), -2), ((2, 1, 3, 2, 2), 2)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("descending", [False, True])
def test_sort(shape: tuple[int, ...], axis: int, descending: bool) -> None:
    x = np.random.default_rng(3).permutation(np.prod(shape)).reshape(shape).astype(np.float64)
    values, indices = forward(lambda v: ops.sort(v, axis, descending), x)
    expected = torch.sort(torch.tensor(x), dim=axis, descending=descending, stable=True)
    np.testing.assert_array_equal(values, expected.values.numpy())
    np.testing.assert_array_equal(indices, expected.indices.numpy())
    check_gradients(lambda v: ops.sort(v, axis, descending)[0], x)
    check_gradients(lambda v: ops.sort(v, axis, descending, 1)[0], x)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_sum(shape: tuple[int, ...], axis: int, exclusive: bool, reverse: bool) -> None:
    x = np.random.default_rng(4).standard_normal(shape)
    (y,) = forward(lambda v: ops.cumulative_sum(v, axis, exclusive, reverse), x)
    seen = torch.tensor(x).flip(axis) if reverse else torch.tensor(x)
    expected = torch.cumsum(seen, axis) - (seen if exclusive else 0)
    np.testing.assert_allclose(y, (expected.flip(axis) if reverse else expected).numpy(), atol=1e-12)
    check_gradients(lambda v: ops.cumulative_sum(v, axis, exclusive, reverse), x)


def test_float32_is_added_up_in_float64() -> None:
    x = np.full(2**20, 0.1, np.float32)
    (y,) = forward(lambda v: ops.cumulative_sum(v, 0), x)
    assert y[-1] == np.float32(np.float64(np.float32(0.1)) * 2**20)


@pytest.mark.parametrize("count", [-1, 4])
def test_more_than_there_are(count: int) -> None:
    with pytest.raises(ShapeError, match="of 3 elements"):
        ops.sort(_value((2, 3)), 1, False, count)


def test_no_such_axis() -> None:
    for op in (ops.sort, ops.cumulative_sum):
        with pytest.raises(ShapeError, match="axis 2 does not exist"):
            op(_value((2, 3)), 2)


def _value(shape: tuple[int, ...]) -> Value:
    return Trace().value(shape, np.dtype(np.float32), "input")
