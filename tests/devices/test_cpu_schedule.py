"""Chains of small kernels run on one thread, without barriers between them; what they compute and how they fail."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu import executable as cpu
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.runtime import schedule as choices
from mlcompute.devices.cpu.runtime.schedule import schedule, useful_threads
from mlcompute.devices.cpu.runtime.threads import ALONE, WAIT
from mlcompute.ops.op import Array

SYNC = mlc.ExecutionOptions.SYNCHRONOUS


def train(threads: int, rows: int = 2) -> mlc.TrainingGraph:
    """A wide layer, worth several threads, and a narrow one that is not."""
    mlc.Platform.set_rng_seed_to(3)
    graph = mlc.Graph()
    x = graph.input((rows, 600), "x")
    hidden = graph.dense(x, 300, activation="relu")
    graph.dense(hidden, 4)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(learning_rate=0.01))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(rows,), data_type=mlc.DataType.INT32)})
    training.compile(device=mlc.Device(engine=Cpu(threads)))
    return training


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """What every call of `schedule` has decided."""
    found: list[Array] = []

    def noted(*arguments: Any) -> Array:
        found.append(schedule(*arguments))
        return found[-1]

    monkeypatch.setattr(cpu, "schedule", noted)
    return found


def test_small_kernels_in_a_row_need_no_barriers(turns: list[Array]) -> None:
    training = train(4)
    data = {"x": np.ones((2, 600), np.float32)}, {"t": np.array([1, 3], np.int32)}
    training.execute(*data, options=SYNC)
    fused = turns[0]
    alone = [turn & ALONE for turn in fused]
    assert sum(map(bool, alone)) > len(fused) // 3  # machines of many cores cut some of them into more kernels
    # The first of a chain waits for what the others have computed, those behind it for nothing.
    chain = range(alone.index(ALONE) + 1, len(fused))
    assert not any(fused[i] & WAIT for i in chain if alone[i] and alone[i - 1])
    assert any(fused[i] & WAIT for i in chain if alone[i - 1] and not alone[i])
    assert str(training.programs["fused 2"]).count("one thread") == sum(map(bool, alone))


def test_one_thread_has_nothing_to_leave_to_others(turns: list[Array]) -> None:
    training = train(1)
    training.execute({"x": np.ones((2, 600), np.float32)}, {"t": np.array([1, 3], np.int32)}, options=SYNC)
    assert not any(turn & ALONE for turn in turns[0])


@pytest.mark.parametrize("threads", [2, 4])
def test_the_same_bits_as_one_thread(threads: int) -> None:
    rng = np.random.default_rng(1)
    batches = [(rng.standard_normal((2, 600)).astype("f"), rng.integers(0, 4, 2).astype(np.int32)) for _ in range(4)]
    losses = []
    for count in (1, threads):
        training = train(count)
        losses.append([float(training.execute({"x": x}, {"t": t}, options=SYNC).result.data[0]) for x, t in batches])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_kernel_that_fails_alone_changes_nothing(threads: int, turns: list[Array]) -> None:
    training = train(threads)
    x = {"x": np.ones((2, 600), np.float32)}
    training.execute(x, {"t": np.array([1, 3], np.int32)}, options=SYNC)
    tensors = [slot.tensor for layer in training.layers for slot in layer.parameters.values()]
    before = {tensor: tensor.data.copy() for tensor in tensors}
    with pytest.raises(mlc.ExecutionError, match="loss"):
        training.execute(x, {"t": np.array([1, 9], np.int32)}, options=SYNC)
    for tensor, values in before.items():
        np.testing.assert_array_equal(tensor.data, values)
    assert np.isfinite(training.execute(x, {"t": np.array([1, 3], np.int32)}, options=SYNC).result.data).all()


def test_no_more_threads_than_shorten_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "machine_slices", lambda: 16)
    microseconds = (0, 20, 50, 100, 150, 200, 230, 1000)
    assert [useful_threads(1e3 * cost, 16) for cost in microseconds] == [1, 2, 4, 6, 8, 8, 16, 16]
    assert [useful_threads(1e3 * cost, 3) for cost in microseconds] == [1, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors are not slower with them")
@pytest.mark.parametrize("threads", [1, 2])
def test_subnormal_numbers_become_zero_in_updates_alone(threads: int) -> None:
    """Momentum that decays does not end there; what the forward pass gives, and the caller's arithmetic, keep them."""
    tiny = np.float32(1e-40)
    x, y = mlc.Tensor(shape=(1, 4)), mlc.Tensor(shape=(1, 4))
    weights = mlc.Tensor(shape=(4, 4), data=np.eye(4, dtype=np.float32))
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=4, output_feature_channel_count=4)
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
    graph = mlc.TrainingGraph([], loss, mlc.AdamOptimizer(learning_rate=0.1))
    scores = graph.node(mlc.FullyConnectedLayer(weights, None, sizes), source=x)
    graph.add_inputs({"x": x}, {"y": y})
    graph.add_outputs({"scores": scores})
    graph.compile(device=mlc.Device(engine=Cpu(threads)))
    momentum, velocity = np.full((4, 4), tiny), np.zeros((4, 4), np.float32)
    graph.bind_optimizer_data([momentum, velocity], tensor=weights)
    fed = np.full((1, 4), tiny)
    graph.execute({"x": fed}, {"y": fed}, options=SYNC)
    assert (scores.data == fed).all()
    assert (momentum == 0).all()
    assert tiny * np.float32(0.5) > 0
