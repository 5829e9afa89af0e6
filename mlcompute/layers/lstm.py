"""LSTM: a recurrent layer with a gated memory; stacked, and in both directions, if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from mlcompute import ops
from mlcompute.enums import ActivationType, LSTMResultMode
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.activation import ActivationDescriptor, activate
from mlcompute.layers.arguments import member
from mlcompute.layers.layer import Forward
from mlcompute.layers.parameter_lists import Parameters, Tensors
from mlcompute.layers.read_only import Copied, ReadOnly
from mlcompute.layers.recurrent import Recurrent, RecurrentDescriptor
from mlcompute.ops.op import Value
from mlcompute.tensor import Tensor, TensorParameter

_SIGMOID, _TANH = ActivationType.SIGMOID, ActivationType.TANH
_STANDARD = (_SIGMOID, _SIGMOID, _TANH, _SIGMOID)


@dataclass(frozen=True)
class LSTMDescriptor(RecurrentDescriptor):
    """Sizes and options of an LSTM layer. Immutable.

    layer_count        how many layers are stacked; each reads the outputs of the one below
    batch_first        only True: sources are (batch, time, features)
    returns_sequences  True: the output at every time; False: only that where each direction ends
    dropout            rate at which outputs between stacked layers are dropped in training, 0 <= dropout < 1
    result_mode        OUTPUT, or OUTPUT_AND_STATES for the last hidden and cell states too
    """

    input_size: int
    hidden_size: int
    layer_count: int = 1
    uses_biases: bool = True
    batch_first: bool = True
    is_bidirectional: bool = False
    returns_sequences: bool = True
    dropout: float = 0.0
    result_mode: LSTMResultMode = LSTMResultMode.OUTPUT

    def __post_init__(self) -> None:
        super().__post_init__()
        who = "LSTMDescriptor"
        object.__setattr__(self, "result_mode", member(who, "result_mode", LSTMResultMode, self.result_mode))
        if not self.batch_first:
            raise ShapeError(
                f"{who}: batch_first=False is not supported",
                expected="sources of shape (batch, time, features)",
                fix="put TransposeLayer((1, 0, 2)) before the LSTM",
            )

    def copy(self) -> LSTMDescriptor:
        """An equal, independent descriptor."""
        return replace(self)


class LSTMLayer(Recurrent):
    """Per layer and direction, for every time, starting from h = c = 0 or the given states:

        i = act0(Wi x + Ui h + Pi c + bi)      f = act1(Wf x + Uf h + Pf c + bf)
        g = act2(Wg x + Ug h + Pg c + bg)      c' = f c + i g
        o = act3(Wo x + Uo h + Po c' + bo)     h' = o out(c')

    sources   x (batch, time, input_size); then, to start from states, h0 and c0 (layer_count, directions, batch,
              hidden); then, if sequences differ in length, lengths (batch), INT32, each from 1 to time: times beyond
              give 0 and leave the state alone
    results   y (batch, time or 1, directions * hidden), the forward half first; with OUTPUT_AND_STATES also the last
              h and c, shaped like h0

    Lists hold four tensors (i, f, g, o) per layer, lowest layer first: all forward layers, then all backward ones.

    input_weights     W, hidden * in elements in (hidden, in) order; above the lowest layer in = directions * hidden
    hidden_weights    U, hidden * hidden elements
    biases            b, hidden elements; None: zeros
    peephole_weights  P, hidden * hidden elements; None: no such terms
    gate_activations  act0 to act3, by default sigmoid, sigmoid, tanh, sigmoid
    output_result_activation   out, by default tanh
    """

    default_label = "LSTM"
    source_count = (1, 4)
    state_names = ("h0", "c0")
    _separate_gates = 4

    descriptor = ReadOnly[LSTMDescriptor]("The sizes and options the layer was made with.")
    sizes = ReadOnly[LSTMDescriptor]("The descriptor.", "_descriptor")
    output_result_activation = ReadOnly[ActivationDescriptor](
        "The activation of the cell state on its way to the output."
    )
    gate_activations = Copied[list[ActivationDescriptor]]("Activations of the input, forget, cell and output gates.")
    input_weights = Tensors[list[Tensor]]("What multiplies the input; four per layer and direction.")
    hidden_weights = Tensors[list[Tensor]]("What multiplies the hidden state; four per layer and direction.")
    peephole_weights = Tensors[list[Tensor] | None]("What multiplies the cell state; None without peepholes.")
    biases = Tensors[list[Tensor] | None]("What is added; None when there are none.")
    input_weights_parameters = Parameters[list[TensorParameter]]("The input weights as the optimizer sees them.")
    hidden_weights_parameters = Parameters[list[TensorParameter]]("The hidden weights as the optimizer sees them.")
    peephole_weights_parameters = Parameters[list[TensorParameter] | None](
        "The peephole weights as the optimizer sees them; None without peepholes."
    )
    biases_parameters = Parameters[list[TensorParameter] | None](
        "The biases as the optimizer sees them; None when there are none."
    )

    def __init__(
        self,
        descriptor: LSTMDescriptor,
        input_weights: Sequence[Tensor],
        hidden_weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        peephole_weights: Sequence[Tensor] | None = None,
        gate_activations: Sequence[ActivationDescriptor] | None = None,
        output_result_activation: ActivationDescriptor | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(descriptor, LSTMDescriptor):
            raise TypeError(f"LSTMLayer: descriptor must be an LSTMDescriptor, not {type(descriptor).__name__}")
        self._descriptor = descriptor.copy()
        self.expect(
            descriptor.uses_biases or biases is None,
            "biases were given, the descriptor says uses_biases=False",
            fix="pass biases=None or set uses_biases=True",
            error=DataError,
        )
        hidden = descriptor.hidden_size
        self._keep_passes("input_weights", input_weights, self.input_width)
        self._keep_passes("hidden_weights", hidden_weights, lambda _: hidden)
        if biases is not None:
            self._keep_passes("biases", biases, None)
        if peephole_weights is not None:
            self._keep_passes("peephole_weights", peephole_weights, lambda _: hidden)
        self._gate_activations = self._activations(
            "gate_activations", [ActivationDescriptor(kind) for kind in _STANDARD], gate_activations
        )
        (self._output_result_activation,) = self._activations(
            "output_result_activation",
            [ActivationDescriptor(_TANH)],
            None if output_result_activation is None else [output_result_activation],
        )

    @property
    def returns_states(self) -> bool:
        return self._descriptor.result_mode == LSTMResultMode.OUTPUT_AND_STATES

    def _activations(
        self, slot: str, default: list[ActivationDescriptor], given: Sequence[ActivationDescriptor] | None
    ) -> list[ActivationDescriptor]:
        if given is None:
            return default
        for activation in given:
            if not isinstance(activation, ActivationDescriptor):
                raise TypeError(f"LSTMLayer: {slot} needs ActivationDescriptors, not {type(activation).__name__}")
        self.expect(
            len(given) == len(default),
            f"{slot} needs {len(default)} descriptors (input, forget, cell, output), {len(given)} were given",
        )
        return list(given)

    def pass_through(
        self, run: Forward, x: Value, states: Sequence[Value], lengths: Value | None, layer: int, direction: int
    ) -> tuple[Value, Value, Value]:
        h0, c0 = states
        d = self._descriptor
        hidden, first = d.hidden_size, 4 * (direction * d.layer_count + layer)

        def gates(slot: str, *width: int) -> Value:
            own = self._lists[slot][first : first + 4]
            return ops.concatenate([run.read(parameter.tensor, (hidden, *width)) for parameter in own], 0)

        wx, wh = gates("input_weights", x.shape[2]), gates("hidden_weights", hidden)
        b = gates("biases") if "biases" in self._lists else ops.full(x, (4 * hidden,), 0.0)
        peepholes = gates("peephole_weights", hidden) if "peephole_weights" in self._lists else None
        reverse = direction == 1
        if peepholes is None and self._is_standard:
            return ops.lstm(x, wx, wh, b, h0, c0, lengths, reverse)
        activations = [partial(activate, activation) for activation in self._gate_activations]
        output = partial(activate, self._output_result_activation)
        y, h, c, *_ = ops.unrolled_lstm(x, wx, wh, b, h0, c0, lengths, reverse, activations, output, peepholes)
        return y, h, c

    @property
    def _is_standard(self) -> bool:
        """Are the activations those the `lstm` op has built in?"""
        given = [*self._gate_activations, self._output_result_activation]
        return all(
            activation.activation_type == kind and (kind == _SIGMOID or (activation.a, activation.b) == (1.0, 1.0))
            for activation, kind in zip(given, (*_STANDARD, _TANH), strict=True)
        )
