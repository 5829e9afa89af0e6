"""Memory handed in by the caller, and how array-likes become arrays."""

from __future__ import annotations

import array
import gc
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.tensor_data import read_array, write_target

F32 = mlc.TensorDescriptor((2, 3))


# TensorData ---------------------------------------------------------------------------------------------------------


def test_it_is_the_callers_memory() -> None:
    memory = np.zeros((2, 3), np.float32)
    data = mlc.TensorData(memory)
    assert data.length == 24
    assert data.is_writable
    data.bytes[:4] = np.float32(5).tobytes()
    assert memory[0, 0] == 5
    memory[1, 2] = 7
    assert bytes(data.bytes[20:]) == np.float32(7).tobytes()
    assert repr(data) == "TensorData(24 bytes)"


@pytest.mark.parametrize(
    "memory", [bytearray(8), memoryview(bytearray(8)), array.array("d", [1.0]), np.zeros((2, 2), np.float16)]
)
def test_anything_with_a_writable_buffer_will_do(memory: Any) -> None:
    data = mlc.TensorData(bytes_no_copy=memory, length=6)
    assert data.length == 6
    assert len(data.bytes) == 6
    data.bytes[:] = b"abcdef"
    assert bytes(memoryview(memory).cast("B")[:6]) == b"abcdef"


def test_a_buffer_may_be_empty() -> None:
    assert mlc.TensorData(np.zeros((0, 3), np.float32)).length == 0
    assert mlc.TensorData(bytearray(4), 0).length == 0


def test_immutable_memory_is_only_read() -> None:
    data = mlc.TensorData(immutable_bytes_no_copy=b"12345678", length=4)
    assert bytes(data.bytes) == b"1234"
    assert data.length == 4
    assert not data.is_writable
    assert repr(data) == "TensorData(4 bytes, immutable)"
    with pytest.raises(TypeError):
        data.bytes[0] = 1
    writable = np.zeros(2, np.float32)
    assert not mlc.TensorData(immutable_bytes_no_copy=writable).is_writable


def test_the_deallocator_runs_once_when_the_object_goes() -> None:
    calls: list[tuple[bytes, int]] = []
    data = mlc.TensorData(
        bytes_no_copy=bytearray(b"weights!"), length=7, deallocator=lambda view, n: calls.append((bytes(view), n))
    )
    assert data.length == 7
    gc.collect()
    assert calls == []
    del data
    gc.collect()
    assert calls == [(b"weights", 7)]
    mlc.TensorData(bytearray(), 0, deallocator=lambda view, n: calls.append((bytes(view), n)))
    gc.collect()
    assert calls[1:] == [(b"", 0)]


