"""Choosing between two tensors, element by element."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import same_type
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.op import BOOL, Shape, Value
from mlcompute.tensor import TensorDescriptor


class SelectionLayer(Layer):
    """z = x where the condition is not zero, else y.   condition, x, y   ->   z, all three broadcast to one shape

    The sources come in this order. A condition of shape (n, 1) selects whole rows of (n, m) sources. No gradient
    flows to the condition.
    """

    default_label = "Selection"
    source_types = ALL_TYPES
    moves_data = True
    source_count = (3, 3)

    def __init__(self) -> None:  # Python's messages name the class the constructor stands in
        super().__init__()

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        condition, x, y = sources
        same_type(self.who, (x, y))
        return [TensorDescriptor(self._joined(condition.shape, x.shape, y.shape), data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        condition, x, y = sources
        self._joined(condition.shape, x.shape, y.shape)
        chosen = condition if condition.dtype == BOOL else ops.not_equal(condition, 0)
        return ops.select(chosen, x, y)

    def _joined(self, condition: Shape, x: Shape, y: Shape) -> Shape:
        try:
            return broadcast_shape(condition, x, y)
        except ValueError:
            by_rows = len(condition) == 1 and len(x) > 1 and condition[0] == x[0]
            self.expect(
                False,
                f"condition {condition}, x {x} and y {y} do not broadcast to one shape",
                fix=f"reshape the condition to {(condition[0], *(1,) * (len(x) - 1))} to select whole rows"
                if by_rows
                else "aligned at the last axis, extents must be equal or 1",
            )
            raise
