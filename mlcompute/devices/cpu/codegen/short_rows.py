"""Short rows, such as the taps of filters, read and written as vectors across them.

    rows (lanes, width), `pitch` apart     <->     buffer (width, lanes), `apart` from one vector to the next

With AVX-512 rows are loaded and stored in one piece each and transposed in registers: a gather or scatter would touch
every element by itself. Other processors, whose masked stores are slow and whose registers are few, do that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mlcompute.devices.cpu.codegen.code import Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, splat_constant, tail_mask
from mlcompute.devices.cpu.codegen.simd import SimdValue


def read_across(
    code: Code, rows: tuple[str, str | int], width: int, buffer: Line, apart: str | int, count: str | None = None
) -> None:
    """Rows, as (pointer, pitch), into the buffer; `count`: so many of them exist, and zeros stand for the others."""
    lanes = vector_lanes()
    if lanes < 16:
        with _each_element(code, rows, width, count) as (element, across, mask):
            buffer.store(code.mul(element, apart), across.load(0, mask))
        return
    for first in range(0, width, lanes):
        masks = _masks(code, min(lanes, width - first), count)
        found = [line.load(first, mask) for line, mask in zip(_lines(code, rows), masks, strict=True)]
        for number, value in enumerate(transposed(found)[: width - first]):
            buffer.store(code.mul(first + number, apart), value)


def write_across(
    code: Code, buffer: Line, apart: str | int, rows: tuple[str, str | int], width: int, count: str | None = None
) -> None:
    """The buffer into rows, as (pointer, pitch); `count`: so many of them exist, and no others are written."""
    lanes = vector_lanes()
    if lanes < 16:
        with _each_element(code, rows, width, count) as (element, across, mask):
            across.store(0, buffer.load(code.mul(element, apart)), mask)
        return
    for first in range(0, width, lanes):
        used = min(lanes, width - first)
        found = [buffer.load(code.mul(first + number, apart)) for number in range(used)]
        found += [splat_constant(code, 0.0)] * (lanes - used)
        for line, value, mask in zip(_lines(code, rows), transposed(found), _masks(code, used, count), strict=True):
            line.store(first, value, mask)


@contextlib.contextmanager
def _each_element(
    code: Code, rows: tuple[str, str | int], width: int, count: str | None
) -> Iterator[tuple[str, Line, str | None]]:
    """A loop over the elements of a row: the number of one, a line across all rows, and which of these exist."""
    mask = None if count is None else tail_mask(code, count, vector_lanes())
    with code.loop(0, width) as element:
        yield element, Line(code, code.at(rows[0], element, "float"), "float", str(rows[1])), mask


def _lines(code: Code, rows: tuple[str, str | int]) -> list[Line]:
    pointer, pitch = rows
    return [Line(code, code.at(pointer, code.mul(number, pitch), "float"), "float") for number in range(vector_lanes())]


def _masks(code: Code, width: int, count: str | None) -> list[str | None]:
    """Of every row: the first `width` elements; none of rows that do not exist."""
    lanes = vector_lanes()
    bits = ", ".join(f"i1 {'true' if lane < width else 'false'}" for lane in range(lanes))
    if count is None:
        return [None if width == lanes else f"<{bits}>"] * lanes
    type_ = vector("i1", lanes)
    masks: list[str | None] = []
    for row in range(lanes):
        exists = code.let(f"icmp slt i64 {row}, {count}")
        masks.append(code.let(f"select i1 {exists}, {type_} <{bits}>, {type_} zeroinitializer"))
    return masks


def transposed(rows: Sequence[SimdValue]) -> list[SimdValue]:
    """The columns of a square of vectors: blocks of 1, 2, 4 ... change places across the diagonal."""
    rows, lanes, distance = list(rows), len(rows), 1
    type_ = vector(rows[0].element, lanes)
    while distance < lanes:
        low = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
        high = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
        for i in (i for i in range(lanes) if not i & distance):
            a, b = rows[i], rows[i + distance]
            for row, picks in ((i, low), (i + distance, high)):
                order = ", ".join(f"i32 {pick}" for pick in picks)
                rows[row] = a.let(f"shufflevector {type_} {a.name}, {type_} {b.name}, <{lanes} x i32> <{order}>")
        distance *= 2
    return rows
