"""Sums of columns in a fixed order: what kernels whose blocks each have a part of a sum end with."""

from __future__ import annotations

import numpy as np

from mlcompute.devices.cuda.codegen.types import memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step

#: A block has so many columns side by side, and rows one behind the other.
_COLUMNS, _ROWS = 32, 16


def column_sums(step: Step, rows: Operand, sums: Operand, groups: int = 1) -> Launch:
    """sums[j] = the sum of rows[i, j] over i; both are dense.

    groups   columns lie as (groups, others), and their sums as (others, groups)
    """
    total = register_type(rows.dtype)
    source = f"""
extern "C" __global__ void __launch_bounds__({_COLUMNS * _ROWS}) KERNEL(
    const {memory_type(rows.dtype)}* x, {memory_type(sums.dtype)}* y, int rows, long long columns, int groups) {{
    __shared__ {total} sums[{_ROWS}][{_COLUMNS}];
    long long column = (long long)blockIdx.x * {_COLUMNS} + threadIdx.x;
    {total} sum = 0;
    if (column < columns) {{
        #pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += {_ROWS}) sum = ({total})(sum + x[row * columns + column]);
    }}
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {{
        for (int k = 1; k < {_ROWS}; ++k) sum = ({total})(sum + sums[k][threadIdx.x]);
        const long long others = columns / groups;
        y[column % others * groups + column / others] = {stored(sums.dtype, "sum")};
    }}
}}
"""
    count, columns = rows.shape
    assert sums.size == columns
    arguments: list[Argument] = [rows, sums, np.int32(count), np.int64(columns), np.int32(groups)]
    grid = (-(-columns // _COLUMNS), 1, 1)
    return Launch(step, "column sums", source, arguments, [1], grid, (_COLUMNS, _ROWS, 1))
