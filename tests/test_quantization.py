"""Tensors in fewer bits, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

FLOAT32, FLOAT16, INT32, UINT8, INT8 = (
    mlc.DataType.FLOAT32,
    mlc.DataType.FLOAT16,
    mlc.DataType.INT32,
    mlc.DataType.UINT8,
    mlc.DataType.INT8,
)


def test_quantizing_rounds_half_to_even_and_saturates() -> None:
    x = mlc.Tensor(shape=(7,), data=[-100, -0.5, 0.25, 0.5, 0.75, 1.0, 100])
    q = x.quantized(UINT8, scale=0.5, bias=10)
    assert q.descriptor.data_type is UINT8
    np.testing.assert_array_equal(q.data, [0, 9, 10, 11, 12, 12, 210])
    np.testing.assert_array_equal(x.quantized(INT8, scale=0.5, bias=-3).data, [-128, -4, -3, -2, -1, -1, 127])
    np.testing.assert_array_equal(x.quantized(to=INT32, scale=0.5, bias=0).data, [-200, -1, 0, 1, 2, 2, 200])
    huge = mlc.Tensor(shape=(3,), data=[-math.inf, math.inf, 3e9])
    np.testing.assert_array_equal(huge.quantized(INT32, scale=1.0, bias=0).data, [-(2**31), 2**31 - 1, 2**31 - 1])


def test_quantizing_and_back() -> None:
    rng = np.random.default_rng(0)
    x = mlc.Tensor(shape=(4, 25), data=rng.uniform(-0.99, 0.99, (4, 25)).astype(np.float32))
    scale = 2 / 255
    back = x.quantized(UINT8, scale=scale, bias=128).dequantized(FLOAT32, scale=scale, bias=128)
    assert back.descriptor == x.descriptor
    assert np.abs(back.data - x.data).max() <= scale / 2 * 1.0001


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_scale_per_channel(axis: int) -> None:
    rng = np.random.default_rng(axis)
    x = mlc.Tensor(shape=(2, 3, 4), data=rng.uniform(-50, 50, (2, 3, 4)).astype(np.float32))
    count = (2, 3, 4)[axis]
    s, b = np.float32(rng.uniform(0.3, 1, count)), np.int32(rng.integers(-9, 9, count))
    scale = mlc.Tensor(shape=(count,), data=s)
    bias = mlc.Tensor(shape=(count,), data=b, data_type=INT32)
    shape = [-1 if k == axis else 1 for k in range(3)]
    s64, b64 = s.astype(np.float64).reshape(shape), b.reshape(shape)
    q = x.quantized(INT8, scale=scale, bias=bias, axis=axis)
    np.testing.assert_array_equal(q.data, np.clip(np.rint(x.data / s64) + b64, -128, 127))
    back = q.dequantized(FLOAT32, scale=scale, bias=bias, axis=axis)
    np.testing.assert_allclose(back.data, (q.data - b64) * s64, rtol=1e-6)


def test_dequantizing_takes_tensors_numbers_and_the_other_name() -> None:
    q = mlc.Tensor(shape=(3,), data=[0, 128, 255], data_type=UINT8)
    expected = np.float32([-64, 0, 63.5])
    scale, zero = mlc.Tensor(shape=(1,), data=[0.5]), mlc.Tensor(shape=(1,), data=[128], data_type=INT32)
    for found in (
        q.dequantized(FLOAT32, scale=0.5, bias=128),
        q.dequantized(to=FLOAT32, scale=scale, bias=zero),
        q.dequantized(FLOAT32, scale=scale, zero_point=zero),
    ):
        assert found.descriptor.data_type is FLOAT32
        np.testing.assert_array_equal(found.data, expected)


X = mlc.Tensor(shape=(2, 3), fill_with_data=1)
Q = mlc.Tensor(shape=(2, 3), fill_with_data=1, data_type=INT8)
THREE = mlc.Tensor(shape=(3,), fill_with_data=1)


@pytest.mark.parametrize(
    ("tensor", "method", "arguments", "says"),
    [
        (X, "quantized", {"to": FLOAT16, "scale": 1, "bias": 0}, "not a quantized type"),
        (X, "quantized", {"to": 2, "scale": 1, "bias": 0}, "not a quantized type"),
        (Q, "quantized", {"to": INT8, "scale": 1, "bias": 0}, "the tensor is INT8"),
        (mlc.Tensor(shape=(2,)), "quantized", {"to": INT8, "scale": 1, "bias": 0}, "has no data"),
        (X, "quantized", {"to": INT8, "scale": 0, "bias": 0}, "every scale must be a positive number"),
        (X, "quantized", {"to": INT8, "scale": math.inf, "bias": 0}, "every scale must be a positive number"),
        (X, "quantized", {"to": INT8, "scale": 1, "bias": 0.5}, "bias is the integer"),
        (X, "quantized", {"to": INT8, "scale": 1, "bias": math.nan}, "every bias must be a number"),
        (X, "quantized", {"to": INT8, "scale": THREE, "bias": 0}, "name the axis"),
        (X, "quantized", {"to": INT8, "scale": THREE, "bias": 0, "axis": 0}, "scale has 3 values, axis 0 has 2"),
        (X, "quantized", {"to": INT8, "scale": THREE, "bias": 0, "axis": 2}, "axis is 2, the tensor has 2 axes"),
        (X, "quantized", {"to": INT8, "scale": mlc.Tensor(shape=(1,)), "bias": 0}, "scale has no data"),
        (
            mlc.Tensor(shape=(2,), data=[1, math.nan]),
            "quantized",
            {"to": INT8, "scale": 1, "bias": 0},
            "NaN has no quantized value",
        ),
        (Q, "dequantized", {"to": FLOAT16, "scale": 1, "bias": 0}, "the result is FLOAT32"),
        (X, "dequantized", {"to": FLOAT32, "scale": 1, "bias": 0}, "the tensor is FLOAT32"),
        (Q, "dequantized", {"to": FLOAT32, "scale": 1}, "exactly one of bias and zero_point"),
        (Q, "dequantized", {"to": FLOAT32, "scale": 1, "bias": 0, "zero_point": 0}, "exactly one of bias and"),
        (Q, "dequantized", {"to": FLOAT32, "scale": -1, "bias": 0}, "every scale must be a positive number"),
    ],
)
def test_what_cannot_be_quantized(tensor: mlc.Tensor, method: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises((mlc.DataError, mlc.ShapeError), match=says):
        getattr(tensor, method)(**arguments)
