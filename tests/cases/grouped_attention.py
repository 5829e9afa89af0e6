"""Grouped heads, causal attention, rotary positions and the key-value cache of multi-head attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlcompute.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Case, Refusal, numbers
from tests.cases.rotary import turned


def make(model: int, heads: int, **options: Any) -> Callable[[], MultiheadAttentionLayer]:
    def build() -> MultiheadAttentionLayer:
        d = MultiheadAttentionDescriptor(model, heads, **options)
        queries, results, (keys, values) = d.key_dimension, d.value_dimension, d.key_value_widths
        shapes = [(queries, model), (keys, model), (values, model), (model, results)]
        weights = [Tensor(shape=shape, data=0.5 * numbers(*shape, seed=k)) for k, shape in enumerate(shapes)]
        biases = [Tensor(shape=(n,), data=0.5 * numbers(n, seed=9 + k)) for k, (n, _) in enumerate(shapes)]
        return MultiheadAttentionLayer(d, weights, biases if d.has_biases else None)

    return build


def oracle(model: int, heads: int, **options: Any) -> Callable[..., Any]:
    """F.scaled_dot_product_attention with enable_gqa and is_causal."""
    d = MultiheadAttentionDescriptor(model, heads, **options)

    def run(p: dict[str, Any], *sources: Any) -> Any:
        def projected(index: int, x: Any) -> Any:
            y = x @ p[f"weights_{index}"].T
            return y + p[f"biases_{index}"] if d.has_biases else y

        n, rows, _ = sources[0].shape
        q, k, v = (projected(index, source) for index, source in enumerate(sources[:3]))
        q = q.unflatten(2, (heads, -1)).transpose(1, 2)
        k, v = (x.unflatten(2, (d.key_value_head_count, -1)).transpose(1, 2) for x in (k, v))
        if d.rotary_base is not None:
            q, k = (turned(x, d.rotary_base, d.is_rotary_interleaved) for x in (q, k))
        allowed = torch.ones(rows, k.shape[2], dtype=torch.bool)
        if d.is_causal:
            allowed = allowed.tril()
        for mask in sources[3:]:
            allowed = allowed & ~(mask if mask.dim() == 4 else mask[:, None, None])
        if d.adds_zero_attention:  # one more key and value that every query may see
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
            allowed = torch.nn.functional.pad(allowed, (0, 1), value=True)
        shared = heads // d.key_value_head_count
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed.expand(n, heads, rows, -1))
        return projected(3, y.transpose(1, 2).flatten(2))

    return run


def case(name: str, sources: list[Any], model: int, heads: int, **options: Any) -> Case:
    training = options.pop("training", None)
    note = "what is added to all keys changes nothing: the gradient of their biases is rounding, and 0"
    made, expected = make(model, heads, **options), oracle(model, heads, **options)
    return Case(name, made, sources, expected, training=training, scale=4.0, note=note)


def same(*shape: int) -> list[Any]:
    """Query, key and value of self-attention."""
    return [numbers(*shape)] * 3


PER_HEAD = np.triu(np.ones((4, 4), bool), 1)[None, None] & (np.arange(4) % 2 == 0)[None, :, None, None]
KEY_MASK = np.array([[False, False, False, True], [False, True, False, False]])

CASES = [
    case("causal", same(2, 5, 6), 6, 2, is_causal=True),
    case("grouped heads", [(2, 3, 8), (2, 5, 8), (2, 5, 8)], 8, 4, key_value_head_count=2),
    case("one head of keys", same(2, 3, 8), 8, 4, key_value_head_count=1, is_causal=True, has_biases=False),
    case("grouped, other widths", same(2, 3, 6), 6, 2, key_value_head_count=1, key_dimension=8, value_dimension=4),
    case("grouped, a mask per head", [*same(2, 4, 8), PER_HEAD], 8, 4, key_value_head_count=2),
    case("grouped, causal, key mask", [*same(2, 4, 8), KEY_MASK], 8, 4, key_value_head_count=2, is_causal=True),
    case("grouped, other widths, zero attention, key mask", [*same(2, 4, 6), KEY_MASK], 6, 2, key_value_head_count=1,
         key_dimension=8, value_dimension=4, adds_zero_attention=True),
    case("rotary", same(2, 5, 8), 8, 2, rotary_base=10000.0),
    case("rotary neighbours, grouped, causal", same(2, 5, 8), 8, 4, rotary_base=100.0, is_rotary_interleaved=True,
         key_value_head_count=2, is_causal=True),
    case("one position, one sample", same(1, 1, 4), 4, 2, is_causal=True, rotary_base=10.0, key_value_head_count=1),
    case("cache in training", same(2, 3, 8), 8, 4, key_value_head_count=2, is_causal=True, cache_capacity=7,
         training=True),
    case("empty cache", same(2, 3, 8), 8, 4, key_value_head_count=2, is_causal=True, cache_capacity=7,
         rotary_base=50.0, training=False),
    case("empty cache, one position", same(2, 1, 8), 8, 2, is_causal=True, cache_capacity=3, training=False),
    Case("grouped, dropout in training", make(8, 4, key_value_head_count=2, dropout=0.3), same(2, 3, 8), training=True,
         note="random: no oracle"),
]  # fmt: skip

D = {"model": 8, "heads": 4}
REFUSALS = [
    Refusal("heads cannot share", make(**D, key_value_head_count=3), "4 heads cannot share 3 of keys and values"),
    Refusal("pairs of an odd width", make(6, 2, rotary_base=10.0), "turn pairs, a head has 3 features"),
    Refusal("a base below zero", make(**D, rotary_base=-1.0), "base of the rotary embedding is -1.0"),
    Refusal("a cache that is not causal", make(**D, cache_capacity=3), "a key-value cache needs is_causal=True"),
    Refusal("a negative capacity", make(**D, is_causal=True, cache_capacity=-1), "cache_capacity is -1"),
    Refusal("more positions than capacity", make(**D, is_causal=True, cache_capacity=2),
            "cache_capacity is 2, the source has 3 positions", [(2, 3, 8)] * 3),
    Refusal("a mask and a cache", make(**D, is_causal=True, cache_capacity=4), "takes no masks",
            [*[(2, 4, 8)] * 3, KEY_MASK]),
    Refusal("causal, other keys", make(**D, is_causal=True), "there are 2 queries and 3 keys",
            [(2, 2, 8), (2, 3, 8), (2, 3, 8)]),
    Refusal("a cache without capacity", lambda: _given_cache((1,)), "cache has 1 tensors, cache_capacity is 3"),
    Refusal("a cache of another batch", lambda: _given_cache((3, 4, 3, 2), (3, 4, 3, 2), (1,)),
            "the cache has shapes (3, 4, 3, 2)", [(2, 1, 8)] * 3),
    Refusal("no cache to reset", lambda: _reset(make(**D)()), "there is no key-value cache"),
]  # fmt: skip


def _reset(layer: MultiheadAttentionLayer) -> MultiheadAttentionLayer:
    layer.reset_cache()
    return layer


def _given_cache(*shapes: tuple[int, ...]) -> MultiheadAttentionLayer:
    made = make(**D, is_causal=True, cache_capacity=3)()
    cache = [Tensor(shape=shape, fill_with_data=0.0) for shape in shapes]
    return MultiheadAttentionLayer(made.descriptor, made.weights, made.biases, cache=cache)
