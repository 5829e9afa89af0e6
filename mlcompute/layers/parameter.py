"""Parameter: a trained tensor that belongs to no other layer."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter


class ParameterLayer(Layer):
    """y = value, which is trained.   ->   y like value

    `graph.parameter` makes it, and gives the value itself, which any layer may read. There are no sources.
    """

    default_label = "Parameter"
    source_types = ALL_TYPES
    source_count = (0, 0)
    moves_data = True

    value = ReadOnly[Tensor]("The tensor that is trained.", "_value.tensor")

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = TensorParameter(self.sized(value, "value", _count(value), "any shape"))

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {"value": self._value}

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        return [self.value.descriptor]

    def forward(self, run: Forward, *sources: Value) -> Value:
        return run.read(self.value)


def _count(value: object) -> int:
    return value.descriptor.element_count if isinstance(value, Tensor) else 0
