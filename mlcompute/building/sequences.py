"""Builders for sequences and sets: embedding, attention, rotary positions; all (n, length, features)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.building.builder import GLOROT, Initial, build, expect_rank, filled, fresh
from mlcompute.building.shared_weights import SharedWeights, Weights
from mlcompute.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from mlcompute.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from mlcompute.layers.rotary import RotaryEmbeddingLayer
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_SEQUENCE = "three axes: (n, length, features)"


def embedding(
    self: Graph,
    x: Tensor,
    count: int,
    dimension: int,
    *,
    padding_index: int | None = None,
    maximum_norm: float | None = None,
    weights: Tensor | None = None,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """A trained row of numbers for every index.   x (*) INT32 or INT64   ->   (*, dimension)

    count    rows of the table: indices are 0 ... count - 1
    weights  Glorot uniform unless given; (count, dimension)
    """
    expect_rank(self, "embedding", x, range(1, 16), "indices")
    descriptor = EmbeddingDescriptor(count, dimension, padding_index, maximum_norm)
    if weights is None:
        weights = fresh(count, dimension, like=x, initializer=initializer)
    return build(self, EmbeddingLayer(descriptor, weights), [x], name, "embedding", updates=updates)


def attention(
    self: Graph,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    heads: int,
    key_dimension: int | None = None,
    value_dimension: int | None = None,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    biases: bool = True,
    attention_biases: bool = False,
    zero_attention: bool = False,
    key_value_heads: int | None = None,
    causal: bool = False,
    rotary: bool | float = False,
    rotary_interleaved: bool = False,
    cache: int = 0,
    weights: Weights | None = None,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """Multi-head attention.   query (n, l, model), key and value (n, s, model)   ->   (n, l, model)

    key, value  the query unless given (self-attention); the value is the key unless given
    key_mask    BOOLEAN (n, s): True forbids a key of a sample, its padding for example
    mask        BOOLEAN, True forbids a query to see a key; or floating, added to the scores, and trained if it
                comes from something that is. (l, s); per sample (n, l, s); per sample and head
                (n * heads, l, s); or (n, heads, l, s), where extents may be 1
    key_value_heads     heads of keys and values, shared by groups of heads of queries; as many as `heads` unless given
    causal      a query sees only keys up to its own position
    rotary      queries and keys are rotated by their position (RoPE), with this base; True is 10000
    rotary_interleaved  turn neighbours (0, 1), (2, 3), ... instead of features half a head apart
    cache       positions of a key-value cache, with causal=True: in inference, runs go on where the last one ended
    weights     another attention layer, whose tensors are shared, or some of them by slot

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.attention(graph.input((2, 10, 32), "x"), heads=4).descriptor.shape
    (2, 10, 32)
    """
    model = expect_rank(self, "attention", query, (3,), _SEQUENCE).descriptor.shape[2]
    key = query if key is None else key
    value = key if value is None else value
    base = None if rotary is False else 10000.0 if rotary is True else rotary
    d = MultiheadAttentionDescriptor(
        model, heads, key_dimension, value_dimension, dropout, biases, attention_biases, zero_attention,
        key_value_heads, causal, base, rotary_interleaved, cache,
    )  # fmt: skip
    keys, values = d.key_value_widths
    projections = ((d.key_dimension, model), (keys, model), (values, model), (model, d.value_dimension))
    shared = SharedWeights(f"{type(self).__name__}.attention", weights)
    own = [fresh(*shape, like=query, initializer=initializer) for shape in projections]
    zeros = [filled(0.0, outputs, like=query) for outputs, _ in projections] if biases else []
    widths = (keys, values) if attention_biases else ()
    extra = [fresh(1, width, like=query, initializer=initializer) for width in widths]
    lists = [shared.many("weights", own), shared.many("biases", zeros), shared.many("attention_biases", extra)]
    shared.expect_all_taken()
    layer = MultiheadAttentionLayer(
        d,
        lists[0],
        lists[1] or None,
        lists[2] or None,
        # Said, for a mask (l, s) looks like a key mask (n, s).
        has_key_mask=None if key_mask is None and mask is None else key_mask is not None,
    )
    masks = [given for given in (key_mask, mask) if given is not None]
    for given in masks:
        _warn_of_misunderstood_mask(f"{type(self).__name__}.attention", given, attention_biases or zero_attention)
    return build(self, layer, [query, key, value, *masks], name, "attention", updates=updates)


def rotary(
    self: Graph, x: Tensor, *, heads: int = 1, base: float = 10000.0, interleaved: bool = False, name: str = ""
) -> Tensor:
    """Rotary position embeddings (RoPE): pairs of features rotated by their position.   x (n, length, features)

    heads        heads that share the features; `attention(..., rotary=True)` does it by itself
    interleaved  turn neighbours (0, 1), (2, 3), ... instead of features half a head apart

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.rotary(graph.input((2, 10, 32), "x"), heads=4).descriptor.shape
    (2, 10, 32)
    """
    expect_rank(self, "rotary", x, (3,), _SEQUENCE)
    return build(self, RotaryEmbeddingLayer(heads, base, interleaved), [x], name, "rotary")


def _warn_of_misunderstood_mask(who: str, mask: Tensor, has_more_keys: bool) -> None:
    """Where a mask's numbers are known: two ways to write one that mean something else in other libraries.

    has_more_keys  there are keys that no mask forbids
    """
    if not isinstance(mask, Tensor) or not mask.keeps_data:
        return
    numbers = mask.data
    assert numbers is not None
    if numbers.dtype == np.bool_:
        if not has_more_keys and numbers.all(axis=-1).any():
            warnings.warn(
                f"{who}: the mask '{mask.label}' leaves some query no key, so its result is NaN; True forbids a key. "
                "If True allows in yours, as in Keras, invert it: ~mask",
                UserWarning,
                stacklevel=3,
            )
    elif is_floating(numbers.dtype) and {0.0, 1.0} == set(np.unique(numbers[:64]).tolist()):
        warnings.warn(
            f"{who}: the mask '{mask.label}' holds zeros and ones, and floating masks are added to the scores. "
            "To forbid keys, give a BOOLEAN mask in which True forbids",
            UserWarning,
            stacklevel=3,
        )