def test_the_deallocator_waits_for_a_tensor_that_uses_the_memory() -> None:
    memory, calls = bytearray(np.float32([1, 2, 3]).tobytes()), []
    data = mlc.TensorData(memory, 12, deallocator=lambda *_: calls.append(1))
    tensor = mlc.Tensor(shape=(3,), shared_data=data, data_type=mlc.DataType.FLOAT32)
    del data
    gc.collect()
    assert calls == [], "the tensor still reads this memory"
    assert tensor.data is not None
    del tensor
    gc.collect()
    assert calls == [1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "exactly one of"),
        ({"bytes_no_copy": bytearray(4), "immutable_bytes_no_copy": b"1234"}, "exactly one of"),
        ({"bytes_no_copy": 5}, "int exports no memory"),
        ({"bytes_no_copy": "text"}, "str exports no memory"),
        ({"bytes_no_copy": b"1234"}, "read-only memory"),
        ({"bytes_no_copy": np.zeros((4, 4))[:, ::2]}, "not contiguous"),
        ({"bytes_no_copy": np.zeros((3, 4)).T}, "not contiguous"),
        ({"bytes_no_copy": bytearray(4), "length": 5}, "length is 5, the buffer has 4 bytes"),
        ({"bytes_no_copy": bytearray(4), "length": -1}, "length is -1"),
    ],
)
def test_memory_that_cannot_be_used(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(mlc.DataError, match=says):
        mlc.TensorData(**arguments)


# Reading ------------------------------------------------------------------------------------------------------------


class OnlyDLPack:
    """A tensor of a library that speaks DLPack and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class OnlyArray:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values


NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "given",
    [
        NUMBERS,
        NUMBERS.reshape(-1),
        mlc.TensorData(NUMBERS),
        OnlyDLPack(NUMBERS),
        OnlyArray(NUMBERS),
        memoryview(NUMBERS),
        torch.from_numpy(NUMBERS),
    ],
    ids=["array", "flat", "TensorData", "DLPack", "__array__", "buffer", "torch"],
)
def test_right_layout_and_dtype_need_no_copy(given: Any) -> None:
    found = read_array(given, F32, "x")
    np.testing.assert_array_equal(found, NUMBERS)
    assert found.dtype == np.float32
    assert np.shares_memory(found, NUMBERS)


@pytest.mark.parametrize(
    "given",
    [
        NUMBERS.tolist(),
        tuple(range(6)),
        NUMBERS.astype(np.float64),
        NUMBERS.astype(np.float16),
        NUMBERS.astype(np.int64),
        NUMBERS.astype(np.uint8),
        np.asfortranarray(NUMBERS),
        NUMBERS.tobytes(),
        bytearray(NUMBERS.tobytes()),
        array.array("f", range(6)),
        torch.arange(6, dtype=torch.float64).reshape(2, 3),
    ],
)
def test_the_rest_is_converted(given: Any) -> None:
    found = read_array(given, F32, "x")
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, NUMBERS)


def test_only_a_tensor_data_may_be_longer() -> None:
    longer = np.concatenate([NUMBERS, NUMBERS + 10])
    np.testing.assert_array_equal(read_array(mlc.TensorData(longer), F32, "x"), NUMBERS)
    for given in (longer, longer.reshape(-1), np.arange(9.0), NUMBERS.tobytes() + b"more", longer.tolist()):
        with pytest.raises(mlc.DataError):
            read_array(given, F32, "x")


def test_a_smaller_batch_needs_less() -> None:
    np.testing.assert_array_equal(read_array(NUMBERS[:1], F32, "x", batch_size=1), NUMBERS[:1])
    for given in (NUMBERS, NUMBERS.reshape(-1), NUMBERS.reshape(2, 1, 3)):  # a buffer of the full size, used in part
        np.testing.assert_array_equal(read_array(given, F32, "x", batch_size=1), NUMBERS[:1])
    with pytest.raises(mlc.DataError):
        read_array(np.zeros((3, 3), np.float32), F32, "x", batch_size=1)


def test_axes_of_extent_1_do_not_matter() -> None:
    image = mlc.TensorDescriptor((2, 3, 1, 1))
    assert read_array(NUMBERS, image, "x").shape == (2, 3, 1, 1)
    biases = mlc.TensorDescriptor((1, 6, 1, 1))
    assert read_array(NUMBERS.reshape(6, 1), biases, "b").shape == (1, 6, 1, 1)
    assert read_array(3.0, mlc.TensorDescriptor((1, 1)), "x").shape == (1, 1)


@pytest.mark.parametrize(
    ("given", "shape", "kind", "says"),
    [
        (np.zeros(5), (2, 3), "FLOAT32", "5 elements were given, 6 are needed"),
        (b"\0" * 20, (2, 3), "FLOAT32", "5 elements were given, 6 are needed"),
        (np.zeros((3, 2)), (2, 3), "FLOAT32", "does not fit the tensor"),
        (np.zeros((1, 3)), (2, 3), "FLOAT32", "the shape of the data does not fit"),
        (np.zeros((2, 3), complex), (2, 3), "FLOAT32", "complex128 cannot be used"),
        (np.array(["a"]), (1,), "FLOAT32", "cannot be used"),
        (None, (1,), "FLOAT32", "cannot be used"),
        ([[1.0], [2.0, 3.0]], (3,), "FLOAT32", "cannot be read as an array"),
        (np.float32([1.0]), (1,), "INT32", "float32 data for a int32 tensor"),
        ([1.5], (1,), "INT32", "float64 data for a int32 tensor"),
        ([float("nan")], (1,), "INT32", "float64 data for a int32 tensor"),
        (np.int64([2**40]), (1,), "INT32", "do not fit into int32"),
        (np.int32([-1]), (1,), "UINT8", "int32 data for a uint8 tensor"),
        (np.uint8([1]), (1,), "BOOLEAN", "uint8 data for a bool tensor"),
        (torch.ones(1, requires_grad=True), (1,), "FLOAT32", "Tensor cannot be read as an array"),
        (torch.ones(1, device="meta"), (1,), "FLOAT32", "Tensor cannot be read as an array"),
    ],
)
def test_data_that_does_not_fit(given: Any, shape: tuple[int, ...], kind: str, says: str) -> None:
    descriptor = mlc.TensorDescriptor(shape, data_type=mlc.DataType[kind])
    with pytest.raises(mlc.DataError, match=says) as caught:
        read_array(given, descriptor, "'x'")
    assert str(caught.value).startswith("'x': ")


@pytest.mark.parametrize(
    ("given", "kind", "expected"),
    [
        ([1.0, 2.0], "INT32", [1, 2]),
        ([0, 1], "BOOLEAN", [False, True]),
        (np.int64([2**31 - 1, -(2**31)]), "INT32", [2**31 - 1, -(2**31)]),
        (np.array([True, False]), "FLOAT32", [1, 0]),
        ([float("nan"), float("inf")], "FLOAT16", [np.nan, np.inf]),
    ],
)
def test_conversions_that_keep_the_numbers(given: Any, kind: str, expected: list[Any]) -> None:
    descriptor = mlc.TensorDescriptor((2,), data_type=mlc.DataType[kind])
    np.testing.assert_array_equal(read_array(given, descriptor, "x"), expected)


def test_a_dlpack_object_that_fails_says_so() -> None:
    class Elsewhere(OnlyDLPack):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("on another device")

    with pytest.raises(mlc.DataError, match="Elsewhere cannot be read") as caught:
        read_array(Elsewhere(NUMBERS), F32, "x")
    assert "on another device" in str(caught.value)


# Writing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: a.reshape(-1), mlc.TensorData, torch.from_numpy, memoryview])
def test_results_go_into_the_callers_memory(wrap: Any) -> None:
    memory = np.zeros((2, 3), np.float32)
    write_target(wrap(memory), F32, "y")[...] = NUMBERS
    np.testing.assert_array_equal(memory, NUMBERS)


def test_a_bytearray_can_receive_results() -> None:
    memory = bytearray(24)
    write_target(memory, F32, "y")[...] = NUMBERS
    assert bytes(memory) == NUMBERS.tobytes()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (b"\0" * 24, "read-only"),
        (mlc.TensorData(immutable_bytes_no_copy=bytearray(24)), "read-only"),
        (np.zeros((2, 3)), "without a copy"),
        (np.zeros((3, 2), np.float32).T, "without a copy"),
        ([0.0] * 6, "without a copy"),
        (np.zeros(5, np.float32), "5 elements"),
    ],
)
def test_memory_that_cannot_receive_results(given: Any, says: str) -> None:
    with pytest.raises(mlc.DataError, match=says):
        write_target(given, F32, "y")


def test_functions_of_numpy_read_the_values() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor: Any = mlc.Tensor(data=values)
    for name in ("mean", "sum", "max", "min", "var", "std", "transpose", "median", "exp", "size", "shape"):
        found, wanted = getattr(np, name)(tensor), getattr(np, name)(values)
        assert type(found) is type(wanted), name
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.sum(tensor, axis=1, keepdims=True), values.sum(1, keepdims=True))
    np.testing.assert_array_equal(np.concatenate([tensor, values]), np.concatenate([values, values]))
    np.testing.assert_array_equal(np.einsum("ij,kj->ik", tensor, tensor), values @ values.T)
    assert np.shape(mlc.Tensor(shape=(4, 5))) == (4, 5), "known without values"
