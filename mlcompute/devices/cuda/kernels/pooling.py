"""Pooling: a thread per result (or four neighbouring channels), which runs over a window; gradients by gathering.

Gradients add, for every element of the image, what the windows over it send, in the order of its positions in them.
Where max_pool_gradient is given the image, one launch finds the indices of the largest elements and a second adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.types import (
    is_element,
    is_floating,
    literal,
    loaded,
    memory_type,
    register_type,
    stored,
    sum_type,
)
from mlcompute.devices.cuda.kernels.launch import Launch, Row, supports_floats
from mlcompute.devices.cuda.kernels.reductions import reduce_axes
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.ops.images import to_first
from mlcompute.ops.op import Shape, Step
from mlcompute.ops.pooling import INDEX_TYPE, MOST_INDICES

_AXES = ("n", "c", "h", "w")
#: Windows over the full image with at least so many elements are reductions.
_WORTH_REDUCTION = 16
#: Elements of a window's row that are written out at most.
_UNROLLED = 8


@dataclass(frozen=True)
class _Pool:
    """A pooling step: its windows, and how its images lie."""

    attributes: dict[str, Any]

    @property
    def is_last(self) -> bool:
        return bool(self.attributes.get("channels_last", False))

    def first(self, operand: Operand) -> Operand:
        """An image as (N, C, H, W), wherever its channels lie."""
        return operand.permuted(to_first(4)) if self.is_last else operand

    def constants(self) -> str:
        """Definitions that stand before a kernel."""
        a = self.attributes
        pairs = zip("KSD", (a["kernel"], a["strides"], a["dilations"]), strict=True)
        return "".join(f"constexpr int {name}H = {y}, {name}W = {x};\n" for name, (y, x) in pairs)

    def covers(self, image: Shape) -> bool:
        """Is there one window, which is the image?"""
        a = self.attributes
        return a["kernel"] == image[2:] and not any(a["padding"]) and a["dilations"] == (1, 1)

    def width(self, images: Sequence[Operand]) -> int:
        """Channels a thread has."""
        for width in (4, 2):
            if self.is_last and all(
                one.shape[1] % width == 0
                and one.strides[1] == 1
                and one.offset % width == 0
                and all(stride % width == 0 for axis, stride in enumerate(one.strides) if axis != 1)
                and one.dtype.itemsize * width <= 16
                for one in images
            ):
                return width
        return 1


def _begin(source: KernelSource, pool: _Pool, width: int, images: dict[str, Operand], over: str) -> str:
    """Statements that find a thread's indices n, c, h, w in the image `over`, and the functions `NAME_at(h, w)`."""
    shape = images[over].shape
    order = ("n", "h", "w", "c") if pool.is_last else _AXES
    extents = dict(zip(_AXES, (shape[0], shape[1] // width, *shape[2:]), strict=True))
    lines = [source.coordinates({axis: extents[axis] for axis in order})]
    for name, operand in images.items():
        n, c, h, w = (source.index(f"{name}_{axis}", operand.strides[i]) for i, axis in enumerate(_AXES))
        lines.append(f"    const Index {name}_start = n * {n} + c * {width} * {c};")
        lines.append(f"    auto {name}_at = [&](Index h, Index w) {{ return {name}_start + h * {h} + w * {w}; }};")
    return "\n".join(lines)


def _group(kind: str, name: str, place: str, constant: bool = True) -> str:
    const = "const " if constant else ""
    return f"*reinterpret_cast<{const}Pack<{kind}, WIDTH>*>({name} + {name}_at({place}))"


def _launch(step: Step, source: KernelSource, pool: _Pool, width: int, name: str, body: str, total: int) -> Launch:
    before = f"constexpr int WIDTH = {width};\n{pool.constants()}"
    return source.launch(step, name, before, body, grid=blocks_for(total // width), block=BLOCK)


# Forward ------------------------------------------------------------------------------------------------------------


def pool_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """max_pool, max_pool_with_indices, sum_pool."""
    pool, x, results = _Pool(step.attributes), operands[step.inputs[0]], [operands[value] for value in step.results]
    name = step.op.name
    if not results[0].size:
        return []
    image = pool.first(x)
    if len(results) == 1 and pool.covers(image.shape) and image.shape[2] * image.shape[3] >= _WORTH_REDUCTION:
        axes = (1, 2) if pool.is_last else (2, 3)
        return reduce_axes(step, operands, name.partition("_")[0], x, results[0], axes)
    if name == "sum_pool":
        return [_sums(step, pool, image, pool.first(results[0]))]
    indices = pool.first(results[1]) if len(results) > 1 else None
    return [_largest(step, pool, image, pool.first(results[0]), indices)]


def _windows(source: KernelSource, step: Step, image: Operand, body: str) -> str:
    """`body` for every element of a thread's window that lies in the image, at (y, x); its place is `place`."""
    top, _, left, _ = step.attributes["padding"]
    top, left = source.index("top", top), source.index("left", left)
    height, width = source.index("height", image.shape[2]), source.index("across", image.shape[3])
    return f"""
    for (int u = 0; u < KH; ++u) {{
        const Index y_in = h * SH - {top} + u * DH;
        if (y_in < 0 || y_in >= {height}) continue;
        #pragma unroll {min(step.attributes["kernel"][1], _UNROLLED)}
        for (int t = 0; t < KW; ++t) {{
            const Index x_in = w * SW - {left} + t * DW;
            if (x_in < 0 || x_in >= {width}) continue;
            const int place = u * KW + t;
{body}
        }}
    }}"""


def _sums(step: Step, pool: _Pool, x: Operand, y: Operand) -> Launch:
    width, source = pool.width([x, y]), KernelSource([x, y], y.size)
    source.pointer("x", x)
    source.pointer("y", y, written=True)
    kind = sum_type(x.dtype)
    begin = _begin(source, pool, width, {"x": x, "y": y}, "y")
    add = f"""            const auto group = {_group(memory_type(x.dtype), "x", "y_in, x_in")};
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) sums[v] += ({kind}){loaded(x.dtype, "group.at[v]")};"""
    body = f"""{begin}
    {kind} sums[WIDTH] = {{}};
{_windows(source, step, x, add)}
    Pack<{memory_type(y.dtype)}, WIDTH> made;
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) made.at[v] = {stored(y.dtype, "sums[v]")};
    {_group(memory_type(y.dtype), "y", "h, w", False)} = made;"""
    return _launch(step, source, pool, width, "sum of windows", body, y.size)


def _largest(
    step: Step, pool: _Pool, x: Operand, y: Operand | None, indices: Operand | None, index_type: str = "unsigned char"
) -> Launch:
    """The largest element of every window, its place, or both."""
    results = {name: one for name, one in (("y", y), ("indices", indices)) if one is not None}
    over = next(iter(results))
    width, source = pool.width([x, *results.values()]), KernelSource([x, *results.values()], results[over].size)
    source.pointer("x", x)
    for name, one in results.items():
        source.pointer(name, one, written=True, element=index_type if name == "indices" else None)
    begin = _begin(source, pool, width, {"x": x, **results}, over)
    real = register_type(x.dtype)
    look = f"""            const auto group = {_group(memory_type(x.dtype), "x", "y_in, x_in")};
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) {{
                const {real} value = {loaded(x.dtype, "group.at[v]")};
                // The first NaN counts as largest.
                if (found[v] < 0 || value > largest[v] || (value != value && largest[v] == largest[v])) {{
                    largest[v] = value;
                    found[v] = place;
                }}
            }}"""
    stores = []
    for name, value in (("y", stored(x.dtype, "largest[v]")), ("indices", f"({index_type})found[v]")):
        if name in results:
            kind = index_type if name == "indices" else memory_type(x.dtype)
            stores.append(f"""    Pack<{kind}, WIDTH> {name}_made;
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) {name}_made.at[v] = {value};
    {_group(kind, name, "h, w", False)} = {name}_made;""")
    body = f"""{begin}
    {real} largest[WIDTH];
    int found[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) {{
        largest[v] = {literal(x.dtype, -np.inf)};
        found[v] = -1;
    }}
{_windows(source, step, x, look)}
{chr(10).join(stores)}"""
    shown = "largest of windows" if y is not None else "indices of the largest"
    return _launch(step, source, pool, width, shown, body, results[over].size)


# Gradients ----------------------------------------------------------------------------------------------------------


def gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """max_pool_gradient, max_pool_indices_gradient, sum_pool_gradient."""
    pool = _Pool(step.attributes)
    dy, dx = (pool.first(operands[value]) for value in (step.inputs[0], step.results[0]))
    if not dx.size:
        return []
    if step.op.name == "sum_pool_gradient":
        return [_gathered(step, pool, dy, None, dx)]
    if step.op.name == "max_pool_indices_gradient":
        return [_gathered(step, pool, dy, pool.first(operands[step.inputs[1]]), dx)]
    kind = _index_type(step)
    shape = step.inputs[0].shape
    memory = operands.workspace(step, 0, _workspace(step))
    indices = pool.first(memory._replace(shape=shape, strides=dense_strides(shape)))
    found = _largest(step, pool, pool.first(operands[step.inputs[1]]), None, indices, kind)
    return [found, _gathered(step, pool, dy, indices, dx, kind)]


def _gathered(
    step: Step, pool: _Pool, dy: Operand, indices: Operand | None, dx: Operand, index_type: str = "unsigned char"
) -> Launch:
    """For every element of the image the sum of dy over the windows that send it something."""
    images = {"dy": dy, **({"indices": indices} if indices is not None else {}), "dx": dx}
    width, source = pool.width(list(images.values())), KernelSource(list(images.values()), dx.size)
    for name, one in images.items():
        source.pointer(name, one, written=name == "dx", element=index_type if name == "indices" else None)
    begin = _begin(source, pool, width, images, "dx")
    top, _, left, _ = step.attributes["padding"]
    top, left = source.index("top", top), source.index("left", left)
    down, across = source.index("windows_down", dy.shape[2]), source.index("windows_across", dy.shape[3])
    kind = sum_type(dy.dtype)
    value, condition, load = f"({kind}){loaded(dy.dtype, 'group.at[v]')}", "", ""
    if indices is not None:
        load = f"const auto chosen = {_group(index_type, 'indices', 'oh, ow')};"
        condition = f"if (chosen.at[v] == ({index_type})place) "
    body = f"""{begin}
    {kind} sums[WIDTH] = {{}};
    // Windows from the last that begins before the element to the first that reaches it: positions in rising order.
    Index oh = (h + {top}) / SH, ow_last = (w + {left}) / SW;
    if (oh >= {down}) oh = {down} - 1;
    if (ow_last >= {across}) ow_last = {across} - 1;
    for (; oh >= 0; --oh) {{
        const Index y_in = h + {top} - oh * SH;
        if (y_in > (KH - 1) * DH) break;
        if (DH > 1 && y_in % DH != 0) continue;
        for (Index ow = ow_last; ow >= 0; --ow) {{
            const Index x_in = w + {left} - ow * SW;
            if (x_in > (KW - 1) * DW) break;
            if (DW > 1 && x_in % DW != 0) continue;
            const int place = int(y_in / DH) * KW + int(x_in / DW);
            const auto group = {_group(memory_type(dy.dtype), "dy", "oh, ow")};
            {load}
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) {condition}sums[v] += {value};
            (void)place;
        }}
    }}
    Pack<{memory_type(dx.dtype)}, WIDTH> made;
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) made.at[v] = {stored(dx.dtype, "sums[v]")};
    {_group(memory_type(dx.dtype), "dx", "h, w", False)} = made;"""
    return _launch(step, source, pool, width, "windows added to the image", body, dx.size)


def _index_type(step: Step) -> str:
    kernel = step.attributes["kernel"]
    return "unsigned char" if kernel[0] * kernel[1] <= MOST_INDICES else "int"


def _workspace(step: Step) -> int:
    """Bytes for the indices of the largest elements."""
    return step.inputs[0].size * (INDEX_TYPE.itemsize if _index_type(step) == "unsigned char" else 4)


def _supports_numbers(step: Step) -> bool:
    dtype = step.inputs[0].dtype
    return (dtype.kind in "iu" or is_floating(dtype)) and is_element(dtype)


KERNELS: dict[str, Row] = {
    "max_pool": Row(pool_launches, supports=supports_floats),
    "max_pool_with_indices": Row(pool_launches, supports=supports_floats),
    "sum_pool": Row(pool_launches, supports=_supports_numbers),
    "max_pool_gradient": Row(gradient_launches, supports=supports_floats, workspace=_workspace),
    "max_pool_indices_gradient": Row(gradient_launches, supports=_supports_numbers),
    "sum_pool_gradient": Row(gradient_launches, supports=_supports_numbers),
}
