"""Objective: any tensor as something to be minimised."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mlcompute import ops
from mlcompute.errors import DataError, GraphError
from mlcompute.layers.arguments import between
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.ops.op import Value
from mlcompute.tensor import Tensor, TensorDescriptor


def is_loss(layer: Layer) -> bool:
    """Is what the layer computes minimised?"""
    return are_losses(type(layer))


@functools.cache  # of a class with abstract methods, Python asks slowly: large graphs ask it of every layer
def are_losses(kind: type[Layer]) -> bool:
    """Is what layers of a class compute minimised?"""
    return issubclass(kind, (LossLayer, ObjectiveLayer))


class ObjectiveLayer(Layer):
    """y = weight mean(x v), which is minimised.   x (*)   weight (1,)   v (n,) or as x   ->   y (1,)

    Sources: x, and, unless it is 1 for ever, a weight: a tensor with data of its own. `graph.minimize` makes both.
    Label: v, unless all are 1, a weight for every sample or element of x. The mean divides by the number of elements.
    """

    default_label = "Objective"
    source_types = FLOATS
    source_count = (1, 3)

    def __init__(self) -> None:  # Python's messages name the class the constructor stands in
        super().__init__()

    @property
    def weight(self) -> float:
        """What the mean is multiplied by. It may be set at any time; what is set counts from the next run."""
        tensor = self._weight_tensor
        values = None if tensor is None else tensor.data
        return 1.0 if values is None else float(values.item())

    @weight.setter
    def weight(self, value: float) -> None:
        number = between(self.who, "weight", value)
        tensor = self._weight_tensor
        if tensor is None or not tensor.keeps_data:
            raise GraphError(
                f"{self.who}: the layer has no weight that could be set", fix="make it with graph.minimize(tensor)"
            )
        tensor.data = [number]

    @property
    def _weight_tensor(self) -> Tensor | None:
        node = self._layer_state.node
        return node.sources[1] if node is not None and len(node.sources) > 1 else None

    def source_batch_axis(self, index: int, sources: Sequence[TensorDescriptor]) -> int | None:
        return None if index == 1 else 0

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        x, *weight = sources
        for one in weight:
            self.expect(
                one.element_count in (1, x.element_count) or one.shape == x.shape[:1],
                f"a weight has shape {one.shape}, what is minimised {x.shape}",
                expected="one number, (1,); of samples one each",
            )
            self.expect(
                one.data_type == x.data_type,
                f"the weight is {one.data_type.name}, what is minimised is {x.data_type.name}",
                error=DataError,
            )
        return [TensorDescriptor((1,), data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, *weights = sources
        for samples in (one for one in weights if one.size > 1):
            spread = x.shape if samples.size == x.size else (x.shape[0],) + (1,) * (x.rank - 1)
            x = x * ops.stop_gradient(ops.reshape(samples, spread))
        y = ops.reshape(ops.mean(x, range(x.rank)) if x.size > 1 else x, (1,))
        for number in (one for one in weights if one.size == 1):  # also the only sample's
            y = y * ops.reshape(number, (1,))
        return y
