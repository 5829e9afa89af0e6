"""A matrix copied in the other order: tiles go through shared memory, so that lines are read and written whole."""

from __future__ import annotations

import numpy as np

from mlcompute.devices.cuda.codegen.types import memory_type
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step

#: A block copies tiles of so many rows and columns; with fewer, its threads would be idle.
TILE, _THREADS = 32, 256


def is_transposed(source: Operand, target: Operand) -> bool:
    """Do neighbours along the first of two axes lie side by side in one, and those along the second in the other?"""
    return (
        len(source.shape) == 2
        and min(source.shape) >= TILE
        and source.dtype == target.dtype
        and source.strides[0] == 1
        and target.strides[1] == 1
    )


def transposed_copy(step: Step, source: Operand, target: Operand) -> Launch:
    """target (rows, columns) = source, for operands that `is_transposed` says yes to."""
    rows, columns = source.shape
    text = f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) KERNEL(
    const {memory_type(source.dtype)}* __restrict__ x, {memory_type(source.dtype)}* __restrict__ y,
    long long rows, long long columns, long long x_column, long long y_row, long long tiles) {{
    constexpr int TILE = {TILE}, STEP = {_THREADS // TILE};
    __shared__ {memory_type(source.dtype)} tile[TILE][TILE + 1];
    const long long first_row = blockIdx.x / tiles * TILE, first_column = blockIdx.x % tiles * TILE;
    const int at = threadIdx.x % TILE, line = threadIdx.x / TILE;
    #pragma unroll
    for (int i = 0; i < TILE; i += STEP) {{
        const long long row = first_row + at, column = first_column + line + i;
        if (row < rows && column < columns) tile[line + i][at] = x[row + column * x_column];
    }}
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < TILE; i += STEP) {{
        const long long row = first_row + line + i, column = first_column + at;
        if (row < rows && column < columns) y[row * y_row + column] = tile[at][line + i];
    }}
}}
"""
    tiles = -(-columns // TILE)
    numbers = (rows, columns, source.strides[1], target.strides[0], tiles)
    arguments: list[Argument] = [source, target, *map(np.int64, numbers)]
    return Launch(step, "transposed copy", text, arguments, [1], (-(-rows // TILE) * tiles, 1, 1), (_THREADS, 1, 1))
