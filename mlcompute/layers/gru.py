"""GRU and simple recurrent layers; stacked, and in both directions, if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mlcompute import ops
from mlcompute.enums import ActivationType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import member
from mlcompute.layers.layer import Forward
from mlcompute.layers.parameter_lists import Tensors
from mlcompute.layers.read_only import ReadOnly
from mlcompute.layers.recurrent import Recurrent, RecurrentDescriptor
from mlcompute.ops.op import Value
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class GRUDescriptor(RecurrentDescriptor):
    """Sizes and options of a GRU layer. Immutable.

    layer_count        how many layers are stacked; each reads the outputs of the one below
    returns_sequences  True: the output at every time; False: only that where each direction ends
    returns_states     is the last hidden state a result too?
    dropout            rate at which outputs between stacked layers are dropped in training, 0 <= dropout < 1
    """

    input_size: int
    hidden_size: int
    layer_count: int = 1
    uses_biases: bool = True
    is_bidirectional: bool = False
    returns_sequences: bool = True
    returns_states: bool = False
    dropout: float = 0.0

    def copy(self) -> Self:
        """An equal, independent descriptor."""
        return replace(self)


@dataclass(frozen=True)
class RNNDescriptor(GRUDescriptor):
    """Sizes and options of a simple recurrent layer. Immutable.

    activation   TANH or RELU; the others are those of `GRUDescriptor`
    """

    activation: ActivationType = ActivationType.TANH

    def __post_init__(self) -> None:
        super().__post_init__()
        activation = member("RNNDescriptor", "activation", ActivationType, self.activation)
        object.__setattr__(self, "activation", activation)
        if activation not in (ActivationType.TANH, ActivationType.RELU):
            raise DataError(f"RNNDescriptor: activation is {activation.name}", expected="TANH or RELU")


class _OneState(Recurrent):
    """What both layers share: lists with one tensor per layer and direction."""

    source_count = (1, 3)
    state_names = ("h0",)
    #: Rows of the weights per hidden unit.
    gate_count: ClassVar[int] = 1

    sizes = ReadOnly[GRUDescriptor]("The descriptor.", "_descriptor")
    input_weights = Tensors[list[Tensor]]("What multiplies the input; one per layer and direction.")
    hidden_weights = Tensors[list[Tensor]]("What multiplies the hidden state; one per layer and direction.")
    input_biases = Tensors[list[Tensor] | None]("What is added to the input's part; None when there are no biases.")
    hidden_biases = Tensors[list[Tensor] | None](
        "What is added to the hidden state's part; None when there are no biases."
    )

    _descriptor: GRUDescriptor

    def _set(
        self,
        input_weights: Sequence[Tensor],
        hidden_weights: Sequence[Tensor],
        input_biases: Sequence[Tensor] | None,
        hidden_biases: Sequence[Tensor] | None,
    ) -> None:
        d = self._descriptor
        self.expect(
            (input_biases is None) == (hidden_biases is None) and (d.uses_biases or input_biases is None),
            f"{'no ' if input_biases is None else ''}input_biases and {'no ' if hidden_biases is None else ''}"
            f"hidden_biases were given, the descriptor says uses_biases={d.uses_biases}",
            fix="give both lists with uses_biases=True, or neither",
            error=DataError,
        )
        self._keep_passes("input_weights", input_weights, self.input_width, self.gate_count)
        self._keep_passes("hidden_weights", hidden_weights, lambda _: d.hidden_size, self.gate_count)
        if input_biases is not None and hidden_biases is not None:
            self._keep_passes("input_biases", input_biases, None, self.gate_count)
            self._keep_passes("hidden_biases", hidden_biases, None, self.gate_count)

    @property
    def returns_states(self) -> bool:
        return self._descriptor.returns_states

    def _read(self, run: Forward, slot: str, index: int, *width: int) -> Value:
        rows = self.gate_count * self._descriptor.hidden_size
        return run.read(self._lists[slot][index].tensor, (rows, *width))

    def _weights(self, run: Forward, x: Value, layer: int, direction: int) -> tuple[Value, Value, list[Value]]:
        """W, U and the two biases, if any, of one layer in one direction."""
        d = self._descriptor
        index = direction * d.layer_count + layer
        biases = [self._read(run, slot, index) for slot in ("input_biases", "hidden_biases") if slot in self._lists]
        w, u = (
            self._read(run, "input_weights", index, x.shape[2]),
            self._read(run, "hidden_weights", index, d.hidden_size),
        )
        return w, u, biases


class GRULayer(_OneState):
    """Per layer and direction, for every time, starting from h = 0 or the given state:

        r = sigmoid(Wr x + br + Ur h + cr)       z = sigmoid(Wz x + bz + Uz h + cz)
        n = tanh(Wn x + bn + r (Un h + cn))      h' = (1 - z) n + z h

    sources   x (batch, time, input_size); then, to start from a state, h0 (layer_count, directions, batch, hidden);
              then, if sequences differ in length, lengths (batch), INT32, each from 1 to time: times beyond give 0 and
              leave the state alone
    results   y (batch, time or 1, directions * hidden), the forward half first; with returns_states also the last h,
              shaped like h0

    Lists hold one tensor per layer, lowest layer first: all forward layers, then all backward ones. Rows of the gates
    come in the order r, z, n, as in PyTorch.

    input_weights    W, 3 hidden * in elements in (3 hidden, in) order; above the lowest layer in = directions * hidden
    hidden_weights   U, 3 hidden * hidden elements
    input_biases     b, 3 hidden elements; None: zeros
    hidden_biases    c, 3 hidden elements; None: zeros
    """

    default_label = "GRU"
    gate_count = 3

    descriptor = ReadOnly[GRUDescriptor]("The sizes and options the layer was made with.")

    def __init__(
        self,
        descriptor: GRUDescriptor,
        input_weights: Sequence[Tensor],
        hidden_weights: Sequence[Tensor],
        input_biases: Sequence[Tensor] | None = None,
        hidden_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        if type(descriptor) is not GRUDescriptor:
            raise TypeError(f"GRULayer: descriptor must be a GRUDescriptor, not {type(descriptor).__name__}")
        self._descriptor = descriptor.copy()
        self._set(input_weights, hidden_weights, input_biases, hidden_biases)

    def pass_through(
        self, run: Forward, x: Value, states: Sequence[Value], lengths: Value | None, layer: int, direction: int
    ) -> Sequence[Value]:
        hidden = self._descriptor.hidden_size
        w, u, biases = self._weights(run, x, layer, direction)

        def rows(value: Value, first: int, last: int) -> Value:
            return ops.slice_axis(value, 0, first * hidden, last * hidden)

        # The op has the parts n, r, z of the input and r, z, n of the state, so that both are one matmul.
        b = ops.full(x, (4 * hidden,), 0.0)
        if biases:
            of_input, of_state = biases
            both = rows(of_input, 0, 2) + rows(of_state, 0, 2)
            b = ops.concatenate([rows(of_input, 2, 3), both, rows(of_state, 2, 3)], 0)
        w = ops.concatenate([rows(w, 2, 3), rows(w, 0, 2)], 0)
        return ops.rnn("gru", x, w, u, b, states[0], lengths, direction == 1)


class RNNLayer(_OneState):
    """Per layer and direction, for every time, starting from h = 0 or the given state:

        h' = activation(W x + b + U h + c)

    sources and results   as those of `GRULayer`

    Lists hold one tensor per layer, lowest layer first: all forward layers, then all backward ones.

    input_weights    W, hidden * in elements in (hidden, in) order; above the lowest layer in = directions * hidden
    hidden_weights   U, hidden * hidden elements
    input_biases     b, hidden elements; None: zeros
    hidden_biases    c, hidden elements; None: zeros
    """

    default_label = "RNN"

    descriptor = ReadOnly[RNNDescriptor]("The sizes and options the layer was made with.")

    _descriptor: RNNDescriptor

    def __init__(
        self,
        descriptor: RNNDescriptor,
        input_weights: Sequence[Tensor],
        hidden_weights: Sequence[Tensor],
        input_biases: Sequence[Tensor] | None = None,
        hidden_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(descriptor, RNNDescriptor):
            raise TypeError(f"RNNLayer: descriptor must be an RNNDescriptor, not {type(descriptor).__name__}")
        self._descriptor = descriptor.copy()
        self._set(input_weights, hidden_weights, input_biases, hidden_biases)

    def pass_through(
        self, run: Forward, x: Value, states: Sequence[Value], lengths: Value | None, layer: int, direction: int
    ) -> Sequence[Value]:
        d = self._descriptor
        w, u, biases = self._weights(run, x, layer, direction)
        b = biases[0] + biases[1] if biases else ops.full(x, (d.hidden_size,), 0.0)
        cell = "relu" if d.activation == ActivationType.RELU else "tanh"
        return ops.rnn(cell, x, w, u, b, states[0], lengths, direction == 1)
