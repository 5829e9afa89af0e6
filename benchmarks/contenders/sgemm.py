"""The yardstick: a large float32 product by the faster of NumPy's BLAS and oneDNN."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.contenders import Job
from benchmarks.workloads import Workload

SIZE = 1536
FLOPS = 2 * SIZE**3


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    c = np.empty_like(a)
    ways: dict[str, Callable[[], object]] = {"NumPy": lambda: np.matmul(a, b, out=c)}
    if (product := _onednn(a, b, c)) is not None:
        ways["oneDNN"] = product
    fastest = min(ways, key=lambda name: min(_seconds(ways[name]) for _ in range(2)))
    return Job(ways[fastest], lambda: c[:1, :1])


def _onednn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Callable[[], object] | None:
    try:
        from mlcompute.devices.cpu import onednn
    except ImportError:
        return None
    library = onednn.load()
    if library is None:
        return None
    arrays = (a, b, c)

    def product() -> None:
        # The addresses are asked for here, so that the arrays live as long as whoever may call this.
        first, second, result = (array.ctypes.data for array in arrays)
        library.call("sgemm", b"N", b"N", SIZE, SIZE, SIZE, 1.0, first, SIZE, second, SIZE, 0.0, result, SIZE)

    return product


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
