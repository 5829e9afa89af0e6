"""scatter and scatter_add of lines.

One index per line along the last axis, as the gradient of picking a class has: a thread stores four neighbouring
results, at most one of which is what the index names. Many indices: a block per line along the indexed axis, which
sorts them in shared memory.

scatter       the last item of every place is found with an atomic maximum, which no order changes
scatter_add   items are counted, then listed by place. How they come into a list differs from run to run, but lists
              are sorted before they are added; for long ones a warp looks through the line, which is in order
"""

from __future__ import annotations

from mlcompute.devices.cuda.codegen.checked_indices import VALID, checked
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.lanes import power_of_two
from mlcompute.devices.cuda.codegen.types import FLOAT, loaded, memory_type, stored, sum_type
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.loop_nest import Operand, collapsed_axes, iteration_count
from mlcompute.ops.op import Step

#: Results that a thread stores, of lines with one index.
_WIDTH = 4
#: Threads of a block.
_THREADS = 256
#: Lines with fewer items are better looked through by every result.
_LEAST = 33
#: Words of shared memory.
_WORDS = 10 << 10
#: Items that a thread sorts and adds.
_LIGHT = 16


def are_lines(step: Step) -> bool:
    """Do places and items of a line fit into shared memory?"""
    indices, y, axis = step.inputs[1], step.results[0], step.attributes["axis"]
    if any(indices.shape[d] != y.shape[d] for d in range(len(y.shape)) if d != axis):
        return False
    places, items = (power_of_two(value.shape[axis]) for value in (y, indices))
    return indices.shape[axis] >= _LEAST and places + 2 * items <= _WORDS


def line_launch(step: Step, updates: Operand, indices: Operand, base: Operand, y: Operand, axis: int) -> Launch:
    """One launch for all lines."""
    source = KernelSource([updates, indices, base, y], y.size)
    for name, operand in (("updates", updates), ("indices", indices), ("base", base)):
        source.pointer(name, operand)
    source.pointer("y", y, written=True)
    check = checked(source, step, y.shape[axis])
    every = {"index": indices, "update": updates, "base": base, "y": y}
    others = [d for d in range(len(y.shape)) if d != axis]
    strides = [tuple(operand.strides[d] for d in others) for operand in every.values()]
    lines = collapsed_axes(tuple(y.shape[d] for d in others), strides)
    place = source.unraveled("line", lines, [f"{name}_start" for name in every], "line")
    for name, operand in every.items():
        source.index(f"{name}_along", operand.strides[axis])
    source.index("items", indices.shape[axis])
    source.index("places", y.shape[axis])
    before = (
        f"{VALID}constexpr int ITEMS = {power_of_two(indices.shape[axis])}, PLACES = {power_of_two(y.shape[axis])}, "
        f"THREADS = {_THREADS}, LIGHT = {_LIGHT};"
    )
    body = f"""    const Index line = blockIdx.x;
    {place}
    auto place_of = [&](int j) -> int {{
        const long long index = (long long)indices[index_start + j * index_along];
        return valid(index, {check}) ? (int)index : -1;
    }};
{_added(updates, base, y) if step.op.name == "scatter_add" else _LAST}"""
    grid = (iteration_count(lines), 1, 1)
    return source.launch(step, f"{step.op.name} of lines", before, body, grid=grid, block=_THREADS)


_LAST = """    __shared__ int last[PLACES];
    for (int place = threadIdx.x; place < places; place += THREADS) last[place] = -1;
    __syncthreads();
    for (int j = threadIdx.x; j < items; j += THREADS) {
        const int place = place_of(j);
        if (place >= 0) atomicMax(last + place, j);
    }
    __syncthreads();
    for (int place = threadIdx.x; place < places; place += THREADS) {
        const int j = last[place];
        y[y_start + place * y_along] =
            j < 0 ? base[base_start + place * base_along] : updates[update_start + j * update_along];
    }"""


