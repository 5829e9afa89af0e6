"""Ops that move elements, on the CPU: every dtype and layout, bad indices, and never a race."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.kernels.table import KERNELS
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.errors import ExecutionError
from mlcompute.ops import indexing
from mlcompute.ops.embedding import embedding
from mlcompute.ops.op import Array, Value
from mlcompute.ops.views import broadcast, slice_, transpose
from tests.devices.kernels import Bench, run_on_engine
from tests.harness import assert_close

SHAPES = [(1,), (7,), (33,), (1000,), (5, 7), (9, 17), (16, 3, 5), (2, 40, 3, 3)]
DTYPES = (np.float32, np.float16, np.float64, np.int32, np.int64, np.int8, np.uint8, np.bool_)


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return np.asarray(3 * np.random.default_rng(shape).standard_normal(shape)).astype(dtype)


def some(extent: int, *shape: int, dtype: Any = np.int64) -> Array:
    return np.asarray(np.random.default_rng([extent, *shape]).integers(0, extent, shape)).astype(dtype)


def check(name: str, arrays: list[Array], views: Any = None, exact: bool = True, **attributes: Any) -> None:
    bench = Bench(KERNELS, name, arrays, attributes, views=views)
    bench.check(np.testing.assert_array_equal if exact else assert_close)
    assert bench.entries is not None
    assert not any(entry.status is not None and entry.status[0] for entry in bench.entries)


def reversed_axes(*values: Value) -> list[Value]:
    return [transpose(value, tuple(reversed(range(value.rank)))) for value in values]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_concatenate(shape: tuple[int, ...], dtype: Any) -> None:
    for axis in range(len(shape)):
        parts = [normal(*shape[:axis], n, *shape[axis + 1 :], dtype=dtype) for n in (1, 5, shape[axis])]
        check("concatenate", parts, axis=axis)
        check("concatenate", parts, views=reversed_axes, axis=len(shape) - 1 - axis)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pad_and_slice_gradient(shape: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        before, after = (tuple(rng.integers(0, 3, len(shape)).tolist()) for _ in range(2))
        x = normal(*shape, dtype=dtype)
        check("pad", [x], before=before, after=after, value=1.0)
        check("pad", [x], views=reversed_axes, before=before[::-1], after=after[::-1], value=1.0)
        start = tuple(int(rng.integers(0, n)) for n in shape)
        end = tuple(int(rng.integers(s + 1, n + 1)) for s, n in zip(start, shape, strict=True))
        stride = tuple(rng.integers(1, 4, len(shape)).tolist())
        taken = np.zeros(shape)[tuple(map(slice, start, end, stride))].shape
        check("slice_gradient", [normal(*taken, dtype=dtype)], shape=shape, start=start, end=end, stride=stride)


def test_pad_of_few_axes() -> None:
    check("pad", [normal(9, 5, 4, 4)], before=(0, 0, 0, 0), after=(0, 3, 0, 0), value=-np.inf)
    check("pad", [normal(1, 1)], before=(0, 2), after=(1, 0), value=0.0)
    check("pad", [normal(20, 6)], before=(0, 0), after=(0, 0), value=0.0)


TABLES = [(7,), (1,), (33, 5), (100, 64), (9, 17, 3), (2, 6, 70), (16, 5, 200)]


@pytest.mark.parametrize("shape", TABLES, ids=str)
def test_take_and_its_gradient(shape: tuple[int, ...]) -> None:
    for axis, extent in enumerate(shape):
        for named in ((1,), (5,), (17,), (3, 4), (40, 2), ()):
            for dtype in (np.int32, np.int64, np.uint8):
                indices = some(extent, *named, dtype=dtype)
                check("take", [normal(*shape), indices], axis=axis)
                dy = normal(*shape[:axis], *named, *shape[axis + 1 :])
                # Sums of the same terms in the same order, but NumPy adds runs pairwise.
                check("take_gradient", [dy, indices], exact=False, axis=axis, extent=extent)
                check("count_indices", [indices], extent=extent)
                if axis == 0:
                    check("embedding", [normal(*shape), indices], padding_index=0, scales_by_frequency=True)


def test_take_from_views() -> None:
    check("take", [normal(20, 7), some(7, 9)], views=lambda x, i: [transpose(x), i], axis=0)
    check("take", [normal(20, 7), some(20, 18)], views=lambda x, i: [x, slice_(i, (1,), (18,), (3,))], axis=0)

    def columns(dy: Value, indices: Value) -> list[Value]:
        return [transpose(dy), indices]

    check("take_gradient", [normal(70, 9), some(4, 9)], views=columns, exact=False, axis=0, extent=4)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sums_of_any_dtype(dtype: Any) -> None:
    dy, indices = np.ones((30, 20), dtype), some(6, 30)
    check("take_gradient", [dy, indices], axis=0, extent=6)
    check("scatter_add", [dy, some(9, 30, 20), np.ones((30, 9), dtype)], axis=1)


def test_one_row_named_by_all() -> None:
    check("take_gradient", [np.ones((3000, 80), np.float32), np.zeros(3000, np.int64)], axis=0, extent=5)
    check("take_gradient", [np.ones((3000, 3), np.float32), np.full(3000, 40)], axis=0, extent=50)


@pytest.mark.parametrize("shape", TABLES, ids=str)
@pytest.mark.parametrize("smaller", [0, 1])
def test_gather_and_scatter(shape: tuple[int, ...], smaller: int) -> None:
    for axis, extent in enumerate(shape):
        named = tuple(max(1, n - smaller) for n in shape)
        named = (*named[:axis], 11, *named[axis + 1 :])
        indices, updates = some(extent, *named), normal(*(n + smaller for n in named))
        check("gather", [normal(*shape), indices], axis=axis)
        check("scatter", [updates, indices, normal(*shape)], axis=axis)
        check("scatter_add", [updates, indices, normal(*shape)], exact=False, axis=axis)

        def onto_zeros(u: Value, i: Value, base: Value) -> list[Value]:
            return [u, i, broadcast(base, shape)]

        check("scatter_add", [updates, indices, normal(1)], views=onto_zeros, exact=False, axis=axis)
        check("gather", [normal(*shape[::-1]), indices.T.copy()], views=reversed_axes, axis=axis)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_of_any_dtype(dtype: Any) -> None:
    x, indices = normal(9, 6, dtype=dtype), some(6, 9, 4)
    check("gather", [x, indices], axis=1)
    check("scatter", [normal(9, 4, dtype=dtype), indices, x], axis=1)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (33,), (1000,), (7, 9), (64, 100), (31, 17), (3, 1000)], ids=str)
def test_random_numbers_are_the_meaning_s_bits(shape: tuple[int, ...]) -> None:
    for key in ([1, 2, 3, 4], [2**32 - 1, 2**31 + 5, 0, 2**32 - 1]):
        check("random_uniform", [np.array(key, np.uint32)], shape=shape)


BAD: list[tuple[str, list[Array], dict[str, Any], int]] = [
    ("take", [normal(5, 70), np.array([0, 5])], {"axis": 0}, 5),
    ("take", [normal(5, 3), np.array([0, -1], np.int32)], {"axis": 1}, -1),
    ("take_gradient", [normal(2, 3), np.array([0, 7])], {"axis": 0, "extent": 7}, 7),
    ("take_gradient", [normal(2, 300), np.array([0, -9])], {"axis": 0, "extent": 7}, -9),
    ("gather", [normal(2, 7), np.array([[0, 7], [1, 2]])], {"axis": 1}, 7),
    ("scatter", [normal(2, 2), np.array([[0, 1], [-1, 2]]), normal(2, 7)], {"axis": 1}, -1),
    ("scatter_add", [normal(2), np.array([2**40, 1]), normal(7)], {"axis": 0}, 2**40),
    ("count_indices", [np.array([3, 8])], {"extent": 8}, 8),
]


@pytest.mark.parametrize(("name", "arrays", "attributes", "bad"), BAD)
def test_bad_indices_are_reported_and_not_used(
    name: str, arrays: list[Array], attributes: dict[str, Any], bad: int
) -> None:
    bench = Bench(KERNELS, name, arrays, attributes)
    bench.run(2)
    assert bench.entries is not None
    status = bench.entries[0].status
    assert status is not None
    assert status.tolist() == [1, bad]


def test_the_engine_raises_for_a_bad_index() -> None:
    def describe(x: Value, indices: Value) -> list[Value]:
        return [indexing.take(x, indices, 0)]

    with pytest.raises(ExecutionError, match="index 12 at position"):
        run_on_engine(describe, [normal(12, 3), np.array([3, 12])], 2)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("take", lambda n: ([normal(50, 20), some(50, n)], {"axis": 0})),
        ("take_gradient", lambda n: ([normal(n, 20), some(50, n)], {"axis": 0, "extent": 50})),
        ("concatenate", lambda n: ([normal(n, 3, 4), normal(n, 5, 4)], {"axis": 1})),
        ("pad", lambda n: ([normal(n, 3, 4)], {"before": (0, 1, 1), "after": (0, 0, 1), "value": 0.0})),
        ("gather", lambda n: ([normal(n, 9), some(9, n, 2)], {"axis": 1})),
        ("scatter_add", lambda n: ([normal(n, 2), some(9, n, 2), normal(n, 9)], {"axis": 1})),
        ("random_uniform", lambda n: ([np.arange(4, dtype=np.uint32)], {"shape": (n, 10)})),
    ],
)
def test_a_smaller_batch_runs_the_same_code(name: str, make: Any) -> None:
    texts = []
    for batch in (64, 24):
        arrays, attributes = make(batch)
        entries = Bench(KERNELS, name, arrays, attributes).entries
        assert entries is not None
        texts.append([entry.code.text() for entry in entries])
    assert texts[0] == texts[1]


def test_on_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    arrays = [normal(300, 40), some(300, 64, 9), some(40, 64, 9, 40), np.arange(4, dtype=np.uint32)]

    def describe(table: Value, indices: Value, places: Value, key: Value) -> list[Value]:
        rows = embedding(table, indices, 7, True)
        picked = indexing.gather(rows, places, 2)
        wide = indexing.pad(indexing.concatenate([picked, rows], 1), (0, 1, 0), (0, 0, 3), 2.0)
        added = indexing.scatter_add(picked, places, rows, 2)
        sums, counts = indexing.take_gradient(added, indices, 0, 300), indexing.count_indices(indices, 300)
        return [wide, added, sums, counts, indexing.random_uniform(key, (64, 9))]

    first = run_on_engine(describe, arrays, 1)
    for threads in (2, 5):
        for a, b in zip(first, run_on_engine(describe, arrays, threads), strict=True):
            assert a.tobytes() == b.tobytes()
