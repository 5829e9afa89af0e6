"""Reduction: the elements along some axes become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mlcompute import ops
from mlcompute.enums import DataType, ReductionType
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.arguments import LEAST_AXIS, axis_of, member, whole, whole_list
from mlcompute.layers.comparison import truth
from mlcompute.layers.layer import ALL_TYPES, AS_FLOATS, FLOATS, Forward, Layer
from mlcompute.layers.read_only import Copied, ReadOnly
from mlcompute.ops.op import BOOL, FLOAT32, Shape, Value
from mlcompute.tensor import TensorDescriptor

_REDUCE: dict[ReductionType, Callable[[Value, Iterable[int]], Value]] = {
    ReductionType.SUM: ops.sum_,
    ReductionType.MEAN: ops.mean,
    ReductionType.MAX: ops.max_,
    ReductionType.MIN: ops.min_,
    ReductionType.L1_NORM: lambda x, axes: ops.sum_(ops.abs_(x), axes),
}
_INDEX = {ReductionType.ARG_MAX: ops.argmax, ReductionType.ARG_MIN: ops.argmin}
#: Whole numbers up to this one are exact as FLOAT32, and so are indices.
_MOST_INDEXED = 1 << 24
_LOGICAL = {ReductionType.ANY: ops.any_, ReductionType.ALL: ops.all_}


class ReductionLayer(Layer):
    """y = one number per line of x along the reduced axes.   x (*)   ->   y (*), the reduced extents 1

    dimension, dimensions   the axis, or the axes, to reduce: exactly one of the two is given; -1 is the last
    keeps_dimensions        False: the reduced axes are gone; of a tensor without any other, (1,) is left

    ARG_MAX and ARG_MIN take one axis and give the index of the first extreme element as FLOAT32. ANY and ALL take
    any type, count what is not zero as true, and give BOOLEAN for BOOLEAN sources, else 0 or 1 as FLOAT32. No
    gradient passes through these four. MAX and MIN share the gradient evenly between equal extremes.
    """

    default_label = "Reduction"
    source_types = ALL_TYPES

    reduction_type = ReadOnly[ReductionType]("How elements become one.")
    dimension = ReadOnly[int]("The reduced axis; the first given when there are several.", "_axes", 0)
    keeps_dimensions = ReadOnly[bool]("Are reduced axes still there, with an extent of 1?")
    dimensions = Copied[list[int]]("The reduced axes.", "_axes")

    def __init__(
        self,
        reduction_type: ReductionType,
        dimension: int | None = None,
        *,
        dimensions: Sequence[int] | None = None,
        keeps_dimensions: bool = True,
    ) -> None:
        super().__init__()
        self._keeps_dimensions = bool(keeps_dimensions)
        self._reduction_type = kind = member(self.who, "reduction_type", ReductionType, reduction_type)
        self.expect(kind != ReductionType.NONE, "reduction_type NONE reduces nothing", error=DataError)
        if dimension is not None and dimensions is None:
            self._axes: tuple[int, ...] = (whole(self.who, "dimension", dimension, LEAST_AXIS),)
        elif dimensions is not None and dimension is None:
            self._axes = whole_list(self.who, "dimensions", dimensions, LEAST_AXIS)
        else:
            given = "neither" if dimension is None else "both"
            raise ShapeError(f"{self.who}: {given} of dimension and dimensions given", expected="exactly one")
        self.expect(len(self._axes) > 0, "dimensions is empty", expected="at least one axis")
        self._expect_distinct(self._axes)
        self.expect(
            kind not in _INDEX or len(self._axes) == 1,
            f"{kind.name} takes one dimension, {len(self._axes)} were given",
            fix="reshape the source so that these axes become one",
        )

    def _expect_distinct(self, axes: Shape) -> None:
        self.expect(len(set(axes)) == len(axes), f"dimensions {self._axes} name an axis twice")

    @property
    def passes_gradient(self) -> bool:
        """False for ARG_MAX, ARG_MIN, ANY and ALL."""
        return self._reduction_type in _REDUCE

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        kind = self._reduction_type
        self.expect(
            kind in _LOGICAL or x.data_type in FLOATS,
            f"{kind.name} is not defined for {x.data_type.name}",
            expected="FLOAT32, FLOAT16 or BFLOAT16",
            fix=AS_FLOATS,
            error=DataError,
        )
        axes = tuple(axis_of(self.who, axis, x.dimension_count) for axis in self._axes)
        self._expect_distinct(axes)
        self.expect(
            kind not in _INDEX or x.shape[axes[0]] <= _MOST_INDEXED,
            f"{kind.name} of {x.shape[axes[0]]:,} elements: FLOAT32, the type of the index, does not hold all",
            expected=f"at most {_MOST_INDEXED:,} along the axis",
            fix="use graph.top_k(x, 1), whose indices are INT64, with largest=False for the least",
        )
        self._axes = axes
        shape = self._reduced(x.shape)
        keeps_type = kind in _REDUCE or x.data_type == DataType.BOOLEAN
        return [TensorDescriptor(shape, data_type=x.data_type if keeps_type else DataType.FLOAT32)]

    def _reduced(self, shape: Shape) -> Shape:
        if self._keeps_dimensions:
            return tuple(1 if axis in self._axes else extent for axis, extent in enumerate(shape))
        return tuple(extent for axis, extent in enumerate(shape) if axis not in self._axes) or (1,)

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        (axis,) = known
        if self._keeps_dimensions or axis is None:
            return axis
        return None if axis in self._axes else axis - sum(reduced < axis for reduced in self._axes)

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        y = self._reduce(x)
        return y if self._keeps_dimensions else ops.reshape(y, self._reduced(x.shape))

    def _reduce(self, x: Value) -> Value:
        kind = self._reduction_type
        if kind in _REDUCE:
            return _REDUCE[kind](x, sorted(self._axes))
        if kind in _INDEX:
            return ops.convert(_INDEX[kind](x, self._axes[0]), x.dtype)
        answer = _LOGICAL[kind](truth(x), sorted(self._axes))
        return answer if x.dtype == BOOL else ops.convert(answer, x.dtype if x.is_floating else FLOAT32)
