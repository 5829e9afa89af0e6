"""Arrays of other libraries in the memory of a GPU: what DLPack and `__cuda_array_interface__` say of them.

Only plain numbers are read here; whoever uses the memory must have a driver for it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlcompute.errors import DataError
from mlcompute.ops.op import Shape

if TYPE_CHECKING:
    from mlcompute.devices.device import Buffer

#: DLPack's number for the memory of NVIDIA's GPUs.
CUDA_DEVICE = 2
#: The stream that all others wait for by default, as DLPack and the driver call it.
DEFAULT_STREAM = 1
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}
_NAME, _USED = b"dltensor", b"used_dltensor"


@dataclass(eq=False)
class ForeignArray:
    """An array on a GPU.

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


class Lying(NamedTuple):
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
        return bool(device()[0] == CUDA_DEVICE)
    return hasattr(data, "__cuda_array_interface__")


def foreign_array(data: Any, who: str) -> ForeignArray:
    """Where an array on a GPU lies. What its library still has to do is in the default stream from now on."""
    try:
        if hasattr(data, "__dlpack__"):
            return _from_dlpack(data)
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


def _from_dlpack(data: Any) -> ForeignArray:
    owner = _Owner(data.__dlpack__(stream=DEFAULT_STREAM))
    tensor = owner.managed.tensor
    kind = _KINDS.get(tensor.code)
    if kind is None or tensor.lanes != 1:
        raise TypeError("its elements are neither booleans, whole numbers nor float16 to float64")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _dense(shape)
    dtype = np.dtype(f"{kind}{tensor.bits // 8}")
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


def exported(array: ForeignArray) -> Any:
    """An array on a GPU as a DLPack capsule, which keeps its owner until the receiver is done with it."""
    rank = len(array.shape)
    extents, strides = (ctypes.c_int64 * max(rank, 1))(*array.shape), (ctypes.c_int64 * max(rank, 1))(*array.strides)
    codes = {kind: code for code, kind in _KINDS.items()}
    tensor = _Tensor(
        array.address, CUDA_DEVICE, array.ordinal, rank, codes[array.dtype.kind], 8 * array.dtype.itemsize, 1,
        extents, strides, 0,
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
