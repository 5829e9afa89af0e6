"""Inference graphs: live weights shared with training, layers of their own, and what the caller gets back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.null import Null
from mlcompute.runtime.tensor_state import storage_of
from tests.harness import assert_close
from tests.nets import (
    INFERENCE,
    MEAN,
    SKIP,
    SYNC,
    Array,
    CpuEngine,
    Regression,
    adam,
    batch_norm,
    cpu,
    dense,
    needs_shared_memory,
    normal,
    sgd,
    shares_memory,
    tensor,
    values_of,
)

ASYNC = mlc.ExecutionOptions.NONE


def inference_over(net: Regression) -> mlc.InferenceGraph:
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.add_outputs({"y": net.y})
    inference.compile(device=cpu())
    return inference


def prediction(net: Regression, x: Array) -> Array:
    import torch

    return net.torch().forward(torch.tensor(x, dtype=torch.float64)).detach().numpy()


def test_a_relu() -> None:
    """The documented numbers."""
    x = mlc.Tensor(shape=(1, 4))
    graph = mlc.InferenceGraph()
    y = graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    graph.add_outputs({"y": y})
    graph.compile(device=cpu())
    out = np.empty(4, np.float32)
    run = graph.execute({"x": np.float32([-1, 2, -3, 4])}, outputs_data={"y": out}, options=SYNC)
    np.testing.assert_array_equal(out, [0, 2, 0, 4])
    np.testing.assert_array_equal(run.result.data, [[0, 2, 0, 4]])
    assert run.result.of is y


def test_weights_are_shared_and_live() -> None:
    net = Regression(adam(0.1))
    inference = inference_over(net)
    x, t = normal(4, 3), normal(4, 2)
    previous = None
    for step in range(3):
        y = inference.execute({"x": x}).result.data
        assert_close(y, prediction(net, x))
        assert previous is None or not np.array_equal(previous, y)
        previous = y
        net.step(normal(4, 3, seed=step), t)  # not waited for: runs on one device happen in order


def test_the_callers_own_buffers_are_live() -> None:
    """Weights over the caller's memory: what is written into it in place is what the next run reads."""
    needs_shared_memory(cpu())
    buffer = bytearray(normal(2, 3).tobytes())
    weights = mlc.Tensor(shape=(2, 3), shared_data=mlc.TensorData(buffer, length=24))
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph, x, t = mlc.Graph(), mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    graph.node(mlc.FullyConnectedLayer(weights, None, d), source=x)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=cpu())
    data = normal(4, 3, seed=1)
    view = np.frombuffer(buffer, np.float32).reshape(2, 3)
    for seed in range(2):
        view[:] = normal(2, 3, seed=10 + seed)
        assert_close(inference.execute({"x": data}).result.data, data @ view.T)
        before = view.copy()
        training.execute({"x": data}, {"t": normal(4, 2)})
        training.synchronize_updates()
        assert not np.array_equal(view, before), "training writes into the caller's memory"
        assert_close(inference.execute({"x": data}).result.data, data @ view.T)


def test_rebound_weights_reach_every_graph() -> None:
    net = Regression(sgd())
    inference = inference_over(net)
    x, t = normal(4, 3), normal(4, 2)
    net.step(x, t)
    inference.execute({"x": x})
    new = normal(5, 3, seed=9)
    assert net.first.weights.bind_and_write_data(new, to=net.device)
    expected = prediction(net, x)
    assert_close(inference.execute({"x": x}).result.data, expected)
    net.step(x, t)
    net.training.synchronize_updates()
    np.testing.assert_array_equal(net.first.weights.data, new)
    assert_close(inference.execute({"x": x}).result.data, prediction(net, x))
    with pytest.raises(mlc.DataError):
        net.first.weights.bind_and_write_data(np.zeros(3, np.float32), to=net.device)


