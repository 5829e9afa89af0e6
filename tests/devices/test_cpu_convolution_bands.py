"""Few samples by oneDNN: bands of rows give what full samples give, with any window, on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.kernels import convolution, convolution_bands
from mlcompute.devices.cpu.kernels.convolution_bands import bands_of
from tests.devices.test_cpu_convolution import KINDS, bench_of

pytestmark = pytest.mark.skipif(onednn.load() is None, reason="oneDNN is not installed")
OPS = ("convolution", "convolution_input_gradient", "convolution_weight_gradient")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("samples", "pieces"), [(1, 2), (1, 5), (2, 7), (3, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_bands_of_rows(kind: str, samples: int, pieces: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_WINOGRAD", "0")
    for name in ("machine_pieces", "machine_slices"):
        monkeypatch.setattr(convolution, name, lambda: pieces)
    monkeypatch.setattr(convolution, "columns_of", lambda step: None)
    monkeypatch.setattr(convolution, "_OWN", ())
    monkeypatch.setattr(convolution_bands, "_LEAST_FLOPS", 0.0)
    bench = bench_of(op, KINDS[kind], samples)
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4))


@pytest.mark.parametrize("op", OPS[:2])
def test_one_image_is_shared(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_WINOGRAD", "0")
    monkeypatch.setattr(convolution, "machine_pieces", lambda: 4)
    kind = ((1, 16, 64, 64), (32, 16, 7, 7), (2, 2), (1, 1), (3, 3, 3, 3), 1)
    bench = bench_of(op, kind, 1)
    assert bench.entries is not None
    assert bench.entries[-1].kernel.endswith(" x4")
    assert bench_of(op, kind, 8).entries[-1].kernel.endswith(" x4")  # type: ignore[index]


def test_what_is_not_cut() -> None:
    window = {"strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1)}
    x, w, y = (1, 64, 32, 32), (64, 64, 3, 3), (1, 64, 32, 32)
    assert bands_of("forward", x, w, y, window, 2) is not None
    assert bands_of("forward", (2, *x[1:]), w, (2, *y[1:]), window, 2) is None
    assert bands_of("forward", (1, 4, 8, 8), (4, 4, 3, 3), (1, 4, 8, 8), window, 2) is None  # too little to do
    assert bands_of("forward", (1, 512, 3, 3), (512, 512, 3, 3), (1, 512, 3, 3), window, 2) is None  # too few rows
