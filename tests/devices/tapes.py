"""The tape of a training step as a number of threads would run it: which kernels, and in which turns."""

from __future__ import annotations

import mlcompute as mlc
from mlcompute.compiler import compile_program
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.executable import CpuExecutable
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.runtime.session import session_of


def dense_layers(rows: int, width: int) -> mlc.TrainingGraph:
    """Two dense layers with an activation between them, Adam; compiled."""
    graph = mlc.Graph()
    x, t = graph.input((rows, width), "x"), mlc.Tensor(shape=(rows, width))
    y = graph.dense(graph.dense(x, width, activation="relu"), width)
    training = mlc.TrainingGraph(
        [graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), mlc.AdamOptimizer(learning_rate=0.1)
    )
    training.add_inputs({"x": x}, {"t": t})
    training.add_outputs({"y": y})
    training.compile(device=mlc.Device.cpu())
    return training


def tape(training: mlc.TrainingGraph, threads: int) -> list[tuple[Entry, int]]:
    """Every kernel of a fused step, and its turn."""
    engine = Cpu(threads)
    program = compile_program(session_of(training).compile_if_needed(), engine, "fused")
    executable = engine.build(program, engine.allocate(program.plan.nbytes))
    assert isinstance(executable, CpuExecutable)
    (segment,) = executable._segments(("forward", "gradient", "update"))
    assert segment.tape is not None
    entries = [executable._calls.entries[number] for number in executable._calls.which[segment.rows].tolist()]
    return list(zip(entries, segment.tape[:, 2].tolist(), strict=True))
