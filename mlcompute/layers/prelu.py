"""PReLU: a rectifier whose slope for negative numbers is trained."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import axis_of, integer
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter


class PReLULayer(Layer):
    """y = x where positive, else slope x.   x (*)   slopes (1) or (channels)   ->   y (*)

    slopes     one element for all of x, or one per channel
    dimension  the axis that has the channels; negative numbers count from the end
    """

    default_label = "PReLU"
    source_types = FLOATS

    slopes = ReadOnly[Tensor]("One element, or one per channel.")
    dimension = ReadOnly[int]("The axis that has the channels.")
    slopes_parameter = ReadOnly[TensorParameter]("The slopes as the optimizer sees them.")

    def __init__(self, slopes: Tensor, dimension: int = 1) -> None:
        super().__init__()
        if not isinstance(slopes, Tensor):
            raise TypeError(f"{self.who}: slopes must be a Tensor, not {type(slopes).__name__}")
        self._slopes = self.sized(slopes, "slopes", slopes.descriptor.element_count, "any number")
        self._slopes_parameter = TensorParameter(slopes)
        self._dimension = integer(self.who, "dimension", dimension)

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {"slopes": self._slopes_parameter}

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self._slope_shape(x.shape)
        return [x]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        return ops.select(x > 0.0, x, x * run.read(self._slopes, self._slope_shape(x.shape)))

    def _slope_shape(self, x: Shape) -> Shape:
        """The slopes with as many axes as x, so that they broadcast."""
        count = self._slopes.descriptor.element_count
        if count == 1:
            return (1,) * len(x)
        axis = axis_of(self.who, self._dimension, len(x))
        self.expect(
            x[axis] == count,
            f"there are {count} slopes, axis {axis} of the source has {x[axis]} channels",
            source=x,
            fix=f"give one slope, or {x[axis]}",
        )
        return tuple(count if d == axis else 1 for d in range(len(x)))
