"""What every thread does in a training step: which kernels it runs, and how long it waits for the others.

    python -m benchmarks.thread_trace gpt [--threads 16] [--steps 100] [--each]

A profile says how long a kernel takes as the calling thread sees it. Here all threads read the clock at every kernel:
"run" is the mean over them, "slowest" the longest of them, "waits" the mean wait at the barrier behind the kernel, all
summed over kernels of the same name and result, microseconds of the faster half of the steps. "estimate" is what the
scheduler thinks. With `--each` every kernel has a line: W a barrier precedes it, A one thread runs it, and the pieces
into which a thread's work is cut. "cores" is how long each thread computes, relative to the mean: others wait for
a core that is slower.

The time of a barrier tells how far the cores are from each other: virtual machines move them. Two that share a cache
were seen to take 0.1 microseconds, two that do not 0.4, and then everything that threads exchange takes longer.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np

from benchmarks.printing import readers_may_leave


def trace(name: str, steps: int) -> tuple[list[Any], Any, Any, Any, list[float]]:
    """Entries, their turns, (entries, 3) mean run, slowest run and mean wait before each in seconds; the time each
    thread computes, relative to their mean; and the seconds of all steps."""
    import mlcompute as mlc
    from benchmarks.contenders import ours
    from benchmarks.workloads import ALL
    from mlcompute.devices import engine_of
    from mlcompute.devices.aligned_memory import aligned
    from mlcompute.devices.cpu.executable import CpuExecutable
    from mlcompute.devices.cpu.runtime.threads import ARRIVED, BEGAN, ENDED
    from mlcompute.runtime.call_data import named_data
    from mlcompute.runtime.calls import phases_to_execute
    from mlcompute.runtime.dry_run import bindings_of_copies
    from mlcompute.runtime.session import session_of

    described = ours.training(ALL[name])
    graph, device = described.graph, mlc.Device.cpu()
    graph.compile(device=device)
    session, engine = session_of(graph), engine_of(device)
    batch, phases = len(next(iter(described.inputs.values()))), phases_to_execute(session)
    program = session.program("fused", batch)
    data = named_data(session, "trace", described.inputs, described.labels, None)
    executable = engine.build(program, engine.allocate(program.plan.nbytes))
    assert isinstance(executable, CpuExecutable)
    copies = bindings_of_copies("trace", session, program, phases, data)
    executable.run_once(engine, phases, {value: aligned(array) for value, array in copies.items()})
    for _ in range(steps // 4):
        executable.run(phases)
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        ((entries, turns, times),) = executable.trace(phases)
        found.append((time.perf_counter() - start, times))
    found.sort(key=lambda run: run[0])
    kept = found[: max(1, steps // 2)]
    sums, busy = np.zeros((len(entries), 3)), np.zeros(len(kept[0][1]))
    for seconds, times in kept:
        run, wait = times[..., ENDED] - times[..., BEGAN], times[..., BEGAN] - times[..., ARRIVED]
        unit = seconds / (times[..., ENDED].max() - times[..., ARRIVED].min())
        busy += run.sum(1)
        sums += unit * np.stack([run.mean(0), run.max(0), wait.mean(0)], axis=1)
    return entries, turns, sums / len(kept), busy / busy.mean(), [seconds for seconds, _ in found]


def barrier_seconds(threads: int, count: int = 10_000) -> float:
    """What a barrier takes when all threads come to it at once: the least of several turns."""
    from mlcompute.devices.cpu.codegen.code import Code
    from mlcompute.devices.cpu.jit.cache import kernel_cache
    from mlcompute.devices.cpu.runtime.threads import BARRIER_WORDS, WAIT, Team

    (kernel,) = kernel_cache.addresses([Code("nothing")])
    tape, barrier = np.array([[kernel, 0, WAIT, 0]] * count, np.int64), np.zeros(BARRIER_WORDS, np.int64)
    job, team, seconds = np.array([tape.ctypes.data, count, barrier.ctypes.data, 0, 0], np.int64), Team(threads), []
    for _ in range(5):
        start = time.perf_counter()
        team.run(job.ctypes.data, threads)
        seconds.append(time.perf_counter() - start)
    team.stop()
    return min(seconds) / count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thread_trace", description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--threads", type=int, default=0, help="by default the cores this process may use")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--each", action="store_true", help="every kernel, instead of sums over like ones")
    options = parser.parse_args()
    if options.threads:
        os.environ["MLCOMPUTE_NUM_THREADS"] = str(options.threads)
    entries, turns, seconds, busy, steps = trace(options.workload, options.steps)
    from mlcompute.devices.cpu.runtime.threads import ALONE, TURN_PIECES, WAIT

    threads = options.threads or len(os.sched_getaffinity(0))
    waits_behind = np.append(seconds[1:, 2], 0.0)
    print(
        f"{options.workload}: {1e3 * steps[0]:.3f} ms at best, {1e3 * steps[len(steps) // 2]:.3f} median; "
        f"kernels {1e3 * seconds[:, 0].sum():.3f}, waits {1e3 * seconds[:, 2].sum():.3f}; "
        f"{len(entries)} kernels, {int((turns & WAIT).sum())} barriers of {1e6 * barrier_seconds(threads):.2f} us"
    )
    print("cores " + " ".join(f"{share:.2f}" for share in busy))
    rows: dict[str, list[float]] = {}
    for place, (entry, turn) in enumerate(zip(entries, turns.tolist(), strict=True)):
        text = f"{entry.kernel} {list(entry.writes[0].shape) if entry.writes else ''}"
        if options.each:
            marks = ("W" if turn & WAIT else " ") + ("A" if turn & ALONE else " ")
            text = f"{place:4d} {marks} {turn >> TURN_PIECES & 255:3d} {text} {entry.step.layer} {entry.step.phase}"
        row = rows.setdefault(text, [0.0] * 5)
        for column, number in enumerate((1, *seconds[place, :2], waits_behind[place], entry.cost / 1e9 / threads)):
            row[column] += float(number)
    print(f"{'count':>6}{'run':>10}{'slowest':>10}{'waits':>10}{'estimate':>10}  kernel")
    order = rows.items() if options.each else sorted(rows.items(), key=lambda item: -item[1][1] - item[1][3])
    for text, (count, *times) in order:
        print(f"{count:>6.0f}" + "".join(f"{1e6 * number:>10.1f}" for number in times) + f"  {text}")


if __name__ == "__main__":
    with readers_may_leave():
        main()
