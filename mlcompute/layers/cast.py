"""Cast: the same numbers in another data type."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.enums import DataType
from mlcompute.layers.arguments import member
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor


class CastLayer(Layer):
    """y = x in another data type.   x (*)   ->   y (*)

    Floating numbers are cut towards zero on their way to integers; those an integer type cannot hold have no defined
    result. Every number but 0 becomes true. Gradients pass between floating types only.

    data_type  the type of the result
    """

    default_label = "Cast"
    source_types = ALL_TYPES
    moves_data = True

    data_type = ReadOnly[DataType]("The type of the result.")

    def __init__(self, data_type: DataType) -> None:
        super().__init__()
        self._data_type = member(self.who, "data_type", DataType, data_type)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        return [TensorDescriptor(x.shape, data_type=self._data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        return x  # every result is converted to the type its tensor has
