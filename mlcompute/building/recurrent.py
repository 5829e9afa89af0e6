"""Builders for GRU and simple recurrent layers. Sequences are (n, length, features)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlcompute.building.builder import GLOROT, Initial, build, chosen, expect_rank, filled, fresh
from mlcompute.building.choices import RecurrentActivation
from mlcompute.building.shared_weights import SharedWeights, Weights
from mlcompute.enums import ActivationType
from mlcompute.layers.gru import GRUDescriptor, GRULayer, RNNDescriptor, RNNLayer
from mlcompute.layers.shaping import ReshapeLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_ACTIVATIONS = {"tanh": ActivationType.TANH, "relu": ActivationType.RELU}


def gru(
    self: Graph,
    x: Tensor,
    hidden: int,
    *,
    layers: int = 1,
    bidirectional: bool = False,
    returns_sequences: bool = True,
    returns_states: bool = False,
    lengths: Tensor | None = None,
    state: Tensor | None = None,
    dropout: float = 0.0,
    biases: bool = True,
    weights: Weights | None = None,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """A gated recurrent unit.   x (n, length, features)   ->   (n, length, directions * hidden)

    returns_sequences  False: the output after the last step only, (n, directions * hidden)
    returns_states     the last hidden state is a result too: graph.result_tensors(graph.layer(name))
    lengths      INT32 (n,): how much of each sequence counts; the last step is then the last that counts
    state        h0 (layers, directions, n, hidden), to start from
    dropout      rate between stacked layers, in training
    weights      a layer of the same kind, whose tensors are shared, or some of them by slot

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.gru(graph.input((8, 20, 3), "x"), 16, bidirectional=True).descriptor.shape
    (8, 20, 32)
    """
    features = expect_rank(self, "gru", x, (3,), _SEQUENCE).descriptor.shape[2]
    d = GRUDescriptor(features, hidden, layers, biases, bidirectional, returns_sequences, returns_states, dropout)
    return _built(self, GRULayer, d, x, state, lengths, weights, initializer, updates, name, "gru")


def rnn(
    self: Graph,
    x: Tensor,
    hidden: int,
    *,
    activation: RecurrentActivation = "tanh",
    layers: int = 1,
    bidirectional: bool = False,
    returns_sequences: bool = True,
    returns_states: bool = False,
    lengths: Tensor | None = None,
    state: Tensor | None = None,
    dropout: float = 0.0,
    biases: bool = True,
    weights: Weights | None = None,
    initializer: Initial = GLOROT,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """A simple recurrent layer, h' = activation(W x + U h + b).   x (n, length, features)   ->   (n, length, hidden)

    activation   "tanh" or "relu"; all others as for `gru`

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> graph.rnn(graph.input((8, 20, 3), "x"), 16, returns_sequences=False).descriptor.shape
    (8, 16)
    """
    features = expect_rank(self, "rnn", x, (3,), _SEQUENCE).descriptor.shape[2]
    kind = chosen(f"{type(self).__name__}.rnn", "activation", _ACTIVATIONS, activation)
    d = RNNDescriptor(features, hidden, layers, biases, bidirectional, returns_sequences, returns_states, dropout, kind)
    return _built(self, RNNLayer, d, x, state, lengths, weights, initializer, updates, name, "rnn")


_SEQUENCE = "three axes: (n, length, features)"


def _built(
    graph: Graph,
    kind: type[GRULayer] | type[RNNLayer],
    d: Any,
    x: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    weights: Weights | None,
    initializer: Initial,
    updates: bool,
    name: str,
    word: str,
) -> Tensor:
    rows, directions, hidden = kind.gate_count * d.hidden_size, d.direction_count, d.hidden_size
    # Lowest layer first: all forward layers, then all backward ones.
    widths = [d.input_size if k == 0 else directions * hidden for _ in range(directions) for k in range(d.layer_count)]
    shared = SharedWeights(f"{type(graph).__name__}.{word}", weights)
    biased = widths if d.uses_biases else []
    lists = [
        shared.many("input_weights", [fresh(rows, width, like=x, initializer=initializer) for width in widths]),
        shared.many("hidden_weights", [fresh(rows, hidden, like=x, initializer=initializer) for _ in widths]),
        shared.many("input_biases", [filled(0.0, rows, like=x) for _ in biased]),
        shared.many("hidden_biases", [filled(0.0, rows, like=x) for _ in biased]),
    ]
    shared.expect_all_taken()
    layer = kind(d, lists[0], lists[1], lists[2] or None, lists[3] or None)
    sources = [x, *(given for given in (state, lengths) if given is not None)]
    last = "" if d.returns_sequences else "last"
    result = build(graph, layer, sources, name, word, followed_by=last, updates=updates)
    if d.returns_sequences:
        return result
    n, _, width = result.descriptor.shape
    return build(graph, ReshapeLayer((n, width)), [result], f"{layer.label}_last", "reshape")
