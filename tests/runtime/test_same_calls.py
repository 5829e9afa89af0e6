"""A call like the last one takes what was prepared then, and notices when that no longer holds."""

from __future__ import annotations

import gc
import types
import weakref

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.runtime.run import Run
from tests.devices.cuda_emulator import bench
from tests.devices.cuda_emulator.engine import EmulatedCuda

SYNCHRONOUS = mlc.ExecutionOptions.SYNCHRONOUS
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
T, BAD = np.array([0, 1, 2, 3], np.int32), np.array([0, 1, 9, 3], np.int32)


def trained(device: mlc.Device) -> tuple[mlc.TrainingGraph, mlc.Tensor]:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4,), data_type=mlc.DataType.INT32)
    weights = mlc.Tensor(data=np.linspace(-1.0, 1.0, 15, dtype=np.float32).reshape(5, 3))
    graph = mlc.Graph()
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=5)
    graph.node(mlc.FullyConnectedLayer(weights, None, sizes), source=x)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=device)
    return training, weights


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    made: list[Run] = []
    prepare = Run.__init__

    def counted(self: Run, *args: object, **options: object) -> None:
        made.append(self)
        prepare(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "__init__", counted)
    return made


def test_the_same_call_prepares_nothing_and_others_do(prepared: list[Run]) -> None:
    training, weights = trained(mlc.Device.cpu())
    told: list[float] = []
    losses = [training.execute({"x": X}, {"t": T}, options=SYNCHRONOUS).result.data.item() for _ in range(4)]
    count = len(prepared)
    losses += [training.execute({"x": X.copy()}, {"t": T}, options=SYNCHRONOUS).result.data.item() for _ in range(3)]
    assert len(prepared) == count
    assert losses == sorted(losses, reverse=True)
    training.execute(
        {"x": X}, {"t": T}, options=SYNCHRONOUS, completion_handler=lambda result, error, seconds: told.append(seconds)
    )
    assert len(told) == 1
    assert len(prepared) > count
    weights.data = np.zeros((5, 3), np.float32)
    assert training.execute({"x": X}, {"t": T}, options=SYNCHRONOUS).result.data == pytest.approx(np.log(5.0))


def test_other_memory_of_a_parameter_is_noticed(prepared: list[Run]) -> None:
    training, weights = trained(mlc.Device.cpu())
    for _ in range(3):
        training.execute({"x": X}, {"t": T}, options=SYNCHRONOUS)
    memory = np.zeros((5, 3), np.float32)
    weights.bind_and_write_data(memory, to=mlc.Device.cpu())
    assert training.execute({"x": X}, {"t": T}, options=SYNCHRONOUS).result.data == pytest.approx(np.log(5.0))
    weights.synchronize_data()  # on a device with memory of its own, the caller's has the values when somebody asks
    assert np.abs(memory).max() > 0.05, "the new memory is trained"


def test_a_graph_goes_with_its_last_reference() -> None:
    training, _ = trained(mlc.Device.cpu())
    for _ in range(3):
        run = training.execute({"x": X}, {"t": T}, options=SYNCHRONOUS)
    gc.disable()
    try:
        session = weakref.ref(training._session)
        del training
        assert session() is None, "neither what was prepared nor a finished run keeps it"
    finally:
        gc.enable()
    assert run.result.data > 0.0


@bench.needs_engine
def test_a_failed_run_is_told_by_the_next_call_without_asking_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmulatedCuda()
    device = mlc.Device(engine=engine)
    (ours, weights), (theirs, expected) = trained(device), trained(device)
    for _ in range(12):  # graphs have been captured
        ours.execute({"x": X}, {"t": T})
        theirs.execute({"x": X}, {"t": T})
    asked: list[int] = []
    monkeypatch.setattr(engine.driver, "is_reached", lambda event: not asked.append(event))
    monkeypatch.setattr(engine.driver, "wait", lambda event: asked.append(event))
    monkeypatch.setattr(engine.driver, "record", lambda event, stream: asked.append(event))
    for _ in range(20):
        run = theirs.execute({"x": X}, {"t": T})
    assert not asked, "each run tells that the one before it is over"
    run.wait()
    assert asked == asked[:1] * 2, "the last one is waited for at a mark"
    for step in range(20):
        if step % 6 == 2:
            ours.execute({"x": X}, {"t": BAD})
            with pytest.raises(mlc.ExecutionError, match="9"):
                ours.execute({"x": X}, {"t": T})
        ours.execute({"x": X}, {"t": T})
    np.testing.assert_array_equal(weights.data, expected.data)
    assert ours.optimizer.time_step == theirs.optimizer.time_step == 33


@bench.needs_engine
def test_losses_are_those_of_their_runs_however_many_come_after_them() -> None:
    device = mlc.Device(engine=EmulatedCuda())
    (ours, _), (theirs, _) = trained(device), trained(device)
    expected = [theirs.execute({"x": X}, {"t": T}, options=SYNCHRONOUS).result.data.item() for _ in range(14)]
    runs = [ours.execute({"x": X}, {"t": T}) for _ in range(14)]
    assert [run.result.data.item() for run in runs] == expected
    assert len(set(expected)) == 14


@bench.needs_engine
@pytest.mark.parametrize("is_launched", [False, True])
def test_runs_are_counted_right_after_one_that_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch, is_launched: bool
) -> None:
    engine = EmulatedCuda()
    training, _ = trained(mlc.Device(engine=engine))
    for _ in range(12):  # graphs have been captured
        training.execute({"x": X}, {"t": T}).wait()
    launch = engine.driver.launch_graph

    def refuse(graph: int, stream: int, mark: int | None) -> None:
        if is_launched:
            launch(graph, stream, mark)
        raise mlc.DeviceError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(engine.driver, "launch_graph", refuse)
        with pytest.raises(mlc.DeviceError, match="refused"):
            training.execute({"x": X}, {"t": T}).wait()
    progress = engine.progress
    for _ in range(2):
        assert progress.started == progress.finished[0] + 1 > 1  # the last is told of by the next
        training.execute({"x": X}, {"t": T}).wait()


@bench.needs_engine
def test_waiting_for_a_run_that_another_will_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmulatedCuda()
    training, _ = trained(mlc.Device(engine=engine))
    first, _ = (training.execute({"x": X}, {"t": T}) for _ in range(2))
    told, finished, waited = engine.progress.finished[0], engine.progress.finished, []
    finished[0] = told - 1

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            finished[0] = told

    clock = types.SimpleNamespace(perf_counter=lambda: 0.0, sleep=sleep)  # of that module alone
    monkeypatch.setattr("mlcompute.devices.cuda.completion.time", clock)
    assert first.wait().result.data > 0.0
    assert len(waited) == 3


@bench.needs_engine
def test_a_run_with_large_inputs_is_asked_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcompute.devices.cuda.input_blocks.SMALL_BYTES", 0)
    engine = EmulatedCuda()
    training, _ = trained(mlc.Device(engine=engine))
    asked: list[int] = []
    monkeypatch.setattr(engine.driver, "wait", lambda event: asked.append(event))
    training.execute({"x": X}, {"t": T}).wait()
    assert asked, "nothing but the driver knows whether it is over"
    for _ in range(30):
        training.execute({"x": X}, {"t": T})
    assert len(training._session.unchecked) <= 9
