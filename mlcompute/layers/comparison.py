"""Comparison: a truth value for every element, or pair of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute import ops
from mlcompute.enums import ComparisonOperation, DataType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import constant_for, member, real, same_type
from mlcompute.layers.arithmetic import common_shape
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import BOOL, Value
from mlcompute.tensor import TensorDescriptor

_COMPARE: dict[ComparisonOperation, Callable[[Value, Value], Value]] = {
    ComparisonOperation.EQUAL: ops.equal,
    ComparisonOperation.NOT_EQUAL: ops.not_equal,
    ComparisonOperation.LESS: ops.less,
    ComparisonOperation.GREATER: ops.greater,
    ComparisonOperation.LESS_OR_EQUAL: ops.less_or_equal,
    ComparisonOperation.GREATER_OR_EQUAL: ops.greater_or_equal,
}

_COMBINE: dict[ComparisonOperation, Callable[[Value, Value], Value]] = {
    ComparisonOperation.LOGICAL_AND: ops.logical_and,
    ComparisonOperation.LOGICAL_OR: ops.logical_or,
    ComparisonOperation.LOGICAL_NAND: lambda x, y: ops.logical_not(ops.logical_and(x, y)),
    ComparisonOperation.LOGICAL_NOR: lambda x, y: ops.logical_not(ops.logical_or(x, y)),
    ComparisonOperation.LOGICAL_XOR: ops.logical_xor,
}


def truth(x: Value) -> Value:
    """True where x is not zero, so also for NaN; a boolean x as it is."""
    return x if x.dtype == BOOL else ops.not_equal(x, 0.0)


class ComparisonLayer(Layer):
    """z = x op y as BOOLEAN, or z = not x.   x, y broadcast against each other   ->   z their common shape

    constant  a number that stands for y in one of the six comparisons, so that there is one source: x op constant

    The six comparisons need sources of one type and follow IEEE 754: NaN is unequal to everything. The logical
    operations take any types, also two different ones; what is not zero counts as true. No gradient passes.
    """

    default_label = "Compare"
    source_types = ALL_TYPES
    source_count = (1, 2)

    operation = ReadOnly[ComparisonOperation]("The comparison.")
    constant = ReadOnly[float | None]("The number that is the second operand; None: it is a source.")

    def __init__(self, operation: ComparisonOperation, *, constant: float | None = None) -> None:
        super().__init__()
        self._operation = member(self.who, "operation", ComparisonOperation, operation)
        self._constant = None if constant is None else real(self.who, "constant", constant)
        self.expect(
            constant is None or self._operation in _COMPARE,
            f"{self._operation.name} compares with no number",
            fix="leave constant out",
            error=DataError,
        )

    def check_sources(self, sources: Sequence[TensorDescriptor]) -> None:
        wanted = 1 if self._operation == ComparisonOperation.LOGICAL_NOT or self._constant is not None else 2
        self.expect(
            len(sources) == wanted,
            f"{self._operation.name} takes {wanted} source(s), {len(sources)} were given",
        )
        super().check_sources(sources)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        if self._operation in _COMPARE:
            same_type(self.who, sources)
        if self._constant is not None:
            constant_for(self.who, self._constant, sources[0].data_type)
        shape = common_shape(self, *(source.shape for source in sources))
        return [TensorDescriptor(shape, data_type=DataType.BOOLEAN)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        common_shape(self, *(source.shape for source in sources))
        if self._operation == ComparisonOperation.LOGICAL_NOT:
            (x,) = sources
            return ops.logical_not(truth(x))
        if self._constant is not None:
            (x,) = sources
            number = x.trace.number(self._constant if x.is_floating else int(self._constant), x.dtype)
            return _COMPARE[self._operation](x, number)
        x, y = sources
        if self._operation in _COMPARE:
            return _COMPARE[self._operation](x, y)
        return _COMBINE[self._operation](truth(x), truth(y))