def test_read_only_weights_are_copied_when_training_begins() -> None:
    """Once, and every graph follows."""
    given = normal(2, 3)
    given.flags.writeable = False
    weights = mlc.Tensor(shape=(2, 3), shared_data=given)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph, x, t = mlc.Graph(), mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    graph.node(mlc.FullyConnectedLayer(weights, None, d), source=x)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=cpu())
    data = normal(4, 3, seed=1)
    before = given.copy()
    assert_close(inference.execute({"x": data}).result.data, data @ given.T)
    assert storage_of(weights).array() is given
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    training.execute({"x": data}, {"t": normal(4, 2)}).wait()
    np.testing.assert_array_equal(given, before)
    assert not np.array_equal(weights.data, before)
    assert_close(inference.execute({"x": data}).result.data, data @ weights.data.T)


def test_training_over_a_graph_already_compiled_for_inference() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    graph = mlc.Graph()
    layer = dense(3, 2)
    graph.node(layer, source=x)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=cpu())
    inference.execute({"x": normal(4, 3)})
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    data, labels = normal(4, 3), normal(4, 2)
    w, b = layer.weights.data.copy(), layer.biases.data.copy()
    error = data @ w.T + b - labels
    training.execute({"x": data}, {"t": labels}).wait()
    assert_close(layer.weights.data, w - 0.1 * error.T @ data / 4)
    assert_close(inference.execute({"x": data}).result.data, data @ layer.weights.data.T + layer.biases.data)


def test_layers_of_its_own() -> None:
    """Softmax after the logits that training sees."""
    net = Regression(sgd())
    inference = mlc.InferenceGraph([net.graph])
    probabilities = inference.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX), source=net.y)
    inference.add_inputs({"x": net.x})
    inference.compile(device=cpu())
    assert len(inference.layers) == 4
    assert len(net.training.layers) == 3
    x = normal(4, 3)
    result = inference.execute({"x": x}).result
    assert result.of is probabilities
    exp = np.exp(prediction(net, x))
    assert_close(result.data, exp / exp.sum(1, keepdims=True))


def test_a_tensor_in_two_graphs_shows_the_run_that_computed_it_last() -> None:
    net = Regression(None)
    inference = inference_over(net)
    a, b, t = normal(4, 3), normal(4, 3, seed=1), normal(4, 2)
    net.step(a, t)
    inference.execute({"x": b})
    assert_close(net.y.data, prediction(net, b))
    net.step(a, t)
    assert_close(net.y.data, prediction(net, a))
    # `hidden` was kept by neither: it must not show numbers from some run before.
    net.bind(a, t)
    net.training.execute_forward()
    assert net.hidden.data is not None
    inference.execute({"x": b})
    with pytest.warns(UserWarning, match="was not kept by the last run"):
        assert net.hidden.data is None
    assert net.hidden.data is None, "and it is said once"


def test_statistics_and_dropout_in_inference() -> None:
    x = mlc.Tensor(shape=(4, 3))
    graph = mlc.InferenceGraph()
    norm = batch_norm(3)
    norm.statistics["mean"].data = [1, 2, 3]
    norm.statistics["variance"].data = [4, 5, 6]
    y = graph.node(norm, source=x)
    graph.node(mlc.DropoutLayer(0.9, 1), source=y)
    graph.add_inputs({"x": x})
    graph.compile(device=cpu())
    before = values_of(graph)
    data = normal(4, 3)
    beta, gamma = norm.beta.data, norm.gamma.data
    expected = (data - [1, 2, 3]) / np.sqrt(np.array([4, 5, 6]) + 1e-5) * gamma + beta
    assert_close(graph.execute({"x": data}).result.data, expected)
    for old, new in zip(before, values_of(graph), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_validation_loss() -> None:
    """A loss layer in an inference graph: the loss with labels, the prediction without."""
    x, t, w = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2)), mlc.Tensor(shape=(4, 2))
    graph = mlc.InferenceGraph()
    layer = dense(3, 2)
    y = graph.node(layer, source=x)
    loss = graph.node(mlc.LossLayer.mean_squared_error(MEAN), sources=[y], loss_labels=[t])
    graph.add_inputs({"x": x}, {"t": t}, {"w": w})
    graph.compile(device=cpu())
    data, labels, weights = normal(4, 3), normal(4, 2, seed=1), np.abs(normal(4, 2, seed=2))
    expected = data @ layer.weights.data.T + layer.biases.data
    run = graph.execute({"x": data}, {"t": labels}, {"w": weights})
    assert run.result.of is loss
    assert_close(run.result.data, np.float32([np.mean(weights * (expected - labels) ** 2)]))
    run = graph.execute({"x": data})
    assert run.result.of is y
    assert_close(run.result.data, expected)
    short = graph.execute({"x": data[:2]}, {"t": labels[:2]}, {"w": weights[:2]}, batch_size=2)
    assert_close(short.result.data, np.float32([np.mean((weights * (expected - labels) ** 2)[:2])]))
    with pytest.raises(mlc.DataError, match="'u' is not a declared name in loss_labels_data"):
        graph.execute({"x": data}, {"u": labels})


