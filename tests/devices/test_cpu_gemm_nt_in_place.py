"""gemm_nt that reads the weights where they lie: the bits of gemm_blocked, by any number of threads, in any pieces."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen.code import vector_lanes
from mlcompute.devices.cpu.gemm import gemm_nt_in_place, matmul
from mlcompute.devices.cpu.gemm.packed_gemm import in_wide_panels, panel_width
from mlcompute.ops.op import Array, Value
from mlcompute.ops.views import transpose
from tests.devices.kernels import Bench

KERNEL = "gemm_nt, weights in place"
#: Rows that fill panels of 4 vectors, or of 2 where machines have no wider ones, and such as nearly do.
WIDEST = panel_width(in_wide_panels(64 * vector_lanes())) * vector_lanes()
#: rows, depth, columns: not all columns fill cache lines, or more than one group of them. Fewer rows than 16, as short
#: vectors have, are multiplied by other kernels.
SIZES = [
    (WIDEST, 128, 300),
    (WIDEST, 784, 512),
    (max(16, WIDEST - 1), 131, 333),
    (max(16, 2 * vector_lanes()), 257, 900),
]


def bench(m: int, k: int, n: int) -> tuple[Bench, Array, Array]:
    rng = np.random.default_rng([m, k, n])
    a, b = (rng.standard_normal(shape).astype("f") for shape in ((m, k), (n, k)))

    def views(a: Value, b: Value) -> list[Value]:
        return [a, transpose(b)]

    return Bench(matmul.KERNELS, "matmul", [a, b], views=views, workspaces=matmul.WORKSPACES), a, b.T


def kernels(made: Bench) -> list[str]:
    return [entry.kernel for entry in made.entries or ()]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short vectors have panels of fewer rows than are worth it; they are tested all the same, with few weights."""
    monkeypatch.setattr(gemm_nt_in_place, "_FEWEST", 2 * vector_lanes())
    monkeypatch.setattr(gemm_nt_in_place, "_LEAST_ROWS", 16)


@pytest.mark.parametrize("sizes", SIZES)
def test_same_bits_as_packed_weights(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, a, b = bench(*sizes)
    assert kernels(made) == [KERNEL]
    (one,) = made.run(1)
    exact, size = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    assert (np.abs(one - exact) <= 2 * np.finfo(np.float32).eps * np.sqrt(sizes[1] + 1) * size).all()
    for threads in (2, 3, 5):
        assert made.run(threads)[0].tobytes() == one.tobytes(), "the number of threads changes the sums"
    monkeypatch.setattr(matmul, "shared_in_place", lambda *operands: None)
    packed, _, _ = bench(*sizes)
    assert kernels(packed) == ["gemm_nt"]
    assert packed.run(1)[0].tobytes() == one.tobytes()


def test_pieces_cover_everything_once() -> None:
    made, _, _ = bench(WIDEST, 300, 1000)
    assert made.run(3, pieces=4)[0].tobytes() == made.run(1)[0].tobytes()


@pytest.mark.parametrize(
    "sizes",
    [
        (WIDEST + 1, 300, 1000),  # more rows than a panel has columns
        (WIDEST - vector_lanes() + 1, 300, 1000),  # most of a vector would be idle
        (WIDEST, 300, 15),  # few weights for every sample
        (WIDEST, 100, 1000),  # short sums
    ],
)
def test_other_products_pack_their_weights(sizes: tuple[int, int, int]) -> None:
    assert KERNEL not in kernels(bench(*sizes)[0])


#: Rows of 16 threads, depth, columns: panels that are full, nearly full, and half as wide.
OWN_ROWS = [(16 * WIDEST, 256, 256), (16 * WIDEST - 5, 131, 333), (16 * max(16, 2 * vector_lanes()), 260, 800)]


@pytest.mark.parametrize("sizes", OWN_ROWS)
def test_threads_own_rows(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = bench(*sizes)
    (entry,) = made.entries or ()
    assert (entry.kernel, entry.rows, entry.by_row) == (f"{KERNEL}, own rows", sizes[0], {0, 2})
    (one,) = made.run(1)
    for threads, pieces in ((2, 1), (3, 4), (16, 1), (16, 3)):
        assert made.run(threads, pieces)[0].tobytes() == one.tobytes(), "the number of threads changes the sums"
    monkeypatch.setattr(matmul, "shared_in_place", lambda *operands: None)
    packed, _, _ = bench(*sizes)
    assert kernels(packed) == ["gemm_nt"]
    assert packed.run(1)[0].tobytes() == one.tobytes()


def test_threads_own_rows_only_where_the_weights_fit_every_cache() -> None:
    assert kernels(bench(16 * WIDEST, 1024, 1024)[0]) == ["gemm_nt"]
