"""Gram matrices: how strongly the channels of an image go together, the style of neural style transfer."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import real
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor


class GramMatrixLayer(Layer):
    """y[n, f, 0, c] = scale Σₚ x[n, f, p] x[n, c, p] over the pixels p.   x (n, c, h, w)   ->   y (n, c, 1, c)

    scale  the only factor: there is no division by the number of pixels
    """

    default_label = "GramMatrix"
    source_types = FLOATS

    scale = ReadOnly[float]("The factor of every element.")

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = real(self.who, "scale", scale)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self.expect(len(x.shape) == 4, f"the source has shape {x.shape}", expected="four axes (n, c, h, w)")
        n, c = x.shape[:2]
        return [TensorDescriptor((n, c, 1, c), data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        n, c, h, w = x.shape
        pixels = ops.reshape(x, (n, c, h * w))
        gram = ops.matmul(pixels, ops.transpose(pixels))
        return ops.reshape(gram if self._scale == 1.0 else gram * self._scale, (n, c, 1, c))
