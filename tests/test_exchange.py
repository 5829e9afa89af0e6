"""Tensors and other libraries' arrays: the same memory, both ways."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import mlcompute as mlc


def parameter() -> mlc.Tensor:
    return mlc.Tensor(shape=(2, 3), data=np.arange(6, dtype=np.float32).reshape(2, 3))


def test_numpy_shares_the_memory() -> None:
    tensor = parameter()
    seen = np.asarray(tensor)
    assert np.shares_memory(seen, tensor.data)
    seen[0, 0] = 7
    assert tensor.data[0, 0] == 7
    assert not np.shares_memory(np.array(tensor), tensor.data)
    assert np.asarray(tensor, np.float64).dtype == np.float64
    assert np.shares_memory(np.from_dlpack(tensor), tensor.data)


@pytest.mark.skipif(int(np.__version__.split(".")[0]) < 2, reason="copy=False means something from NumPy 2 on")
def test_a_conversion_is_a_copy() -> None:
    with pytest.raises(ValueError, match=r"is float32; as float64 it needs a copy"):
        np.asarray(parameter(), np.float64, copy=False)


def test_torch_shares_the_memory() -> None:
    tensor = parameter()
    seen = torch.from_dlpack(tensor)
    seen += 1
    np.testing.assert_array_equal(tensor.data, np.arange(6).reshape(2, 3) + 1)


def test_torch_writes_what_the_next_run_reads() -> None:
    x = mlc.Tensor(shape=(1, 3))
    weights = parameter()
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph = mlc.InferenceGraph()
    graph.node(mlc.FullyConnectedLayer(weights, None, sizes), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    ones = np.ones((1, 3), np.float32)
    assert graph.execute({"x": ones}).result.data.tolist() == [[3, 12]]
    torch.from_dlpack(weights).fill_(2)
    assert graph.execute({"x": torch.ones(1, 3)}).result.data.tolist() == [[6, 6]]
    assert torch.from_dlpack(graph.execute({"x": ones}).result).tolist() == [[6, 6]]


def test_jax_reads_it() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    tensor = parameter()
    np.testing.assert_array_equal(np.asarray(jax.numpy.asarray(tensor)), tensor.data)
    np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(tensor)), tensor.data)
    again = mlc.Tensor(shape=(2, 3), data=jax.numpy.ones((2, 3)))
    assert (again.data == 1).all()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python asks classes for buffers from 3.12 on")
def test_memoryview() -> None:
    assert memoryview(parameter()).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_buffer_is_the_memory() -> None:
    tensor = parameter()
    assert np.shares_memory(np.asarray(tensor.__buffer__(0)), tensor.data)


def test_without_data() -> None:
    empty = mlc.Tensor(shape=(2,))
    for ask in (np.asarray, torch.from_dlpack):
        with pytest.raises(mlc.DataError, match="has no data"):
            ask(empty)  # type: ignore[operator]
