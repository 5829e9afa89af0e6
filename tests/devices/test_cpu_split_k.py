"""Split-K gemm: every slice of the depth once, in an order that the number of threads does not change."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.cpu.gemm import gemm_split_k, matmul
from mlcompute.ops.op import Value
from mlcompute.ops.views import transpose
from tests.devices.kernels import Bench


@pytest.fixture(params=[2, 3, 4])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with so many cores."""
    count: int = request.param
    monkeypatch.setattr(gemm_split_k, "machine_slices", lambda: count)
    monkeypatch.setattr(matmul, "suits_slices", lambda step: False)  # which has tests of its own
    return count


@pytest.mark.parametrize(("m", "n", "k"), [(64, 512, 600), (37, 300, 263), (128, 70, 1000), (33, 1000, 259)])
@pytest.mark.parametrize("turned", [False, True])
def test_split_k(m: int, n: int, k: int, turned: bool, slices: int) -> None:
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal(shape).astype("f") for shape in ((k, m) if turned else (m, k), (k, n)))

    def views(a: Value, b: Value) -> list[Value]:
        return [transpose(a, (1, 0)) if turned else a, b]

    bench = Bench(matmul.KERNELS, "matmul", [a, b], views=views)
    assert bench.entries is not None
    kernels = [f"gemm, split-K {turn} of {slices}" for turn in range(1, slices + 1)]
    assert [entry.kernel for entry in bench.entries] == kernels
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.sqrt(k)))


@pytest.mark.parametrize(("m", "n", "k"), [(200, 512, 256), (8, 512, 256), (64, 512, 100), (64, 100, 256)])
def test_other_products_are_not_split(m: int, n: int, k: int, slices: int) -> None:
    """Many rows, few rows, little depth, a small b."""
    bench = Bench(matmul.KERNELS, "matmul", [np.zeros((m, k), "f"), np.zeros((k, n), "f")])
    assert bench.entries is not None
    assert not any("split-K" in entry.kernel for entry in bench.entries)


def test_as_many_cores_as_rows_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_split_k, "machine_slices", lambda: 16)
    bench = Bench(matmul.KERNELS, "matmul", [np.zeros((64, 4096), "f"), np.zeros((4096, 512), "f")])
    assert bench.entries is not None
    assert not any("split-K" in entry.kernel for entry in bench.entries)
