"""The matrix products that kernels call natively: right for every size, and the same however rows are shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen import loops
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.gemm import gemm_blocked, gemm_tn, matmul, packed_gemm
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.runtime.threads import KERNEL
from mlcompute.ops.op import Array, Value
from mlcompute.ops.views import transpose
from tests.devices.kernels import Bench

SIZES = [(1, 1, 1), (3, 7, 5), (16, 16, 16), (7, 33, 40), (37, 100, 300), (14, 128, 129), (25, 48, 17), (5, 20, 256)]


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples at once: slices of them have tests of their own."""
    for module in (matmul, gemm_tn):
        monkeypatch.setattr(module, "suits_slices", lambda step: False)


def call(function: Code, integers: list[int], arrays: list[Array]) -> None:
    words = np.array([*integers, *(array.ctypes.data for array in arrays)], np.int64)
    (address,) = kernel_cache.addresses([function])
    KERNEL(address)(0, 1, words.ctypes.data)


def pack(b: Array, by_columns: bool) -> Array:
    depth, columns = b.shape
    source = np.ascontiguousarray(b.T if by_columns else b)
    function = packed_gemm.pack_columns(columns) if by_columns else packed_gemm.pack_rows(columns)
    packed = np.full(packed_gemm.padded(columns) * depth, np.nan, np.float32)
    call(function, [0, columns, depth, source.shape[1]], [source, packed])
    return packed


def multiply(
    a: Array,
    packed: Array,
    c: Array,
    columns: int,
    accumulate: bool = False,
    added: Array | None = None,
    as_if: int | None = None,
) -> None:
    """c[:, :columns] = a b or += a b, or a b + `added`; a may be any view."""
    (rows, depth), added = a.shape, c if added is None else added
    strides = [array.strides[axis] // 4 for array, axis in ((a, 0), (a, 1), (c, 0), (added, 0))]
    function = packed_gemm.packed_gemm(as_if or columns)
    call(function, [rows, columns, depth, depth, int(accumulate), *strides], [a, packed, c, added])


@pytest.fixture(params=[4, 8, "own"])
def _lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors as short as other machines have them, and this machine's."""
    lanes = vector_lanes() if request.param == "own" else request.param
    for module in (packed_gemm, loops):
        monkeypatch.setattr(module, "vector_lanes", lambda: lanes)


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
def test_products_of_all_sizes(rows: int, columns: int, depth: int) -> None:
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((rows, depth)).astype("f"), rng.standard_normal((depth, columns)).astype("f")
    packed = pack(b, by_columns=False)
    np.testing.assert_array_equal(packed, pack(b, by_columns=True))
    exact = a.astype(np.float64) @ b
    for view in (a, np.asfortranarray(a)):
        for accumulate in (False, True):
            c = rng.standard_normal((rows, columns + 3)).astype("f")
            expected = c.astype(np.float64)
            expected[:, :columns] = exact + (c[:, :columns] if accumulate else 0)
            multiply(view, packed, c, columns, accumulate)
            np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5 * np.sqrt(depth))


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
def test_what_is_added_lies_elsewhere(rows: int, columns: int, depth: int) -> None:
    """The sums of the depth before, in a block of the thread's own: read once, and c is never read."""
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((rows, depth)).astype("f"), rng.standard_normal((depth, columns)).astype("f")
    sums = rng.standard_normal((rows, columns + 5)).astype("f")
    before, in_place, packed = sums.copy(), sums[:, :columns].copy(), pack(b, by_columns=False)
    c = np.full((rows, columns + 3), np.nan, "f")
    multiply(a, packed, c, columns, accumulate=True, added=sums)
    multiply(a, packed, in_place, columns, accumulate=True)
    np.testing.assert_array_equal(c[:, :columns], in_place)
    np.testing.assert_array_equal(sums, before)
    assert np.isnan(c[:, columns:]).all()


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize("vectors", [1, 2, 3, 4, 5, 6, 7, 9, 10, 13])
@pytest.mark.parametrize("missing", [0, 3])
def test_a_last_panel_with_few_columns(vectors: int, missing: int) -> None:
    """Packed and multiplied as if there were a few more columns, in wide panels."""
    columns, rows, depth = vectors * packed_gemm.vector_lanes() - missing, 13, 131
    as_if = packed_gemm.in_wide_panels(columns)
    rng = np.random.default_rng(vectors)
    a, b = rng.standard_normal((rows, depth)).astype("f"), rng.standard_normal((depth, columns)).astype("f")
    packed = np.full(as_if * depth, np.nan, np.float32)
    call(packed_gemm.pack_rows(as_if), [0, columns, depth, columns], [b, packed])
    c = np.full((rows, columns + 3), 7, "f")
    multiply(a, packed, c, columns, as_if=as_if)
    np.testing.assert_allclose(c[:, :columns], a.astype(np.float64) @ b, rtol=1e-5, atol=1e-4)
    assert (c[:, columns:] == 7).all()