def test_undeclared_labels_are_refused() -> None:
    net = Regression()
    inference = inference_over(net)
    with pytest.raises(mlc.DataError, match="is not a declared name in loss_labels_data"):
        inference.execute({"x": normal(4, 3)}, {"t": normal(4, 2)})


def test_skip_in_inference() -> None:
    net = Regression()
    inference = inference_over(net)
    x = normal(4, 3)
    with pytest.raises(mlc.DataError, match="was not given"):
        inference.execute({"x": x}, options=SKIP)
    first = inference.execute({"x": x}).result.data
    np.testing.assert_array_equal(inference.execute({}, options=SKIP).result.data, first)


# Outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.empty((4, 2), np.float32),
        lambda: np.empty(8, np.float32),
        lambda: np.empty((4, 2, 1), np.float32),
        lambda: mlc.TensorData(np.empty((4, 2), np.float32)),
        lambda: mlc.TensorData(bytearray(32)),
        lambda: mlc.TensorData(bytearray(50)),
        lambda: bytearray(32),
        lambda: memoryview(bytearray(32)),
    ],
)
def test_outputs_go_to_the_callers_memory(make: object, options: mlc.ExecutionOptions) -> None:
    net = Regression()
    x, t = normal(4, 3), normal(4, 2)
    expected = prediction(net, x)

    def check(buffer: object) -> None:
        raw = buffer.bytes if isinstance(buffer, mlc.TensorData) else buffer
        assert_close(np.frombuffer(raw, np.uint8)[:32].view(np.float32).reshape(4, 2), expected)

    buffer = make()
    inference_over(net).execute({"x": x}, outputs_data={"y": buffer}, options=options).wait()
    check(buffer)
    buffer = make()
    net.step(x, t, outputs_data={"y": buffer}, options=options).wait()
    check(buffer)
    buffer = make()
    net.bind(x, t)
    net.training.execute_forward(outputs_data={"y": buffer}, options=options).wait()
    check(buffer)
    buffer = make()
    net.training.execute_gradient(outputs_data={"y": buffer}, options=options).wait()
    check(buffer)


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (np.empty(7, np.float32), "7 elements were given, 8 are needed"),
        (np.empty((3, 2), np.float32), "does not fit the tensor"),
        (np.empty((6, 2), np.float32), "does not fit the tensor"),
        (memoryview(bytearray(40)), "10 elements were given, 8 are needed"),
        (mlc.TensorData(bytearray(31)), "elements were given, 8 are needed"),
        (mlc.TensorData(immutable_bytes_no_copy=bytes(32)), "read-only"),
        (bytes(32), "read-only"),
        (np.broadcast_to(np.float32(0), (4, 2)), "read-only|without a copy"),
        (np.empty((4, 2), np.float64), "without a copy"),
        (np.empty((4, 4), np.float32)[:, ::2], "without a copy"),
        ([[0.0] * 2] * 4, "without a copy"),
    ],
)
def test_memory_that_cannot_take_outputs(buffer: object, says: str) -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    before = values_of(net.training)
    with pytest.raises(mlc.DataError, match=says):
        net.step(x, t, outputs_data={"y": buffer})
    net.bind(x, t)
    with pytest.raises(mlc.DataError, match=says):
        net.training.execute_forward(outputs_data={"y": buffer})
    with pytest.raises(mlc.DataError, match=says):
        inference_over(net).execute({"x": x}, outputs_data={"y": buffer})
    for old, new in zip(before, values_of(net.training), strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(mlc.DataError, match="is not a declared output"):
        net.step(x, t, outputs_data={"z": np.empty(8, np.float32)})


def test_a_short_batch_writes_only_its_rows() -> None:
    net = Regression()
    inference = inference_over(net)
    x = normal(4, 3)
    out = np.full((4, 2), 7, np.float32)
    inference.execute({"x": x}, outputs_data={"y": out}, batch_size=3).wait()
    assert_close(out[:3], prediction(net, x)[:3])
    np.testing.assert_array_equal(out[3], 7)
    assert net.y.data.shape == (3, 2)
    small = np.empty((3, 2), np.float32)
    inference.execute({"x": x}, outputs_data={"y": small}, batch_size=3).wait()
    np.testing.assert_array_equal(small, out[:3])


def test_memory_of_an_output_whose_batch_does_not_come_first() -> None:
    graph = mlc.Graph()
    x = graph.input((6, 3), "x")
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": x.transpose()})
    inference.compile(device=mlc.Device.cpu())
    data = np.arange(15, dtype=np.float32).reshape(5, 3)
    y, whole = (np.zeros(shape, np.float32) for shape in ((3, 5), (3, 6)))
    inference.execute({"x": data}, outputs_data={"y": y}, batch_size=5, options=mlc.ExecutionOptions.SYNCHRONOUS)
    np.testing.assert_array_equal(y, data.T)
    with pytest.raises(mlc.DataError, match=r"output 'y'[\s\S]*expected  shape \(3, 5\)"):
        inference.execute({"x": data}, outputs_data={"y": whole}, batch_size=5)


def test_an_input_can_be_an_output() -> None:
    net = Regression()
    inference = inference_over(net)
    inference.add_outputs({"x": net.x})
    x, out = normal(4, 3), np.empty((4, 3), np.float32)
    inference.execute({"x": x}, outputs_data={"x": out}).wait()
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(net.x.data, x)


def test_results_may_be_kept_after_the_next_run() -> None:
    net = Regression()
    inference = inference_over(net)
    x = normal(4, 3)
    first = inference.execute({"x": x}).result.data
    copied = first.copy()
    inference.execute({"x": 2 * x}).wait()
    np.testing.assert_array_equal(first, copied)


def test_copying_results_from_device_memory() -> None:
    net = Regression()
    inference = inference_over(net)
    x = normal(4, 3)
    with pytest.raises(mlc.DataError, match="has no data"):
        net.y.copy_data_from_device_memory(bytearray(32))
    inference.execute({"x": x})
    assert net.y.synchronize_data()
    for synchronizes in (False, True):
        out = np.empty((4, 2), np.float32)
        assert net.y.copy_data_from_device_memory(out, synchronize_with_device=synchronizes)
        np.testing.assert_array_equal(out, net.y.data)
    part = bytearray(b"\xff" * 32)
    assert net.y.copy_data_from_device_memory(part, 8)
    assert part == net.y.data.tobytes()[:8] + b"\xff" * 24
    with pytest.raises(mlc.DataError, match="length is 33"):
        net.y.copy_data_from_device_memory(bytearray(64), 33)
    with pytest.raises(mlc.DataError, match="31 bytes, 32 are needed"):
        net.y.copy_data_from_device_memory(bytearray(31))


# Memory ------------------------------------------------------------------------------------------------------------


class Counting(CpuEngine):
    def __init__(self) -> None:
        super().__init__()
        self.name = "counting"
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> Any:
        self.asked.append(nbytes)
        return super().allocate(nbytes)


def test_memory_of_one_relu() -> None:
    x = mlc.Tensor(shape=(2, 3))
    graph = mlc.InferenceGraph()
    graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    assert graph.device_memory_size == 0
    graph.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Null()))
    assert graph.device_memory_size == 24
    graph.compile(device=cpu())
    assert graph.device_memory_size == 24
    graph.execute({"x": normal(2, 3)}).wait()
    assert graph.device_memory_size == 24


