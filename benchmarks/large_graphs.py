"""Seconds to describe and to compile graphs of very many layers for the CPU, each in a process of its own.

python -m benchmarks.large_graphs              100,000 layers
python -m benchmarks.large_graphs 20000        so many
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import mlcompute as mlc
from benchmarks.printing import readers_may_leave

#: "relu": a chain of activations. "mixed": blocks of a dense layer, ReLU, and a sum with the block's source.
ROWS = (("relu", "inference"), ("mixed", "inference"), ("mixed", "training, whole steps"), ("mixed", "training"))


def measure(kind: str, style: str, layers: int) -> tuple[float, float]:
    """Seconds to describe, and to compile."""
    start = time.perf_counter()
    network = mlc.Graph()
    x = y = network.input((4, 8), "x")
    for number in range(layers):
        if kind == "relu":
            y = network.node(mlc.ActivationLayer.relu(), source=y)
        elif number % 3 == 0:
            inner = network.dense(y, 8)
        elif number % 3 == 1:
            inner = network.node(mlc.ActivationLayer.relu(), source=inner)
        else:
            y = network.add(y, inner)
    options = mlc.GraphCompilationOptions(0)
    if style.startswith("training"):
        if style != "training":  # passes that are run one by one are left for later
            options = mlc.GraphCompilationOptions.DEFER_SINGLE_PASSES
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        optimizer = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
        training = mlc.TrainingGraph([network], loss, optimizer)
        training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(4, 8))})
        graph: mlc.TrainingGraph | mlc.InferenceGraph = training
    else:
        graph = mlc.InferenceGraph([network])
        graph.add_inputs({"x": x})
    described = time.perf_counter()
    graph.compile(options=options, device=mlc.Device.cpu())
    return described - start, time.perf_counter() - described


def main() -> None:
    """Print a line per graph."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_graphs", description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="?", type=int, default=100_000)
    layers: int = parser.parse_args().layers
    print(f"{f'{layers:,} layers, seconds':28} {'describe':>9} {'compile':>9}")
    for kind, style in ROWS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(measure, (kind, style, 300))  # machine code and what else is made once
            described, compiled = pool.apply(measure, (kind, style, layers))
        print(f"{f'{kind}, {style}':28} {described:9.1f} {compiled:9.1f}", flush=True)


if __name__ == "__main__":
    with readers_may_leave():
        main()
