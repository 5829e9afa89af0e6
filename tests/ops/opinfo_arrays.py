"""PyTorch's reductions, views, index functions, products, convolutions, pooling and norms, said in our ops.

Every function takes what the PyTorch function of the same name takes, with values in place of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.enums import SampleMode
from mlcompute.layers.upsample import UpsampleLayer
from mlcompute.ops.op import Value
from tests.ops.opinfo_maps import MAPS, Mapping, said

Dims = int | Sequence[int] | None


def axes_of(x: Value, dim: Dims) -> tuple[int, ...]:
    """PyTorch's dim as our axes: None and () are all of them, and a number may be given to rank 0 too."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.rank))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.rank for d in dims) if x.rank else ()


def dropped(y: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """y without its reduced axes, unless they stay."""
    return y if keepdim else ops.reshape(y, (n for axis, n in enumerate(y.shape) if axis not in axes))


def constant(like: Value, array: Any) -> Value:
    return like.trace.constant(array)


def ranked(x: Value) -> Value:
    """x, with one axis when it has none."""
    return x if x.rank else ops.reshape(x, (1,))


# Reductions -----------------------------------------------------------------------------------------------------------


def _reduction(fn: Callable[[Value, tuple[int, ...]], Value]) -> Mapping:
    def ours(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
        axes = axes_of(x, dim)
        return dropped(fn(x, axes), axes, keepdim)

    return Mapping(ours)


def _present(x: Value) -> Value:
    return ops.select(ops.not_equal(x, x), 0.0, x)


def _nanmean(x: Value, axes: tuple[int, ...]) -> Value:
    return ops.sum_(_present(x), axes) / ops.sum_(ops.convert(ops.equal(x, x), x.dtype), axes)


def _logsumexp(x: Value, axes: tuple[int, ...]) -> Value:
    top = ops.stop_gradient(ops.max_(x, axes))
    return ops.log(ops.sum_(ops.exp(x - top), axes)) + top


MAPS["sum"] = _reduction(ops.sum_)
MAPS["mean"] = _reduction(ops.mean)
MAPS["amax"] = MAPS["max.reduction_no_dim"] = _reduction(ops.max_)
MAPS["amin"] = MAPS["min.reduction_no_dim"] = _reduction(ops.min_)
MAPS["any"] = _reduction(ops.any_)
MAPS["all"] = _reduction(ops.all_)
MAPS["nansum"] = _reduction(lambda x, axes: ops.sum_(_present(x), axes))
MAPS["nanmean"] = _reduction(_nanmean)
MAPS["logsumexp"] = _reduction(_logsumexp)
MAPS["count_nonzero"] = _reduction(
    lambda x, axes: ops.sum_(ops.convert(ops.not_equal(x, 0.0), np.dtype(np.int64)), axes)
)


@said("aminmax")
def aminmax(x: Value, dim: Dims = None, keepdim: bool = False) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    return dropped(ops.min_(x, axes), axes, keepdim), dropped(ops.max_(x, axes), axes, keepdim)


def _index(name: str) -> Mapping:
    def ours(x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        flat = ops.reshape(x, (x.size,)) if dim is None else ranked(x)
        axis = 0 if dim is None else dim % flat.rank
        found = ops.emit(name, flat, axis=axis)
        return ops.reshape(found, ()) if dim is None or not x.rank else dropped(found, (axis,), keepdim)

    return Mapping(ours)


def _extreme(name: str) -> Mapping:
    def ours(x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        flat = ranked(x)
        axis = dim % flat.rank
        index = ops.emit(name, flat, axis=axis)
        pair = ops.gather(flat, index, axis), index
        if not x.rank:
            return ops.reshape(pair[0], ()), ops.reshape(index, ())
        return dropped(pair[0], (axis,), keepdim), dropped(index, (axis,), keepdim)

    return Mapping(ours)


MAPS["argmax"], MAPS["argmin"] = _index("argmax"), _index("argmin")
MAPS["max.reduction_with_dim"], MAPS["min.reduction_with_dim"] = _extreme("argmax"), _extreme("argmin")


@said("var_mean", "var_mean.unbiased")
def var_mean(
    x: Value, dim: Any = None, unbiased: bool | None = None, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    axes = axes_of(x, dim)
    centre = ops.mean(x, axes)
    count = x.size // centre.size
    spread = ops.sum_((x - centre) * (x - centre), axes) * (1.0 / (count - correction))
    return dropped(spread, axes, keepdim), dropped(centre, axes, keepdim)


MAPS["var"] = MAPS["var.unbiased"] = Mapping(lambda *a, **k: var_mean(*a, **k)[0])
MAPS["std"] = MAPS["std.unbiased"] = Mapping(lambda *a, **k: ops.sqrt(var_mean(*a, **k)[0]))


@said("std_mean", "std_mean.unbiased")
def std_mean(*args: Any, **settings: Any) -> tuple[Value, Value]:
    spread, centre = var_mean(*args, **settings)
    return ops.sqrt(spread), centre


def p_norm(x: Value, p: Any, axes: tuple[int, ...]) -> Value:
    """(sum |x|^p)^(1/p) with the axes kept; the limits for 0 and both infinities."""
    size = ops.abs_(x)
    if p in (None, "fro", 2):
        return ops.sqrt(ops.sum_(x * x, axes))
    if p == math.inf or p == -math.inf:
        return ops.max_(size, axes) if p > 0 else ops.min_(size, axes)
    if p == 0:
        return ops.sum_(ops.convert(ops.not_equal(x, 0.0), x.dtype), axes)
    return ops.sum_(size, axes) if p == 1 else ops.pow_(ops.sum_(ops.pow_(size, p), axes), 1.0 / p)


@said("norm", "norm.fro", "norm.inf", "linalg.vector_norm")
def norm(x: Value, ord: Any = 2, dim: Dims = None, keepdim: bool = False) -> Value:
    axes = axes_of(x, dim)
    return dropped(p_norm(x, ord, axes), axes, keepdim)


@said("dist", only=lambda x, y, p: bool((x != y).any()), why="at distance 0 the formula has no slope")
def dist(x: Value, y: Value, p: Any = 2) -> Value:
    return norm(x - y, p)


@said("cdist", only=lambda x, y, p=2.0, mode="": bool((x.unsqueeze(-2) != y.unsqueeze(-3)).all()),
      why="at distance 0 the formula has no slope")  # fmt: skip
def cdist(x: Value, y: Value, p: float = 2.0, mode: str = "") -> Value:
    rows = ops.reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    columns = ops.reshape(y, (*y.shape[:-2], 1, *y.shape[-2:]))
    return norm(rows - columns, p, -1)


@said("nn.functional.pairwise_distance")
def pairwise_distance(x: Value, y: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Value:
    return norm(x - y + eps, p, -1, keepdim)


@said("nn.functional.normalize", only=lambda x, p=2.0, dim=1, eps=1e-12: p != 0 and x.ndim > 0,
      why="counts have no slope")  # fmt: skip
def normalize(x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Value:
    return x / ops.maximum(p_norm(x, p, axes_of(x, dim)), eps)


def _along(fn: Callable[[Value, int], Value]) -> Mapping:
    def ours(x: Value, dim: int, dtype: Any = None) -> Value:
        return ops.reshape(fn(ranked(x), dim), x.shape)

    return Mapping(ours)


MAPS["softmax"] = MAPS["softmax.with_dtype"] = _along(ops.softmax)
MAPS["log_softmax"] = MAPS["log_softmax.with_dtype"] = _along(ops.log_softmax)
MAPS["nn.functional.softmin"] = MAPS["nn.functional.softmin.with_dtype"] = _along(lambda x, dim: ops.softmax(-x, dim))

# Views ----------------------------------------------------------------------------------------------------------------


def shaped(x: Value, *shape: Any) -> Value:
    extents = list(shape[0] if shape and not isinstance(shape[0], int) else shape)
    if -1 in extents:
        extents[extents.index(-1)] = x.size // math.prod(n for n in extents if n != -1)
    return ops.reshape(x, extents)


for _name in ("reshape", "view", "view_copy"):
    MAPS[_name] = Mapping(shaped)
for _name in ("reshape_as", "view_as"):
    MAPS[_name] = Mapping(lambda x, other: ops.reshape(x, other.shape))
MAPS["ravel"] = Mapping(lambda x: ops.reshape(x, (x.size,)))
MAPS["atleast_1d"] = Mapping(lambda *xs: _each(xs, lambda x: ranked(x)))
MAPS["atleast_2d"] = Mapping(lambda *xs: _each(xs, lambda x: ops.reshape(x, (1,) * (2 - x.rank) + x.shape)))


def _each(xs: Sequence[Any], fn: Callable[[Value], Value]) -> Any:
    listed = xs[0] if isinstance(xs[0], (list, tuple)) else xs
    return fn(xs[0]) if listed is xs and len(xs) == 1 else [fn(x) for x in listed]


@said("flatten")
def flatten(x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    x = ranked(x)
    start, end = start_dim % x.rank, end_dim % x.rank
    return ops.reshape(x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


@said("unflatten")
def unflatten(x: Value, dim: int, sizes: Sequence[int]) -> Value:
    axis = dim % x.rank
    inner = list(sizes)
    if -1 in inner:
        inner[inner.index(-1)] = x.shape[axis] // math.prod(n for n in inner if n != -1)
    return ops.reshape(x, (*x.shape[:axis], *inner, *x.shape[axis + 1 :]))


@said("squeeze", "squeeze.multiple", "squeeze_copy")
def squeeze(x: Value, dim: Any = None) -> Value:
    axes = range(x.rank) if dim is None else [d % x.rank for d in ([dim] if isinstance(dim, int) else dim) if x.rank]
    return ops.reshape(x, (n for axis, n in enumerate(x.shape) if n != 1 or axis not in axes))


@said("unsqueeze", "unsqueeze_copy")
def unsqueeze(x: Value, dim: int) -> Value:
    axis = dim % (x.rank + 1)
    return ops.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


@said("permute", "permute_copy")
def permute(x: Value, dims: Sequence[int]) -> Value:
    return ops.transpose(x, (d % x.rank for d in dims))


@said("transpose", "transpose_copy")
def transpose(x: Value, a: int, b: int) -> Value:
    order = list(range(x.rank))
    if order:
        order[a], order[b] = order[b], order[a]
    return ops.transpose(x, order)


for _name in ("t", "t_copy", "T", "H", "mT", "mH"):
    MAPS[_name] = Mapping(lambda x: x if x.rank < 2 else ops.transpose(x))


@said("movedim")
def movedim(x: Value, source: Sequence[int], destination: Sequence[int]) -> Value:
    # NumPy's answer for an array whose extents are its axes' numbers.
    numbered = np.broadcast_to(np.empty(()), tuple(range(1, x.rank + 1)))
    return ops.transpose(x, (extent - 1 for extent in np.moveaxis(numbered, source, destination).shape))


@said("expand", "expand_copy", "broadcast_to")
def expand(x: Value, sizes: Sequence[int]) -> Value:
    own = (1,) * (len(sizes) - x.rank) + x.shape
    return ops.broadcast(x, (n if size == -1 else size for size, n in zip(sizes, own, strict=True)))


MAPS["expand_as"] = Mapping(lambda x, other: ops.broadcast(x, other.shape))
MAPS["sum_to_size"] = Mapping(
    lambda x, *shape: ops.sum_to(x, tuple(shape[0] if shape and not isinstance(shape[0], int) else shape))
)


@said("narrow", "narrow_copy", only=lambda x, dim, start, length: isinstance(start, int) and length > 0,
      why="places are known when the program is built; no empty values")  # fmt: skip
def narrow(x: Value, dim: int, start: int, length: int) -> Value:
    start %= x.shape[dim]
    return ops.slice_axis(x, dim % x.rank, start, start + length)


@said("select")
def select(x: Value, dim: int, index: int) -> Value:
    axis = dim % x.rank
    start = index % x.shape[axis]
    return dropped(ops.slice_axis(x, axis, start, start + 1), (axis,), False)


@said("slice")
def slice_(x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    starts, ends, steps = [0] * x.rank, list(x.shape), [1] * x.rank
    starts[dim], ends[dim], steps[dim] = slice(start, end, step).indices(x.shape[dim])
    return ops.slice_(x, starts, ends, steps)


def _cut(x: Value, axis: int, lengths: Sequence[int]) -> list[Value]:
    ends = np.cumsum(lengths)
    return [ops.slice_axis(x, axis % x.rank, int(e - n), int(e)) for n, e in zip(lengths, ends, strict=True)]


@said("split", "unsafe_split", "split.list_args", "split_with_sizes", "split_with_sizes_copy")
def split(x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    extent = x.shape[dim]
    lengths = [min(sizes, extent - at) for at in range(0, extent, sizes)] if isinstance(sizes, int) else sizes
    return _cut(x, dim, lengths)


@said("chunk", "unsafe_chunk")
def chunk(x: Value, chunks: int, dim: int = 0) -> list[Value]:
    return split(x, -(-x.shape[dim] // chunks), dim)


@said("unbind", "unbind_copy")
def unbind(x: Value, dim: int = 0) -> list[Value]:
    return [select(x, dim, index) for index in range(x.shape[dim])]


@said("diff", only=lambda x, n=1, dim=-1, prepend=None, append=None: n > 0 and x.ndim > 0 and
      n < x.shape[dim] + sum(0 if more is None else more.shape[dim] for more in (prepend, append)),
      why="something must be left to subtract")  # fmt: skip
def diff(x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None) -> Value:
    x = ops.concatenate([part for part in (prepend, x, append) if part is not None], dim)
    axis = dim % x.rank
    for _ in range(n):
        last = x.shape[axis]
        x = ops.slice_axis(x, axis, 1, last) - ops.slice_axis(x, axis, 0, last - 1)
    return x


def _joined(axis: int, rank: int) -> Mapping:
    """Concatenate along an axis after giving every value at least `rank` axes, new ones as NumPy's stacks do."""

    def ours(xs: Sequence[Value]) -> Value:
        grown = [ops.reshape(x, np.empty(x.shape)[(None,) * max(0, rank - x.rank)].shape) for x in xs]
        return ops.concatenate(grown, axis if grown[0].rank > axis else 0)

    return Mapping(ours)


MAPS["hstack"], MAPS["vstack"] = _joined(1, 1), _joined(0, 2)


@said("cat", only=lambda xs, dim=0: len({x.ndim for x in xs}) == 1, why="ranks are equal")
def cat(xs: Sequence[Value], dim: int = 0) -> Value:
    return ops.concatenate(xs, dim)


@said("stack")
def stack(xs: Sequence[Value], dim: int = 0) -> Value:
    return ops.concatenate([unsqueeze(x, dim) for x in xs], dim % (xs[0].rank + 1))


@said("repeat", "tile", only=lambda x, reps: 0 not in reps, why="no empty values")
def repeat(x: Value, reps: Sequence[int]) -> Value:
    rank = max(x.rank, len(reps))
    own, times = (1,) * (rank - x.rank) + x.shape, (1,) * (rank - len(reps)) + tuple(reps)
    between = ops.reshape(x, (k for n in own for k in (1, n)))
    wide = ops.broadcast(between, (k for n, t in zip(own, times, strict=True) for k in (t, n)))
    return ops.reshape(wide, (n * t for n, t in zip(own, times, strict=True)))


@said("meshgrid.variadic_tensors", "meshgrid.list_of_tensors")
def meshgrid(*xs: Any, indexing: str = "ij") -> list[Value]:
    listed: Sequence[Value] = xs[0] if isinstance(xs[0], (list, tuple)) else xs
    shape = tuple(x.size for x in listed)
    grids = [
        ops.broadcast(ops.reshape(x, (x.size if axis == at else 1 for axis in range(len(shape)))), shape)
        for at, x in enumerate(listed)
    ]
    return [transpose(grid, 0, 1) for grid in grids] if indexing == "xy" and len(shape) > 1 else grids


@said("flip")
def flip(x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        x = ops.take(x, constant(x, np.arange(x.shape[dim])[::-1]), dim)
    return x


MAPS["fliplr"] = Mapping(lambda x: flip(x, [1]))
MAPS["flipud"] = Mapping(lambda x: flip(x, [0]))


@said("roll", only=lambda x, shifts, dims=(): x.ndim > 0, why="rank 0 has nothing to roll")
def roll(x: Value, shifts: Any, dims: Any = ()) -> Value:
    if dims == ():
        return ops.reshape(roll(ops.reshape(x, (x.size,)), shifts, 0), x.shape)
    pairs = [(shifts, dims)] if isinstance(dims, int) else zip(shifts, dims, strict=True)
    for shift, dim in pairs:
        x = ops.take(x, constant(x, np.roll(np.arange(x.shape[dim]), shift)), dim)
    return x


@said("rot90")
def rot90(x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    for _ in range(k % 4):
        x = transpose(flip(x, [dims[1]]), dims[0], dims[1])
    return x


def _flat_positions(x: Value, pick: Callable[[Any], Any]) -> Value:
    """Elements of x that NumPy's `pick` would take, found by their row-major positions."""
    positions = pick(np.arange(x.size).reshape(x.shape))
    return ops.take(ops.reshape(x, (x.size,)), constant(x, positions), 0)


@said("diagonal", "diagonal_copy", only=lambda x, **k: x.diagonal(**k).numel() > 0, why="no empty values")
def diagonal(x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return _flat_positions(x, lambda at: np.diagonal(at, offset, dim1, dim2))


@said("trace")
def trace(x: Value) -> Value:
    return ops.reshape(ops.sum_(diagonal(x), (0,)), ())


@said("unfold", "unfold_copy", only=lambda x, dim, size, step: x.ndim > 0 and size > 0, why="there is an axis to cut")
def unfold(x: Value, dim: int, size: int, step: int) -> Value:
    axis = dim % x.rank
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = ops.take(x, constant(x, starts[:, None] + np.arange(size)), axis)
    order = [a for a in range(windows.rank) if a != axis + 1]
    return ops.transpose(windows, [*order, axis + 1])


def _triangle(keep: Callable[..., Any]) -> Mapping:
    return Mapping(
        lambda x, diagonal=0: ops.select(constant(x, keep(np.ones(x.shape[-2:], np.bool_), diagonal)), x, 0.0)
    )


MAPS["tril"], MAPS["triu"] = _triangle(np.tril), _triangle(np.triu)


@said("nn.functional.pixel_shuffle")
def pixel_shuffle(x: Value, upscale_factor: int) -> Value:
    r = upscale_factor
    *lead, c, h, w = x.shape
    n = len(lead)
    parts = ops.reshape(x, (*lead, c // r**2, r, r, h, w))
    moved = ops.transpose(parts, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return ops.reshape(moved, (*lead, c // r**2, h * r, w * r))


@said("nn.functional.pixel_unshuffle")
def pixel_unshuffle(x: Value, downscale_factor: int) -> Value:
    r = downscale_factor
    *lead, c, h, w = x.shape
    n = len(lead)
    parts = ops.reshape(x, (*lead, c, h // r, r, w // r, r))
    moved = ops.transpose(parts, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return ops.reshape(moved, (*lead, c * r**2, h // r, w // r))


@said("nn.functional.channel_shuffle")
def channel_shuffle(x: Value, groups: int) -> Value:
    n, c, *rest = x.shape
    parts = ops.reshape(x, (n, groups, c // groups, *rest))
    return ops.reshape(transpose(parts, 1, 2), x.shape)


# Padding and upsampling -------------------------------------------------------------------------------------------------


@said("nn.functional.pad.constant", "constant_pad_nd")
def pad(x: Value, widths: Sequence[int], *rest: Any) -> Value:
    value = rest[-1] if rest and not isinstance(rest[-1], str) else 0.0
    before, after = [0] * x.rank, [0] * x.rank
    for k in range(len(widths) // 2):
        before[-1 - k], after[-1 - k] = widths[2 * k], widths[2 * k + 1]
    # Negative widths cut.
    starts = [max(0, -b) for b in before]
    ends = [n - max(0, -a) for n, a in zip(x.shape, after, strict=True)]
    cut = ops.slice_(x, starts, ends)
    return ops.pad(cut, (max(0, b) for b in before), (max(0, a) for a in after), value)


@said("nn.functional.pad.reflect", "nn.functional.pad.replicate", "nn.functional.pad.circular",
      "nn.functional.pad.replicate_negative", only=lambda x, widths, mode: mode == "replicate" or min(widths) >= 0,
      why="cutting a circle has a meaning of PyTorch's own")  # fmt: skip
def pad_with_own(x: Value, widths: Sequence[int], mode: str) -> Value:
    for k in range(len(widths) // 2):
        axis, (before, after) = x.rank - 1 - k, widths[2 * k : 2 * k + 2]
        n = x.shape[axis]
        places = np.arange(-before, n + after)
        if mode == "reflect":
            places = n - 1 - np.abs(n - 1 - np.abs(places))
        elif mode == "replicate":
            places = np.clip(places, 0, n - 1)
        else:
            places = places % n
        x = ops.take(x, constant(x, places), axis)
    return x


def _grows(x: Any, size: Any = None, scale_factor: Any = None, recompute_scale_factor: Any = None, **_: Any) -> bool:
    if size is None and not recompute_scale_factor:
        return False
    sizes = _result_sizes(x.shape[2:], size, scale_factor)
    return len(sizes) <= 2 and all(new >= old for new, old in zip(sizes, x.shape[2:], strict=True))


def _result_sizes(extents: Sequence[int], size: Any, scale: Any) -> list[int]:
    if size is None:
        scales = scale if isinstance(scale, (list, tuple)) else [scale] * len(extents)
        return [math.floor(n * s) for n, s in zip(extents, scales, strict=True)]
    return list(size) if isinstance(size, (list, tuple)) else [size] * len(extents)


@said("nn.functional.interpolate.nearest", "nn.functional.interpolate.linear", "nn.functional.interpolate.bilinear",
      "nn.functional.upsample_nearest", "nn.functional.upsample_bilinear", only=_grows,
      why="the upsample layer enlarges one or two axes to a size, and computes the scale from it")  # fmt: skip
def interpolate(
    x: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None, **_: Any
) -> Value:
    sizes = _result_sizes(x.shape[2:], size, scale_factor)
    kind = SampleMode.NEAREST if mode == "nearest" else SampleMode.LINEAR
    answer = UpsampleLayer(sizes, kind, bool(align_corners)).forward(None, x)  # type: ignore[arg-type]
    assert isinstance(answer, Value)
    return answer


MAPS["nn.functional.upsample_bilinear"] = Mapping(
    lambda x, size=None, scale_factor=None: interpolate(x, size, scale_factor, "bilinear", True),
    lambda x, size=None, scale_factor=None: _grows(x, size, scale_factor, True) and (
        size is not None or all(n * scale_factor % 1 == 0 for n in x.shape[2:])),
    "as for interpolate",
)  # fmt: skip

# Index functions --------------------------------------------------------------------------------------------------------


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


# Products ---------------------------------------------------------------------------------------------------------------


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


# Convolution and pooling ------------------------------------------------------------------------------------------------


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


# Normalization ----------------------------------------------------------------------------------------------------------


def _positive_epsilon(*args: Any, eps: float = 1e-5, **_: Any) -> bool:
    return eps > 0 and not (args and isinstance(args[-1], float) and args[-1] <= 0)


def _scaled(y: Value, weight: Value | None, bias: Value | None, shape: Sequence[int]) -> Value:
    if weight is not None:
        y = y * ops.reshape(weight, shape)
    return y if bias is None else y + ops.reshape(bias, shape)


@said("native_layer_norm", only=_positive_epsilon, why="a negative epsilon takes roots of negative numbers")
def native_layer_norm(
    x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    y, centre, variance = ops.normalize(x, range(x.rank - len(shape), x.rank), eps)
    return _scaled(y, weight, bias, shape), centre, ops.rsqrt(variance + eps)


@said("nn.functional.layer_norm", only=_positive_epsilon, why="a negative epsilon takes roots of negative numbers")
def layer_norm(x: Value, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Value:
    return native_layer_norm(x, shape, weight, bias, eps)[0]


@said("nn.functional.rms_norm", only=_positive_epsilon, why="a negative epsilon takes roots of negative numbers")
def rms_norm(x: Value, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Value:
    axes = range(x.rank - len(shape), x.rank)
    # PyTorch's default is the distance from 1 to the next number of the type.
    epsilon = float(np.finfo(x.dtype).eps) if eps is None else eps
    return _scaled(x * ops.rsqrt(ops.mean(x * x, axes) + epsilon), weight, None, shape)


@said("nn.functional.group_norm", only=_positive_epsilon, why="a negative epsilon takes roots of negative numbers")
def group_norm(x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Value:
    n, c, *rest = x.shape
    parts = ops.reshape(x, (n, groups, x.size // (n * groups)))
    y = ops.reshape(ops.normalize(parts, (2,), eps)[0], x.shape)
    return _scaled(y, weight, bias, (c, *(1,) * len(rest)))


@said("nn.functional.batch_norm", "nn.functional.batch_norm.without_cudnn",
      only=lambda x, mean, var, *_, training=False, **__: x.ndim > 1 and
      (training or (not mean.requires_grad and bool((var > 0).all()))),
      why="images and rows; running variances are positive")  # fmt: skip
def batch_norm(
    x: Value, mean: Value, var: Value, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Value:  # fmt: skip
    channel = (x.shape[1], *(1,) * (x.rank - 2))
    if training:
        y = ops.normalize(x, [axis for axis in range(x.rank) if axis != 1], eps)[0]
    else:
        y = (x - ops.reshape(mean, channel)) * ops.rsqrt(ops.reshape(var, channel) + eps)
    return _scaled(y, weight, bias, channel)


@said("nn.functional.instance_norm", only=lambda x, use_input_stats=True, **_: use_input_stats, why="own statistics")
def instance_norm(x: Value, weight: Any = None, bias: Any = None, eps: float = 1e-5, **_: Any) -> Value:
    y = ops.normalize(x, range(2, x.rank), eps)[0]
    return _scaled(y, weight, bias, (x.shape[1], *(1,) * (x.rank - 2)))


@said("nn.functional.local_response_norm")
def local_response_norm(x: Value, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Value:
    n, c = x.shape[:2]
    squares = ops.reshape(x * x, (n, 1, c, x.size // (n * c)))
    total = ops.sum_pool(squares, (size, 1), (1, 1), (1, 1), (size // 2, (size - 1) // 2, 0, 0))
    return x / ops.pow_(ops.reshape(total, x.shape) * (alpha / size) + k, beta)
