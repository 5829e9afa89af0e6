"""What every layer is: a label, its tensors, a rule for its results, and a forward pass written in ops."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mlcompute.enums import DataType, DeviceType
from mlcompute.errors import DataError, Error, GraphError, ShapeError
from mlcompute.foreign_names import refusing
from mlcompute.layers.layer_state import LayerState
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.device import Device

_ids = itertools.count()

FLOATS = frozenset(kind for kind in DataType if kind.is_floating)
#: What to do with other numbers where only these will do.
AS_FLOATS = "convert it: graph.cast(x, mlc.DataType.FLOAT32)"
NUMBERS = frozenset(set(DataType) - {DataType.INVALID, DataType.COUNT, DataType.BOOLEAN})
ALL_TYPES = NUMBERS | {DataType.BOOLEAN}
INDICES = frozenset({DataType.INT32, DataType.INT64})


class Forward(Protocol):
    """What a layer may ask while it describes its forward pass."""

    #: False in inference graphs and with FORWARD_FOR_INFERENCE: dropout off, running statistics used.
    training: bool
    #: False for a layer the optimizer leaves alone: running statistics are then used, and stay as they are.
    updates: bool
    #: Is it a slice of the batch, of which the processes of a group run others?
    is_slice: bool

    def read(self, tensor: Tensor, shape: Shape | None = None) -> Value:
        """The value of one of the layer's own tensors, seen with another shape if one is given."""

    def write(self, tensor: Tensor, value: Value) -> None:
        """Store a new value into one of the layer's tensors when the pass has succeeded."""

    def uniform(self, like: Value, shape: Shape, seed: int) -> Value:
        """Fresh float32 numbers in [0, 1): others in every training pass, the same for a seed (0: the platform's)."""

    def shape_of(self, tensor: Tensor) -> Shape:
        """The shape a tensor of the graph has in the batch that is described."""

    def slice_share(self) -> Value:
        """What part of the batch the slice is: a number."""

    def sum_over_slices(self, value: Value) -> Value:
        """A value of every slice, added up; where the batch is not cut, the value."""

    def label_weights(self, layer: Layer) -> Value | None:
        """The label weights fed to a loss layer, or None."""

    def gradient(self, layer: Layer, y: Value, xs: Sequence[Value]) -> list[Value]:
        """The gradient of the sum of y with respect to each of the values it is computed from."""


