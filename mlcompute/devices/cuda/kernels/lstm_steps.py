"""LSTMs with many hidden units: per time step a matmul with the recurrent weights, and a kernel for the gates.

Also what both ways need: copies without what lies beyond the sequences' ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.types import memory_type
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Status, Work
from mlcompute.devices.cuda.kernels.matmul import gemm_launches
from mlcompute.devices.cuda.kernels.strided_copy import strided_copy, transposed
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step


@dataclass(frozen=True)
class Lengths:
    """Lengths of the sequences, and what to say when one is out of range."""

    operand: Operand
    status: Status


@dataclass(frozen=True)
class Forward:
    """Memory of the forward recurrence; gates holds x wxᵀ, `recurrent` (n, 4h) is for h whᵀ of one time."""

    gates: Operand
    recurrent: Operand
    bias: Operand
    h0: Operand
    c0: Operand
    y: Operand
    last_h: Operand
    last_c: Operand
    cells: Operand


@dataclass(frozen=True)
class Backward:
    """Memory of back-propagation through time; `dh` (n, h) is for dz wh of one time."""

    dy: Operand
    dh_last: Operand
    dc_last: Operand
    h0: Operand
    c0: Operand
    y: Operand
    gates: Operand
    cells: Operand
    dz: Operand
    before: Operand
    dh: Operand
    dh0: Operand
    dc0: Operand


def forward_launches(
    step: Step, reverse: bool, wh: Operand, m: Forward, lengths: Lengths | None, scratch: Operand | None
) -> Sequence[Work]:
    """Two launches per time."""
    n, times, _ = m.y.shape
    launches: list[Work] = [] if lengths is None else [length_check(step, lengths, times)]
    visited = range(times - 1, -1, -1) if reverse else range(times)
    copies, first = first_state(step, m.h0, m.last_h)
    launches += copies
    for number, t in enumerate(visited):
        h = first if number == 0 else m.last_h
        launches += gemm_launches(step, h, transposed(wh), m.recurrent, scratch)
        arguments: list[Argument] = [
            m.gates, m.recurrent, m.bias, m.h0, m.c0, m.y, m.last_h, m.last_c, m.cells,
            np.int32(n), np.int32(times), np.int32(m.y.shape[2]), np.int32(t),
            np.int32(-1 if number == 0 else visited[number - 1]),
            *(np.int64(stride) for operand in (m.bias, m.h0, m.c0) for stride in operand.strides),
            *length_arguments(lengths),
        ]  # fmt: skip
        grid = blocks_for(m.last_h.size)
        launches.append(
            Launch(step, "lstm gates", _gates_source(lengths), arguments, [0, 5, 6, 7, 8], grid, (BLOCK, 1, 1))
        )
    return launches


def backward_launches(
    step: Step, reverse: bool, wh: Operand, m: Backward, lengths: Lengths | None, scratch: Operand | None
) -> Sequence[Work]:
    """Two launches per time, and a last one for the gradient of the first state."""
    n, times, hidden = m.y.shape
    visited = [*(range(times) if reverse else range(times - 1, -1, -1)), -1]
    launches: list[Work] = []
    for number, t in enumerate(visited):
        later = -1 if number == 0 else visited[number - 1]
        earlier = visited[number + 1] if t >= 0 else -1
        arguments: list[Argument] = [
            m.dy, m.dh_last, m.dc_last, m.h0, m.c0, m.y, m.gates, m.cells, m.dz, m.before, m.dh, m.dh0, m.dc0,
            *(np.int32(number) for number in (n, times, hidden, t, later, earlier)),
            *(np.int64(s) for operand in (m.dy, m.dh_last, m.dc_last, m.h0, m.c0) for s in operand.strides),
            *length_arguments(lengths),
        ]  # fmt: skip
        source, writes = _gates_gradient_source(lengths), [8, 9, 11, 12]
        grid = blocks_for(m.dh0.size)
        launches.append(Launch(step, "lstm gates gradient", source, arguments, writes, grid, (BLOCK, 1, 1)))
        if t >= 0:
            launches += gemm_launches(step, at_time(m.dz, t), wh, m.dh, scratch)
    return launches


def first_state(step: Step, h0: Operand, last_h: Operand) -> tuple[Sequence[Work], Operand]:
    """The first state as cuBLASLt can read it: zeros that are repeated are copied to where the last one will be."""
    return ([], h0) if h0.is_dense else (strided_copy(step, h0, last_h), last_h)


def at_time(operand: Operand, t: int) -> Operand:
    """(n, t, *) -> (n, *) at one time."""
    n, _, width = operand.shape
    by_n, by_t, by_one = operand.strides
    return Operand(operand.base, operand.offset + t * by_t, (n, width), (by_n, by_one), operand.dtype)


# Text -----------------------------------------------------------------------------------------------------------------


def length_arguments(lengths: Lengths | None) -> list[Argument]:
    """What a kernel is told of the lengths."""
    return [] if lengths is None else [lengths.operand, np.int64(lengths.operand.strides[0])]


def length_parameters(lengths: Lengths | None) -> str:
    """Their parameters."""
    if lengths is None:
        return ""
    return f", const {memory_type(lengths.operand.dtype)}* lengths, long long lengths_stride"


def length_of(lengths: Lengths | None) -> str:
    """The length of `sample`, an expression."""
    return "steps" if lengths is None else "(int)lengths[sample * lengths_stride]"


def _gates_source(lengths: Lengths | None) -> str:
    return f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    float* gates, const float* recurrent, const float* bias, const float* h0, const float* c0, float* y,
    float* last_h, float* last_c, float* cells, int n, int steps, int H, int t, int before, long long bias_stride,
    long long h0_row, long long h0_column, long long c0_row, long long c0_column{length_parameters(lengths)}) {{
    int at = blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= n * H) return;
    int sample = at / H, unit = at % H;
    bool now = t < {length_of(lengths)};
    long long row = (long long)sample * steps + t;
    float* z = gates + row * 4 * H;
    const float* r = recurrent + (long long)sample * 4 * H;
    float gate[4];
    for (int q = 0; q < 4; ++q) {{
        float sum = z[q * H + unit] + r[q * H + unit] + bias[(q * H + unit) * bias_stride];
        gate[q] = q == 2 ? tanhf(sum) : sigmoid(sum);
        z[q * H + unit] = now ? gate[q] : 0.0f;
    }}
    float h = before < 0 ? h0[sample * h0_row + unit * h0_column] : last_h[at];
    float c = before < 0 ? c0[sample * c0_row + unit * c0_column] : last_c[at];
    if (now) {{
        c = gate[1] * c + gate[0] * gate[2];
        h = gate[3] * tanhf(c);
    }}
    y[row * H + unit] = now ? h : 0.0f;
    cells[row * H + unit] = c;
    last_h[at] = h;
    last_c[at] = c;
}}
"""


