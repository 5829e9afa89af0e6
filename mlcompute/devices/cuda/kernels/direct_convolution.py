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
            found[side] = operand.permuted(to_first(len(operand.shape)))
    return found["x"], found["w"], found["y"]


def is_volume(step: Step) -> bool:
    """Does a convolution have three spatial axes?"""
    return len(step.inputs[0].shape) == 5


def _as_volume(image: Operand) -> Operand:
    """An image, or a filter of images, as a volume one pixel deep."""
    if len(image.shape) == 5:
        return image
    shape, strides = image.shape, image.strides
    return image._replace(shape=(*shape[:2], 1, *shape[2:]), strides=(*strides[:2], 0, *strides[2:]))


_VOLUME = ("N", "C", "D", "H", "W", "O", "OD", "OH", "OW", "per_group", "front", "top", "left", "groups")
_VOLUME_NAMES = (*_VOLUME, *(f"{side}{axis}" for side in "xwy" for axis in "01234"))


def direct_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """A convolution of images or volumes, or one of its gradients: a thread per result, a block per weight."""
    a, last = step.attributes, bool(step.attributes.get("channels_last"))
    x, w, y = map(_as_volume, channels_first(step, operands))
    strides, dilations, before = (1, *a["strides"])[-3:], (1, *a["dilations"])[-3:], (0, *a["padding"][::2])[-3:]
    wide = any(reach(each.shape, each.strides) >= NARROW for each in (x, w, y))
    kind = np.int64 if wide else np.int32
    extents = (*x.shape, *y.shape[1:], w.shape[1], *before, a["groups"])
    written, body, grid = {
        "convolution": ("y", _forward(x, last), blocks_for(y.size)),
        "convolution_input_gradient": ("x", _input_gradient(x, last), blocks_for(x.size)),
        "convolution_weight_gradient": ("w", _weight_gradient(x, w), (w.size, 1, 1)),
    }[step.op.name]
    index = "long long" if wide else "int"
    pointers = ", ".join(
        f"{'' if side == written else 'const '}{memory_type(each.dtype)}* {side}"
        for side, each in zip("xwy", (x, w, y), strict=True)
    )
    names = ("KD", "KH", "KW", "SZ", "SY", "SX", "DZ", "DY", "DX")
    constants = zip(names, (*w.shape[2:], *strides, *dilations), strict=True)
    parameters = ", ".join(f"{index} {name}" for name in _VOLUME_NAMES)
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL({pointers}, {parameters}) {{
    typedef {index} Index;
    const int {", ".join(f"{name} = {number}" for name, number in constants)};
{body}}}
"""
    arguments: list[Argument] = [x, w, y, *map(kind, (*extents, *x.strides, *w.strides, *y.strides))]
    return [Launch(step, "direct convolution", source, arguments, ["xwy".index(written)], grid, (BLOCK, 1, 1))]


def _forward(x: Operand, last: bool) -> str:
    total = register_type(x.dtype)
    element = loaded(x.dtype, "x[at_x + c * x1]")
    weight = loaded(x.dtype, "w[o * w0 + c * w1 + t * w2 + u * w3 + v * w4]")
    return f"""{_place(last, "nohij", ("N", "O", "OD", "OH", "OW"))}
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


def _input_gradient(x: Operand, last: bool) -> str:
    total = register_type(x.dtype)
    element = loaded(x.dtype, "y[at_y + o * y1]")
    weight = loaded(x.dtype, "w[(first + o) * w0 + (c - group * per_group) * w1 + t * w2 + u * w3 + v * w4]")
    return f"""{_place(last, "ncqrs", ("N", "C", "D", "H", "W"))}
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


def _place(last: bool, names: str, extents: Sequence[str]) -> str:
    """The thread's element: the axis that lies contiguously changes fastest."""
    lines = [
        f"    Index at = (Index)blockIdx.x * {BLOCK} + threadIdx.x;",
        f"    if (at >= {' * '.join(extents)}) return;",
    ]
    for axis in (1, 4, 3, 2) if last else (4, 3, 2, 1):
        lines += [f"    Index {names[axis]} = at % {extents[axis]};", f"    at /= {extents[axis]};"]
    return "\n".join([*lines, f"    Index {names[0]} = at;", ""])


# What other kernels for images are written with -----------------------------------------------------------------------


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
