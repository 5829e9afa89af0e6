"""A device with memory of its own: what is copied, when, and that every way to run gives the reference's numbers."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices import reference
from mlcompute.devices.device import Engine
from mlcompute.devices.remote import Remote
from mlcompute.runtime.session import session_of


class Reference(reference.Reference):
    """The same programs in the host's memory."""

    traits = Remote.traits


BATCH = 8
X = np.random.default_rng(0).standard_normal((BATCH, 1, 8, 8)).astype(np.float32)
T = np.eye(10, dtype=np.float32)[np.arange(BATCH) % 10]
#: Bytes of what a step is told besides its batch: the numbers of the optimizer.
SETTINGS = 64


class Net:
    """A convolution, a normalization and a dense layer, trained by Adam."""

    def __init__(self, engine: Engine) -> None:
        mlc.Platform.set_rng_seed_to(1)
        self.engine, self.graph = engine, mlc.Graph()
        self.x = self.graph.input((BATCH, 1, 8, 8), "x")
        y = self.graph.normalize(self.graph.convolution(self.x, 4, kernel=3, activation="relu"))
        self.y = self.graph.dense(self.graph.flatten(self.graph.pool(y)), 10)
        self.t = mlc.Tensor(shape=(BATCH, 10))
        self.device = mlc.Device(mlc.DeviceType.ANY, engine=engine)
        self.training = mlc.TrainingGraph(
            [self.graph],
            mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN),
            mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)),
        )
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.training.compile(device=self.device)

    @property
    def parameters(self) -> list[mlc.Tensor]:
        return [slot.tensor for layer in self.graph.layers for slot in layer.parameters.values()]

    def step(self, **options: Any) -> mlc.Execution:
        return self.training.execute({"x": X}, {"t": T}, **options)

    def split(self) -> None:
        self.training.bind_and_write_data({"x": X, "t": T}, for_inputs={"x": self.x, "t": self.t}, to=self.device)
        self.training.execute_forward()
        self.training.execute_gradient()
        self.training.execute_optimizer_update().wait()

    @property
    def weights(self) -> list[mlc.Tensor]:
        return [slot.tensor for layer in self.graph.layers for slot in layer.parameters.values()]

    def numbers(self) -> list[np.ndarray]:
        statistics = [tensor for layer in self.graph.layers for tensor in layer.statistics.values()]
        states = [np.frombuffer(state.bytes, "f") for tensor in self.weights for state in tensor.optimizer_data]
        return [*(tensor.data for tensor in (*self.weights, *statistics)), *states]


def same(one: Net, other: Net) -> None:
    for a, b in zip(one.numbers(), other.numbers(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("run", ["fused", "split", "mixed"])
def test_training_gives_the_numbers_of_the_reference(run: str) -> None:
    remote, reference = Net(Remote()), Net(Reference())
    for step in range(4):
        for net in (remote, reference):
            if run == "fused" or (run == "mixed" and step % 2):
                net.step()
            else:
                net.split()
    same(remote, reference)


def test_a_step_moves_the_batch_in_and_nothing_else() -> None:
    engine = Remote()
    net = Net(engine)
    net.step().wait()  # sends the weights
    before = engine.transfers.bytes_written, engine.transfers.reads
    for _ in range(5):
        net.step().wait()
    moved = engine.transfers.bytes_written - before[0]
    assert 5 * (X.nbytes + T.nbytes) <= moved <= 5 * (X.nbytes + T.nbytes + SETTINGS)
    assert engine.transfers.reads == before[1]


def test_reading_a_weight_moves_it_once() -> None:
    engine = Remote()
    net = Net(engine)
    net.step().wait()
    weight, reads = net.weights[0], engine.transfers.reads
    first = weight.data
    assert first is not None
    np.testing.assert_array_equal(weight.data, first)
    assert (engine.transfers.reads, engine.transfers.bytes_read) == (reads + 1, first.nbytes)
    net.step().wait()
    assert not np.array_equal(weight.data, first)
    assert engine.transfers.reads == reads + 2


def test_what_is_written_is_used_by_the_next_step() -> None:
    remote, reference = Net(Remote()), Net(Reference())
    for net in (remote, reference):
        net.step()
        weight = net.weights[0]
        weight.data = 2 * weight.data
        net.step()
    same(remote, reference)


def test_bound_memory_gets_what_was_computed_when_it_is_synchronized() -> None:
    net = Net(Remote())
    weight = net.weights[0]
    own = np.array(weight.data)
    states = [np.zeros(weight.descriptor.shape, "f") for _ in range(2)]
    weight.bind_and_write_data(own, to=net.device)
    net.training.bind_optimizer_data(states, tensor=weight)
    before = own.copy()
    net.step()
    net.training.synchronize_updates()
    assert not np.array_equal(own, before)
    assert all(np.any(state) for state in states)


def test_a_batch_of_another_size_and_outputs() -> None:
    remote, reference = Net(Remote()), Net(Reference())
    found = []
    for net in (remote, reference):
        net.training.add_outputs({"y": net.y})
        for size in (3, 16):
            x, t = np.resize(X, (size, 1, 8, 8)), np.resize(T, (size, 10))
            out = np.zeros((size, 10), "f")
            net.training.execute({"x": x}, {"t": t}, outputs_data={"y": out}, batch_size=size).wait()
            found.append(out)
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    same(remote, reference)


def test_training_there_and_inference_here() -> None:
    """Two devices over the same weights, each finding what the other has done."""
    net, alone = Net(Remote()), Net(Reference())
    predictions = []
    for each in (net, alone):
        here = mlc.InferenceGraph([each.graph])
        here.add_inputs({"x": each.x})
        here.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Reference()))
        for _ in range(3):
            each.step()
            predictions.append(here.execute({"x": X}).result.data)
    for one, other in zip(predictions[:3], predictions[3:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_that_fails_changes_nothing() -> None:
    engine = Remote()
    graph = mlc.Graph()
    tokens = graph.input((4, 3), "tokens", data_type=mlc.DataType.INT32)
    y = graph.dense(graph.flatten(graph.embedding(tokens, 5, 6)), 2)
    training = mlc.TrainingGraph(
        [graph],
        mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN),
        mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)),
    )
    training.add_inputs({"tokens": tokens}, {"t": mlc.Tensor(shape=y.descriptor.shape)})
    training.compile(device=mlc.Device(mlc.DeviceType.ANY, engine=engine))
    before = [slot.tensor.data for layer in graph.layers for slot in layer.parameters.values()]
    good, bad = np.ones((4, 3), np.int32), np.full((4, 3), 7, np.int32)
    labels = {"t": np.zeros((4, 2), "f")}
    with pytest.raises(mlc.ExecutionError, match="index"):
        training.execute({"tokens": bad}, labels).wait()
    after = [slot.tensor.data for layer in graph.layers for slot in layer.parameters.values()]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert training.execute({"tokens": good}, labels).wait()


