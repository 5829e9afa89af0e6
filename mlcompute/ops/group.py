"""Over the slices of a batch that the processes of a group run: the one op that reads what others have computed."""

from __future__ import annotations

import numpy as np

from mlcompute.ops.elementwise import copy
from mlcompute.ops.op import Array, ArrayType, Op, Typed, Value, emit, register


@register("sum_over_slices", "group")
class SumOverSlices(Op):
    """y = x of all slices of the batch, added up.   x   ->   y like x, the same for all slices

    No device runs it: `exchange_sums` ends a part of the program there. What is minimised is a sum over slices, so the
    gradient of x is that of y, added up over the slices.
    """

    @staticmethod
    def result(x: Typed) -> ArrayType:
        return ArrayType(x.shape, x.dtype)

    @staticmethod
    def meaning(x: Array) -> Array:
        return np.array(x)

    @staticmethod
    def derivative(dy: Value, y: Value, x: Value) -> Value:
        return sum_over_slices(dy)

    @staticmethod
    def expansion(x: Value) -> Value:
        return copy(x)


def sum_over_slices(x: Value) -> Value:
    """x of all slices of the batch, added up."""
    return emit("sum_over_slices", x)
