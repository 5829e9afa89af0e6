"""Tensors and other libraries' arrays: values as of now, and memory shared by name."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.nets import needs_shared_memory


def parameter() -> mlc.Tensor:
    return mlc.Tensor(shape=(2, 3), data=np.arange(6, dtype=np.float32).reshape(2, 3))


def test_numpy_reads_the_values_as_they_are_now() -> None:
    tensor = parameter()
    seen = np.asarray(tensor)
    with pytest.raises(ValueError, match="read-only"):
        seen[0, 0] = 7
    mine = np.array(tensor)
    mine[0, 0] = 7
    tensor.data = mine
    assert seen[0, 0] == 0
    assert tensor.data[0, 0] == 7
    assert np.asarray(tensor, np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.from_dlpack(tensor), tensor.data)


@pytest.mark.skipif(int(np.__version__.split(".")[0]) < 2, reason="copy=False means something from NumPy 2 on")
def test_memory_is_not_handed_out() -> None:
    # np.asarray asks for the buffer first, which is read-only; classes have one from Python 3.12 on.
    for ask, error in ((mlc.Tensor.__array__, ValueError), (np.from_dlpack, BufferError)):
        with pytest.raises(error, match=r"cannot be had without a copy; .* Tensor\(shared_data=array\)"):
            ask(parameter(), copy=False)  # type: ignore[operator]


def test_torch_gets_a_copy_of_its_own() -> None:
    tensor = parameter()
    seen = torch.from_dlpack(tensor)
    seen += 1
    np.testing.assert_array_equal(tensor.data, np.arange(6).reshape(2, 3))
    tensor.data = seen
    np.testing.assert_array_equal(tensor.data, np.arange(6).reshape(2, 3) + 1)


def test_torch_writes_what_the_next_run_reads() -> None:
    needs_shared_memory(mlc.Device.cpu())
    x = mlc.Tensor(shape=(1, 3))
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    weights = mlc.Tensor(shape=(2, 3), shared_data=values)
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph = mlc.InferenceGraph()
    graph.node(mlc.FullyConnectedLayer(weights, None, sizes), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    ones = np.ones((1, 3), np.float32)
    assert graph.execute({"x": ones}).result.data.tolist() == [[3, 12]]
    values.fill_(2)
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


def test_the_buffer_is_read_only() -> None:
    assert parameter().__buffer__(0).readonly


def test_without_data() -> None:
    empty = mlc.Tensor(shape=(2,))
    for ask in (np.asarray, torch.from_dlpack):
        with pytest.raises(mlc.DataError, match="has no data"):
            ask(empty)  # type: ignore[operator]
