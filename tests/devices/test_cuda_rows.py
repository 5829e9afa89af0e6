"""Reductions, softmax, normalization and pooling on the CUDA engine, in emulation: what they mean, for any layout."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cuda.codegen import kernel_source, lanes
from mlcompute.ops.op import Array, Value
from mlcompute.ops.views import broadcast, slice_, transpose
from tests.devices.cuda_emulator.bench import check, needs_engine, op, run

pytestmark = needs_engine

FOLDS = ("sum", "max", "min", "any", "all")
EXTREMES = ("argmax", "argmin")
#: Extents of 1, primes, rows that fit a warp and a block, and empty ones where that has an answer.
SHAPES = [(1,), (5, 7), (33, 17), (2, 3, 4), (9, 1, 12), (2, 2050), (70, 36)]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def all_axes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [axes for r in range(len(shape) + 1) for axes in itertools.combinations(range(len(shape)), r)]


@pytest.fixture
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are cut into splits, too."""
    monkeypatch.setattr(lanes, "WORTH_SPLITS", 64)
    monkeypatch.setattr(lanes, "LEAST_ITERATIONS", 1)
    monkeypatch.setattr(lanes, "FEW_FOR_BLOCK", 0)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices have 64 bits, as for huge values."""
    monkeypatch.setattr(kernel_source, "NARROW", 0)


# Reductions -----------------------------------------------------------------------------------------------------------


def test_folds_over_any_axes() -> None:
    for shape in SHAPES:
        for axes in all_axes(shape):
            check(lambda x, a=axes: [op(name, axes=a)(x)[0] for name in FOLDS], normal(*shape), scale=2)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.int64, np.uint8, np.int8, np.bool_])
def test_folds_of_any_type(dtype: Any) -> None:
    x = (20 * normal(12, 40)).astype(dtype) if dtype is not np.bool_ else normal(12, 40) > 1
    for axis in (0, 1):
        check(lambda x, a=axis: [op(name, axes=(a,))(x)[0] for name in FOLDS], x, scale=4)
        check(lambda x, a=axis: [op(name, axis=a)(x)[0] for name in EXTREMES], x)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize(("shape", "axes"), [((5001,), (0,)), ((900, 3), (0,)), ((40, 7, 300), (0, 2))])
def test_splits(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = normal(*shape)
    for name in ("sum", "max", "any"):
        _, _, executable = run(op(name, axes=axes), [x])
        assert "splits" in ", ".join(executable.kernels.values())
        check(op(name, axes=axes), x, scale=4)
    if len(axes) == 1:
        check(op("argmax", axis=axes[0]), x)


@pytest.mark.parametrize("shape", [(512, 128), (900, 3), (2048, 20)])
def test_columns_in_large_blocks(shape: tuple[int, ...]) -> None:
    """A bias's gradient: one launch."""
    _, _, executable = run(op("sum", axes=(0,)), [normal(*shape)])
    assert list(executable.kernels.values()) == ["sum of columns"]
    check(op("sum", axes=(0,)), normal(*shape), scale=8)
    check(op("argmax", axis=0), normal(*shape))


def test_nothing_has_a_sum() -> None:
    for name in ("sum", "any", "all"):
        check(op(name, axes=(0,)), normal(0, 5))
        check(op(name, axes=(1,)), normal(0, 5))


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_wins_and_the_first_counts(axis: int) -> None:
    x = np.round(normal(40, 37))
    x[3:9, 5:9] = np.nan
    check(lambda v: [op(name, axes=(axis,))(v)[0] for name in FOLDS], x)
    for array in (x, np.zeros_like(x), np.full_like(x, np.inf), np.full_like(x, -np.inf)):
        check(lambda v: [op(name, axis=axis)(v)[0] for name in EXTREMES], array)


def test_long_sums_are_accurate() -> None:
    rng = np.random.default_rng(1)
    for x, axes in (
        (np.ones(300_001, np.float32), (0,)),
        (rng.random((100_000, 4), np.float32), (0,)),
        (rng.random((300, 100, 10), np.float32), (0, 1)),
    ):
        (found,), _, _ = run(op("sum", axes=axes), [x], times=1)
        exact = np.sum(x, axis=axes, keepdims=True, dtype=np.float64)
        assert np.max(np.abs(found - exact) / exact) < 1e-6


def views_of(x: Value) -> list[Value]:
    """Of a value (8, 12, 10), views that are (12, 10, 8), (4, 6, 10), (3, 12, 10)."""
    return [
        transpose(x, (1, 2, 0)),
        slice_(x, (1, 0, 0), (8, 12, 10), (2, 2, 1)),
        broadcast(slice_(x, (2, 0, 0), (3, 12, 10)), (3, 12, 10)),
    ]


def some_of(x: Value, axes: tuple[int, ...]) -> list[Value]:
    return [
        *op("sum", axes=axes)(x),
        *op("normalize", axes=axes, epsilon=1e-3)(x),
        *op("softmax", axis=axes[0])(x),
    ]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_views(number: int) -> None:
    x = normal(8, 12, 10)
    for axes in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        check(lambda v, a=axes: some_of(views_of(v)[number], a), x, scale=4)


@pytest.mark.usefixtures("wide")
def test_wide_indices() -> None:
    x = normal(4, 6, 10)
    for axes in ((0, 2), (1,)):
        check(op("sum", axes=axes), x, scale=2)
        check(op("normalize", axes=axes, epsilon=1e-3), x, scale=4)
    check(op("argmax", axis=1), x)
    check(op("log_softmax", axis=2), x)
    check(op("max_pool_gradient", **windows((2, 2))), normal(1, 2, 4, 4), normal(1, 2, 5, 5))


