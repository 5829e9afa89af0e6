"""Convolutions by our own CUDA kernels, in emulation: what they mean, for any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.devices.cuda.kernels import few_channel_convolution, tensor_core_convolution, tensor_core_weight_gradient
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.images import first_shape
from mlcompute.ops.op import Array, Value, emit
from tests.compiler.programs import apply
from tests.devices.cuda_emulator.bench import Described, check, needs_engine, op, run
from tests.harness import assert_close

pytestmark = needs_engine

Window = dict[str, Any]
#: (n, height, width, channels), outputs, kernel, then what is not usual
FEW_CHANNELS: list[tuple[tuple[int, int, int, int], int, tuple[int, int], Window]] = [
    ((2, 9, 28, 1), 32, (5, 5), {"padding": (2, 2, 2, 2)}),
    ((3, 8, 32, 3), 16, (3, 3), {"padding": (1, 1, 1, 1)}),
    ((2, 7, 11, 2), 40, (3, 2), {"padding": (0, 1, 2, 0), "strides": (2, 2)}),
    ((1, 9, 30, 4), 5, (2, 3), {"dilations": (2, 3)}),
    ((2, 8, 8, 3), 65, (4, 4), {"strides": (4, 4)}),
    ((1, 1, 1, 1), 1, (1, 1), {}),
    ((1, 10, 10, 1), 3, (7, 7), {"padding": (3, 3, 3, 3)}),
]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def kernels(fn: Described, *arrays: Array) -> str:
    _, _, executable = run(fn, arrays)
    return ", ".join(executable.kernels.values())


def window(changes: Window) -> Window:
    usual = {"strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0), "groups": 1, "channels_last": True}
    return {**usual, **changes}


@pytest.mark.parametrize(("image", "outputs", "kernel", "changes"), FEW_CHANNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_images_with_few_channels(
    image: tuple[int, int, int, int], outputs: int, kernel: tuple[int, int], changes: Window, dtype: Any
) -> None:
    a = window(changes)
    x, w = normal(*image).astype(dtype), normal(outputs, image[3], *kernel, seed=1).astype(dtype)
    (y,) = check(op("convolution", **a), x, w, scale=8)
    assert "few channel" in kernels(op("convolution", **a), x, w)
    dy = normal(*y.shape, seed=2).astype(dtype)
    check(op("convolution_weight_gradient", shape=w.shape, **a), x, dy, scale=32)


def test_a_batch_without_samples_has_no_gradient() -> None:
    a = window({"padding": (1, 1, 1, 1)})
    gradient = op("convolution_weight_gradient", shape=(4, 1, 3, 3), **a)
    (found,) = check(gradient, normal(0, 6, 6, 1), normal(0, 6, 6, 4))
    assert not found.any()


def test_many_channels_and_long_kernels_stay_with_the_library() -> None:
    a = window({})
    for channels, kernel in ((5, 1), (2, 5), (1, 8)):
        found = kernels(op("convolution", **a), normal(1, 9, 9, channels), normal(8, channels, kernel, kernel))
        assert "few channel" not in found


def test_slices_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_channel_convolution, "_BLOCKS", 3)
    a = window({"padding": (2, 2, 2, 2)})
    check(
        op("convolution_weight_gradient", shape=(32, 1, 5, 5), **a), normal(8, 9, 9, 1), normal(8, 9, 9, 32), scale=32
    )


#: (n, height, width, channels), outputs, kernel, then what is not usual
SMALL: list[tuple[tuple[int, int, int, int], int, tuple[int, int], Window]] = [
    ((2, 8, 8, 16), 16, (3, 3), {"padding": (1, 1, 1, 1)}),
    ((3, 7, 11, 24), 40, (3, 3), {"padding": (1, 0, 2, 1), "strides": (2, 2)}),
    ((2, 14, 14, 32), 64, (5, 5), {"padding": (2, 2, 2, 2)}),
    ((1, 9, 10, 8), 8, (2, 3), {"dilations": (2, 3)}),
    ((5, 5, 5, 64), 32, (4, 1), {}),
    ((3, 10, 9, 16), 32, (1, 1), {"strides": (2, 2)}),
    ((2, 12, 8, 8), 16, (2, 1), {"strides": (3, 2), "padding": (0, 2, 1, 0)}),
    ((2, 3, 5, 72), 48, (3, 3), {"padding": (3, 2, 0, 4)}),
]


@pytest.mark.parametrize(("image", "outputs", "kernel", "changes"), SMALL)
def test_small_convolutions_by_tensor_cores(
    image: tuple[int, int, int, int],
    outputs: int,
    kernel: tuple[int, int],
    changes: Window,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_core_convolution, "_MOST_WEIGHTS", 1 << 20)
    a = window(changes)
    x, w = normal(*image), normal(outputs, image[3], *kernel, seed=1)
    (y,) = check(op("convolution", **a), x, w, scale=32)
    assert "tensor core" in kernels(op("convolution", **a), x, w)
    dy = normal(*y.shape, seed=2)
    input_gradient = op("convolution_input_gradient", shape=first_shape(image), **a)
    assert "tensor core" in kernels(input_gradient, dy, w)
    check(input_gradient, dy, w, scale=32)
    weight_gradient = op("convolution_weight_gradient", shape=w.shape, **a)
    assert "tensor core" in kernels(weight_gradient, x, dy)
    check(weight_gradient, x, dy, scale=32)


@pytest.mark.parametrize(("image", "outputs"), [((2, 9, 8, 16), 32), ((2, 9, 8, 3), 16)])
def test_small_convolutions_of_bfloat16(image: tuple[int, int, int, int], outputs: int) -> None:
    a = window({"padding": (1, 1, 1, 1)})
    x, w = normal(*image).astype(bfloat16()), normal(outputs, image[3], 3, 3, seed=1).astype(bfloat16())
    forward = op("convolution", **a)
    assert "tensor core" in kernels(forward, x, w) or "few channel" in kernels(forward, x, w)
    (y,) = check(forward, x, w, scale=32)
    dy = normal(*y.shape, seed=2).astype(bfloat16())
    check(op("convolution_input_gradient", shape=first_shape(image), **a), dy, w, scale=32)
    weight_gradient = op("convolution_weight_gradient", shape=w.shape, **a, to=np.dtype(np.float32))
    assert "cuDNN" not in kernels(weight_gradient, x, dy)
    check(weight_gradient, x, dy, scale=32)


def test_large_weight_gradients_stay_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    a = window({"padding": (1, 1, 1, 1)})
    gradient = op("convolution_weight_gradient", shape=(8, 8, 3, 3), **a)
    arrays = normal(1, 6, 6, 8), normal(1, 6, 6, 8)
    assert "tensor core" in kernels(gradient, *arrays)
    monkeypatch.setattr(tensor_core_weight_gradient, "_MOST_FLOPS", {4: 1000})
    assert "tensor core" not in kernels(gradient, *arrays)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("channels", [1, 16])
@pytest.mark.parametrize("shape", [(8,), (1, 1, 1, 8)])
def test_a_bias_and_relu_are_added_before_results_are_stored(channels: int, relu: bool, shape: tuple[int, ...]) -> None:
    a = window({"padding": (1, 1, 1, 1)})
    x, w, bias = normal(2, 6, 9, channels), normal(8, channels, 3, 3, seed=1), normal(*shape, seed=2)
    x[0, 2, 3, 0] = np.nan

    def described(x: Value, w: Value, bias: Value) -> list[Value]:
        z = emit("convolution", x, w, **a) + bias
        y = ops.relu(z) if relu else z
        apply(fuse_epilogues, x.trace, [y])
        return [y]

    (found,), (expected,), executable = run(described, [x, w, bias])
    (step,) = executable.program.steps
    assert step.op.name == "convolution_epilogue"
    assert "bias" not in executable.kernels[step]
    assert_close(found, expected, 8.0)
    assert np.isnan(found).any()


def test_a_bias_after_a_convolution_of_a_view() -> None:
    a = window({"padding": (1, 1, 1, 1)})

    def described(x: Value, w: Value, bias: Value) -> list[Value]:
        y = ops.relu(emit("convolution", ops.slice_axis(x, 3, 8, 16), w, **a) + bias)
        apply(fuse_epilogues, x.trace, [y])
        return [y]

    (found,), (expected,), executable = run(described, [normal(2, 6, 9, 24), normal(8, 8, 3, 3), normal(8)])
    assert "direct convolution, bias" in executable.kernels.values()
    assert_close(found, expected, 8.0)
