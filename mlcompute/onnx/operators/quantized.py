"""Operators on 8-bit numbers, computed in float32: every product and sum that fits 24 bits is exact."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.operators.matmul_and_convolution import convolved, product, with_bias
from mlcompute.onnx.operators.windows import pads_of, spatial
from mlcompute.onnx.rows import Call, NotImportedError, front, operator
from mlcompute.onnx.types import carried, numpy_type
from mlcompute.ops.op import FLOAT32, Value

INT32 = np.dtype(np.int32)


def _along(values: Value, x: Value, axis: int, block: int = 0) -> Value:
    """Scales or zero points as they broadcast over x: one for all, one per index of an axis, or one per block."""
    if block:
        repeated = ops.reshape(values, (*values.shape[: axis + 1], 1, *values.shape[axis + 1 :]))
        wide = ops.broadcast(repeated, (*values.shape[: axis + 1], block, *values.shape[axis + 1 :]))
        flat = (*values.shape[:axis], values.shape[axis] * block, *values.shape[axis + 1 :])
        return ops.slice_axis(ops.reshape(wide, flat), axis, 0, x.shape[axis])
    if values.size == 1:
        return ops.reshape(values, ())
    if values.rank != 1 or values.shape[0] != x.shape[axis]:
        raise ShapeError(f"scales {values.shape} do not fit axis {axis} of {x.shape}")
    return ops.reshape(values, (values.shape[0], *(1,) * (x.rank - axis - 1)))


def limits(dtype: np.dtype[Any], kind: str) -> tuple[float, float]:
    """The least and the greatest number of a quantized type."""
    if dtype.name not in ("int8", "uint8", "int16", "uint16"):
        raise NotImportedError(f"{kind} to {dtype.name}")
    info = np.iinfo(dtype.str)
    return float(info.min), float(info.max)


def _quantized_type(call: Call, index: int) -> np.dtype[Any]:
    """The type of the zero point as the model has it, or as the attribute says.

    A zero point of 8 bits may be computed; others are carried in wider types, and theirs must be known.
    """
    if call.has(index):
        carried_in = call[index].dtype
        return carried_in if carried_in.itemsize == 1 and call.known(index) is None else call.array(index).dtype
    given = call.attribute("output_dtype", 0)
    return numpy_type(given) if given else np.dtype(np.uint8)


def _axis(call: Call, x: Value, scale: Value) -> int:
    return front(call.attribute("axis", 1), x.rank, call.kind) if scale.size > 1 else 0


def quantize(x: Value, scale: Value, zero: Value | None, dtype: np.dtype[Any], kind: str) -> Value:
    """round(x / scale) + zero, within the range of the type; no gradient flows."""
    low, high = limits(dtype, kind)
    y = ops.round_(ops.convert(x, FLOAT32) / scale)
    if zero is not None:
        y = y + ops.convert(zero, FLOAT32)
    return ops.convert(ops.minimum(ops.maximum(y, low), high), carried(dtype))


@operator("QuantizeLinear", trains=False, frozen=(1,), note="to 8 and 16 bits; no gradient flows")
def quantize_linear(call: Call) -> Value:
    x, scale, zero = call[0], call[1], call.optional(2)
    dtype = _quantized_type(call, 2)
    axis, block = _axis(call, x, scale), call.attribute("block_size", 0)
    scale = ops.convert(_along(scale, x, axis, block), FLOAT32)
    return quantize(x, scale, None if zero is None else _along(zero, x, axis, block), dtype, call.kind)


@operator("DequantizeLinear", frozen=(1,), note="from 8, 16 and 32 bits")
def dequantize_linear(call: Call) -> Value:
    x, scale, zero = call[0], call[1], call.optional(2)
    axis, block = _axis(call, x, scale), call.attribute("block_size", 0)
    wide = scale.dtype if scale.dtype.itemsize > 2 else FLOAT32
    y = ops.convert(x, wide)
    if zero is not None:
        y = y - ops.convert(_along(zero, x, axis, block), wide)
    return ops.convert(y * ops.convert(_along(scale, x, axis, block), wide), scale.dtype)


def _shifted(x: Value, zero: Value | None, rows: bool | None = None) -> Value:
    """x - zero in float32; a zero point per row or per column broadcasts along the other axis."""
    wide = ops.convert(x, FLOAT32)
    if zero is None:
        return wide
    zero = ops.convert(zero, FLOAT32)
    if zero.rank == 1 and zero.size > 1 and rows:
        zero = ops.reshape(zero, (zero.size, 1))
    return wide - (ops.reshape(zero, ()) if zero.size == 1 else zero)


@operator("MatMulInteger", trains=False)
def matmul_integer(call: Call) -> Value:
    a, b = _shifted(call[0], call.optional(2), True), _shifted(call[1], call.optional(3), False)
    return ops.convert(product(a, b), INT32)


@operator("QLinearMatMul", trains=False, frozen=(1, 4, 6))
def qlinear_matmul(call: Call) -> Value:
    a, b = _shifted(call[0], call[2], True), _shifted(call[3], call[5], False)
    scales = []
    for index, rows in ((1, True), (4, False)):
        scale = ops.convert(call[index], FLOAT32)
        scales.append(ops.reshape(scale, (scale.size, 1)) if rows and scale.size > 1 else scale)
    y = product(a * scales[0], b * scales[1])
    return quantize(y, ops.convert(call[6], FLOAT32), call[7], _quantized_type(call, 7), call.kind)


def _integer_convolution(call: Call, x: Value, w: Value) -> Value:
    rank = x.rank - 2
    strides, dilations = spatial(call, "strides", rank), spatial(call, "dilations", rank)
    begin, end = pads_of(call, x.shape[2:], tuple(w.shape[2:]), strides, dilations)
    return convolved(x, w, strides, dilations, begin, end, call.attribute("group", 1))


@operator("ConvInteger", trains=False)
def conv_integer(call: Call) -> Value:
    w_zero = call.optional(3)
    w = _shifted(call[1], None if w_zero is None else _per_output(w_zero, call[1]))
    return ops.convert(_integer_convolution(call, _shifted(call[0], call.optional(2)), w), INT32)


def _per_output(values: Value, w: Value) -> Value:
    return values if values.size == 1 else ops.reshape(values, (values.size, *(1,) * (w.rank - 1)))


@operator("QLinearConv", trains=False, frozen=(1, 4, 6))
def qlinear_conv(call: Call) -> Value:
    x = _shifted(call[0], call[2])
    w = _shifted(call[3], _per_output(call[5], call[3]))
    total = _integer_convolution(call, x, w)
    bias = call.optional(8)
    total = with_bias(total, None if bias is None else ops.convert(bias, FLOAT32))
    w_scale, x_scale = ops.convert(call[4], FLOAT32), ops.convert(call[1], FLOAT32)
    scale = ops.reshape(x_scale, ()) * (
        ops.reshape(w_scale, ()) if w_scale.size == 1 else ops.reshape(w_scale, (w_scale.size, *(1,) * (x.rank - 2)))
    )
    y_scale = ops.reshape(ops.convert(call[6], FLOAT32), ())
    return quantize(total * scale, y_scale, call[7], _quantized_type(call, 7), call.kind)
