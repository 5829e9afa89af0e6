"""A gemm with a packed right-hand side, as a native function that other kernels call between their own loops.

    c = a b  or  c += a b      a (rows, depth), any strides     b (depth, columns), packed     c (rows, columns)

Unlike a library's, an element does not depend on how many rows are computed at once: it is summed over the same
blocks of the depth in the same order, so threads may share rows in any way. And b is not packed again at every call.

Packed: columns are cut into panels of `width` vectors, the last filled up with zeros; a panel holds its columns for
depth 0, then for depth 1, and so on. The inner loop then reads b front to back and keeps a tile of c in registers.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.arguments import call_kernel
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, Variable, splat, splat_constant, tail_mask
from mlcompute.devices.cpu.codegen.short_rows import transposed
from mlcompute.devices.cpu.codegen.simd import SimdValue

#: Depth summed in registers before it is added to c: so much of a panel fits the first-level cache, and errors grow
#: with the number of blocks, not of terms.
DEPTH = 128
#: Elements of a cache line, and steps of the depth after which some lines are fetched that are used later.
LINE = 16
#: Multiplications and additions one thread does in a nanosecond, for estimates of cost.
FLOPS_PER_NS = 100.0


def registers() -> int:
    """Vector registers of this machine."""
    return 32 if vector_lanes() == 16 or platform.machine() in ("arm64", "aarch64") else 16


#: What a vector of a panel costs, by the vectors a panel has: few of them leave few sums to work on at once.
_COSTS = {1: 1.25, 2: 1.08, 3: 1.02, 4: 1.0}
#: Vectors of a last panel that are summed alone, where there are no more of them.
_NARROW = (1, 2)


def _widths() -> range:
    return range(4 if registers() == 32 else 2, 0, -1)


def panel_width(columns: int) -> int:
    """Vectors per panel: those that waste least on the last panel, and of these the most."""
    vectors = -(-columns // vector_lanes())
    return min(_widths(), key=lambda width: -(-vectors // width) * width)


def in_wide_panels(columns: int) -> int:
    """As many columns, or a few more, as have wide panels: for packing and multiplying the given ones as if so many."""
    vectors = -(-columns // vector_lanes())

    def cost(width: int) -> float:
        full, rest = divmod(vectors, width)
        used = rest if rest in _NARROW else width * (rest > 0)
        return full * width * _COSTS[width] + used * _COSTS[used or width]

    width = min(_widths(), key=cost)
    return -(-vectors // width) * width * vector_lanes()


def padded(columns: int) -> int:
    """Columns including those that fill up the last panel."""
    panel = panel_width(columns) * vector_lanes()
    return -(-columns // panel) * panel


def tallest_tile(width: int) -> int:
    """Rows that are summed at once. Some registers are left to a row of b and an element of a."""
    return ({1: 14, 2: 12, 3: 8, 4: 6} if registers() == 32 else {1: 8, 2: 6})[width]


def tile_lines(columns: int) -> int:
    """Cache lines of a tile of c."""
    width = panel_width(in_wide_panels(columns))
    return tallest_tile(width) * width * vector_lanes() // LINE


# The functions, for `KernelArguments.pointer`: void(i64, i64, ptr arguments), the first two unused ------------------


def packed_gemm(columns: int, fetched: int = 0, block: int = DEPTH, rows_ahead: bool = False) -> Code:
    """The gemm for a number of columns; see `call_packed_gemm`.

    fetched     arrays it fetches lines of meanwhile
    block       depth summed in registers
    rows_ahead  rows of a are fetched one tile ahead: for many threads that read them from the same cache
    """
    return _code(_packed_gemm_code, panel_width(columns), vector_lanes(), fetched, block, rows_ahead)


def pack_rows(columns: int, element: str = "float") -> Code:
    """Packing b from its rows, (depth, columns), float or bfloat16; see `call_pack`."""
    return _code(_pack_rows_code, panel_width(columns), vector_lanes(), element)


def pack_columns(columns: int, element: str = "float") -> Code:
    """Packing b from its columns, (columns, depth), float or bfloat16; see `call_pack`."""
    return _code(_pack_columns_code, panel_width(columns), vector_lanes(), element)


@functools.cache
def _code(write: Callable[..., Code], width: int, lanes: int, *others: str | int) -> Code:
    return write(width, *others)


class Ahead(NamedTuple):
    """What is fetched into the cache while a product keeps the processor busy, and memory idle: it is used after it.

    arrays   where it begins, for each of some arrays alike
    width    elements of a row of it, and `pitch` from one row to the next
    rate     lines of each array that are fetched in `LINE` steps of the depth
    place    where fetching has got to, between calls: two words, (start of the row, element of it)
    end      the start of the first row that is not fetched
    """

    arrays: Sequence[str]
    width: str | int
    pitch: str | int
    rate: str | int
    place: str
    end: str | int = 1 << 62


def fetch_rate(depth: int, lines: float) -> int:
    """Lines to fetch in `LINE` steps, for so many lines to be fetched while a tile is summed over a depth."""
    return math.ceil(lines * LINE / depth)


def begin_fetching(code: Code, place: str) -> None:
    """From the beginning: see `Ahead.place`."""
    for word in range(2):
        code.set("i64", code.at(place, word, "i64"), "0")


def call_packed_gemm(
    code: Code,
    function: str,
    extents: tuple[str | int, str | int, str | int],
    a: tuple[str, str | int, str | int],
    b: str,
    c: tuple[str, str | int],
    accumulate: str | int = 0,
    packed_depth: str | int | None = None,
    ahead: Ahead | None = None,
    added: tuple[str, str | int] | None = None,
) -> None:
    """Call `product`: (rows, columns, depth); a, its row stride and stride along the depth; b; c and its row stride.

    accumulate    not 0: add what is in c, or in `added`, to the product
    packed_depth  the depth that b was packed with, where only the first part of it is wanted
    ahead         for a function that fetches
    added         what is added, and its row stride, where that is not c
    """
    packed, added = extents[2] if packed_depth is None else packed_depth, added or c
    numbers, pointers = [*extents, packed, accumulate, *a[1:], c[1], added[1]], [a[0], b, c[0], added[0]]
    if ahead is not None:
        numbers += [ahead.width, ahead.pitch, ahead.rate, ahead.end]
        pointers += [ahead.place, *ahead.arrays]
    call_kernel(code, function, numbers, pointers)


def call_pack(
    code: Code,
    function: str,
    columns: tuple[str | int, str | int],
    depth: str | int,
    source: tuple[str, str | int],
    target: str,
) -> None:
    """Call `pack_rows` or `pack_columns` for the panels from one column to another; source and its row stride."""
    call_kernel(code, function, [*columns, depth, source[1]], [source[0], target])


# Their code ---------------------------------------------------------------------------------------------------------


def _packed_gemm_code(width: int, fetched: int, block: int, rows_ahead: bool) -> Code:
    code, choices = (
        Code("packed_gemm", level=1),
        f"{width} {vector_lanes()} {registers()} {fetched} {block} {rows_ahead}",
    )
    code.later(choices, lambda: _write_packed_gemm(code, width, fetched, block, rows_ahead))
    return code


def _write_packed_gemm(code: Code, width: int, fetched: int, block: int, rows_ahead: bool) -> None:
    rows, columns, depth, packed, accumulate, a_row, a_depth, c_row, first_row = map(code.argument, range(9))
    pointers = 13 if fetched else 9
    a, b, c, first = (code.argument(index, "ptr") for index in range(pointers, pointers + 4))
    fetch = _Fetch(code, pointers, fetched) if fetched else None
    panel = width * vector_lanes()
    with code.loop(0, depth, block) as start:
        steps = code.minimum(code.sub(depth, start), block)
        adds = code.let(f"icmp ne i64 {code.let(f'or i64 {accumulate}, {start}')}, 0")
        a_block = code.at(a, code.mul(start, a_depth), "float")
        is_first = code.let(f"icmp eq i64 {start}, 0")
        added = code.let(f"select i1 {is_first}, ptr {first}, ptr {c}")
        added_row = code.let(f"select i1 {is_first}, i64 {first_row}, i64 {c_row}")
        with code.loop(0, columns, panel) as column:
            b_block = code.at(b, code.add(code.mul(column, packed), code.mul(start, panel)), "float")
            c_block, added_block = (code.at(base, column, "float") for base in (c, added))
            remaining = code.sub(columns, column)
            for used, wanted in _panel_uses(code, width, remaining):
                with code.when(wanted):
                    begin: str | int = 0
                    for height in (tallest_tile(used), 4, 2, 1):
                        end = code.add(begin, code.mul(code.div(code.sub(rows, begin), height), height))
                        with code.loop(begin, end, height) as row:
                            numbers = [code.add(row, i) for i in range(height)]
                            a_rows = _lines(code, a_block, a_row, numbers)
                            if rows_ahead:  # other panels find them in the cache
                                with code.when(code.let(f"icmp eq i64 {column}, 0")):
                                    _fetch_rows(code, a_block, a_row, a_depth, (row, rows), height, steps)
                            tile = _tile(code, used, panel, steps, a_rows, a_depth, b_block, fetch)
                            c_rows = _lines(code, c_block, c_row, numbers)
                            added_rows = _lines(code, added_block, added_row, numbers)
                            _finish(code, tile, c_rows, added_rows, adds, remaining)
                        begin = end
    if fetch is not None:
        fetch.finish()


class _Fetch:
    """Fetching inside a product: see `Ahead`."""

    def __init__(self, code: Code, first: int, count: int) -> None:
        """`first`: the first argument that is a pointer."""
        self.code = code
        self.width, self.pitch, self.rate, self.end = (code.argument(index) for index in range(first - 4, first))
        self.place = code.argument(first + 4, "ptr")
        self.arrays = [code.argument(first + 5 + index, "ptr") for index in range(count)]
        self._words = [code.at(self.place, word, "i64") for word in range(2)]
        self._start, self._element = (code.variable("i64", code.load(word, "i64")) for word in self._words)

    def some(self) -> None:
        """Fetch the next lines, unless everything has been fetched."""
        code = self.code
        is_over = code.let(f"icmp sge i64 {code.get('i64', self._start)}, {self.end}")
        with code.loop(0, code.let(f"select i1 {is_over}, i64 0, i64 {self.rate}")):
            start, element = (code.get("i64", slot) for slot in (self._start, self._element))
            offset = code.add(start, element)
            for array in self.arrays:
                code.prefetch(code.at(array, offset, "float"))
            further = code.add(element, LINE)
            is_over = code.let(f"icmp sge i64 {further}, {self.width}")
            code.set("i64", self._element, code.let(f"select i1 {is_over}, i64 0, i64 {further}"))
            code.set("i64", self._start, code.add(start, code.let(f"select i1 {is_over}, i64 {self.pitch}, i64 0")))

    def finish(self) -> None:
        """Leave to the next call where this one has got to."""
        for word, slot in zip(self._words, (self._start, self._element), strict=True):
            self.code.set("i64", word, self.code.get("i64", slot))


def _fetch_rows(code: Code, a: str, a_row: str, a_depth: str, bounds: tuple[str, str], height: int, steps: str) -> None:
    """Fetch the rows of the tile that follows the one from the first bound on, and those of the first tile itself."""
    row, rows = bounds
    is_first = code.let(f"icmp eq i64 {row}, 0")
    begin = code.let(f"select i1 {is_first}, i64 0, i64 {code.add(row, height)}")
    end = code.minimum(code.add(row, 2 * height), rows)
    with code.loop(begin, end) as number, code.loop(0, steps, LINE) as step:
        code.prefetch(code.at(code.at(a, code.mul(number, a_row), "float"), code.mul(step, a_depth), "float"))


def _lines(code: Code, base: str, stride: str, numbers: Sequence[str]) -> list[Line]:
    return [Line(code, code.at(base, code.mul(number, stride), "float"), "float") for number in numbers]


def _panel_uses(code: Code, width: int, remaining: str) -> list[tuple[int, str]]:
    """How many vectors of a panel are summed, and when: the last panel may have few columns."""
    uses, wider = [], "true"
    for used in (used for used in _NARROW if used < width):
        fits = code.let(f"icmp sle i64 {remaining}, {used * vector_lanes()}")
        uses.append((used, code.let(f"and i1 {wider}, {fits}")))
        wider = code.let(f"xor i1 {fits}, true")
    return [*uses, (width, wider)]


def _tile(
    code: Code, width: int, panel: int, steps: str, a_rows: list[Line], a_depth: str, b: str, fetch: _Fetch | None
) -> list[list[SimdValue]]:
    """Rows of `width` vectors, summed over `steps` in registers; `panel`: from one depth to the next in b."""
    lanes = vector_lanes()
    sums = [[Variable(splat_constant(code, 0.0)) for _ in range(width)] for _ in a_rows]

    def multiply(first: str | int, last: str) -> None:
        with code.loop(first, last) as k:
            b_row = Line(code, code.at(b, code.mul(k, panel), "float"), "float")
            b_vectors = [b_row.load(v * lanes) for v in range(width)]
            offset = code.mul(k, a_depth)
            for a_row, row_sums in zip(a_rows, sums, strict=True):
                element = splat(a_row.load(offset, lanes=1))
                for b_vector, total in zip(b_vectors, row_sums, strict=True):
                    # Fused where the machine can; nothing is gained by emulating it.
                    total.set(element.intrinsic("fmuladd", b_vector, total.get()))

    if fetch is None:
        multiply(0, steps)
    else:
        with code.loop(0, steps, LINE) as begin:
            fetch.some()
            multiply(begin, code.minimum(code.add(begin, LINE), steps))
    return [[total.get() for total in row_sums] for row_sums in sums]


def _finish(
    code: Code, tile: list[list[SimdValue]], c_rows: list[Line], added_rows: list[Line], adds: str, remaining: str
) -> None:
    """Store a tile, with `added_rows` added if `adds`; only `remaining` columns exist."""
    lanes, width = vector_lanes(), len(tile[0])

    def store(masks: Sequence[str | None]) -> None:
        finals = [[Variable(total) for total in sums] for sums in tile]
        with code.when(adds):
            for added_row, sums in zip(added_rows, finals, strict=True):
                for v, (final, mask) in enumerate(zip(sums, masks, strict=True)):
                    final.set(added_row.load(v * lanes, mask) + final.get())
        for c_row, sums in zip(c_rows, finals, strict=True):
            for v, (final, mask) in enumerate(zip(sums, masks, strict=True)):
                c_row.store(v * lanes, final.get(), mask)

    full = code.let(f"icmp sge i64 {remaining}, {width * lanes}")
    with code.when(full):
        store([None] * width)
    with code.when(code.let(f"xor i1 {full}, true")):
        store([tail_mask(code, code.sub(remaining, v * lanes), lanes) for v in range(width)])


def _pack_rows_code(width: int, element: str) -> Code:
    code = Code("pack_rows")
    code.later(f"{width} {vector_lanes()} {element}", lambda: _write_pack_rows(code, width, element))
    return code


def _write_pack_rows(code: Code, width: int, element: str) -> None:
    begin, end, depth, stride = (code.argument(index) for index in range(4))
    source, target = code.argument(4, "ptr"), code.argument(5, "ptr")
    with code.loop(0, depth) as k:
        row = Line(code, code.at(source, code.mul(k, stride), element), element)
        address = code.at(target, code.mul(k, width * vector_lanes()), "float")
        pack_row(code, width, (begin, end), row, address, depth)


def pack_row(
    code: Code, width: int, columns: tuple[str | int, str | int], row: Line, target: str, depth: str | int
) -> None:
    """Copy one row of b into the panels: `target` plus a panel per `depth` rows."""
    lanes, (begin, end) = vector_lanes(), columns

    def copy(column: str, masks: Sequence[str | None]) -> None:
        packed = Line(code, code.at(target, code.mul(column, depth), "float"), "float")
        for v, mask in enumerate(masks):
            packed.store(v * lanes, row.load(code.add(column, v * lanes), mask))

    panel = width * lanes
    last = code.add(begin, code.mul(code.div(code.sub(end, begin), panel), panel))
    with code.loop(begin, last, panel) as column:
        copy(column, [None] * width)
    with code.when(code.let(f"icmp slt i64 {last}, {end}")):
        copy(last, [tail_mask(code, code.sub(code.sub(end, last), v * lanes), lanes) for v in range(width)])


def _pack_columns_code(width: int, element: str) -> Code:
    code = Code("pack_columns")
    code.later(f"{width} {vector_lanes()} {element}", lambda: _write_pack_columns(code, width, element))
    return code


def _write_pack_columns(code: Code, width: int, element: str) -> None:
    lanes = vector_lanes()
    begin, end, depth, stride = (code.argument(index) for index in range(4))
    source, target = code.argument(4, "ptr"), code.argument(5, "ptr")
    panel = width * lanes
    squares = code.mul(code.div(depth, lanes), lanes)
    with code.loop(begin, end, panel) as column, code.loop(0, panel, lanes) as first:
        base = code.add(column, first)
        address = code.at(target, code.add(code.mul(column, depth), first), "float")
        # Squares are transposed in registers, the rest of the depth goes element by element. Beyond the last column
        # nothing is read: the first one stands in and is not used.
        count = code.sub(end, base)
        has_all = code.let(f"icmp sge i64 {count}, {lanes}")

        def store_square(k: str, rows: Sequence[SimdValue]) -> None:
            for i, row in enumerate(transposed(rows)):
                Line(code, address, "float").store(code.mul(code.add(k, i), panel), row)

        with code.when(has_all), code.loop(0, squares, lanes) as k:
            corner = code.at(source, code.add(code.mul(base, stride), k), element)
            lines = [Line(code, code.at(corner, code.mul(stride, i), element), element) for i in range(lanes)]
            store_square(k, [line.load(0) for line in lines])
        with code.when(code.let(f"xor i1 {has_all}, true")):
            there = [code.let(f"icmp slt i64 {i}, {count}") for i in range(lanes)]
            starts = [
                code.let(f"select i1 {exists}, i64 {code.mul(code.add(base, i), stride)}, i64 0")
                for i, exists in enumerate(there)
            ]
            type_, zero = f"<{lanes} x float>", splat_constant(code, 0.0).name
            with code.loop(0, squares, lanes) as k:
                rows = [Line(code, code.at(source, code.add(start, k), element), element).load(0) for start in starts]
                of_rows = zip(there, rows, strict=True)
                found = [row.let(f"select i1 {exists}, {type_} {row.name}, {type_} {zero}") for exists, row in of_rows]
                store_square(k, found)
        with code.loop(0, lanes) as lane:
            exists = code.let(f"icmp slt i64 {lane}, {count}")
            start = code.let(f"select i1 {exists}, i64 {code.mul(code.add(base, lane), stride)}, i64 0")
            with code.loop(squares, depth) as k:
                value = Line(code, source, element).load(code.add(start, k), lanes=1).name
                value = code.let(f"select i1 {exists}, float {value}, float 0.0")
                code.store(code.at(address, code.add(code.mul(k, panel), lane), "float"), "float", value)