def test_saving_and_restoring(tmp_path: Path) -> None:
    net, other = Net(Remote()), Net(Remote())
    for _ in range(3):
        net.step()
    mlc.save(tmp_path / "net.safetensors", net.training)
    mlc.restore(other.training, tmp_path / "net.safetensors")
    same(net, other)
    for each in (net, other):
        each.step()
    same(net, other)


def bound(net: Net, folder: Path) -> None:
    for parameter in net.parameters:
        state = [np.full(parameter.shape, number, np.float32) for number in (0.1, 0.2)]
        net.training.bind_optimizer_data(state, tensor=parameter)


def restored(net: Net, folder: Path) -> None:
    mlc.save(folder / "net.safetensors", net.training)
    net.step()
    mlc.restore(net.training, folder / "net.safetensors", exact=True)


def statistics(net: Net, folder: Path) -> None:
    for layer in net.graph.layers:
        if isinstance(layer, mlc.BatchNormalizationLayer):
            layer.mean.data = np.full(layer.mean.shape, 3)


@pytest.mark.parametrize("write", [bound, restored, statistics])
@pytest.mark.parametrize("between", ["inference", "apply_gradients", "split"])
def test_what_the_host_wrote_survives_a_run_that_does_not_read_it(
    write: Callable[[Net, Path], None], between: str, tmp_path: Path
) -> None:
    """State, or statistics: an inference, say, has neither read nor overwritten the device's copy of a state."""
    found = []
    for engine in (Reference(), Remote()):
        net = Net(engine)
        net.step()
        write(net, tmp_path)
        if between == "inference":
            net.step(options=mlc.ExecutionOptions.FORWARD_FOR_INFERENCE)
        elif between == "apply_gradients":
            net.training.apply_gradients({one: np.zeros(one.shape, np.float32) for one in net.parameters})
        else:
            net.split()
        net.step().wait()
        values = [*net.parameters, *(one for layer in net.graph.layers for one in layer.statistics.values())]
        found.append([value.data for value in values])
    for expected, array in zip(*found, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_dlpack_and_numpy_see_the_newest_values() -> None:
    torch = pytest.importorskip("torch")
    net = Net(Remote())
    net.step()
    weight = net.weights[0]
    np.testing.assert_array_equal(np.asarray(weight), weight.data)
    np.testing.assert_array_equal(torch.from_dlpack(weight).numpy(), weight.data)


def test_the_trainer_trains_there() -> None:
    histories = []
    for engine in (Remote(), Reference()):
        mlc.Platform.set_rng_seed_to(5)
        graph = mlc.Graph()
        graph.dense(graph.dense(graph.input((16, 4), "x"), 8, activation="tanh"), 3)
        device = mlc.Device(mlc.DeviceType.ANY, engine=engine)
        trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], device=device)
        rng = np.random.default_rng(0)
        trainer.fit(rng.standard_normal((50, 4)).astype("f"), rng.integers(3, size=50), epochs=3, verbose=0)
        histories.append(trainer.history)
    assert histories[0] == histories[1]


def test_a_graph_that_the_collector_drops_on_the_devices_thread_leaves_its_result() -> None:
    """Nobody may wait there for the device: it is what the device would wait for."""
    engine = Remote()
    nets = [Net(engine)]
    run, expected = nets[0].step(), Net(Remote()).step()
    run.wait()
    dropped = weakref.ref(session_of(nets[0].training))

    def drop() -> None:
        nets.clear()
        gc.collect()

    started = engine.stream.run(drop)
    end = time.monotonic() + 60
    while not started.is_done() and time.monotonic() < end:
        time.sleep(0.01)
    assert started.is_done(), "the device waits for itself"
    assert dropped() is None
    np.testing.assert_array_equal(run.result, expected.result)
