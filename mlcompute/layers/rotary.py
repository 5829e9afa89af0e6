"""Rotary position embeddings: pairs of features are rotated by an angle that grows with the position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlcompute import ops
from mlcompute.errors import DataError
from mlcompute.layers.arguments import real, whole
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Array, Value
from mlcompute.tensor import TensorDescriptor


class RotaryEmbeddingLayer(Layer):
    """Rotary position embeddings (RoPE).   x (n, length, heads * width)   ->   y like x

    Per head, features i and j of a pair at position p:   y_i = x_i cos(a) - x_j sin(a)   y_j = x_j cos(a) + x_i sin(a)
    with a = p / base^(2k / width) for pair k; products of rotated queries and keys depend on their distance only.

    head_count      heads that share the last axis
    base            how slowly the last pairs turn
    is_interleaved  pairs are neighbours (0, 1), (2, 3), ...; otherwise k and k + width / 2, as in Llama and GPT-NeoX

    `graph.attention(..., rotary=True)` turns the projected queries and keys of an attention layer by itself.
    """

    default_label = "RotaryEmbedding"
    source_types = FLOATS

    head_count = ReadOnly[int]("Heads that share the last axis.")
    base = ReadOnly[float]("How slowly the last pairs turn.")
    is_interleaved = ReadOnly[bool]("Are pairs neighbours?")

    def __init__(self, head_count: int = 1, base: float = 10000.0, is_interleaved: bool = False) -> None:
        super().__init__()
        self._head_count = whole(self.who, "head_count", head_count, 1)
        self._base = checked_base(self.who, base)
        self._is_interleaved = bool(is_interleaved)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self.expect(len(x.shape) == 3, f"the source must be (n, length, heads * width), not {x.shape}")
        self.expect(
            x.shape[2] % (2 * self._head_count) == 0,
            f"{x.shape[2]} features are not pairs in each of {self._head_count} heads",
            expected=f"a multiple of {2 * self._head_count} features",
        )
        return [x]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        n, length, features = x.shape
        width = features // self._head_count
        heads = ops.reshape(x, (n, length, self._head_count, width))
        tables = [x.trace.constant(table, x.dtype) for table in rotations(length, width, self._base)]
        return ops.reshape(rotated(heads, tables[0], tables[1], self._is_interleaved), x.shape)


def checked_base(who: str, base: object) -> float:
    """A base that is a number above 0."""
    number = real(who, "base of the rotary embedding", base)
    if not 0 < number < math.inf:
        raise DataError(f"{who}: the base of the rotary embedding is {number}", expected="a number above 0")
    return number


def rotations(length: int, width: int, base: float) -> tuple[Array, Array]:
    """cos and sin of all angles, each (length, width / 2)."""
    angles = np.arange(length)[:, None] / base ** (np.arange(0, width, 2) / width)
    return np.cos(angles), np.sin(angles)


def rotated(x: Value, cos: Value, sin: Value, is_interleaved: bool) -> Value:
    """x (n, length, heads, width), rotated; cos and sin (length, width / 2)."""
    n, length, heads, width = x.shape
    half = width // 2
    shape = (n, length, heads, half, 2) if is_interleaved else (n, length, heads, 2, half)
    axis = 4 if is_interleaved else 3
    pairs = ops.reshape(x, shape)
    first, second = ops.slice_axis(pairs, axis, 0, 1), ops.slice_axis(pairs, axis, 1, 2)
    angle = (length, 1, half, 1) if is_interleaved else (length, 1, 1, half)
    cos, sin = ops.reshape(cos, angle), ops.reshape(sin, angle)
    return ops.reshape(ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis), x.shape)
