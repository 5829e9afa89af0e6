"""Convolutions and their gradients without a library: every kind, in guarded memory, on any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen.code import vector_lanes
from mlcompute.devices.cpu.gemm import matmul
from mlcompute.devices.cpu.kernels import convolution
from mlcompute.devices.cpu.kernels.convolution_windows import taps_inside
from mlcompute.ops.images import last_shape
from mlcompute.ops.matmul_and_convolution import Convolution
from mlcompute.ops.op import ArrayType
from tests.devices.kernels import Bench

#: x, w, strides, dilations, padding, groups
KINDS: dict[str, tuple[Any, ...]] = {
    "one input": ((2, 1, 12, 12), (6, 1, 5, 5), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "three inputs": ((3, 3, 11, 9), (20, 3, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    "strided": ((2, 5, 13, 10), (7, 5, 3, 3), (2, 3), (1, 1), (1, 0, 2, 1), 1),
    "strided, more inputs": ((2, 17, 13, 10), (7, 17, 3, 3), (2, 3), (1, 1), (1, 0, 2, 1), 1),
    "dilated, more inputs": ((2, 18, 14, 13), (9, 18, 3, 3), (1, 2), (2, 3), (2, 2, 3, 3), 1),
    "transposed": ((3, 3, 16, 14), (20, 3, 4, 4), (2, 2), (1, 1), (1, 1, 1, 1), 1),
    "transposed, two inputs": ((2, 2, 15, 31), (33, 2, 5, 7), (3, 2), (2, 1), (2, 3, 4, 3), 1),
    "wide border": ((2, 3, 4, 3), (8, 3, 3, 4), (1, 1), (1, 1), (4, 3, 6, 5), 1),
    "wide rows": ((1, 4, 3, 230), (5, 4, 2, 3), (1, 1), (1, 1), (1, 0, 1, 1), 1),
    "dilated": ((2, 4, 14, 13), (9, 4, 3, 3), (1, 2), (2, 3), (2, 2, 3, 3), 1),
    "strided and dilated": ((1, 3, 15, 15), (5, 3, 3, 2), (2, 2), (3, 2), (1, 2, 0, 1), 1),
    "pixels without taps": ((2, 3, 9, 9), (4, 3, 1, 1), (3, 2), (1, 1), (0, 0, 0, 0), 1),
    "pointwise": ((2, 10, 6, 5), (17, 10, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "pointwise, one panel": ((3, 64, 16, 18), (32, 64, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "pointwise, more outputs": ((3, 24, 16, 18), (96, 24, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "pointwise, one output": ((2, 80, 7, 9), (1, 80, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "pointwise, one input": ((2, 1, 7, 9), (20, 1, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "pointwise, volumes": ((2, 16, 3, 5, 7), (17, 16, 1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0, 0, 0, 0), 1),
    "patches": ((2, 3, 16, 16), (24, 3, 8, 8), (8, 8), (1, 1), (0, 0, 0, 0), 1),
    "strides beyond the image": ((2, 1, 3, 2), (2, 1, 3, 3), (5, 5), (1, 1), (0, 0, 1, 1), 1),
    "depthwise, strides beyond the image": ((1, 3, 2, 3), (3, 1, 3, 3), (4, 4), (1, 1), (1, 1, 1, 1), 3),
    "no tap on the image": ((2, 5, 1, 1), (4, 5, 1, 2), (1, 2), (1, 2), (0, 0, 3, 3), 1),
    "depthwise, no tap on the image": ((2, 5, 1, 1), (5, 1, 1, 2), (1, 2), (1, 2), (0, 0, 3, 3), 5),
    "groups": ((2, 12, 8, 9), (8, 3, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 4),
    "depthwise": ((3, 19, 10, 9), (19, 1, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 19),
    "depthwise, strided": ((2, 8, 11, 11), (8, 1, 5, 3), (2, 2), (1, 1), (2, 2, 1, 1), 8),
    "depthwise, two outputs": ((2, 6, 7, 7), (12, 1, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 6),
    "many channels": ((1, 100, 6, 6), (33, 100, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    "volumes": ((2, 2, 5, 6, 7), (4, 2, 2, 3, 3), (1, 2, 1), (1, 1, 2), (0, 1, 1, 1, 2, 2), 1),
    "volumes, depthwise": ((1, 5, 5, 4, 6), (5, 1, 3, 2, 3), (2, 1, 1), (1, 1, 1), (1, 1, 0, 0, 1, 1), 5),
    "to an image": ((2, 16, 20, 22), (3, 16, 9, 9), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    "to an image, as large": ((1, 33, 40, 31), (3, 33, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    "to a score": ((3, 20, 7, 6), (1, 20, 4, 4), (1, 1), (1, 1), (1, 1, 2, 2), 1),
    "to few, wide border": ((2, 19, 4, 3), (2, 19, 3, 3), (1, 1), (1, 1), (4, 3, 6, 5), 1),
    "to few, dilated rows": ((2, 16, 9, 140), (2, 16, 3, 5), (1, 1), (3, 1), (7, 0, 2, 9), 1),
    "to few, sequences": ((2, 64, 1, 40), (1, 64, 1, 7), (1, 1), (1, 1), (0, 0, 6, 0), 1),
    "sequences": ((2, 6, 1, 40), (10, 6, 1, 7), (1, 2), (1, 1), (0, 0, 3, 3), 1),
}


def bench_of(op: str, kind: tuple[Any, ...], samples: int = 0) -> Bench:
    """A convolution or a gradient of one, channels last, of random arrays; `samples`: instead of the kind's own."""
    x, w, strides, dilations, padding, groups = kind
    x = (samples or x[0], *x[1:])
    window = {"strides": strides, "dilations": dilations, "padding": padding, "groups": groups}
    y = Convolution.result(ArrayType(x, np.dtype("f")), ArrayType(w, np.dtype("f")), **window).shape
    rng = np.random.default_rng(0)
    images = {"x": last_shape(x), "w": w, "y": last_shape(y)}
    roles = {"convolution": "xw", "convolution_input_gradient": "yw", "convolution_weight_gradient": "xy"}[op]
    arrays = [rng.standard_normal(images[role]).astype("f") for role in roles]
    attributes = {**window, "channels_last": True}
    if op != "convolution":
        attributes["shape"] = x if op == "convolution_input_gradient" else w
    return Bench(convolution.KERNELS, op, arrays, attributes, workspaces=convolution.WORKSPACES)


