"""The gradient of one tensor with respect to others, as tensors of the graph."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class GradientLayer(Layer):
    """d(sum of y) / dx for every x.   y (*) and x ...   ->   like each x

    The first source is what is differentiated, the others are what it is differentiated with respect to: tensors of
    the graph that y is computed from, inputs, results or parameters. The results are computed in the forward pass; they
    may be part of a loss, and have gradients of their own (WGAN-GP, physics-informed networks). Samples that do not
    influence each other have each their own gradient.

    Refused when the graph is compiled: an x that y does not depend on; an operation on the way that cannot be
    differentiated a second time, where a second derivative is needed.
    """

    default_label = "Gradient"
    source_types = FLOATS
    source_count = (2, 1 << 30)
    batch_axes = None

    def __init__(self) -> None:  # Python's messages name the class the constructor stands in
        super().__init__()

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        return [TensorDescriptor(x.shape, data_type=x.data_type) for x in sources[1:]]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return super().feature_axis(known[1:], sources[1:], result)

    def forward(self, run: Forward, *sources: Value) -> Sequence[Value]:
        y, *xs = sources
        return run.gradient(self, y, xs)
