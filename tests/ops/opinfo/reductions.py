"""PyTorch's reductions, norms and normalizations, said in our ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.ops.op import Value
from tests.ops.opinfo.table import MAPS, Dims, Mapping, axes_of, dropped, ranked, said


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


# Normalization -------------------------------------------------------------------------------------------------


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
