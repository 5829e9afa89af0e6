"""Depthwise convolutions: little arithmetic per byte, so memory decides.

Forward, and for the gradient of the input, a thread computes a few neighbouring pixels of one channel: weights, indices
and most of what it reads serve all of them. For the gradient of the weights a thread sums all places of the kernel over
some of the pixels; blocks have slices of the pixels, whose sums are added in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.types import loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.column_sums import column_sums
from mlcompute.devices.cuda.kernels.direct_convolution import NAMES, Problem, kernel_text, numbers
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: Neighbouring pixels per thread.
_STRIP = 4
#: Weight gradients: a block has this many channels side by side and pixels one behind the other.
_CHANNELS, _PIXELS = 32, 8
#: Blocks that should be at work, and pixels below which a slice is not worth one.
_BLOCKS, _LEAST_PIXELS = 528, 64
#: Places of a kernel whose sums or weights a thread has registers for.
_MOST_PLACES = 49


def is_depthwise(step: Step) -> bool:
    """Does every group have one input channel, and a kernel of reasonable size?"""
    w = step.attributes["shape"] if step.op.name == "convolution_weight_gradient" else step.inputs[1].shape
    return bool(step.attributes["groups"] > 1 and w[1] == 1 and w[2] * w[3] <= _MOST_PLACES)


def depthwise_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """A depthwise convolution or one of its gradients."""
    p = Problem.of(step, operands)
    if step.op.name == "convolution_weight_gradient":
        return _weight_gradient(step, p, operands)
    is_forward = step.op.name == "convolution"
    source = _forward_source(p) if is_forward else _input_source(p)
    n, channels, height, width = (p.y if is_forward else p.x).shape
    threads = n * channels * height * -(-width // _STRIP)
    arguments = [p.x, p.w, p.y, *numbers(p)]
    written = 2 if is_forward else 0
    return [Launch(step, "depthwise convolution", source, arguments, [written], blocks_for(threads), (BLOCK, 1, 1))]


def depthwise_workspace(step: Step) -> int:
    """Bytes for the sums of slices."""
    return _slices(step) * step.results[0].size * 8 if step.op.name == "convolution_weight_gradient" else 0


def _slices(step: Step) -> int:
    """Parts of the pixels of a weight gradient."""
    shape = step.inputs[1].shape
    channels = shape[3] if step.attributes.get("channels_last") else shape[1]
    pixels = math.prod(shape) // channels
    others = -(-channels // _CHANNELS)
    return max(1, min(-(-_BLOCKS // others), -(-pixels // _LEAST_PIXELS)))


def _place(p: Problem, row: str, channel: str, extents: tuple[str, str, str]) -> str:
    """The thread's strip: `n`, a channel, a row, and `from`, its first column."""
    channels, rows, columns = extents
    strips = f"(({columns} + {_STRIP - 1}) / {_STRIP})"
    axes = [(channel, channels), ("strip", strips), (row, rows)]
    if not p.channels_last:
        axes = [axes[1], axes[2], axes[0]]
    lines = [
        f"    Index at = (Index)blockIdx.x * {BLOCK} + threadIdx.x;",
        f"    if (at >= N * {channels} * {rows} * {strips}) return;",
        *(f"    Index {name} = at % {extent}; at /= {extent};" for name, extent in axes),
        f"    Index n = at, from = strip * {_STRIP};",
    ]
    return "\n".join(lines)


def _forward_source(p: Problem) -> str:
    dtype, total = p.x.dtype, register_type(p.x.dtype)
    body = f"""{_place(p, "i", "o", ("O", "OH", "OW"))}
    {total} sum[{_STRIP}] = {{}};
    #pragma unroll
    for (int u = 0; u < KH; ++u) {{
        Index r = i * SY + u * DY - top;
        if (r < 0 || r >= H) continue;
        Index row = n * x0 + o / (O / groups) * x1 + r * x2;
        #pragma unroll
        for (int v = 0; v < KW; ++v) {{
            {total} weight = {loaded(dtype, "w[o * w0 + u * w2 + v * w3]")};
            #pragma unroll
            for (int k = 0; k < {_STRIP}; ++k) {{
                Index s = (from + k) * SX + v * DX - left;
                if (s >= 0 && s < W) sum[k] = ({total})(sum[k] + {loaded(dtype, "x[row + s * x3]")} * weight);
            }}
        }}
    }}
    #pragma unroll
    for (int k = 0; k < {_STRIP}; ++k)
        if (from + k < OW) y[n * y0 + o * y1 + i * y2 + (from + k) * y3] = {stored(dtype, "sum[k]")};
"""
    return kernel_text(p, "y", body)


