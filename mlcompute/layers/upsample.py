"""Upsampling: images with more pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute import ops
from mlcompute.enums import SampleMode
from mlcompute.errors import DataError
from mlcompute.layers.arguments import member, whole_list
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import Copied, ReadOnly
from mlcompute.ops.op import Array, Shape, Value
from mlcompute.tensor import TensorDescriptor


class UpsampleLayer(Layer):
    """y = x resampled to a larger height and width.   x (n, c, h, w)   ->   y (n, c, *shape)

    shape           [height, width] of the result, or [width] alone, which also takes sources (n, c, w)
    sample_mode     NEAREST repeats pixels, LINEAR joins the nearest two of each axis
    aligns_corners  LINEAR only: corner pixels keep their places; otherwise pixels are areas and areas are stretched
    factor          how many times the source's extents the shape is: sources of other sizes become so many times larger
    """

    default_label = "Upsampling"
    source_types = ALL_TYPES

    sample_mode = ReadOnly[SampleMode]("How new pixels are filled.")
    aligns_corners = ReadOnly[bool]("Do corner pixels keep their places?")
    shape = Copied[list[int]]("[width] or [height, width] of the result.")
    factor = Copied[list[int] | None]("How many times larger images become; None where all become of the one shape.")

    def __init__(
        self,
        shape: Sequence[int],
        sample_mode: SampleMode = SampleMode.NEAREST,
        aligns_corners: bool = False,
        *,
        factor: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self._shape = whole_list(self.who, "shape", shape, least=1)
        self.expect(
            len(self._shape) in (1, 2), f"shape has {len(self._shape)} entries", expected="[width] or [height, width]"
        )
        self._factor = None if factor is None else whole_list(self.who, "factor", factor, least=1)
        self.expect(
            self._factor is None or len(self._factor) == len(self._shape),
            f"factor has {len(self._factor or ())} entries, shape {len(self._shape)}",
        )
        self._sample_mode = member(self.who, "sample_mode", SampleMode, sample_mode)
        self._aligns_corners = bool(aligns_corners)

    def _target(self, source: Shape) -> Shape:
        """Height and width of the result."""
        if self._factor is None:
            return self._shape
        extents = source[-len(self._shape) :]
        return tuple(extent * factor for extent, factor in zip(extents, self._factor, strict=True))

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        sizes = len(self._shape)
        self.expect(
            len(x.shape) >= 2 + sizes,
            f"the source has shape {x.shape}",
            expected="four axes (n, c, h, w)" if sizes == 2 else "(n, c, w) or (n, c, h, w)",
        )
        self.expect(
            self._sample_mode == SampleMode.NEAREST or x.data_type.is_floating,
            f"LINEAR needs floating-point numbers, the source is {x.data_type.name}",
            error=DataError,
            fix="use SampleMode.NEAREST",
        )
        names = ("height", "width")[-sizes:]
        target = self._target(x.shape)
        for name, old, new in zip(names, x.shape[-sizes:], target, strict=True):
            self.expect(
                new >= old,
                f"the {name} of the result is {new}, smaller than the source's {old}",
                source=x.shape,
                fix="shape is the size of the result, not a factor; to shrink images use a PoolingLayer",
            )
        return [TensorDescriptor((*x.shape[:-sizes], *target), data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        for axis, size in enumerate(self._target(x.shape), start=x.rank - len(self._shape)):
            if size != x.shape[axis]:
                x = self._stretch(x, axis, size)
        return x

    def _stretch(self, x: Value, axis: int, size: int) -> Value:
        extent = x.shape[axis]
        if self._sample_mode == SampleMode.NEAREST:
            return ops.take(x, x.trace.constant(np.arange(size) * extent // size), axis)
        place = self._places(extent, size)
        left = np.floor(place).astype(np.int64)
        share = (place - left).reshape(*(1,) * axis, -1, *(1,) * (x.rank - 1 - axis))
        at_left = ops.take(x, x.trace.constant(left), axis)
        at_right = ops.take(x, x.trace.constant(np.minimum(left + 1, extent - 1)), axis)
        return at_left * x.trace.constant(1 - share, x.dtype) + at_right * x.trace.constant(share, x.dtype)

    def _places(self, extent: int, size: int) -> Array:
        """Where each of `size` result pixels lies between the source pixels 0 ... extent - 1."""
        if self._aligns_corners:
            return np.arange(size) * (extent - 1) / (size - 1)
        centres = (np.arange(size) + 0.5) * extent / size - 0.5
        return np.clip(centres, 0, extent - 1)
