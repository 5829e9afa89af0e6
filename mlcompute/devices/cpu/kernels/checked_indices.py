"""Indices read from memory: every one is checked before it is used; a bad one is reported and read as 0."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Array


def adding(dtype: np.dtype[Any]) -> Callable[[SimdValue, SimdValue], SimdValue]:
    """How two elements of a dtype are added up; booleans as NumPy does: either."""
    return operator.or_ if dtype.kind == "b" else operator.add


def is_index(dtype: np.dtype[Any]) -> bool:
    """Can kernels read indices of this dtype?"""
    return dtype.kind in "iu" and dtype in MEMORY_TYPES


class CheckedIndices:
    """Integers in memory that must lie in 0..extent-1. When one does not, `status` becomes 1 and that index."""

    def __init__(self, args: KernelArguments, indices: Operand, extent: int) -> None:
        self._args, self.is_signed = args, indices.dtype.kind == "i"
        self.element = MEMORY_TYPES[indices.dtype]
        self.status: Array = np.zeros(2, np.int64)
        self.pointer = args.pointer(indices)
        self._extent = args.number(extent)
        self._status = args.pointer(self.status)

    def read(self, pointer: str, offset: str) -> str:
        """The index at an offset from an address, as an i64, unchecked."""
        code, element = self._args.code, self.element
        index = code.load(code.at(pointer, offset, element), element)
        if element == "i64":
            return index
        return code.let(f"{'sext' if self.is_signed else 'zext'} {element} {index} to i64")

    def is_valid(self, index: str) -> str:
        """Is an index in range? A flag."""
        return self._args.code.let(f"icmp ult i64 {index}, {self._extent}")

    def check(self, index: str) -> str:
        """An index that is safe to use: 0 in place of one that is out of range, which is reported."""
        code, valid = self._args.code, self.is_valid(index)
        with code.when(code.let(f"xor i1 {valid}, true")):
            code.store(self._status, "i64", "1")
            code.store(code.at(self._status, 1, "i64"), "i64", index)
        return code.let(f"select i1 {valid}, i64 {index}, i64 0")

    def load(self, pointer: str, offset: str) -> str:
        """The index at an offset from an address, as an i64 that is safe to use."""
        return self.check(self.read(pointer, offset))
