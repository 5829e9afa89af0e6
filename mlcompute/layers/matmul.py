"""Matmul of matrices and of stacks of matrices."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute import ops
from mlcompute.layers.arguments import real, same_type
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


@dataclass(frozen=True)
class MatMulDescriptor:
    """alpha op(X) op(Y), where op swaps the last two axes of an operand or leaves them.

    >>> MatMulDescriptor(0.5, transposes_y=True)
    MatMulDescriptor(alpha=0.5, transposes_x=False, transposes_y=True)
    """

    alpha: float = 1.0
    transposes_x: bool = False
    transposes_y: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", real("MatMulDescriptor", "alpha", self.alpha))
        object.__setattr__(self, "transposes_x", bool(self.transposes_x))
        object.__setattr__(self, "transposes_y", bool(self.transposes_y))

    def copy(self) -> MatMulDescriptor:
        """An equal descriptor."""
        return copy.copy(self)


class MatMulLayer(Layer):
    """z = alpha op(x) op(y).   op(x) (*, m, k)   op(y) (*, k, n)   ->   z (*, m, n); leading axes broadcast

    Sources: x, y, each with two axes or more.
    """

    default_label = "MatMul"
    source_types = FLOATS
    source_count = (2, 2)

    descriptor = ReadOnly[MatMulDescriptor]("The factor and the transposes the layer was made with.")

    def __init__(self, descriptor: MatMulDescriptor) -> None:
        super().__init__()
        if not isinstance(descriptor, MatMulDescriptor):
            raise TypeError(f"{self.who}: needs a MatMulDescriptor, not {type(descriptor).__name__}")
        self._descriptor = copy.copy(descriptor)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        x, y = sources
        same_type(self.who, sources)
        return [TensorDescriptor(self._product(x.shape, y.shape), data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        # A sequence times a matrix is a sequence; of other products nobody can tell.
        is_sequence = known[0] == len(sources[0]) - 1 and not self._descriptor.transposes_x
        return len(result) - 1 if is_sequence else None

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, y = sources
        d = self._descriptor
        self._product(x.shape, y.shape)
        z = ops.matmul(ops.transpose(x) if d.transposes_x else x, ops.transpose(y) if d.transposes_y else y)
        return z if d.alpha == 1.0 else z * d.alpha

    def _product(self, x: Shape, y: Shape) -> Shape:
        d = self._descriptor
        for name, shape in (("x", x), ("y", y)):
            self.expect(len(shape) >= 2, f"{name} has shape {shape}", expected="at least two axes")
        m, k = (x[-1], x[-2]) if d.transposes_x else (x[-2], x[-1])
        k2, n = (y[-1], y[-2]) if d.transposes_y else (y[-2], y[-1])
        self.expect(
            k == k2,
            f"the rows of op(x) have {k} elements, the columns of op(y) have {k2}",
            x=f"{x}{' transposed' if d.transposes_x else ''}",
            y=f"{y}{' transposed' if d.transposes_y else ''}",
            fix="give both the same inner extent, or transpose one: x @ y.T, or transposes_y=True",
        )
        try:
            return (*broadcast_shape(x[:-2], y[:-2]), m, n)
        except ValueError:
            self.expect(False, f"the leading axes of x {x} and y {y} do not broadcast", expected="equal extents, or 1")
            raise
