"""What an exchange of gradients costs: the formula of docs/many-processes.md, and what this machine measures.

python -m benchmarks.exchange                                        the tables of the documentation
mlcompute launch -n 4 benchmarks/exchange.py --measure               measured here, beside the formula fitted to it
mlcompute launch -n 8 benchmarks/exchange.py --network resnet20      what a training step of it exchanges

With MLCOMPUTE_SHARED_MEMORY=4 the last one takes every four neighbours for a machine, with 0 each process for one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

NETWORKS = {"ResNet-20": 1.1e6, "ResNet-50": 102e6, "GPT-2": 498e6}


class Network(NamedTuple):
    """What connects processes: seconds per message, and bytes per second of each process."""

    message: float
    rate: float


#: Milliseconds by processes and bytes, on 16 cores of an Intel Xeon with Open MPI 4: what `measure` printed.
MEASURED = {
    2: {1 << 10: 0.044, 1 << 16: 0.063, 1 << 20: 0.225, 1 << 22: 0.883, 1 << 24: 4.005},
    4: {1 << 10: 0.131, 1 << 16: 0.177, 1 << 20: 0.537, 1 << 22: 1.681, 1 << 24: 6.522},
    8: {1 << 10: 0.401, 1 << 16: 0.461, 1 << 20: 0.773, 1 << 22: 2.089, 1 << 24: 7.303},
    16: {1 << 10: 0.648, 1 << 16: 0.890, 1 << 20: 1.517, 1 << 22: 3.570, 1 << 24: 14.490},
}
#: As these fit: 22 to 29 microseconds per message and 2.5 to 5 GB/s.
MACHINE = Network(message=25e-6, rate=4e9)
#: 10 Gbit/s per process; a message takes about as long, most of it in Python.
CLUSTER = Network(message=25e-6, rate=1.25e9)


def seconds(nbytes: float, processes: int, network: Network) -> float:
    """alltoall and allgather of so many bytes of gradients: 2 (P - 1) (l + N / (P b))."""
    return 2 * (processes - 1) * (network.message + nbytes / processes / network.rate)


def in_two_levels(nbytes: float, processes: int, per_machine: int, outer: Network, inner: Network) -> float:
    """First within each machine, then each process with those in the same place on the other machines.

    Within a machine it is counted as if it were sent, which shared memory spares.
    """
    machines = max(1, processes // per_machine)
    within = seconds(nbytes, per_machine, inner)
    return within + (seconds(nbytes / per_machine, machines, outer) if machines > 1 else 0.0)


def table() -> str:
    lines = ["| network | | 16 processes | 256 processes | 4,096 processes |", "| --- | --- | --- | --- | --- |"]
    for name, nbytes in NETWORKS.items():
        flat = [seconds(nbytes, count, CLUSTER) for count in (16, 256, 4096)]
        levels = [in_two_levels(nbytes, count, 16, CLUSTER, MACHINE) for count in (16, 256, 4096)]
        for how, found in (("all with all", flat), ("in two levels", levels)):
            lines.append(f"| {name} | {how} | {' | '.join(f'{1e3 * one:,.1f} ms' for one in found)} |")
    return "\n".join(lines)


def fitted(found: Mapping[int, float], processes: int) -> Network:
    """The network that explains measured seconds by bytes best: relative errors have the least squares."""
    steps = processes - 1
    rows = np.array([[2 * steps / took, 2 * steps * nbytes / processes / took] for nbytes, took in found.items()])
    message, per_byte = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return Network(float(message), 1 / float(per_byte))


def measure(sizes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24), repeats: int = 20) -> None:
    """Time alltoall and allgather of several sizes, and compare with the formula."""
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
    network = fitted(found, size)
    print(f"{size} processes: {network.message * 1e6:.1f} microseconds per message, {network.rate / 1e9:.2f} GB/s")
    for nbytes, took in found.items():
        expected = seconds(nbytes, size, network)
        print(
            f"{nbytes:>10} bytes   measured {took * 1e3:8.3f} ms   formula {expected * 1e3:8.3f} ms   "
            f"{expected / took:5.2f}"
        )


def measure_network(name: str, repeats: int = 300) -> None:
    """Time the exchange of a training step by itself: sums to whoever owns them, new parameters to all."""
    import mlcompute as mlc
    from benchmarks.contenders.ours import training
    from benchmarks.workloads import ALL
    from mlcompute.group.exchange import Kind
    from mlcompute.runtime.session import session_of

    size = mlc.Group.world().size
    group = mlc.Group.world(slices=size)
    graph = training(replace(ALL[name], input_shape=(size, *ALL[name].input_shape[1:]))).graph
    graph.compile(device=mlc.Device.cpu(), group=group)
    in_group = session_of(graph).in_group
    assert in_group is not None
    shared = in_group.shared
    sums = {node: shared.memory[node[0]] for node in shared.nodes[group.rank]}
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        shared.exchange(sums, Kind.STEP, 0, 0)
        shared.gather(Kind.PARAMETERS)
        times.append(time.perf_counter() - began)
    if group.is_first:
        nbytes = sum(bucket.length * bucket.dtype.itemsize for bucket in in_group.buckets)
        machines = size // len(group.exchange.machine)
        expected = seconds(nbytes / (size // machines), machines, MACHINE)
        print(
            f"{name}, {nbytes} bytes, {size} processes on {machines} machine{'s' * (machines > 1)}: "
            f"measured {statistics.median(times) * 1e3:.3f} ms, formula for what is sent {expected * 1e3:.3f} ms"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--network")
    given = parser.parse_args()
    if given.measure:
        measure()
    elif given.network:
        measure_network(given.network)
    else:
        print(table())
