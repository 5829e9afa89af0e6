"""Indices inside kernels: every one is checked before it is used, a bad one is read as 0 and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.kernels.walks import Line, Words, each_vector, number
from mlcompute.devices.cpu.operands import Operand, collapse
from mlcompute.ops.op import Array, Shape


def is_index(dtype: np.dtype[Any]) -> bool:
    """Can kernels read indices of this dtype?"""
    return dtype.kind in "iu" and dtype in MEMORY_TYPES


class Indices:
    """Integers in memory that name places in 0..extent-1. When one does not, `status` becomes 1 and that one."""

    def __init__(self, words: Words, indices: Operand, extent: int) -> None:
        self._words, self._is_signed = words, indices.dtype.kind == "i"
        self.element = MEMORY_TYPES[indices.dtype]
        self.status: Array = np.zeros(2, np.int64)
        self.pointer = words.pointer(indices)
        self._extent = words.number(extent)
        self._status = words.pointer(int(self.status.ctypes.data))

    def load(self, pointer: str, offset: str) -> str:
        """The index at an offset from an address, as an i64 that is safe to use."""
        code, element = self._words.code, self.element
        index = code.load(code.at(pointer, offset, element), element)
        if element != "i64":
            index = code.let(f"{'sext' if self._is_signed else 'zext'} {element} {index} to i64")
        valid = code.let(f"icmp ult i64 {index}, {self._extent}")
        with code.when(code.let(f"xor i1 {valid}, true")):
            code.store(self._status, "i64", "1")
            code.store(code.at(self._status, 1, "i64"), "i64", index)
        return code.let(f"select i1 {valid}, i64 {index}, i64 0")


def line_of(shape: Shape, strides: Sequence[int]) -> tuple[int, int] | None:
    """(extent, stride) of axes that can be walked as one; None when they cannot."""
    extents, (walk,) = collapse(shape, [tuple(strides)])
    return (extents[0], walk[0]) if len(extents) == 1 else None


def _each(code: Code, begin: str | int, end: str, body: Callable[[str, str | None, int], None]) -> None:
    """body(index, mask, lanes) along a line, for bodies that only load and store.

    Masked stores are slow before AVX-512, so a shorter last vector then goes element by element.
    """
    lanes = vector_lanes()
    if lanes == 16:
        each_vector(code, begin, end, lambda index, mask: body(index, mask, lanes))
        return
    last = code.add(begin, code.let(f"and i64 {code.sub(end, begin)}, {-lanes}"))
    with code.loop(begin, last, lanes) as index:
        body(index, None, lanes)
    with code.loop(last, end) as index:
        body(index, None, 1)


def copy_line(code: Code, source: Line, target: Line, begin: str | int, end: str) -> None:
    """target[i] = source[i]"""

    def body(index: str, mask: str | None, lanes: int) -> None:
        target.store(index, source.load(index, mask, lanes=lanes), mask)

    _each(code, begin, end, body)


def add_line(code: Code, source: Line, target: Line, begin: str | int, end: str) -> None:
    """target[i] += source[i]"""

    def body(index: str, mask: str | None, lanes: int) -> None:
        total = target.load(index, mask, lanes=lanes) + source.load(index, mask, lanes=lanes)
        target.store(index, total, mask)

    _each(code, begin, end, body)


def fill_line(code: Code, target: Line, begin: str | int, end: str, value: float = 0) -> None:
    """target[i] = value"""

    def body(index: str, mask: str | None, lanes: int) -> None:
        target.store(index, number(code, value, target.element, lanes), mask)

    _each(code, begin, end, body)
