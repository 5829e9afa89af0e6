"""Training on several GPUs of one process, and on GPUs of several processes: emulated, the same bits for any number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices import engines_of
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.gpu_exchange import GpuExchange
from mlcompute.devices.cuda.memory import CudaBuffer
from mlcompute.devices.device import Buffer, Engine
from mlcompute.devices.remote import Remote
from mlcompute.group.exchange import Alone
from mlcompute.ops.op import Array
from mlcompute.runtime import device_step
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_emulator.fake_nccl import FakeNccl
from tests.group.threads import building, optimizer, run_group

RNG = np.random.default_rng(3)
BATCH = 16
X = RNG.standard_normal((4, BATCH, 1, 6, 6)).astype(np.float32)
T = RNG.integers(0, 3, (4, BATCH))
#: Samples of each step: a short batch leaves slices without any.
SAMPLES = (BATCH, BATCH, 5, BATCH)


def network() -> mlc.Graph:
    with building:
        mlc.Platform.set_rng_seed_to(5)
        graph = mlc.Graph()
        x = graph.input((BATCH, 1, 6, 6), "x")
        y = graph.normalize(graph.convolution(x, 4, kernel=3, activation="relu"))
        graph.dense(graph.dropout(graph.flatten(y), 0.2), 3)
        return graph


def device(engines: Sequence[Engine]) -> mlc.Device:
    made = mlc.Device(mlc.DeviceType.CPU, engine=engines[0])
    made._engines = list(engines)
    return made


def emulated(count: int, nccl: FakeNccl | None = None) -> list[EmulatedCuda]:
    return [EmulatedCuda(ordinal, nccl) for ordinal in range(count)]


def trainer(engines: Sequence[Engine], kind: str = "adam", group: mlc.Group | None = None) -> mlc.Trainer:
    alone = mlc.Group(Alone(20)) if len(engines) == 1 and group is None else group
    rule: Any = "adam" if kind == "adam" else optimizer(kind)
    return mlc.Trainer(
        network(), loss="softmax_cross_entropy", optimizer=rule, metrics=["accuracy"],
        device=device(engines),
        group=alone,
    )


def step(training: mlc.TrainingGraph, number: int) -> float:
    count = SAMPLES[number]
    (label,) = training._definition.declared.labels
    run = training.execute({"x": X[number][:count]}, {label: T[number][:count]}, batch_size=count)
    result = run.result
    assert result is not None
    return float(result.data.sum())


def numbers(training: mlc.TrainingGraph) -> list[Array]:
    """Everything that outlives a step."""
    found = [slot.tensor.data.copy() for layer in training.layers for slot in layer.parameters.values()]
    found += [tensor.data.copy() for layer in training.layers for tensor in layer.statistics.values()]
    session = training._session
    assert session.state is not None
    assert session.in_group is not None
    states = [one for tensor in session.in_group.program.exchanged for one in session.state.of(tensor)]
    return [*found, *(np.array(one.array()) for one in states)]


def trained(engines: Sequence[Engine], kind: str = "adam", group: mlc.Group | None = None) -> list[Array]:
    training = trainer(engines, kind, group).training
    losses = [step(training, number) for number in range(len(SAMPLES))]
    return [*numbers(training), np.array(losses)]


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """What a group of one process gives whose gradients go through the host."""
    with monkeypatch.context() as patch:
        patch.setattr(device_step, "made", lambda training: None)
        return trained(emulated(1))


def assert_same(found: Sequence[Array], expected: Sequence[Array]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_any_number_of_gpus_gives_the_same_bits(by_host: list[Array]) -> None:
    for count in (1, 2, 3):
        assert_same(trained(emulated(count)), by_host)


@pytest.mark.parametrize("kind", ["global norm", "norm"])
def test_optimizers_that_need_whole_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two = trained(emulated(2), kind)
    monkeypatch.setattr(device_step, "made", lambda training: None)
    assert_same(two, trained(emulated(1), kind))


def test_slices_that_wait_for_sums_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm over the whole batch, and a mean over the labels that count."""
    labels = T.copy()
    labels[:, ::3] = -1

    def run(engines: Sequence[Engine]) -> list[Array]:
        mlc.Platform.set_rng_seed_to(5)
        graph = mlc.Graph()
        y = graph.convolution(graph.input((BATCH, 1, 6, 6), "x"), 4, kernel=3)
        graph.dense(graph.flatten(graph.normalize(y, across_group=True)), 3)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, ignore_index=-1)
        group = mlc.Group(Alone(20))
        made = mlc.Trainer(graph, loss=loss, optimizer="adam", device=device(engines), group=group)
        (label,) = made.training._definition.declared.labels
        losses = []
        for number, count in enumerate(SAMPLES):
            given = {"x": X[number][:count]}, {label: labels[number][:count]}
            losses.append(made.training.execute(*given, batch_size=count).result.data.copy())
        return [*numbers(made.training), *losses]

    found = [run(emulated(1)), run(emulated(3, FakeNccl()))]
    monkeypatch.setattr(device_step, "made", lambda training: None)
    expected = run(emulated(1))
    for one in found:
        assert_same(one, expected)


