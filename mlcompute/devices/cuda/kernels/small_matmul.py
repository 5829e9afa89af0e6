"""Small float32 products by tensor cores, without cuBLASLt: they are plain launches, so several become one.

A product of small matrices takes the time in which its factors come from memory. A block makes a tile of the result,
and its warps take turns at the terms of the sums, 16 at a time, straight from memory into registers; their sums are
added in order. Lane 4 g + t reads the terms 4 t to 4 t + 3 of its rows: a sum may take its terms in any order, as long
as both factors do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.types import FLOAT
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.op import Step, Value

#: Multiplications and additions from which cuBLASLt is faster.
MOST_FLOPS = 1 << 25
#: Blocks that should be at work.
_BLOCKS = 96


@dataclass(frozen=True)
class Tiling:
    """How a result is cut.

    rows, columns   of a tile: multiples of 16 and 8
    warps           that share the sums of a tile
    """

    rows: int
    columns: int
    warps: int

    def blocks(self, m: int, n: int) -> int:
        return -(-m // self.rows) * -(-n // self.columns)


#: Large tiles read the factors less often, small ones are more.
_TILES = ((32, 32, 4), (32, 16, 8), (16, 16, 8), (16, 8, 16))


def tiling_of(m: int, n: int, k: int) -> Tiling:
    """The largest tiles of which there are enough to fill a GPU."""
    rows, columns, most = next((tile for tile in _TILES if Tiling(*tile).blocks(m, n) >= _BLOCKS), _TILES[-1])
    # Two powers of two, so that kernels are shared.
    return Tiling(rows, columns, most if k > 16 * most // 2 else max(2, most // 4))


def is_small(a: Operand | Value, b: Operand | Value, y: Operand | Value) -> bool:
    """Is a product for the kernel here?"""
    if not matmul_precision.allows_tf32 or any(each.dtype != FLOAT for each in (a, b, y)):
        return False
    if any(math.prod(each.shape[:-2]) != 1 for each in (a, b, y)) or min(y.size, a.size) == 0:
        return False
    return 2 * y.size * a.shape[-1] <= MOST_FLOPS


def small_matmul(
    step: Step, a: Operand, b: Operand, y: Operand, bias: Operand | None = None, *, relu: bool = False,
    passes: Operand | None = None,
) -> Launch:  # fmt: skip
    """y = a b, or a b + bias with a number of `bias` per column; relu of that, or 0 where `passes` is not positive.

    passes   as large as y, and like it in memory
    """
    m, n, k = y.shape[-2], y.shape[-1], a.shape[-1]
    tiling = tiling_of(m, n, k)
    steps = [(each.strides[-2], each.strides[-1]) for each in (a, b, y)]
    (a_row, a_term), (b_term, b_column), (y_row, y_column) = steps
    extents = [m, n, k, -(-n // tiling.columns), _is_packed(a, a_row, a_term, k), _is_packed(b, b_column, b_term, k)]
    strides = [a_row, a_term, b_column, b_term, y_row, y_column, -1 if bias is None else bias.strides[-1]]
    assert passes is None or passes.strides[-2:] == y.strides[-2:]
    arguments: list[Argument] = [a, b, y, y if bias is None else bias, y if passes is None else passes]
    ending = 1 if relu else 2 if passes is not None else 0
    arguments += [*map(np.int32, [*extents, ending]), *map(np.int64, strides)]
    more = [name for name, has in (("bias", bias), ("ReLU", relu), ("ReLU gradient", passes)) if has]
    name = f"small matmul with {' and '.join(more)}" if more else "small matmul"
    grid = (tiling.blocks(m, n), 1, 1)
    return Launch(step, name, _source(tiling), arguments, [2], grid, (32 * tiling.warps, 1, 1))


def _is_packed(factor: Operand, line: int, term: int, k: int) -> bool:
    """Can four terms of a sum be read at once?"""
    return term == 1 and k % 4 == line % 4 == factor.offset % 4 == 0


def _source(t: Tiling) -> str:
    down, across, threads = t.rows // 8, t.columns // 8, 32 * t.warps
    return f"""
// Four terms of a sum from the one given; zeros behind the last.
__device__ __forceinline__ void load_terms(
    float* x, const float* line, int first, int k, long long apart, bool packed) {{
    if (packed) {{
        const float4 some = first < k ? *(const float4*)(line + first) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        x[0] = some.x, x[1] = some.y, x[2] = some.z, x[3] = some.w;
        return;
    }}
    #pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = first + i < k ? line[(first + i) * apart] : 0.0f;
}}

extern "C" __global__ void __launch_bounds__({threads}) KERNEL(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y, const float* __restrict__ bias,
    const float* __restrict__ passes, int m, int n, int k, int tiles, int a_packed, int b_packed, int ending,
    long long a_row, long long a_term, long long b_column, long long b_term, long long y_row, long long y_column,
    long long bias_apart) {{
    __shared__ float sums[{t.warps * t.rows * t.columns}];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = blockIdx.x / tiles * {t.rows}, column = blockIdx.x % tiles * {t.columns};
    // Beyond the last row or column the last is read again: what comes of it is not stored.
    const float *p[{down}], *q[{across}];
    #pragma unroll
    for (int i = 0; i < {down}; ++i) p[i] = a + min(row + 8 * i + g, m - 1) * a_row;
    #pragma unroll
    for (int j = 0; j < {across}; ++j) q[j] = b + min(column + 8 * j + g, n - 1) * b_column;
    float sum[{down // 2}][{across}][4] = {{}};
    #pragma unroll 2
    for (int first = 16 * warp + 4 * t; first < k + 4 * t; first += {16 * t.warps}) {{
        float left[{down}][4], right[{across}][4];
        #pragma unroll
        for (int i = 0; i < {down}; ++i) load_terms(left[i], p[i], first, k, a_term, a_packed);
        #pragma unroll
        for (int j = 0; j < {across}; ++j) load_terms(right[j], q[j], first, k, b_term, b_packed);
        #pragma unroll
        for (int half = 0; half < 4; half += 2)
            #pragma unroll
            for (int i = 0; i < {down // 2}; ++i) {{
                const float u[4] = {{
                    tf32(left[2 * i][half]), tf32(left[2 * i + 1][half]),
                    tf32(left[2 * i][half + 1]), tf32(left[2 * i + 1][half + 1])}};
                #pragma unroll
                for (int j = 0; j < {across}; ++j) {{
                    const float v[2] = {{tf32(right[j][half]), tf32(right[j][half + 1])}};
                    mma(sum[i][j], u, v);
                }}
            }}
    }}
    #pragma unroll
    for (int i = 0; i < {down // 2}; ++i)
        #pragma unroll
        for (int j = 0; j < {across}; ++j)
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                sums[(warp * {t.rows} + 16 * i + 8 * (e / 2) + g) * {t.columns} + 8 * j + 2 * t + e % 2] = sum[i][j][e];
    __syncthreads();
    for (int at = threadIdx.x; at < {t.rows * t.columns}; at += {threads}) {{
        const int r = row + at / {t.columns}, c = column + at % {t.columns};
        float total = sums[at];
        #pragma unroll
        for (int w = 1; w < {t.warps}; ++w) total += sums[w * {t.rows * t.columns} + at];
        if (r >= m || c >= n) continue;
        const long long place = r * y_row + c * y_column;
        if (bias_apart >= 0) total += bias[c * bias_apart];
        if (ending == 1) total = maximum<float>(total, 0.0f);
        if (ending == 2 && passes[place] <= 0.0f) total = 0.0f;
        y[place] = total;
    }}
}}
"""
