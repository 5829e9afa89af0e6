"""Training steps on several processes, beside PyTorch's DistributedDataParallel: samples per second, and efficiency.

python -m benchmarks --processes 1,2,4 --only mlp64,lenet,resnet20

Every process computes with one thread and has the workload's own batch, so P processes run P times as many samples. A
group has as many slices as processes: as in DDP, each runs its own part in one pass.

All that is compared is compared within one launch, in turns of a fraction of a second, round after round, and every
process is bound to a core of its own: machines lend cores of different speeds, which change from second to second.

    alone              processes train without a group, one after the other, while the others sleep
    without exchange   all processes train at once, each by itself: what memory and clock of the machine leave
    at the slowest     as many times the slowest of those: no faster can processes be that wait for each other
    group              all train together
    torch, DDP         PyTorch in each process alone, and in all together

Efficiency is the rate of all divided by the sum of what each does alone in the same round, the median over the rounds:
a machine that is faster for some seconds is so for both. All turns are equally long: the median of shorter ones would
know less of what disturbs a step every now and then, and those who are alone would seem faster than they are. Of more
than four processes, four others are alone in every round, and count for all. BENCHMARK_BIND=0 lets the system choose
cores.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.workloads import ALL, Workload

KINDS = ("alone", "without exchange", "at the slowest", "group", "torch", "DDP")
#: Seconds a process waits for the others before it gives up.
PATIENCE = 120.0
#: Seconds of steps before those that are timed.
WARM_UP = 0.03
#: How many processes, one after the other, are alone in a round; of more than that, others in the next one.
MOST_ALONE = 4
#: By kind: samples per second of all processes in each round.
Rates = dict[str, list[float]]


@dataclass
class Turn:
    """What is measured in turn.

    is_alone   processes run one after the other, while the others sleep
    together   processes wait for each other in every step: all take as many steps, after some that are not timed
    """

    step: Callable[[], object]
    is_alone: bool = False
    together: bool = False
    steps: int = 1
    warms: int = 1


class Start:
    """Where processes of one machine begin at the same moment; until then they sleep.

    A waiting process must not take a core, nor half of one, from another that is measured: so it looks at words in a
    file that all map, and sleeps in between. (Barriers of MPI and of a group spin.)
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._rank, self._size, self._number = rank, size, 0
        with path.open("r+b") as file:
            self._words = np.frombuffer(mmap.mmap(file.fileno(), 8 * (size + 3)), np.int64)

    def wait(self, word: int = 0) -> int:
        """Return at the same moment everywhere; rank 0's word."""
        self._number += 1
        words, size, end = self._words, self._size, time.monotonic() + PATIENCE
        words[self._rank] = self._number
        while self._rank == 0 and int(words[:size].min()) < self._number:
            self._sleep(end)
        if self._rank == 0:
            words[size + 1], words[size + 2] = word, time.monotonic_ns() + 5_000_000
            words[size] = self._number
        while words[size] < self._number:
            self._sleep(end)
        word, moment = int(words[size + 1]), int(words[size + 2])
        time.sleep(max(0.0, (moment - time.monotonic_ns()) * 1e-9 - 1e-3))
        while time.monotonic_ns() < moment:
            pass
        return word

    def _sleep(self, end: float) -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"rank {self._rank} waited {PATIENCE:g} s for the others")
        time.sleep(2e-3)


def measured(turns: Mapping[str, Turn], start: Start, rank: int, size: int, rounds: int, seconds: float) -> Rates:
    """Steps per second of this process, by turn and round; 0 where it was not its turn to be alone."""
    found: Rates = {kind: [] for kind in turns}
    for turn in turns.values():
        start.wait()
        for _ in range(3):
            turn.step()
        begun = time.perf_counter()
        turn.step()
        took = max(1e-6, time.perf_counter() - begun)
        turn.steps = start.wait(max(2, round(seconds / took)))
        turn.warms = start.wait(max(1, round(WARM_UP / took)))
    for number in range(rounds):
        for kind, turn in turns.items():
            if turn.is_alone:
                found[kind].append(0.0)
                for one in range(min(size, MOST_ALONE)):
                    start.wait()
                    if rank == (number * MOST_ALONE + one) % size:
                        found[kind][-1] = steps_for(turn.step, seconds)
                continue
            start.wait()
            found[kind].append(steps_of(turn) if turn.together else steps_for(turn.step, seconds))
    return found


