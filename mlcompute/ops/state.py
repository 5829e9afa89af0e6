"""State: the one op that changes memory that outlives a run."""

from __future__ import annotations

import numpy as np

from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Typed, Value, register


@register("assign", "state")
class Assign(Op):
    """target <- value, element by element. The only op without a result, and the only one with an effect.

    streams   other processes read it next: a device that knows how writes it past its caches
    """

    is_pure = False

    @staticmethod
    def result(target: Typed, value: Typed, streams: bool = False) -> tuple[ArrayType, ...]:
        return ()

    @staticmethod
    def meaning(target: Array, value: Array, streams: bool = False) -> tuple[Array, ...]:
        np.copyto(target, value, casting="same_kind")
        return ()


def assign(target: Value, value: Value) -> None:
    """Store a value into a parameter, statistic or optimizer state of the same shape."""
    assert target.shape == value.shape, f"{target} cannot hold {value}"
    target.trace.add(TABLE["assign"], (target, value), {})
