"""Builders for sequences and sets: embedding, LSTM, attention, rotary positions; all (n, length, features)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.building.builder import GLOROT, Initial, build, expect_rank, filled, fresh
from mlcompute.building.shared_weights import SharedWeights, Weights
from mlcompute.enums import LSTMResultMode
from mlcompute.errors import GraphError
from mlcompute.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from mlcompute.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from mlcompute.layers.lstm import LSTMDescriptor, LSTMLayer
from mlcompute.layers.rotary import RotaryEmbeddingLayer
from mlcompute.layers.shaping import ReshapeLayer
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


def lstm(
    self: Graph,
    x: Tensor,
    hidden: int,
    *,
    layers: int = 1,
    bidirectional: bool = False,
    returns_sequences: bool = True,
    returns_states: bool = False,
    lengths: Tensor | None = None,
    states: Sequence[Tensor] | None = None,
    dropout: float = 0.0,
    biases: bool = True,
    peepholes: bool = False,
    forget_bias: float = 1.0,
    weights: Weights | None = None,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """A long short-term memory.   x (n, length, features)   ->   (n, length, directions * hidden)

    returns_sequences  False: the output after the last step only, (n, directions * hidden)
    returns_states     the last hidden and cell states are results too: graph.result_tensors(graph.layer(name))
    lengths      INT32 (n,): how much of each sequence counts; the last step is then the last that counts
    states       (h0, c0), each (layers, directions, n, hidden), to start from
    dropout      rate between stacked layers, in training
    forget_bias  what the biases of the forget gates start at; 1, as usual, lets a fresh memory last
    weights      a layer of the same kind, whose tensors are shared, or some of them by slot

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.lstm(graph.input((8, 20, 3), "x"), 16, returns_sequences=False).descriptor.shape
    (8, 16)
    """
    features = expect_rank(self, "lstm", x, (3,), _SEQUENCE).descriptor.shape[2]
    mode = LSTMResultMode.OUTPUT_AND_STATES if returns_states else LSTMResultMode.OUTPUT
    descriptor = LSTMDescriptor(features, hidden, layers, biases, True, bidirectional, returns_sequences, dropout, mode)
    directions = descriptor.direction_count
    # Four gates per layer, lowest first: all forward layers, then all backward ones.
    widths = [features if layer == 0 else directions * hidden for _ in range(directions) for layer in range(layers)]
    gates = [width for width in widths for _ in range(4)]
    starts = [forget_bias if gate == 1 else 0.0 for _ in widths for gate in range(4)]
    shared = SharedWeights(f"{type(self).__name__}.lstm", weights)
    square = [(hidden, hidden)] * len(gates)
    wide = [(hidden, width) for width in gates]
    weights_of = {
        "input_weights": [fresh(*shape, like=x, initializer=initializer) for shape in wide],
        "hidden_weights": [fresh(*shape, like=x, initializer=initializer) for shape in square],
        "biases": [filled(start, hidden, like=x) for start in starts] if biases else [],
        "peephole_weights": [fresh(*shape, like=x, initializer=initializer) for shape in square] if peepholes else [],
    }
    lists = {slot: shared.many(slot, tensors) for slot, tensors in weights_of.items()}
    shared.expect_all_taken()
    layer = LSTMLayer(
        descriptor,
        lists["input_weights"],
        lists["hidden_weights"],
        lists["biases"] or None,
        lists["peephole_weights"] or None,
    )
    if states is not None and (isinstance(states, Tensor) or len(states) != 2):
        count = 1 if isinstance(states, Tensor) else len(states)
        raise GraphError(f"{type(self).__name__}.lstm: states has {count} tensors", expected="(h0, c0)")
    sources = [x, *(states or ()), *([lengths] if lengths is not None else [])]
    last = "" if returns_sequences else "last"
    result = build(self, layer, sources, name, "lstm", followed_by=last, updates=updates)
    if returns_sequences:
        return result
    n, _, width = result.descriptor.shape
    return build(self, ReshapeLayer((n, width)), [result], f"{layer.label}_last", "reshape")


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
    rotary      queries and keys are turned by their position (RoPE), with this base; True is 10000
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
    """Rotary position embeddings (RoPE): pairs of features turned by their position.   x (n, length, features)

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
    elif numbers.dtype.kind == "f" and {0.0, 1.0} == set(np.unique(numbers[:64]).tolist()):
        warnings.warn(
            f"{who}: the mask '{mask.label}' holds zeros and ones, and floating masks are added to the scores. "
            "To forbid keys, give a BOOLEAN mask in which True forbids",
            UserWarning,
            stacklevel=3,
        )