def steps_for(step: Callable[[], object], seconds: float) -> float:
    """Steps per second of a process by itself. All take the same time: the fastest must not leave the machine early."""
    warm_up(step)
    count, begun = 0, time.perf_counter()
    while count < 2 or time.perf_counter() - begun < seconds:
        step()
        count += 1
    return count / (time.perf_counter() - begun)


def warm_up(step: Callable[[], object]) -> None:
    """A core that was asleep begins slowly, with empty caches."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_UP:
        step()


def steps_of(turn: Turn) -> float:
    """Steps per second of processes that wait for each other in every step."""
    for _ in range(turn.warms):
        turn.step()
    begun = time.perf_counter()
    for _ in range(turn.steps):
        turn.step()
    return turn.steps / (time.perf_counter() - begun)


def ours(workload: Workload, size: int) -> dict[str, Turn]:
    """Steps of this process by itself and of the group it belongs to."""
    import mlcompute as mlc
    from benchmarks.contenders.ours import SYNCHRONOUS, training

    def made(group: mlc.Group | None) -> Callable[[], object]:
        batch = workload.input_shape[0] * (1 if group is None else size)
        described = training(replace(workload, input_shape=(batch, *workload.input_shape[1:])))
        described.graph.compile(device=mlc.Device.cpu(), group=group)
        return lambda: described.graph.execute(described.inputs, described.labels, options=SYNCHRONOUS)

    single = made(None)
    if size == 1:
        return {"alone": Turn(single, is_alone=True)}
    group = made(mlc.Group.world(slices=size, timeout=PATIENCE))
    return {
        "alone": Turn(single, is_alone=True),
        "without exchange": Turn(single),
        "group": Turn(group, together=True),
    }


def ddp(workload: Workload, rank: int, size: int, meeting_place: Path) -> dict[str, Turn]:
    """The same in PyTorch; nothing where it is not installed."""
    try:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F
    except ImportError:
        return {}
    from benchmarks.contenders.pytorch import initialized
    from benchmarks.workloads import BETA1, BETA2, EPSILON, LEARNING_RATE

    torch.set_num_threads(1)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=size)
    inputs, classes = workload.batch()
    x, y = torch.from_numpy(inputs), torch.from_numpy(classes).reshape(-1)

    def made(is_alone: bool) -> Callable[[], object]:
        model, parameters = initialized(workload)
        if not is_alone:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(parameters, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x).flatten(0, -2), y).backward()
            optimizer.step()

        return step

    turns = {"torch": Turn(made(is_alone=True), is_alone=True)}
    return turns if size == 1 else {**turns, "DDP": Turn(made(is_alone=False), together=True)}


def bind(rank: int, size: int) -> None:
    """A core of its own for this process, where the system can do that and there are enough."""
    if hasattr(os, "sched_setaffinity") and os.environ.get("BENCHMARK_BIND") != "0":
        cores = sorted(os.sched_getaffinity(0))
        if size <= len(cores):
            os.sched_setaffinity(0, {cores[rank]})


def work(folder: Path, names: Sequence[str], rounds: int, seconds: float, *, has_ddp: bool) -> None:
    """What each process of a launch does: workload after workload, the rates of each in a file."""
    rank, size = (int(os.environ.get(f"OMPI_COMM_WORLD_{what}", less)) for what, less in (("RANK", 0), ("SIZE", 1)))
    bind(rank, size)
    start = Start(folder / "start", rank, size)
    for name in names:
        turns = ours(ALL[name], size)
        if has_ddp:
            turns |= ddp(ALL[name], rank, size, folder / "ddp")
        found = measured(turns, start, rank, size, rounds, seconds)
        (folder / f"{name}.{rank}").write_text(json.dumps(found))
        start.wait()


def run(names: Sequence[str], processes: int, rounds: int, seconds: float, *, has_ddp: bool) -> dict[str, Rates]:
    """Samples per second of all processes of one launch, by workload; workloads are missing after a failure."""
    from mlcompute.cli.launch import mpirun_command

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "start").write_bytes(bytes(8 * (processes + 3)))
        words = ["-m", "benchmarks.processes", "--folder", temporary, "--workloads", ",".join(names)]
        words += ["--rounds", str(rounds), "--seconds", str(seconds), *(["--ddp"] if has_ddp else [])]
        command = [*(mpirun_command(processes) if processes > 1 else []), sys.executable, *words]
        environment = {**os.environ, "MLCOMPUTE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
        if done.returncode != 0:
            print(f"{processes} processes: {done.stderr.strip()[-600:]}", file=sys.stderr)
        results: dict[str, Rates] = {}
        for name in names:
            files = [folder / f"{name}.{rank}" for rank in range(processes)]
            if all(file.exists() for file in files):
                results[name] = joined([json.loads(file.read_text()) for file in files], ALL[name].input_shape[0])
        return results


def joined(found: Sequence[Rates], batch: int) -> Rates:
    """Samples per second of all processes, from the steps per second of each."""
    count, rates = len(found), Rates()
    for kind in found[0]:
        rounds = list(zip(*(one[kind] for one in found), strict=True))
        slowest = [batch * count * min(each) for each in rounds]
        # Of those that were alone, in the name of all.
        means = [batch * count * statistics.mean(one for one in each if one > 0) for each in rounds]
        rates[kind] = slowest if kind in ("group", "DDP") else means
        if kind == "without exchange":
            rates["at the slowest"] = slowest
    return rates


def row(name: str, processes: int, rates: Rates) -> str:
    """A line of the table: medians over the rounds, in brackets by the fastest rounds."""

    def efficiency(kind: str) -> str:
        one = rates["torch" if kind == "DDP" else "alone"]
        middle = statistics.median(all_ / alone for all_, alone in zip(rates[kind], one, strict=True))
        return f"{middle:.2f} ({max(rates[kind]) / max(one):.2f})"

    cells = [name, str(processes)]
    for kind in KINDS:
        if kind not in rates:
            cells.append("-")
        elif kind in ("alone", "torch"):
            middle, least, most = (of(rates[kind]) / processes for of in (statistics.median, min, max))
            cells.append(f"{middle:,.0f} ({least:,.0f} to {most:,.0f})")
        elif kind in ("group", "DDP"):
            cells.append(f"{statistics.median(rates[kind]):,.0f}, {efficiency(kind)}")
        else:
            cells.append(efficiency(kind))
    medians = {kind: statistics.median(rates[kind]) for kind in rates}
    theirs = medians.get("DDP", medians.get("torch"))
    cells.append(f"{medians.get('group', medians['alone']) / theirs:.2f}" if theirs else "-")
    return f"| {' | '.join(cells)} |"


def compare(
    names: Sequence[str], counts: Sequence[int], rounds: int, seconds: float, *, has_ddp: bool = True
) -> dict[str, dict[int, Rates]]:
    """Print a table as it grows; all numbers, by workload and number of processes."""
    results: dict[str, dict[int, Rates]] = {name: {} for name in names}
    print("Samples per second (of one process alone: medians, and from the slowest round to the fastest),")
    print("efficiency: the median over rounds, in brackets by the fastest rounds.")
    print(f"| workload | processes | {' | '.join(KINDS)} | ratio |")
    print("| " + "--- | " * (len(KINDS) + 3))
    for count in counts:
        for name, rates in run(names, count, rounds, seconds, has_ddp=has_ddp).items():
            results[name][count] = rates
            print(row(name, count, rates), flush=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--ddp", action="store_true")
    given = parser.parse_args()
    work(given.folder, given.workloads.split(","), given.rounds, given.seconds, has_ddp=given.ddp)
