"""sort and cumulative_sum of every type on the CPU engine, against their NumPy meanings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES
from mlcompute.devices.cpu.kernels import ordering
from mlcompute.ops.op import Array
from tests.devices.kernels import Bench


def numbers(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Many equal ones, the extremes of the type, and what is not a number."""
    rng = np.random.default_rng(0)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    array: Array = rng.integers(0 if dtype.kind == "u" else -40, 40, shape).astype(dtype)
    special = [np.nan, np.inf, -np.inf, -0.0] if dtype.kind == "f" else [np.iinfo(dtype).max, np.iinfo(dtype).min]
    array.reshape(-1)[3 : 3 + len(special)] = special
    return array


@pytest.mark.parametrize("dtype", MEMORY_TYPES, ids=str)
@pytest.mark.parametrize(("descending", "count"), [(True, 3), (False, 90)])
def test_sort(dtype: np.dtype[Any], descending: bool, count: int) -> None:
    attributes = {"axis": 1, "descending": descending, "count": count}
    bench = Bench(ordering.KERNELS, "sort", [numbers(dtype, (3, 90, 2))], attributes, workspaces=ordering.WORKSPACES)
    bench.check(np.testing.assert_array_equal)


@pytest.mark.parametrize("dtype", [np.dtype(name) for name in ("f4", "f2", "i1", "u4")], ids=str)
@pytest.mark.parametrize(("descending", "count"), [(True, 5), (False, 200)])
def test_the_first_of_a_long_line(dtype: np.dtype[Any], descending: bool, count: int) -> None:
    """Lines that lie in one piece and lines that do not; values that get ever better, and equal ones."""
    x = numbers(dtype, (3, 1203))
    x[1] = np.sort(x[1])[:: 1 if descending else -1]
    attributes = {"axis": 1, "descending": descending, "count": count}
    for views in (None, lambda value: [ops.transpose(value, (1, 0))]):
        array = x if views is None else np.ascontiguousarray(x.T)
        bench = Bench(
            ordering.KERNELS, "sort", [array], attributes, views=views, workspaces=ordering.WORKSPACES
        )
        bench.check(np.testing.assert_array_equal)


@pytest.mark.parametrize("dtype", [dtype for dtype in MEMORY_TYPES if dtype.kind != "b"], ids=str)
def test_cumulative_sum(dtype: np.dtype[Any]) -> None:
    x = (np.random.default_rng(0).random((3, 7, 16)) * 5).astype(dtype)
    bench = Bench(ordering.KERNELS, "cumulative_sum", [x], {"axis": 1, "exclusive": True, "reverse": True})
    bench.check(np.testing.assert_array_equal)
