"""LSTM: against torch.nn.LSTM, and against the written-out step where PyTorch has no such layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ActivationType, LSTMResultMode
from mlcompute.errors import Error
from mlcompute.layers.activation import ActivationDescriptor
from mlcompute.layers.layer import Layer
from mlcompute.layers.lstm import LSTMDescriptor, LSTMLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Array, Case, Refusal, numbers

BOTH = LSTMResultMode.OUTPUT_AND_STATES


def _lists(
    d: LSTMDescriptor, peepholes: bool = False, spelling: Callable[[int, int], Any] = lambda h, i: (h, i)
) -> Any:
    """Tensors for every slot: input weights, hidden weights, biases, peepholes."""
    slots: list[list[Tensor]] = [[], [], [], []]
    for index in range(4 * d.layer_count * d.direction_count):
        lowest = index // 4 % d.layer_count == 0
        inputs = d.input_size if lowest else d.direction_count * d.hidden_size
        shapes = [spelling(d.hidden_size, inputs), spelling(d.hidden_size, d.hidden_size), (d.hidden_size,)]
        if peepholes:
            shapes.append((d.hidden_size, d.hidden_size))
        for slot, shape in enumerate(shapes):
            slots[slot].append(Tensor(shape=shape, data=0.5 * numbers(*shape, seed=10 * index + slot)))
    return slots


def make(
    input_size: int,
    hidden_size: int,
    *,
    biases: bool = True,
    peepholes: bool = False,
    gates: Sequence[ActivationDescriptor] | None = None,
    output: ActivationDescriptor | None = None,
    spelling: Callable[[int, int], Any] = lambda h, i: (h, i),
    **options: Any,
) -> Callable[[], Layer]:
    def build() -> Layer:
        d = LSTMDescriptor(input_size, hidden_size, **options)
        w, u, b, p = _lists(d, peepholes, spelling)
        return LSTMLayer(d, w, u, b if biases else None, p if peepholes else None, gates, output)

    return build


def _sources(sources: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """(x, h0, c0, lengths), None for what is absent."""
    lengths = sources[-1] if len(sources) in (2, 4) else None
    h0, c0 = sources[1:3] if len(sources) >= 3 else (None, None)
    return sources[0], h0, c0, lengths


def torch_lstm(input_size: int, hidden_size: int, **options: Any) -> Callable[..., Any]:
    """torch.nn.LSTM with the slots' tensors, packed when there are lengths."""
    d = LSTMDescriptor(input_size, hidden_size, **options)
    layers, directions, hidden = d.layer_count, d.direction_count, d.hidden_size

    def oracle(p: dict[str, Any], *sources: Any) -> Any:
        x, h0, c0, lengths = _sources(sources)
        n, t = x.shape[:2]
        weights = {}
        for layer in range(layers):
            for direction in range(directions):
                first = 4 * (direction * layers + layer)
                inputs = input_size if layer == 0 else directions * hidden
                end = f"l{layer}{'_reverse' * direction}"
                for name, slot, shape in (
                    ("weight_ih", "input_weights", (hidden, inputs)),
                    ("weight_hh", "hidden_weights", (hidden, hidden)),
                    ("bias_ih", "biases", (hidden,)),
                ):
                    gates = [p.get(f"{slot}_{first + k}", torch.zeros(shape, dtype=x.dtype)) for k in range(4)]
                    weights[f"{name}_{end}"] = torch.cat([gate.reshape(shape) for gate in gates])
                weights[f"bias_hh_{end}"] = torch.zeros(4 * hidden, dtype=x.dtype)
        cell = torch.nn.LSTM(input_size, hidden, layers, batch_first=True, bidirectional=directions == 2).to(x.dtype)
        zeros = torch.zeros(layers * directions, n, hidden, dtype=x.dtype)
        state = tuple(zeros if s is None else s.reshape(layers * directions, n, hidden) for s in (h0, c0))
        seen = x
        if lengths is not None:
            seen = torch.nn.utils.rnn.pack_padded_sequence(
                x, lengths.long().reshape(-1), batch_first=True, enforce_sorted=False
            )
        y, (h, c) = torch.func.functional_call(cell, weights, (seen, state))
        if lengths is not None:
            y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=t)
        h, c = (s.reshape(layers, directions, n, hidden) for s in (h, c))
        if not d.returns_sequences:
            y = h[-1].transpose(0, 1).reshape(n, 1, directions * hidden)
        return (y, h, c) if d.result_mode == BOTH else y

    return oracle


