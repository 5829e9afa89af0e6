"""Element types: what a NumPy dtype is called in CUDA C++, in memory and in registers.

float16 and bfloat16 lie in memory as `half` and `bfloat16` (16 bits, see the prelude) and are computed in `float`;
booleans lie in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.bfloat16 import is_floating as is_floating  # one of the questions kernels ask

DType = np.dtype[Any]

BOOL, HALF, FLOAT, DOUBLE = (np.dtype(kind) for kind in (np.bool_, np.float16, np.float32, np.float64))

_NAMES = {
    "b1": "unsigned char",
    "i1": "signed char",
    "i2": "short",
    "i4": "int",
    "i8": "long long",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned int",
    "u8": "unsigned long long",
    "f2": "half",
    "f4": "float",
    "f8": "double",
    "bfloat16": "bfloat16",
}


def _key(dtype: DType) -> str:
    return "bfloat16" if is_bfloat16(dtype) else f"{dtype.kind}{dtype.itemsize}"


def is_element(dtype: DType) -> bool:
    """Can kernels read and write elements of this type?"""
    return _key(dtype) in _NAMES and dtype.isnative


def is_factor(dtype: DType) -> bool:
    """Do tensor cores multiply elements of this type, as TF32 or as they are?"""
    return dtype == FLOAT or is_bfloat16(dtype)


def memory_type(dtype: DType) -> str:
    """The type of an element in memory."""
    return _NAMES[_key(dtype)]


def register_type(dtype: DType) -> str:
    """The type an element has while it is computed with."""
    if dtype == BOOL:
        return "bool"
    return "float" if is_floating(dtype) and dtype.itemsize == 2 else memory_type(dtype)


def loaded(dtype: DType, element: str) -> str:
    """An element from memory as a register: an expression."""
    if dtype == BOOL:
        return f"({element} != 0)"
    return f"to_float({element})" if is_floating(dtype) and dtype.itemsize == 2 else element


def stored(dtype: DType, register: str) -> str:
    """A register as an element for memory: an expression. float16 registers hold numbers that are float16 already."""
    if dtype == BOOL:
        return f"(unsigned char)({register})"
    if is_bfloat16(dtype):
        return f"to_bfloat16({register})"
    return f"to_half({register})" if dtype == HALF else register


def literal(dtype: DType, number: float) -> str:
    """A number as a constant of the register type."""
    if dtype == BOOL:
        return "true" if number else "false"
    if dtype.kind in "iu":
        return f"(({register_type(dtype)}){int(number)}{'ull' if dtype.kind == 'u' else 'll'})"
    if np.isnan(number):
        return "NAN_F" if register_type(dtype) == "float" else "((double)NAN_F)"
    if np.isinf(number):
        name = "INFINITY_F" if register_type(dtype) == "float" else "((double)INFINITY_F)"
        return name if number > 0 else f"(-{name})"
    if register_type(dtype) == "float":
        return f"{float(np.float32(number)).hex()}f"
    return float(number).hex()


def sum_type(dtype: DType) -> str:
    """The type sums are computed in; those of integers wrap around."""
    if is_floating(dtype):
        return register_type(dtype)
    return "unsigned long long" if dtype.itemsize == 8 else "unsigned int"
