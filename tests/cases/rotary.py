"""Rotary position embeddings: against multiplication of complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlcompute.layers.rotary import RotaryEmbeddingLayer
from tests.cases.case import Case, Refusal


def turned(x: Any, base: float = 10000.0, interleaved: bool = False, start: int = 0) -> Any:
    """x (..., length, width), pairs of it times exp(i p / base^(2k / width))."""
    length, width = x.shape[-2:]
    half = width // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    p, k = torch.arange(start, start + length).double(), torch.arange(half).double()
    y = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(length, half).double(), p[:, None] * base ** (-2 * k / width)
    )
    y = torch.view_as_real(y)
    return (y if interleaved else y.transpose(-1, -2)).flatten(-2)


def _oracle(heads: int = 1, base: float = 10000.0, interleaved: bool = False) -> Callable[..., Any]:
    def oracle(p: dict[str, Any], x: Any) -> Any:
        n, length, features = x.shape
        y = turned(x.reshape(n, length, heads, features // heads).transpose(1, 2), base, interleaved)
        return y.transpose(1, 2).reshape(x.shape)

    return oracle


CASES = [
    Case("halves", RotaryEmbeddingLayer, [(2, 5, 6)], _oracle()),
    Case("neighbours", lambda: RotaryEmbeddingLayer(is_interleaved=True), [(2, 5, 6)], _oracle(interleaved=True)),
    Case("heads", lambda: RotaryEmbeddingLayer(3, 100.0), [(2, 4, 12)], _oracle(3, 100.0)),
    Case("one position, one pair", lambda: RotaryEmbeddingLayer(1, 10.0, True), [(1, 1, 2)], _oracle(1, 10.0, True)),
]
REFUSALS = [
    Refusal("an odd number", RotaryEmbeddingLayer, "5 features are not pairs", [(2, 3, 5)]),
    Refusal("heads do not divide", lambda: RotaryEmbeddingLayer(4), "pairs in each of 4 heads", [(2, 3, 12)]),
    Refusal("an image", RotaryEmbeddingLayer, "must be (n, length, heads * width)", [(2, 3, 4, 4)]),
    Refusal("a base of zero", lambda: RotaryEmbeddingLayer(base=0.0), "base of the rotary embedding is 0.0"),
    Refusal("no heads", lambda: RotaryEmbeddingLayer(0), "head_count is 0"),
]
