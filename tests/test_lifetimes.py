"""What is dropped goes, at once and completely; what is still in use stays."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import statistics
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.device import Buffer
from mlcompute.devices.reference import Reference
from tests.footprint import Footprint

#: How many graphs the slow test makes and drops.
CYCLES = int(os.environ.get("MLC_LIFETIME_CYCLES", "10000"))


class Net:
    """Embedding-free and small: fully connected, ReLU, loss."""

    def __init__(self, width: int = 8, batch: int = 4, device: mlc.Device | None = None) -> None:
        self.width, self.batch = width, batch
        self.device = device or mlc.Device.cpu()
        self.x, self.t = mlc.Tensor(shape=(batch, width)), mlc.Tensor(shape=(batch, width))
        self.w = mlc.Tensor(shape=(width, width), fill_with_data=0.1)
        descriptor = mlc.ConvolutionDescriptor(input_feature_channel_count=width, output_feature_channel_count=width)
        self.graph = mlc.Graph()
        self.layer = mlc.FullyConnectedLayer(self.w, None, descriptor)
        self.h = self.graph.node(self.layer, source=self.x)
        self.y = self.graph.node(mlc.ActivationLayer.relu(), source=self.h)
        self.data = np.ones((batch, width), np.float32)

    def training(self) -> mlc.TrainingGraph:
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
        graph = mlc.TrainingGraph([self.graph], loss, optimizer)
        graph.add_inputs({"x": self.x}, {"t": self.t})
        graph.add_outputs({"y": self.y})
        graph.compile(device=self.device)
        return graph

    def inference(self) -> mlc.InferenceGraph:
        graph = mlc.InferenceGraph([self.graph])
        graph.add_inputs({"x": self.x})
        graph.compile(device=self.device)
        return graph

    def step(self, graph: mlc.TrainingGraph) -> mlc.Execution:
        return graph.execute({"x": self.data}, {"t": self.data})


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Only reference counts free memory here, as they do for most of a program's life."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# What is dropped goes -------------------------------------------------------------------------------------------------


def run_nothing(net: Net) -> object:
    return net.training()


def run_fused(net: Net) -> object:
    graph = net.training()
    net.step(graph).wait()
    return graph


def run_queued(net: Net) -> object:
    graph = net.training()
    runs = [net.step(graph) for _ in range(3)]
    graph.synchronize_updates()
    assert all(run.is_done for run in runs)
    return graph


def run_split(net: Net) -> object:
    graph = net.training()
    names = {"x": net.data, "t": net.data}
    graph.bind_and_write_data(names, for_inputs={"x": net.x, "t": net.t}, to=net.device)
    graph.execute_forward().wait()
    graph.execute_gradient().wait()
    graph.execute_optimizer_update().wait()
    assert graph.gradient_data(net.w, net.layer) is not None
    return graph


def run_smaller_batch(net: Net) -> object:
    graph = net.training()
    graph.execute({"x": net.data}, {"t": net.data}, batch_size=2).wait()
    return graph


def run_inference(net: Net) -> object:
    graph = net.inference()
    graph.execute({"x": net.data}).wait()
    return graph


def run_with_handler(net: Net) -> object:
    graph = net.inference()
    seen: list[object] = []
    graph.execute({"x": net.data}, completion_handler=lambda result, error, seconds: seen.append(graph)).wait()
    graph.wait()
    seen.clear()
    return graph


RUNS = [run_nothing, run_fused, run_queued, run_split, run_smaller_batch, run_inference, run_with_handler]


@pytest.mark.parametrize("run", RUNS)
def test_a_graph_goes_with_its_last_user(run: Callable[[Net], object]) -> None:
    net = Net()
    with without_collector():
        graph = run(net)
        held = weakref.ref(graph)
        del graph
        assert held() is None, "something refers to the graph in a circle"


@pytest.mark.parametrize("run", RUNS)
def test_no_arena_outlives_its_graph(run: Callable[[Net], object]) -> None:
    arenas: list[weakref.ref[Buffer]] = []

    class Watched(Reference):
        def allocate(self, nbytes: int) -> Buffer:
            arena = super().allocate(nbytes)
            arenas.append(weakref.ref(arena))
            return arena

    net = Net(device=mlc.Device(mlc.DeviceType.CPU, engine=Watched()))
    with without_collector():
        graph = run(net)
        assert len(arenas) == (2 if run is run_split else 1), "compile makes one; passes one by one need a larger one"
        del graph
        assert all(arena() is None for arena in arenas)


def test_layers_and_tensors_go_with_the_graph_that_holds_them() -> None:
    with without_collector():
        net = Net()
        graph = net.training()
        net.step(graph).wait()
        held = [weakref.ref(thing) for thing in (net.graph, net.layer, net.w, net.x, net.y)]
        del net, graph
        assert [thing() for thing in held] == [None] * 5


def test_a_failed_run_holds_nothing_once_it_was_reported() -> None:
    x = mlc.Tensor(shape=(2,), data_type=mlc.DataType.INT32)
    graph = mlc.InferenceGraph()
    table = mlc.Tensor(shape=(3, 2), fill_with_data=1.0)
    graph.node(mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(3, 2), table), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    with pytest.raises(mlc.ExecutionError):
        graph.execute({"x": [0, 9]}).wait()
    held = weakref.ref(graph)
    del graph
    gc.collect()
    assert held() is None


# What is in use stays -------------------------------------------------------------------------------------------------


def test_results_outlive_their_graph() -> None:
    net = Net()
    graph = net.training()
    net.step(graph).wait()
    result, weights = net.y.data, net.w.data
    expected, kept = result.copy(), weights.copy()
    state = net.w.optimizer_data
    del graph, net
    gc.collect()
    junk = [np.full((64, 64), np.nan, np.float32) for _ in range(50)]
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(weights, kept)
    assert all(np.isfinite(np.frombuffer(buffer.bytes, np.float32)).all() for buffer in state)
    assert len(junk) == 50


def test_tensors_keep_what_their_graph_computed_last() -> None:
    net = Net()

    def loss_of_one_step() -> mlc.Tensor:
        return net.step(net.training()).result

    loss = loss_of_one_step()
    gc.collect()
    np.testing.assert_allclose(loss.data, (0.8 - 1.0) ** 2, rtol=1e-5)
    np.testing.assert_allclose(net.y.data, np.full((4, 8), 0.8), rtol=1e-5)
    assert net.h.data is None, "nobody asked for it"
    again = net.inference()
    y = again.execute({"x": 2 * net.data}).result
    assert y.of is net.y
    np.testing.assert_allclose(y.data, np.maximum(2 * net.data @ net.w.data.T, 0), rtol=1e-5)


def test_the_last_run_counts_whichever_graph_goes_first() -> None:
    net = Net()
    first, second = net.inference(), net.inference()
    first.execute({"x": net.data}).wait()
    second.execute({"x": 2 * net.data}).wait()
    del second
    np.testing.assert_allclose(net.y.data, 1.6, rtol=1e-5)
    del first
    np.testing.assert_allclose(net.y.data, 1.6, rtol=1e-5)
    third = net.inference()
    np.testing.assert_allclose(net.y.data, 1.6, rtol=1e-5)
    third.execute({"x": 3 * net.data}).wait()
    np.testing.assert_allclose(net.y.data, 2.4, rtol=1e-5)


def test_gradients_outlive_their_graph() -> None:
    net = Net()
    graph = run_split(net)
    assert isinstance(graph, mlc.TrainingGraph)
    gradient = graph.gradient_data(net.w, net.layer)
    expected = gradient.copy()
    del graph
    gc.collect()
    np.testing.assert_array_equal(gradient, expected)


def test_a_queued_run_keeps_what_it_needs() -> None:
    """Graph, tensors and data are dropped while the run waits its turn."""
    blocked, started = threading.Event(), threading.Event()
    first, second = Net(), Net(width=6)
    slow = first.inference()

    def hold(result: object, error: object, seconds: float) -> None:
        started.set()
        blocked.wait(10)

    slow.execute({"x": first.data}, completion_handler=hold)
    assert started.wait(10)
    graph = second.inference()
    run = graph.execute({"x": second.data})
    expected = np.full((4, 6), 0.6, np.float32)
    y = second.y
    del graph, second
    gc.collect()
    blocked.set()
    run.wait()
    assert run.result.of is y
    np.testing.assert_allclose(expected.sum(), 14.4, rtol=1e-6)


def test_an_execution_outlives_its_graph() -> None:
    net = Net()
    run = net.step(net.training())
    assert run.wait().result is not None
    assert run.is_done


def test_weights_shared_with_a_dropped_graph_live_on() -> None:
    net = Net()
    training = net.training()
    net.step(training).wait()
    trained = net.w.data.copy()
    inference = net.inference()
    del training
    gc.collect()
    y = inference.execute({"x": net.data}).result.data
    np.testing.assert_allclose(y, np.maximum(net.data @ trained.T, 0), rtol=1e-5)


# Over and over --------------------------------------------------------------------------------------------------------


def one_life(width: int = 8) -> None:
    net = Net(width)
    graph = net.training()
    net.step(graph).wait()
    graph.execute({"x": net.data}, {"t": net.data}, batch_size=3).wait()
    net.inference().execute({"x": net.data}).wait()


def growth(lives: int) -> list[Footprint]:
    """What each tenth of so many lives leaves behind, after as many to warm up."""
    seen = []
    for _ in range(11):
        for _ in range(lives // 10):
            one_life()
        seen.append(Footprint.now())
    return [after - before for before, after in itertools.pairwise(seen)]


@pytest.fixture
def without_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_DEBUG", "")


@pytest.mark.usefixtures("without_verifying")
def test_a_hundred_lives_leave_nothing_behind() -> None:
    growth(50)  # caches fill up for some tens of lives
    left = growth(100)
    assert sum(tenth.blocks for tenth in left) < 200
    assert sum(tenth.descriptors for tenth in left) == 0


def test_one_graph_leaves_nothing_behind_per_run() -> None:
    net = Net()
    graph = net.training()
    for _ in range(20):
        net.step(graph).wait()
    before, references = Footprint.now(), sys.getrefcount(graph)
    for _ in range(200):
        net.step(graph).wait()
    assert (Footprint.now() - before).blocks < 50
    assert sys.getrefcount(graph) - references <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_verifying")
def test_ten_thousand_lives_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    faulthandler.cancel_dump_traceback_later()  # it takes minutes without hanging
    left = growth(CYCLES)
    resident = [tenth.resident for tenth in left]
    with capsys.disabled():
        print(f"\n{CYCLES} lives left {sum(tenth.blocks for tenth in left)} objects; bytes per tenth: {resident}")
    assert sum(tenth.blocks for tenth in left) < 1000
    assert sum(tenth.descriptors for tenth in left) == 0
    # The operating system rounds up to large pages when it likes to; a leak would show in every tenth.
    assert statistics.median(resident) < 1 << 16


@pytest.mark.slow
@pytest.mark.usefixtures("without_verifying")
def test_graphs_of_five_hundred_sizes_leave_only_their_machine_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels are kept for the next graph that needs them; nothing else of a graph stays."""
    for width in range(2, 22):
        one_life(width)
    before = Footprint.now()
    for width in range(22, 522):
        one_life(width)
    first = Footprint.now() - before
    before = Footprint.now()
    for width in range(22, 522):
        one_life(width)
    again = Footprint.now() - before
    with capsys.disabled():
        print(f"\n500 sizes left {first}, the same sizes again {again}")
    assert again.blocks < 1000
    assert again.resident < 4 << 20
    assert first.descriptors == again.descriptors == 0
