"""Products with few results and long sums, as the gradients of weights are: their sums are split.

One product has too few tiles for all multiprocessors. So parts of the sums are computed as a batch of products and then
added, always in the same order.
"""

from __future__ import annotations

import math

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.types import FLOAT
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step

#: Results are computed in tiles of so many rows and columns; sums are not split into shorter ones than this.
_TILE, _SHORTEST = 128, 512
_MOST_PARTS = 8
#: Products of fewer multiplications and additions are not worth a second launch.
SMALL_PRODUCT = 1 << 26
#: Results that are stored together.
_PACK = 4


def part_count(step: Step) -> int:
    """Into how many parts the sums of a matmul are split; 1 when they are not."""
    gpu, y, depth = current_gpu(), step.results[0], step.inputs[0].shape[-1]
    if (
        gpu is None
        or {y.dtype, *(value.dtype for value in step.inputs)} != {FLOAT}
        or math.prod(y.shape[:-2]) != 1
        or y.shape[-1] % _PACK
    ):
        return 1
    if 2 * y.size * depth < SMALL_PRODUCT:
        return 1
    tiles = -(-y.shape[-2] // _TILE) * -(-y.shape[-1] // _TILE)
    count = 1
    while (
        2 * tiles * count <= 1.25 * gpu.multiprocessors
        and count < _MOST_PARTS
        and depth % (2 * count) == 0
        and depth // (2 * count) >= _SHORTEST
    ):
        count *= 2
    return count


def split_factors(a: Operand, b: Operand, parts: Operand) -> tuple[Operand, Operand]:
    """a (m, k) and b (k, n) as factors of a batch of products, one for every part of the sums."""
    count, depth = parts.shape[0], a.shape[-1] // parts.shape[0]
    by_a, by_b = a.strides[-2:], b.strides[-2:]
    return (
        Operand(a.base, a.offset, (count, a.shape[-2], depth), (depth * by_a[1], *by_a), a.dtype),
        Operand(b.base, b.offset, (count, depth, b.shape[-1]), (depth * by_b[0], *by_b), b.dtype),
    )


def parts_in(workspace: Operand, count: int, y: Operand) -> Operand:
    """The array (count, m, n) of sums of parts."""
    m, n = y.shape[-2:]
    return Operand(workspace.base, workspace.offset // 4, (count, m, n), (m * n, n, 1), FLOAT)


def sum_launch(step: Step, parts: Operand, y: Operand) -> Launch:
    """y = sum of parts over the first axis; y is dense."""
    count = y.size // _PACK
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(const float4* parts, float4* y, long long count) {{
    long long at = (long long)blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= count) return;
    float4 part[{parts.shape[0]}];
    #pragma unroll
    for (int i = 0; i < {parts.shape[0]}; ++i) part[i] = parts[i * count + at];
    float4 sum = part[0];
    #pragma unroll
    for (int i = 1; i < {parts.shape[0]}; ++i)
        sum = make_float4(sum.x + part[i].x, sum.y + part[i].y, sum.z + part[i].z, sum.w + part[i].w);
    y[at] = sum;
}}
"""
    return Launch(step, "sum of parts", source, [parts, y, np.int64(count)], [1], blocks_for(count), (BLOCK, 1, 1))
