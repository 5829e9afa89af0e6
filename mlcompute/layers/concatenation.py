"""Concatenation: tensors joined along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import LEAST_AXIS, axis_of, same_type, whole
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class ConcatenationLayer(Layer):
    """y = the sources one after another along `dimension`; all other extents agree.

    x₁ (*, a, *), x₂ (*, b, *), ...   ->   y (*, a + b + ..., *)

    dimension  the axis to join along; 1 is the channel axis, -1 the last
    """

    default_label = "Concat"
    source_types = ALL_TYPES
    moves_data = True
    source_count = (2, 1 << 30)

    dimension = ReadOnly[int]("The axis the sources are joined along.")

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self._dimension = whole(self.who, "dimension", dimension, LEAST_AXIS)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        same_type(self.who, sources)
        shape = self._joined([source.shape for source in sources])
        return [TensorDescriptor(shape, data_type=sources[0].data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        self._joined([source.shape for source in sources])
        return ops.concatenate(sources, self._dimension)

    def _joined(self, shapes: Sequence[Shape]) -> Shape:
        first = shapes[0]
        axis = axis_of(self.who, self._dimension, len(first))
        for index, shape in enumerate(shapes):
            self.expect(
                len(shape) == len(first) and (*shape[:axis], *shape[axis + 1 :]) == (*first[:axis], *first[axis + 1 :]),
                f"source {index} has shape {shape}, source 0 has {first}",
                expected=f"equal extents on every axis but {axis}",
            )
        self._dimension = axis
        return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
