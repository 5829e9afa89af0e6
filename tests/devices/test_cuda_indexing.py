"""Indexing, embedding and copies on the CUDA engine, in emulation: what the ops mean, and indices that are invalid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cuda.codegen import kernel_source
from mlcompute.devices.cuda.kernels import scatter_lines, segments
from mlcompute.errors import ExecutionError
from mlcompute.ops.op import Array
from mlcompute.ops.views import slice_, transpose
from tests.devices.cuda_emulator.bench import check, needs_engine, op, run

pytestmark = needs_engine

#: Every result looks through all indices, or those are sorted first.
WAYS = pytest.mark.parametrize("way", ["few", "many"])


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def below(extent: int, *shape: int, dtype: Any = np.int32) -> Array:
    return np.random.default_rng([extent, *shape]).integers(0, extent, shape).astype(dtype)


@pytest.fixture(autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    way = request.getfixturevalue("way") if "way" in request.fixturenames else "few"
    if way == "many":
        monkeypatch.setattr(segments, "_MOST_LOOKS", 0)
        monkeypatch.setattr(scatter_lines, "_WORDS", 0)


# Take and gather ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_take(axis: int) -> None:
    x = normal(5, 6, 8)
    for shape in ((), (3,), (2, 3), (0,)):
        check(op("take", axis=axis), x, below(x.shape[axis], *shape))
    check(lambda x, i: op("take", axis=axis)(transpose(x, (2, 1, 0)), transpose(i)), normal(8, 6, 5), below(5, 4, 3))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.uint8, np.bool_])
def test_take_of_any_type(dtype: Any) -> None:
    x = (10 * normal(7, 4)).astype(dtype)
    for index_type in (np.int8, np.uint8, np.int64):
        check(op("take", axis=0), x, below(7, 9, dtype=index_type))


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis: int) -> None:
    x = normal(5, 7)
    check(op("gather", axis=axis), x, below(x.shape[axis], 4, 6, dtype=np.int64))
    check(op("gather", axis=axis), x, below(x.shape[axis], *((20, 7) if axis == 0 else (5, 20))))


# Sums by index --------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("axis", [0, 1])
def test_take_gradient(axis: int, way: str) -> None:
    for shape in ((6,), (2, 40)):
        for inner in (4, 3):
            dy = normal(*(3,) * axis, *shape, inner)
            check(op("take_gradient", axis=axis, extent=9), dy, below(9, *shape), scale=4)
    dy = normal(*(3,) * axis, 11, 5)
    check(op("take_gradient", axis=axis, extent=4), (10 * dy).astype(np.int32), below(4, 11))
    check(op("take_gradient", axis=axis, extent=4), dy.astype(np.float64), below(4, 11))


@WAYS
@pytest.mark.parametrize("width", [1, 8, 200])
def test_frequent_and_rare_rows(width: int, way: str) -> None:
    indices = (np.random.default_rng(0).zipf(1.3, 3000) % 300).astype(np.int64)
    # Of sums of a thousand numbers the small ones are a small difference.
    check(op("take_gradient", axis=0, extent=300), normal(3000, width), indices, scale=40)


@WAYS
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scatter(axis: int, way: str) -> None:
    base = normal(5, 6, 7)
    shape = [4, 6, 3]
    shape[axis] = 12
    indices = below(base.shape[axis], *shape, dtype=np.int64)
    updates = normal(*(extent + 1 for extent in shape))
    check(op("scatter", axis=axis), updates, indices, base)
    check(op("scatter_add", axis=axis), updates, indices, base, scale=4)
    whole = [(10 * array).astype(np.int32) for array in (updates, base)]
    check(op("scatter_add", axis=axis), whole[0], indices, whole[1])


@WAYS
def test_many_updates_of_one_place(way: str) -> None:
    base, indices = normal(3, 2), below(2, 3, 500)
    check(op("scatter", axis=1), normal(3, 500), indices, base)
    check(op("scatter_add", axis=1), normal(3, 500), indices, base, scale=40)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("items", "places"), [(33, 1), (100, 700), (900, 40), (300, 300)])
def test_scatter_of_lines(items: int, places: int, axis: int) -> None:
    def turned(array: Array) -> Array:
        return array if axis else np.ascontiguousarray(array.T)

    base, updates = turned(normal(3, places)), turned(normal(3, items))
    indices = turned((np.random.default_rng(0).zipf(1.2, (3, items)) % places).astype(np.int32))
    _, _, executable = run(op("scatter", axis=axis), [updates, indices, base])
    assert list(executable.kernels.values()) == ["scatter of lines"]
    check(op("scatter", axis=axis), updates, indices, base)
    check(op("scatter_add", axis=axis), updates, indices, base, scale=40)
    whole = [(100 * array).astype(np.int64) for array in (updates, base)]
    check(op("scatter_add", axis=axis), whole[0], indices, whole[1])


def test_one_index_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def into_zeros(updates: Any, indices: Any) -> Any:
        return ops.scatter_add(updates, indices, ops.full(updates, (3, 5, 8), 0.0), 2)

    base, indices, updates = normal(3, 5, 8), below(8, 3, 5, 1), normal(4, 6, 2)
    for narrow in (kernel_source.NARROW, 0):
        monkeypatch.setattr(kernel_source, "NARROW", narrow)
        check(op("scatter", axis=2), updates, indices, base)
        check(op("scatter_add", axis=2), updates, indices, base)
        check(into_zeros, updates, indices)
    indices[1, 2, 0] = 8
    for name in ("scatter", "scatter_add"):
        with pytest.raises(ExecutionError, match=rf"{name}: index 8.* is out of range, valid are 0 to 7"):
            run(op(name, axis=2), [updates, indices, base])


def test_an_index_out_of_range_in_a_line() -> None:
    indices = below(4, 2, 50)
    indices[1, 7] = 4
    for name in ("scatter", "scatter_add"):
        with pytest.raises(ExecutionError, match=rf"{name}: index 4.* is out of range, valid are 0 to 3"):
            run(op(name, axis=1), [normal(2, 50), indices, normal(2, 4)])


def test_views_and_wide_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(dy: Any, indices: Any) -> Any:
        part = slice_(indices, (0, 1), (4, 6), (1, 2))
        return op("take_gradient", axis=0, extent=5)(slice_(dy, (0, 0, 1), (4, 3, 5)), part)

    check(described, normal(4, 3, 6), below(5, 4, 6), scale=4)
    monkeypatch.setattr(kernel_source, "NARROW", 0)
    check(described, normal(4, 3, 6), below(5, 4, 6), scale=4)
    check(op("gather", axis=1), normal(3, 4), below(4, 3, 2))
    check(op("scatter", axis=1), normal(3, 5), below(4, 3, 5), normal(3, 4))
    monkeypatch.setattr(segments, "_MOST_LOOKS", 0)
    check(described, normal(4, 3, 6), below(5, 4, 6), scale=4)


# Embedding tables -----------------------------------------------------------------------------------------------------


def test_count_indices() -> None:
    for shape in ((0,), (1,), (40,), (3, 50)):
        check(op("count_indices", extent=7), below(7, *shape))


@pytest.mark.parametrize("p", [1.0, 2.0, 2.5, np.inf, -np.inf, 0.0])
def test_renormalize(p: float) -> None:
    check(op("renormalize", maximum_norm=2.0, p=p), normal(20, 37), below(20, 2, 5), scale=2)
    check(op("renormalize", maximum_norm=0.1, p=p), normal(4, 3), below(4, 0))


# Invalid indices ------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("bad", [5, -1, 2**40])
def test_invalid_indices_are_reported(bad: int, way: str) -> None:
    indices = np.array([0, 4, bad, 1], np.int64)
    x, rows = normal(5, 3), normal(4, 3)
    columns = np.broadcast_to(indices[:, None], (4, 3)).copy()
    for name, arrays, attributes in (
        ("take", [x, indices], {"axis": 0}),
        ("gather", [x, columns], {"axis": 0}),
        ("take_gradient", [rows, indices], {"axis": 0, "extent": 5}),
        ("scatter", [rows, columns, x], {"axis": 0}),
        ("scatter_add", [rows, columns, x], {"axis": 0}),
        ("count_indices", [indices], {"extent": 5}),
        ("renormalize", [x, indices], {"maximum_norm": 1.0, "p": 2.0}),
    ):
        with pytest.raises(ExecutionError, match=rf"{name}: index -?\d+.* is out of range, valid are 0 to 4"):
            run(op(name, **attributes), arrays)


def test_nothing_to_index() -> None:
    with pytest.raises(ExecutionError, match=r"take: index 0.* is out of range, the indexed axis is empty"):
        run(op("take", axis=0), [normal(0, 3), below(1, 2)])
    with pytest.raises(ExecutionError, match=r"take_gradient: index 0.* is out of range, the indexed axis is empty"):
        run(op("take_gradient", axis=0, extent=0), [normal(2, 3), below(1, 2)])


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenate(axis: int) -> None:
    shapes = [[3, 4, 6] for _ in range(4)]
    for extent, shape in zip((2, 4, 1, 0), shapes, strict=True):
        shape[axis] = extent
    check(op("concatenate", axis=axis), *(normal(*shape) for shape in shapes))
    check(op("concatenate", axis=axis), normal(2, 4, 8), normal(2, 4, 8, seed=1))
    check(op("concatenate", axis=axis), *(normal(2, 1, 3, seed=seed) for seed in range(40)))
    check(
        lambda a, b: op("concatenate", axis=axis)(transpose(a, (1, 2, 0)), b), normal(4, 2, 3), normal(2, 3, 4)
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, np.bool_])
def test_pad(dtype: Any) -> None:
    x = (3 * normal(4, 3, 16)).astype(dtype)
    for before, after in (((1, 0, 0), (0, 2, 0)), ((0, 2, 16), (1, 0, 0)), ((0, 0, 1), (0, 0, 2))):
        check(op("pad", before=before, after=after, value=1.0), x)
    check(lambda v: op("pad", before=(1, 0, 2), after=(0, 0, 0), value=0.0)(transpose(v)), x)


def test_slice_gradient() -> None:
    attributes: dict[str, Any] = {"shape": (9, 8, 7), "start": (1, 0, 2), "end": (9, 8, 6), "stride": (3, 1, 2)}
    check(op("slice_gradient", **attributes), normal(3, 8, 2))
    attributes = {"shape": (9, 8, 8), "start": (1, 2, 0), "end": (4, 6, 8), "stride": (1, 1, 1)}
    check(op("slice_gradient", **attributes), normal(3, 4, 8))
