"""Convolutions by their definition, one thread per result: any type, any strides. Slow; for what nothing else can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, NARROW, blocks_for, reach
from mlcompute.devices.cuda.codegen.types import loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.images import to_first
from mlcompute.ops.op import Step

_SIDES = {"convolution": "xwy", "convolution_input_gradient": "ywx", "convolution_weight_gradient": "xyw"}


@dataclass(frozen=True)
class Problem:
    """Operands as channels-first, with strides; x and y (n, c, h, w), w (o, c / groups, kh, kw)."""

    x: Operand
    w: Operand
    y: Operand
    strides: tuple[int, int]
    dilations: tuple[int, int]
    padding: tuple[int, int, int, int]
    groups: int
    channels_last: bool

    @classmethod
    def of(cls, step: Step, operands: Operands) -> Problem:
        a = step.attributes
        x, w, y = channels_first(step, operands)
        last = bool(a.get("channels_last"))
        return cls(x, w, y, a["strides"], a["dilations"], a["padding"], a["groups"], last)

    @property
    def is_wide(self) -> bool:
        return any(reach(each.shape, each.strides) >= NARROW for each in (self.x, self.w, self.y))


def channels_first(step: Step, operands: Operands) -> tuple[Operand, Operand, Operand]:
    """x, w and y of a convolution or one of its gradients; images are seen with channels before their other axes."""
    found = {}
    for side, value in zip(_SIDES[step.op.name], (*step.inputs, *step.results), strict=True):
        found[side] = operand = operands[value]
        if step.attributes.get("channels_last") and side != "w":
            axes = to_first(len(operand.shape))
            shape, strides = (tuple(own[axis] for axis in axes) for own in (operand.shape, operand.strides))
            found[side] = Operand(operand.base, operand.offset, shape, strides, operand.dtype)
    return found["x"], found["w"], found["y"]


def direct_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """A convolution or one of its gradients by our own kernels."""
    p = Problem.of(step, operands)
    if step.op.name == "convolution_weight_gradient":
        return [_weight_gradient(step, p)]
    is_forward = step.op.name == "convolution"
    result = p.y if is_forward else p.x
    source = _forward_source(p) if is_forward else _input_source(p)
    written = 2 if is_forward else 0
    arguments = [p.x, p.w, p.y, *numbers(p)]
    return [Launch(step, "direct convolution", source, arguments, [written], blocks_for(result.size), (BLOCK, 1, 1))]


# Text -----------------------------------------------------------------------------------------------------------------


def numbers(p: Problem) -> list[Argument]:
    """Extents and strides, in the order of `NAMES`."""
    kind = np.int64 if p.is_wide else np.int32
    top, _, left, _ = p.padding
    extents = (*p.x.shape, p.y.shape[1], *p.y.shape[2:], p.w.shape[1], top, left, p.groups)
    return [kind(number) for number in (*extents, *p.x.strides, *p.w.strides, *p.y.strides)]


_EXTENTS = ("N", "C", "H", "W", "O", "OH", "OW", "per_group", "top", "left", "groups")
NAMES = (*_EXTENTS, *(f"{side}{axis}" for side in "xwy" for axis in "0123"))


def kernel_text(p: Problem, written: str, body: str, threads: int = BLOCK, parameters: str = "") -> str:
    """A kernel: its parameters (x, w, y and the numbers, if not said), and constants for what makes the loops short."""
    index = "long long" if p.is_wide else "int"
    types = {"x": p.x.dtype, "w": p.w.dtype, "y": p.y.dtype}
    pointers = ", ".join(
        f"{'' if side == written else 'const '}{memory_type(dtype)}* {side}" for side, dtype in types.items()
    )
    parameters = parameters or f"{pointers}, {', '.join(f'{index} {name}' for name in NAMES)}"
    (_, _, height, width), (sy, sx), (dy, dx) = p.w.shape, p.strides, p.dilations
    constants = f"const int KH = {height}, KW = {width}, SY = {sy}, SX = {sx}, DY = {dy}, DX = {dx};"
    text = f'extern "C" __global__ void __launch_bounds__({threads}) KERNEL({parameters}) {{'
    return f"{text}\n    typedef {index} Index;\n    {constants}\n{body}}}\n"


def _place(p: Problem, names: Sequence[str], extents: Sequence[str]) -> str:
    """The thread's element of an image: the axis that lies contiguously changes fastest."""
    order = (1, 3, 2) if p.channels_last else (3, 2, 1)
    lines = [
        f"    Index at = (Index)blockIdx.x * {BLOCK} + threadIdx.x;",
        f"    if (at >= {' * '.join(extents)}) return;",
    ]
    for axis in order:
        lines += [f"    Index {names[axis]} = at % {extents[axis]};", f"    at /= {extents[axis]};"]
    return "\n".join([*lines, f"    Index {names[0]} = at;", ""])


