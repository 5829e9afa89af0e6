"""Sorting inside kernels: elements as whole numbers in their order, the smallest of them, and all of them.

A key is a whole number of 64 bits: 32 bits that have the order of the elements, then 32 of their index, so that no two
are equal and the first of equal elements comes first. To find the smallest keys, elements are compared with the largest
key kept so far, several vectors at a time; few of a long line pass. Those that do are put in their place (where few are
kept), or collected until there are as many again, and sorted with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line
from mlcompute.devices.cpu.codegen.simd import FLOATING, SimdValue, select

#: Values of the eight bits that one pass of a radix sort looks at.
DIGIT = 256
#: Vectors that are compared at a time.
_VECTORS = 4


@dataclass(frozen=True)
class Elements:
    """A line of elements in memory, to be ordered."""

    line: Line
    dtype: np.dtype[Any]
    descending: bool

    def ordered(self, index: str, lanes: int = 1) -> SimdValue:
        """32 bits, or 64 for elements of so many, that are ordered as the elements are, without a sign."""
        element = MEMORY_TYPES[self.dtype]
        value = self.line.load(index, lanes=lanes)
        word, count = ("i64", 64) if self.dtype.itemsize == 8 else ("i32", 32)
        sign = -(2 ** (count - 1))
        if element in FLOATING:
            if element == "half":
                value = value.let(f"fpext {value.type} {value.name} to {vector('float', lanes)}", "float")
            # -0 and 0 are equal; a NaN, whatever its sign, is larger than everything.
            bits = (value + 0.0).bits()
            bits = select(value.is_nan(), -1, bits ^ ((bits >> (count - 1)) | sign))
        else:
            bits = value
            if element != word:
                widened = "sext" if self.dtype.kind == "i" else "zext"
                bits = value.let(f"{widened} {value.type} {value.name} to {vector(word, lanes)}", word)
            if not (self.dtype.kind == "u" and self.dtype.itemsize == 4):
                bits = bits ^ sign
        return ~bits if self.descending else bits

    def key(self, index: str) -> str:
        """The key of an element of up to 32 bits."""
        code = self.line.code
        wide = code.let(f"zext i32 {self.ordered(index).name} to i64")
        return code.let(f"or i64 {code.let(f'shl i64 {wide}, 32')}, {index}")


def insert(code: Code, keys: str, new: str, place: str) -> None:
    """Put a key in order before a place; those larger than it move up by one, onto the place."""
    at = code.variable("i64", place)
    head, test, move, done = (code.new_label(name) for name in ("head", "test", "move", "done"))
    code.do(f"br label %{head}")
    code.start_block(head)
    position = code.get("i64", at)
    code.do(f"br i1 {code.let(f'icmp sgt i64 {position}, 0')}, label %{test}, label %{done}")
    code.start_block(test)
    before = code.sub(position, 1)
    other = code.load(code.at(keys, before, "i64"), "i64")
    code.do(f"br i1 {code.let(f'icmp ugt i64 {other}, {new}')}, label %{move}, label %{done}")
    code.start_block(move)
    code.store(code.at(keys, position, "i64"), "i64", other)
    code.set("i64", at, before)
    code.do(f"br label %{head}")
    code.start_block(done)
    code.store(code.at(keys, code.get("i64", at), "i64"), "i64", new)


def keep_in_order(code: Code, elements: Elements, keys: str, extent: str, kept: str) -> None:
    """The smallest keys, in order: those that pass are put in their place."""
    with code.loop(0, kept) as index:
        insert(code, keys, elements.key(index), index)
    last = code.sub(kept, 1)
    largest = code.variable("i32", _order_of(code, keys, last))

    def take(index: str) -> None:
        key = elements.key(index)
        order = code.let(f"trunc i64 {code.let(f'lshr i64 {key}, 32')} to i32")
        with code.when(code.let(f"icmp ult i32 {order}, {code.get('i32', largest)}")):
            insert(code, keys, key, last)
            code.set("i32", largest, _order_of(code, keys, last))

    position = code.variable("i64", kept)
    _scan(code, elements, position, extent, lambda: code.get("i32", largest), take)


def keep_and_sort(
    code: Code, elements: Elements, keys: str, spare: str, counts: str, extent: str, kept: str, room: str
) -> None:
    """The smallest keys, in order, in memory for `room` of them: those that pass are collected and sorted."""
    with code.loop(0, room) as index:
        code.store(code.at(keys, index, "i64"), "i64", elements.key(index))
    filled, position, more = (code.variable("i64", start) for start in (room, room, "1"))
    full = code.sub(room, _VECTORS * vector_lanes())

    def take(index: str) -> None:
        count = code.get("i64", filled)
        code.store(code.at(keys, count, "i64"), "i64", elements.key(index))
        code.set("i64", filled, code.add(count, 1))

    with _while(code, lambda: code.let(f"icmp ne i64 {code.get('i64', more)}, 0")):
        radix_sort(code, lambda key: code.let(f"lshr i64 {key}, 32"), 4, keys, spare, counts, code.get("i64", filled))
        code.set("i64", filled, kept)
        largest = _order_of(code, keys, code.sub(kept, 1))
        has_more = code.let(f"icmp slt i64 {code.get('i64', position)}, {extent}")
        code.set("i64", more, code.let(f"zext i1 {has_more} to i64"))
        _scan(
            code, elements, position, extent, lambda: largest, take,
            goes_on=lambda: code.let(f"icmp sle i64 {code.get('i64', filled)}, {full}"),
        )  # fmt: skip


def capacity(count: int, extent: int) -> int | None:
    """Keys that `keep_and_sort` needs memory for; None where it is better to sort all."""
    room = 2 * count + 2 * _VECTORS * vector_lanes()
    return room if 2 * room <= extent else None


def _order_of(code: Code, keys: str, place: str) -> str:
    """The 32 bits of a key that order elements."""
    key = code.load(code.at(keys, place, "i64"), "i64")
    return code.let(f"trunc i64 {code.let(f'lshr i64 {key}, 32')} to i32")


def _scan(
    code: Code,
    elements: Elements,
    position: str,
    extent: str,
    largest: Callable[[], str],
    take: Callable[[str], None],
    goes_on: Callable[[], str] | None = None,
) -> None:
    """`take` every element from a position on that comes before `largest`; equal ones come after it, by their index.

    goes_on   asked before every few vectors; the position is moved on
    """
    lanes = vector_lanes() if elements.line.stride is None else 1
    group = lanes * _VECTORS

    def has_group() -> str:
        fits = code.let(f"icmp sle i64 {code.add(code.get('i64', position), group)}, {extent}")
        return fits if goes_on is None else code.let(f"and i1 {fits}, {goes_on()}")

    with _while(code, has_group):
        start = code.get("i64", position)
        limit = SimdValue(code, code.splat(largest(), "i32", lanes), "i32", lanes)
        found = "0"
        for number in range(_VECTORS):
            first = code.add(start, number * lanes)
            mask = elements.ordered(first, lanes).compare("", "ult", limit)
            bits = mask.name if lanes == 1 else code.let(f"bitcast <{lanes} x i1> {mask.name} to i{lanes}")
            wide = code.let(f"zext i{lanes} {bits} to i64")
            found = code.let(f"or i64 {found}, {code.let(f'shl i64 {wide}, {number * lanes}')}")
        left = code.variable("i64", found)
        code.declare("i64 @llvm.cttz.i64(i64, i1)")
        with _while(code, lambda: code.let(f"icmp ne i64 {code.get('i64', left)}, 0")):
            now = code.get("i64", left)
            take(code.add(start, code.let(f"call i64 @llvm.cttz.i64(i64 {now}, i1 true)")))
            code.set("i64", left, code.let(f"and i64 {now}, {code.sub(now, 1)}"))
        code.set("i64", position, code.add(start, group))
    may = "true" if goes_on is None else goes_on()
    start = code.get("i64", position)
    is_rest = code.let(f"icmp sgt i64 {code.add(start, group)}, {extent}")
    with code.when(code.let(f"and i1 {may}, {is_rest}")):
        with code.loop(start, extent) as index:
            order = elements.ordered(index).name
            with code.when(code.let(f"icmp ult i32 {order}, {largest()}")):
                take(index)
        code.set("i64", position, extent)


def radix_sort(
    code: Code, bits_of: Callable[[str], str], turns: int, keys: str, spare: str, counts: str, count: str
) -> None:
    """By `turns` digits of the bits of every key, the lowest eight first: keys of one digit keep their order."""
    for turn in range(turns):
        source, target = (keys, spare) if turn % 2 == 0 else (spare, keys)
        with code.loop(0, DIGIT) as digit:
            code.store(code.at(counts, digit, "i64"), "i64", "0")

        def digit_of(number: str, shift: int = 8 * turn) -> str:
            bits = code.let(f"lshr i64 {bits_of(number)}, {shift}")
            return code.at(counts, code.let(f"and i64 {bits}, 255"), "i64")

        with code.loop(0, count) as index:
            place = digit_of(code.load(code.at(source, index, "i64"), "i64"))
            code.store(place, "i64", code.add(code.load(place, "i64"), 1))
        total = code.variable("i64", "0")
        with code.loop(0, DIGIT) as digit:
            place, start = code.at(counts, digit, "i64"), code.get("i64", total)
            code.set("i64", total, code.add(start, code.load(place, "i64")))
            code.store(place, "i64", start)
        with code.loop(0, count) as index:
            number = code.load(code.at(source, index, "i64"), "i64")
            place = digit_of(number)
            to = code.load(place, "i64")
            code.store(place, "i64", code.add(to, 1))
            code.store(code.at(target, to, "i64"), "i64", number)


@contextlib.contextmanager
def _while(code: Code, condition: Callable[[], str]) -> Iterator[None]:
    """while (condition) { ... }"""
    head, body, done = (code.new_label(name) for name in ("head", "body", "done"))
    code.do(f"br label %{head}")
    code.start_block(head)
    code.do(f"br i1 {condition()}, label %{body}, label %{done}")
    code.start_block(body)
    yield
    code.do(f"br label %{head}")
    code.start_block(done)