@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
def test_a_row_does_not_depend_on_its_neighbours(rows: int, columns: int, depth: int) -> None:
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((rows, depth)).astype("f"), rng.standard_normal((depth, columns)).astype("f")
    packed, together, apart = pack(b, by_columns=False), *(np.zeros((rows, columns), "f") for _ in range(2))
    multiply(a, packed, together, columns)
    for row in range(rows):
        multiply(a[row : row + 1], packed, apart[row : row + 1], columns)
    assert together.tobytes() == apart.tobytes()


def test_long_sums_stay_accurate() -> None:
    depth = 100_000
    ones, c = np.ones((1, depth), "f"), np.zeros((1, 1), "f")
    multiply(ones * np.float32(0.1), pack(np.ones((depth, 1), "f"), by_columns=False), c, 1)
    # Term after term, rounding would add up to 1.4e-4.
    np.testing.assert_allclose(c, depth * float(np.float32(0.1)), rtol=1e-5)


def test_panels_waste_little() -> None:
    lanes = vector_lanes()
    for vectors in range(1, 40):
        assert packed_gemm.padded(vectors * lanes) <= (vectors + 1) * lanes
        assert packed_gemm.padded(vectors * lanes - 1) >= vectors * lanes - 1


@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (17, 33, 40), (64, 256, 300), (200, 100, 129), (1000, 65, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_with_turned_weights(m: int, n: int, k: int, turned: bool) -> None:
    """What fully connected layers need; a may be turned, too."""
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal(shape).astype("f") for shape in ((k, m) if turned else (m, k), (n, k)))

    def views(a: Value, b: Value) -> list[Value]:
        return [transpose(a, (1, 0)) if turned else a, transpose(b, (1, 0))]

    bench = Bench(matmul.KERNELS, "matmul", [a, b], views=views)
    assert bench.entries is not None
    assert [entry.kernel for entry in bench.entries] == ["gemm_nt"]
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * k))


@pytest.mark.parametrize(
    ("m", "n", "k", "turned"),
    [
        (17, 133, 200, False),
        (64, 300, 131, True),
        (128, 640, 260, False),
        (100, 1501, 129, True),
        (200, 96, 300, False),
    ],
)
@pytest.mark.parametrize("by_columns", [False, True])
def test_products_with_large_weights(
    m: int, n: int, k: int, turned: bool, by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of weights, each of which is fetched while the one before is multiplied."""
    rng = np.random.default_rng(m)
    a = rng.standard_normal((k, m) if turned else (m, k)).astype("f")
    b = rng.standard_normal((n, k) if by_columns else (k, n)).astype("f")

    def views(a: Value, b: Value) -> list[Value]:
        return [transpose(a, (1, 0)) if turned else a, transpose(b, (1, 0)) if by_columns else b]

    monkeypatch.setattr(matmul, "_kernel", lambda a, b, y: "blocked")
    monkeypatch.setattr(matmul, "suits_split_k", lambda a, b, y: False)
    bench = Bench(matmul.KERNELS, "matmul", [a, b], views=views)
    bench.check(lambda y, expected: np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * k))


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("floats", [1 << 11, 1 << 16])
def test_threads_that_share_rows_sum_apart(floats: int, by_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block of their own, which holds all their rows or a few at a time; y is written once."""
    monkeypatch.setattr(gemm_blocked, "_OWN_SUMS", floats)
    monkeypatch.setattr(matmul, "_kernel", lambda a, b, y: "blocked")
    monkeypatch.setattr(matmul, "suits_split_k", lambda a, b, y: False)
    m, n, k = 130, 1000, 300
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype("f") for shape in ((m, k), (n, k) if by_columns else (k, n)))
    bench = Bench(matmul.KERNELS, "matmul", [a, b], views=lambda a, b: [a, transpose(b, (1, 0)) if by_columns else b])
    assert bench.entries is not None
    assert f"[{floats} x float]" in bench.entries[0].code.text()
    bench.check(lambda y, expected: np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * k))


