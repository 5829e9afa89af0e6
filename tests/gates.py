"""An engine held at a gate, and a graph whose runs can fail: what tests of runs in the background share."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np

import mlcompute as mlc
from tests.nets import MEAN, CpuEngine, adam, cpu, normal, tensor


class Gate(CpuEngine):
    """The CPU's engine, held at a gate: what is queued stays queued until the test opens it."""

    # A run that may start ahead is started by the caller, who would wait at the gate himself.
    traits = replace(CpuEngine.traits, runs_ahead=False)

    def __init__(self) -> None:
        super().__init__()
        self.name = "gate"  # and so with a queue of its own
        self.is_open = threading.Event()

    def build(self, *arguments: Any, **settings: Any) -> Any:
        executable = super().build(*arguments, **settings)
        run = executable.run

        def gated(*arguments: Any) -> Any:
            assert self.is_open.wait(30)
            return run(*arguments)

        executable.run = gated  # type: ignore[method-assign]
        return executable


def gated() -> tuple[mlc.Device, threading.Event]:
    engine = Gate()
    return mlc.Device(mlc.DeviceType.CPU, engine=engine), engine.is_open


class Lookup:
    """i (2,) -> rows of a table, with a loss: an index out of range makes a run fail."""

    def __init__(self, device: mlc.Device | None = None) -> None:
        self.i = mlc.Tensor(shape=(2,), data_type=mlc.DataType.INT32)
        self.t = mlc.Tensor(shape=(2, 3))
        self.optimizer = adam()
        self.training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), self.optimizer)
        table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 3), tensor(normal(4, 3)))
        self.y = self.training.node(table, source=self.i)
        self.training.add_inputs({"i": self.i}, {"t": self.t})
        self.device = device or cpu()
        self.training.compile(device=self.device)

    def step(self, *indices: int, **more: Any) -> mlc.Execution:
        return self.training.execute({"i": np.int32(indices)}, {"t": np.zeros((2, 3), np.float32)}, **more)