# Softmax --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name: str) -> None:
    for shape in ((1, 1), (5, 7), (64, 10), (3, 5, 12), (3, 2049), (2, 9001), (300, 36)):
        check(lambda x: [op(name, axis=axis)(x)[0] for axis in range(len(x.shape))], 5 * normal(*shape), scale=2)
    for dtype in (np.float16, np.float64):
        check(op(name, axis=1), normal(3, 40, dtype=dtype))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("length", [40, 20_000])
def test_softmax_of_extremes(name: str, length: int) -> None:
    x = normal(8, length)
    x[0, 3] = np.inf
    x[1, 30] = np.nan
    x[2, :-1] = -np.inf
    x[3] = -np.inf
    x[4, 5] = 3e38
    x[5] = -3e38
    check(op(name, axis=1), x, scale=4)
    check(op(name, axis=0), np.ascontiguousarray(x.T[:500]), scale=4)


# Normalization --------------------------------------------------------------------------------------------------------

#: Layer, batch (first and last), group and instance norm; short and long, in splits and in registers.
NORMS = [
    ((6, 40), (1,)), ((2, 5000), (1,)), ((4, 3, 5, 6), (0, 2, 3)), ((4, 5, 6, 8), (0, 1, 2)), ((3, 7, 11), (1, 2)),
    ((3, 16, 9), (2,)), ((5, 1), (1,)), ((1, 7), (0,)), ((300, 12), (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "axes"), NORMS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_normalize(shape: tuple[int, ...], axes: tuple[int, ...], scaled: bool) -> None:
    x, dy = 3 + 2 * normal(*shape), normal(*shape, seed=1)
    y, _, variance = check(op("normalize", axes=axes, epsilon=1e-5), x, scale=8)
    more = [normal(*variance.shape, seed=2)] if scaled else []
    check(op("normalize_gradient", axes=axes, epsilon=1e-5), dy, y, variance, *more, scale=16)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize(("shape", "axes"), [((9, 3, 30, 32), (0, 2, 3)), ((9, 5, 26, 12), (0, 1, 2))])
def test_normalize_in_splits(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = 3 + 2 * normal(*shape)
    _, _, executable = run(op("normalize", axes=axes, epsilon=1e-5), [x])
    assert "splits" in ", ".join(executable.kernels.values())
    test_normalize(shape, axes, True)


@pytest.mark.parametrize(("shape", "axes"), [((4, 64), (1,)), ((3, 20_000), (1,)), ((4000, 8), (0,))], ids=str)
def test_large_means_lose_nothing(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = normal(*shape) + np.float32(4096)
    found, _, _ = run(op("normalize", axes=axes, epsilon=0.0), [x], times=1)
    exact = x.astype(np.float64)
    mean, deviation = exact.mean(axes, keepdims=True), exact.std(axes, keepdims=True)
    assert np.max(np.abs(found[0] - (exact - mean) / deviation)) < 1e-5
    assert np.max(np.abs(found[1] - mean)) <= 2.0**-12
    assert np.max(np.abs(found[2] / deviation**2 - 1)) < 1e-5


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_normalize_other_types(dtype: Any) -> None:
    check(op("normalize", axes=(1,), epsilon=1e-3), normal(4, 20, dtype=dtype), scale=4)


# Pooling --------------------------------------------------------------------------------------------------------------


def windows(
    kernel: tuple[int, int],
    strides: tuple[int, int] = (1, 1),
    dilations: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> dict[str, Any]:
    return {"kernel": kernel, "strides": strides, "dilations": dilations, "padding": padding}


POOLS = [
    windows((2, 2), (2, 2)), windows((3, 3), (2, 1), (1, 1), (1, 0, 1, 1)),
    windows((2, 3), (1, 2), (3, 2), (2, 1, 0, 3)),
    windows((1, 1), (3, 3)), windows((7, 8), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pooling(pool: dict[str, Any], last: bool) -> None:
    for channels in (4, 3):
        image = (2, channels, 7, 8)
        attributes = {**pool, "channels_last": True} if last else pool
        # Few different numbers: the first of several equal ones counts.
        x = np.round(normal(*((2, 7, 8, channels) if last else image)))
        x.flat[5::37], x.flat[7::41] = np.nan, -np.inf
        y, places = check(op("max_pool_with_indices", **attributes), x)
        check(op("max_pool", **attributes), x)
        dy = normal(*y.shape, seed=1)
        check(op("max_pool_gradient", **attributes), dy, x)
        check(op("max_pool_indices_gradient", shape=image, **attributes), dy, places)
        check(op("sum_pool", **attributes), normal(*x.shape), scale=2)
        check(op("sum_pool_gradient", shape=image, **attributes), dy)


def test_windows_of_more_places_than_a_byte_counts() -> None:
    pool = windows((17, 16), (1, 1), (1, 1), (2, 0, 0, 1))
    x = normal(1, 2, 16, 18)
    (y,) = check(op("max_pool", **pool), x)
    check(op("max_pool_gradient", **pool), normal(*y.shape), x)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_pooling_of_other_types(dtype: Any) -> None:
    pool, x = {**POOLS[1], "channels_last": True}, normal(2, 7, 8, 6, dtype=dtype)
    (y,) = check(op("max_pool", **pool), x)
    check(op("sum_pool", **pool), x, scale=2)
    check(op("max_pool_gradient", **pool), normal(*y.shape, dtype=dtype), x, scale=2)
