"""Layers that change the shape or the order of axes: reshape, transpose, slice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mlcompute import ops
from mlcompute.layers.arguments import LEAST_AXIS, LEAST_INDEX, optional_whole_list, whole_list
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import Copied
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class ReshapeLayer(Layer):
    """y = x in row-major order with another shape.   x (*)   ->   y shape, of as many elements

    shape  the extents of the result; one of them may be -1, it is then whatever is left over
    axes   for every axis of the result the axes of the source it is made of, one after another; of none: an extent of
           1.
           Axes that are left out have an extent of 1. The extents are then those of whatever source is given, other
           lengths and batches too, and `shape` is what they are when the graph is built
    """

    default_label = "Reshape"
    source_types = ALL_TYPES
    moves_data = True

    shape = Copied[list[int]]("The shape asked for, with -1 where the extent was left open.")

    def __init__(self, shape: Iterable[int], axes: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__()
        self._shape = whole_list(self.who, "shape", shape, least=-1)
        self._axes = None if axes is None else tuple(whole_list(self.who, "axes", group) for group in axes)
        most = TensorDescriptor.max_tensor_dimensions
        self.expect(1 <= len(self._shape) <= most, f"shape has {len(self._shape)} axes", expected=f"1 to {most}")
        self.expect(0 not in self._shape, f"shape {list(self._shape)} has an extent of 0")
        self.expect(self._shape.count(-1) <= 1, f"shape {list(self._shape)} leaves more than one extent open")
        if self._axes is not None:
            used = [axis for group in self._axes for axis in group]
            self.expect(
                len(self._axes) == len(self._shape) and used == sorted(set(used)),
                f"axes {self.axes} for a shape of {len(self._shape)} axes",
                expected="one entry per axis of the result, with the axes of the source in their order",
            )
        #: What the open extent became for each source shape seen: a smaller batch must find the same extents.
        self._resolved: dict[Shape, Shape] = {}

    @property
    def axes(self) -> list[list[int]] | None:
        """The axes of the source every axis of the result is made of; None: as the shape says."""
        return None if self._axes is None else [list(group) for group in self._axes]

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        if self._axes is not None:
            return [TensorDescriptor(self._made_of(x.shape), data_type=x.data_type)]
        shape, wanted = self._shape, list(self._shape)
        known = math.prod(extent for extent in shape if extent != -1)
        if -1 in shape:
            self.expect(
                x.element_count % known == 0,
                f"{x.element_count} elements cannot become {wanted}: {known} does not divide them",
                source=x.shape,
            )
            shape = tuple(x.element_count // known if extent == -1 else extent for extent in shape)
        self.expect(
            math.prod(shape) == x.element_count,
            f"shape {wanted} has {known} elements, the source has {x.element_count}",
            source=x.shape,
            fix="give a shape of as many elements, or -1 for one extent",
        )
        self._resolved[x.shape] = shape
        return [TensorDescriptor(shape, data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        (axis,), (source,) = known, sources
        if axis is None or axis == 0:
            return None
        if self._axes is not None:
            return self._axes.index((axis,)) if (axis,) in self._axes else None
        if axis == len(source) - 1 and source[-1] == result[-1]:
            return len(result) - 1
        return axis if source[: axis + 1] == result[: axis + 1] else None

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        if self._axes is not None:
            return ops.reshape(x, self._made_of(x.shape))
        shape = self._full_shape(x.shape)
        sample = math.prod(shape[1:])
        self.expect(
            x.size % sample == 0,
            f"{x.size} elements cannot become {['any', *shape[1:]]}: this graph cannot run a smaller batch",
            source=x.shape,
            fix="pass batch_size=0",
        )
        return ops.reshape(x, (x.size // sample, *shape[1:]))

    def _made_of(self, source: Shape) -> Shape:
        """The result shape, where `axes` say which of the source's it is made of."""
        assert self._axes is not None
        used = {axis for group in self._axes for axis in group}
        left = [axis for axis in range(len(source)) if axis not in used]
        self.expect(
            max(used, default=0) < len(source) and all(source[axis] == 1 for axis in left),
            f"axes {self.axes} do not hold all elements of the source",
            source=source,
        )
        return tuple(math.prod(source[axis] for axis in group) for group in self._axes)

    def _full_shape(self, source: Shape) -> Shape:
        """The result shape for a source with all its samples, of which this one may have only some."""
        if -1 not in self._shape[1:]:
            return self._shape
        if source in self._resolved:
            return self._resolved[source]
        larger = [full for full in self._resolved if full[1:] == source[1:] and full[0] > source[0]]
        self.expect(bool(larger), "the extent left open is not known for this source", source=source)
        return self._resolved[min(larger)]


