"""Softmax: numbers along one axis become probabilities, or their logarithms."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.enums import SoftmaxOperation
from mlcompute.layers.arguments import LEAST_AXIS, axis_of, member, whole
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class SoftmaxLayer(Layer):
    """y = e^x / sum e^x along one axis, or its logarithm.   x (*)   ->   y (*)

    dimension  the axis that sums to 1: by default the channels, axis 1, and not the last, which is -1
    """

    default_label = "Softmax"
    source_types = FLOATS

    operation = ReadOnly[SoftmaxOperation]("Probabilities or their logarithms.")
    dimension = ReadOnly[int]("The axis that sums to 1.")

    def __init__(self, operation: SoftmaxOperation, dimension: int = 1) -> None:
        super().__init__()
        self._operation = member(self.who, "operation", SoftmaxOperation, operation)
        self._dimension = whole(self.who, "dimension", dimension, LEAST_AXIS)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self._dimension = axis_of(self.who, self._dimension, x.dimension_count)
        return [x]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return self._dimension

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        if self._operation == SoftmaxOperation.LOG_SOFTMAX:
            return ops.log_softmax(x, self._dimension)
        return ops.softmax(x, self._dimension)
