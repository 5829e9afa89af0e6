"""Where an operand of a kernel lies: the memory it shows, its offset there and its strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.ops.op import Array, Shape, Step, Value


@dataclass(frozen=True, slots=True)
class Operand:
    """A value as a kernel sees it: `base` owns the memory; offset and strides count elements."""

    base: Value
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def is_dense(self) -> bool:
        """Row-major without gaps?"""
        return self.strides == dense_strides(self.shape) or self.size <= 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def byte_offset(self) -> int:
        return self.offset * self.dtype.itemsize


def address_of(array: Array) -> int:
    """Where an array lies; much cheaper than asking `array.ctypes`."""
    address: int = array.__array_interface__["data"][0]
    return address


def dense_strides(shape: Shape) -> tuple[int, ...]:
    """Row-major strides in elements; extents of 1 get whatever they would have, too."""
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


class Operands:
    """Operands of all values of a program; views are followed to the memory they show."""

    def __init__(
        self,
        steps: Sequence[Step],
        views: dict[Value, Value],
        workspaces: dict[Step, Value] | None = None,
        threads: int = 1,
    ) -> None:
        self._known: dict[Value, Operand] = {}
        self._workspaces = workspaces or {}
        #: Threads that will share each kernel.
        self.threads = threads
        for step in steps:
            if step.op.is_view and step.results[0] in views:
                self._known[step.results[0]] = self._view(step)

    def __getitem__(self, value: Value) -> Operand:
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = Operand(value, 0, value.shape, dense_strides(value.shape), value.dtype)
        return known

    def workspace(self, step: Step, offset: int, nbytes: int) -> Operand:
        """Part of the memory a step has for itself, as bytes."""
        room = self._workspaces[step]
        assert offset + nbytes <= room.nbytes, f"{step}: bytes {offset} to {offset + nbytes} of {room.nbytes} planned"
        return Operand(room, offset, (nbytes,), (1,), np.dtype(np.uint8))

    def _view(self, step: Step) -> Operand:
        source, result, a = self[step.inputs[0]], step.results[0], step.attributes
        offset, strides = source.offset, source.strides
        if step.op.name == "reshape":
            strides = dense_strides(result.shape)
        elif step.op.name == "transpose":
            strides = tuple(strides[axis] for axis in a["axes"])
        elif step.op.name == "slice":
            offset += sum(start * stride for start, stride in zip(a["start"], strides, strict=True))
            strides = tuple(stride * k for stride, k in zip(strides, a["stride"], strict=True))
        else:  # broadcast
            extra = len(result.shape) - len(source.shape)
            repeated = zip(source.shape, result.shape[extra:], strides, strict=True)
            strides = (0,) * extra + tuple(0 if before != after else stride for before, after, stride in repeated)
        return Operand(source.base, offset, result.shape, strides, result.dtype)


def broadcast_strides(operand: Operand, shape: Shape) -> tuple[int, ...]:
    """Strides with which an operand is walked along a larger shape, by NumPy's rules."""
    extra = len(shape) - len(operand.shape)
    own = (
        0 if extent == 1 and wanted != 1 else stride
        for extent, wanted, stride in zip(operand.shape, shape[extra:], operand.strides, strict=True)
    )
    return (0,) * extra + tuple(own)


def collapse(shape: Shape, strides: Sequence[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """The same walk with as few axes as possible: axes of extent 1 vanish, axes that continue each other join."""
    extents: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        joins = extents and all(walk[-1] == stride[axis] * extent for walk, stride in zip(walks, strides, strict=True))
        if joins:
            extents[-1] *= extent
            for walk, stride in zip(walks, strides, strict=True):
                walk[-1] = stride[axis]
        else:
            extents.append(extent)
            for walk, stride in zip(walks, strides, strict=True):
                walk.append(stride[axis])
    if not extents:
        return [1], [[1] for _ in strides]
    return extents, walks
