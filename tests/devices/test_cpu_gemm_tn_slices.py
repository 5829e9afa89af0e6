"""gemm_tn in slices of the samples: each slice by itself, then their sum, in an order no number of threads changes."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.cpu.gemm import gemm_tn_slices, matmul
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.devices.cpu.runtime.threads import WAIT
from mlcompute.ops.op import Array, Value
from mlcompute.ops.views import transpose
from tests.devices.kernels import Bench
from tests.devices.tapes import dense_layers, tape


@pytest.fixture(params=[2, 3, 4])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with so many cores."""
    count: int = request.param
    cores(count, monkeypatch)
    return count


def cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_tn_slices, "machine_slices", lambda: count)


def product(m: int, n: int, k: int) -> tuple[Bench, list[str]]:
    """y = aᵀ b of that many samples, and its kernels."""
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal((k, columns)).astype("f") for columns in (m, n))

    def views(a: Value, b: Value) -> list[Value]:
        return [transpose(a, (1, 0)), b]

    bench = Bench(matmul.KERNELS, "matmul", [a, b], views=views, workspaces=matmul.WORKSPACES)
    assert bench.entries is not None
    return bench, [entry.kernel for entry in bench.entries]


SIZES = [(128, 128, 720), (16, 16, 384), (40, 130, 480), (131, 37, 492), (70, 256, 1200)]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products_in_slices(m: int, n: int, k: int, slices: int) -> None:
    bench, kernels = product(m, n, k)
    assert kernels == ["gemm_tn in slices", "sum of slices"]

    def compare(found: Array, expected: Array) -> None:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.sqrt(k))

    bench.check(compare)


#: A y that is large beside the samples, samples that do not divide, few rows, few columns, what sgemm multiplies.
OTHERS = [(512, 784, 64), (128, 128, 719), (12, 128, 720), (128, 12, 480), (64, 80, 720)]


@pytest.mark.parametrize(("m", "n", "k"), OTHERS)
def test_other_products_are_not_cut(m: int, n: int, k: int, slices: int) -> None:
    assert "gemm_tn in slices" not in product(m, n, k)[1]


@pytest.mark.parametrize("count", [1, 5, 16])
def test_other_machines_do_not_cut(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(count, monkeypatch)
    assert "gemm_tn in slices" not in product(128, 128, 720)[1]


def test_threads_go_on_with_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No barrier between what makes the gradient of a layer's result and the slices that read it."""
    cores(2, monkeypatch)
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    waits = {entry.kernel: bool(turn & WAIT) for entry, turn in tape(dense_layers(512, 64), 2)}
    assert not waits["gemm_tn in slices"]
    assert waits["sum of slices"]