@pytest.mark.parametrize("style", ["fused", "split", "inference"])
def test_memory_is_what_the_engine_was_asked_for(style: str) -> None:
    engine = Counting()
    device = mlc.Device(mlc.DeviceType.CPU, engine=engine)
    net = Regression(adam(), device=device)
    state = 2 * sum(parameter.descriptor.tensor_allocation_size_in_bytes for parameter in net.parameters)
    x, t = normal(4, 3), normal(4, 2)
    compiled = net.training.device_memory_size
    assert net.training.gradient_tensor(net.hidden) is not None
    assert net.training.device_memory_size == compiled, "asking for gradients takes no memory"
    if style == "split":
        net.bind(x, t)
        net.training.execute_forward()
        net.training.execute_gradient().wait()
    else:
        net.step(x, t, options=INFERENCE if style == "inference" else ASYNC).wait()
        assert net.training.device_memory_size == compiled
    assert net.training.device_memory_size == max(engine.asked) + state
    asked = len(engine.asked)
    net.step(x[:2], t[:2], batch_size=2).wait()
    inputs = 0 if shares_memory(device) else x.nbytes
    assert max(engine.asked[asked:], default=0) <= inputs, "a smaller batch needs no memory of its own"


def test_programs_can_be_read() -> None:
    net = Regression(sgd())
    assert list(net.training.programs) == ["fused 4", "split 4"]
    net.training.execute({"x": normal(4, 3)}, options=INFERENCE, batch_size=2).wait()
    assert list(net.training.programs)[2:] == ["inference 4 without losses", "inference 2 without losses"]
    text = str(net.training.programs["fused 4"])
    assert text.startswith("program 'fused', batch 4")
    assert "matmul" in text
    assert mlc.InferenceGraph().programs == {}


