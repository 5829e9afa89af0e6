"""sort and cumulative_sum: a block or a thread per line along the axis.

Elements are sorted as whole numbers of 64 bits: 32 bits that have the order of the elements, then 32 of their index, so
that no two are equal and every network of comparisons gives the same. Lines that fit shared memory are sorted there
(bitonic sort); where only the first few are asked for, longer lines pass through it tile by tile; all others are sorted
in global memory, still by one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.types import is_element, is_floating, loaded, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Launch, Row
from mlcompute.devices.loop_nest import Operand, Operands, collapsed_axes
from mlcompute.ops.op import Step

_BLOCK = 256
#: Numbers of 64 bits in shared memory.
_TILE = 2048
#: Lines of fewer elements are added up by one thread each.
_LEAST_SCANNED = 64

_BITONIC = f"""
template <class Keys> __device__ void bitonic_sort(Keys keys, long long count) {{
    for (long long size = 2; size <= count; size *= 2)
        for (long long step = size / 2; step > 0; step /= 2) {{
            __syncthreads();
            for (long long k = threadIdx.x; k < count / 2; k += {_BLOCK}) {{
                const long long low = k / step * 2 * step + k % step, high = low + step;
                const unsigned long long a = keys[low], b = keys[high];
                if ((a > b) == ((low & size) == 0)) {{ keys[low] = b; keys[high] = a; }}
            }}
        }}
    __syncthreads();
}}
"""


def _ordered(dtype: np.dtype[Any], descending: bool) -> str:
    """A function: 32 bits that are ordered as the elements are, without a sign."""
    last = "~bits" if descending else "bits"
    if is_floating(dtype):
        body = """    const unsigned int raw = __float_as_uint(value + 0.0f);
    unsigned int bits = raw ^ ((raw >> 31) ? 0xFFFFFFFFu : 0x80000000u);
    if (value != value) bits = 0xFFFFFFFFu;"""
        kind = "float"
    else:
        kind = "unsigned int" if dtype.kind == "u" and dtype.itemsize == 4 else "int"
        flip = "" if kind == "unsigned int" else " ^ 0x80000000u"
        body = f"    const unsigned int bits = (unsigned int)value{flip};"
    return f"__device__ unsigned int ordered({kind} value) {{\n{body}\n    return {last};\n}}\n"


def _lines(source: KernelSource, operands: Sequence[Operand], axis: int, names: Sequence[str]) -> str:
    """Statements that declare where a line begins in every operand."""
    shape = operands[0].shape
    others = [d for d in range(len(shape)) if d != axis]
    strides = [tuple(operand.strides[d] for d in others) for operand in operands]
    axes = collapsed_axes(tuple(shape[d] for d in others), strides)
    return source.unraveled("line", axes, names, "k")


def sort_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """A block per line."""
    x, (values, indices) = operands[step.inputs[0]], [operands[result] for result in step.results]
    axis, count, descending = (step.attributes[name] for name in ("axis", "count", "descending"))
    if not x.size:
        return []
    extent, padded = x.shape[axis], _padded(step)
    source = KernelSource([x, values, indices], x.size)
    source.pointer("x", x)
    source.pointer("values", values, written=True)
    source.pointer("indices", indices, written=True)
    in_memory = padded > _TILE
    if in_memory:
        planned = operands.workspace(step, 0, sort_workspace(step))
        source.pointer("work", planned, written=True, element="unsigned long long")
    start = _lines(source, [x, values, indices], axis, ["x_start", "value_start", "index_start"])
    n, kept = source.index("n", extent), source.index("kept", count)
    by_x, by_value, by_index = (
        source.index(f"{name}_along", operand.strides[axis])
        for name, operand in (("x", x), ("value", values), ("index", indices))
    )
    element = loaded(x.dtype, f"x[x_start + (Index)k * {by_x}]")
    key = f"(k < {n} ? (unsigned long long)ordered({element}) << 32 | (unsigned int)k : ~0ull)"
    if in_memory:
        sorting = f"""    unsigned long long* keys = work + (long long)line * {padded}ll;
    for (long long k = threadIdx.x; k < {padded}ll; k += {_BLOCK}) keys[k] = {key};
    bitonic_sort(keys, {padded}ll);"""
    else:
        tile, kept_tile = padded, padded // 2
        sorting = f"""    __shared__ unsigned long long keys[{tile}];
    for (long long k = threadIdx.x; k < {tile}; k += {_BLOCK}) keys[k] = {key};
    bitonic_sort(keys, {tile});
    for (long long first = {tile}; first < {n}; first += {tile - kept_tile}) {{
        for (int t = threadIdx.x; t < {tile - kept_tile}; t += {_BLOCK}) {{
            const long long k = first + t;
            keys[{kept_tile} + t] = {key};
        }}
        bitonic_sort(keys, {tile});
    }}"""
    body = f"""    const Index line = blockIdx.x;
    {start}
{sorting}
    for (Index k = threadIdx.x; k < {kept}; k += {_BLOCK}) {{
        const Index index = (Index)(unsigned int)keys[k];
        values[value_start + k * {by_value}] = x[x_start + index * {by_x}];
        indices[index_start + k * {by_index}] = index;
    }}"""
    before = _ordered(x.dtype, descending) + _BITONIC
    grid = (x.size // extent, 1, 1)
    return [source.launch(step, "bitonic sort", before, body, grid=grid, block=_BLOCK)]


def _padded(step: Step) -> int:
    """How many numbers are sorted at a time: a power of two that holds the line, or twice what is kept of it."""
    count, extent = step.attributes["count"], step.inputs[0].shape[step.attributes["axis"]]
    if extent > _TILE >= 2 * count:
        return _TILE
    return int(max(2, 1 << (extent - 1).bit_length()))


def sort_workspace(step: Step) -> int:
    """Bytes for lines that do not fit shared memory."""
    padded, x = _padded(step), step.inputs[0]
    return 8 * padded * (x.size // x.shape[step.attributes["axis"]]) if padded > _TILE else 0


def supports_sort(step: Step) -> bool:
    """Elements of 32 bits at most."""
    dtype = step.inputs[0].dtype
    return is_element(dtype) and dtype.itemsize <= 4


def cumulative_sum_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """A block per line, tile by tile; a thread per line where lines are short or lie side by side."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    axis, exclusive, reverse = (step.attributes[name] for name in ("axis", "exclusive", "reverse"))
    if not x.size:
        return []
    extent, dtype = x.shape[axis], x.dtype
    lines = x.size // extent
    source = KernelSource([x, y], x.size)
    source.pointer("x", x)
    source.pointer("y", y, written=True)
    start = _lines(source, [x, y], axis, ["x_start", "y_start"])
    n, total = source.index("n", extent), source.index("total", lines)
    by_x, by_y = (source.index(f"{name}_along", each.strides[axis]) for name, each in (("x", x), ("y", y)))
    sum_type = "double" if is_floating(dtype) else register_type(dtype)
    place = f"{n} - 1 - k" if reverse else "k"
    element = f"({sum_type}){loaded(dtype, f'x[x_start + at * {by_x}]')}"
    target = f"y[y_start + at * {by_y}]"

    def shown(value: str) -> str:
        return stored(dtype, f"({register_type(dtype)})({value})")

    if extent < _LEAST_SCANNED or lines >= 65536:
        body = f"""    const Index line = (Index)blockIdx.x * {_BLOCK} + threadIdx.x;
    if (line >= {total}) return;
    {start}
    {sum_type} sum = 0;
    for (Index k = 0; k < {n}; ++k) {{
        const Index at = {place};
        const {sum_type} before = sum;
        sum = before + {element};
        {target} = {shown("before" if exclusive else "sum")};
    }}"""
        return [source.launch(step, "cumulative sum", "", body, grid=blocks_for(lines, _BLOCK), block=_BLOCK)]
    body = f"""    const Index line = blockIdx.x;
    {start}
    __shared__ {sum_type} sums[2][{_BLOCK}];
    {sum_type} carried = 0;
    const int t = threadIdx.x;
    for (Index first = 0; first < {n}; first += {_BLOCK}) {{
        const Index k = first + t, at = {place};
        const {sum_type} own = k < {n} ? {element} : ({sum_type})0;
        int side = 0;
        sums[0][t] = own;
        for (int reach = 1; reach < {_BLOCK}; reach *= 2) {{
            __syncthreads();
            sums[1 - side][t] = sums[side][t] + (t >= reach ? sums[side][t - reach] : ({sum_type})0);
            side = 1 - side;
        }}
        __syncthreads();
        const {sum_type} before = carried + (t > 0 ? sums[side][t - 1] : ({sum_type})0);
        if (k < {n}) {target} = {shown("before" if exclusive else "carried + sums[side][t]")};
        carried += sums[side][{_BLOCK - 1}];
        __syncthreads();
    }}"""
    return [source.launch(step, "cumulative sum", "", body, grid=(lines, 1, 1), block=_BLOCK)]


def supports_sum(step: Step) -> bool:
    """Numbers."""
    dtype = step.inputs[0].dtype
    return is_element(dtype) and dtype.kind != "b"


KERNELS: dict[str, Row] = {
    "sort": Row(sort_launches, supports=supports_sort, workspace=sort_workspace),
    "cumulative_sum": Row(cumulative_sum_launches, supports=supports_sum),
}