def ahead(training: mlc.TrainingGraph) -> list[float]:
    """Losses of steps that are all started before the first is waited for."""
    (label,) = training._definition.declared.labels
    runs = [training.execute({"x": x}, {label: t}) for x, t in zip(X, T, strict=True) for _ in range(2)]
    return [float(run.result.data.sum()) for run in runs]


def test_steps_are_started_and_not_waited_for() -> None:
    training = trainer(emulated(2)).training
    found = ahead(training)
    training.wait()
    waiting = trainer(emulated(2)).training
    (label,) = waiting._definition.declared.labels
    told: list[float] = []
    for x, t in zip(X, T, strict=True):
        for _ in range(2):
            run = waiting.execute({"x": x}, {label: t}, completion_handler=lambda result, error, _: told.append(error))
            assert run._job.completion is None  # it has finished: the handler was told
    assert told == [None] * 8
    assert_same(numbers(training), numbers(waiting))
    assert len(set(found)) == 8  # each has its own


def test_memory_and_programs_are_there_after_compile() -> None:
    for engines in (emulated(1), emulated(2), emulated(3, FakeNccl()), emulated(5)):
        training = trainer(engines).training
        told, taken = training.device_memory_size, [engine.memory().buffers for engine in engines]
        step(training, 0)
        step(training, 1)
        assert training.device_memory_size == told
        parameters = sum(slot.tensor.data.nbytes for layer in training.layers for slot in layer.parameters.values())
        for engine, before in zip(engines, taken, strict=True):
            # What is new are parameters and their state, and those are known from the start.
            assert engine.memory().buffers - before <= 8 * parameters + 4096


def test_what_a_group_says_it_exchanges_by() -> None:
    group = mlc.Group(Alone(20))
    trainer(emulated(2, FakeNccl()), group=group)
    told = "Group(rank=0, size=1, slices=8, engine='alone', between GPUs 'fake NCCL in CUDA graphs')"
    assert repr(group) == told


#: Batches of two sizes in turn, often enough that all of their graphs are launched again.
MANY = (0, 1, 2, 3, 2, 0, 2, 2, 1, 3)


def many_steps(
    engines: Sequence[EmulatedCuda], kind: str = "adam", group: mlc.Group | None = None, *, is_whole: bool = True
) -> list[Array]:
    """Everything that is learned and read in many steps; the last ones launch one graph per GPU, and nothing else."""
    made = trainer(engines, kind, group)
    training = made.training
    captures = session_of(training).exchange.captures
    read: list[Array] = []
    for place, number in enumerate(MANY):
        before = [(engine.driver.graph_launches, engine.driver.kernel_launches) for engine in engines]
        read.append(np.array(step(training, number)))
        if captures and is_whole and place >= 7:
            parts = 2 if kind == "global norm" else 1
            for engine, (graphs, kernels) in zip(engines, before, strict=True):
                assert (engine.driver.graph_launches, engine.driver.kernel_launches) == (graphs + parts, kernels)
        for tensor in training._session.in_group.request.kept:  # type: ignore[union-attr]
            values = training._session.fetch(tensor)
            assert values is not None
            read.append(values.copy())
    return [*numbers(training), *read]


def session_of(training: mlc.TrainingGraph) -> device_step.DeviceStep:
    found = training._session.in_group
    assert found is not None
    assert found.on_devices is not None
    return found.on_devices


@functools.cache
def without_nccl(kind: str) -> list[Array]:
    """The same on one GPU."""
    return many_steps(emulated(1), kind)


@pytest.mark.parametrize("kind", ["adam", "global norm"])
def test_nccl_in_one_graph_per_gpu(kind: str) -> None:
    library = FakeNccl()
    assert_same(many_steps(emulated(2, library), kind), without_nccl(kind))
    assert 0 < library.captured < library.calls


@pytest.mark.parametrize("kind", ["adam", "global norm"])
def test_nccl_in_one_graph_per_process(kind: str) -> None:
    library = FakeNccl()
    for found in run_group(3, lambda group: many_steps([EmulatedCuda(group.rank, library)], kind, group)):
        assert_same(found, without_nccl(kind))
    assert 0 < library.captured < library.calls


