"""Which element a thread works on: sizes of indices, division of indices, launch grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute.devices.loop_nest import Strides
from mlcompute.ops.op import Shape

#: Threads of a block, where nothing speaks for another number.
BLOCK = 256
#: Indices up to here are computed in 32 bits, which takes a fraction of the time of 64; a last block may reach beyond.
NARROW = 2**31 - 2**16

_DIVISOR = np.dtype([("divisor", np.uint32), ("multiplier", np.uint32), ("shift", np.uint32)])


def divisor(number: int) -> np.generic:
    """A `Divisor` of the prelude, as a kernel's argument: quotient(n, divisor) = n // number for n < 2^31."""
    assert 1 <= number < NARROW
    shift = (number - 1).bit_length()
    multiplier = (((1 << shift) - number) << 32) // number + 1
    packed: Any = np.array((number, multiplier, shift), _DIVISOR)
    scalar: np.generic = packed[()]
    return scalar


def reach(shape: Shape, strides: Strides) -> int:
    """Elements from the first to the last that strides over a shape touch."""
    return 1 + sum((extent - 1) * abs(stride) for extent, stride in zip(shape, strides, strict=True))


def is_wide(extents: Shape, strides: Sequence[Strides]) -> bool:
    """Do loops over these extents need 64-bit indices, or do operands with these strides?"""
    count = 1
    for extent in extents:
        count *= extent
    return count >= NARROW or any(reach(extents, own) >= NARROW for own in strides)


def blocks_for(items: int, block: int = BLOCK) -> tuple[int, int, int]:
    """A grid with a thread per item."""
    return max(1, -(-items // block)), 1, 1
