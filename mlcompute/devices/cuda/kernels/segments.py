"""Sums by key: y[a, key, b] = sum over items i with that key of updates[a, i, b], always in the order of the items.

Where there are few items, every key looks through all of them. Otherwise items are listed by key first. Which key's
list comes first, and how items come into it, differs from run to run, but lists are sorted before they are summed:

    count      items of every key
    allocate   a part of the list to every key with few items; keys with many are noted
    place      items into their parts
    order      every part by its items' numbers
    sum        keys with few items: a thread per result (or four) adds them in order
    sum long   keys with many items: a block looks through all items and shares those it finds among its threads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cuda.codegen.checked_indices import VALID, checked
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, grouped, vector_width
from mlcompute.devices.cuda.codegen.lanes import BLOCKS, power_of_two
from mlcompute.devices.cuda.codegen.types import (
    loaded,
    memory_type,
    stored,
    sum_type,
)
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.loop_nest import Axis, Operand, Operands, iteration_count
from mlcompute.ops.op import Step

#: Up to so many items are looked through for every result, and up to so many looks in all.
_FEW, _MOST_LOOKS = 4096, 1 << 28
#: Items of a key that are sorted by a warp, and then added one after the other.
_LIGHT = 32
#: Threads that share a key with more.
_LONG = 512
#: Items whose keys a block looks through at once.
_TILE = 1024


def are_few(results: int, items: int) -> bool:
    """Is it best if every result looks through all items?"""
    return items <= _FEW and results * items <= _MOST_LOOKS


def segment_bytes(results: int, items: int, keys: int) -> int:
    """Workspace: counts, cursors, starts, the list of items and the long keys."""
    return 0 if are_few(results, items) else sum(_sizes(items, keys))


def _sizes(items: int, keys: int) -> list[int]:
    """Bytes of the parts of the workspace, each a multiple of 16."""
    sizes = (4 * (keys + 2), 4 * keys, 4 * items, 8 * (items // (_LIGHT + 1) + 1))
    return [-(-size // 16) * 16 for size in sizes]


@dataclass(frozen=True)
class Segments:
    """What is summed.

    items       loops over the items in their order; strides: indices, updates and (optional) where their keys start
    outer       loops over a; strides: updates, y
    inner       loops over b; strides: updates, y
    keys        how many there are; key_stride: from one to the next in y
    extent      valid indices, if fewer than keys; an item's key is where it starts + index `along`
    base        what sums start from, for every key; None: 0.   base_axes: loops over it
    line        (count, stride) of the items that may have a key; line_axes: loops over the keys, strides: first item
    """

    step: Step
    updates: Operand
    indices: Operand
    items: Sequence[Axis]
    y: Operand
    base: Operand | None
    outer: Sequence[Axis]
    inner: Sequence[Axis]
    keys: int
    key_stride: int
    extent: int = 0
    along: int = 1
    base_axes: Sequence[Axis] = ()
    line: tuple[int, int] | None = None
    line_axes: Sequence[Axis] = ()

    def launches(self, operands: Operands) -> Sequence[Launch]:
        """All launches, one if items are few."""
        if are_few(self.y.size, self.indices.size):
            return [self._look()]
        parts, offset = [], 0
        for size in _sizes(self.indices.size, self.keys):
            parts.append(operands.workspace(self.step, offset, size))
            offset += size
        counts, starts, listed, long = parts
        return [
            self._zero(counts),
            self._count(counts),
            self._allocate(counts, starts, long),
            self._place(counts, starts, listed),
            self._order(counts, starts, listed),
            self._sum(counts, starts, listed),
            self._sum_long(counts, long),
        ]

    # Items and results ------------------------------------------------------------------------------------------------

    @property
    def _iterations(self) -> int:
        return max(self.y.size, self.indices.size, self.updates.size)

    def _source(self) -> KernelSource:
        everything = [self.updates, self.indices, self.y, *([self.base] if self.base is not None else [])]
        return KernelSource(everything, self._iterations)

    def _key(self, source: KernelSource, item: str, check: str | None) -> str:
        """Statements that declare `key`, that of an item, or -1 where its index is invalid."""
        starts = len(self.items[0].strides) > 2
        text = source.unraveled(item, self.items, ["index_at", "", "start"] if starts else ["index_at"], "item")
        along = source.index("along", self.along)
        test = f"valid(index, {check})" if check else "index >= 0 && index < valid_count"
        if not check:
            source.index("valid_count", self._extent)
        return f"""{text}
        const long long index = (long long)indices[index_at];
        const Index key = {test} ? {"start + " if starts else ""}(Index)index * {along} : -1;"""

    @property
    def _extent(self) -> int:
        return self.extent or self.keys

    @property
    def _width(self) -> int:
        """Neighbouring results of one thread."""
        updates, y = self.updates, self.y
        items = [Axis(axis.extent, (axis.strides[1], 0)) for axis in self.items]
        axes = [*self.outer, *items, Axis(self.keys, (0, self.key_stride)), *self.inner]
        return vector_width([updates, y], axes, [0, 1])

    def _result(self, source: KernelSource, width: int) -> str:
        """Statements that find a thread's result number k: `own`, its key, and where it lies in updates and y."""
        inner = grouped(self.inner, width)
        count = source.extent("inner_count", iteration_count(inner))
        keys = source.extent("keys", self.keys)
        return f"""const Index rest = {source.divided("k", count)}, b = k - rest * {count};
    const Index a = {source.divided("rest", keys)}, own = rest - a * {keys};
    {source.unraveled("a", self.outer, ["a_from", "a_to"], "outer")}
    {source.unraveled("b", inner, ["b_from", "b_to"], "inner")}
    const Index from = a_from + b_from, to = a_to + b_to + own * {source.index("key_stride", self.key_stride)};"""

    def _start(self, source: KernelSource, width: int) -> str:
        """Statements that declare `sums`, as they are before the first item."""
        kind = sum_type(self.y.dtype)
        if self.base is None:
            return f"{kind} sums[{width}] = {{}};"
        source.pointer("base", self.base)
        place = source.unraveled("own", self.base_axes, ["base_at"], "base")
        return f"{place}\n    {kind} sums[1] = {{({kind}){loaded(self.base.dtype, 'base[base_at]')}}};"

    def _add(self, source: KernelSource, item: str, width: int) -> str:
        """Statements that add an item to `sums`."""
        dtype = self.updates.dtype
        place = source.unraveled(item, self.items, ["", "moved"], "added")
        return f"""{place}
        const auto group = *reinterpret_cast<const Pack<{memory_type(dtype)}, {width}>*>(updates + from + moved);
        #pragma unroll
        for (int v = 0; v < {width}; ++v) sums[v] += ({sum_type(dtype)}){loaded(dtype, "group.at[v]")};"""

    def _store(self, width: int) -> str:
        dtype = self.y.dtype
        kind = memory_type(dtype)
        made = stored(dtype, f"({kind})sums[v]" if dtype.kind in "iu" else "sums[v]")
        return f"""Pack<{kind}, {width}> made;
    #pragma unroll
    for (int v = 0; v < {width}; ++v) made.at[v] = {made};
    *reinterpret_cast<Pack<{kind}, {width}>*>(y + to) = made;"""

    # Kernels ----------------------------------------------------------------------------------------------------------

    def _look(self) -> Launch:
        """A warp per key and up to 32 groups of results: its lanes look at as many items at once."""
        source, width = self._source(), self._width
        inner = grouped(self.inner, width)
        tiles = -(-iteration_count(inner) // 32)
        warps = iteration_count(self.outer) * self.keys * tiles
        source.pointer("updates", self.updates)
        source.pointer("indices", self.indices)
        source.pointer("y", self.y, written=True)
        check = checked(source, self.step, self._extent)
        total, n = source.index("total", warps), source.index("n", self.indices.size)
        across, keys = source.extent("tiles", tiles), source.extent("keys", self.keys)
        body = f"""    __shared__ Index keys_of[{_TILE}];
    const int lane = threadIdx.x % 32;
    const Index number = (Index)blockIdx.x * {BLOCK // 32} + threadIdx.x / 32, unit = number < {total} ? number : 0;
    const Index rest = {source.divided("unit", across)}, b = (unit - rest * {across}) * 32 + lane;
    const Index a = {source.divided("rest", keys)}, own = rest - a * {keys};
    const bool alive = number < {total} && b < {source.index("inner_count", iteration_count(inner))};
    {source.unraveled("a", self.outer, ["a_from", "a_to"], "outer")}
    {source.unraveled("b", inner, ["b_from", "b_to"], "inner")}
    const Index from = a_from + b_from;
    {self._start(source, width)}
    for (Index first = 0; first < {n}; first += {_TILE}) {{
        const int count = {n} - first < {_TILE} ? (int)({n} - first) : {_TILE};
        __syncthreads();  // the last tile may still be read
        for (int place = threadIdx.x; place < {_TILE}; place += {BLOCK}) {{
            keys_of[place] = -1;
            if (place < count) {{
                const Index item = first + place;
                {self._key(source, "item", None)}
                keys_of[place] = key;
                if (blockIdx.x == 0) valid(index, {check});
            }}
        }}
        __syncthreads();
        #pragma unroll 4
        for (int place = 0; place < count; place += 32) {{
            unsigned int matches = __ballot_sync(0xffffffffu, keys_of[place + lane] == own);
            for (; matches != 0; matches &= matches - 1) {{
                const Index i = first + place + __ffs(matches) - 1;
                if (!alive) continue;
                {self._add(source, "i", width)}
            }}
        }}
    }}
    if (alive) {{
        const Index to = a_to + b_to + own * {source.index("key_stride", self.key_stride)};
        {self._store(width)}
    }}"""
        grid = blocks_for(warps, BLOCK // 32)
        return source.launch(self.step, "sums by index", VALID, body, grid=grid, block=BLOCK)

    def _zero(self, counts: Operand) -> Launch:
        source = self._source()
        source.pointer("counts", counts, written=True, element="int")
        total = source.index("total", self.keys + 2)
        body = f"{_number(total)}\n    counts[k] = 0;"
        return source.launch(self.step, "fill", "", body, grid=blocks_for(self.keys + 2), block=BLOCK)

    def _count(self, counts: Operand) -> Launch:
        source = self._source()
        source.pointer("indices", self.indices)
        source.pointer("counts", counts, written=True, element="int")
        check = checked(source, self.step, self._extent)
        body = f"""{_number(source.index("total", self.indices.size))}
        {self._key(source, "k", check)}
    if (key >= 0) atomicAdd(counts + key, 1);"""
        grid = blocks_for(self.indices.size)
        return source.launch(self.step, "count keys", VALID, body, grid=grid, block=BLOCK)

    def _allocate(self, counts: Operand, starts: Operand, long: Operand) -> Launch:
        source = self._source()
        source.pointer("counts", counts, written=True, element="int")
        source.pointer("starts", starts, written=True, element="int")
        source.pointer("long_keys", long, written=True, element="Index")
        keys = source.index("keys", self.keys)
        body = f"""    const Index key = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    const int lane = threadIdx.x % 32;
    const int count = key < {keys} ? counts[key] : 0, light = count <= {_LIGHT} ? count : 0;
    int* cursors = counts + {keys};
    int upto = light;
    for (int by = 1; by < 32; by *= 2) {{
        const int before = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= by) upto += before;
    }}
    int first = lane == 31 && upto > 0 ? atomicAdd(cursors, upto) : 0;
    first = __shfl_sync(0xffffffffu, first, 31);
    if (key < {keys}) starts[key] = first + upto - light;
    if (count > {_LIGHT}) long_keys[atomicAdd(cursors + 1, 1)] = key;"""
        return source.launch(self.step, "allocate", "", body, grid=blocks_for(self.keys), block=BLOCK)

    def _place(self, counts: Operand, starts: Operand, listed: Operand) -> Launch:
        source = self._source()
        source.pointer("indices", self.indices)
        source.pointer("counts", counts, element="int")
        source.pointer("starts", starts, written=True, element="int")
        source.pointer("listed", listed, written=True, element="int")
        body = f"""{_number(source.index("total", self.indices.size))}
        {self._key(source, "k", None)}
    if (key >= 0 && counts[key] <= {_LIGHT}) listed[atomicAdd(starts + key, 1)] = (int)k;"""
        return source.launch(self.step, "place", "", body, grid=blocks_for(self.indices.size), block=BLOCK)

    def _order(self, counts: Operand, starts: Operand, listed: Operand) -> Launch:
        source = self._source()
        source.pointer("counts", counts, element="int")
        source.pointer("starts", starts, element="int")
        source.pointer("listed", listed, written=True, element="int")
        keys = source.index("keys", self.keys)
        body = f"""    const Index key = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    const int lane = threadIdx.x % 32, own = key < {keys} ? counts[key] : 0;
    const int end = key < {keys} ? starts[key] : 0;  // items were placed, which moved it there
    unsigned int unordered = __ballot_sync(0xffffffffu, own >= 2 && own <= {_LIGHT});
    for (; unordered != 0; unordered &= unordered - 1) {{
        const int turn = __ffs(unordered) - 1;
        const int count = __shfl_sync(0xffffffffu, own, turn), begin = __shfl_sync(0xffffffffu, end, turn) - count;
        const int mine = lane < count ? listed[begin + lane] : 2147483647;
        int rank = 0;
        for (int other = 0; other < count; ++other) rank += __shfl_sync(0xffffffffu, mine, other) < mine;
        if (lane < count) listed[begin + rank] = mine;
    }}"""
        return source.launch(self.step, "order", "", body, grid=blocks_for(self.keys), block=BLOCK)

    def _sum(self, counts: Operand, starts: Operand, listed: Operand) -> Launch:
        source, width = self._source(), self._width
        source.pointer("updates", self.updates)
        for name, operand in (("counts", counts), ("starts", starts), ("listed", listed)):
            source.pointer(name, operand, element="int")
        source.pointer("y", self.y, written=True)
        body = f"""{_number(source.index("total", self.y.size // width))}
    {self._result(source, width)}
    const int count = counts[own];
    if (count > {_LIGHT}) return;
    {self._start(source, width)}
    const int end = starts[own];
    #pragma unroll 4
    for (int p = end - count; p < end; ++p) {{
        const Index i = listed[p];
        {self._add(source, "i", width)}
    }}
    {self._store(width)}"""
        grid = blocks_for(self.y.size // width)
        return source.launch(self.step, "sums by index", "", body, grid=grid, block=BLOCK)

    def _sum_long(self, counts: Operand, long: Operand) -> Launch:
        source, width = self._source(), self._width
        inner, outer = grouped(self.inner, width), iteration_count(self.outer)
        columns = min(32, power_of_two(iteration_count(inner)))
        lanes, tiles = _LONG // columns, -(-iteration_count(inner) // columns)
        source.pointer("updates", self.updates)
        source.pointer("indices", self.indices)
        source.pointer("counts", counts, element="int")
        source.pointer("long_keys", long, element="Index")
        source.pointer("y", self.y, written=True)
        line_count, line_stride = self.line or (self.indices.size, 1)
        n, keys = source.index("n", line_count), source.index("key_count", self.keys)
        line = source.unraveled("own", self.line_axes, ["line_start"], "line")
        along = source.index("line_stride", line_stride)
        across, count = source.extent("tiles", tiles), source.index("inner_count", iteration_count(inner))
        kind = sum_type(self.y.dtype)
        before = f"constexpr int COLUMNS = {columns}, LANES = {lanes}, WIDTH = {width}, WARPS = {_LONG // 32};\n"
        add = self._add(source, "matches[j]", width)
        body = f"""    __shared__ int matches[{_LONG}], found[WARPS];
    __shared__ {kind} parts[LANES][COLUMNS * WIDTH];
    const int column = threadIdx.x % COLUMNS, lane = threadIdx.x / COLUMNS, warp = threadIdx.x / 32;
    const Index tile = blockIdx.x;
    const Index a = {source.divided("tile", across)};
    const Index b = (tile - a * {across}) * COLUMNS + column;
    const bool alive = b < {count};
    {source.unraveled("a", self.outer, ["a_from", "a_to"], "outer")}
    {source.unraveled("b", inner, ["b_from", "b_to"], "inner")}
    const Index from = a_from + b_from;
    const int long_count = counts[{keys} + 1];
    for (int number = blockIdx.y; number < long_count; number += gridDim.y) {{
        const Index own = long_keys[number];
        {line}
        {kind} sums[WIDTH] = {{}};
        int seen = 0;
        for (Index first = 0; first < {n}; first += {_LONG}) {{
            const Index i = line_start + (first + threadIdx.x) * {along};
            bool match = false;
            if (first + threadIdx.x < {n}) {{
                {self._key(source, "i", None)}
                match = key == own;
            }}
            const unsigned int votes = __ballot_sync(0xffffffffu, match);
            if (threadIdx.x % 32 == 0) found[warp] = __popc(votes);
            __syncthreads();
            int before = 0, all = 0;
            #pragma unroll
            for (int w = 0; w < WARPS; ++w) {{
                if (w < warp) before += found[w];
                all += found[w];
            }}
            if (match) matches[before + __popc(votes & ((1u << (threadIdx.x % 32)) - 1))] = (int)i;
            __syncthreads();
            // Match after match goes to the next lane.
            for (int j = (lane + LANES - seen % LANES) % LANES; alive && j < all; j += LANES) {{
                {add}
            }}
            seen += all;
        }}
        __syncthreads();
        #pragma unroll
        for (int v = 0; v < WIDTH; ++v) parts[lane][v * COLUMNS + column] = sums[v];
        for (int by = LANES / 2; by > 0; by /= 2) {{
            __syncthreads();
            if (lane < by) {{
                #pragma unroll
                for (int v = 0; v < WIDTH; ++v)
                    parts[lane][v * COLUMNS + column] += parts[lane + by][v * COLUMNS + column];
            }}
        }}
        __syncthreads();
        if (alive && lane == 0) {{
            const Index to = a_to + b_to + own * {source.index("key_stride", self.key_stride)};
            {self._start(source, width)}
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) sums[v] += parts[0][v * COLUMNS + column];
            {self._store(width)}
        }}
        __syncthreads();
    }}"""
        across_all = tiles * outer
        grid = (across_all, min(-(-4 * BLOCKS // across_all), self.indices.size // (_LIGHT + 1) + 1), 1)
        return source.launch(self.step, "long sums by index", before, body, grid=grid, block=_LONG)


def _number(total: str) -> str:
    return f"    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;\n    if (k >= {total}) return;"