def test_inputs_too_large_to_be_copied_inside_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice of a captured step has a block of its own, and so has that of the next step."""
    monkeypatch.setattr("mlcompute.devices.cuda.input_blocks.SMALL_BYTES", 0)
    groups = [mlc.Group(Alone(20), slices=2) for _ in range(2)]
    assert_same(many_steps(emulated(2, FakeNccl()), group=groups[0]), many_steps(emulated(1), group=groups[1]))
    # Several slices on a GPU: one computes while the data of the next is copied, each in a graph of its own.
    library = FakeNccl()
    assert_same(many_steps(emulated(2, library), is_whole=False), without_nccl("adam"))
    assert 0 < library.captured < library.calls


class ThroughNccl(GpuExchange):
    """One GPU sends itself by NCCL what it would copy."""

    def copy(self, rank: int, target: Buffer, source: Buffer) -> None:
        assert isinstance(target, CudaBuffer)
        assert isinstance(source, CudaBuffer)
        if source.nbytes:
            with self._communicators[0].library.grouped():
                self._communicator(rank).send(source.address, source.nbytes, rank, self._stream(rank))
                self._communicator(rank).receive(target.address, target.nbytes, rank, self._stream(rank))


def through_nccl(engine: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Let an engine do that."""

    def join(engines: Sequence[Cuda], *_: object) -> ThroughNccl:
        return ThroughNccl(engines, 0, engine.nccl().communicators([engine.driver.activate]))

    monkeypatch.setattr("mlcompute.devices.cuda.device.joined", join)
    return engine


def test_one_gpu_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNccl()
    engine = through_nccl(emulated(1, library)[0], monkeypatch)
    assert isinstance(engine, EmulatedCuda)
    assert_same(many_steps([engine]), without_nccl("adam"))
    assert 0 < library.captured < library.calls


def test_processes_without_nccl_exchange_through_the_host(by_host: list[Array]) -> None:
    def work(group: mlc.Group) -> tuple[bool, list[Array]]:
        # One of them has no NCCL: none may use it.
        engine = EmulatedCuda(group.rank, FakeNccl() if group.rank else None)
        found = trained([engine], group=group)
        return group.between_devices == "", found

    for by_the_host, found in run_group(2, work):
        assert by_the_host
        assert_same(found, by_host)


def test_passes_one_by_one_and_new_weights_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(engines: Sequence[Engine]) -> list[Array]:
        training = trainer(engines).training
        step(training, 0)
        declared = training._definition.declared
        (label,) = declared.labels
        training.bind_and_write_data(
            {"x": X[1], label: T[1]}, for_inputs={"x": declared.inputs["x"], label: declared.labels[label]},
            to=training.device,
        )  # fmt: skip
        training.execute_forward()
        training.execute_gradient()
        training.execute_optimizer_update()
        step(training, 2)
        weight = training.layers[0].parameters["weights"].tensor
        weight.data = weight.data * np.float32(0.5)
        step(training, 3)
        weight.bind_and_write_data(np.full_like(weight.data, 0.25), to=training.device)
        step(training, 0)
        return numbers(training)

    found = run(emulated(2)), run(emulated(2, FakeNccl()))
    monkeypatch.setattr(device_step, "made", lambda training: None)
    expected = run(emulated(1))
    for one in found:
        assert_same(one, expected)


def with_embedding(engines: Sequence[Engine], group: mlc.Group | None = None) -> tuple[mlc.TrainingGraph, str]:
    """A network whose indices may be out of range, and the name of its labels."""
    with building:
        mlc.Platform.set_rng_seed_to(5)
        graph = mlc.Graph()
        x = graph.input((8, 4), "x", data_type=mlc.DataType.INT32)
        graph.normalize(graph.dense(graph.flatten(graph.embedding(x, 10, 4)), 3))
    made = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer="adam", device=device(engines), group=group)
    (label,) = made.training._definition.declared.labels
    return made.training, label


GOOD, CLASSES = np.zeros((8, 4), np.int32), np.zeros(8, np.int64)
BAD = GOOD.copy()
BAD[7, 3] = 10


@pytest.mark.parametrize("by_nccl", [False, True])
def test_a_failed_step_changes_nothing(by_nccl: bool) -> None:
    training, label = with_embedding(emulated(2, FakeNccl() if by_nccl else None))
    for good_steps in (1, 4):  # enqueued kernel by kernel, and as graphs
        for _ in range(good_steps):
            training.execute({"x": GOOD}, {label: CLASSES})
        before, steps = numbers(training), training._session.random.count
        with pytest.raises(mlc.ExecutionError, match="10"):
            training.execute({"x": BAD}, {label: CLASSES})
        assert_same(numbers(training), before)
        assert training._session.random.count == steps
    training.execute({"x": GOOD}, {label: CLASSES})  # and the devices are well
    assert not all(np.array_equal(a, b) for a, b in zip(numbers(training), before, strict=True))


