"""bfloat16: float32 without the last 16 bits of its mantissa. It is a way to store numbers, not to compute with them.

Ops read bfloat16 as float32, compute in float32 and round results they promise in bfloat16 once, at their end. What
adds many numbers up (sums, softmax, the statistics of a normalisation) gives float32.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

FLOAT32 = np.dtype(np.float32)


@functools.cache
def bfloat16() -> np.dtype[Any]:
    """The type, from NumPy's extension types: imported when it is first asked for."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Is it that type? Asks nothing to be imported."""
    return dtype.kind == "V" and dtype.name == "bfloat16"


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Are its elements floating-point numbers? NumPy itself does not count bfloat16 among them."""
    return dtype.kind == "f" or is_bfloat16(dtype)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Are its elements booleans, whole or floating-point numbers?"""
    return dtype.kind in "biuf" or is_bfloat16(dtype)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Is it float16 or bfloat16? Layers compute both in float32."""
    return dtype.itemsize == 2 and is_floating(dtype)


def computed_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that is computed with: float32 for bfloat16, any other is its own."""
    return FLOAT32 if is_bfloat16(dtype) else dtype


def at_least_float32(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that sums and updates are computed in, and rounded from once: float32 for half precision."""
    return FLOAT32 if dtype.itemsize < FLOAT32.itemsize else dtype


def computed(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """An array in the type that is computed with."""
    return array.astype(FLOAT32) if is_bfloat16(array.dtype) else array
