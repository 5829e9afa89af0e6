"""bfloat16 on the CUDA engine: kernels read and store it, compute in float32, and agree with NumPy's meanings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.attention_by_token import BY_TOKEN, BY_TOKEN_GRADIENT
from mlcompute.devices.reference import Reference
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Array
from tests.devices.cuda_emulator.bench import check, engine, needs_engine, op, run
from tests.test_bfloat16 import NETWORKS, ROUNDING, Network, Trained, assert_weights_agree, maximal

pytestmark = needs_engine


def narrow(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(bfloat16())


def wide(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).random(shape).astype(np.float32) + np.float32(0.5)


def test_conversions_are_those_of_numpy() -> None:
    edges = np.float32([0.0, -0.0, 1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, -1e-45])
    found = check(op("convert", to=bfloat16()), edges)[0]
    expected = edges.astype(bfloat16()).astype(np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), expected)
    check(op("convert", to=FLOAT32), narrow(5, 7))
    check(op("convert", to=np.dtype(np.int32)), narrow(5, 7))
    check(op("convert", to=bfloat16()), np.arange(-4, 9, dtype=np.int32))


@pytest.mark.parametrize("columns", [7, 8, 64])
def test_a_fused_group_rounds_where_it_stores(columns: int) -> None:
    def activation(x: Any, b: Any) -> Any:
        return ops.convert(ops.tanh(ops.convert(x, FLOAT32) + b), bfloat16())

    check(activation, narrow(9, columns), wide(columns), fuses=True)


def test_moves_leave_numbers_alone() -> None:
    x, y = narrow(4, 6), narrow(4, 6, seed=2)
    check(lambda a, b: ops.concatenate([a, b], 1), x, y)
    check(op("pad", before=(1, 2), after=(0, 1), value=1.5), x)
    check(op("slice_gradient", shape=(8, 6), start=(0, 0), end=(8, 6), stride=(2, 1)), x)
    check(op("gather", axis=0), x, np.zeros((2, 6), np.int64))
    check(lambda a: ops.copy(ops.transpose(a)), x)


@pytest.mark.parametrize("shape", [(3, 5), (8, 64), (2, 3000), (700, 4)])
def test_rows_and_columns(shape: tuple[int, int]) -> None:
    x = narrow(*shape)
    for axis in (0, 1):
        for name in ("sum", "max", "min"):
            assert check(op(name, axes=(axis,)), x, scale=4)[0].dtype == np.float32
        check(op("argmax", axis=axis), x)
        for name in ("softmax", "log_softmax"):
            assert check(op(name, axis=axis), x, scale=4)[0].dtype == np.float32
        statistics = tuple(1 if number == axis else extent for number, extent in enumerate(shape))
        norm = {"axes": (axis,), "epsilon": 1e-3}
        y, mean, _ = check(op("normalize", **norm), x, scale=4)
        assert (y.dtype, mean.dtype) == (bfloat16(), np.float32)
        gradient = op("normalize_gradient", **norm)
        check(gradient, narrow(*shape, seed=3), y, wide(*statistics), wide(*statistics, seed=5), scale=8)


@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling(channels_last: bool) -> None:
    windows = {"kernel": (2, 3), "strides": (2, 1), "dilations": (1, 1), "padding": (1, 0, 0, 1)}
    windows["channels_last"] = channels_last
    x = narrow(2, 4, 5, 4) if channels_last else narrow(2, 4, 4, 5)
    for name in ("max_pool", "max_pool_with_indices", "sum_pool"):
        check(op(name, **windows), x)
    y = run(op("max_pool", **windows), [x])[0][0]
    dy = narrow(*y.shape, seed=4)
    check(op("max_pool_gradient", **windows), dy, x)
    check(op("sum_pool_gradient", shape=(2, 4, 4, 5), **windows), dy)


@pytest.mark.parametrize("to", [None, FLOAT32])
def test_products_of_any_strides(to: object) -> None:
    more = {} if to is None else {"to": to}
    found = check(op("matmul", **more), narrow(9, 20), narrow(20, 7), scale=4)[0]
    assert found.dtype == (bfloat16() if to is None else FLOAT32)
    # Every other column: cuBLASLt cannot read that, so our own kernel does.
    every_other = {"start": (0, 0), "end": (9, 40), "stride": (1, 2)}
    check(lambda a, b: ops.emit("matmul", ops.emit("slice", a, **every_other), b, **more), narrow(9, 40), narrow(20, 7))


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions(groups: int) -> None:
    attributes = {"strides": (1, 2), "dilations": (1, 1), "padding": (1, 1, 0, 1), "groups": groups}
    x, w = narrow(2, 4, 5, 6), narrow(8, 4 // groups, 3, 2)
    y = check(op("convolution", **attributes), x, w, scale=4)[0]
    dy = narrow(*y.shape, seed=6)
    check(op("convolution_input_gradient", shape=x.shape, **attributes), dy, w, scale=4)
    check(op("convolution_weight_gradient", shape=w.shape, **attributes), x, dy, scale=4)
    # cuDNN's is rounded to bfloat16 before it is float32, which is a few hundred times as coarse.
    check(op("convolution_weight_gradient", shape=w.shape, to=FLOAT32, **attributes), x, dy, scale=400)


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention(width: int, has_mask: bool) -> None:
    attributes = {"scale": 0.5, "has_mask": has_mask, "has_keep": False}
    q, k, v = narrow(2, 2, 9, width), narrow(2, 2, 70, width, seed=2), narrow(2, 2, 70, 8, seed=3)
    mask = [wide(9, 70)] if has_mask else []
    # Probabilities and their gradients are rounded to bfloat16 before they are multiplied.
    y = check(op("attention", **attributes), q, k, v, *mask, scale=64)[0]
    assert y.dtype == bfloat16()
    dy = narrow(*y.shape, seed=4)
    check(op("attention_gradient", **attributes), dy, q, k, v, *mask, scale=128)
    kept = check(lambda *x: x[0].trace.add(BY_TOKEN, x, attributes), q, k, v, *mask, scale=64)
    inputs = [dy, *kept, q, k, v, *mask]
    check(lambda *x: x[0].trace.add(BY_TOKEN_GRADIENT, x, attributes), *inputs, scale=128)


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train_as_on_the_reference(network: Network) -> None:
    expected = Trained(network, mlc.Device(engine=Reference(), precision="bf16"))
    found = Trained(network, mlc.Device(engine=engine(), precision="bf16"))
    assert found.loss == pytest.approx(expected.loss, rel=8 * ROUNDING)
    if network is maximal:  # of two numbers that are equal in bfloat16, a maximum may pick another one
        assert_weights_agree(found, expected)
        return
    for one, other in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=8 * ROUNDING * max(0.1, float(np.abs(other).max())))


def test_a_convolution_of_strided_images_is_ours() -> None:
    attributes = {"strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0), "groups": 1}
    every_other = {"start": (0, 0, 0, 0), "end": (2, 4, 5, 8), "stride": (1, 1, 1, 2)}

    def gradient(x: Any, dy: Any) -> Any:
        image = ops.emit("slice", x, **every_other)
        return ops.emit("convolution_weight_gradient", image, dy, shape=(3, 4, 2, 2), to=FLOAT32, **attributes)

    check(gradient, narrow(2, 4, 5, 8), narrow(2, 3, 4, 3), scale=4)
