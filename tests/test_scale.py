"""Large graphs: work grows with the number of layers and no faster, depth has no limit, sizes go beyond 32 bits."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.compiler import compile_program
from mlcompute.devices.device import Traits
from mlcompute.devices.null import Null

#: How many nodes the slow test compiles.
NODES = int(os.environ.get("MLC_SCALE_NODES", "100000"))
WIDTH = 4


class Chain:
    """Blocks of fully connected, ReLU and a sum with the block's source, one after the other."""

    def __init__(self, nodes: int, batch: int = 2, optimizer: mlc.Optimizer | None = None) -> None:
        self.graph = mlc.Graph()
        self.x, self.t = mlc.Tensor(shape=(batch, WIDTH)), mlc.Tensor(shape=(batch, WIDTH))
        self.optimizer = optimizer or mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3))
        descriptor = mlc.ConvolutionDescriptor(input_feature_channel_count=WIDTH, output_feature_channel_count=WIDTH)
        h = self.x
        for _ in range(nodes // 3):
            # So small that a thousand blocks neither explode nor vanish.
            w = mlc.Tensor(shape=(WIDTH, WIDTH), data=np.eye(WIDTH, dtype=np.float32) * 1e-4)
            b = mlc.Tensor(shape=(WIDTH,), fill_with_data=1e-4)
            y = self.graph.node(mlc.FullyConnectedLayer(w, b, descriptor), source=h)
            y = self.graph.node(mlc.ActivationLayer.relu(), source=y)
            h = self.graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[h, y])
        self.y = h

    def inference(self, device: mlc.Device) -> mlc.InferenceGraph:
        graph = mlc.InferenceGraph([self.graph])
        graph.add_inputs({"x": self.x})
        graph.compile(device=device)
        return graph

    def training(self, device: mlc.Device) -> mlc.TrainingGraph:
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        graph = mlc.TrainingGraph([self.graph], loss, self.optimizer)
        graph.add_inputs({"x": self.x}, {"t": self.t})
        graph.compile(device=device)
        return graph


class Merging(Null):
    """Asks the compiler for everything it can do."""

    traits = Traits(fuses_elementwise=True, channels_last=True)


def null() -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=Merging())


# Linear -------------------------------------------------------------------------------------------------------------


