"""GRU and simple recurrent layers: against torch.nn.GRU and torch.nn.RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ActivationType
from mlcompute.errors import Error
from mlcompute.layers.gru import GRUDescriptor, GRULayer, RNNDescriptor, RNNLayer
from mlcompute.layers.layer import Layer
from mlcompute.tensor import Tensor
from tests.cases.case import Case, Refusal, numbers

KINDS: dict[str, Any] = {"GRU": (GRULayer, GRUDescriptor, 3), "RNN": (RNNLayer, RNNDescriptor, 1)}


def _lists(kind: str, d: Any) -> list[list[Tensor]]:
    """Tensors for every slot: input weights, hidden weights, input biases, hidden biases."""
    slots: list[list[Tensor]] = [[], [], [], []]
    rows = KINDS[kind][2] * d.hidden_size
    for index in range(d.layer_count * d.direction_count):
        inputs = d.input_size if index % d.layer_count == 0 else d.direction_count * d.hidden_size
        for slot, shape in enumerate([(rows, inputs), (rows, d.hidden_size), (rows,), (rows,)]):
            slots[slot].append(Tensor(shape=shape, data=0.5 * numbers(*shape, seed=10 * index + slot)))
    return slots


def make(kind: str, input_size: int, hidden_size: int, *, biases: bool = True, **options: Any) -> Callable[[], Layer]:
    def build() -> Layer:
        layer, descriptor, _ = KINDS[kind]
        d = descriptor(input_size, hidden_size, **options)
        w, u, b, c = _lists(kind, d)
        made: Layer = layer(d, w, u, b if biases else None, c if biases else None)
        return made

    return build


def of_torch(kind: str, input_size: int, hidden_size: int, **options: Any) -> Callable[..., Any]:
    """torch.nn.GRU or RNN with the slots' tensors, packed when there are lengths."""
    d = KINDS[kind][1](input_size, hidden_size, **options)
    layers, directions, hidden = d.layer_count, d.direction_count, d.hidden_size
    more = {"nonlinearity": d.activation.name.lower()} if kind == "RNN" else {}

    def oracle(p: dict[str, Any], x: Any, *rest: Any) -> Any:
        lengths = rest[-1] if rest and not rest[-1].is_floating_point() else None
        n, t = x.shape[:2]
        h0 = rest[0] if rest and rest[0].is_floating_point() else torch.zeros(layers, directions, n, hidden).double()
        module = getattr(torch.nn, kind)(
            input_size, hidden, layers, bias="input_biases_0" in p, bidirectional=directions == 2,
            batch_first=True, **more,
        ).double()  # fmt: skip
        weights = {}
        for index in range(layers * directions):
            end = f"l{index % layers}{'_reverse' * (index // layers)}"
            for name, slot in (
                ("weight_ih", "input_weights"), ("weight_hh", "hidden_weights"),
                ("bias_ih", "input_biases"), ("bias_hh", "hidden_biases"),
            ):  # fmt: skip
                if f"{slot}_{index}" in p:
                    weights[f"{name}_{end}"] = p[f"{slot}_{index}"]
        # PyTorch's states alternate directions within each layer, as (layers, directions) does.
        seen = x
        if lengths is not None:
            seen = torch.nn.utils.rnn.pack_padded_sequence(
                x, lengths.long().reshape(-1), batch_first=True, enforce_sorted=False
            )
        y, h = torch.func.functional_call(module, weights, (seen, h0.reshape(-1, n, hidden)))
        if lengths is not None:
            y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=t)
        h = h.reshape(layers, directions, n, hidden)
        if not d.returns_sequences:
            y = h[-1].transpose(0, 1).reshape(n, 1, directions * hidden)
        return (y, h) if d.returns_states else y

    return oracle


def case(name: str, kind: str, sources: Sequence[Any], input_size: int, hidden_size: int, **options: Any) -> Case:
    of_layer = {key: options.pop(key) for key in ("biases",) if key in options}
    of_case = {key: options.pop(key) for key in ("training", "smooth", "note") if key in options}
    made = make(kind, input_size, hidden_size, **of_layer, **options)
    return Case(name, made, sources, of_torch(kind, input_size, hidden_size, **options), **of_case)


def lengths(*each: int) -> Any:
    return np.array(each, np.int32)


RELU = ActivationType.RELU

