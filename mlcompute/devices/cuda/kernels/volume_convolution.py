"""Convolutions of volumes by their definition: for types, paddings and layouts that cuDNN has no engine for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, NARROW, blocks_for, reach
from mlcompute.devices.cuda.codegen.types import loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.direct_convolution import channels_first
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

_EXTENTS = ("N", "C", "D", "H", "W", "O", "OD", "OH", "OW", "per_group", "front", "top", "left", "groups")
_NAMES = (*_EXTENTS, *(f"{side}{axis}" for side in "xwy" for axis in "01234"))


def is_volume(step: Step) -> bool:
    """Does a convolution have three spatial axes?"""
    return len(step.inputs[0].shape) == 5


def volume_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One thread per result; a block per element of a weight gradient."""
    a, (x, w, y) = step.attributes, channels_first(step, operands)
    wide = any(reach(each.shape, each.strides) >= NARROW for each in (x, w, y))
    kind = np.int64 if wide else np.int32
    extents = (*x.shape, *y.shape[1:], w.shape[1], *a["padding"][::2], a["groups"])
    numbers: list[Argument] = [kind(number) for number in (*extents, *x.strides, *w.strides, *y.strides)]
    written, body, grid = {
        "convolution": ("y", _forward(x), blocks_for(y.size)),
        "convolution_input_gradient": ("x", _input_gradient(x), blocks_for(x.size)),
        "convolution_weight_gradient": ("w", _weight_gradient(x, w), (w.size, 1, 1)),
    }[step.op.name]
    index = "long long" if wide else "int"
    pointers = ", ".join(
        f"{'' if side == written else 'const '}{memory_type(each.dtype)}* {side}"
        for side, each in zip("xwy", (x, w, y), strict=True)
    )
    constants = {
        **dict(zip(("KD", "KH", "KW"), w.shape[2:], strict=True)),
        **dict(zip(("SZ", "SY", "SX"), a["strides"], strict=True)),
        **dict(zip(("DZ", "DY", "DX"), a["dilations"], strict=True)),
    }
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL({pointers}, {", ".join(f"{index} {n}" for n in _NAMES)}) {{
    typedef {index} Index;
    const int {", ".join(f"{name} = {number}" for name, number in constants.items())};
{body}}}
"""
    arguments: list[Argument] = [x, w, y, *numbers]
    return [Launch(step, "volume convolution", source, arguments, ["xwy".index(written)], grid, (BLOCK, 1, 1))]


def _forward(x: Operand) -> str:
    total = register_type(x.dtype)
    element = loaded(x.dtype, "x[at_x + c * x1]")
    weight = loaded(x.dtype, "w[o * w0 + c * w1 + t * w2 + u * w3 + v * w4]")
    return f"""{_place("nohij", ("N", "O", "OD", "OH", "OW"))}
    Index first = o / (O / groups) * per_group;
    {total} sum = 0;
    for (int t = 0; t < KD; ++t) for (int u = 0; u < KH; ++u) for (int v = 0; v < KW; ++v) {{
        Index q = h * SZ + t * DZ - front, r = i * SY + u * DY - top, s = j * SX + v * DX - left;
        if (q < 0 || q >= D || r < 0 || r >= H || s < 0 || s >= W) continue;
        Index at_x = n * x0 + first * x1 + q * x2 + r * x3 + s * x4;
        for (Index c = 0; c < per_group; ++c) sum = ({total})(sum + {element} * {weight});
    }}
    y[n * y0 + o * y1 + h * y2 + i * y3 + j * y4] = {stored(x.dtype, "sum")};
"""


def _input_gradient(x: Operand) -> str:
    total = register_type(x.dtype)
    element = loaded(x.dtype, "y[at_y + o * y1]")
    weight = loaded(x.dtype, "w[(first + o) * w0 + (c - group * per_group) * w1 + t * w2 + u * w3 + v * w4]")
    return f"""{_place("ncqrs", ("N", "C", "D", "H", "W"))}
    Index group = c / per_group, count = O / groups, first = group * count;
    {total} sum = 0;
    for (int t = 0; t < KD; ++t) for (int u = 0; u < KH; ++u) for (int v = 0; v < KW; ++v) {{
        Index e = q + front - t * DZ, a = r + top - u * DY, b = s + left - v * DX;
        Index h = e / SZ, i = a / SY, j = b / SX;
        if (e < 0 || h * SZ != e || h >= OD || a < 0 || i * SY != a || i >= OH) continue;
        if (b < 0 || j * SX != b || j >= OW) continue;
        Index at_y = n * y0 + first * y1 + h * y2 + i * y3 + j * y4;
        for (Index o = 0; o < count; ++o) sum = ({total})(sum + {element} * {weight});
    }}
    x[n * x0 + c * x1 + q * x2 + r * x3 + s * x4] = {stored(x.dtype, "sum")};
"""


def _weight_gradient(x: Operand, w: Operand) -> str:
    """Threads of a block share the pixels; their sums are added pairwise."""
    total = register_type(x.dtype)
    seen = loaded(x.dtype, "x[n * x0 + (o / (O / groups) * per_group + c) * x1 + q * x2 + r * x3 + s * x4]")
    slope = loaded(x.dtype, "y[n * y0 + o * y1 + h * y2 + i * y3 + j * y4]")
    return f"""
    __shared__ {total} sums[{BLOCK}];
    Index at = blockIdx.x;
    Index v = at % KW; at /= KW;
    Index u = at % KH; at /= KH;
    Index t = at % KD; at /= KD;
    Index c = at % per_group, o = at / per_group;
    {total} sum = 0;
    for (Index pixel = threadIdx.x; pixel < N * OD * OH * OW; pixel += {BLOCK}) {{
        Index j = pixel % OW, i = pixel / OW % OH, h = pixel / (OW * OH) % OD, n = pixel / (OW * OH * OD);
        Index q = h * SZ + t * DZ - front, r = i * SY + u * DY - top, s = j * SX + v * DX - left;
        if (q >= 0 && q < D && r >= 0 && r < H && s >= 0 && s < W) sum = ({total})(sum + {seen} * {slope});
    }}
    sums[threadIdx.x] = sum;
    for (int half = {BLOCK // 2}; half > 0; half /= 2) {{
        __syncthreads();
        if ((int)threadIdx.x < half) sums[threadIdx.x] = ({total})(sums[threadIdx.x] + sums[threadIdx.x + half]);
    }}
    if (threadIdx.x == 0) w[o * w0 + c * w1 + t * w2 + u * w3 + v * w4] = {stored(w.dtype, "sums[0]")};
"""


def _place(names: str, extents: Sequence[str]) -> str:
    """The thread's element; the last axis changes fastest."""
    lines = [
        f"    Index at = (Index)blockIdx.x * {BLOCK} + threadIdx.x;",
        f"    if (at >= {' * '.join(extents)}) return;",
    ]
    for name, extent in reversed([*zip(names, extents, strict=True)][1:]):
        lines += [f"    Index {name} = at % {extent};", f"    at /= {extent};"]
    return "\n".join([*lines, f"    Index {names[0]} = at;", ""])