def _added(updates: Operand, base: Operand, y: Operand) -> str:
    kind, element = sum_type(y.dtype), memory_type(y.dtype)
    made = stored(y.dtype, f"({element})sum" if y.dtype.kind in "iu" else "sum")
    start = f"({kind}){loaded(base.dtype, 'base[base_start + place * base_along]')}"
    return f"""    __shared__ int ends[PLACES], places_of[ITEMS], listed[ITEMS];
    __shared__ int found[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int place = threadIdx.x; place < PLACES; place += THREADS) ends[place] = 0;
    __syncthreads();
    for (int j = threadIdx.x; j < items; j += THREADS) {{
        const int place = place_of(j);
        places_of[j] = place;
        if (place >= 0) atomicAdd(ends + place, 1);
    }}
    __syncthreads();
    // Where the list of every place begins. A thread has some neighbouring places.
    constexpr int OWN = PLACES / THREADS > 0 ? PLACES / THREADS : 1;
    int own = 0;
    for (int k = 0; k < OWN; ++k) if (threadIdx.x * OWN + k < PLACES) own += ends[threadIdx.x * OWN + k];
    int upto = own;
    for (int by = 1; by < 32; by *= 2) {{
        const int before = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= by) upto += before;
    }}
    if (lane == 31) found[warp] = upto;
    __syncthreads();
    int begin = upto - own;
    for (int w = 0; w < warp; ++w) begin += found[w];
    for (int k = 0; k < OWN; ++k) {{
        if (threadIdx.x * OWN + k >= PLACES) break;
        const int count = ends[threadIdx.x * OWN + k];
        ends[threadIdx.x * OWN + k] = begin;
        begin += count;
    }}
    __syncthreads();
    for (int j = threadIdx.x; j < items; j += THREADS)
        if (places_of[j] >= 0) listed[atomicAdd(ends + places_of[j], 1)] = j;  // which moves it to the end
    __syncthreads();
    auto update = [&](int j) -> {kind} {{
        return ({kind}){loaded(updates.dtype, "updates[update_start + j * update_along]")};
    }};
    for (int place = threadIdx.x; place < places; place += THREADS) {{
        const int first = place > 0 ? ends[place - 1] : 0, count = ends[place] - first;
        if (count > LIGHT) continue;
        for (int sorted = 1; sorted < count; ++sorted) {{
            const int item = listed[first + sorted];
            int to = sorted;
            for (; to > 0 && listed[first + to - 1] > item; --to) listed[first + to] = listed[first + to - 1];
            listed[first + to] = item;
        }}
        {kind} sum = {start};
        for (int p = first; p < first + count; ++p) sum += update(listed[p]);
        y[y_start + place * y_along] = {made};
    }}
    for (int place = warp; place < places; place += THREADS / 32) {{
        if (ends[place] - (place > 0 ? ends[place - 1] : 0) <= LIGHT) continue;
        {kind} sum = {start};
        for (int j = lane; j - lane < items; j += 32) {{
            const bool match = j < items && places_of[j] == place;
            const {kind} own_update = match ? update(j) : ({kind})0;
            unsigned int matches = __ballot_sync(0xffffffffu, match);
            for (; matches != 0; matches &= matches - 1)
                sum += __shfl_sync(0xffffffffu, own_update, __ffs(matches) - 1);
        }}
        if (lane == 0) y[y_start + place * y_along] = {made};
    }}"""


def has_one_per_line(indices: Operand, base: Operand, y: Operand, axis: int) -> bool:
    """Is there one index for every line of float32, and may four results be read and stored together?"""
    packed = y.is_dense and y.byte_offset % 16 == 0 and y.shape[-1:] and y.shape[-1] % _WIDTH == 0
    if not packed or y.dtype != FLOAT or axis != len(y.shape) - 1 or indices.shape != (*y.shape[:-1], 1):
        return False
    aligned = base.byte_offset % 16 == 0 and all(stride % _WIDTH == 0 for stride in base.strides[:-1])
    return base.strides[-1] == 0 or (base.strides[-1] == 1 and aligned)


def one_per_line_launch(step: Step, updates: Operand, indices: Operand, base: Operand, y: Operand) -> Launch:
    """One launch for all lines."""
    source = KernelSource([updates, indices, base, y], y.size)
    for name, operand in (("updates", updates), ("indices", indices), ("base", base)):
        source.pointer(name, operand)
    source.pointer("y", y, written=True)
    check = checked(source, step, y.shape[-1])
    total, groups = source.index("total", y.size // _WIDTH), source.extent("groups", y.shape[-1] // _WIDTH)
    lines = collapsed_axes(y.shape[:-1], [operand.strides[:-1] for operand in (indices, updates, base)])
    start = source.unraveled("line", lines, ["index_at", "update_at", "base_at"], "line")
    group = (
        "{{base[base_at], base[base_at], base[base_at], base[base_at]}}"
        if base.strides[-1] == 0
        else f"*reinterpret_cast<const Pack<float, {_WIDTH}>*>(base + base_at + column)"
    )
    body = f"""    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    if (k >= {total}) return;
    const Index line = {source.divided("k", groups)}, column = (k - line * {groups}) * {_WIDTH};
    {start}
    const long long index = (long long)indices[index_at];
    if (column == 0) valid(index, {check});
    Pack<float, {_WIDTH}> group = {group};
    #pragma unroll
    for (int i = 0; i < {_WIDTH}; ++i)
        if (column + i == index) group.at[i] {"+=" if step.op.name == "scatter_add" else "="} updates[update_at];
    *reinterpret_cast<Pack<float, {_WIDTH}>*>(y + k * {_WIDTH}) = group;"""
    return source.launch(step, step.op.name, VALID, body, grid=blocks_for(y.size // _WIDTH), block=BLOCK)
