"""Tensors: every way to make one, its data, copies and optimizer state."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

FLOAT32, FLOAT16, BFLOAT16, INT32, UINT8, INT8 = (
    mlc.DataType.FLOAT32,
    mlc.DataType.FLOAT16,
    mlc.DataType.BFLOAT16,
    mlc.DataType.INT32,
    mlc.DataType.UINT8,
    mlc.DataType.INT8,
)
UNIFORM, XAVIER = mlc.RandomInitializerType.UNIFORM, mlc.RandomInitializerType.XAVIER


# Making one: five families ------------------------------------------------------------------------------------------


IMAGE = {"width": 5, "height": 4, "feature_channel_count": 3, "batch_size": 2}
SEQUENCE = {"sequence_length": 4, "feature_channel_count": 3, "batch_size": 2}
SEQUENCES = {"sequence_lengths": [4, 2], "sorted_sequences": True, "feature_channel_count": 3, "batch_size": 2}
FAMILIES = {
    "descriptor": ({"descriptor": mlc.TensorDescriptor((2, 3))}, (2, 3)),
    "shape": ({"shape": (2, 3)}, (2, 3)),
    "image": (IMAGE, (2, 3, 4, 5)),
    "sequence": (SEQUENCE, (2, 4, 3)),
    "sequences": (SEQUENCES, (2, 4, 3)),
}
each_family = pytest.mark.parametrize(("sizes", "shape"), FAMILIES.values(), ids=FAMILIES)


@each_family
def test_a_tensor_without_data(sizes: dict[str, Any], shape: tuple[int, ...]) -> None:
    tensor = mlc.Tensor(**sizes)
    assert tensor.descriptor.shape == shape
    assert tensor.descriptor.data_type is FLOAT32
    assert tensor.data is None
    assert tensor.device is None
    assert tensor.optimizer_data == []
    assert tensor.optimizer_device_data == []
    assert tensor.has_valid_numerics is True
    assert tensor.synchronize_data() is True


@each_family
def test_data_is_copied_and_shared_data_is_not(sizes: dict[str, Any], shape: tuple[int, ...]) -> None:
    memory = np.arange(math.prod(shape), dtype=np.float32)
    tensor, sharing = (mlc.Tensor(**sizes, **{name: mlc.TensorData(memory)}) for name in ("data", "shared_data"))
    assert tensor.data is not None
    assert tensor.data.shape == sharing.data.shape == shape
    memory[0] = 99
    assert tensor.data.flat[0] == 0
    assert sharing.data.flat[0] == 99


@each_family
def test_every_element_is_filled(sizes: dict[str, Any], shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(mlc.Tensor(**sizes, fill_with_data=2.5).data, np.full(shape, 2.5, np.float32))


@each_family
def test_random_data(sizes: dict[str, Any], shape: tuple[int, ...]) -> None:
    data = mlc.Tensor(**sizes, random_initializer_type=UNIFORM).data
    assert data is not None
    assert data.shape == shape
    assert len(np.unique(data)) > 1


SMALL_IMAGE = {"width": 3, "height": 1, "feature_channel_count": 2, "batch_size": 1}


@pytest.mark.parametrize("sizes", [{"shape": (2, 3)}, SMALL_IMAGE])
def test_the_data_type_is_the_callers(sizes: dict[str, Any]) -> None:
    tensor = mlc.Tensor(**sizes, data=np.arange(6, dtype=np.int32), data_type=INT32)
    assert tensor.descriptor.data_type is INT32
    assert tensor.data is not None
    assert tensor.data.dtype == np.int32
    assert mlc.Tensor(**sizes, fill_with_data=3, data_type=UINT8).data.dtype == np.uint8
    assert mlc.Tensor(**sizes, random_initializer_type=XAVIER, data_type=FLOAT16).data.dtype == np.float16
    assert mlc.Tensor(**sizes, data_type=mlc.DataType.BOOLEAN).descriptor.data_type is mlc.DataType.BOOLEAN


def test_one_length_means_equal_lengths() -> None:
    descriptor = mlc.Tensor(**SEQUENCE).descriptor
    assert descriptor.sequence_lengths == (4, 4)
    assert descriptor.sorted_sequences is True
    assert descriptor.batch_size_per_sequence_step == (2, 2, 2, 2)


def test_lengths_of_their_own() -> None:
    descriptor = mlc.Tensor(**SEQUENCES).descriptor
    assert descriptor.sequence_lengths == (4, 2)
    assert descriptor.batch_size_per_sequence_step == (2, 2, 1, 1)
    unsorted = mlc.Tensor(sequence_lengths=[1, 3], sorted_sequences=False, feature_channel_count=2, batch_size=2)
    assert unsorted.descriptor.shape == (2, 3, 2)
    assert unsorted.descriptor.sorted_sequences is False


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, mlc.ShapeError, "comes from nowhere"),
        ({"shape": (2,), **IMAGE}, mlc.ShapeError, "shape and image sizes"),
        ({"shape": (2,), "batch_size": 2}, mlc.ShapeError, "shape and image sizes"),
        ({"shape": (2,), "sequence_length": 2}, mlc.ShapeError, "shape and sequence_length"),
        ({"width": 2, "height": 2}, mlc.ShapeError, "no shape was given"),
        ({"sequence_length": 2}, mlc.ShapeError, "need batch_size and feature_channel_count"),
        ({**SEQUENCE, "sequence_length": 0}, mlc.ShapeError, "at least 1"),
        ({**SEQUENCE, "sequence_length": 2.5}, mlc.ShapeError, "whole numbers"),
        ({**SEQUENCES, "sequence_lengths": []}, mlc.ShapeError, "empty"),
        ({**SEQUENCES, "sequence_lengths": [2, 4]}, mlc.ShapeError, "not in descending order"),
        ({"shape": (2, 3, 4), "sorted_sequences": True}, mlc.ShapeError, "sorted_sequences without"),
        ({"descriptor": mlc.TensorDescriptor((2,)), "shape": (2,)}, mlc.ShapeError, "descriptor or sizes"),
        ({"descriptor": mlc.TensorDescriptor((2,)), "batch_size": 2}, mlc.ShapeError, "descriptor or sizes"),
        ({"descriptor": mlc.TensorDescriptor((2,)), "data_type": INT32}, mlc.DataError, "the descriptor says FLOAT32"),
        ({"descriptor": (2, 3)}, TypeError, "must be a TensorDescriptor"),
        ({"shape": (2,), "data": [1, 2], "fill_with_data": 0}, mlc.DataError, "at most one of"),
        ({"shape": (2,), "data": [1]}, mlc.DataError, "1 elements were given, 2 are needed"),
        ({"shape": (2,), "data": [1.5, 2], "data_type": INT32}, mlc.DataError, "float64 data for a int32 tensor"),
        ({"shape": (2,), "random_initializer_type": UNIFORM, "data_type": INT8}, mlc.DataError, "need a floating type"),
        ({"shape": (2,), "random_initializer_type": mlc.RandomInitializerType.COUNT}, mlc.DataError, "not a random"),
        ({"shape": (2,), "random_initializer_type": mlc.RandomInitializerType.INVALID}, mlc.DataError, "not a random"),
    ],
)
def test_what_makes_no_tensor(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        mlc.Tensor(**arguments)


# Filling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind", "expected"),
    [
        (7, INT32, 7),
        (7.0, INT32, 7),
        (7, UINT8, 7),
        (-128, INT8, -128),
        (2**53 + 1, mlc.DataType.INT64, 2**53 + 1),
        (True, mlc.DataType.BOOLEAN, True),
        (0, mlc.DataType.BOOLEAN, False),
        (0.1, FLOAT16, np.float16(0.1)),
        (0.1, BFLOAT16, 0.10009765625),
        (70000, BFLOAT16, 70144),
        (np.float32(1.5), FLOAT32, 1.5),
        (math.inf, FLOAT32, math.inf),
        (math.nan, FLOAT16, math.nan),
    ],
)
def test_a_number_is_converted(number: float, kind: mlc.DataType, expected: Any) -> None:
    data = mlc.Tensor(shape=(2, 2), fill_with_data=number, data_type=kind).data
    assert data is not None
    assert data.dtype == kind.numpy
    np.testing.assert_array_equal(data, np.full((2, 2), expected, kind.numpy))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (1.5, INT32),
        (256, UINT8),
        (-1, UINT8),
        (2**31, INT32),
        (math.nan, INT32),
        (math.inf, INT8),
        (2, mlc.DataType.BOOLEAN),
        (70000, FLOAT16),
        (3.4e38, BFLOAT16),
        (1e300, FLOAT32),
    ],
)
def test_a_number_the_type_cannot_hold(number: float, kind: mlc.DataType) -> None:
    with pytest.raises(mlc.DataError, match=f"which no {kind.name} element can hold"):
        mlc.Tensor(shape=(2,), fill_with_data=number, data_type=kind)


@pytest.mark.parametrize("number", ["1", [1.0, 2.0], 1j, np.zeros(2)])
def test_what_is_no_number(number: Any) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        mlc.Tensor(shape=(2,), fill_with_data=number)


# Identity, copies ---------------------------------------------------------------------------------------------------


def test_numbers_and_labels() -> None:
    first, second = mlc.Tensor(shape=(1,)), mlc.Tensor(shape=(1,))
    assert second.tensor_id == first.tensor_id + 1
    assert first.label == f"data{first.tensor_id}"
    first.label = "image"
    assert first.label == "image"
    assert repr(first) == "Tensor('image' float32[1])"


def test_a_copy_has_data_and_state_of_its_own() -> None:
    tensor = mlc.Tensor(shape=(2, 3), fill_with_data=1.0)
    tensor.label = "weights"
    tensor.bind_and_write_data(np.ones((2, 3), np.float32), to=mlc.Device.cpu())
    tensor.bind_optimizer_data([np.full((2, 3), 4, np.float32)])
    copied = copy.copy(tensor)
    assert copied.tensor_id != tensor.tensor_id
    assert copied.label == f"data{copied.tensor_id}"
    assert copied.descriptor == tensor.descriptor
    assert tensor.device is not None
    assert copied.device is None
    assert copied.data is not None
    copied.data = np.full((2, 3), 9)
    assert tensor.data[0, 0] == 1
    (state,) = copied.optimizer_data
    np.testing.assert_array_equal(np.frombuffer(state.bytes, np.float32), 4)
    state.bytes[:4] = b"\0" * 4
    assert np.frombuffer(tensor.optimizer_data[0].bytes, np.float32)[0] == 4
    assert copy.copy(mlc.Tensor(shape=(2,))).data is None


def test_read_only_properties() -> None:
    for name in ("tensor_id", "descriptor", "device", "optimizer_data", "optimizer_device_data"):
        with pytest.raises(AttributeError):
            setattr(mlc.Tensor(shape=(1,)), name, None)


# Data ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "valid"),
    [
        ([1.0, -2.0], FLOAT32, True),
        ([1.0, math.nan], FLOAT32, False),
        ([math.inf, 0.0], FLOAT32, False),
        ([-math.inf, 0.0], FLOAT16, False),
        ([65504.0, 0.0], FLOAT16, True),
        ([math.nan, 0.0], BFLOAT16, False),
        ([3e38, 0.0], BFLOAT16, True),
        ([1, 2], INT32, True),
        ([0, 1], mlc.DataType.BOOLEAN, True),
    ],
)
def test_valid_numerics(values: list[float], kind: mlc.DataType, valid: bool) -> None:
    assert mlc.Tensor(shape=(2,), data=values, data_type=kind).has_valid_numerics is valid


def test_binding_attaches_the_memory() -> None:
    device, memory = mlc.Device.cpu(), np.arange(6, dtype=np.float32)
    tensor = mlc.Tensor(shape=(2, 3))
    assert tensor.bind_and_write_data(mlc.TensorData(memory), to=device) is True
    assert tensor.device is device
    memory[5] = -1
    np.testing.assert_array_equal(tensor.data, [[0, 1, 2], [3, 4, -1]])
    assert tensor.synchronize_data() is True
    with pytest.raises(mlc.DataError, match="5 elements were given, 6 are needed"):
        tensor.bind_and_write_data(np.zeros(5, np.float32), to=device)
    np.testing.assert_array_equal(tensor.data, [[0, 1, 2], [3, 4, -1]])
    with pytest.raises(TypeError, match="to must be a Device"):
        tensor.bind_and_write_data(memory, to=mlc.DeviceType.CPU)  # type: ignore[arg-type]


def test_training_does_not_write_into_read_only_memory() -> None:
    memory = np.ones(2, np.float32)
    memory.flags.writeable = False
    w = mlc.Tensor(shape=(1, 2))
    device = mlc.Device.cpu()
    w.bind_and_write_data(memory, to=device)
    np.testing.assert_array_equal(w.data, [[1, 1]])
    x, t = mlc.Tensor(shape=(1, 2)), mlc.Tensor(shape=(1, 1))
    graph = mlc.TrainingGraph(
        [],
        mlc.LossLayer.mean_squared_error(mlc.ReductionType.SUM),
        mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.25)),
    )
    graph.node(mlc.FullyConnectedLayer(w, None, mlc.ConvolutionDescriptor(input_feature_channel_count=2)), source=x)
    graph.add_inputs({"x": x}, {"t": t})
    graph.compile(device=device)
    graph.execute({"x": [[1.0, 0.0]]}, {"t": [[0.0]]}).wait()
    np.testing.assert_array_equal(w.data, [[0.5, 1]])
    np.testing.assert_array_equal(memory, [1, 1])


def test_copying_the_values_out() -> None:
    tensor = mlc.Tensor(shape=(2, 2), data=[[1.0, 2.0], [3.0, 4.0]])
    target = np.zeros((2, 2), np.float32)
    assert tensor.copy_data_from_device_memory(to_bytes=target, length=16, synchronize_with_device=True) is True
    np.testing.assert_array_equal(target, tensor.data)
    part = bytearray(16)
    tensor.copy_data_from_device_memory(mlc.TensorData(part), 8)
    np.testing.assert_array_equal(np.frombuffer(part, np.float32), [1, 2, 0, 0])
    longer = np.full(6, 9, np.float32)
    tensor.copy_data_from_device_memory(longer)
    np.testing.assert_array_equal(longer, [1, 2, 3, 4, 9, 9])


@pytest.mark.parametrize(
    ("target", "length", "says"),
    [
        (bytearray(8), 12, "length is 12, the tensor has 8 bytes"),
        (bytearray(8), -1, "length is -1"),
        (bytearray(7), None, "the buffer has 7 bytes, 8 are needed"),
        (b"12345678", None, "read-only"),
        (mlc.TensorData(immutable_bytes_no_copy=bytearray(8)), None, "the buffer is read-only"),
        (np.zeros((2, 2), np.float32)[:, 0], None, "not contiguous"),
    ],
)
def test_values_that_cannot_be_copied_out(target: Any, length: int | None, says: str) -> None:
    tensor = mlc.Tensor(shape=(2,), fill_with_data=1)
    with pytest.raises(mlc.DataError, match=says):
        tensor.copy_data_from_device_memory(target, length)


def test_there_is_nothing_to_copy_out_without_data() -> None:
    with pytest.raises(mlc.DataError, match="has no data"):
        mlc.Tensor(shape=(2,)).copy_data_from_device_memory(bytearray(8))


# Optimizer state ----------------------------------------------------------------------------------------------------


def test_optimizer_state_is_the_callers_memory() -> None:
    m, v = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    tensor = mlc.Tensor(shape=(2, 3), fill_with_data=0)
    assert tensor.bind_optimizer_data([mlc.TensorData(m), v], device_data=None) is True
    states = tensor.optimizer_data
    assert [state.length for state in states] == [24, 24]
    states[0].bytes[:4] = np.float32(5).tobytes()
    assert m[0, 0] == 5
    assert tensor.synchronize_optimizer_data() is True
    handles = tensor.optimizer_device_data
    assert len(handles) == 2
    assert isinstance(handles[0], mlc.TensorOptimizerDeviceData)
    assert isinstance(copy.copy(handles[0]), mlc.TensorOptimizerDeviceData)
    assert tensor.bind_optimizer_data(data=[v], device_data=handles[:1]) is True
    assert len(tensor.optimizer_data) == 1


def test_device_handles_are_made_by_the_library() -> None:
    with pytest.raises(TypeError, match="made by the library"):
        mlc.TensorOptimizerDeviceData()


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (np.zeros(5, np.float32), r"bind_optimizer_data\[1\]: 5 elements"),
        (np.zeros((2, 3)), "without a copy"),
        (b"\0" * 24, "read-only"),
    ],
)
def test_state_that_does_not_fit(state: Any, says: str) -> None:
    tensor = mlc.Tensor(shape=(2, 3), fill_with_data=0)
    with pytest.raises(mlc.DataError, match=says):
        tensor.bind_optimizer_data([np.zeros((2, 3), np.float32), state])
    assert tensor.optimizer_data == []


def test_parameters() -> None:
    tensor = mlc.Tensor(shape=(2,), fill_with_data=0)
    parameter = mlc.TensorParameter(tensor)
    assert parameter.tensor is tensor
    assert parameter.is_updatable is True
    parameter.is_updatable = False
    assert parameter.is_updatable is False
    m = np.full(2, 3, np.float32)
    mlc.TensorParameter(tensor=tensor, optimizer_data=[mlc.TensorData(m)])
    np.testing.assert_array_equal(np.frombuffer(tensor.optimizer_data[0].bytes, np.float32), [3, 3])
    with pytest.raises(TypeError, match="needs a Tensor"):
        mlc.TensorParameter(m)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        parameter.tensor = tensor  # type: ignore[misc]


def test_boolean_data_says_what_it_is() -> None:
    """A mask that became 0.0 and 1.0 would be added to the scores of an attention."""
    mask = np.triu(np.ones((3, 3), bool), 1)
    for data in (mask, mask.tolist(), torch.from_numpy(mask)):
        with pytest.raises(mlc.DataError, match=r"(?s)boolean data for a FLOAT32 .*BOOLEAN keeps a mask; .*astype"):
            mlc.Tensor(data=data)
        assert mlc.Tensor(data=data, data_type=mlc.DataType.BOOLEAN).data.sum() == 3
    assert mlc.Tensor(data=np.arange(3)).descriptor.data_type == mlc.DataType.FLOAT32
    graph = mlc.Graph()
    x = graph.input((1, 3, 4), "x")
    with pytest.raises(TypeError, match=r"must be a Tensor, not ndarray; numbers are mlc.Tensor\(data=...\)"):
        graph.attention(x, heads=2, mask=mask)  # type: ignore[arg-type]
    graph.attention(x, heads=2, mask=mlc.Tensor(data=mask, data_type=mlc.DataType.BOOLEAN))
    data = np.random.default_rng(0).normal(size=(1, 3, 4))
    later = data.copy()
    later[:, 1:] += 1
    np.testing.assert_array_equal(graph.predict(data)[:, 0], graph.predict(later)[:, 0])
