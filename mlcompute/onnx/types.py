"""Element types: what ONNX has, and what it is carried in here.

Tensors have eight element types and one to eight axes. Types and shapes that lie outside are carried by the nearest
ones: a scalar as one element, nine axes as eight, uint16 as INT32, double as FLOAT32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mlcompute.enums import DataType
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.bfloat16 import is_floating as is_floating_type
from mlcompute.ops.op import Array, Shape
from mlcompute.tensor_descriptor import TensorDescriptor

#: NumPy dtype names of ONNX types -> the dtype values of that type are computed in.
_CARRIED: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float64": np.float32,
    "bfloat16": bfloat16(),
    "float16": np.float16,
    "bool": np.bool_,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int32,
    "uint16": np.int32,
    "int32": np.int32,
    "uint32": np.int64,
    "uint64": np.int64,
    "int64": np.int64,
}

#: Types that only store numbers: constants of them are read into the type beside, exactly; nothing computes in them.
_STORED = {
    "int4": np.int8, "uint4": np.uint8, "int2": np.int8, "uint2": np.uint8, "float4_e2m1fn": np.float32,
    "float8_e4m3fn": np.float32, "float8_e4m3fnuz": np.float32, "float8_e5m2": np.float32,
    "float8_e5m2fnuz": np.float32, "float8_e8m0fnu": np.float32,
}  # fmt: skip

#: Types whose numbers are computed with fewer digits than the model says.
INEXACT = {"float64": "double is computed in float32"}

_MOST = TensorDescriptor.max_tensor_dimensions
#: The axis that carries all that are too many.
_LAST = _MOST - 1

_DATA_TYPES = {kind.numpy: kind for kind in DataType if kind not in (DataType.INVALID, DataType.COUNT)}


class UnknownTypeError(DataError):
    """An element type nothing here can compute with."""


@functools.cache
def carried(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype values of an ONNX type are computed in; a DataError when there is none."""
    found = _CARRIED.get(dtype.name)
    if found is None:
        raise UnknownTypeError(f"elements of type {dtype.name} cannot be computed with", expected=", ".join(_CARRIED))
    return np.dtype(found)


def constant_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype a constant of an ONNX type is computed in: also types that only store numbers have one."""
    stored = _STORED.get(dtype.name)
    return carried(dtype) if stored is None else np.dtype(stored)


@functools.cache
def is_carried(dtype: np.dtype[Any]) -> bool:
    """Can values of this type be computed with?"""
    return dtype.name in _CARRIED


def is_floating(array: Array) -> bool:
    """Could these numbers be a weight's?"""
    return bool(array.size) and is_carried(array.dtype) and is_floating_type(carried(array.dtype))


def numpy_type(element_type: int) -> np.dtype[Any]:
    """The NumPy dtype of an ONNX element type; a DataError for strings and unknown numbers."""
    from onnx import TensorProto, helper

    if element_type == TensorProto.STRING:
        raise UnknownTypeError("strings cannot be computed with")
    try:
        found = np.dtype(helper.tensor_dtype_to_np_dtype(element_type))
    except (KeyError, ValueError):
        raise DataError(f"{element_type} is not an element type of ONNX") from None
    if found.kind == "c":
        raise UnknownTypeError("complex numbers cannot be computed with")
    return found


def element_type(dtype: np.dtype[Any]) -> int:
    """The ONNX element type of a NumPy dtype."""
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(dtype))


def folded_shape(shape: Shape) -> Shape:
    """The shape a tensor of one to eight axes has when it carries a value of any rank, in the same memory order."""
    if not shape:
        return (1,)
    return shape if len(shape) <= _MOST else (*shape[:_LAST], math.prod(shape[_LAST:]))


def unfolded_shape(shape: Shape, now: Shape) -> Shape:
    """The true shape of a value carried with shape `now`: as when it was imported, apart from the batch."""
    if not shape or now == folded_shape(shape):
        return shape
    if len(shape) <= _MOST:
        return now
    last = math.prod(shape[_LAST:])
    if shape[_LAST] * now[_LAST] % last:
        raise ShapeError(f"a value of shape {shape} is carried as {now}, which says nothing of its last axes")
    return (*now[:_LAST], shape[_LAST] * now[_LAST] // last, *shape[_MOST:])


def descriptor_of(shape: Shape, dtype: np.dtype[Any]) -> TensorDescriptor:
    """The descriptor of the tensor that carries values of a shape and an ONNX type."""
    return TensorDescriptor(folded_shape(shape), data_type=_DATA_TYPES[carried(dtype)])


def nbytes(shape: tuple[int, ...], itemsize_in_bits: int, who: str) -> int:
    """Bytes an array takes, in whole numbers of any size: no product can overflow unseen.

    Every size that comes from a file passes through here before anything is allocated.
    """
    count = 1
    for extent in shape:
        if extent < 0:
            raise DataError(f"{who}: an extent is negative", shape=shape)
        count *= extent
    total = (count * itemsize_in_bits + 7) // 8
    if total >= 2**62:
        raise DataError(f"{who}: has more elements than any memory", shape=shape)
    return total
