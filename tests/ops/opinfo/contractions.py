"""PyTorch's index functions, products, convolutions and pooling, said in our ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.ops.op import Value
from tests.ops.opinfo.table import MAPS, Mapping, dropped, said
from tests.ops.opinfo.views import unsqueeze

# Index functions -----------------------------------------------------------------------------------------------


@said("gather", only=lambda x, dim, index, **_: x.ndim == index.ndim > 0, why="ranks are equal and not 0")
def gather(x: Value, dim: int, index: Value) -> Value:
    return ops.gather(x, index, dim)


def _gathers(x: Any, index: Any, dim: int | None = None) -> bool:
    return bool((index >= 0).all()) and (dim is None or x.shape[1 - dim] == index.shape[1 - dim])


@said("take_along_dim", only=_gathers, why="gather does not broadcast, and indices count from the front")
def take_along_dim(x: Value, index: Value, dim: int | None = None) -> Value:
    if dim is None:
        return ops.gather(ops.reshape(x, (x.size,)), ops.reshape(index, (index.size,)), 0)
    return ops.gather(x, index, dim)


@said("take", only=lambda x, index: bool((index >= 0).all()), why="indices count from the front")
def take(x: Value, index: Value) -> Value:
    return ops.take(ops.reshape(x, (x.size,)), index, 0)


@said("index_select", only=lambda x, dim, index: x.ndim > 0, why="rank 0 has no axis")
def index_select(x: Value, dim: int, index: Value) -> Value:
    return ops.take(x, index, dim)


def _distinct(x: Any, dim: int, index: Any, src: Any, **settings: Any) -> bool:
    if not x.ndim or settings or isinstance(src, float):
        return False
    return bool((index.sort(dim).values.diff(dim=dim) != 0).all())


@said("scatter", only=_distinct, why="PyTorch's gradient is defined for distinct targets only")
def scatter(x: Value, dim: int, index: Value, src: Value) -> Value:
    return ops.scatter(src, index, x, dim)


@said("scatter_add", only=lambda x, dim, index, src: x.ndim > 0, why="rank 0 has no axis")
def scatter_add(x: Value, dim: int, index: Value, src: Value) -> Value:
    return ops.scatter_add(src, index, x, dim)


@said("scatter_reduce.sum", only=lambda x, dim, index, src, reduce, include_self=True: x.ndim > 0,
      why="rank 0 has no axis")  # fmt: skip
def scatter_reduce_sum(x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True) -> Value:
    if not include_self:
        x = ops.scatter(ops.full(x, index.shape, 0.0), index, x, dim)
    return ops.scatter_add(src, index, x, dim)


def _spread(x: Value, index: Value, dim: int) -> Value:
    """A list of indices along one axis as indices for every element."""
    axis = dim % x.rank
    line = ops.reshape(index, (index.size if a == axis else 1 for a in range(x.rank)))
    return ops.broadcast(line, (*x.shape[:axis], index.size, *x.shape[axis + 1 :]))


@said("index_add", only=lambda x, dim, index, src, **_: x.ndim > 0, why="rank 0 has no axis")
def index_add(x: Value, dim: int, index: Value, src: Value, alpha: float = 1) -> Value:
    return ops.scatter_add(src * alpha, _spread(x, index, dim), x, dim)


@said("index_copy", only=lambda x, dim, index, src: x.ndim > 0, why="rank 0 has no axis")
def index_copy(x: Value, dim: int, index: Value, src: Value) -> Value:
    return ops.scatter(src, _spread(x, index, dim), x, dim)


@said("index_fill", only=lambda x, dim, index, value: x.ndim > 0, why="rank 0 has no axis")
def index_fill(x: Value, dim: int, index: Value, value: Any) -> Value:
    places = _spread(x, index, dim)
    filled = ops.broadcast(value, places.shape) if isinstance(value, Value) else ops.full(x, places.shape, value)
    return ops.scatter(filled, places, x, dim)


@said("nn.functional.embedding")
def embedding(table: Value, index: Value, padding_idx: int | None = None, scale_grad_by_freq: bool = False) -> Value:
    padding = None if padding_idx is None else padding_idx % table.shape[0]
    return ops.embedding(table, index, padding, scale_grad_by_freq)


# Products ------------------------------------------------------------------------------------------------------


@said("matmul", "mm", "bmm", "mv", "dot", "vdot", "bmm.triton_optimized")
def matmul(a: Value, b: Value) -> Value:
    """As NumPy's: an operand of rank 1 is a row on the left, a column on the right, and the new axis goes again."""
    row, column = a.rank == 1, b.rank == 1
    y = ops.matmul(ops.reshape(a, (1, a.size)) if row else a, ops.reshape(b, (b.size, 1)) if column else b)
    gone = [y.rank - 2] * row + [y.rank - 1] * column
    return dropped(y, gone, False)


