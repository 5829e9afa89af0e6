"""How arrays lie in memory, as oneDNN describes it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_int64
from typing import Any, Literal

import numpy as np

from mlcompute.devices.cpu.onednn.library import OneDNN, Shape, own, require
from mlcompute.errors import DeviceError
from mlcompute.ops.bfloat16 import FLOAT32, is_bfloat16

#: Where elements lie: strides in elements, or the name of a layout. "any" lets oneDNN choose.
Layout = Shape | Literal["plain", "channels_last", "any"]

_BFLOAT16, _FLOAT32 = 2, 3
_TAG_ANY = 1
_QUERY_STRIDES = 14
_QUERY_RANK, _QUERY_DIMS, _QUERY_BLOCK_COUNT, _QUERY_BLOCKS, _QUERY_BLOCK_AXES = 256, 257, 263, 264, 265
_Dims = c_int64 * 12


class Descriptor:
    """How an array of float32 or bfloat16 lies in memory: its extents and strides, or a blocked format."""

    def __init__(self, shape: Sequence[int], layout: Layout = "plain", dtype: np.dtype[Any] = FLOAT32) -> None:
        library, rank, shape = require(), len(shape), tuple(shape)
        kind = _BFLOAT16 if is_bfloat16(dtype) else _FLOAT32
        doing = f"describe an array of {shape}, layout {layout}"
        if layout == "any":
            name = "memory_desc_create_with_tag"
            handle = library.create(name, rank, dims(shape), kind, _TAG_ANY, doing=doing)
        else:
            strides = dims(strides_of(shape, layout))
            name = "memory_desc_create_with_strides"
            handle = library.create(name, rank, dims(shape), kind, strides, doing=doing)
        self.adopt(library, handle)

    @classmethod
    def copy_of(cls, handle: int) -> Descriptor:
        """A descriptor equal to one owned by a primitive."""
        library, new = require(), cls.__new__(cls)
        new.adopt(library, library.create("memory_desc_clone", handle))
        return new

    def adopt(self, library: OneDNN, handle: int) -> None:
        self._library, self.handle = library, handle
        own(self, library.destroyer("memory_desc"), handle)

    @property
    def nbytes(self) -> int:
        """Bytes the array takes, padding of blocks included; 0 for no array at all."""
        return int(self._library.value_of("memory_desc_get_size", self.handle))

    @property
    def shape(self) -> Shape:
        return self._numbers(_QUERY_DIMS, self._rank)

    @property
    def strides(self) -> Shape:
        """Distances between neighbours, in elements; between blocks in a blocked format."""
        return self._numbers(_QUERY_STRIDES, self._rank)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(axis, extent) of the blocks of a blocked format, outermost first; () when strides tell everything."""
        count = self._number(_QUERY_BLOCK_COUNT)
        return tuple(zip(self._numbers(_QUERY_BLOCK_AXES, count), self._numbers(_QUERY_BLOCKS, count), strict=True))

    @property
    def _rank(self) -> int:
        return self._number(_QUERY_RANK)

    def _number(self, what: int) -> int:
        result = c_int()
        self._library.call("memory_desc_query", self.handle, what, byref(result))
        return result.value

    def _numbers(self, what: int, count: int) -> Shape:
        result = POINTER(c_int64)()
        self._library.call("memory_desc_query", self.handle, what, byref(result))
        return tuple(result[:count])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptor):
            return NotImplemented
        return bool(self._library.value_of("memory_desc_equal", self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """oneDNN's spelling: axes as letters, outermost first, capital when also blocked: acdb, ABcd16b16a."""
        strides, blocks = self.strides, self.blocks
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        blocked = {axis for axis, _ in blocks}
        letters = [chr(ord("A" if axis in blocked else "a") + axis) for axis in order]
        return "".join([*letters, *(f"{extent}{chr(ord('a') + axis)}" for axis, extent in blocks)])


def strides_of(shape: Sequence[int], layout: Layout) -> Shape:
    """Strides in elements of a layout that strides can express."""
    if not isinstance(layout, str):
        return tuple(layout)
    if layout not in ("plain", "channels_last"):
        raise DeviceError(f"oneDNN: layout {layout!r} has no strides")
    # Axes from innermost to outermost; axis 1 comes innermost where channels are last.
    order = list(range(len(shape) - 1, -1, -1))
    if layout == "channels_last":
        order.remove(1)
        order.insert(0, 1)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def dims(numbers: Sequence[int]) -> Any:
    """Extents or strides as oneDNN takes them."""
    return _Dims(*numbers)
