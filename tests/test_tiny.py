"""The tour: what the library does, in the order a newcomer needs it. Read top to bottom."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mlcompute as mlc

X = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 0, 1]])
TARGET = np.float32([[1], [2], [3], [4]])
W = np.float32([[0.5, -0.25, 0.125]])


class Line:
    """y = x wᵀ + b for four samples of three features: the smallest graph that can learn."""

    def __init__(self, weights: np.ndarray = W) -> None:
        self.x, self.target = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 1))
        self.w, self.b = mlc.Tensor(shape=(1, 3), data=weights.copy()), mlc.Tensor(shape=(1,), fill_with_data=0.0)
        self.layer = mlc.FullyConnectedLayer(
            self.w,
            self.b,
            mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=1),
        )
        self.graph = mlc.Graph()
        self.y = self.graph.node(self.layer, source=self.x)

    def training(self, optimizer: mlc.Optimizer) -> mlc.TrainingGraph:
        training = mlc.TrainingGraph([self.graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), optimizer)
        training.add_inputs({"x": self.x}, {"target": self.target})
        training.compile(device=mlc.Device.cpu())
        return training

    def bind(self, training: mlc.TrainingGraph) -> None:
        names = {"x": self.x, "target": self.target}
        training.bind_and_write_data({"x": X, "target": TARGET}, for_inputs=names, to=mlc.Device.cpu())


def sgd(rate: float = 0.01) -> mlc.Optimizer:
    return mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=rate))


def adam(time_step: int = 1) -> mlc.AdamOptimizer:
    return mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01), time_step=time_step)


def gradient_by_hand() -> np.ndarray:
    """d mean((x wᵀ - t)²) / dw = 2/n (x wᵀ - t)ᵀ x"""
    return 2 / 4 * (X @ W.T - TARGET).T @ X


def test_a_graph_joins_layers_by_tensors() -> None:
    line = Line()
    assert line.y.descriptor.shape == (4, 1)
    assert line.graph.layers == [line.layer]
    assert line.graph.source_tensors(line.layer) == [line.x]
    assert line.y.data is None  # a description; nothing has run


def test_an_inference_graph_runs_it() -> None:
    line = Line()
    inference = mlc.InferenceGraph([line.graph])
    inference.add_inputs({"x": line.x})
    inference.compile(device=mlc.Device.cpu())
    run = inference.execute({"x": X})
    np.testing.assert_allclose(run.result.data, X @ W.T, rtol=1e-6)


def test_a_training_graph_does_a_whole_step_in_one_call() -> None:
    line = Line()
    training = line.training(sgd())
    loss = training.execute({"x": X}, {"target": TARGET}).result
    np.testing.assert_allclose(loss.data, [np.mean((X @ W.T - TARGET) ** 2)], rtol=1e-6)
    np.testing.assert_allclose(line.w.data, W - 0.01 * gradient_by_hand(), rtol=1e-5)


def test_step_after_step_the_loss_falls() -> None:
    training = Line().training(sgd(0.005))
    losses = [training.execute({"x": X}, {"target": TARGET}).result.data.item() for _ in range(50)]
    assert losses == sorted(losses, reverse=True)


def test_passes_run_one_by_one_leave_every_gradient_readable() -> None:
    line = Line()
    training = line.training(sgd())
    line.bind(training)
    training.execute_forward()
    training.execute_gradient()
    gradient = training.gradient_data(line.w, line.layer)
    np.testing.assert_allclose(gradient, gradient_by_hand(), rtol=1e-5)
    np.testing.assert_array_equal(line.w.data, W)  # not updated yet
    training.execute_optimizer_update()
    np.testing.assert_allclose(line.w.data, W - 0.01 * gradient, rtol=1e-6)


def test_one_call_and_three_calls_give_the_same_bits() -> None:
    fused, split = Line(), Line()
    in_one, in_three = fused.training(adam()), split.training(adam())
    split.bind(in_three)
    for _ in range(5):
        in_one.execute({"x": X}, {"target": TARGET})
        in_three.execute_forward()
        in_three.execute_gradient()
        in_three.execute_optimizer_update()
    np.testing.assert_array_equal(fused.w.data, split.w.data)
    assert in_one.gradient_data(fused.w, fused.layer) is None  # one call reuses the memory of gradients


def test_the_optimizer_keeps_its_state_where_you_can_see_it() -> None:
    line = Line()
    line.training(adam()).execute({"x": X}, {"target": TARGET}).wait()
    momentum, velocity = (np.frombuffer(state.bytes, np.float32) for state in line.w.optimizer_data)
    np.testing.assert_allclose(momentum, 0.1 * gradient_by_hand()[0], rtol=1e-5)
    np.testing.assert_allclose(velocity, 0.001 * gradient_by_hand()[0] ** 2, rtol=1e-4)


def test_weights_and_state_saved_and_bound_again_go_on_exactly(tmp_path: Path) -> None:
    straight = Line()
    training = straight.training(adam())
    for _ in range(6):
        training.execute({"x": X}, {"target": TARGET})

    before = Line()
    training = before.training(adam())
    for _ in range(3):
        training.execute({"x": X}, {"target": TARGET})
    training.synchronize_updates()
    saved = {"w": before.w.data, "b": before.b.data}
    for name, tensor in (("w", before.w), ("b", before.b)):
        for number, state in enumerate(tensor.optimizer_data):
            saved[f"{name}{number}"] = np.frombuffer(state.bytes, np.float32).reshape(tensor.descriptor.shape)
    save_file(saved, tmp_path / "checkpoint.safetensors")

    loaded = load_file(tmp_path / "checkpoint.safetensors")
    after = Line(np.zeros((1, 3), np.float32))
    training_again = after.training(adam(time_step=training.optimizer.time_step))
    for name, tensor in (("w", after.w), ("b", after.b)):
        tensor.bind_and_write_data(loaded[name], to=mlc.Device.cpu())
        training_again.bind_optimizer_data([loaded[f"{name}0"], loaded[f"{name}1"]], tensor=tensor)
    for _ in range(3):
        training_again.execute({"x": X}, {"target": TARGET})
    np.testing.assert_array_equal(after.w.data, straight.w.data)
    np.testing.assert_array_equal(after.b.data, straight.b.data)


def test_a_short_last_batch_is_just_a_smaller_batch_size() -> None:
    line = Line()
    loss = line.training(sgd()).execute({"x": X[:2]}, {"target": TARGET[:2]}, batch_size=2).result
    np.testing.assert_allclose(loss.data, [np.mean((X[:2] @ W.T - TARGET[:2]) ** 2)], rtol=1e-6)


def test_runs_are_queued_and_can_be_awaited() -> None:
    training = Line().training(sgd())

    async def losses() -> list[float]:
        return [(await training.execute({"x": X}, {"target": TARGET}))[0].data.item() for _ in range(3)]

    first, *_, last = asyncio.run(losses())
    assert last < first


def test_memory_is_known_before_the_first_step() -> None:
    training = Line().training(adam())
    needed = training.device_memory_size
    assert needed > 0
    for _ in range(3):
        training.execute({"x": X}, {"target": TARGET}).wait()
    assert training.device_memory_size == needed


def test_mistakes_are_refused_while_building_and_say_what_to_do() -> None:
    line = Line()
    wide = mlc.Tensor(shape=(4, 5))
    again = mlc.FullyConnectedLayer(line.w, line.b, line.layer.descriptor)
    with pytest.raises(mlc.ShapeError, match="input_feature_channel_count is 3, the source has 5") as refused:
        line.graph.node(again, source=wide)
    assert "set input_feature_channel_count=5 or reshape the source" in str(refused.value)
    assert isinstance(refused.value, ValueError)
