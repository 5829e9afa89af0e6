"""Reductions on the CPU: what the ops mean, for any axes and layout, whatever the number of threads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.kernels.table import KERNELS, WORKSPACES
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.ops import reductions as ops
from mlcompute.ops.op import TABLE, Array, Value
from mlcompute.ops.views import broadcast, slice_, transpose
from tests.devices.kernels import Bench, run_on_engine
from tests.harness import assert_close

SHAPES: list[tuple[int, ...]] = [
    (), (1,), (7,), (16,), (17,), (33,), (1000,), (1, 1), (5, 7), (64, 10), (33, 17), (2, 3, 4), (8, 16, 5), (9, 1, 9),
    (3, 5, 1, 7), (4, 6, 5, 8), (2, 300, 70),
]  # fmt: skip
#: Large enough to be cut into blocks.
LARGE = [((100_003,), (0,)), ((4500, 16), (0,)), ((30_000, 3), (0,)), ((40, 7, 300), (0, 2)), ((3000, 130), (0,))]
FOLDS = ("sum", "max", "min", "any", "all")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def all_axes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [axes for r in range(len(shape) + 1) for axes in itertools.combinations(range(len(shape)), r)]


def check(name: str, x: Array, scale: float = 1.0, views: Any = None, **attributes: Any) -> None:
    bench = Bench(KERNELS, name, [x], attributes, views=views, workspaces=WORKSPACES)
    bench.check(lambda found, expected: assert_close(found, expected, scale, f"{name} {x.shape} {attributes}"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FOLDS)
def test_folds_over_any_axes(name: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    for number, axes in enumerate(all_axes(shape)):
        check(name, x, axes=axes)
        if name in ("any", "all"):
            check(name, x > 1.5, axes=axes)
            check(name, x > -1.5, axes=axes)
        else:
            check(name, (100 * x).astype(np.int32), axes=axes)
            other = (np.uint8, np.float64, np.int64, np.int8)[(number + len(shape)) % 4]
            check(name, (40 * x).astype(np.int32).astype(other), axes=axes)


@pytest.mark.parametrize(("shape", "axes"), LARGE, ids=str)
@pytest.mark.parametrize("name", FOLDS)
def test_folds_in_blocks(name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = normal(*shape)
    bench = Bench(KERNELS, name, [x], {"axes": axes}, workspaces=WORKSPACES)
    assert bench.entries is not None
    assert len(bench.entries) == 2
    bench.check(lambda found, expected: assert_close(found, expected, 4))  # NumPy's own order of columns rounds more


def test_long_sums_are_accurate() -> None:
    rng = np.random.default_rng(1)
    for x, axes in (
        (np.ones(3_000_001, np.float32), (0,)),
        (rng.random(1_000_000, np.float32), (0,)),
        (rng.random((250_000, 4), np.float32), (0,)),
        (rng.random((1000, 100, 10), np.float32), (0, 1)),
    ):
        (found,) = Bench(KERNELS, "sum", [x], {"axes": axes}, workspaces=WORKSPACES).run()
        exact = np.sum(x, axis=axes, keepdims=True, dtype=np.float64)
        assert np.max(np.abs(found - exact) / exact) < 1e-6


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_nan_wins(name: str, axes: tuple[int, ...]) -> None:
    for place in ((0, 0), (1, 17), (8, 36), (3, 5)):
        x = normal(9, 37)
        x[place] = np.nan
        x[2, 2], x[4, 4] = np.inf, -np.inf
        check(name, x, axes=axes)


def test_not_a_number_is_not_zero() -> None:
    x = np.zeros((3, 20), np.float32)
    x[1, 18], x[2] = np.nan, -0.0
    for name, axes in itertools.product(("any", "all"), ((0,), (1,))):
        check(name, x, axes=axes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_index_of_the_extreme(name: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    for axis in range(len(shape)):
        check(name, x, axis=axis)
        check(name, np.round(x), axis=axis)  # ties: the first
        for dtype in (np.bool_, np.int32):
            check(name, (x > 0).astype(dtype), axis=axis)
        other = (np.uint8, np.float64, np.int64, np.int8)[(axis + shape[0]) % 4]
        check(name, (40 * x).astype(np.int32).astype(other), axis=axis)
        check(name, np.where(x > 1, np.nan, x), axis=axis)
        check(name, np.full(shape, np.inf if name == "argmin" else -np.inf, np.float32), axis=axis)


@pytest.mark.parametrize("shape", [*SHAPES, (70, 130), (2, 21, 65)], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name: str, shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        check(name, normal(*shape), axis=axis)
        check(name, 1000 * normal(*shape), axis=axis)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_what_is_not_a_number(name: str) -> None:
    x = normal(6, 40)
    x[0, 3], x[1, 4], x[2], x[3, 39], x[4, :39] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
    check(name, x, axis=1)
    check(name, np.ascontiguousarray(x.T), axis=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalize(shape: tuple[int, ...]) -> None:
    for axes in all_axes(shape):
        if shape == (4, 6, 5, 8) and axes == (0, 2):
            continue  # two reduced axes with a kept one innermost: left to NumPy
        check("normalize", 3 + normal(*shape), scale=4, axes=axes, epsilon=1e-3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 19), (2, 3000, 20), (40, 12, 11, 16)], ids=str)
def test_normalize_gradient(shape: tuple[int, ...], scaled: bool) -> None:
    for axes in all_axes(shape) if np.prod(shape) < 50_000 else [tuple(range(len(shape) - 1)), (len(shape) - 2,)]:
        if sum(axis + 1 not in axes for axis in axes) > 1 and axes[-1] != len(shape) - 1:
            continue  # two reduced axes with a kept one innermost: left to NumPy
        statistics = tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
        dy, y, v, scale = (
            normal(*shape),
            np.flip(normal(*shape)).copy(),
            normal(*statistics) ** 2,
            normal(*statistics),
        )
        arrays = [dy, y, v + np.float32(0.1), *([scale] if scaled else [])]
        attributes = {"axes": axes, "epsilon": 1e-3}
        bench = Bench(KERNELS, "normalize_gradient", arrays, attributes, workspaces=WORKSPACES)
        exact = TABLE["normalize_gradient"].meaning(*(array.astype(np.float64) for array in arrays), **attributes)
        found = bench.check(lambda found, expected: None)
        rows = np.prod(shape) / np.prod(statistics)
        for mine, wanted in zip(found, exact, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=2e-6 * (1 + np.sqrt(rows)))


@pytest.mark.parametrize("shape", [(4100, 16), (5000, 19), (1500, 100), (2, 3000, 20), (64, 700)], ids=str)
def test_normalize_many_rows(shape: tuple[int, ...]) -> None:
    x = 100 + normal(*shape)  # a mean far from 0: squares must be taken about it
    bench = Bench(KERNELS, "normalize", [x], {"axes": (len(shape) - 2,), "epsilon": 1e-5}, workspaces=WORKSPACES)
    exact = x.astype(np.float64)
    y, mean, variance = bench.run()
    m, v = exact.mean(-2, keepdims=True), exact.var(-2, keepdims=True)
    assert np.abs(mean - m).max() < 4e-5
    assert np.abs(variance / v - 1).max() < 1e-5
    assert np.abs(y - (exact - m) / np.sqrt(v + 1e-5)).max() < 1e-4
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3))


def views_of(x: Value) -> list[tuple[str, Value]]:
    """Ways to look at a value of shape (6, 9, 20) that are not row-major."""
    return [
        ("transposed", transpose(x, (2, 0, 1))),
        ("last two swapped", transpose(x)),
        ("sliced", slice_(x, (1, 0, 2), (5, 9, 20))),
        ("with gaps", slice_(x, (0, 0, 0), (6, 9, 20), (2, 3, 2))),
        ("repeated", broadcast(slice_(x, (0, 0, 0), (6, 1, 20)), (6, 11, 20))),
    ]


@pytest.mark.parametrize("way", range(5))
@pytest.mark.parametrize("name", [*FOLDS, "argmax", "softmax", "log_softmax", "normalize"])
def test_views(name: str, way: int) -> None:
    choices: list[dict[str, Any]] = [{"axis": axis} for axis in range(3)]
    if name in FOLDS:
        choices = [{"axes": axes} for axes in all_axes((0, 0, 0))]
    if name == "normalize":
        choices = [{"axes": axes, "epsilon": 1e-3} for axes in ((0,), (1,), (2,), (1, 2))]
    x = normal(6, 9, 20)
    for attributes in choices:
        bench = Bench(KERNELS, name, [x], attributes, views=lambda v: [views_of(v)[way][1]], workspaces=WORKSPACES)
        if bench.entries is not None:
            bench.check(lambda found, expected: assert_close(found, expected, 4))
        else:
            assert name == "normalize"


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("sum", {"axes": (0,)}),
        ("sum", {"axes": (1,)}),
        ("max", {"axes": (0, 1)}),
        ("argmax", {"axis": 1}),
        ("softmax", {"axis": 1}),
        ("normalize", {"axes": (1,), "epsilon": 1e-5}),
        ("normalize", {"axes": (0,), "epsilon": 1e-5}),
    ],
)
def test_a_smaller_batch_runs_the_same_code(name: str, attributes: dict[str, Any]) -> None:
    texts = []
    for batch in (64, 24):
        entries = Bench(KERNELS, name, [normal(batch, 50)], attributes, workspaces=WORKSPACES).entries
        assert entries is not None
        texts.append([entry.code.text() for entry in entries])
    assert texts[0] == texts[1]


def test_on_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    x = normal(5000, 24)

    def describe(x: Value) -> list[Value]:
        y, m, v = ops.normalize(x, (0,), 1e-5)
        s = ops.softmax(y + m, 1)
        return [s, ops.sum_(s * v, (0,)), ops.max_(s, (0, 1)), ops.sum_(y * y, (1,)), ops.sum_(s, (0, 1))]

    first = run_on_engine(describe, [x], 1)
    for threads in (2, 5):
        for a, b in zip(first, run_on_engine(describe, [x], threads), strict=True):
            assert a.tobytes() == b.tobytes()