CASES = [
    case("GRU plain", "GRU", [(3, 5, 4)], 4, 3),
    case("GRU one of everything", "GRU", [(1, 1, 1)], 1, 1),
    case("GRU without biases", "GRU", [(2, 4, 3)], 3, 3, biases=False, uses_biases=False),
    case("GRU biases allowed, none given", "GRU", [(2, 4, 3)], 3, 3, biases=False),
    case("GRU stacked, both directions", "GRU", [(2, 4, 3)], 3, 2, layer_count=2, is_bidirectional=True),
    case("GRU last output", "GRU", [(3, 4, 2)], 2, 3, returns_sequences=False, is_bidirectional=True),
    case("GRU states in and out", "GRU", [(3, 4, 2), (1, 1, 3, 3)], 2, 3, returns_states=True),
    case("GRU lengths", "GRU", [(4, 5, 3), lengths(2, 5, 1, 4)], 3, 2),
    case(
        "GRU everything", "GRU", [(3, 4, 2), (2, 2, 3, 3), lengths(4, 1, 2)], 2, 3,
        layer_count=2, is_bidirectional=True, returns_states=True, returns_sequences=False,
    ),
    case("GRU dropout in inference", "GRU", [(3, 4, 2)], 2, 3, layer_count=2, dropout=0.5, training=False),
    Case("GRU dropout in training", make("GRU", 2, 3, layer_count=2, dropout=0.4), [(3, 4, 2)], training=True,
         note="random: no oracle"),
    case("RNN plain", "RNN", [(3, 5, 4)], 4, 3),
    case("RNN relu", "RNN", [(3, 5, 4)], 4, 3, activation=RELU, smooth=False, note="relu has a corner"),
    case("RNN without biases", "RNN", [(2, 4, 3)], 3, 3, biases=False, uses_biases=False),
    case(
        "RNN everything", "RNN", [(3, 4, 2), (2, 2, 3, 3), lengths(4, 1, 2)], 2, 3,
        layer_count=2, is_bidirectional=True, returns_states=True,
    ),
]  # fmt: skip


def _with(kind: str, **changes: Any) -> Callable[[], Layer]:
    """A layer of good lists, some replaced."""

    def build() -> Layer:
        layer, descriptor, _ = KINDS[kind]
        d = descriptor(3, 2)
        w, u, b, c = _lists(kind, d)
        given = {"descriptor": d, "input_weights": w, "hidden_weights": u, "input_biases": b, "hidden_biases": c}
        made: Layer = layer(**(given | changes))
        return made

    return build


G = GRUDescriptor(3, 2)
REFUSALS = [
    Refusal("no hidden units", make("GRU", 3, 0), "hidden_size is 0"),
    Refusal("dropout of one", make("GRU", 3, 2, dropout=1.0), "dropout is 1.0"),
    Refusal("activation", make("RNN", 3, 2, activation=ActivationType.SIGMOID), "activation is SIGMOID"),
    Refusal("descriptor of another kind", _with("GRU", descriptor=RNNDescriptor(3, 2)), "GRUDescr", error=TypeError),
    Refusal("descriptor of a GRU", _with("RNN", descriptor=G), "must be an RNNDescriptor", error=TypeError),
    Refusal("one tensor, not a list", _with("GRU", input_weights=_lists("GRU", G)[0][0]), "a list of", error=TypeError),
    Refusal("too many", _with("GRU", hidden_weights=_lists("GRU", G)[1] * 2), "needs 1 tensors (1 layer(s)"),
    Refusal("small weight", _with("GRU", input_weights=_lists("GRU", G)[1]), "input_weights[0] needs 18 elements"),
    Refusal("wide bias", _with("RNN", input_biases=_lists("GRU", G)[2]), "input_biases[0] needs 2 elements"),
    Refusal("one list of biases", _with("GRU", hidden_biases=None), "no hidden_biases were given"),
    Refusal(
        "biases against the descriptor", _with("GRU", descriptor=GRUDescriptor(3, 2, uses_biases=False)),
        "the descriptor says uses_biases=False",
    ),
    Refusal("no time axis", make("GRU", 3, 2), "must be (batch, time, 3), not (2, 3)", [(2, 3)]),
    Refusal("features do not fit", make("RNN", 3, 2), "input_size is 3, the source has 5 features", [(2, 4, 5)]),
    Refusal("state of another width", make("GRU", 3, 2), "h0 has shape (1, 1, 2, 3)", [(2, 4, 3), (1, 1, 2, 3)]),
    Refusal("lengths before the state", make("GRU", 3, 2), "floating", [(2, 4, 3), lengths(1, 2), (1, 1, 2, 2)]),
    Refusal("lengths for other samples", make("GRU", 3, 2), "lengths have shape (3,)", [(2, 4, 3), lengths(1, 2, 3)]),
    Refusal("four sources", make("GRU", 3, 2), "takes 1 to 3 source(s)", [(2, 4, 3)] + [(1, 1, 2, 2)] * 3, error=Error),
]  # fmt: skip
