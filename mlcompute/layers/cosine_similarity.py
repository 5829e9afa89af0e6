"""Cosine similarity: the cosine of the angle between vectors."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import axis_of, between, integer, same_type
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class CosineSimilarityLayer(Layer):
    """z = sum(x y) / (max(‖x‖, epsilon) max(‖y‖, epsilon)) along one axis, which is gone afterwards.

    x (n, *, d, *)   y the same, broadcast   ->   z (n, *, *)

    dimension  the axis of the vectors, not the batch; negative numbers count from the end
    epsilon    keeps vectors of zeros from dividing by zero; their similarity to anything is 0
    """

    default_label = "CosineSimilarity"
    source_types = FLOATS
    source_count = (2, 2)

    dimension = ReadOnly[int]("The axis of the vectors.")
    epsilon = ReadOnly[float]("The least length of a vector.")

    def __init__(self, dimension: int = 1, epsilon: float = 1e-8) -> None:
        super().__init__()
        self._dimension = integer(self.who, "dimension", dimension)
        self._epsilon = between(self.who, "epsilon", epsilon, least=1e-18)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        x, y = sources
        same_type(self.who, sources)
        shape, axis = self._joined(x.shape, y.shape)
        return [TensorDescriptor((*shape[:axis], *shape[axis + 1 :]), data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return None

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, y = sources
        shape, axis = self._joined(x.shape, y.shape)
        product = ops.sum_(x * y, (axis,))
        z = product / (self._length(x, axis) * self._length(y, axis))
        return ops.reshape(z, (*shape[:axis], *shape[axis + 1 :]))

    def _length(self, x: Value, axis: int) -> Value:
        """max(‖x‖, epsilon), whose slope is 0 where epsilon counts: that of the root would be infinite at 0."""
        squares = ops.sum_(x * x, (axis,))
        is_short = squares <= self._epsilon * self._epsilon
        return ops.select(is_short, self._epsilon, ops.sqrt(ops.select(is_short, 1.0, squares)))

    def _joined(self, x: Shape, y: Shape) -> tuple[Shape, int]:
        """The common shape and the axis of the vectors, counted from the front."""
        self.expect(
            len(x) == len(y) and len(x) >= 2, f"the sources have shapes {x} and {y}", expected="as many axes, 2 or more"
        )
        axis = axis_of(self.who, self._dimension, len(x))
        self.expect(
            axis != 0, "dimension is 0, which counts samples", fix="give the axis of the vectors: -1 for the last"
        )
        try:
            return broadcast_shape(x, y), axis
        except ValueError:
            self.expect(False, f"the sources {x} and {y} do not broadcast", expected="equal extents, or 1")
            raise
