"""scatter and scatter_add with one index per line along the last axis, as the gradient of picking a class has.

A thread stores four neighbouring results; at most one of them is what the index names.
"""

from __future__ import annotations

from mlcompute.devices.cuda.codegen.checked_indices import VALID, checked
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.types import FLOAT
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.loop_nest import Operand, collapsed_axes
from mlcompute.ops.op import Step

_WIDTH = 4


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
