"""Small products by our own kernel."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cuda.kernels import small_matmul
from mlcompute.ops.op import Value
from tests.devices.cuda_ops import emulated, multiplied, run_on


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 7, 3), (33, 20, 17), (16, 300, 8), (600, 24, 100)])
@pytest.mark.parametrize(("a_turned", "b_turned"), [*itertools.product((False, True), repeat=2)])
def test_small_products(m: int, k: int, n: int, a_turned: bool, b_turned: bool) -> None:
    rng = np.random.default_rng([m, k, n])
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)

    def product(x: Value, y: Value) -> list[Value]:
        x = ops.transpose(x, (1, 0)) if a_turned else x
        return [ops.matmul(x, ops.transpose(y, (1, 0)) if b_turned else y)]

    given = [np.ascontiguousarray(a.T if a_turned else a), np.ascontiguousarray(b.T if b_turned else b)]
    with multiplied("high"):
        (found,), kernels = run_on(emulated(), product, given)
    assert kernels == "small matmul"
    np.testing.assert_allclose(found, a.astype(float) @ b, atol=1e-5 * k**0.5)


def test_exact_products_are_left_to_the_library() -> None:
    with multiplied("highest"):
        a = np.ones((4, 4), np.float32)
        _, kernels = run_on(emulated(), lambda x: [ops.matmul(x, x)], [a])
        assert kernels == "cuBLASLt"


@pytest.mark.parametrize("k", [1, 16, 100, 784])
def test_tiles_cover_any_result(k: int) -> None:
    for m, n in itertools.product((1, 15, 32, 512), repeat=2):
        tiling = small_matmul.tiling_of(m, n, k)
        assert tiling.blocks(m, n) * tiling.rows * tiling.columns >= m * n
        assert 4 * tiling.warps * tiling.rows * tiling.columns <= 20 << 10  # several fit beside each other
