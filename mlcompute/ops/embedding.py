"""Embedding: rows of a table by number, with the two ways its gradient may differ from that of `take`."""

from __future__ import annotations

from mlcompute.ops.elementwise import convert, equal, select
from mlcompute.ops.indexing import count_indices, take, take_gradient
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Typed, Value, emit, register
from mlcompute.ops.views import reshape


@register("embedding", "indexing")
class Embedding(Op):
    """y[i, :] = table[indices[i], :].   derivative: that of take, with these changes

    padding_index        positions with this index send no gradient; None: all do
    scales_by_frequency  the gradient of a row is the mean over the positions that look it up, not their sum
    """

    @staticmethod
    def result(table: Typed, indices: Typed, padding_index: int | None, scales_by_frequency: bool) -> ArrayType:
        found = TABLE["take"].result(table, indices, axis=0)
        assert isinstance(found, ArrayType)
        return found

    @staticmethod
    def meaning(table: Array, indices: Array, padding_index: int | None, scales_by_frequency: bool) -> Array:
        y: Array = TABLE["take"].meaning(table, indices, axis=0)
        return y

    @staticmethod
    def derivative(
        dy: Value, y: Value, table: Value, indices: Value, padding_index: int | None, scales_by_frequency: bool
    ) -> tuple[Value, None]:
        rows, per_position = table.shape[0], (*indices.shape, 1)
        if scales_by_frequency:
            counts = take(count_indices(indices, rows), indices, 0)
            dy = dy / reshape(convert(counts, dy.dtype), per_position)
        if padding_index is not None:
            dy = select(reshape(equal(indices, padding_index), per_position), 0.0, dy)
        return take_gradient(dy, indices, 0, rows), None

    @staticmethod
    def expansion(table: Value, indices: Value, padding_index: int | None, scales_by_frequency: bool) -> Value:
        return take(table, indices, 0)


def embedding(table: Value, indices: Value, padding_index: int | None, scales_by_frequency: bool) -> Value:
    """y[i, :] = table[indices[i], :].   table (rows, dimension)   indices (*I)   ->   y (*I, dimension)"""
    if padding_index is None and not scales_by_frequency:
        return take(table, indices, 0)
    return emit("embedding", table, indices, padding_index=padding_index, scales_by_frequency=scales_by_frequency)