@pytest.mark.parametrize(
    ("left", "right"), [((64, 256), (256, 10)), ((70, 10), (10, 256)), ((33, 300), (300, 3)), ((5, 40, 7), (7, 90))]
)
@pytest.mark.parametrize("by_columns", [False, True])
def test_products_with_few_columns_or_little_depth(
    left: tuple[int, ...], right: tuple[int, int], by_columns: bool
) -> None:
    """A small b is read as it lies, where packed vectors would not be full."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype("f") for shape in (left, right))

    def views(a: Value, b: Value) -> list[Value]:
        return [a, transpose(b, (1, 0)) if by_columns else b]

    bench = Bench(matmul.KERNELS, "matmul", [a, b.T.copy() if by_columns else b], views=views)
    assert bench.entries is not None
    is_narrow = right[1 if by_columns else 0] < vector_lanes()
    assert (bench.entries[0].kernel == "gemm of few rows") == is_narrow
    bench.check(lambda y, expected: np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.float64])
@pytest.mark.parametrize(("left", "right"), [((5, 7), (7, 33)), ((2, 1, 4, 3), (3, 3, 1)), ((3, 0), (0, 4))])
def test_products_of_other_types(left: tuple[int, ...], right: tuple[int, ...], dtype: Any) -> None:
    """Integers wrap, whatever the strides; without depth zeros."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-90, 90, shape).astype(dtype) for shape in (left, right))
    for turned in (False, True):

        def views(a: Value, b: Value, turned: bool = turned) -> list[Value]:
            return [a, transpose(b, (*range(b.rank - 2), b.rank - 1, b.rank - 2)) if turned else b]

        arrays = [a, np.ascontiguousarray(np.swapaxes(b, -1, -2)) if turned else b]
        bench = Bench(matmul.KERNELS, "matmul", arrays, views=views)
        assert bench.entries is not None
        bench.check(np.testing.assert_array_equal)


SHAPES = [
    ((1, 7), (7, 5)), ((2, 300), (300, 33)), ((3, 1100), (1100, 70)), ((9, 5), (5, 1)), ((1, 1), (1, 1)),
    ((40, 130), (130, 100)), ((6, 4, 12), (12, 20)), ((5, 3, 8, 9), (3, 9, 11)), ((2, 1, 20, 16), (1, 5, 16, 24)),
]  # fmt: skip


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_products_without_a_library(
    left: tuple[int, ...], right: tuple[int, ...], turned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul.onednn, "load", lambda: None)
    rng = np.random.default_rng(len(left))

    def lying(shape: tuple[int, ...], name: str) -> Array:
        shape = (*shape[:-2], shape[-1], shape[-2]) if name in turned else shape
        return rng.standard_normal(shape).astype("f")

    def views(*values: Value) -> list[Value]:
        return [
            transpose(v, (*range(len(v.shape) - 2), len(v.shape) - 1, len(v.shape) - 2)) if name in turned else v
            for name, v in zip("ab", values, strict=True)
        ]

    bench = Bench(matmul.KERNELS, "matmul", [lying(left, "a"), lying(right, "b")], views=views)
    assert bench.entries is not None
    assert all("gemm" in entry.kernel and "oneDNN" not in entry.kernel for entry in bench.entries)
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * left[-1]))
