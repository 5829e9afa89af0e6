"""Products of many threads: the same sums by any number of them, and in pieces that any thread may run."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.cpu.gemm import gemm_blocked, matmul
from mlcompute.ops.op import Array, Value
from mlcompute.ops.views import transpose
from tests.devices.kernels import Bench

#: rows, depth, columns
SIZES = [(128, 64, 64), (131, 65, 70), (512, 256, 256), (200, 300, 1000), (130, 129, 65), (257, 1024, 100)]
#: Which of a and b are stored as columns.
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]


def bench(m: int, k: int, n: int, layout: tuple[bool, bool]) -> tuple[Bench, Array, Array]:
    rng = np.random.default_rng([m, k, n])
    a, b = rng.standard_normal((m, k)).astype("f"), rng.standard_normal((k, n)).astype("f")
    stored = [np.ascontiguousarray(x.T) if turned else x for x, turned in zip((a, b), layout, strict=True)]

    def views(*values: Value) -> list[Value]:
        return [transpose(value) if turned else value for value, turned in zip(values, layout, strict=True)]

    return Bench(matmul.KERNELS, "matmul", stored, views=views, workspaces=matmul.WORKSPACES), a, b


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products(sizes: tuple[int, int, int], layout: tuple[bool, bool]) -> None:
    made, a, b = bench(*sizes, layout)
    exact, size = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    (one,) = made.run(1)
    assert (np.abs(one - exact) <= 2 * np.finfo(np.float32).eps * np.sqrt(sizes[1] + 1) * size).all()
    for threads in (2, 5, 16):
        assert made.run(threads)[0].tobytes() == one.tobytes(), "the number of threads changes the sums"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_cover_everything_once(layout: tuple[bool, bool]) -> None:
    """Called piece by piece, in any order, by any thread."""
    for sizes, threads in (((200, 300, 1000), 3), ((300, 64, 256), 1), ((96, 130, 64), 2), ((64, 64, 500), 4)):
        made, _, _ = bench(*sizes, layout)
        alone = made.run(1)[0].tobytes()
        for pieces in (2, 3, 4, 8):
            assert made.run(threads, pieces=pieces)[0].tobytes() == alone


def test_many_threads_cut_rows_and_panels_to_equal_parts() -> None:
    """512 x 256: 4 panels of 64 columns. A few threads would rather share rows alone, of which each has its own."""
    assert gemm_blocked.cut_rows_and_panels(16, 512, 4) == (4, 4)
    assert gemm_blocked.cut_rows_and_panels(2, 512, 4) == (2, 1)
    assert gemm_blocked.cut_rows_and_panels(1, 512, 4) == (1, 1)
