"""Builders for recurrent layers: LSTM, GRU and the simple one. Sequences are (n, length, features)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from mlcompute.building.builder import GLOROT, Initial, build, chosen, expect_rank, filled, fresh
from mlcompute.building.choices import RecurrentActivation
from mlcompute.building.shared_weights import SharedWeights, Weights
from mlcompute.enums import ActivationType, LSTMResultMode
from mlcompute.errors import GraphError
from mlcompute.layers.gru import GRUDescriptor, GRULayer, RNNDescriptor, RNNLayer
from mlcompute.layers.lstm import LSTMDescriptor, LSTMLayer
from mlcompute.layers.recurrent import Recurrent
from mlcompute.layers.shaping import ReshapeLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mlcompute.graph import Graph

_ACTIVATIONS = {"tanh": ActivationType.TANH, "relu": ActivationType.RELU}
_SEQUENCE = "three axes: (n, length, features)"


class _Options(TypedDict, total=False):
    """What every recurrent layer takes, for type checkers: the signatures below say what it is."""

    layers: int
    bidirectional: bool
    returns_sequences: bool
    lengths: Tensor | None
    dropout: float
    biases: bool
    weights: Weights | None
    initializer: Initial
    updates: bool
    name: str


class _LSTMOptions(_Options, total=False):
    states: Sequence[Tensor] | None
    peepholes: bool
    forget_bias: float


class _GRUOptions(_Options, total=False):
    state: Tensor | None


class _RNNOptions(_GRUOptions, total=False):
    activation: RecurrentActivation


@overload
def lstm(
    self: Graph, x: Tensor, hidden: int, *, returns_states: Literal[True], **options: Unpack[_LSTMOptions]
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...
@overload
def lstm(
    self: Graph, x: Tensor, hidden: int, *, returns_states: Literal[False] = False, **options: Unpack[_LSTMOptions]
) -> Tensor: ...
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
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """A long short-term memory.   x (n, length, features)   ->   (n, length, directions * hidden)

    returns_sequences  False: where each direction ends only, (n, directions * hidden): forward after the last step,
                       backward after the first
    returns_states     True: y, (h, c), with the last hidden and cell states, each (layers, directions, n, hidden)
    lengths      INT32 (n,): how much of each sequence counts; the last step is then the last that counts
    states       (h0, c0), each (layers, directions, n, hidden), to start from
    dropout      rate between stacked layers, in training
    forget_bias  what the biases of the forget gates start at; 1, as usual, lets a fresh memory last
    weights      a layer of the same kind, whose tensors are shared, or some of them by slot

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y, (h, c) = graph.lstm(graph.input((8, 20, 3), "x"), 16, returns_states=True)
    >>> y.descriptor.shape, c.descriptor.shape
    ((8, 20, 16), (1, 1, 8, 16))
    >>> graph.lstm(y, 16, states=(h, c), returns_sequences=False).descriptor.shape
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
    sources = [x, *(states or ()), *_given(lengths)]
    y, *last = _built(self, layer, sources, name, "lstm", updates)
    return (y, (last[0], last[1])) if returns_states else y


@overload
def gru(
    self: Graph, x: Tensor, hidden: int, *, returns_states: Literal[True], **options: Unpack[_GRUOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def gru(
    self: Graph, x: Tensor, hidden: int, *, returns_states: Literal[False] = False, **options: Unpack[_GRUOptions]
) -> Tensor: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
    """A gated recurrent unit.   x (n, length, features)   ->   (n, length, directions * hidden)

    returns_sequences  False: where each direction ends only, (n, directions * hidden): forward after the last step,
                       backward after the first
    returns_states     True: y, h, with the last hidden state (layers, directions, n, hidden)
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
    layer = _layer(self, GRULayer, d, x, weights, initializer, "gru")
    y, *last = _built(self, layer, [x, *_given(state), *_given(lengths)], name, "gru", updates)
    return (y, last[0]) if returns_states else y


@overload
def rnn(
    self: Graph, x: Tensor, hidden: int, *, returns_states: Literal[True], **options: Unpack[_RNNOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def rnn(
    self: Graph, x: Tensor, hidden: int, *, returns_states: Literal[False] = False, **options: Unpack[_RNNOptions]
) -> Tensor: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
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
    layer = _layer(self, RNNLayer, d, x, weights, initializer, "rnn")
    y, *last = _built(self, layer, [x, *_given(state), *_given(lengths)], name, "rnn", updates)
    return (y, last[0]) if returns_states else y


Kind = TypeVar("Kind", GRULayer, RNNLayer)


def _layer(
    graph: Graph, kind: type[Kind], d: Any, x: Tensor, weights: Weights | None, initializer: Initial, word: str
) -> Kind:
    """A GRU or simple recurrent layer with its weights."""
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
    return kind(d, lists[0], lists[1], lists[2] or None, lists[3] or None)


def _given(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _built(
    graph: Graph, layer: Recurrent, sources: Sequence[Tensor], name: str, kind: str, updates: bool
) -> list[Tensor]:
    """Add the layer: y, without the axis of time where only the last step is asked for, and the last states."""
    returns_sequences = layer.sizes.returns_sequences
    y = build(graph, layer, sources, name, kind, followed_by="" if returns_sequences else "last", updates=updates)
    states = graph.result_tensors(layer)[1:]
    for state, word in zip(states, ("hidden", "cell"), strict=False):
        state.label = f"{layer.label}_{word}"
    if not returns_sequences:
        n, _, width = y.descriptor.shape
        y = build(graph, ReshapeLayer((n, width)), [y], f"{layer.label}_last", "reshape")
    return [y, *states]