def _input_source(p: Problem) -> str:
    dtype, total = p.x.dtype, register_type(p.x.dtype)
    body = f"""{_place(p, "r", "c", ("C", "H", "W"))}
    Index count = O / groups;
    {total} sum[{_STRIP}] = {{}};
    for (Index o = c * count; o < (c + 1) * count; ++o)
        #pragma unroll
        for (int u = 0; u < KH; ++u) {{
            Index a = r + top - u * DY, i = a / SY;
            if (a < 0 || i * SY != a || i >= OH) continue;
            Index row = n * y0 + o * y1 + i * y2;
            #pragma unroll
            for (int v = 0; v < KW; ++v) {{
                {total} weight = {loaded(dtype, "w[o * w0 + u * w2 + v * w3]")};
                #pragma unroll
                for (int k = 0; k < {_STRIP}; ++k) {{
                    Index b = from + k + left - v * DX, j = b / SX;
                    if (b >= 0 && j * SX == b && j < OW)
                        sum[k] = ({total})(sum[k] + {loaded(dtype, "y[row + j * y3]")} * weight);
                }}
            }}
        }}
    #pragma unroll
    for (int k = 0; k < {_STRIP}; ++k)
        if (from + k < W) x[n * x0 + c * x1 + r * x2 + (from + k) * x3] = {stored(dtype, "sum[k]")};
"""
    return kernel_text(p, "x", body)


def _weight_gradient(step: Step, p: Problem, operands: Operands) -> Sequence[Launch]:
    dtype, total, slices = p.x.dtype, register_type(p.x.dtype), _slices(step)
    wide = np.dtype(np.float32) if total == "float" else dtype
    planned = operands.workspace(step, 0, slices * p.w.size * wide.itemsize)
    parts = Operand(planned.base, planned.offset // wide.itemsize, (slices, p.w.size), (p.w.size, 1), wide)
    index = "long long" if p.is_wide else "int"
    body = f"""
    __shared__ {total} shared[{_PIXELS}][{_CHANNELS}];
    Index slice = blockIdx.x % slices, o = (Index)blockIdx.x / slices * {_CHANNELS} + threadIdx.x;
    Index pixels = N * OH * OW, length = (pixels + slices - 1) / slices;
    Index end = min((slice + 1) * length, pixels), channel = o / (O / groups) * x1;
    {total} sum[KH * KW] = {{}};
    if (o < O)
        for (Index pixel = slice * length + threadIdx.y; pixel < end; pixel += {_PIXELS}) {{
            Index j = pixel % OW, i = pixel / OW % OH, n = pixel / (OW * OH);
            {total} d = {loaded(dtype, "y[n * y0 + o * y1 + i * y2 + j * y3]")};
            #pragma unroll
            for (int u = 0; u < KH; ++u) {{
                Index r = i * SY + u * DY - top;
                if (r < 0 || r >= H) continue;
                Index row = n * x0 + channel + r * x2;
                #pragma unroll
                for (int v = 0; v < KW; ++v) {{
                    Index s = j * SX + v * DX - left;
                    if (s >= 0 && s < W)
                        sum[u * KW + v] = ({total})(sum[u * KW + v] + {loaded(dtype, "x[row + s * x3]")} * d);
                }}
            }}
        }}
    #pragma unroll
    for (int place = 0; place < KH * KW; ++place) {{
        shared[threadIdx.y][threadIdx.x] = sum[place];
        __syncthreads();
        if (threadIdx.y == 0 && o < O) {{
            {total} all = shared[0][threadIdx.x];
            for (int k = 1; k < {_PIXELS}; ++k) all = ({total})(all + shared[k][threadIdx.x]);
            parts[(slice * O + o) * (KH * KW) + place] = all;
        }}
        __syncthreads();
    }}
"""
    memory = memory_type(dtype)
    names = ", ".join(f"{index} {name}" for name in NAMES)
    parameters = f"const {memory}* x, const {memory}* y, {names}, {memory_type(wide)}* parts, {index} slices"
    arguments: list[Argument] = [p.x, p.y, *numbers(p), parts, np.int64(slices) if p.is_wide else np.int32(slices)]
    grid = (-(-p.y.shape[1] // _CHANNELS) * slices, 1, 1)
    source = kernel_text(p, "", body, _CHANNELS * _PIXELS, parameters)
    block = (_CHANNELS, _PIXELS, 1)
    launch = Launch(step, "depthwise convolution", source, arguments, [len(arguments) - 2], grid, block)
    assert p.w.is_dense
    return [launch, column_sums(step, parts, p.w)]
