"""Arrays of other libraries: what DLPack and `__cuda_array_interface__` say of them.

Of memory of a GPU only plain numbers are read here; whoever uses it must have a driver for it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlcompute.errors import DataError
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import Array, Shape

if TYPE_CHECKING:
    from mlcompute.devices.device import Buffer

#: DLPack's numbers for the host's memory, that of NVIDIA's GPUs, and the host's that GPUs read, too.
HOST, CUDA_DEVICE, PINNED_HOST = 1, 2, 3
#: The stream that all others wait for by default, as DLPack and the driver call it.
DEFAULT_STREAM = 1
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}
_BFLOAT = 4
_NAME, _USED = b"dltensor", b"used_dltensor"


@dataclass(eq=False)
class ForeignArray:
    """An array on a GPU, or on the host where NumPy cannot read it.

    strides   in elements
    owner     keeps the memory
    stream    a stream whose work must be done before it is read; None when there is none to wait for
    """

    ordinal: int
    address: int
    shape: Shape
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: object
    stream: int | None = DEFAULT_STREAM


class DeviceArray(NamedTuple):
    """Values in the memory of a device, without gaps."""

    buffer: Buffer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.buffer.nbytes


def is_on_gpu(data: object) -> bool:
    """Does an object have its numbers in the memory of an NVIDIA GPU?"""
    if isinstance(data, (np.ndarray, int, float, list, tuple, bytes, bytearray, memoryview)):
        return False
    device = getattr(data, "__dlpack_device__", None)
    if device is not None:
        try:
            return bool(device()[0] == CUDA_DEVICE)
        except (BufferError, TypeError, ValueError, RuntimeError):
            return False  # nowhere, as PyTorch's meta tensors are: `host_array` refuses it
    return hasattr(data, "__cuda_array_interface__")


def host_array(data: Any) -> Array:
    """Anything array-like on the host as an array, without a copy where possible: `__array__`, DLPack, buffers, lists.

    NumPy's readers do not know the bfloat16 of other libraries; ours does.
    """
    if isinstance(data, np.ndarray) or not hasattr(data, "__dlpack__"):
        return np.asarray(data)
    try:
        return np.asarray(data) if hasattr(data, "__array__") else np.from_dlpack(data)
    except (TypeError, RuntimeError, BufferError):
        found = _bfloat16_on_host(data)
        if found is None:
            raise
        return found


def _bfloat16_on_host(data: Any) -> Array | None:
    """An array of bfloat16 that only DLPack can hand over; None when it is anything else."""
    try:
        device = int(data.__dlpack_device__()[0])
        found = _from_dlpack(data, None) if device in (HOST, PINNED_HOST) else None
    except (AttributeError, BufferError, TypeError, ValueError, RuntimeError):
        return None
    return np.asarray(_Bits(found)).view(found.dtype) if found is not None and is_bfloat16(found.dtype) else None


class _Bits:
    """Elements of two bytes for NumPy to see as whole numbers; keeps their owner."""

    def __init__(self, array: ForeignArray) -> None:
        self._owner = array.owner
        strides = tuple(2 * stride for stride in array.strides)
        self.__array_interface__ = {
            "version": 3, "typestr": "<u2", "shape": array.shape, "strides": strides, "data": (array.address, False),
        }  # fmt: skip


def foreign_array(data: Any, who: str) -> ForeignArray:
    """Where an array on a GPU lies. What its library still has to do is in the default stream from now on."""
    try:
        if hasattr(data, "__dlpack__"):
            return _from_dlpack(data, DEFAULT_STREAM)
        return _from_interface(data)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{who}: {type(data).__name__} on a GPU cannot be read", reason=error) from error


def _from_interface(data: Any) -> ForeignArray:
    facts = data.__cuda_array_interface__
    shape, dtype = tuple(facts["shape"]), np.dtype(facts["typestr"])
    strides = facts.get("strides")
    counted = _dense(shape) if strides is None else tuple(stride // dtype.itemsize for stride in strides)
    stream = facts.get("stream", DEFAULT_STREAM)
    ordinal = getattr(getattr(data, "device", None), "id", 0)
    return ForeignArray(ordinal, facts["data"][0], shape, counted, dtype, data, stream)


# DLPack ---------------------------------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))


_python = ctypes.pythonapi
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _python))


class _Owner:
    """Owns a DLManagedTensor."""

    def __init__(self, capsule: object) -> None:
        self.address = _pointer(capsule, _NAME)
        _rename(capsule, _USED)  # the capsule does not free it any more
        self.managed = _Managed.from_address(self.address)

    def __del__(self) -> None:
        managed = getattr(self, "managed", None)
        if managed is not None and managed.deleter:
            managed.deleter(self.address)


def _from_dlpack(data: Any, stream: int | None) -> ForeignArray:
    owner = _Owner(data.__dlpack__() if stream is None else data.__dlpack__(stream=stream))
    tensor = owner.managed.tensor
    is_bfloat = (tensor.code, tensor.bits) == (_BFLOAT, 16)
    kind = _KINDS.get(tensor.code)
    if (kind is None and not is_bfloat) or tensor.lanes != 1:
        raise TypeError("its elements are neither booleans, whole numbers, bfloat16 nor float16 to float64")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _dense(shape)
    dtype = bfloat16() if is_bfloat else np.dtype(f"{kind}{tensor.bits // 8}")
    return ForeignArray(tensor.device_id, (tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, owner)


# To others ------------------------------------------------------------------------------------------------------------

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
# With plain addresses: a capsule that is being destroyed must not be referred to again.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_held_by = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
#: What was handed out and not given back, by the address of its description.
_exported: dict[int, object] = {}


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _forget_unused(capsule: int) -> None:
    """A capsule goes; if nobody took its tensor, that goes, too."""
    if _is_valid(capsule, _NAME):
        _exported.pop(_held_by(capsule, _NAME), None)


_give_back = _DELETER(_forget)
_destroyed = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget_unused)


def exported_from_host(array: Array) -> Any:
    """An array on the host as a DLPack capsule, of the receiver's own from now on. NumPy has none of bfloat16."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return exported(ForeignArray(0, array.ctypes.data, array.shape, strides, array.dtype, array), HOST)


def exported(array: ForeignArray, device: int = CUDA_DEVICE) -> Any:
    """An array as a DLPack capsule, which keeps its owner until the receiver is done with it."""
    rank = len(array.shape)
    extents, strides = (ctypes.c_int64 * max(rank, 1))(*array.shape), (ctypes.c_int64 * max(rank, 1))(*array.strides)
    codes = {kind: code for code, kind in _KINDS.items()}
    code = _BFLOAT if is_bfloat16(array.dtype) else codes[array.dtype.kind]
    tensor = _Tensor(
        array.address, device, array.ordinal, rank, code, 8 * array.dtype.itemsize, 1, extents, strides, 0,
    )  # fmt: skip
    managed = _Managed(tensor, None, _give_back)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, extents, strides, array.owner)
    return _new(address, _NAME, ctypes.cast(_destroyed, ctypes.c_void_p))


def _dense(shape: Shape) -> tuple[int, ...]:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))
