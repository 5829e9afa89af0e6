"""Fourier transforms as products with constant matrices, and filter banks."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.budget import affordable
from mlcompute.onnx.rows import Call, front, operator
from mlcompute.onnx.types import numpy_type
from mlcompute.ops.op import Array, Value


def _waves(length: int, count: int, inverse: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """cos and sin of 2 pi j k / length.   (length, count) each"""
    angles = 2 * np.pi * np.arange(length) / length
    turns = np.outer(np.arange(length, dtype=np.int32), np.arange(count, dtype=np.int32)) % length
    cos, sin = (wave(angles).astype(dtype) for wave in (np.cos, np.sin))
    return cos[turns], (sin if inverse else -sin)[turns]


def transformed(x: Value, axis: int, length: int, inverse: bool, onesided: bool, backwards: bool = False) -> Value:
    """The discrete Fourier transform along an axis.   x (.., n, .., 1 or 2), real or real and imaginary

    onesided   the first half only; with `backwards`, the real signal such a half came from
    """
    if length < 1 or length > 1 << 12:
        raise ShapeError(f"DFT: a transform of {length} points", expected="1 to 4096")
    order = [k for k in range(x.rank - 1) if k != axis] + [axis, x.rank - 1]
    moved = ops.transpose(x, order) if order != list(range(x.rank)) else x
    n = moved.shape[-2]
    if backwards:
        # The half that was left out mirrors the other, with the opposite imaginary part.
        kept = min(n, length // 2 + 1)
        numbers = np.concatenate([np.arange(kept), np.arange((length - 1) // 2, 0, -1)])
        signs = np.ones((length, 2))
        signs[kept:, 1] = -1
        moved = ops.take(moved, x.trace.constant(numbers, np.dtype(np.int64)), x.rank - 2)
        moved = moved * x.trace.constant(signs, x.dtype)
    elif n > length:
        moved = ops.slice_axis(moved, -2, 0, length)
    elif n < length:
        after = [length - n if k == x.rank - 2 else 0 for k in range(x.rank)]
        moved = ops.pad(moved, (0,) * x.rank, after, 0.0)
    count = length // 2 + 1 if onesided and not backwards else length
    affordable(x.trace, length, count)
    cos, sin = (x.trace.constant(wave, x.dtype) for wave in _waves(length, count, inverse, x.dtype))
    rows = moved.size // (length * moved.shape[-1])
    flat = ops.reshape(moved, (rows, length, moved.shape[-1]))
    real = ops.reshape(ops.slice_axis(flat, 2, 0, 1), (rows, length))
    re, im = ops.matmul(real, cos), ops.matmul(real, sin)
    if flat.shape[2] == 2:
        other = ops.reshape(ops.slice_axis(flat, 2, 1, 2), (rows, length))
        re, im = re - ops.matmul(other, sin), im + ops.matmul(other, cos)
    if inverse:
        re, im = re * (1.0 / length), im * (1.0 / length)
    pieces = [re] if backwards else [re, im]
    y = ops.concatenate([ops.reshape(piece, (rows, count, 1)) for piece in pieces], 2)
    y = ops.reshape(y, (*moved.shape[:-2], count, len(pieces)))
    return ops.transpose(y, [int(k) for k in np.argsort(order)]) if order != list(range(x.rank)) else y


@operator("DFT", needs=(1, 2))
def dft(call: Call) -> Value:
    x = call[0]
    axis = call.attribute("axis", 1) if call.version < 20 else int(call.number(2, -2))
    axis = front(axis, x.rank, "DFT")
    inverse, onesided = bool(call.attribute("inverse", 0)), bool(call.attribute("onesided", 0))
    backwards = inverse and onesided
    usual = 2 * (x.shape[axis] - 1) if backwards else x.shape[axis]
    return transformed(x, axis, int(call.number(1, usual)), inverse, onesided, backwards)


@operator("STFT", needs=(1, 3))
def stft(call: Call) -> Value:
    signal, step = call[0], int(call.array(1).reshape(-1)[0])
    window = call.optional(2)
    length = int(call.number(3, window.size if window is not None else signal.shape[1]))
    frames = (signal.shape[1] - length) // step + 1 if step > 0 else 0
    if frames < 1 or length < 1:
        raise ShapeError(f"STFT: frames of {length} every {step} do not fit {signal.shape}")
    if signal.rank == 2:
        signal = ops.reshape(signal, (*signal.shape, 1))
    call.affordable(frames, length)
    places = np.arange(frames)[:, None] * step + np.arange(length)
    cut = ops.take(signal, call.constant(places, np.int64), 1)
    if window is not None:
        cut = cut * ops.reshape(window, (length, 1))
    return transformed(cut, 2, length, False, bool(call.attribute("onesided", 1)))


@operator("MelWeightMatrix", trains=False, needs=(0, 1, 2, 3, 4))
def mel_weight_matrix(call: Call) -> Array:
    bins, length, rate = (int(call.array(k).reshape(-1)[0]) for k in range(3))
    low, high = (float(call.array(k).reshape(-1)[0]) for k in (3, 4))
    if not 0 < bins < 1 << 16 or not 0 < length < 1 << 20:
        raise ShapeError(f"MelWeightMatrix: {bins} bins of a transform of {length} points")
    call.affordable(bins, length)
    dtype = numpy_type(call.attribute("output_datatype", 1))
    # The step ONNX's own definition takes: one interval more than there are between the edges.
    mels = _mel(low) + np.arange(bins + 2) * (_mel(high) - _mel(low)) / (bins + 2)
    edges = np.floor((length + 1) * (700 * (10 ** (mels / 2595) - 1)) / rate).astype(int)
    if edges.min() < 0 or edges.max() > length // 2 + 1:
        raise ShapeError(f"MelWeightMatrix: {low} to {high} Hz do not fit {length} points at {rate} Hz")
    matrix = np.zeros((length // 2 + 1, bins))
    for k in range(bins):
        left, centre, right = edges[k : k + 3]
        if centre == left:
            matrix[centre, k] = 1
        else:
            matrix[left : centre + 1, k] = (np.arange(left, centre + 1) - left) / (centre - left)
        if right > centre:
            matrix[centre:right, k] = (right - np.arange(centre, right)) / (right - centre)
    return matrix.astype(dtype)


def _mel(frequency: float) -> float:
    return float(2595 * np.log10(1 + frequency / 700))