class TransposeLayer(Layer):
    """Axis k of y is axis dimensions[k] of x; -1 is the last.   x (a₀, a₁, ...)   ->   y (a_dimensions[0], ...)"""

    default_label = "Transpose"
    source_types = ALL_TYPES
    moves_data = True
    moves_axes = True

    dimensions = Copied[list[int]]("The source axis of every result axis.")

    def __init__(self, dimensions: Iterable[int]) -> None:
        super().__init__()
        given = whole_list(self.who, "dimensions", dimensions, LEAST_AXIS)
        # As many are named as the source has, so those that count from the last are known already.
        self._dimensions = tuple(axis + len(given) if axis < 0 else axis for axis in given)
        self.expect(
            len(given) > 0 and sorted(self._dimensions) == list(range(len(given))),
            f"dimensions {list(given)} do not name every axis once",
            expected=f"a permutation of {list(range(max(len(given), 1)))}",
        )

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self.expect(
            len(x.shape) == len(self._dimensions),
            f"dimensions {list(self._dimensions)} name {len(self._dimensions)} axes, the source has {len(x.shape)}",
            source=x.shape,
            fix="name every axis of the source, the batch axis too",
        )
        return [TensorDescriptor([x.shape[axis] for axis in self._dimensions], data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return None if known[0] is None else self._dimensions.index(known[0])

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        return ops.transpose(x, self._dimensions)


class SliceLayer(Layer):
    """y = x[start:end:stride] on every axis.   x (a, ...)   ->   y (ceil((end₀ - start₀) / stride₀), ...)

    start, end  one entry per axis of the source; the end is not part of the slice. Negative ones count from the end of
                the axis, and an end of None is that end: of every size the axis has in a run
    stride      one positive entry per axis; None takes every element
    """

    default_label = "Slice"
    source_types = ALL_TYPES
    moves_data = True

    start = Copied[list[int]]("The first index on every axis; negative ones count from its end.")
    end = Copied[list[int | None]](
        "The index after the last on every axis; negative ones count from its end, None is that end."
    )
    stride = Copied[list[int]]("The step on every axis.")

    def __init__(self, start: Sequence[int], end: Sequence[int | None], stride: Sequence[int] | None = None) -> None:
        super().__init__()
        self._start = whole_list(self.who, "start", start, LEAST_INDEX)
        self._end = optional_whole_list(self.who, "end", end, LEAST_INDEX)
        ones = (1,) * len(self._start)
        self._stride = ones if stride is None else whole_list(self.who, "stride", stride, least=1)
        self.expect(
            0 < len(self._start) == len(self._end) == len(self._stride),
            f"start has {len(self._start)} entries, end {len(self._end)}, stride {len(self._stride)}",
            expected="one entry per axis of the source in each",
        )
        for axis, (first, last) in enumerate(zip(self._start, self._end, strict=True)):
            known = last is not None and (first < 0) == (last < 0)
            self.expect(
                not known or first < (last or 0),
                f"nothing is left of axis {axis}: it starts at {first} and ends at {last}",
            )

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self.expect(
            len(self._end) == len(x.shape),
            f"start and end have {len(self._end)} entries, the source has {len(x.shape)} axes",
            source=x.shape,
        )
        for axis, (last, extent) in enumerate(zip(self._end, x.shape, strict=True)):
            self.expect(
                last is None or last <= extent, f"axis {axis} ends at {last}, the source has {extent}", source=x.shape
            )
        parts = zip(*self._bounds(x.shape), self._stride, strict=True)
        return [TensorDescriptor([-(-(last - first) // step) for first, last, step in parts], data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        starts, ends = self._bounds(x.shape)
        return ops.slice_(x, starts, ends, self._stride)

    def _bounds(self, shape: Shape) -> tuple[Shape, Shape]:
        """Start and end on every axis of a source, which may have fewer samples than the full batch."""
        starts = tuple(first if first >= 0 else first + a for first, a in zip(self._start, shape, strict=True))
        ends = tuple(
            a if last is None else min(last, a) if last >= 0 else last + a
            for last, a in zip(self._end, shape, strict=True)
        )
        for axis, (first, last) in enumerate(zip(starts, ends, strict=True)):
            self.expect(
                0 <= first < last,
                f"axis {axis} starts at {self._start[axis]}, {'this batch' if axis == 0 else 'it'} has {shape[axis]}: "
                "nothing is left",
                fix="run a larger batch" if axis == 0 else "give longer data",
            )
        return starts, ends