@pytest.mark.parametrize("op", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_library(kind: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (convolution, matmul):
        monkeypatch.setattr(module.onednn, "load", lambda: None)
    monkeypatch.setenv("MLCOMPUTE_WINOGRAD", "0")
    bench = bench_of(op, KINDS[kind])
    assert bench.entries is not None
    assert all("oneDNN" not in entry.kernel for entry in bench.entries)
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4))


#: Depthwise kinds, and whether oneDNN has a kernel for the (convolution, gradient of its input, of its filters).
DEPTHWISE: list[tuple[tuple[Any, ...], tuple[bool, bool, bool]]] = [
    (((3, 32, 10, 9), (32, 1, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 32), (True, True, True)),
    (((3, 32, 10, 9), (32, 1, 5, 5), (1, 1), (1, 1), (2, 2, 2, 2), 32), (True, True, False)),
    (((2, 32, 12, 12), (32, 1, 3, 3), (1, 1), (2, 2), (2, 2, 2, 2), 32), (True, False, False)),
    (((2, 16, 1, 50), (16, 1, 1, 9), (1, 1), (1, 1), (0, 0, 4, 4), 16), (True, True, False)),
]


@pytest.mark.skipif(convolution.onednn.load() is None, reason="oneDNN is not installed")
@pytest.mark.parametrize(("kind", "by_library"), DEPTHWISE)
def test_depthwise_convolutions_that_the_library_has_no_kernel_for_are_ours(
    kind: tuple[Any, ...], by_library: tuple[bool, bool, bool]
) -> None:
    for op, expected in zip(
        ("convolution", "convolution_input_gradient", "convolution_weight_gradient"), by_library, strict=True
    ):
        bench = bench_of(op, kind)
        assert bench.entries is not None
        assert any("oneDNN" in entry.kernel for entry in bench.entries) == expected, op
        bench.check(lambda found, right: np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4))


@pytest.mark.parametrize("inputs", [1, 2, vector_lanes() // 2])
def test_input_gradients_with_few_channels_have_a_kernel_of_their_own(inputs: int) -> None:
    """With a library, too: it fills vectors of channels up."""
    rng = np.random.default_rng(0)
    w, dy = rng.standard_normal((32, inputs, 4, 4)).astype("f"), rng.standard_normal((5, 8, 8, 32)).astype("f")
    attributes = {
        "strides": (2, 2), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True,
        "shape": (5, inputs, 16, 16),
    }  # fmt: skip
    name = "convolution_input_gradient"
    bench = Bench(convolution.KERNELS, name, [dy, w], attributes, workspaces=convolution.WORKSPACES)
    assert bench.entries is not None
    assert bench.entries[-1].kernel == "gemm of taps, added"
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4))


