"""Gradients of convolutions' weights by tensor cores, for images that lie channels-last and small problems.

    dw[o, c, u, v] = sum over pixels of dy[n, i, j, o] x[n, i strides + u dilations - padding, ..., c]

cuDNN's engines are made for problems that fill a GPU many times over; in the networks people train on small images most
of their time is lost. Here a block has the rows of a few images, which it brings into shared memory once for all places
of the kernel; each of its warps has one of these places, and of small kernels some of the rows. Their sums are added in
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.tensor_cores import tensor_core_text
from mlcompute.devices.cuda.codegen.types import FLOAT, is_factor, memory_type
from mlcompute.devices.cuda.kernels.column_sums import column_sums
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.op import Step

#: Channels, and multiplications and additions of elements of so many bytes, from which cuDNN is faster.
_MOST_CHANNELS, _MOST_FLOPS = 128, {4: 4e9, 2: 1e9}
#: Warps of a block, of which each has one place of the kernel.
_LEAST_WARPS, _MOST_WARPS = 4, 16
#: Threads that a multiprocessor should have.
_THREADS = 1024
#: Bytes of shared memory that a kernel has without asking, less a little.
_MOST_SHARED = 47 << 10
_MOST_LINES = 8
#: Blocks that should be at work.
_BLOCKS = 264
#: Rows of tiles begin this many floats further than they are long: then lanes read from different banks.
_PADDING = 8


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    outputs, channels   of a block
    rows                of the kernel, of a block
    lines               of the gradient dy, which a block loads at a time
    columns             of a line, with zeros at its end: a multiple of 8
    image               (rows, columns) of the image that they need
    sharing             warps that share the lines for one place of the kernel
    """

    outputs: int
    channels: int
    rows: int
    lines: int
    columns: int
    image: tuple[int, int]
    sharing: int

    @property
    def shared_bytes(self) -> int:
        height, width = self.image
        dy = self.lines * self.columns * (self.outputs + _PADDING)
        return 4 * (dy + height * width * (self.channels + _PADDING))