def written_out(
    input_size: int, hidden_size: int, gates: Sequence[Callable[[Any], Any]], out: Callable[[Any], Any], **options: Any
) -> Callable[..., Any]:
    """The specification's step, sample by sample, gate by gate, with peepholes where there are any."""
    d = LSTMDescriptor(input_size, hidden_size, **options)
    layers, directions, hidden = d.layer_count, d.direction_count, d.hidden_size

    def one(p: dict[str, Any], x: Any, h: Any, c: Any, first: int, backward: bool) -> tuple[Any, Any, Any]:
        def term(slot: str, gate: int, vector: Any) -> Any:
            w = p.get(f"{slot}_{first + gate}")
            return 0.0 if w is None else w.reshape(hidden, -1) @ vector

        ys: dict[int, Any] = {}
        for t in reversed(range(len(x))) if backward else range(len(x)):
            z = [
                term("input_weights", k, x[t]) + term("hidden_weights", k, h) + p.get(f"biases_{first + k}", 0.0)
                for k in range(4)
            ]
            i, f, g = (gates[k](z[k] + term("peephole_weights", k, c)) for k in range(3))
            c = f * c + i * g
            h = gates[3](z[3] + term("peephole_weights", 3, c)) * out(c)
            ys[t] = h
        return torch.stack([ys[t] for t in range(len(x))]), h, c

    def oracle(p: dict[str, Any], *sources: Any) -> Any:
        x, h0, c0, lengths = _sources(sources)
        n, t = x.shape[:2]
        ends: list[list[list[Any]]] = [[], []]
        ys = []
        for k in range(n):
            length = t if lengths is None else int(lengths[k])
            seen, hs, cs = x[k, :length], [], []
            for layer in range(layers):
                halves = []
                for direction in range(directions):
                    start = [
                        torch.zeros(hidden, dtype=x.dtype) if s is None else s[layer, direction, k] for s in (h0, c0)
                    ]
                    half, h, c = one(p, seen, start[0], start[1], 4 * (direction * layers + layer), direction == 1)
                    halves.append(half)
                    hs.append(h)
                    cs.append(c)
                seen = torch.cat(halves, dim=1)
            last = torch.cat(hs[-directions:])[None]
            ys.append(torch.nn.functional.pad(seen, (0, 0, 0, t - length)) if d.returns_sequences else last)
            ends[0].append(hs)
            ends[1].append(cs)
        y = torch.stack(ys)
        if d.result_mode != BOTH:
            return y
        states = [torch.stack([torch.stack(s) for s in end], dim=1) for end in ends]
        return (y, *(s.reshape(layers, directions, n, hidden) for s in states))

    return oracle


def case(name: str, sources: Sequence[Any], input_size: int, hidden_size: int, **options: Any) -> Case:
    """A case that torch.nn.LSTM knows."""
    of_layer = {key: options.pop(key) for key in ("biases", "spelling") if key in options}
    of_case = {key: options.pop(key) for key in ("training", "note") if key in options}
    return Case(
        name,
        make(input_size, hidden_size, **of_layer, **options),
        sources,
        torch_lstm(input_size, hidden_size, **options),
        **of_case,
    )


def lengths(*each: int) -> Array:
    return np.array(each, np.int32)


def _act(kind: ActivationType, *constants: float) -> ActivationDescriptor:
    return ActivationDescriptor(kind, *constants)


SIGMOID, TANH = _act(ActivationType.SIGMOID), _act(ActivationType.TANH)
SPELLINGS: dict[str, Callable[[int, int], Any]] = {
    "row": lambda h, i: (1, h * i),
    "channels": lambda h, i: (1, h * i, 1, 1),
    "swapped": lambda h, i: (i, h),
    "flat": lambda h, i: (h * i,),
}
PLAIN = (torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid)

