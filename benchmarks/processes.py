"""Training steps on several processes, beside PyTorch's DistributedDataParallel: samples per second, and efficiency.

python -m benchmarks --processes 1,2,4 --only mlp64,lenet,resnet20

Every process computes with one thread and has the workload's own batch, so P processes run P times as many samples.
One process runs without a group, as a program for one process would. A group has as many slices as processes: as in
DDP, each runs its own part in one pass. "without exchange" are as many processes at once, each training by itself: what
the memory and the clock of the machine leave of the efficiency. What a group has less is the cost of its exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.workloads import WORKLOADS

KINDS = ("mlcompute", "without exchange", "PyTorch DDP")


def measured(
    step: Callable[[], object],
    meet: Callable[[], object],
    agree: Callable[[int], int],
    seconds: float,
    rounds: int = 5,
) -> float:
    """Median over rounds of the seconds of a step; processes begin each round together and take as many steps.

    agree  the number that rank 0 says
    """
    for _ in range(3):
        step()
    begun = time.perf_counter()
    step()
    count = agree(max(3, int(seconds / rounds / max(1e-6, time.perf_counter() - begun))))
    times = []
    for _ in range(rounds):
        meet()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        times.append((time.perf_counter() - begun) / count)
    return statistics.median(times)


def ours(name: str, seconds: float, *, exchanges: bool = True) -> float:
    """Seconds of a step of the group this process belongs to, or of this process by itself beside the others."""
    import mlcompute as mlc
    from benchmarks.contenders.ours import SYNCHRONOUS, training

    size = mlc.Group.world().size
    group = mlc.Group.world(slices=size, timeout=120) if size > 1 else None
    workload = WORKLOADS[name]
    batch = workload.input_shape[0] * (size if exchanges else 1)
    described = training(replace(workload, input_shape=(batch, *workload.input_shape[1:])))
    described.graph.compile(device=mlc.Device.cpu(), group=group if exchanges else None)

    def step() -> None:
        described.graph.execute(described.inputs, described.labels, options=SYNCHRONOUS)

    def meet() -> None:
        if group is not None:
            group.barrier()

    def agree(count: int) -> int:
        return count if group is None else int(group.broadcast(np.array([count]))[0])

    return measured(step, meet, agree, seconds)


def ddp(name: str, seconds: float) -> float:
    """The same in PyTorch."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from benchmarks.contenders.pytorch import initialized
    from benchmarks.workloads import BETA1, BETA2, EPSILON, LEARNING_RATE

    torch.set_num_threads(1)
    rank, size = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{what}", default)) for what, default in (("RANK", 0), ("SIZE", 1))
    )
    workload = WORKLOADS[name]
    model, parameters = initialized(workload)
    if size > 1:
        address = f"tcp://127.0.0.1:{os.environ['BENCHMARK_PORT']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)
    inputs, classes = workload.batch()
    x, y = torch.from_numpy(inputs), torch.from_numpy(classes).reshape(-1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x).flatten(0, -2), y).backward()
        optimizer.step()

    def agree(count: int) -> int:
        numbers = torch.tensor([count])
        if size > 1:
            dist.broadcast(numbers, 0)
        return int(numbers)

    return measured(step, dist.barrier if size > 1 else lambda: None, agree, seconds)


def run(kind: str, name: str, processes: int, seconds: float) -> float | None:
    """Samples per second of so many processes; None when they failed."""
    words = ["-m", "benchmarks.processes", "--work", kind, "--workload", name, "--seconds", str(seconds)]
    from mlcompute.cli.launch import mpirun_command

    command = [*(mpirun_command(processes) if processes > 1 else []), sys.executable, *words]
    environment = {**os.environ, "MLCOMPUTE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["BENCHMARK_PORT"] = str(random.randrange(20000, 60000))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        print(f"{kind}, {name}, {processes} processes: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    took = max(json.loads(line)["seconds"] for line in lines)
    return WORKLOADS[name].input_shape[0] * processes / took


def compare(names: Sequence[str], counts: Sequence[int], seconds: float) -> dict[str, dict[str, dict[int, float]]]:
    """Print a table as it grows; all numbers."""
    results: dict[str, dict[str, dict[int, float]]] = {}
    print(f"| workload | processes | {' | '.join(f'{kind} samples/s | efficiency' for kind in KINDS)} | ratio |")
    print("| " + "--- | " * (2 * len(KINDS) + 3))
    for name in names:
        found = results[name] = {kind: {} for kind in KINDS}
        for count in counts:
            cells = []
            for kind in KINDS:
                is_known = kind == "without exchange" and count == 1  # one process has nobody to exchange with
                rate = found["mlcompute"].get(1) if is_known else run(kind, name, count, seconds)
                if rate is None:
                    cells.append("- | -")
                    continue
                found[kind][count] = rate
                one = found[kind].get(1)
                cells.append(f"{rate:,.0f} | " + (f"{rate / one / count:.2f}" if one else "-"))
            rates = [found[kind].get(count) for kind in KINDS]
            ratio = f"{rates[0] / rates[-1]:.2f}" if rates[0] and rates[-1] else "-"
            print(f"| {name} | {count} | {' | '.join(cells)} | {ratio} |", flush=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=KINDS, required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    if given.work == "PyTorch DDP":
        took = ddp(given.workload, given.seconds)
    else:
        took = ours(given.workload, given.seconds, exchanges=given.work == "mlcompute")
    print(json.dumps({"seconds": took}), flush=True)
