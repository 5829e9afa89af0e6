"""A key-value cache: projected keys and values of earlier positions, kept from run to run where the graph runs."""

from __future__ import annotations

import math

import numpy as np

from mlcompute import ops
from mlcompute.enums import DataType
from mlcompute.layers.layer import Forward
from mlcompute.ops.elementwise import select
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor


class KeyValueCache:
    """Keys (n, heads, capacity, width), values (n, heads, capacity, width), and how many positions are filled."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        self.capacity = keys.descriptor.shape[2]
        self.keys, self.values, self.position = keys, values, position

    @classmethod
    def empty(cls, keys: Shape, values: Shape) -> KeyValueCache:
        """One that holds nothing, of these shapes."""
        position = Tensor(shape=(1,), data=np.zeros(1, np.int32), data_type=DataType.INT32)
        return cls(Tensor(shape=keys, fill_with_data=0.0), Tensor(shape=values, fill_with_data=0.0), position)

    @property
    def statistics(self) -> dict[str, Tensor]:
        """What runs update, by name."""
        return {"key_cache": self.keys, "value_cache": self.values, "position": self.position}

    def reset(self) -> None:
        """Start from the first position again. What is beyond the position is never read."""
        self.position.data = np.zeros(1, np.int32)

    def places(self, run: Forward, count: int) -> Value:
        """The positions that the next `count` keys get, (count,).

        Looking them up among all positions changes none, but any device refuses an index out of range.
        """
        position = run.read(self.position)
        legal = position.trace.constant(np.arange(self.capacity), position.dtype)
        return ops.take(legal, position + position.trace.constant(np.arange(count), position.dtype), 0)

    def append(self, run: Forward, k: Value, v: Value, places: Value) -> tuple[Value, Value, Value]:
        """All keys and values, the given ones among them, and what to add to the scores (1, 1, count, capacity)."""
        count, position = k.shape[2], run.read(self.position)
        slots = position.trace.constant(np.arange(self.capacity), position.dtype)
        filled = []
        for tensor, new in ((self.keys, k), (self.values, v)):
            old = run.read(tensor)
            batch = new.shape[0]
            kept = ops.slice_axis(old, 0, 0, batch) if batch < old.shape[0] else old
            if count == 1:
                is_new = ops.equal(slots, position)
            else:
                row = ops.maximum(ops.minimum(slots - position, count - 1), 0)
                new = ops.take(new, row, 2)
                is_new = ops.logical_and(slots >= position, slots < position + count)
            whole = select(ops.reshape(is_new, (1, 1, self.capacity, 1)), new, kept)
            filled.append(whole)
            if batch < old.shape[0]:
                # A run of fewer samples leaves the others as they are.
                whole = ops.concatenate([whole, ops.slice_axis(old, 0, batch, old.shape[0])], 0)
            run.write(tensor, whole)
        run.write(self.position, position + count)
        is_later = slots > ops.reshape(places, (count, 1))
        mask = select(is_later, ops.full(k, (), -math.inf), 0.0)
        return filled[0], filled[1], ops.reshape(mask, (1, 1, count, self.capacity))