CASES = [
    case("plain", [(3, 5, 4)], 4, 3),
    case("one of everything", [(1, 1, 1)], 1, 1),
    case("batch of one", [(1, 6, 2)], 2, 5),
    case("one step", [(4, 1, 3)], 3, 2),
    case("wide input, one unit", [(2, 3, 7)], 7, 1),
    case("without biases", [(2, 4, 3)], 3, 3, biases=False, uses_biases=False),
    case("biases allowed, none given", [(2, 4, 3)], 3, 3, biases=False),
    *(case(f"weights spelt {name}", [(2, 3, 3)], 3, 2, spelling=spelling) for name, spelling in SPELLINGS.items()),
    case("two layers", [(2, 4, 3)], 3, 2, layer_count=2),
    case("three layers", [(2, 3, 2)], 2, 3, layer_count=3, biases=False),
    case("both directions", [(3, 4, 3)], 3, 2, is_bidirectional=True),
    case("two layers, both directions", [(2, 5, 3)], 3, 2, layer_count=2, is_bidirectional=True),
    case("last output", [(3, 4, 2)], 2, 3, returns_sequences=False),
    case("last output, both directions", [(3, 4, 2)], 2, 3, returns_sequences=False, is_bidirectional=True),
    case("last output, stacked", [(2, 3, 2)], 2, 3, returns_sequences=False, is_bidirectional=True, layer_count=2),
    case("states out", [(3, 4, 2)], 2, 3, result_mode=BOTH),
    case("states in", [(3, 4, 2), (1, 1, 3, 3), (1, 1, 3, 3)], 2, 3),
    case("states in and out", [(3, 4, 2), (1, 1, 3, 3), (1, 1, 3, 3)], 2, 3, result_mode=BOTH),
    case(
        "states in and out, stacked, both directions",
        [(3, 4, 2), (2, 2, 3, 4), (2, 2, 3, 4)],
        2, 4, layer_count=2, is_bidirectional=True, result_mode=BOTH,
    ),
    case(
        "states in and out, last output",
        [(4, 3, 2), (2, 1, 4, 3), (2, 1, 4, 3)],
        2, 3, layer_count=2, returns_sequences=False, result_mode=BOTH,
    ),
    case("lengths", [(4, 5, 3), lengths(5, 3, 3, 1)], 3, 2),
    case("lengths in no order", [(4, 5, 3), lengths(2, 5, 1, 4)], 3, 2),
    case("lengths as a column", [(2, 3, 3), lengths(3, 2).reshape(2, 1)], 3, 2),
    case("lengths all full", [(2, 3, 3), lengths(3, 3)], 3, 2),
    case("lengths short of the longest", [(2, 5, 3), lengths(3, 2)], 3, 2, result_mode=BOTH),
    case("lengths, both directions", [(3, 4, 3), lengths(4, 2, 1)], 3, 2, is_bidirectional=True, result_mode=BOTH),
    case(
        "lengths, stacked, both directions",
        [(3, 4, 2), lengths(1, 4, 3)],
        2, 3, layer_count=2, is_bidirectional=True, result_mode=BOTH,
    ),
    case("lengths, last output", [(3, 4, 2), lengths(4, 3, 1)], 2, 3, returns_sequences=False, is_bidirectional=True),
    case(
        "all four sources",
        [(3, 4, 2), (2, 2, 3, 3), (2, 2, 3, 3), lengths(4, 1, 2)],
        2, 3, layer_count=2, is_bidirectional=True, result_mode=BOTH,
    ),
    case("dropout in inference", [(3, 4, 2)], 2, 3, layer_count=2, dropout=0.5, training=False),
    case("dropout with one layer", [(3, 4, 2)], 2, 3, dropout=0.5, training=True, note="nothing to drop between"),
    Case(
        "dropout in training",
        make(2, 3, layer_count=3, dropout=0.4, is_bidirectional=True),
        [(3, 4, 2)],
        training=True,
        note="random: no oracle",
    ),
    Case(
        "written out",
        make(3, 2, layer_count=2, is_bidirectional=True, result_mode=BOTH),
        [(3, 4, 3), (2, 2, 3, 2), (2, 2, 3, 2), lengths(4, 1, 3)],
        written_out(3, 2, PLAIN, torch.tanh, layer_count=2, is_bidirectional=True, result_mode=BOTH),
        note="the second oracle against the same layer as the first",
    ),
    Case("peepholes", make(3, 2, peepholes=True), [(2, 4, 3)], written_out(3, 2, PLAIN, torch.tanh)),
    Case(
        "peepholes, every other option",
        make(
            2, 3, peepholes=True, biases=False, layer_count=2, is_bidirectional=True, returns_sequences=False,
            result_mode=BOTH,
        ),
        [(3, 4, 2), (2, 2, 3, 3), (2, 2, 3, 3), lengths(2, 4, 1)],
        written_out(
            2, 3, PLAIN, torch.tanh, layer_count=2, is_bidirectional=True, returns_sequences=False, result_mode=BOTH
        ),
    ),
    Case(
        "default activations spelt out",
        make(3, 2, gates=[SIGMOID, SIGMOID, TANH, SIGMOID], output=TANH),
        [(2, 3, 3)],
        torch_lstm(3, 2),
    ),
    Case(
        "scaled tanh",
        make(3, 2, gates=[SIGMOID, SIGMOID, _act(ActivationType.TANH, 1.7, 0.6), SIGMOID], output=TANH),
        [(2, 3, 3)],
        written_out(
            3, 2, (torch.sigmoid, torch.sigmoid, lambda z: 1.7 * torch.tanh(0.6 * z), torch.sigmoid), torch.tanh
        ),
    ),
    Case(
        "four different gates",
        make(
            3, 2,
            gates=[TANH, SIGMOID, _act(ActivationType.SOFT_SIGN), _act(ActivationType.LINEAR, 0.5, 0.1)],
            output=_act(ActivationType.NONE),
            result_mode=BOTH,
        ),
        [(3, 4, 3), lengths(4, 2, 3)],
        written_out(
            3, 2, (torch.tanh, torch.sigmoid, torch.nn.functional.softsign, lambda z: 0.5 * z + 0.1), lambda c: c,
            result_mode=BOTH,
        ),
    ),
    Case(
        "gates with corners",
        make(3, 2, gates=[_act(ActivationType.HARD_SIGMOID)] * 2 + [TANH, SIGMOID], output=_act(ActivationType.RELU)),
        [(2, 3, 3)],
        written_out(
            3, 2, (*(lambda z: (0.2 * z + 0.5).clamp(0, 1),) * 2, torch.tanh, torch.sigmoid), torch.relu
        ),
        smooth=False,
        note="hard sigmoid and relu have corners",
    ),
]  # fmt: skip


