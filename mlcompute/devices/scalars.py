"""Scalars of a run: learning rate, time step and the like, which the host writes before every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.ops.op import Array, Value


class Scalars:
    """The numbers a program takes besides its inputs, float32 each, in one piece: a device may copy them at once.

    memory   all of them, `APART` bytes from one to the next: a line of the cache each, as if they lay anywhere
    arrays   of one element, in that memory
    cells    by name, what to write them through: a memoryview is twice as fast as its array
    """

    __slots__ = ("arrays", "cells", "memory")
    APART = 64

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.memory: Array = np.zeros((len(values), self.APART // 4), np.float32)
        self.arrays: dict[Value, Array] = {}
        self.cells: list[tuple[str, Any]] = []
        for row, (name, value) in zip(self.memory, values.items(), strict=True):
            self.arrays[value] = array = row[:1].reshape(())
            assert value.dtype == array.dtype
            self.cells.append((name, array.data))
