"""Random tensors: bounds, means and deviations, and the scale a layer gives to its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.layers.layer import Layer

FLOAT32, FLOAT16 = mlc.DataType.FLOAT32, mlc.DataType.FLOAT16
UNIFORM, GLOROT, XAVIER = (
    mlc.RandomInitializerType.UNIFORM,
    mlc.RandomInitializerType.GLOROT_UNIFORM,
    mlc.RandomInitializerType.XAVIER,
)


def drawn(kind: mlc.RandomInitializerType, *shape: int, data_type: mlc.DataType = FLOAT32) -> np.ndarray:
    mlc.Platform.set_rng_seed_to(1234)
    data = mlc.Tensor(mlc.TensorDescriptor(shape, data_type=data_type), random_initializer_type=kind).data
    assert data is not None
    return data.astype(np.float64)


def check_uniform(values: np.ndarray, low: float, high: float) -> None:
    """Bounds, mean, standard deviation and the share in each quarter, within five standard errors."""
    n, width = values.size, high - low
    assert values.min() >= low * (1 + 1e-6)
    assert values.max() <= high * (1 + 1e-6)
    assert abs(values.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * n)
    assert abs(values.std() - width / math.sqrt(12)) < 5 * width / math.sqrt(12 * n)
    counts, _ = np.histogram(values, bins=4, range=(low, high))
    assert np.abs(counts / n - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / n)


def check_normal(values: np.ndarray, sigma: float) -> None:
    """Mean, standard deviation, and the share within one sigma, within five standard errors."""
    n = values.size
    assert abs(values.mean()) < 5 * sigma / math.sqrt(n)
    assert abs(values.std() / sigma - 1) < 5 / math.sqrt(2 * n)
    assert abs(np.mean(np.abs(values) < sigma) - 0.6827) < 5 * math.sqrt(0.6827 * 0.3173 / n)


@pytest.mark.parametrize("data_type", [FLOAT32, FLOAT16, mlc.DataType.BFLOAT16])
def test_uniform_is_at_least_0_and_below_1(data_type: mlc.DataType) -> None:
    values = drawn(UNIFORM, 400, 500, data_type=data_type)
    check_uniform(values, 0.0, 1.0)
    assert values.max() < 1.0, "1 is not part of the interval, whatever the type rounds to"


@pytest.mark.parametrize(
    ("shape", "fan_in", "fan_out"),
    [((300, 500), 500, 300), ((40, 20, 5, 5), 500, 1000), ((1, 900, 10, 10), 3000, 3000), ((100, 50, 7), 350, 700)],
)
def test_scale_follows_from_the_shape_until_a_layer_knows_better(
    shape: tuple[int, ...], fan_in: int, fan_out: int
) -> None:
    bound = math.sqrt(6 / (fan_in + fan_out))
    check_uniform(drawn(GLOROT, *shape), -bound, bound)
    check_normal(drawn(XAVIER, *shape), math.sqrt(2 / (fan_in + fan_out)))


def weights(kind: mlc.RandomInitializerType, *shape: int) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, random_initializer_type=kind)


def _fully_connected(w: Callable[..., mlc.Tensor]) -> tuple[Layer, mlc.Tensor]:
    tensor = w(1, 20000, 1, 1)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=500, output_feature_channel_count=40)
    return mlc.FullyConnectedLayer(tensor, None, d), tensor


def _convolution(w: Callable[..., mlc.Tensor]) -> tuple[Layer, mlc.Tensor]:
    tensor = w(1, 64 * 16, 5, 3)
    d = mlc.ConvolutionDescriptor((5, 3), 16, 64)
    return mlc.ConvolutionLayer(tensor, None, d), tensor


def _grouped(w: Callable[..., mlc.Tensor]) -> tuple[Layer, mlc.Tensor]:
    tensor = w(1, 64 * 8, 5, 5)
    d = mlc.ConvolutionDescriptor((5, 5), 32, 64, group_count=4)
    return mlc.ConvolutionLayer(tensor, None, d), tensor


def _lstm(w: Callable[..., mlc.Tensor]) -> tuple[Layer, mlc.Tensor]:
    inputs, hidden = [w(1, 20000, 1, 1) for _ in range(4)], [w(40, 40) for _ in range(4)]
    return mlc.LSTMLayer(mlc.LSTMDescriptor(500, 40), inputs, hidden), inputs[2]


def _attention(w: Callable[..., mlc.Tensor]) -> tuple[Layer, mlc.Tensor]:
    tensors = [w(1, 40, 500, 1), w(40, 500), w(500, 500), w(500, 500)]
    d = mlc.MultiheadAttentionDescriptor(500, 1, key_dimension=40, has_biases=False)
    return mlc.MultiheadAttentionLayer(d, tensors), tensors[0]


def _embedding(w: Callable[..., mlc.Tensor]) -> tuple[Layer, mlc.Tensor]:
    tensor = w(1, 1, 500, 40)
    return mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(500, 40), tensor), tensor


@pytest.mark.parametrize(
    ("build", "fans"),
    [
        (_fully_connected, 540),
        (_convolution, (16 + 64) * 15),
        (_grouped, (8 + 16) * 25),
        (_lstm, 540),
        (_attention, 540),
        (_embedding, 540),
    ],
)
@pytest.mark.parametrize("kind", [GLOROT, XAVIER, UNIFORM])
def test_a_layer_gives_its_weights_their_true_scale(
    build: Callable[..., tuple[Layer, mlc.Tensor]], fans: int, kind: mlc.RandomInitializerType
) -> None:
    mlc.Platform.set_rng_seed_to(77)
    _, tensor = build(lambda *shape: weights(kind, *shape))
    assert tensor.data is not None
    values = tensor.data.astype(np.float64)
    if kind == GLOROT:
        check_uniform(values, -math.sqrt(6 / fans), math.sqrt(6 / fans))
    elif kind == XAVIER:
        check_normal(values, math.sqrt(2 / fans))
    else:
        check_uniform(values, 0.0, 1.0)


def test_weights_are_scaled_once_and_only_when_random() -> None:
    def layer_of(tensor: mlc.Tensor, inputs: int) -> mlc.FullyConnectedLayer:
        d = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=100 // inputs)
        return mlc.FullyConnectedLayer(tensor, None, d)

    shared = weights(XAVIER, 1, 100, 1, 1)
    layer_of(shared, 50)
    first = shared.data.copy()
    layer_of(shared, 10)
    np.testing.assert_array_equal(shared.data, first)
    given = mlc.Tensor(shape=(1, 100, 1, 1), data=np.ones(100, np.float32))
    layer_of(given, 50)
    np.testing.assert_array_equal(given.data, 1)
    rebound = weights(XAVIER, 1, 100, 1, 1)
    rebound.bind_and_write_data(np.ones(100, np.float32), to=mlc.Device.cpu())
    layer_of(rebound, 50)
    np.testing.assert_array_equal(rebound.data, 1)
    copied = copy.copy(weights(XAVIER, 1, 20000, 1, 1))
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=500, output_feature_channel_count=40)
    mlc.FullyConnectedLayer(copied, None, d)
    check_normal(copied.data.astype(np.float64), math.sqrt(2 / 540))