@pytest.mark.parametrize("outputs", [1, 3, vector_lanes() // 2 - 1])
@pytest.mark.parametrize("samples", [1, 3, 20])
def test_convolutions_with_few_outputs_have_kernels_of_their_own(outputs: int, samples: int) -> None:
    """With a library, too: it fills vectors of outputs up. Threads share bands of samples where these are few."""
    kind = ((1, 2 * vector_lanes(), 40, 13), (outputs, 2 * vector_lanes(), 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1)
    for op, number, kernel in (
        ("convolution", -1, "gemm of taps, added"),
        ("convolution_weight_gradient", 0, "gemm of outputs and taps"),
    ):
        bench = bench_of(op, kind, samples)
        assert bench.entries is not None
        assert bench.entries[number].kernel.startswith(kernel)
        bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-4))


@pytest.mark.skipif(convolution.onednn.load() is None, reason="oneDNN is not installed")
@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("samples", [3, 5, 6])
def test_slices_of_all_sizes_have_weights_in_one_format(
    samples: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN has other kernels, with filters in another order, for the gradient of one sample than for that of two."""
    monkeypatch.setattr(convolution, "_slices_of", lambda step: slices)
    monkeypatch.setattr(convolution, "columns_of", lambda step: None)
    kind = ((1, 16, 8, 70), (12, 16, 7, 5), (1, 1), (3, 3), (9, 9, 6, 6), 1)
    bench = bench_of("convolution_weight_gradient", kind, samples)
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-4))


@pytest.mark.parametrize("inputs", [1, 7, 12, 16])
@pytest.mark.parametrize("strides", [(2, 1), (1, 2)])
def test_gradients_of_strided_pointwise_filters_of_few_inputs_are_ours(inputs: int, strides: tuple[int, int]) -> None:
    """With a library, too, which writes behind its working memory: oneDNN's issue 6035."""
    kind = ((3, inputs, 64, 33), (5, inputs, 1, 1), strides, (1, 1), (0, 0, 0, 0), 1)
    bench = bench_of("convolution_weight_gradient", kind)
    assert bench.entries is not None
    if inputs < 16:
        assert not any("oneDNN" in entry.kernel for entry in bench.entries)
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3))


def test_filters_as_large_as_an_image_stay_with_the_library() -> None:
    kind = ((8, 2 * vector_lanes(), 8, 8), (1, 2 * vector_lanes(), 8, 8), (1, 1), (1, 1), (0, 0, 0, 0), 1)
    bench = bench_of("convolution", kind)
    assert bench.entries is not None
    assert not any(entry.kernel == "gemm of taps, added" for entry in bench.entries)


def test_pairs_of_pixels_and_taps_are_counted() -> None:
    for kind in KINDS.values():
        x, w, strides, dilations, padding, _ = kind
        ones = np.ones((1, 1, *x[2:]), "f"), np.ones((1, 1, *w[2:]), "f")
        window = {"strides": strides, "dilations": dilations, "padding": padding, "groups": 1}
        step = bench_of("convolution", kind).step
        assert taps_inside(step) == int(Convolution.meaning(*ones, **window).sum())


def test_half_a_vector_of_outputs_is_not_few_for_winograd() -> None:
    """Of 16 floats: with shorter ones they are a vector or more."""
    kind = ((8, 32, 32, 32), (8, 32, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1)
    bench = bench_of("convolution", kind)
    assert bench.entries is not None
    assert bench.entries[-1].kernel == "winograd 4x4"


@pytest.mark.parametrize(
    ("channels", "is_ours"), [((24, 96), True), ((64, 1), True), ((3, 2), False), ((512, 512), False)]
)
def test_gradients_of_pointwise_filters_are_products_over_pixels(channels: tuple[int, int], is_ours: bool) -> None:
    """With a library, too, which is slow where images come from memory; unless filters are large, or very few."""
    inputs, outputs = channels
    kind = ((4, inputs, 12, 11), (outputs, inputs, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1)
    bench = bench_of("convolution_weight_gradient", kind)
    assert bench.entries is not None
    assert bench.entries[0].kernel.startswith("gemm of pixels") == is_ours