def _with(d: LSTMDescriptor, **changes: Any) -> Callable[[], Layer]:
    """A layer of good lists, some replaced."""

    def build() -> Layer:
        w, u, b, _ = _lists(d)
        return LSTMLayer(**{"descriptor": d, "input_weights": w, "hidden_weights": u, "biases": b, **changes})

    return build


def _refused(name: str, says: str, error: type[Exception] = Error, **options: Any) -> Refusal:
    """A descriptor that cannot be made."""
    return Refusal(name, make(**{"input_size": 3, "hidden_size": 2, **options}), says, error=error)


D = LSTMDescriptor(3, 2)
TWO = LSTMDescriptor(3, 2, layer_count=2, is_bidirectional=True)

REFUSALS = [
    _refused("batch_first False", "batch_first=False is not supported", batch_first=False),
    _refused("no inputs", "input_size is 0", input_size=0),
    _refused("no hidden units", "hidden_size is 0", hidden_size=0),
    _refused("no layers", "layer_count is 0", layer_count=0),
    _refused("fractional size", "hidden_size must be a whole number", TypeError, hidden_size=2.5),
    _refused("dropout of one", "dropout is 1.0", dropout=1.0),
    _refused("negative dropout", "dropout is -0.1", dropout=-0.1),
    _refused("dropout not a number", "dropout is nan", dropout=float("nan")),
    _refused("unknown result mode", "result_mode", result_mode=7),
    Refusal("descriptor of another kind", _with(D, descriptor="lstm"), "must be an LSTMDescriptor", error=TypeError),
    Refusal("too few input weights", _with(D, input_weights=_lists(D)[0][:3]), "needs 4 tensors (4 gates x 1 layer"),
    Refusal("too many hidden weights", _with(D, hidden_weights=_lists(D)[1] * 2), "hidden_weights needs 4 tensors (4"),
    Refusal("lists for one layer", _with(TWO, input_weights=_lists(D)[0]), "input_weights needs 16 tensors"),
    Refusal("too few biases", _with(D, biases=_lists(D)[2][:1]), "biases needs 4 tensors"),
    Refusal(
        "one tensor, not a list", _with(D, input_weights=_lists(D)[0][0]), "must be a list of Tensors", error=TypeError
    ),
    Refusal("arrays, not tensors", _with(D, hidden_weights=[numbers(2, 2)] * 4), "must be a Tensor", error=TypeError),
    Refusal("small input weight", _with(D, input_weights=_lists(D)[1]), "input_weights[0] needs 6 elements"),
    Refusal("large hidden weight", _with(D, hidden_weights=_lists(D)[0]), "hidden_weights[0] needs 4 elements"),
    Refusal("wide bias", _with(D, biases=_lists(D)[1]), "biases[0] needs 2 elements"),
    Refusal("second layer as wide as the first", _with(TWO, input_weights=_lists(D)[0] * 4), "[4] needs 8 elements"),
    Refusal("diagonal peepholes", _with(D, peephole_weights=_lists(D)[2]), "peephole_weights[0] needs 4 elements"),
    Refusal(
        "biases against the descriptor",
        _with(LSTMDescriptor(3, 2, uses_biases=False)),
        "the descriptor says uses_biases=False",
    ),
    Refusal("one gate activation", _with(D, gate_activations=[SIGMOID]), "gate_activations needs 4 descriptors"),
    Refusal(
        "gate activation types",
        _with(D, gate_activations=[ActivationType.TANH] * 4),
        "ActivationDescr",
        error=TypeError,
    ),
    Refusal("output activation type", _with(D, output_result_activation="tanh"), "ActivationDescr", error=TypeError),
    Refusal("no time axis", make(3, 2), "must be (batch, time, 3), not (2, 3)", [(2, 3)]),
    Refusal("an image", make(3, 2), "must be (batch, time, 3)", [(2, 3, 1, 4)]),
    Refusal("features do not fit", make(3, 2), "input_size is 3, the source has 5 features", [(2, 4, 5)]),
    Refusal("five sources", make(3, 2), "takes 1 to 4 source(s)", [(2, 4, 3)] + [(1, 1, 2, 2)] * 4),
    Refusal("whole numbers as input", make(3, 2), "must be floating", [np.zeros((2, 4, 3), np.int32)]),
    Refusal("lengths not whole", make(3, 2), "must be INT32, not FLOAT32", [(2, 4, 3), (2,)]),
    Refusal("lengths too long a type", make(3, 2), "INT64 is not supported", [(2, 4, 3), np.ones(2, np.int64)]),
    Refusal("lengths for other samples", make(3, 2), "lengths have shape (3,)", [(2, 4, 3), lengths(1, 2, 3)]),
    Refusal("lengths not last", make(3, 2), "floating", [(2, 4, 3), lengths(1, 2), (1, 1, 2, 2)]),
    Refusal("states without layers", make(3, 2), "h0 has shape (2, 2)", [(2, 4, 3), (2, 2), (2, 2)]),
    Refusal("cell states of another width", make(3, 2), "c0 has shape", [(2, 4, 3), (1, 1, 2, 2), (1, 1, 2, 3)]),
    Refusal(
        "states for other samples", make(3, 2), "h0 has shape (1, 1, 3, 2)", [(2, 4, 3), (1, 1, 3, 2), (1, 1, 3, 2)]
    ),
]