def _forward_source(p: Problem) -> str:
    dtype = p.x.dtype
    total = register_type(dtype)
    element, weight = (loaded(dtype, text) for text in ("x[at_x + c * x1]", "w[o * w0 + c * w1 + u * w2 + v * w3]"))
    body = f"""{_place(p, ("n", "o", "i", "j"), ("N", "O", "OH", "OW"))}
    Index first = o / (O / groups) * per_group;
    {total} sum = 0;
    for (int u = 0; u < KH; ++u) {{
        Index r = i * SY + u * DY - top;
        if (r < 0 || r >= H) continue;
        for (int v = 0; v < KW; ++v) {{
            Index s = j * SX + v * DX - left;
            if (s < 0 || s >= W) continue;
            Index at_x = n * x0 + first * x1 + r * x2 + s * x3;
            for (Index c = 0; c < per_group; ++c) sum = ({total})(sum + {element} * {weight});
        }}
    }}
    y[n * y0 + o * y1 + i * y2 + j * y3] = {stored(dtype, "sum")};
"""
    return kernel_text(p, "y", body)


def _input_source(p: Problem) -> str:
    dtype = p.x.dtype
    total = register_type(dtype)
    element = loaded(dtype, "y[at_y + o * y1]")
    weight = loaded(dtype, "w[(first + o) * w0 + (c - group * per_group) * w1 + u * w2 + v * w3]")
    body = f"""{_place(p, ("n", "c", "r", "s"), ("N", "C", "H", "W"))}
    Index group = c / per_group, count = O / groups, first = group * count;
    {total} sum = 0;
    for (int u = 0; u < KH; ++u) {{
        Index a = r + top - u * DY, i = a / SY;
        if (a < 0 || i * SY != a || i >= OH) continue;
        for (int v = 0; v < KW; ++v) {{
            Index b = s + left - v * DX, j = b / SX;
            if (b < 0 || j * SX != b || j >= OW) continue;
            Index at_y = n * y0 + first * y1 + i * y2 + j * y3;
            for (Index o = 0; o < count; ++o) sum = ({total})(sum + {element} * {weight});
        }}
    }}
    x[n * x0 + c * x1 + r * x2 + s * x3] = {stored(dtype, "sum")};
"""
    return kernel_text(p, "x", body)


def _weight_gradient(step: Step, p: Problem) -> Launch:
    """A block per element of the gradient: its threads share the pixels, their sums are added pairwise."""
    dtype, total = p.x.dtype, register_type(p.x.dtype)
    term = f"{loaded(dtype, 'x[n * x0 + (o / (O / groups) * per_group + c) * x1 + r * x2 + s * x3]')} * {loaded(dtype, 'y[n * y0 + o * y1 + i * y2 + j * y3]')}"  # noqa: E501
    body = f"""
    __shared__ {total} sums[{BLOCK}];
    Index at = blockIdx.x;
    Index v = at % KW; at /= KW;
    Index u = at % KH; at /= KH;
    Index c = at % per_group, o = at / per_group;
    {total} sum = 0;
    for (Index pixel = threadIdx.x; pixel < N * OH * OW; pixel += {BLOCK}) {{
        Index j = pixel % OW, i = pixel / OW % OH, n = pixel / (OW * OH);
        Index r = i * SY + u * DY - top, s = j * SX + v * DX - left;
        if (r >= 0 && r < H && s >= 0 && s < W) sum = ({total})(sum + {term});
    }}
    sums[threadIdx.x] = sum;
    for (int half = {BLOCK // 2}; half > 0; half /= 2) {{
        __syncthreads();
        if ((int)threadIdx.x < half) sums[threadIdx.x] = ({total})(sums[threadIdx.x] + sums[threadIdx.x + half]);
    }}
    if (threadIdx.x == 0) w[o * w0 + c * w1 + u * w2 + v * w3] = {stored(p.w.dtype, "sums[0]")};
"""
    arguments = [p.x, p.w, p.y, *numbers(p)]
    grid = (p.w.size, 1, 1)
    return Launch(step, "direct convolution", kernel_text(p, "w", body), arguments, [1], grid, (BLOCK, 1, 1))
