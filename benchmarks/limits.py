"""What a training step could take at best, and what it does with the time: products against the machine's sgemm rate.

    python -m benchmarks.limits [--only gpt,wide_mlp] [--threads 2] [--seconds 2]

"floor" is the time that the step's products and convolutions, counted as plain sums, would take at the rate of a large
float32 product (the fastest of NumPy's BLAS, oneDNN and our own gemm): no less, except by Winograd's form, which
multiplies less. "of sgemm" is the floor divided by the fastest step. The other columns are shares of the step, each
kernel at its fastest: products and convolutions, attention, recurrent layers, updates, all other loops.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict

from benchmarks.printing import readers_may_leave

#: Op -> column; ops that update parameters and everything else have columns of their own.
_KINDS = {
    "matmul": "products", "matmul_update": "products", "convolution": "products",
    "attention": "attention", "attention_gradient": "attention", "attention_mask_gradient": "attention",
    "attention_by_token": "attention", "attention_by_token_gradient": "attention",
    "lstm": "recurrent", "lstm_gradient": "recurrent", "rnn": "recurrent", "rnn_gradient": "recurrent",
    "convolution_input_gradient": "products", "convolution_weight_gradient": "products",
}  # fmt: skip
COLUMNS = ("products", "attention", "recurrent", "updates", "other loops")


def kind_of(op: str, phase: str) -> str:
    """The column of a kernel."""
    return _KINDS.get(op, "updates" if phase == "update" else "other loops")


def sgemm_rate(seconds: float) -> float:
    """Multiplications and additions per second, at the fastest."""
    from benchmarks.contenders import sgemm
    from benchmarks.workloads import TINY

    step, best, end = sgemm.build(TINY, "train").step, float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return sgemm.FLOPS / best


def measure(name: str, seconds: float) -> tuple[float, dict[str, float]]:
    """The fastest step in seconds, and its kernels' seconds by column."""
    import mlcompute as mlc
    from benchmarks.contenders import ours
    from benchmarks.workloads import ALL

    described = ours.training(ALL[name])
    graph, inputs, labels = described.graph, described.inputs, described.labels
    graph.compile(device=mlc.Device.cpu())
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        graph.execute(inputs, labels, options=mlc.ExecutionOptions.SYNCHRONOUS)
        best = min(best, time.perf_counter() - start)
    runs = graph.profile(inputs, labels, steps=max(3, int(seconds / best / 2))).runs
    parts: dict[str, float] = defaultdict(float)
    for events in zip(*runs, strict=True):
        parts[kind_of(events[0].op, events[0].phase)] += min(event.seconds for event in events)
    return best, parts


def main() -> None:
    from benchmarks.workloads import ALL

    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ALL), help="workloads, separated by commas")
    parser.add_argument("--threads", type=int, default=0, help="by default the cores this process may use")
    parser.add_argument("--seconds", type=float, default=2.0, help="for the steps of a workload")
    options = parser.parse_args()
    if options.threads:
        for variable in ("MLCOMPUTE_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(options.threads)
    rate = sgemm_rate(options.seconds)
    print(f"sgemm: {rate / 1e9:.0f} GFLOP/s")
    print(f"{'workload':<14}{'step ms':>10}{'floor ms':>10}{'of sgemm':>10}" + "".join(f"{c:>13}" for c in COLUMNS))
    for name in options.only.split(","):
        best, parts = measure(name, options.seconds)
        floor = ALL[name].flops("train") / rate
        shares = "".join(f"{parts[column] / sum(parts.values()):>13.0%}" for column in COLUMNS)
        print(f"{name:<14}{1e3 * best:>10.3f}{1e3 * floor:>10.3f}{floor / best:>10.0%}{shares}", flush=True)


if __name__ == "__main__":
    with readers_may_leave():
        main()
