"""Quantized tensors: small integers that stand for numbers, by a scale and the integer that stands for 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlcompute.enums import DataType
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Array
from mlcompute.runtime.tensor_state import current_values
from mlcompute.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from mlcompute.tensor import Tensor


def quantized(
    self: Tensor, to: DataType, *, scale: Tensor | float, bias: Tensor | float, axis: int | None = None
) -> Tensor:
    """round(x / scale) + bias, clamped to the range of INT8, UINT8 or INT32; per channel with `axis`."""
    from mlcompute.tensor import Tensor

    who = f"Tensor '{self.label}'.quantized"
    if to not in (DataType.INT8, DataType.UINT8, DataType.INT32):
        raise DataError(f"{who}: {to!r} is not a quantized type", expected="INT8, UINT8 or INT32")
    to = DataType(to)
    x = _numbers(self, who, DataType.FLOAT32)
    if np.isnan(x).any():
        raise DataError(f"{who}: NaN has no quantized value")
    s, b = _factors(self, scale, bias, axis, who)
    if np.any(b != np.rint(b)):
        raise DataError(f"{who}: bias is the integer that stands for 0, not {b.reshape(-1).tolist()}")
    info = np.iinfo(to.numpy.str)
    q = np.clip(np.rint(x.astype(np.float64) / s) + b, info.min, info.max)
    return Tensor(TensorDescriptor(self.descriptor.shape, data_type=to), data=q.astype(to.numpy))


def dequantized(
    self: Tensor,
    to: DataType,
    *,
    scale: Tensor | float,
    bias: Tensor | float | None = None,
    axis: int | None = None,
    zero_point: Tensor | float | None = None,
) -> Tensor:
    """(q - bias) * scale as FLOAT32; `zero_point` is another name of `bias`."""
    from mlcompute.tensor import Tensor

    who = f"Tensor '{self.label}'.dequantized"
    if to != DataType.FLOAT32:
        raise DataError(f"{who}: the result is FLOAT32, not {to!r}")
    if (bias is None) == (zero_point is None):
        raise DataError(f"{who}: give exactly one of bias and zero_point")
    q = _numbers(self, who, DataType.INT8, DataType.UINT8, DataType.INT32)
    s, b = _factors(self, scale, zero_point if bias is None else bias, axis, who)
    return Tensor(shape=self.descriptor.shape, data=((q - b) * s).astype(np.float32))


def _numbers(tensor: Tensor, who: str, *types: DataType) -> Array:
    data = current_values(tensor)
    if data is None:
        raise DataError(f"{who}: the tensor has no data")
    if tensor.descriptor.data_type not in types:
        expected = " or ".join(kind.name for kind in types)
        raise DataError(f"{who}: the tensor is {tensor.descriptor.data_type.name}", expected=expected)
    return data


def _factors(
    tensor: Tensor, scale: Tensor | float, bias: Tensor | float | None, axis: int | None, who: str
) -> tuple[Array, Array]:
    """Scale and bias as arrays that fit the tensor."""
    from mlcompute.tensor import Tensor

    numbers = []
    for name, given in (("scale", scale), ("bias", bias)):
        values = given.data if isinstance(given, Tensor) else given
        if values is None:
            raise DataError(f"{who}: {name} has no data")
        array: Array = np.asarray(values, np.float64).reshape(-1)
        if axis is None and array.size != 1:
            raise ShapeError(f"{who}: {name} has {array.size} values", fix="name the axis they belong to")
        if axis is not None:
            shape = tensor.descriptor.shape
            if not 0 <= axis < len(shape):
                raise ShapeError(f"{who}: axis is {axis}, the tensor has {len(shape)} axes")
            if array.size not in (1, shape[axis]):
                raise ShapeError(f"{who}: {name} has {array.size} values, axis {axis} has {shape[axis]}")
            array = array.reshape([-1 if k == axis else 1 for k in range(len(shape))])
        numbers.append(array)
    if not np.all((numbers[0] > 0) & np.isfinite(numbers[0])):
        raise DataError(f"{who}: every scale must be a positive number")
    if not np.all(np.isfinite(numbers[1])):
        raise DataError(f"{who}: every bias must be a number")
    return numbers[0], numbers[1]
