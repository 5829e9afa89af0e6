"""Normalization and dropout."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.operands import Use
from mlcompute.onnx.operators.shapes import padded
from mlcompute.onnx.rows import Call, NotImportedError, front, operator
from mlcompute.onnx.types import carried, numpy_type
from mlcompute.ops.op import FLOAT32, Value


def per_channel(x: Value, values: Value) -> Value:
    """(C,) as it broadcasts over (N, C, *)."""
    return ops.reshape(values, (values.size, *(1,) * (x.rank - 2)))


def _in_float32(x: Value) -> Value:
    return ops.convert(x, FLOAT32) if x.dtype.itemsize < 4 else x


def _trains(attributes: Mapping[str, Any], version: int) -> bool:
    """Does the model say that the statistics of each batch are used?"""
    return bool(attributes.get("training_mode") or (version < 7 and not attributes.get("is_test")))


def _of_each_batch(use: Use) -> str:
    """What is exported for training gives other predictions than people expect, and no option changes that."""
    if not _trains(use.attributes, use.version):
        return ""
    return (
        "training_mode=1 is followed literally, whatever batch_norm says: the statistics of each batch, in predictions "
        "too, and running ones that never change; export the model for inference"
    )


@operator("BatchNormalization", frozen=(3, 4), weights=(1, 2, 3, 4), caution=_of_each_batch)
def batch_normalization(call: Call) -> Value | tuple[Value, ...]:
    x, scale, bias = call[0], call[1], call[2]
    mean, variance = call[3], call[4]
    epsilon, momentum = call.attribute("epsilon", 1e-5), call.attribute("momentum", 0.9)
    if x.rank < 2:
        raise ShapeError(f"BatchNormalization: {x.shape} has no channels")
    if call.version < 9 and not call.attribute("spatial", 1):
        raise NotImportedError("BatchNormalization with spatial=0")
    if not _trains(call.attributes, call.version):
        slope = per_channel(x, scale * ops.rsqrt(variance + epsilon))
        return (x - per_channel(x, mean)) * slope + per_channel(x, bias)
    axes = (0, *range(2, x.rank))
    normalized, m, v = ops.normalize(x, axes, epsilon)
    y = normalized * per_channel(x, scale) + per_channel(x, bias)
    m, v = ops.reshape(m, mean.shape), ops.reshape(v, variance.shape)
    return y, mean * momentum + m * (1.0 - momentum), variance * momentum + v * (1.0 - momentum)


@operator("InstanceNormalization", weights=(1, 2))
def instance_normalization(call: Call) -> Value:
    x = call[0]
    normalized, _, _ = ops.normalize(x, range(2, x.rank), call.attribute("epsilon", 1e-5))
    return normalized * per_channel(x, call[1]) + per_channel(x, call[2])


def _last_axes(call: Call, x: Value) -> tuple[int, ...]:
    return tuple(range(front(call.attribute("axis", -1), x.rank, call.kind), x.rank))


def _stash(call: Call, x: Value) -> Value:
    """The value in the type the model wants statistics in."""
    to = carried(numpy_type(call.attribute("stash_type", 1)))
    return ops.convert(x, to) if x.dtype.itemsize < to.itemsize else x


@operator("LayerNormalization", weights=(1, 2))
def layer_normalization(call: Call) -> tuple[Value, ...]:
    x = _stash(call, call[0])
    epsilon = call.attribute("epsilon", 1e-5)
    normalized, mean, variance = ops.normalize(x, _last_axes(call, x), epsilon)
    y = ops.convert(normalized, call[0].dtype) * call[1]
    if call.has(2):
        y = y + call[2]
    return (y, mean, ops.rsqrt(variance + epsilon))[: call.output_count]


@operator("RMSNormalization", weights=(1,))
def rms_normalization(call: Call) -> Value:
    x = _stash(call, call[0])
    scale = ops.rsqrt(ops.mean(x * x, _last_axes(call, x)) + call.attribute("epsilon", 1e-5))
    return ops.convert(x * scale, call[0].dtype) * call[1]


@operator("GroupNormalization", weights=(1, 2))
def group_normalization(call: Call) -> Value:
    x = call[0]
    groups, channels = call.attribute("num_groups"), x.shape[1]
    if not groups or channels % groups:
        raise ShapeError(f"GroupNormalization: {channels} channels in {groups} groups")
    size, epsilon = channels // groups, call.attribute("epsilon", 1e-5)
    y = ops.convert(ops.normalize_groups(_in_float32(x), range(2, x.rank), 1, size, epsilon), x.dtype)
    scale, bias = (_spread_groups(value, channels) for value in (call[1], call[2]))
    return y * per_channel(x, scale) + per_channel(x, bias)


def _spread_groups(values: Value, channels: int) -> Value:
    """Before version 21 there is one number per group."""
    if values.size == channels:
        return values
    repeated = ops.broadcast(ops.reshape(values, (values.size, 1)), (values.size, channels // values.size))
    return ops.reshape(repeated, (channels,))


@operator("LpNormalization")
def lp_normalization(call: Call) -> Value:
    x, p = call[0], call.attribute("p", 2)
    axis = front(call.attribute("axis", -1), x.rank, call.kind)
    total = ops.sum_(ops.abs_(x), (axis,)) if p == 1 else ops.sum_(x * x, (axis,))
    empty = ops.equal(total, 0.0)
    safe = ops.select(empty, 1.0, total)
    norm = safe if p == 1 else ops.sqrt(safe)
    return ops.select(ops.broadcast(empty, x.shape), 0.0, x / norm)


@operator("MeanVarianceNormalization")
def mean_variance_normalization(call: Call) -> Value:
    x = call[0]
    axes = tuple(front(axis, x.rank, call.kind) for axis in call.attribute("axes") or (0, 2, 3))
    centred = x - ops.mean(x, axes)
    return centred / (ops.sqrt(ops.mean(centred * centred, axes)) + 1e-9)


@operator("LRN")
def lrn(call: Call) -> Value:
    """x / (bias + alpha / size * sum of squares over nearby channels) ^ beta"""
    x, size = call[0], call.attribute("size")
    if size < 1 or size > 2 * x.shape[1] + 1:
        size = max(min(size, 2 * x.shape[1] + 1), 1)
    squares = padded(x * x, 1, (size - 1) // 2, size - 1 - (size - 1) // 2)
    total = ops.slice_axis(squares, 1, 0, x.shape[1])
    for k in range(1, size):
        total = total + ops.slice_axis(squares, 1, k, k + x.shape[1])
    inner = total * (call.attribute("alpha", 1e-4) / call.attribute("size")) + call.attribute("bias", 1.0)
    return x * ops.exp(ops.log(inner) * -call.attribute("beta", 0.75))


@operator("Dropout", needs=(1, 2), frozen=(1,), note="drops in training graphs only, whatever training_mode says")
def dropout(call: Call) -> tuple[Any, ...]:
    """The identity; in a training graph, elements are dropped at random."""
    x = call[0]
    ratio = float(call.attribute("ratio", call.number(1, 0.5)))
    if not 0.0 <= ratio < 1.0:
        raise ShapeError(f"Dropout: ratio is {ratio}", expected="0 <= ratio < 1")
    if call.training and call.uniform is not None and ratio > 0.0:
        keep = call.uniform(x, x.shape) >= ratio
        return (ops.select(keep, x * (1.0 / (1.0 - ratio)), 0.0), keep)[: call.output_count]
    kept = ops.full(x, x.shape, True, np.dtype(np.bool_ if call.version >= 10 else np.float32))
    return (ops.copy(x) if ratio > 0.0 else x, kept)[: call.output_count]


# What scikit-learn's pipelines put before a network -----------------------------------------------------------------


@operator("Scaler", domain="ai.onnx.ml")
def scaler(call: Call) -> Value:
    x = call[0] if call[0].is_floating else ops.convert(call[0], FLOAT32)
    offset, scale = (np.array(call.attribute(name, [one]), np.float32) for name, one in (("offset", 0), ("scale", 1)))
    if not x.rank or not {offset.size, scale.size} <= {1, x.shape[-1]}:
        raise ShapeError(f"Scaler: {offset.size} offsets and {scale.size} scales do not fit {x.shape}")
    return (x - call.constant(offset, x.dtype)) * call.constant(scale, x.dtype)


@operator("Normalizer", domain="ai.onnx.ml")
def normalizer(call: Call) -> Value:
    x, norm = call[0] if call[0].is_floating else ops.convert(call[0], FLOAT32), call.attribute("norm", "MAX")
    if not x.rank:
        raise ShapeError("Normalizer: a single number has no rows")
    if norm == "MAX":
        total = ops.max_(x, (x.rank - 1,))
    elif norm in ("L1", "L2"):
        total = ops.sum_(ops.abs_(x) if norm == "L1" else x * x, (x.rank - 1,))
    else:
        raise ShapeError(f"Normalizer: there is no norm {norm!r}")
    safe = ops.select(ops.equal(total, 0.0), 1.0, total)
    return x / (ops.sqrt(safe) if norm == "L2" else safe)