def test_a_failed_step_of_one_process_changes_nothing_on_the_other() -> None:
    library = FakeNccl()

    def work(group: mlc.Group) -> tuple[str, bool]:
        training, label = with_embedding([EmulatedCuda(group.rank, library)], group)
        for _ in range(4):
            training.execute({"x": GOOD}, {label: CLASSES})
        parameters = [slot.tensor for layer in training.layers for slot in layer.parameters.values()]
        before = [tensor.data.copy() for tensor in parameters]
        with pytest.raises((mlc.ExecutionError, mlc.ProcessError)) as caught:
            training.execute({"x": BAD}, {label: CLASSES})
        return str(caught.value), all(np.array_equal(t.data, b) for t, b in zip(parameters, before, strict=True))

    (first, is_same), (second, is_same_too) = run_group(2, work)
    assert "rank 1 failed: ExecutionError" in first  # the index out of range is in the second half of the batch
    assert "10" in second
    assert is_same
    assert is_same_too


def test_saved_and_resumed_on_another_number(tmp_path: Path) -> None:
    first = trainer(emulated(2))
    for number in (0, 1):
        step(first.training, number)
    mlc.save(tmp_path / "run.mlc", first.training)
    for number in (2, 3):
        step(first.training, number)
    second = mlc.load(tmp_path / "run.mlc", device(emulated(3)))
    assert isinstance(second, mlc.TrainingGraph)
    for number in (2, 3):
        step(second, number)
    assert_same(numbers(second), numbers(first.training))


def test_fit_and_evaluate() -> None:
    images, classes = X.reshape(-1, 1, 6, 6), T.reshape(-1)

    def run(count: int) -> tuple[list[Array], float]:
        found = trainer(emulated(count))
        found.fit(images, classes, epochs=1)
        return numbers(found.training), found.evaluate(images, classes)["loss"]

    one, two = run(1), run(2)
    assert_same(two[0], one[0])
    assert two[1] == one[1]


# Choosing them --------------------------------------------------------------------------------------------------------


def test_all_gpus_or_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLCOMPUTE_ENGINE", raising=False)
    cards = emulated(3)
    for ordinal, card in enumerate(cards):
        card.name = f"cuda:{ordinal}"
    monkeypatch.setattr("mlcompute.device.gpu_engines", lambda: list(cards))
    assert engines_of(mlc.Device()) == cards[:1]
    every = mlc.Device(selects_multiple_compute_devices=True)
    assert engines_of(every) == cards
    assert [gpu.identifier for gpu in every.gpu_devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert repr(every) == "Device(ANY, engines 'cuda:0', 'cuda:1', 'cuda:2')"
    assert engines_of(mlc.Device(mlc.DeviceType.GPU, selects_multiple_compute_devices=True)) == cards
    assert engines_of(mlc.Device(gpu_devices=[2, "cuda:0"])) == [cards[2], cards[0]]
    assert engines_of(mlc.Device(gpu_devices=every.gpu_devices[1:])) == cards[1:]
    for wrong, message in (([1, 1], "a GPU is listed twice"), ([], "no GPU is listed"), ([0, 3], "GPU device '3'")):
        with pytest.raises(mlc.DeviceError, match=message):
            mlc.Device(gpu_devices=wrong)


def test_averages_are_not_trained() -> None:
    mlc.Platform.set_rng_seed_to(5)
    graph = mlc.Graph()
    graph.dense(graph.input((8, 4), "x"), 3)
    rule = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1, average_decay=0.9))
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=rule, device=device(emulated(2)))
    (label,) = trainer.training._definition.declared.labels
    data, classes = np.ones((8, 4), np.float32), np.zeros(8, np.int64)
    trainer.training.execute({"x": data}, {label: classes})
    before = numbers(trainer.training)
    with trainer.training.averaged_weights(), pytest.raises(mlc.ExecutionError, match="nothing is trained"):
        trainer.training.execute({"x": data}, {label: classes})
    assert_same(numbers(trainer.training), before)


def test_several_gpus_in_one_of_several_processes_are_refused() -> None:
    with pytest.raises(mlc.DeviceError, match="2 GPUs and a group of 2 processes"):
        trainer(emulated(2), group=mlc.Group.local(2)[0])


def test_devices_that_nothing_connects_are_refused() -> None:
    with pytest.raises(mlc.DeviceError, match="cannot be trained on 2 devices") as caught:
        trainer([Remote(), Remote()])
    assert "nothing connects remote and remote" in str(caught.value)
    with pytest.raises(mlc.DeviceError, match="500 slices, of at most 400"):
        trainer(emulated(2), group=mlc.Group(Alone(20), slices=500))
