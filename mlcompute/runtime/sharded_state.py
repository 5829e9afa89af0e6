"""Optimizer state that exists once over a group: each process has a part; reading puts the parts together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlcompute.ops.op import Array
from mlcompute.runtime.storage import Storage

if TYPE_CHECKING:
    from mlcompute.devices.device import Buffer, Engine
    from mlcompute.runtime.shard_update import ShardUpdate
    from mlcompute.tensor import Tensor


class ShardedState(Storage):
    """One state of one parameter. Reading it is collective: every process of the group must.

    number  which of the optimizer's states
    """

    __slots__ = ("_number", "_shards", "_tensor")

    def __init__(self, shards: ShardUpdate, tensor: Tensor, number: int, like: Storage) -> None:
        # Memory of our own only lends its shape and type: its pages are never touched.
        memory = like.host_memory() if like.is_callers else np.empty(like.shape, like.dtype)
        super().__init__(memory, is_callers=like.is_callers)
        self._shards, self._tensor, self._number = shards, tensor, number

    def array(self) -> Array:
        values = self._shards.whole_state(self._tensor, self._number)
        if not self.is_callers:
            return values
        self._host[...] = values
        return self._host

    def write(self, values: Array) -> None:
        self._shards.set_state(self._tensor, self._number, values)

    def memory(self) -> Array:
        return self.array()

    def bind(self, array: Array, *, is_callers: bool = False) -> None:
        super().bind(array, is_callers=is_callers)
        self._shards.set_state(self._tensor, self._number, array)

    def in_place(self) -> Array:
        raise AssertionError("programs of a group read the parts")

    def buffer(self, engine: Engine) -> Buffer:
        raise AssertionError("programs of a group read the parts")

    def copy(self) -> Storage:
        return Storage(self.array().copy())