MAPS["__rmatmul__"] = Mapping(lambda a, b: matmul(b, a))
MAPS["outer"] = Mapping(lambda a, b: ops.matmul(ops.reshape(a, (a.size, 1)), ops.reshape(b, (1, b.size))))
MAPS["inner"] = Mapping(lambda a, b: matmul(a, b if b.rank < 2 else ops.transpose(b)) if a.rank and b.rank else a * b)
for _name in ("addmm", "addmm.decomposed", "addmv", "baddbmm"):
    MAPS[_name] = Mapping(lambda x, a, b, alpha=1, beta=1: x * beta + matmul(a, b) * alpha)
MAPS["addr"] = Mapping(lambda x, a, b, alpha=1, beta=1: x * beta + MAPS["outer"].ours(a, b) * alpha)
MAPS["addbmm"] = Mapping(
    lambda x, a, b, alpha=1, beta=1: x * beta + dropped(ops.sum_(ops.matmul(a, b), (0,)), (0,), False) * alpha
)


@said("nn.functional.linear")
def linear(x: Value, w: Value, bias: Value | None = None) -> Value:
    y = matmul(x, ops.transpose(w) if w.rank == 2 else w)
    return y if bias is None else y + bias


@said("nn.functional.bilinear")
def bilinear(a: Value, b: Value, w: Value, bias: Value | None = None) -> Value:
    outer = ops.reshape(a, (*a.shape, 1)) * ops.reshape(b, (*b.shape[:-1], 1, b.shape[-1]))
    flat = ops.reshape(outer, (*a.shape[:-1], a.shape[-1] * b.shape[-1]))
    return linear(flat, ops.reshape(w, (w.shape[0], w.size // w.shape[0])), bias)


@said("kron")
def kron(a: Value, b: Value) -> Value:
    rank = max(a.rank, b.rank)
    left, right = (1,) * (rank - a.rank) + a.shape, (1,) * (rank - b.rank) + b.shape
    outer = ops.reshape(a, (k for n in left for k in (n, 1))) * ops.reshape(b, (k for n in right for k in (1, n)))
    return ops.reshape(outer, (n * m for n, m in zip(left, right, strict=True)))


@said("nn.functional.scaled_dot_product_attention",
      only=lambda q, k, v, attn_mask=None, dropout_p=0.0, enable_gqa=False, **_: dropout_p == 0.0 and not enable_gqa
      and q.ndim == k.ndim == v.ndim in (3, 4) and (attn_mask is None or not attn_mask.requires_grad),
      why="no dropout, one head count, and the mask gets no gradient")  # fmt: skip
def attention(
    q: Value, k: Value, v: Value, attn_mask: Value | None = None, is_causal: bool = False,
    scale: float | None = None, **_: Any,
) -> Value:  # fmt: skip
    q4, k4, v4 = (unsqueeze(x, 1) if x.rank == 3 else x for x in (q, k, v))
    if is_causal:
        allowed = np.tril(np.ones((q.shape[-2], k.shape[-2])))
        attn_mask = q.trace.constant(np.where(allowed, 0.0, -np.inf), q.dtype)
    elif attn_mask is not None:
        attn_mask = unsqueeze(attn_mask, 1) if attn_mask.rank == 3 and q.rank == 3 else attn_mask
        if attn_mask.dtype == np.bool_:
            attn_mask = ops.select(attn_mask, 0.0, ops.full(q, (), -math.inf))
    y = ops.attention(q4, k4, v4, attn_mask, scale=scale if scale is not None else 1.0 / math.sqrt(q.shape[-1]))
    return ops.reshape(y, (*q.shape[:-1], v.shape[-1]))


# Convolution and pooling ---------------------------------------------------------------------------------------


def pair(number: Any) -> tuple[int, int]:
    """One number, (x,) or (y, x) as (y, x); a list of one stands for both."""
    if isinstance(number, int):
        return number, number
    return (number[0], number[0]) if len(number) == 1 else (number[0], number[1])


def line(number: Any) -> tuple[int, int]:
    """A number of a one-dimensional function as (1, x)."""
    return 1, number if isinstance(number, int) else number[0]


def image(x: Value, spatial: int) -> Value:
    """x as (N, C, H, W): a batch of one if it has none, a height of one for one-dimensional data."""
    shape = x.shape if x.rank == spatial + 2 else (1, *x.shape)
    return ops.reshape(x, shape if spatial == 2 else (*shape[:2], 1, shape[2]))


def back(y: Value, x: Value, spatial: int) -> Value:
    """y (N, C, H, W) with the rank x came with."""
    shape = y.shape if spatial == 2 else (*y.shape[:2], y.shape[3])
    return ops.reshape(y, shape if x.rank == spatial + 2 else shape[1:])


def _convolution(spatial: int) -> Callable[..., Value]:
    both = pair if spatial == 2 else line

    def ours(
        x: Value,
        w: Value,
        bias: Value | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Value:
        kernel = image(w, spatial)
        strides, dilations = both(stride), both(dilation)
        if isinstance(padding, str):
            total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel.shape[2:], strict=True)]
            sides = (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
        else:
            top, left = both(padding)
            sides = (top, top, left, left) if spatial == 2 else (0, 0, left, left)
        y = ops.convolution(image(x, spatial), kernel, strides, dilations, sides, groups)
        return back(y if bias is None else y + ops.reshape(bias, (bias.size, 1, 1)), x, spatial)

    return ours


def _transposed(spatial: int) -> Callable[..., Value]:
    both = pair if spatial == 2 else line

    def ours(
        x: Value, w: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
        groups: int = 1, dilation: Any = 1,
    ) -> Value:  # fmt: skip
        dy, kernel = image(x, spatial), image(w, spatial)
        strides, dilations = both(stride), both(dilation)
        widths, extra = (n if spatial == 2 else (0, n[1]) for n in (both(padding), both(output_padding)))
        height, width = (
            (dy.shape[2 + a] - 1) * strides[a] - 2 * widths[a] + dilations[a] * (kernel.shape[2 + a] - 1) + extra[a] + 1
            for a in (0, 1)
        )
        shape = (dy.shape[0], kernel.shape[1] * groups, height, width)
        sides = (widths[0], widths[0], widths[1], widths[1])
        y = ops.convolution_input_gradient(dy, kernel, shape, strides, dilations, sides, groups)
        return back(y if bias is None else y + ops.reshape(bias, (bias.size, 1, 1)), x, spatial)

    return ours


def _no_tail(x: Any, w: Any, bias: Any = None, stride: Any = 1, output_padding: Any = 0, **_: Any) -> bool:
    return all(e < s for e, s in zip(pair(output_padding), pair(stride), strict=True))


MAPS["nn.functional.conv1d"], MAPS["nn.functional.conv2d"] = Mapping(_convolution(1)), Mapping(_convolution(2))
for _name, _spatial in {"nn.functional.conv_transpose1d": 1, "nn.functional.conv_transpose2d": 2}.items():
    MAPS[_name] = Mapping(_transposed(_spatial), _no_tail, "pixels no window reaches belong to no convolution")


def windows(
    extents: Sequence[int], kernel: Any, strides: Any, dilations: Any, padding: Any, ceil_mode: bool
) -> tuple[int, int, int, int]:
    """Our padding (top, bottom, left, right) for PyTorch's windows; ceil_mode lets the last one hang over."""
    sides: list[int] = []
    for n, k, s, d, p in zip(extents, kernel, strides, dilations, padding, strict=True):
        reach = d * (k - 1) + 1
        count = (n + 2 * p - reach) // s + 1
        if ceil_mode and -(-(n + 2 * p - reach) // s) + 1 > count and count * s < n + p:
            count += 1
        sides += [p, max(p, (count - 1) * s + reach - n - p)]
    return sides[0], sides[1], sides[2], sides[3]


def _max_pool(spatial: int) -> Callable[..., Value]:
    both = pair if spatial == 2 else line

    def ours(
        x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Value:  # fmt: skip
        kernel, dilations = both(kernel_size), both(dilation)
        strides = kernel if stride is None or stride == () else both(stride)
        widths = both(padding) if spatial == 2 else (0, both(padding)[1])
        picture = image(x, spatial)
        sides = windows(picture.shape[2:], kernel, strides, dilations, widths, ceil_mode)
        return back(ops.max_pool(picture, kernel, strides, dilations, sides), x, spatial)

    return ours


def _values_only(x: Any, *, return_indices: bool = False, **_: Any) -> bool:
    return not return_indices


for _name, _spatial in {"nn.functional.max_pool1d": 1, "nn.functional.max_pool2d": 2}.items():
    MAPS[_name] = Mapping(_max_pool(_spatial), _values_only, "only the values, not their places")


def _average_pool(spatial: int) -> Callable[..., Value]:
    both = pair if spatial == 2 else line

    def ours(
        x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Value:  # fmt: skip
        kernel = both(kernel_size)
        strides = kernel if stride is None or stride in ((), []) else both(stride)
        widths = both(padding) if spatial == 2 else (0, both(padding)[1])
        picture = image(x, spatial)
        sides = windows(picture.shape[2:], kernel, strides, (1, 1), widths, ceil_mode)
        total = ops.sum_pool(picture, kernel, strides, (1, 1), sides)
        if divisor_override is not None:
            return back(total * (1.0 / divisor_override), x, spatial)
        # What a window counts: the image, and the declared padding if asked, but never the overhang.
        counted = np.pad(np.ones(picture.shape[2:]), [(p, p) for p in widths], constant_values=float(count_include_pad))
        ones = ops.reshape(x.trace.constant(counted, x.dtype), (1, 1, *counted.shape))
        hang = (0, max(0, sides[1] - widths[0]), 0, max(0, sides[3] - widths[1]))
        return back(total / ops.sum_pool(ones, kernel, strides, (1, 1), hang), x, spatial)

    return ours


MAPS["nn.functional.avg_pool1d"], MAPS["nn.functional.avg_pool2d"] = (
    Mapping(_average_pool(1)),
    Mapping(_average_pool(2)),
)


@said("nn.functional.unfold", only=lambda x, *_: x.ndim == 4, why="images have four axes")
def unfold_image(x: Value, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Value:
    (kh, kw), (dy, dx), (top, left), (sy, sx) = (pair(n) for n in (kernel_size, dilation, padding, stride))
    n, c = x.shape[:2]
    x = ops.pad(x, (0, 0, top, left), (0, 0, top, left), 0.0)
    rows = (x.shape[2] - dy * (kh - 1) - 1) // sy + 1
    columns = (x.shape[3] - dx * (kw - 1) - 1) // sx + 1
    parts = []
    for top, left in np.ndindex(kh, kw):
        start = (0, 0, top * dy, left * dx)
        end = (n, c, start[2] + (rows - 1) * sy + 1, start[3] + (columns - 1) * sx + 1)
        parts.append(ops.reshape(ops.slice_(x, start, end, (1, 1, sy, sx)), (n, c, 1, rows * columns)))
    return ops.reshape(ops.concatenate(parts, 2), (n, c * kh * kw, rows * columns))
