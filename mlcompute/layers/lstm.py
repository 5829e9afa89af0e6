"""LSTM: a recurrent layer with a gated memory; stacked, and in both directions, if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mlcompute import ops
from mlcompute.enums import ActivationType, LSTMResultMode
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.activation import ActivationDescriptor, activate
from mlcompute.layers.arguments import member, real, whole
from mlcompute.layers.layer import Forward
from mlcompute.layers.read_only import ReadOnly
from mlcompute.layers.recurrent import Recurrent
from mlcompute.ops.op import Value
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor, TensorParameter

_SIGMOID, _TANH = ActivationType.SIGMOID, ActivationType.TANH
_STANDARD = (_SIGMOID, _SIGMOID, _TANH, _SIGMOID)


@dataclass(frozen=True)
class LSTMDescriptor:
    """Sizes and options of an LSTM layer. Immutable.

    layer_count        how many layers are stacked; each reads the outputs of the one below
    batch_first        only True: sources are (batch, time, features)
    returns_sequences  True: the output at every time; False: only the last
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
        who = "LSTMDescriptor"
        checked: dict[str, object] = {
            name: whole(who, name, getattr(self, name), 1) for name in ("input_size", "hidden_size", "layer_count")
        }
        checked["dropout"] = real(who, "dropout", self.dropout)
        for name in ("uses_biases", "batch_first", "is_bidirectional", "returns_sequences"):
            checked[name] = bool(getattr(self, name))
        checked["result_mode"] = member(who, "result_mode", LSTMResultMode, self.result_mode)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not 0 <= self.dropout < 1:
            raise DataError(f"{who}: dropout is {self.dropout}", expected="0 <= dropout < 1")
        if not self.batch_first:
            raise ShapeError(
                f"{who}: batch_first=False is not supported",
                expected="sources of shape (batch, time, features)",
                fix="put TransposeLayer((1, 0, 2)) before the LSTM",
            )

    @property
    def direction_count(self) -> int:
        """2 when sequences are read backwards too, else 1."""
        return 2 if self.is_bidirectional else 1

    def copy(self) -> LSTMDescriptor:
        """An equal, independent descriptor."""
        return replace(self)

    __copy__ = copy


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

    descriptor = ReadOnly[LSTMDescriptor]("The sizes and options the layer was made with.")
    output_result_activation = ReadOnly[ActivationDescriptor](
        "The activation of the cell state on its way to the output."
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
        self._input_weights = self._listed("input_weights", input_weights, self.input_width)
        self._hidden_weights = self._listed("hidden_weights", hidden_weights, lambda _: hidden)
        self._biases = None if biases is None else self._listed("biases", biases, None)
        self._peephole_weights = (
            None if peephole_weights is None else self._listed("peephole_weights", peephole_weights, lambda _: hidden)
        )
        self._gate_activations = self._activations(
            "gate_activations", [ActivationDescriptor(kind) for kind in _STANDARD], gate_activations
        )
        (self._output_result_activation,) = self._activations(
            "output_result_activation",
            [ActivationDescriptor(_TANH)],
            None if output_result_activation is None else [output_result_activation],
        )
        self._parameters: dict[str, list[TensorParameter]] = {
            slot: [TensorParameter(tensor) for tensor in tensors]
            for slot, tensors in {
                "input_weights": self._input_weights,
                "hidden_weights": self._hidden_weights,
                "biases": self._biases,
                "peephole_weights": self._peephole_weights,
            }.items()
            if tensors is not None
        }

    @property
    def sizes(self) -> LSTMDescriptor:
        return self._descriptor

    @property
    def returns_states(self) -> bool:
        return self._descriptor.result_mode == LSTMResultMode.OUTPUT_AND_STATES

    def _listed(self, slot: str, tensors: Sequence[Tensor], width: Callable[[int], int] | None) -> list[Tensor]:
        """A list of tensors, checked: four per layer and direction, hidden * width(layer) elements each."""
        d = self._descriptor
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"LSTMLayer: {slot} must be a list of Tensors, not {type(tensors).__name__}")
        count = 4 * d.layer_count * d.direction_count
        self.expect(
            len(tensors) == count,
            f"{slot} needs {count} tensors, {len(tensors)} were given",
            expected=f"4 gates x {d.layer_count} layer(s) x {d.direction_count} direction(s)",
        )
        for index, tensor in enumerate(tensors):
            name, inputs = f"{slot}[{index}]", 1 if width is None else width(index // 4 % d.layer_count)
            meaning = f"{d.hidden_size} hidden" if width is None else f"{d.hidden_size} hidden x {inputs} inputs"
            self.sized(tensor, name, d.hidden_size * inputs, meaning)
            if width is not None:
                state_of(tensor).set_fans(inputs, d.hidden_size)
        return list(tensors)

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

    @property
    def gate_activations(self) -> list[ActivationDescriptor]:
        """Activations of the input, forget, cell and output gates."""
        return list(self._gate_activations)

    @property
    def input_weights(self) -> list[Tensor]:
        """What multiplies the input; four per layer and direction."""
        return list(self._input_weights)

    @property
    def hidden_weights(self) -> list[Tensor]:
        """What multiplies the hidden state; four per layer and direction."""
        return list(self._hidden_weights)

    @property
    def peephole_weights(self) -> list[Tensor] | None:
        """What multiplies the cell state; None without peepholes."""
        return None if self._peephole_weights is None else list(self._peephole_weights)

    @property
    def biases(self) -> list[Tensor] | None:
        """What is added; None when there are none."""
        return None if self._biases is None else list(self._biases)

    @property
    def input_weights_parameters(self) -> list[TensorParameter]:
        """The input weights as the optimizer sees them."""
        return list(self._parameters["input_weights"])

    @property
    def hidden_weights_parameters(self) -> list[TensorParameter]:
        """The hidden weights as the optimizer sees them."""
        return list(self._parameters["hidden_weights"])

    @property
    def peephole_weights_parameters(self) -> list[TensorParameter] | None:
        """The peephole weights as the optimizer sees them; None without peepholes."""
        slots = self._parameters.get("peephole_weights")
        return None if slots is None else list(slots)

    @property
    def biases_parameters(self) -> list[TensorParameter] | None:
        """The biases as the optimizer sees them; None when there are none."""
        slots = self._parameters.get("biases")
        return None if slots is None else list(slots)

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {f"{slot}_{k}": p for slot, listed in self._parameters.items() for k, p in enumerate(listed)}

    def pass_through(
        self, run: Forward, x: Value, states: Sequence[Value], lengths: Value | None, layer: int, direction: int
    ) -> tuple[Value, Value, Value]:
        h0, c0 = states
        d = self._descriptor
        hidden, first = d.hidden_size, 4 * (direction * d.layer_count + layer)

        def gates(tensors: list[Tensor], *width: int) -> Value:
            return ops.concatenate([run.read(tensor, (hidden, *width)) for tensor in tensors[first : first + 4]], 0)

        wx, wh = gates(self._input_weights, x.shape[2]), gates(self._hidden_weights, hidden)
        b = ops.full(x, (4 * hidden,), 0.0) if self._biases is None else gates(self._biases)
        peepholes = None if self._peephole_weights is None else gates(self._peephole_weights, hidden)
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
