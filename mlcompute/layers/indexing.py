"""Reading and writing along an axis at places another tensor names."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.enums import DataType, ReductionType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import LEAST_AXIS, axis_of, member, same_type, whole
from mlcompute.layers.layer import ALL_TYPES, INDICES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class _Indexed(Layer):
    """What gather and scatter share: an axis, and a source of indices along it."""

    source_types = ALL_TYPES

    dimension = ReadOnly[int]("The axis the indices count along.")

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self._dimension = whole(self.who, "dimension", dimension, LEAST_AXIS)

    def _check_indices(self, indices: TensorDescriptor) -> None:
        self.expect(
            indices.data_type in INDICES,
            f"the indices are {indices.data_type.name}",
            error=DataError,
            indices=indices,
            expected="INT32 or INT64",
        )

    def _fits(self, indices: Shape, other: Shape, name: str, *, is_free: bool) -> None:
        """The indices have the rank of `other` and reach no further; `is_free`: except along the dimension."""
        axis = axis_of(self.who, self._dimension, len(other))
        free = axis if is_free else None
        self.expect(
            len(indices) == len(other)
            and all(i <= o for k, (i, o) in enumerate(zip(indices, other, strict=True)) if k != free),
            f"indices of shape {indices} do not fit {name} of shape {other}",
            expected="the same number of axes and no larger extents"
            + ("" if free is None else f", except along dimension {free}"),
        )
        self._dimension = axis


class GatherLayer(_Indexed):
    """y[i, j, k] = x[indices[i, j, k], j, k] for dimension 0, and so on.   x, indices   ->   y shaped as indices

    Sources: x, indices. The indices (INT32 or INT64) have the rank of x and extents no larger than those of x,
    except along `dimension`. They count from 0; one that points outside x is an error when the graph runs.
    """

    default_label = "Gather"
    moves_data = True
    source_count = (2, 2)

    def __init__(self, dimension: int) -> None:  # Python's messages name the class the constructor stands in
        super().__init__(dimension)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        x, indices = sources
        self._check_indices(indices)
        self._fits(indices.shape, x.shape, "a source", is_free=True)
        return [TensorDescriptor(indices.shape, data_type=x.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, indices = sources
        self._fits(indices.shape, x.shape, "a source", is_free=True)
        return ops.gather(x, indices, self._dimension)


class ScatterLayer(_Indexed):
    """y = copyFrom, then y[indices[i, j, k], j, k] = x[i, j, k] (or += for SUM) for dimension 0, and so on.

    Sources: x (the updates), indices, copyFrom. The result is shaped as copyFrom. The indices (INT32 or INT64)
    have the same rank, extents no larger than those of x and, except along `dimension`, of copyFrom. Updates beyond
    the extents of the indices are not used.

    reduction_type  NONE: where several updates meet, the last in row-major order stays; SUM: all are added
    """

    default_label = "Scatter"
    source_count = (3, 3)

    reduction_type = ReadOnly[ReductionType]("NONE: updates replace what is there; SUM: they are added to it.")

    def __init__(self, dimension: int, reduction_type: ReductionType) -> None:
        super().__init__(dimension)
        self._reduction_type = member(self.who, "reduction_type", ReductionType, reduction_type)
        self.expect(
            self._reduction_type in (ReductionType.NONE, ReductionType.SUM),
            f"reduction_type is {self._reduction_type.name}",
            error=DataError,
            expected="NONE or SUM",
        )

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        x, indices, base = sources
        same_type(self.who, (x, base))
        self._check_indices(indices)
        self.expect(
            self._reduction_type == ReductionType.NONE or x.data_type != DataType.BOOLEAN,
            "BOOLEAN sources cannot be summed",
            error=DataError,
            fix="use ReductionType.NONE, or another data type",
        )
        self._check_shapes(x.shape, indices.shape, base.shape)
        return [TensorDescriptor(base.shape, data_type=base.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, indices, base = sources
        self._check_shapes(x.shape, indices.shape, base.shape)
        scatter = ops.scatter if self._reduction_type == ReductionType.NONE else ops.scatter_add
        return scatter(x, indices, base, self._dimension)

    def _check_shapes(self, x: Shape, indices: Shape, base: Shape) -> None:
        self._fits(indices, x, "a source", is_free=False)
        self._fits(indices, base, "a copyFrom", is_free=True)