def count_lines(work: Callable[[], Any]) -> int:
    """How many lines of Python run: a measure of work that no other process can disturb."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    collects = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


@pytest.fixture
def without_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_DEBUG", "")


@pytest.mark.usefixtures("without_verifying")
@pytest.mark.parametrize("style", ["inference", "training", "adam"])
def test_compiling_four_times_as_many_layers_is_four_times_the_work(style: str) -> None:
    def work(nodes: int) -> int:
        optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3)) if style == "adam" else None
        chain = Chain(nodes, optimizer=optimizer)
        return count_lines(lambda: chain.inference(null()) if style == "inference" else chain.training(null()))

    work(30)  # what is made once per process
    small, large = work(150), work(600)
    assert large < 4.4 * small


@pytest.mark.usefixtures("without_verifying")
def test_building_four_times_as_many_layers_is_four_times_the_work() -> None:
    Chain(30)
    small, large = count_lines(lambda: Chain(150)), count_lines(lambda: Chain(600))
    assert large < 4.1 * small


def test_steps_and_memory_grow_with_the_layers() -> None:
    sizes = {}
    for nodes in (300, 600, 1200):
        inference, training = Chain(nodes).inference(null()), Chain(nodes).training(null())
        (program,) = inference.programs.values()
        fused = training.programs["fused 2"]
        sizes[nodes] = (len(program.steps), len(fused.steps), inference.device_memory_size, training.device_memory_size)
    few, more, most = sizes.values()
    assert most[0] - more[0] == 2 * (more[0] - few[0])
    assert most[1] - more[1] == 2 * (more[1] - few[1])
    assert few[2] == more[2] == most[2], "a chain runs forward in the same memory however long it is"
    assert most[3] < 2.1 * more[3]


@pytest.mark.usefixtures("without_verifying")
@pytest.mark.parametrize("style", ["inference", "split"])
def test_long_chains_of_maps_are_not_one_endless_loop(style: str) -> None:
    def work(nodes: int) -> int:
        x = mlc.Tensor(shape=(4, 6))
        graph = mlc.InferenceGraph() if style == "inference" else mlc.TrainingGraph()
        y = x
        for _ in range(nodes):
            y = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[y, x])
        graph.compile(device=null())
        return count_lines(lambda: compile_program(graph._session.compile_if_needed(), Merging(), style))

    work(30)
    assert work(600) < 4.4 * work(150)


@pytest.mark.usefixtures("without_verifying")
def test_long_chains_of_views_are_followed_once() -> None:
    def work(nodes: int) -> int:
        graph = mlc.InferenceGraph()
        y = mlc.Tensor(shape=(nodes + 1, 2))
        for extent in range(nodes + 1, 1, -1):
            y = graph.node(mlc.SliceLayer((1, 0), (extent, 2)), source=y)
        return count_lines(lambda: graph.compile(device=null()))

    work(30)
    assert work(600) < 4.4 * work(150)


# Deep ---------------------------------------------------------------------------------------------------------------


def test_a_thousand_layers_run_forward_and_back() -> None:
    """x doubles nowhere: y = x + 334 (1e-4 x + 1e-4) roughly, and so does its gradient."""
    chain = Chain(1002)
    assert len(chain.graph.layers) == 1002 > sys.getrecursionlimit() / 2
    x = np.ones((2, WIDTH), np.float32)
    expected = x.astype(np.float64)
    for _ in range(334):
        expected = expected + (1e-4 * expected + 1e-4)
    device = mlc.Device(mlc.DeviceType.CPU)
    np.testing.assert_allclose(chain.inference(device).execute({"x": x}).result.data, expected, rtol=1e-5)
    training = chain.training(device)
    first = training.execute({"x": x}, {"t": np.zeros((2, WIDTH), np.float32)}).result.data
    np.testing.assert_allclose(first, np.mean(expected**2), rtol=1e-5)
    second = training.execute({"x": x}, {"t": np.zeros((2, WIDTH), np.float32)}).result.data
    assert second < first
    assert "fully_connected_333" in str(next(iter(training.programs.values())))


def test_deep_graphs_can_be_printed_and_dropped() -> None:
    chain = Chain(3000)
    assert len(str(chain.graph).splitlines()) == 3001
    assert chain.graph.summarized_dot_description.count("->") == 4000
    training = chain.training(null())
    del chain, training
    gc.collect()


# Large and small batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 65536])
def test_extreme_batches(batch: int) -> None:
    chain = Chain(6, batch=batch)
    x = np.random.default_rng(0).standard_normal((batch, WIDTH)).astype(np.float32)
    t = np.zeros((batch, WIDTH), np.float32)
    device = mlc.Device(mlc.DeviceType.CPU)
    y = chain.inference(device).execute({"x": x}).result.data
    h = x.astype(np.float64)
    for _ in range(2):
        h = h + np.maximum(1e-4 * h + 1e-4, 0)
    np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-6)
    loss = chain.training(device).execute({"x": x}, {"t": t}).result.data
    np.testing.assert_allclose(loss, np.mean(h**2), rtol=1e-4)


# Beyond 32 bits -------------------------------------------------------------------------------------------------------


def test_sizes_beyond_32_bits_are_planned_exactly() -> None:
    """2^33 elements, 2^35 bytes, never allocated."""
    side = 1 << 16
    x = mlc.Tensor(shape=(side, side * 2))
    assert x.descriptor.element_count == 1 << 33
    assert x.descriptor.stride == (side * 8, 4)
    assert x.descriptor.tensor_allocation_size_in_bytes == 1 << 35
    graph = mlc.InferenceGraph()
    y = graph.node(mlc.ActivationLayer.relu(), source=x)
    z = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[y, graph.transpose((0, 1), source=y)])
    total = graph.node(mlc.ReductionLayer(mlc.ReductionType.SUM, 1), source=z)
    assert total.descriptor.shape == (side, 1)
    graph.compile(device=null())
    (program,) = graph.programs.values()
    assert max(value.nbytes for value in program.plan.placements) == 1 << 35
    assert graph.device_memory_size >= 1 << 35
    ends = [place.offset + place.nbytes for place in program.plan.placements.values()]
    assert max(ends) == program.plan.nbytes > 1 << 32


def test_reshapes_count_beyond_32_bits() -> None:
    graph = mlc.Graph()
    x = mlc.Tensor(shape=(1 << 16, 1 << 16, 3))
    assert graph.reshape((1 << 16, -1), source=x).descriptor.shape == (1 << 16, 3 << 16)
    with pytest.raises(mlc.ShapeError, match="elements"):
        graph.reshape((1 << 16, 1 << 16), source=x)
    with pytest.raises(mlc.ShapeError, match="more elements than any memory"):
        mlc.Tensor(shape=(1 << 31, 1 << 31, 2))


# The real thing -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("without_verifying")
@pytest.mark.parametrize("style", ["inference", "training"])
def test_a_hundred_thousand_nodes(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how long it takes; on an idle machine the bar is ten seconds."""
    start = time.process_time()
    chain = Chain(NODES)
    built = time.process_time()
    graph = chain.inference(null()) if style == "inference" else chain.training(null())
    compiled = time.process_time()
    program = next(iter(graph.programs.values()))
    assert len(program.steps) > NODES / 2
    with capsys.disabled():
        print(f"\n{NODES} nodes, {style}: built in {built - start:.1f} s, compiled in {compiled - built:.1f} s")
