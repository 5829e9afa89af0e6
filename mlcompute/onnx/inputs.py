"""What the caller says about a model's inputs: extents that were left open, and numbers of inputs that steer shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.onnx.uses import Uses
from mlcompute.ops.op import Array, Shape

if TYPE_CHECKING:
    from onnx import ValueInfoProto


class GivenInputs:
    """The arguments of `load` that speak of inputs; see there."""

    def __init__(
        self,
        batch: int | None,
        dimensions: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        constants: Mapping[str, Any],
    ) -> None:
        self.batch, self.dimensions, self.shapes = batch, dict(dimensions), dict(shapes)
        self.constants = {name: np.asarray(array) for name, array in constants.items()}

    def check(self, uses: Uses) -> None:
        """Refuse numbers for something the model does not have."""
        known = {*uses.inputs, *uses.makers, *uses.consumers}
        for name in self.constants:
            if name not in known:
                shown = ", ".join(sorted(uses.inputs)[:10])
                raise DataError(f"onnx.load: constants: the model has no value '{name}'", inputs=shown or "none")

    def shape_of(self, info: ValueInfoProto) -> Shape:
        """Extents of an input: the model's, with symbols replaced by what the caller gave."""
        name, tensor_type = info.name, info.type.tensor_type
        if name in self.shapes:
            shape = tuple(int(extent) for extent in self.shapes[name])
        elif name in self.constants and not tensor_type.HasField("shape"):
            shape = self.constants[name].shape
        elif not tensor_type.HasField("shape"):
            raise ShapeError("its rank is not known", fix=f"give shapes={{{name!r}: (..)}}")
        else:
            shape = tuple(self._extent(dim, axis, name) for axis, dim in enumerate(tensor_type.shape.dim))
        if min(shape, default=0) < 0 or len(shape) > 32:
            raise ShapeError(f"its shape is {shape}")
        if math.prod(max(extent, 1) for extent in shape) > 2**40:
            raise ShapeError(f"its shape is {shape}, more elements than any memory")
        return shape

    def _extent(self, dim: Any, axis: int, name: str) -> int:
        kind = dim.WhichOneof("value")
        if kind == "dim_value" and (dim.dim_value > 0 or axis > 0):
            return int(dim.dim_value)
        if kind == "dim_value" and dim.dim_value == 0 and self.batch is None:
            return 0
        symbol = dim.dim_param if kind == "dim_param" else ""
        if symbol and symbol in self.dimensions:
            return int(self.dimensions[symbol])
        if axis == 0 and self.batch is not None:
            if symbol:
                self.dimensions[symbol] = self.batch
            return self.batch
        if axis == 0:
            raise ShapeError("its batch extent is not fixed by the model: give batch=..")
        known = f"dimensions={{{symbol!r}: ..}}" if symbol else f"shapes={{{name!r}: (..)}}"
        raise ShapeError(f"extent {axis} is not fixed by the model: give {known}")

    def constant(self, name: str, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """The numbers given for an input, which must fit it; a single one may have any number of axes."""
        array = self.constants[name].astype(dtype, copy=False)
        if array.size == math.prod(shape) == 1:
            return array.reshape(shape)
        if array.shape != shape:
            raise ShapeError(f"constants: '{name}' has shape {array.shape}, the model says {shape}")
        return array
