"""Fully connected: every output is a weighted sum of every input."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.layers.convolution import ConvolutionDescriptor, WeightsAndBiases
from mlcompute.layers.layer import Forward
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor


class FullyConnectedLayer(WeightsAndBiases):
    """y = x wᵀ + b.   x (*, in) or (n, in, 1, 1)   w (out, in)   b (out)   ->   y (*, out) or (n, out, 1, 1)

    * stands for one to three axes
    weights     in * out elements in (out, in) order; any shape is accepted
    biases      out elements, or None
    descriptor  only its two channel counts matter
    """

    default_label = "FullyConnected"

    descriptor = ReadOnly[ConvolutionDescriptor]("The channel counts the layer was made with.")
    weights = ReadOnly[Tensor]("in * out elements in (out, in) order.")
    biases = ReadOnly[Tensor | None]("out elements; None when there are none.")

    # Python begins its message about a wrong argument with the class the constructor stands in.
    def __init__(self, weights: Tensor, biases: Tensor | None, descriptor: ConvolutionDescriptor) -> None:
        super().__init__(weights, biases, descriptor)

    def _fans(self) -> tuple[int, int, str]:
        d = self._descriptor
        inputs = d.input_feature_channel_count
        return inputs, d.output_feature_channel_count, f"{inputs} inputs"

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        d = self._descriptor
        inputs, outputs = d.input_feature_channel_count, d.output_feature_channel_count
        self.expect(len(x.shape) >= 2, "the source has one axis, at least (n, in) is needed", source=x.shape)
        if x.shape[1:] == (inputs, 1, 1):
            return [TensorDescriptor((x.shape[0], outputs, 1, 1), data_type=x.data_type)]
        if x.shape[-1] != inputs:
            raise ShapeError(
                f"{self.who}: input_feature_channel_count is {inputs}, the source has {x.shape[-1]}",
                source=x.shape,
                fix=f"set input_feature_channel_count={x.shape[-1]} or reshape the source",
            )
        return [TensorDescriptor((*x.shape[:-1], outputs), data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        is_image = sources[0][1:] == (self._descriptor.input_feature_channel_count, 1, 1)
        return 1 if is_image else len(result) - 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        d = self._descriptor
        inputs, outputs = d.input_feature_channel_count, d.output_feature_channel_count
        is_image = x.shape[1:] == (inputs, 1, 1)
        rows = ops.reshape(x, (x.size // inputs, inputs))
        y = ops.matmul(rows, ops.transpose(run.read(self._weights, (outputs, inputs))))
        if self._biases is not None:
            y = y + run.read(self._biases, (outputs,))
        return ops.reshape(y, (x.shape[0], outputs, 1, 1) if is_image else (*x.shape[:-1], outputs))
