"""Embedding tables: rows by number, with the two ways the gradient may differ from that of `take`; a limit on norms."""

from __future__ import annotations

import math

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.elementwise import abs_, convert, equal, greater, logical_and, pow_, select, sqrt
from mlcompute.ops.indexing import checked_indices, count_indices, expect_integers, take, take_gradient
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Typed, Value, emit, register
from mlcompute.ops.reductions import max_, sum_
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


@register("renormalize", "indexing")
class Renormalize(Op):
    """y = table, rows that are looked up scaled down to a norm.   derivative: dy, as if nothing had been scaled"""

    @staticmethod
    def result(table: Typed, indices: Typed, maximum_norm: float, p: float) -> ArrayType:
        expect_integers("renormalize", indices)
        if len(table.shape) != 2:
            raise ShapeError(f"renormalize: the table must have shape (rows, dimension), not {table.shape}")
        return ArrayType(table.shape, table.dtype)

    @staticmethod
    def meaning(table: Array, indices: Array, maximum_norm: float, p: float) -> Array:
        y = np.array(table)
        rows = np.unique(checked_indices("renormalize", indices, table.shape[0]))
        norms = np.zeros(rows.shape, table.dtype)
        if table.shape[1]:
            norms = np.linalg.norm(table[rows], ord=p, axis=1)
        large = norms > maximum_norm
        # The small number is PyTorch's; it also keeps the row safely below the limit.
        y[rows[large]] *= (maximum_norm / (norms[large] + 1e-7)).astype(table.dtype)[:, None]
        return y

    @staticmethod
    def derivative(
        dy: Value, y: Value, table: Value, indices: Value, maximum_norm: float, p: float
    ) -> tuple[Value, None]:
        return dy, None

    @staticmethod
    def expansion(table: Value, indices: Value, maximum_norm: float, p: float) -> Value:
        size = abs_(table)
        if p == math.inf:
            norms = max_(size, (1,))
        elif p == 2.0:
            norms = sqrt(sum_(size * size, (1,)))
        else:
            norms = pow_(sum_(pow_(size, p), (1,)), 1.0 / p)
        # A table is copied as a whole in any case: all rows are measured, and those that were looked up are scaled.
        seen = reshape(greater(count_indices(indices, table.shape[0]), 0), norms.shape)
        large = logical_and(seen, greater(norms, maximum_norm))
        return table * select(large, maximum_norm / (norms + 1e-7), 1.0)


def renormalize(table: Value, indices: Value, maximum_norm: float, p: float) -> Value:
    """y[r] = table[r] min(1, maximum_norm / ||table[r]||_p) for every r among indices.   table (rows, dimension)"""
    return emit("renormalize", table, indices, maximum_norm=maximum_norm, p=p)