def _gates_gradient_source(lengths: Lengths | None) -> str:
    """`later`: the time visited just before this one, whose dz wh is in dh; `earlier`: the one that comes next."""
    return f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    const float* dy, const float* dh_last, const float* dc_last, const float* h0, const float* c0, const float* y,
    const float* gates, const float* cells, float* dz, float* before, const float* dh_part, float* dh0, float* dc0,
    int n, int steps, int H, int t, int later, int earlier,
    long long dy_row, long long dy_time, long long dy_column, long long dh_row, long long dh_column,
    long long dc_row, long long dc_column, long long h0_row, long long h0_column, long long c0_row,
    long long c0_column{length_parameters(lengths)}) {{
    int at = blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= n * H) return;
    int sample = at / H, unit = at % H, length = {length_of(lengths)};
    float dh = later < 0 ? dh_last[sample * dh_row + unit * dh_column] : later < length ? dh_part[at] : dh0[at];
    float dc = later < 0 ? dc_last[sample * dc_row + unit * dc_column] : dc0[at];
    dh0[at] = dh;
    if (t < 0) return;
    bool now = t < length;
    long long row = (long long)sample * steps + t;
    const float* g = gates + row * 4 * H + unit;
    float gi = g[0], gf = g[H], gg = g[2 * H], go = g[3 * H];
    long long old = ((long long)sample * steps + earlier) * H + unit;
    float c = earlier < 0 ? c0[sample * c0_row + unit * c0_column] : cells[old];
    float h = earlier < 0 || earlier >= length ? h0[sample * h0_row + unit * h0_column] : y[old];
    float squashed = tanhf(cells[row * H + unit]);
    float dh_now = dh + dy[sample * dy_row + t * dy_time + unit * dy_column];
    float dc_now = dc + dh_now * go * (1.0f - squashed * squashed);
    float* d = dz + row * 4 * H + unit;
    d[0] = now ? dc_now * gg * gi * (1.0f - gi) : 0.0f;
    d[H] = now ? dc_now * c * gf * (1.0f - gf) : 0.0f;
    d[2 * H] = now ? dc_now * gi * (1.0f - gg * gg) : 0.0f;
    d[3 * H] = now ? dh_now * squashed * go * (1.0f - go) : 0.0f;
    before[row * H + unit] = h;
    dc0[at] = now ? dc_now * gf : dc;
}}
"""


def length_check(step: Step, lengths: Lengths, times: int) -> Launch:
    """Says so when a length is out of range."""
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    const {memory_type(lengths.operand.dtype)}* lengths, long long stride, int n, int steps, int* status) {{
    int at = blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= n) return;
    long long length = (long long)lengths[at * stride];
    if (length < 1 || length > steps) {{
        status[0] = 1;
        status[1] = (int)length;
    }}
}}
"""
    operand = lengths.operand
    arguments: list[Argument] = [
        operand, np.int64(operand.strides[0]), np.int32(operand.size), np.int32(times), lengths.status
    ]  # fmt: skip
    return Launch(step, "lengths check", source, arguments, [], blocks_for(operand.size), (BLOCK, 1, 1))


def masked_copy(step: Step, x: Operand, target: Operand, lengths: Operand) -> Launch:
    """target = x (n, t, *) up to every sequence's length, and 0 beyond."""
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    const float* x, float* y, const {memory_type(lengths.dtype)}* lengths, long long count, int steps, int width,
    long long by_row, long long by_time, long long by_one, long long lengths_stride) {{
    long long at = (long long)blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= count) return;
    long long sample = at / ((long long)steps * width);
    int t = (int)(at / width % steps), one = (int)(at % width);
    y[at] = t < (int)lengths[sample * lengths_stride] ? x[sample * by_row + t * by_time + one * by_one] : 0.0f;
}}
"""
    arguments: list[Argument] = [
        x, target, lengths, np.int64(x.size), np.int32(x.shape[1]), np.int32(x.shape[2]),
        *map(np.int64, x.strides), np.int64(lengths.strides[0]),
    ]  # fmt: skip
    return Launch(step, "copy", source, arguments, [1], blocks_for(x.size), (BLOCK, 1, 1))
