"""Padding: a border around images."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from mlcompute import ops
from mlcompute.enums import PaddingType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import member, real, whole_list
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class PaddingLayer(Layer):
    """y = x with rows and columns added around it.   x (*, h, w)   ->   y (*, top + h + bottom, left + w + right)

    Made with `zero_padding`, `constant_padding`, `reflection_padding` (the mirror image without the edge) or
    `symmetric_padding` (the mirror image with the edge). In all of them

    padding  [all four sides], [left, right] or [top, bottom, left, right]
    """

    default_label = "Padding"
    source_types = ALL_TYPES
    moves_data = True

    padding_type = ReadOnly[PaddingType]("What the border is made of.")
    padding_left = ReadOnly[int]("Columns added before the first.", "_left")
    padding_right = ReadOnly[int]("Columns added after the last.", "_right")
    padding_top = ReadOnly[int]("Rows added before the first.", "_top")
    padding_bottom = ReadOnly[int]("Rows added after the last.", "_bottom")
    constant_value = ReadOnly[float]("The number a constant border is made of; 0 for the other kinds.")

    def __init__(self, padding_type: PaddingType, padding: Sequence[int], constant_value: float = 0.0) -> None:
        super().__init__()
        sides = whole_list(self.who, "padding", padding)
        self.expect(
            len(sides) in (1, 2, 4),
            f"padding has {len(sides)} entries",
            expected="[all four sides], [left, right] or [top, bottom, left, right]",
        )
        if len(sides) == 1:
            sides *= 4
        elif len(sides) == 2:
            sides = (0, 0, *sides)
        self._top, self._bottom, self._left, self._right = sides
        self._padding_type = member(self.who, "padding_type", PaddingType, padding_type)
        self._constant_value = real(self.who, "constant_value", constant_value)

    @classmethod
    def zero_padding(cls, padding: Sequence[int]) -> PaddingLayer:
        """A border of zeros."""
        return cls(PaddingType.ZERO, padding)

    @classmethod
    def reflection_padding(cls, padding: Sequence[int]) -> PaddingLayer:
        """A mirror image that does not repeat the edge: c b | a b c | b a."""
        return cls(PaddingType.REFLECT, padding)

    @classmethod
    def symmetric_padding(cls, padding: Sequence[int]) -> PaddingLayer:
        """A mirror image that repeats the edge: b a | a b c | c b."""
        return cls(PaddingType.SYMMETRIC, padding)

    @classmethod
    def constant_padding(cls, padding: Sequence[int], constant_value: float) -> PaddingLayer:
        """A border of one number."""
        return cls(PaddingType.CONSTANT, padding, constant_value)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self._check_shape(x.shape)
        if not x.data_type.is_floating:
            self.expect(
                _is_exact(self._constant_value, x.data_type.numpy),
                f"constant_value is {self._constant_value}, which no {x.data_type.name} element can hold",
                error=DataError,
                source=x,
            )
        *leading, h, w = x.shape
        shape = (*leading, self._top + h + self._bottom, self._left + w + self._right)
        return [TensorDescriptor(shape, data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        self._check_shape(x.shape)
        if self._padding_type in (PaddingType.ZERO, PaddingType.CONSTANT):
            none = (0,) * (x.rank - 2)
            before, after = (*none, self._top, self._left), (*none, self._bottom, self._right)
            return ops.pad(x, before, after, self._constant_value)
        mode = "reflect" if self._padding_type == PaddingType.REFLECT else "symmetric"
        for axis, border in ((x.rank - 2, (self._top, self._bottom)), (x.rank - 1, (self._left, self._right))):
            if border != (0, 0):
                # Which source row each result row shows: the padding of the row numbers themselves.
                rows = np.pad(np.arange(x.shape[axis]), border, mode=mode)  # type: ignore[call-overload]
                x = ops.take(x, x.trace.constant(rows), axis)
        return x

    def _check_shape(self, shape: Shape) -> None:
        self.expect(len(shape) >= 2, f"the source has shape {shape}", expected="at least two axes (*, h, w)")
        if self._padding_type in (PaddingType.ZERO, PaddingType.CONSTANT):
            return
        # A mirror image has no more to show than the extent, one less when it leaves out the edge.
        spared = 1 if self._padding_type == PaddingType.REFLECT else 0
        sides = {"top": self._top, "bottom": self._bottom, "left": self._left, "right": self._right}
        for (side, size), extent in zip(sides.items(), (shape[-2], shape[-2], shape[-1], shape[-1]), strict=True):
            self.expect(
                size <= extent - spared,
                f"{self._padding_type.name.lower()} padding of {size} at the {side}, the source has {extent} there",
                source=shape,
                expected=f"at most {extent - spared}",
            )

    def copy(self) -> PaddingLayer:
        """An equal layer, in no graph yet."""
        return copy.copy(self)


def _is_exact(number: float, dtype: np.dtype[np.generic]) -> bool:
    """Can an integer or boolean element be exactly this number?"""
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype.str).min, np.iinfo(dtype.str).max)
    return number.is_integer() and low <= number <= high
