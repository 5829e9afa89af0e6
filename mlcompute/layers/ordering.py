"""Sort, top-k and cumulative sum along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.enums import DataType
from mlcompute.layers.arguments import axis_of, integer, whole
from mlcompute.layers.layer import ALL_TYPES, FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor

#: What can be put in order; 64 bits hold an element and its index together, so elements have 32 at most.
_SORTED = frozenset(ALL_TYPES - {DataType.INT64})


class SortLayer(Layer):
    """values, indices = x in order along one axis.   x (*, n, *)   ->   values (*, n, *), indices (*, n, *) INT64

    Of equal elements the first comes first; NaN counts as larger than any number. The gradient of every value goes
    back to where it came from.

    dimension   the axis; negative numbers count from the end
    descending  the largest first
    """

    default_label = "Sort"
    source_types = _SORTED
    moves_data = True

    dimension = ReadOnly[int]("The axis.")
    descending = ReadOnly[bool]("Does the largest come first?")

    def __init__(self, dimension: int = -1, descending: bool = False) -> None:
        super().__init__()
        self._dimension = integer(self.who, "dimension", dimension)
        self._descending = bool(descending)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        axis_of(self.who, self._dimension, len(x.shape))
        return [x, TensorDescriptor(x.shape, data_type=DataType.INT64)]

    def forward(self, run: Forward, *sources: Value) -> Sequence[Value]:
        (x,) = sources
        return ops.sort(x, self._dimension, self._descending)


class TopKLayer(Layer):
    """values, indices = the k largest of x along one axis, in order.   x (*, n, *)   ->   both (*, k, *)

    As the first k of a `SortLayer`, without putting the others in order.

    dimension  the axis; negative numbers count from the end
    largest    False: the k smallest
    """

    default_label = "TopK"
    source_types = _SORTED
    moves_data = True

    k = ReadOnly[int]("How many.")
    dimension = ReadOnly[int]("The axis.")
    largest = ReadOnly[bool]("The largest, or the smallest?")

    def __init__(self, k: int, dimension: int = -1, largest: bool = True) -> None:
        super().__init__()
        self._k = whole(self.who, "k", k, least=1)
        self._dimension = integer(self.who, "dimension", dimension)
        self._largest = bool(largest)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        axis = axis_of(self.who, self._dimension, len(x.shape))
        self._check(x.shape[axis])
        shape = (*x.shape[:axis], self._k, *x.shape[axis + 1 :])
        return [TensorDescriptor(shape, data_type=kind) for kind in (x.data_type, DataType.INT64)]

    def forward(self, run: Forward, *sources: Value) -> Sequence[Value]:
        (x,) = sources
        self._check(x.shape[self._dimension])
        return ops.sort(x, self._dimension, self._largest, self._k)

    def _check(self, extent: int) -> None:
        self.expect(self._k <= extent, f"k is {self._k}, axis {self._dimension} of the source has {extent} elements")


class CumulativeSumLayer(Layer):
    """y[i] = x[0] + ... + x[i] along one axis.   x (*, n, *)   ->   y (*, n, *)

    dimension  the axis; negative numbers count from the end
    exclusive  without x[i] itself: y[0] is 0
    reverse    from the end: y[i] = x[i] + ... + x[n - 1]
    """

    default_label = "CumulativeSum"
    source_types = FLOATS | {DataType.INT32, DataType.INT64}

    dimension = ReadOnly[int]("The axis.")
    exclusive = ReadOnly[bool]("Without the element itself?")
    reverse = ReadOnly[bool]("From the end?")

    def __init__(self, dimension: int = -1, exclusive: bool = False, reverse: bool = False) -> None:
        super().__init__()
        self._dimension = integer(self.who, "dimension", dimension)
        self._exclusive, self._reverse = bool(exclusive), bool(reverse)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        axis_of(self.who, self._dimension, len(x.shape))
        return [x]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        return ops.cumulative_sum(x, self._dimension, self._exclusive, self._reverse)
