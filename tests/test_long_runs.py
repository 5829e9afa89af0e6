"""Long runs: a step leaves nothing behind, however many there are."""

from __future__ import annotations

import faulthandler
import os
import tracemalloc

import numpy as np
import pytest

import mlcompute as mlc
from tests.footprint import Footprint

#: How many steps the slow test takes.
STEPS = int(os.environ.get("MLC_LONG_RUN_STEPS", "1000000"))


class Perceptron:
    """x (16, 8) -> dense 16 -> ReLU -> dense 4, softmax cross entropy, Adam: small, so that steps cost little."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        x, t = mlc.Tensor(shape=(16, 8)), mlc.Tensor(shape=(16, 4))
        network, y = mlc.Graph(), x
        for inputs, outputs in ((8, 16), (16, 4)):
            weights = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
            sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
            w, b = mlc.Tensor(shape=weights.shape, data=weights), mlc.Tensor(shape=(outputs,), fill_with_data=0.0)
            y = network.node(mlc.FullyConnectedLayer(w, b, sizes), source=y)
            if outputs == 16:
                y = network.node(mlc.ActivationLayer.relu(), source=y)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_count=4)
        optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3))
        self.graph = mlc.TrainingGraph([network], loss, optimizer)
        self.graph.add_inputs({"x": x}, {"t": t})
        self.graph.compile(device=mlc.Device.cpu())
        self.inputs = {"x": rng.standard_normal((16, 8)).astype(np.float32)}
        self.labels = {"t": np.eye(4, dtype=np.float32)[rng.integers(0, 4, 16)]}

    def run(self, steps: int, options: mlc.ExecutionOptions = mlc.ExecutionOptions.SYNCHRONOUS) -> None:
        for _ in range(steps):
            self.graph.execute(self.inputs, self.labels, options=options)
        self.graph.wait()

    @property
    def loss(self) -> float:
        result = self.graph.execute(self.inputs, self.labels).result
        assert result is not None
        assert result.data is not None
        return float(result.data[0])


def test_twenty_thousand_steps_leave_nothing_behind() -> None:
    net = Perceptron()
    first = net.loss
    net.run(2000)
    before = Footprint.now()
    net.run(20_000)
    left = Footprint.now() - before
    assert net.loss < first
    assert left.blocks < 50
    assert left.resident < 1 << 20
    assert left.descriptors == 0


def test_queued_steps_leave_nothing_behind() -> None:
    net = Perceptron()
    net.run(500, mlc.ExecutionOptions.NONE)
    before = Footprint.now()
    net.run(2000, mlc.ExecutionOptions.NONE)
    left = Footprint.now() - before
    assert left.blocks < 50
    assert left.descriptors == 0


def test_a_thousand_steps_allocate_nothing_that_stays() -> None:
    """Python makes small objects for every call and gives them back: none stay, and they never add up."""
    net = Perceptron()
    net.run(1000)
    tracemalloc.start()
    try:
        net.run(10)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        net.run(1)
        _, peak = tracemalloc.get_traced_memory()
        of_one = peak - before
        tracemalloc.reset_peak()
        net.run(1000)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1024, "something of every step stays"
    assert peak - before < of_one + 4096, "steps pile up before they are freed"


@pytest.mark.slow
def test_a_million_steps_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    faulthandler.cancel_dump_traceback_later()  # it takes minutes without hanging
    net = Perceptron()
    net.run(STEPS // 20)
    before = Footprint.now()
    net.run(STEPS)
    left = Footprint.now() - before
    with capsys.disabled():
        print(f"\n{STEPS} steps left {left}")
    assert left.blocks < 100
    assert left.resident < 1 << 20
    assert left.descriptors == 0
    assert left.threads == 0