def gradient_tiling(step: Step) -> Tiling | None:
    """How a weight gradient is cut; None where the kernel here is not for it."""
    a = step.attributes
    values = (*step.inputs, *step.results)
    if step.op.name != "convolution_weight_gradient" or not a.get("channels_last") or a["groups"] != 1:
        return None
    x, y, result = values
    if x.dtype != y.dtype or not is_factor(x.dtype) or result.dtype != FLOAT or not all(v.size for v in values):
        return None
    outputs, channels, height, width = a["shape"]
    _, down, across, _ = step.inputs[1].shape
    if outputs % 8 or channels % 8 or max(outputs, channels) > _MOST_CHANNELS or width > _MOST_WARPS:
        return None
    if 2.0 * y.size * channels * height * width > _MOST_FLOPS[y.dtype.itemsize]:
        return None
    groups = -(-height // (_MOST_WARPS // width))
    rows, columns = -(-height // groups), -(-across // 8) * 8
    sharing = max(1, min(2 * _LEAST_WARPS // (rows * width), down))
    (sy, sx), (dy, dx) = a["strides"], a["dilations"]
    for lines in range(min(_MOST_LINES, down), 0, -1):
        image = ((lines - 1) * sy + (rows - 1) * dy + 1, (columns - 1) * sx + (width - 1) * dx + 1)
        sizes = (32 if outputs > 16 else 16, 32 if channels > 16 else 16)
        found = Tiling(*sizes, rows, -(-down // -(-down // lines)), columns, image, sharing)
        if found.shared_bytes <= _MOST_SHARED:
            return found
    return None


def gradient_workspace(step: Step, tiling: Tiling) -> int:
    """Bytes for the sums of blocks."""
    return _slices(step, tiling) * tiling.sharing * step.results[0].nbytes


def _tiles(step: Step, tiling: Tiling) -> int:
    """Parts of the gradient dy that a block loads at a time."""
    n, down, _, _ = step.inputs[1].shape
    return n * -(-down // tiling.lines)


def _chunks(step: Step, tiling: Tiling) -> tuple[int, int, int]:
    """Blocks that have the same pixels, but other outputs, channels or rows of the kernel."""
    outputs, channels, height, _ = step.attributes["shape"]
    return -(-outputs // tiling.outputs), -(-channels // tiling.channels), -(-height // tiling.rows)


def _slices(step: Step, tiling: Tiling) -> int:
    """Blocks that have other pixels."""
    return max(1, min(_tiles(step, tiling), _BLOCKS // math.prod(_chunks(step, tiling))))


def gradient_launches(step: Step, operands: Operands, tiling: Tiling) -> Sequence[Launch]:
    """The gradient of a convolution's weights; all operands are dense and 16-byte aligned."""
    x, y = (operands[value] for value in step.inputs)
    result, slices = operands[step.results[0]], _slices(step, tiling)
    _, _, height, width = result.shape
    shape = (slices * tiling.sharing, result.size)
    planned = operands.workspace(step, 0, shape[0] * result.size * 4)
    parts = Operand(planned.base, planned.offset // 4, shape, (result.size, 1), FLOAT)
    by_output, by_channel, by_row = _chunks(step, tiling)
    arguments: list[Argument] = [x, y, parts, np.int32(_tiles(step, tiling))]
    threads = 32 * tiling.rows * width * tiling.sharing
    grid = (slices, by_output * by_channel, by_row)
    launch = Launch(step, "tensor core convolution", _source(step, tiling), arguments, [2], grid, (threads, 1, 1))
    return [launch, column_sums(step, parts, result, groups=height * width)]


def _source(step: Step, t: Tiling) -> str:
    a = step.attributes
    (_, image_height, image_width, channels), (_, down, across, outputs) = (value.shape for value in step.inputs)
    _, _, height, width = a["shape"]
    (sy, sx), (dy, dx), (top, _, left, _) = a["strides"], a["dilations"], a["padding"]
    threads, element = 32 * t.rows * width * t.sharing, memory_type(step.inputs[0].dtype)
    return f"""{tensor_core_text(exact=not matmul_precision.allows_tf32)}
const int C = {channels}, H = {image_height}, W = {image_width}, O = {outputs}, OH = {down}, OW = {across};
const int KH = {height}, KW = {width}, SY = {sy}, SX = {sx}, DY = {dy}, DX = {dx}, TOP = {top}, LEFT = {left};
const int OUTPUTS = {t.outputs}, CHANNELS = {t.channels}, ROWS = {t.rows}, LINES = {t.lines}, COLUMNS = {t.columns};
const int HEIGHT = {t.image[0]}, WIDTH = {t.image[1]}, YP = OUTPUTS + {_PADDING}, XP = CHANNELS + {_PADDING};
const int SHARING = {t.sharing}, THREADS = {threads};
const int LINE_TILES = (OH + LINES - 1) / LINES, OUTPUT_CHUNKS = (O + OUTPUTS - 1) / OUTPUTS;

__device__ __forceinline__ void store(float* tile, const float4& x) {{
    *(float4*)tile = make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
}}

extern "C" __global__ void __launch_bounds__(THREADS, {max(1, _THREADS // threads)}) KERNEL(
    const {element}* x, const {element}* y, float* parts, int tiles) {{
    __align__(16) __shared__ float ys[LINES * COLUMNS * YP], xs[HEIGHT * WIDTH * XP];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first_o = blockIdx.y % OUTPUT_CHUNKS * OUTPUTS, first_c = blockIdx.y / OUTPUT_CHUNKS * CHANNELS;
    const int first_u = blockIdx.z * ROWS, u = warp / KW % ROWS, v = warp % KW, share = warp / (KW * ROWS);
    const bool works = first_u + u < KH;
    float sum[OUTPUTS / 16][CHANNELS / 8][4] = {{}};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {{
        const int n = tile / LINE_TILES, line = tile % LINE_TILES * LINES;
        #pragma unroll 4
        for (int at = threadIdx.x; at < LINES * COLUMNS * (OUTPUTS / 4); at += THREADS) {{
            const int o = at % (OUTPUTS / 4) * 4, pixel = at / (OUTPUTS / 4);
            const int j = pixel % COLUMNS, i = line + pixel / COLUMNS;
            const long long from = (((long long)n * OH + i) * OW + j) * O + first_o + o;
            store(ys + pixel * YP + o, four_inside(y, from, i < OH && j < OW && first_o + o < O));
        }}
        #pragma unroll 4
        for (int at = threadIdx.x; at < HEIGHT * WIDTH * (CHANNELS / 4); at += THREADS) {{
            const int c = at % (CHANNELS / 4) * 4, pixel = at / (CHANNELS / 4);
            const int s = pixel % WIDTH - LEFT, r = line * SY + first_u * DY - TOP + pixel / WIDTH;
            const long long from = (((long long)n * H + r) * W + s) * C + first_c + c;
            store(xs + pixel * XP + c, four_inside(x, from, r >= 0 && r < H && s >= 0 && s < W && first_c + c < C));
        }}
        __syncthreads();
        if (works)
            for (int l = share; l < LINES; l += SHARING)
                #pragma unroll 2
                for (int k = 0; k < COLUMNS; k += 8) {{  // 8 pixels
                    const float* p = ys + (l * COLUMNS + k + t) * YP + g;
                    const float* q = xs + ((l * SY + u * DY) * WIDTH + (k + t) * SX + v * DX) * XP + g;
                    float right[CHANNELS / 8][2];
                    #pragma unroll
                    for (int c = 0; c < CHANNELS / 8; ++c) {{
                        right[c][0] = q[8 * c];
                        right[c][1] = q[4 * SX * XP + 8 * c];
                    }}
                    #pragma unroll
                    for (int o = 0; o < OUTPUTS / 16; ++o) {{
                        float some[4] = {{p[16 * o], p[16 * o + 8], p[4 * YP + 16 * o], p[4 * YP + 16 * o + 8]}};
                        Left left(some);
                        #pragma unroll
                        for (int c = 0; c < CHANNELS / 8; ++c) accumulate(sum[o][c], left, right[c]);
                    }}
                }}
        __syncthreads();
    }}
    if (!works) return;
    const int place = (first_u + u) * KW + v;
    float* part = parts + (((long long)blockIdx.x * SHARING + share) * (KH * KW) + place) * (O * C);
    #pragma unroll
    for (int o = 0; o < OUTPUTS / 16; ++o)
        #pragma unroll
        for (int c = 0; c < CHANNELS / 8; ++c)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {{
                const int own_o = first_o + 16 * o + g + 8 * (e / 2), own_c = first_c + 8 * c + 2 * t + e % 2;
                if (own_o < O && own_c < C) part[own_o * C + own_c] = sum[o][c][e];
            }}
}}
"""
