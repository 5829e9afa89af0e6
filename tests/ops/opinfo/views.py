"""PyTorch's views, joins, padding and upsampling, said in our ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.enums import SampleMode
from mlcompute.layers.upsample import UpsampleLayer
from mlcompute.ops.op import Value
from tests.ops.opinfo.table import MAPS, Mapping, dropped, ranked, said


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
        x = ops.take(x, x.trace.constant(np.arange(x.shape[dim])[::-1]), dim)
    return x


MAPS["fliplr"] = Mapping(lambda x: flip(x, [1]))
MAPS["flipud"] = Mapping(lambda x: flip(x, [0]))


@said("roll", only=lambda x, shifts, dims=(): x.ndim > 0, why="rank 0 has nothing to roll")
def roll(x: Value, shifts: Any, dims: Any = ()) -> Value:
    if dims == ():
        return ops.reshape(roll(ops.reshape(x, (x.size,)), shifts, 0), x.shape)
    pairs = [(shifts, dims)] if isinstance(dims, int) else zip(shifts, dims, strict=True)
    for shift, dim in pairs:
        x = ops.take(x, x.trace.constant(np.roll(np.arange(x.shape[dim]), shift)), dim)
    return x


@said("rot90")
def rot90(x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    for _ in range(k % 4):
        x = transpose(flip(x, [dims[1]]), dims[0], dims[1])
    return x


def _flat_positions(x: Value, pick: Callable[[Any], Any]) -> Value:
    """Elements of x that NumPy's `pick` would take, found by their row-major positions."""
    positions = pick(np.arange(x.size).reshape(x.shape))
    return ops.take(ops.reshape(x, (x.size,)), x.trace.constant(positions), 0)


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
    windows = ops.take(x, x.trace.constant(starts[:, None] + np.arange(size)), axis)
    order = [a for a in range(windows.rank) if a != axis + 1]
    return ops.transpose(windows, [*order, axis + 1])


def _triangle(keep: Callable[..., Any]) -> Mapping:
    return Mapping(
        lambda x, diagonal=0: ops.select(x.trace.constant(keep(np.ones(x.shape[-2:], np.bool_), diagonal)), x, 0.0)
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


# Padding and upsampling ----------------------------------------------------------------------------------------


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
        x = ops.take(x, x.trace.constant(places), axis)
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