def test_where_layers_and_tensors_run() -> None:
    net = Regression(sgd())
    assert net.first.device_type == net.device.actual_device_type
    assert net.first.weights.device is net.device
    assert net.training.device is net.device
    assert net.graph.device is None
    assert tensor(normal(2)).device is None


def test_the_targets_of_a_loss_that_is_an_expression_need_not_be_given():
    graph = mlc.Graph()
    x, target = graph.input((4, 3), "x"), graph.input((4, 2), "target")
    hidden = graph.dense(x, 2, name="hidden")
    y = graph.activation(hidden, "tanh")
    graph.minimize((y - target) ** 2)
    data = {"x": np.arange(12, dtype=np.float32).reshape(4, 3) / 12, "target": np.ones((4, 2), np.float32)}
    expected = np.tanh(data["x"] @ graph.layer("hidden").weights.data.T)
    for outputs in ({}, {"y": y}, {"hidden": hidden, "y": y}):
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.add_outputs(outputs)
        inference.compile(device=mlc.Device.cpu())
        result = inference.execute({"x": data["x"]}).result.data
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
        loss = inference.execute(data).result.data.item()  # where the target is there, so is the loss
        assert abs(loss - np.square(expected - 1).mean()) < 1e-6


def test_an_undeclared_input_that_an_output_needs_is_asked_for():
    graph = mlc.Graph()
    x, scale = graph.input((4, 3), "x"), graph.input((4, 3), "scale")
    y = x * scale
    graph.minimize(y**2)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    inference.compile(device=mlc.Device.cpu())
    with pytest.raises(mlc.DataError, match="'scale' was not given"):
        inference.execute({"x": np.ones((4, 3), np.float32)})
