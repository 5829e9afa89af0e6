"""StopGradient: the same values without a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor


class StopGradientLayer(Layer):
    """y = x, and no gradient passes from y to x.   x (*)   ->   y (*)"""

    default_label = "StopGradient"
    source_types = FLOATS
    moves_data = True

    def __init__(self) -> None:  # Python's messages name the class the constructor stands in
        super().__init__()

    @property
    def passes_gradient(self) -> bool:
        """False."""
        return False

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        return [sources[0]]

    def forward(self, run: Forward, *sources: Value) -> Value:
        return ops.stop_gradient(sources[0])
