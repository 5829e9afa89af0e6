"""What recurrent layers share: sources, stacked layers, directions, lengths, initial and last states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from mlcompute import ops
from mlcompute.enums import DataType
from mlcompute.errors import DataError, warn
from mlcompute.layers.arguments import real, whole
from mlcompute.layers.layer import FLOATS, Forward
from mlcompute.layers.parameter_lists import ParameterLists
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor


class RecurrentDescriptor:
    """What descriptors of recurrent layers share: all are frozen dataclasses with these fields."""

    input_size: int
    hidden_size: int
    layer_count: int
    is_bidirectional: bool
    returns_sequences: bool
    dropout: float

    def __post_init__(self) -> None:
        who = type(self).__name__
        for name in ("input_size", "hidden_size", "layer_count"):
            object.__setattr__(self, name, whole(who, name, getattr(self, name), 1))
        object.__setattr__(self, "dropout", real(who, "dropout", self.dropout))
        for name in ("uses_biases", "batch_first", "is_bidirectional", "returns_sequences", "returns_states"):
            if hasattr(self, name):
                object.__setattr__(self, name, bool(getattr(self, name)))
        if not 0 <= self.dropout < 1:
            raise DataError(f"{who}: dropout is {self.dropout}", expected="0 <= dropout < 1")

    @property
    def direction_count(self) -> int:
        """2 when sequences are read backwards too, else 1."""
        return 2 if self.is_bidirectional else 1


class Recurrent(ParameterLists):
    """Base of recurrent layers: x (batch, time, features)[, states][, lengths]   ->   y[, last states]."""

    source_types = FLOATS | {DataType.INT32}
    batch_axes = (0, 2, 2)
    #: What messages call the initial states.
    state_names: ClassVar[tuple[str, ...]] = ()
    #: Gates with tensors of their own.
    _separate_gates: ClassVar[int] = 1

    sizes = ReadOnly[RecurrentDescriptor]("The descriptor.", "_descriptor")

    @property
    @abstractmethod
    def returns_states(self) -> bool:
        """Are the last states results too?"""

    @abstractmethod
    def pass_through(
        self, run: Forward, x: Value, states: Sequence[Value], lengths: Value | None, layer: int, direction: int
    ) -> Sequence[Value]:
        """One layer in one direction: outputs (batch, time, hidden) and last states (batch, hidden)."""

    def _keep_passes(
        self, slot: str, tensors: Sequence[Tensor], width: Callable[[int], int] | None, gates: int = 1
    ) -> None:
        """Make tensors the parameters of a slot: those of every layer and direction, (gates * hidden, width(layer))."""
        d, separate = self.sizes, self._separate_gates
        rows = gates * d.hidden_size
        layers = [layer for _ in range(d.direction_count) for layer in range(d.layer_count) for _ in range(separate)]
        shapes = [(rows,) if width is None else (rows, width(layer)) for layer in layers]
        order = f"{d.layer_count} layer(s) x {d.direction_count} direction(s)"
        if separate > 1:
            self._keep_list(slot, tensors, shapes, f"{separate} gates x {order}", ("hidden", "inputs"))
        else:
            self._keep_list(slot, tensors, shapes, order, ("gates", "inputs"), d.hidden_size)

    def input_width(self, layer: int) -> int:
        """Features that a layer of the stack reads."""
        d = self.sizes
        return d.input_size if layer == 0 else d.direction_count * d.hidden_size

    def lengths_at(self, sources: Sequence[TensorDescriptor]) -> int | None:
        """Which source holds the lengths of the sequences."""
        last = len(sources) - 1
        if last == 1 == len(self.state_names):  # a state or lengths: their types differ
            return last if sources[last].data_type not in FLOATS else None
        return last if last in (1, 1 + len(self.state_names)) else None

    def source_batch_axis(self, index: int, sources: Sequence[TensorDescriptor]) -> int | None:
        return 0 if index in (0, self.lengths_at(sources)) else 2

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return len(result) - 1

    @property
    def _expected(self) -> str:
        return f"input[, {', '.join(self.state_names)}][, lengths]"

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        d = self.sizes
        x, lengths_at = sources[0], self.lengths_at(sources)
        floats, lengths = (sources, None) if lengths_at is None else (sources[:-1], sources[-1])
        for source in floats:
            self.expect(
                source.data_type in FLOATS,
                f"the input and the states must be floating, not {source.data_type.name}",
                expected=self._expected,
                error=DataError,
            )
        self.expect(len(x.shape) == 3, f"the input must be (batch, time, {d.input_size}), not {x.shape}")
        self.expect(
            x.shape[2] == d.input_size,
            f"input_size is {d.input_size}, the source has {x.shape[2]} features",
            source=x.shape,
            fix=f"set input_size={x.shape[2]} or reshape the source",
        )
        batch, steps, _ = x.shape
        states = (d.layer_count, d.direction_count, batch, d.hidden_size)
        for name, state in zip(self.state_names, floats[1:], strict=False):
            self.expect(
                state.shape == states,
                f"{name} has shape {state.shape}",
                expected=f"(layer_count, directions, batch, hidden) = {states}",
            )
        if lengths is not None:
            self.expect(
                lengths.data_type == DataType.INT32,
                f"the last of {len(sources)} sources holds the sequence lengths and must be INT32, "
                f"not {lengths.data_type.name}",
                expected=self._expected,
                error=DataError,
            )
            self.expect(
                lengths.element_count == lengths.shape[0] == batch,
                f"the sequence lengths have shape {lengths.shape}",
                expected=f"one per sample: ({batch},)",
            )
        elif min(x.sequence_lengths or (steps,)) < steps:
            warn(
                f"{self.who}: the source is declared to hold sequences of different lengths, but recurrent layers read "
                f"lengths from a last source, and there is none: all {steps} steps of every sequence are computed. Add "
                f"mlc.Tensor(shape=({batch},), data_type=mlc.DataType.INT32) to the sources; feed it, or give it data."
            )
        y = (batch, steps if d.returns_sequences else 1, d.direction_count * d.hidden_size)
        shapes = [y, *([states] * len(self.state_names) if self.returns_states else [])]
        return [TensorDescriptor(shape, data_type=x.data_type) for shape in shapes]

    def forward(self, run: Forward, *sources: Value) -> Sequence[Value]:
        d, count = self.sizes, len(self.state_names)
        x = sources[0]
        batch, directions, hidden = x.shape[0], d.direction_count, d.hidden_size
        lengths = None
        if len(sources) > 1 and not sources[-1].is_floating:
            # A run of fewer samples than lengths and states were made for reads the leading ones.
            lengths = ops.slice_(ops.reshape(sources[-1], (sources[-1].size,)), (0,), (batch,))
        given = sources[1:] if lengths is None else sources[1:-1]
        states: Sequence[Value | None] = given or [None] * count
        last: list[list[Value]] = [[] for _ in range(count)]
        for layer in range(d.layer_count):
            if layer and run.training and d.dropout:
                is_kept = run.uniform(x, x.shape, 0) >= d.dropout
                x = ops.select(is_kept, x * (1.0 / (1.0 - d.dropout)), 0.0)
            outputs = []
            for direction in range(directions):
                starts = [_start(x, state, layer, direction, hidden) for state in states]
                y, *ends = self.pass_through(run, x, starts, lengths, layer, direction)
                outputs.append(y)
                for list_, end in zip(last, ends, strict=True):
                    list_.append(end)
            x = ops.concatenate(outputs, 2)
        if not d.returns_sequences:
            x = ops.reshape(ops.concatenate(last[0][-directions:], 1), (batch, 1, directions * hidden))
        if not self.returns_states:
            return [x]
        shape = (d.layer_count, directions, batch, hidden)
        return [x, *(ops.reshape(ops.concatenate(list_, 0), shape) for list_ in last)]


def _start(x: Value, state: Value | None, layer: int, direction: int, hidden: int) -> Value:
    """The state (batch, hidden) a pass starts from: of (layers, directions, batch, hidden) given, or zeros."""
    batch = x.shape[0]
    if state is None:
        return ops.full(x, (batch, hidden), 0.0)
    start, end = (layer, direction, 0, 0), (layer + 1, direction + 1, batch, hidden)
    return ops.reshape(ops.slice_(state, start, end), (batch, hidden))
