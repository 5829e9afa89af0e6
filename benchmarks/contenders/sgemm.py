"""The yardstick: a large float32 product by the fastest of NumPy's BLAS, oneDNN and mlcompute's own gemm."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.contenders import Job
from benchmarks.workloads import Workload

#: So large that 16 threads have enough to do: with 1536 they wait for each other a tenth of the time.
SIZE = 2304
FLOPS = 2 * SIZE**3
#: Seconds that each way may warm up: threads start, memory is supplied, clocks rise.
_WARMING = 0.4


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    c = np.empty_like(a)
    ways: list[Callable[[], object]] = [lambda: np.matmul(a, b, out=c)]
    ways += [way for way in (_onednn(a, b, c), _own(a, b)) if way is not None]
    return Job(min(ways, key=_fastest), lambda: c[:1, :1])


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


def _own(a: np.ndarray, b: np.ndarray) -> Callable[[], object] | None:
    """As a fully connected layer without bias."""
    try:
        import mlcompute as mlc
    except ImportError:
        return None
    graph, x = mlc.InferenceGraph(), mlc.Tensor(shape=a.shape)
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=SIZE, output_feature_channel_count=SIZE)
    graph.node(mlc.FullyConnectedLayer(mlc.Tensor(data=b), None, sizes), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    return lambda: graph.execute({"x": a}, options=mlc.ExecutionOptions.SYNCHRONOUS)


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest run, once warm."""
    times: list[float] = []
    end = time.perf_counter() + _WARMING
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