class Layer(ABC):
    """Base class of all layers. A layer describes shapes and ops and computes nothing.

    A concrete layer gives `default_label`, `source_types`, `results`, `forward`, and, where it has them,
    `parameters` (tensors the optimizer updates) and `statistics` (tensors the forward pass updates).
    """

    #: What `label` is at first.
    default_label: ClassVar[str] = ""
    #: The name in messages, summaries and files.
    label: str = ""
    #: Are the results and gradients of the layer kept in every run, to be looked at?
    is_debugging_enabled: bool = False
    #: Data types its sources may have; `supports_data_type` answers from it.
    source_types: ClassVar[frozenset[DataType]] = frozenset()
    #: True for layers that only move elements: they run in the sources' own type. All others compute
    #: FLOAT16 and BFLOAT16 sources in float32 and round the results back.
    moves_data: ClassVar[bool] = False
    #: How many sources the layer takes: (least, most).
    source_count: ClassVar[tuple[int, int]] = (1, 1)
    #: Axis of each result that counts samples; 0 for results beyond the end. None: it may be any.
    batch_axes: ClassVar[tuple[int, ...] | None] = ()
    #: True where axes change places: the samples of a result may lie along another axis than those of the source.
    moves_axes: ClassVar[bool] = False

    layer_id = ReadOnly[int]("A number that is unique in the process.")
    device_type = ReadOnly[DeviceType | None](
        "The kind of device the layer was compiled for; None before.", "_layer_state.device_type"
    )

    if not TYPE_CHECKING:
        __setattr__ = refusing(
            {
                "trainable": "layer.updates, or graph.freeze(name) and graph.unfreeze(name)",
                "requires_grad": "layer.updates, or graph.freeze(name) and graph.unfreeze(name)",
            }
        )

    def __init__(self) -> None:
        self._layer_id = next(_ids)
        self.label = self.default_label
        self._layer_state = LayerState()

    def __copy__(self) -> Self:
        """Another layer over the same tensors, part of no graph: weights and statistics are shared."""
        copied = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(copied)[name] = copy.copy(value) if isinstance(value, dict) else value
        copied._layer_id, copied._layer_state = next(_ids), LayerState()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An equal layer with tensors of its own, part of no graph."""
        copied = memo[id(self)] = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(copied)[name] = copy.deepcopy(value, memo)
        copied._layer_id = next(_ids)
        return copied

    def __repr__(self) -> str:
        slots = [f"{name} {slot.tensor.descriptor.shape}" for name, slot in self.parameters.items()]
        return f"{type(self).__name__}({', '.join([repr(self.label), *slots])})"

    def _repr_html_(self) -> str:
        from mlcompute.seeing.notebook import layer_html

        return layer_html(self)

    @property
    def updates(self) -> bool:
        """Is the layer trained? False leaves parameters and running statistics as they are; gradients pass through.

        `disable_update` of `node` and `updates=False` of the builders set it; it may be changed at any time and takes
        effect at the next run. A normalization that is not trained uses its running statistics, as in inference.
        """
        node = self._layer_state.node
        return node is None or node.updates

    @updates.setter
    def updates(self, value: bool) -> None:
        node = self._layer_state.node
        if node is None:
            raise GraphError(f"{self.who}: the layer is part of no graph", fix="set it when the layer has been added")
        if bool(value) != node.updates:
            node.updates = bool(value)
            own = [slot.tensor for slot in self.parameters.values()] + list(self.statistics.values())
            for tensor in own:
                state_of(tensor).outdated()

    @classmethod
    def supports_data_type(cls, data_type: DataType, *, on: Device) -> bool:
        """Do layers of this class accept sources of `data_type` on that device?"""
        from mlcompute.device import expect_device

        expect_device(f"{cls.__name__}.supports_data_type", "on", on)
        return data_type in cls.source_types

    # What the graph and the compiler ask ---------------------------------------------------------------------

    @abstractmethod
    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        """Descriptors of the results for given sources; raises ShapeError or DataError when they do not fit.

        Called after `check_sources`, so the number and the types of the sources are right.
        """

    @abstractmethod
    def forward(self, run: Forward, *sources: Any, **_: Any) -> Value | Sequence[Value]:
        """Describe the results in ops. Sources are Values; one parameter each, or all together, as a layer has them."""

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        """Trainable tensors by the name of their slot, e.g. {"weights": ..., "biases": ...}."""
        return {}

    @property
    def passes_gradient(self) -> bool:
        """False for a layer no gradient passes, whatever the type of its results."""
        return True

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Tensors the forward pass reads and updates but the optimizer never touches."""
        return {}

    def source_batch_axis(self, index: int, sources: Sequence[TensorDescriptor]) -> int | None:
        """The axis of source `index` that counts samples; None where all samples share it."""
        return 0

    def adds_source(self, index: int) -> bool:
        """Is floating-point source `index` added to others, as an attention mask is? Boolean data is then refused."""
        return False

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        """The axis of the first result that holds features (channels, classes); None where it cannot be told.

        known  the feature axes of the sources. By default, the result has its features on the same axis
        """
        for axis, shape in zip(known, sources, strict=True):
            if axis is not None and len(shape) == len(result):
                return axis
        return None

    # Helpers for concrete layers -----------------------------------------------------------------------------

    @property
    def who(self) -> str:
        """How messages name the layer: FullyConnected 'fc2'."""
        return f"{type(self).__name__.removesuffix('Layer')} '{self.label}'"

    def expect(
        self, condition: bool, message: str, *, fix: str = "", error: type[Error] = ShapeError, **facts: object
    ) -> None:
        """Raise an error that names the layer unless the condition holds."""
        if not condition:
            raise error(f"{self.who}: {message}", fix=fix, **facts)

    def check_sources(self, sources: Sequence[TensorDescriptor]) -> None:
        """The right number of sources, each of a type the layer accepts."""
        least, most = self.source_count
        if not least <= len(sources) <= most:
            wanted = str(least) if least == most else f"{least} to {most}" if most < 1 << 30 else f"{least} or more"
            raise ShapeError(f"{self.who}: takes {wanted} source(s), {len(sources)} were given")
        for source in sources:
            if source.data_type not in self.source_types:
                accepted = ", ".join(sorted(kind.name for kind in self.source_types))
                if not self.source_types:
                    raise DataError(
                        f"{self.who}: the class declares no types of its sources",
                        source=source,
                        fix=f"in class {type(self).__name__}: source_types = frozenset({{mlc.DataType."
                        f"{source.data_type.name}}})",
                    )
                fix = AS_FLOATS if self.source_types & FLOATS and not source.data_type.is_floating else ""
                if not any(kind.is_floating for kind in self.source_types):
                    kind = f"mlc.DataType.{accepted.rpartition(', ')[2]}"
                    fix = f"declare an input so, graph.input(shape, data_type={kind}); or graph.cast(x, {kind})"
                raise DataError(
                    f"{self.who}: a source of type {source.data_type.name} is not supported",
                    source=source,
                    expected=accepted,
                    fix=fix,
                )

    def sized(self, tensor: Tensor, slot: str, count: int, meaning: str) -> Tensor:
        """Check that a parameter tensor has exactly `count` elements, in any shape."""
        if not isinstance(tensor, Tensor):
            hint = ": mlc.Tensor(data=array)" if hasattr(tensor, "__array__") else ""
            raise TypeError(f"{type(self).__name__}: {slot} must be a Tensor, not {type(tensor).__name__}{hint}")
        descriptor = tensor.descriptor
        if descriptor.element_count != count:
            raise ShapeError(
                f"{self.who}: {slot} needs {count} elements ({meaning}), the tensor has {descriptor.element_count}",
                tensor=f"{descriptor.shape} '{tensor.label}'",
            )
        if not descriptor.data_type.is_floating:
            raise DataError(f"{self.who}: {slot} must be of a floating type, not {descriptor.data_type.name}")
        return tensor


def parameter_of(tensor: Tensor | None) -> TensorParameter | None:
    """The updatable parameter that goes with an optional tensor."""
    return None if tensor is None else TensorParameter(tensor)
