"""check_gradients: right gradients pass, wrong ones are found and named, nothing changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import TABLE, Value


def network(rate: float = 0.3) -> tuple[mlc.TrainingGraph, dict[str, Any], dict[str, Any]]:
    mlc.Platform.set_rng_seed_to(4)
    graph = mlc.Graph()
    x = graph.input((4, 2, 6, 6), "x")
    y = graph.convolution(x, 3, kernel=3, activation="tanh", name="conv")
    y = graph.pool(graph.normalize(y, kind="batch", name="norm"), name="pool")
    y = graph.dense(graph.dropout(graph.flatten(y), rate), 5, name="head")
    adam = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01))
    training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN), adam)
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(4, 5))})
    training.compile(device=mlc.Device.cpu())
    rng = np.random.default_rng(0)
    return training, {"x": rng.normal(size=(4, 2, 6, 6))}, {"t": np.eye(5)[[0, 3, 1, 4]]}


def spoil_derivative(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """One percent too much."""
    right = TABLE[op]

    def wrong(*arguments: Any, **attributes: Any) -> Any:
        found = right.derivative(*arguments, **attributes)
        return found * 1.01 if isinstance(found, Value) else tuple(part * 1.01 for part in found)

    changed = copy.copy(right)
    object.__setattr__(changed, "derivative", wrong)
    monkeypatch.setitem(TABLE, op, changed)


def test_right_gradients() -> None:
    training, inputs, labels = network()
    report = mlc.check_gradients(training, inputs, labels)
    assert report
    expected = {("conv", "weights"), ("norm", "gamma"), ("head", "biases")}
    assert {(row.layer, row.slot) for row in report.rows} >= expected
    assert all(row.compiled is not None for row in report.rows if not row.slot.startswith("source"))
    assert "all gradients are right" in str(report)


def test_nothing_changes() -> None:
    losses = []
    for checks in (False, True):
        training, inputs, labels = network()
        if checks:
            mlc.check_gradients(training, inputs, labels)
        losses.append([training.execute(inputs, labels).result.data.item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_wrong_derivative_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training, inputs, labels = network()
    spoil_derivative(monkeypatch, "tanh")
    report = mlc.check_gradients(training, inputs, labels)
    assert not report
    assert [(row.layer, row.slot) for row in report.wrong] == [("conv_tanh", "source 0")]
    assert "1 of" in str(report)
    assert "wrong" in str(report)


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlcompute.devices.cpu.executable import CpuExecutable

    training, inputs, labels = network()
    weights = next(layer for layer in training.layers if layer.label == "head").parameters["weights"].tensor
    read = CpuExecutable.read
    monkeypatch.setattr(
        CpuExecutable, "read", lambda self, v: read(self, v) * (1.1 if v.shape == weights.descriptor.shape else 1.0)
    )
    wrong = mlc.check_gradients(training, inputs, labels).wrong
    assert [(row.layer, row.slot) for row in wrong] == [("head", "weights")]


def pooled_relu(seed: int) -> tuple[mlc.TrainingGraph, dict[str, Any], dict[str, Any]]:
    """A ReLU in front of a maximum: windows full of zeros are exact ties, and among many some are nearly ties."""
    mlc.Platform.set_rng_seed_to(seed)
    graph = mlc.Graph()
    x = graph.input((16, 1, 12, 12), "x")
    y = graph.pool(graph.convolution(x, 8, kernel=3, activation="relu", name="conv"), name="pool")
    y = graph.dense(graph.flatten(y), 10, name="head")
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
    training = mlc.TrainingGraph([graph], loss, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(16, 10))})
    training.compile(device=mlc.Device.cpu())
    inputs = np.random.default_rng(seed).random((16, 1, 12, 12), np.float32)
    return training, {"x": inputs}, {"t": np.eye(10)[np.arange(16) % 10]}


@pytest.mark.parametrize("seed", range(30))
def test_kinks_are_no_errors(seed: int) -> None:
    report = mlc.check_gradients(*pooled_relu(seed))
    assert report, str(report)
    assert all(row.differences is not None for row in report.rows), str(report)


def test_ties_do_not_hide_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    training, inputs, labels = pooled_relu(0)
    spoil_derivative(monkeypatch, "max_pool")
    wrong = mlc.check_gradients(training, inputs, labels).wrong
    assert [(row.layer, row.slot) for row in wrong] == [("pool", "source 0")]


def zero_gradients(engine: Any) -> tuple[mlc.TrainingGraph, dict[str, Any], dict[str, Any]]:
    """Gradients that are truly 0: the key biases of attention, biases before a batch normalization."""
    mlc.Platform.set_rng_seed_to(2)
    graph = mlc.Graph()
    x = graph.input((6, 7, 8), "x")
    y = graph.attention(x, heads=2, name="attention")
    y = graph.transpose([0, 2, 1], source=graph.dense(y, 5, name="before"))
    y = graph.normalize(y, "batch", name="norm")
    y = graph.reshape((6, 5, 7, 1), source=y)
    y = graph.convolution(y, 4, kernel=3, name="conv")
    y = graph.normalize(y, "batch", name="norm2")
    graph.dense(graph.flatten(y), 3, name="head")
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
    training = mlc.TrainingGraph([graph], loss, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(6, 3))})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    inputs = np.random.default_rng(3).normal(size=(6, 7, 8))
    return training, {"x": inputs}, {"t": np.eye(3)[np.arange(6) % 3]}


ENGINES = pytest.mark.parametrize("engine", [Cpu(1), Reference()], ids=["cpu", "reference"])


@ENGINES
def test_a_gradient_that_is_truly_zero_is_right(engine: Any) -> None:
    report = mlc.check_gradients(*zero_gradients(engine))
    assert report, str(report)
    rows = {(row.layer, row.slot): row for row in report.rows}
    for name in (("attention", "biases_1"), ("conv", "biases")):
        assert rows[name].differences is not None
        assert rows[name].compiled is not None


@pytest.mark.parametrize("seed", range(10))
def test_zero_gradients_at_many_points(seed: int) -> None:
    training, inputs, labels = zero_gradients(Cpu(1))
    inputs["x"] = 10.0 ** (seed % 4 - 2) * np.random.default_rng(seed).normal(size=(6, 7, 8))
    report = mlc.check_gradients(training, inputs, labels)
    assert report, str(report)


@pytest.mark.parametrize("error", [1e-2, 1e-5])
def test_a_derivative_wrong_by_a_constant_is_found_where_it_should_be_zero(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    """dk of attention with a little added: the key biases' gradient, a sum of it, is no longer 0."""
    training, inputs, labels = zero_gradients(Cpu(1))
    right = TABLE["attention"]

    def wrong(*arguments: Any, **attributes: Any) -> Any:
        dq, dk, dv, *more = right.derivative(*arguments, **attributes)  # type: ignore[misc]
        return dq, dk + error, dv, *more

    changed = copy.copy(right)
    object.__setattr__(changed, "derivative", wrong)
    monkeypatch.setitem(TABLE, "attention", changed)
    wrong_rows = {(row.layer, row.slot) for row in mlc.check_gradients(training, inputs, labels).wrong}
    assert ("attention", "biases_1") in wrong_rows
    assert ("attention", "biases_0") not in wrong_rows


@pytest.mark.parametrize("error", [1e-2, 1e-4])
def test_a_kernel_wrong_by_a_constant_is_found_where_the_gradient_should_be_zero(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    from mlcompute.devices.cpu.executable import CpuExecutable

    training, inputs, labels = zero_gradients(Cpu(1))
    conv: Any = next(layer for layer in training.layers if layer.label == "conv")
    gradient = training._session.compile_if_needed()
    assert conv.biases in gradient.parameters
    read = CpuExecutable.read
    monkeypatch.setattr(CpuExecutable, "read", lambda self, v: read(self, v) + (error if v.shape == (4,) else 0.0))
    wrong = {(row.layer, row.slot) for row in mlc.check_gradients(training, inputs, labels).wrong}
    assert ("conv", "biases") in wrong
    assert ("conv", "weights") not in wrong


def test_refusals() -> None:
    training, inputs, _ = network()
    with pytest.raises(TypeError, match="needs a TrainingGraph"):
        mlc.check_gradients(mlc.InferenceGraph(), inputs)  # type: ignore[arg-type]
    with pytest.raises(mlc.DataError, match="'t' was not given"):
        mlc.check_gradients(training, inputs)
