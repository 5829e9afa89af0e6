"""What an exchange of gradients costs: the formula of docs/many-processes.md, and what this machine measures.

python -m benchmarks.exchange                                        the table of the documentation
mlcompute launch -n 4 benchmarks/exchange.py --measure               measured here, beside the formula fitted to it
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

NETWORKS = {"ResNet-20": 1.1e6, "ResNet-50": 102e6, "GPT-2": 498e6}


def seconds(nbytes: float, processes: int, rate: float, latency: float) -> float:
    """An exchange of so many bytes of gradients: 2 N (P - 1) / (P b) + 2 (P - 1) l."""
    return 2 * nbytes * (processes - 1) / (processes * rate) + 2 * (processes - 1) * latency


def table(rate: float = 1.25e9, latency: float = 2e-6) -> str:
    lines = ["| network | 16 processes | 256 processes | 4,096 processes |", "| --- | --- | --- | --- |"]
    for name, nbytes in NETWORKS.items():
        cells = [f"{1e3 * seconds(nbytes, count, rate, latency):.3g} ms" for count in (16, 256, 4096)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(sizes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24), repeats: int = 20) -> None:
    """Time alltoall and allgather of several sizes, fit rate and latency to the ends, and compare in between."""
    import mlcompute as mlc
    from mlcompute.group.exchange import Kind

    group = mlc.Group.world()
    exchange, size = group.exchange, group.size
    found: dict[int, float] = {}
    for nbytes in sizes:
        part = np.zeros(nbytes // size, np.uint8)
        received = [np.empty_like(part) for _ in range(size)]
        times = []
        for _ in range(repeats):
            group.barrier()
            began = time.perf_counter()
            exchange.alltoall(Kind.STEP, [part] * size, received)
            exchange.allgather(Kind.PARAMETERS, part, received)
            times.append(time.perf_counter() - began)
        found[nbytes] = statistics.median(times)
    if not group.is_first or size == 1:
        return
    small, large = sizes[0], sizes[-1]
    latency = found[small] / (2 * (size - 1))
    rate = 2 * large * (size - 1) / size / max(1e-9, found[large] - found[small])
    print(f"{size} processes: {latency * 1e6:.1f} microseconds per message, {rate / 1e9:.2f} GB/s")
    for nbytes, took in found.items():
        expected = seconds(nbytes, size, rate, latency)
        print(f"{nbytes:>10} bytes   measured {took * 1e3:8.3f} ms   formula {expected * 1e3:8.3f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        measure()
    else:
        print(table())
