"""What is minimised: losses that layers go on computing with, several losses, losses without a reduction."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import LINK, Array, cpu, normal, sgd

X, T, W = normal(8, 3), normal(8, 2, seed=1), np.abs(normal(8, 2, seed=2))
RATE = 0.1


class Net:
    """One dense layer y, labels t and weights w, and the same in PyTorch."""

    def __init__(self) -> None:
        self.graph = mlc.Graph()
        self.x, self.t, self.w = (self.graph.input(a.shape, n) for a, n in ((X, "x"), (T, "t"), (W, "w")))
        self.y = self.graph.dense(self.x, 2, biases=False, name="fc")
        layer: Any = self.graph.layer("fc")
        self.weights: mlc.Tensor = layer.weights
        self.before = np.array(self.weights.data)
        self.torch_weights = torch.tensor(self.before, dtype=torch.float64, requires_grad=True)
        self.torch_y = torch.tensor(X, dtype=torch.float64) @ self.torch_weights.T

    def arithmetic(self, kind: mlc.ArithmeticOperation, *sources: mlc.Tensor) -> mlc.Tensor:
        return self.graph.node(mlc.ArithmeticLayer(kind), sources=list(sources))

    def mean(self, tensor: mlc.Tensor) -> mlc.Tensor:
        return self.graph.reduce(tensor, "mean", dimensions=range(tensor.descriptor.dimension_count))

    def training(
        self, device: mlc.Device, loss: mlc.LossLayer | None = None, **outputs: mlc.Tensor
    ) -> mlc.TrainingGraph:
        training = mlc.TrainingGraph([self.graph], loss, sgd(RATE))
        training.add_inputs({"x": self.x, "w": self.w}, {"t": self.t})
        training.add_outputs(outputs)
        training.compile(device=device)
        return training

    def expect(self, training: mlc.TrainingGraph, minimised: torch.Tensor, result: torch.Tensor | None = None) -> None:
        """One step minimises that and answers `result`, fused and pass by pass."""
        minimised.backward()
        assert self.torch_weights.grad is not None
        gradient = self.torch_weights.grad.numpy()
        run = training.execute({"x": X, "w": W}, {"t": T})
        answer = (minimised if result is None else result).detach().numpy()
        assert_close(np.array(run.result.data).reshape(answer.shape), answer)
        assert_close(np.array(self.weights.data), self.before - RATE * gradient)
        self.weights.bind_and_write_data(self.before.copy(), to=mlc.Device.cpu())
        tensors = {"x": self.x, "t": self.t, "w": self.w}
        training.bind_and_write_data({"x": X, "t": T, "w": W}, for_inputs=tensors, to=mlc.Device.cpu())
        forward = training.execute_forward()
        training.execute_gradient()
        assert_close(np.array(forward.result.data).reshape(answer.shape), answer)
        assert_close(training.gradient_data(self.weights, self.graph.layer("fc")), gradient)


ADD, MULTIPLY, SQRT = mlc.ArithmeticOperation.ADD, mlc.ArithmeticOperation.MULTIPLY, mlc.ArithmeticOperation.SQRT


def squares(net: Net) -> torch.Tensor:
    return (net.torch_y - torch.tensor(T, dtype=torch.float64)) ** 2


def test_layers_after_a_loss_count(device: mlc.Device) -> None:
    """reduction="none", times weights, mean: what every PyTorch user writes."""
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none", name="each")
    net.mean(net.arithmetic(MULTIPLY, each, net.w))
    training = net.training(device)
    assert list(training.losses) == ["each", "reduce_mean1"]
    assert training.summary().minimises == "reduce_mean1"
    net.expect(training, (squares(net) * torch.tensor(W)).mean())
    np.testing.assert_allclose(training.losses["each"].data, squares(net).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert mlc.check_gradients(training, {"x": X, "w": W}, {"t": T})


def test_a_loss_with_two_consumers(device: mlc.Device) -> None:
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none")
    weighted, plain = net.mean(net.arithmetic(MULTIPLY, each, net.w)), net.mean(each)
    net.arithmetic(ADD, weighted, plain)
    net.expect(net.training(device), (squares(net) * torch.tensor(W)).mean() + squares(net).mean())


def test_a_loss_that_branches_says_what_is_minimised(device: mlc.Device) -> None:
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none", name="each")
    net.mean(net.arithmetic(MULTIPLY, each, net.w))
    root = net.arithmetic(SQRT, net.mean(each))
    with pytest.warns(UserWarning, match=r"Loss 'each' leads to 2 results.*the sum of all of them.*stop_gradient"):
        training = net.training(device)
    assert training.summary().minimises == "reduce_mean1 + arithmetic_1"
    training.stop_gradient([root])
    net.expect(training, (squares(net) * torch.tensor(W)).mean())


def test_layers_that_only_look_at_a_loss(device: mlc.Device) -> None:
    net = Net()
    loss = net.graph.loss(net.y, net.t, "mse")
    limit = mlc.Tensor(shape=(1,), fill_with_data=1.0)
    large = net.graph.node(mlc.ComparisonLayer(mlc.ComparisonOperation.GREATER), sources=[loss, limit])
    root = net.arithmetic(SQRT, loss)
    training = net.training(device, large=large, root=root, same=loss)
    training.stop_gradient([root])
    net.expect(training, squares(net).mean())
    assert_close(np.array(root.data), np.sqrt(squares(net).mean().detach().numpy()).reshape(1))


def test_a_loss_given_to_the_caller_is_the_callers(device: mlc.Device) -> None:
    """A user gradient of a loss is dL/d(loss): it does not add to a gradient of 1."""
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none")
    training = mlc.TrainingGraph([net.graph], None, sgd(RATE))
    training.add_inputs({"x": net.x}, {"t": net.t})
    gradient = training.allocate_user_gradient(each)
    training.compile(device=device)
    tensors = {"x": net.x, "t": net.t, "g": gradient}
    training.bind_and_write_data({"x": X, "t": T, "g": W}, for_inputs=tensors, to=device)
    training.execute_forward()
    training.execute_gradient()
    (squares(net) * torch.tensor(W)).sum().backward()
    assert_close(training.gradient_data(net.weights, net.graph.layer("fc")), net.torch_weights.grad.numpy())


def test_one_of_two_heads_is_weighted(device: mlc.Device) -> None:
    net = Net()
    first = net.graph.loss(net.y, net.t, "mse", reduction="none", name="first")
    net.mean(net.arithmetic(MULTIPLY, first, net.w))
    net.graph.loss(net.y, net.t, "mae", name="second")
    training = net.training(device)
    assert training.summary().minimises == "reduce_mean1 + second"
    absolute = (net.torch_y - torch.tensor(T)).abs().mean()
    net.expect(training, (squares(net) * torch.tensor(W)).mean() + absolute)
    assert list(training.losses) == ["first", "reduce_mean1", "second"]
    assert_close(np.array(training.losses["second"].data), np.float32([absolute.item()]))


def test_several_losses_answer_their_sum(device: mlc.Device) -> None:
    net = Net()
    net.graph.loss(net.y, net.t, "mse", name="near")
    net.graph.loss(net.y, net.t, "huber", name="robust", weight=0.5)
    training = net.training(device)
    huber = 0.5 * torch.nn.functional.huber_loss(net.torch_y, torch.tensor(T, dtype=torch.float64))
    net.expect(training, squares(net).mean() + huber)
    assert {name: tensor.data.shape for name, tensor in training.losses.items()} == {"near": (1,), "robust": (1,)}
    assert_close(np.array(training.losses["robust"].data), np.float32([huber.item()]))
    # In inference it is the sum too; without labels, the prediction.
    net.weights.bind_and_write_data(net.before.copy(), to=device)
    inference = mlc.InferenceGraph([training])
    inference.add_inputs({"x": net.x}, {"t": net.t})
    inference.compile(device=device)
    total = (squares(net).mean() + huber).item()
    assert_close(np.array(inference.execute({"x": X}, {"t": T}).result.data), np.float32([total]))
    assert inference.execute({"x": X}).result.data.shape == (8, 2)


def test_one_loss_costs_what_it_did(device: mlc.Device) -> None:
    net = Net()
    loss = net.graph.loss(net.y, net.t, "mse", name="loss")
    training = net.training(device)
    assert training.losses == {"loss": loss}
    assert not any(step.layer == "total loss" for step in training.programs["fused 8"].steps)
    assert training.summary().minimises == ""


def test_a_loss_without_a_reduction_says_that_the_sum_is_minimised(device: mlc.Device) -> None:
    net = Net()
    net.graph.loss(net.y, net.t, "mse", reduction="none", name="each")
    said = r"Loss 'each' has 16 elements, shape \(8, 2\).*sum is minimised.*`result` holds"
    with pytest.warns(UserWarning, match=said):
        training = net.training(device)
    assert training.summary().minimises == "the sum of the 16 elements of each"
    assert "minimises  the sum of the 16 elements of each" in str(training.summary())
    net.expect(training, squares(net).sum(), squares(net))


def test_the_warning_names_the_callers_line_once() -> None:
    net = Net()
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.NONE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = net.training(cpu(), loss)
        training.add_outputs({"y": net.y})
        training.execute({"x": X}, {"t": T}).wait()
    (one,) = caught
    assert Path(one.filename).parent == Path(__file__).parent  # of the tests, not of the package


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_reduction_layer_says_it_without_a_warning(kind: str, device: mlc.Device) -> None:
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none")
    net.graph.reduce(each, kind, dimensions=(0, 1))
    net.expect(net.training(device), getattr(squares(net), kind)())


def test_without_labels_nothing_after_a_loss_runs(device: mlc.Device) -> None:
    net = Net()
    doubled = net.arithmetic(ADD, net.w, net.w)
    each = net.graph.loss(net.y, net.t, "mse", reduction="none")
    net.mean(net.arithmetic(MULTIPLY, each, doubled))
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x, "w": net.w}, {"t": net.t})
    inference.compile(device=device)
    run = inference.execute({"x": X})
    assert_close(np.array(run.result.data), X @ net.before.T, what="the prediction, not the weights of the loss")
    expected = (squares(net) * 2 * torch.tensor(W)).mean().item()
    assert_close(np.array(inference.execute({"x": X, "w": W}, {"t": T}).result.data), np.float32([[expected]]))


def test_a_linked_graph_goes_on_with_a_loss(device: mlc.Device) -> None:
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none")
    later = mlc.Graph()
    scaled = later.node(mlc.ArithmeticLayer(MULTIPLY), sources=[each, net.w])
    later.reduce(scaled, "mean", dimensions=(0, 1))
    first = mlc.TrainingGraph([net.graph], None, sgd(RATE))
    first.add_inputs({"x": net.x}, {"t": net.t})
    second = mlc.TrainingGraph([later], None, sgd(RATE))
    second.add_inputs({"w": net.w})
    first.link([second])
    for graph in (first, second):
        graph.compile(device=device, options=LINK)
    tensors: dict[str, mlc.Tensor] = {"x": net.x, "t": net.t, "w": net.w}
    first.bind_and_write_data({"x": X, "t": T, "w": W}, for_inputs=tensors, to=device)
    first.execute_forward()
    run = second.execute_forward()
    second.execute_gradient()
    first.execute_gradient()
    expected = (squares(net) * torch.tensor(W)).mean()
    expected.backward()
    assert_close(np.array(run.result.data), np.float32([[expected.item()]]))
    assert_close(first.gradient_data(net.weights, net.graph.layer("fc")), net.torch_weights.grad.numpy())


def fitted(graph: mlc.Graph, accumulate: int = 1, **more: Any) -> tuple[mlc.Trainer, mlc.trainer.History]:
    trainer = mlc.Trainer(graph, optimizer=sgd(RATE), **more)
    data: Array = np.concatenate([X, X[::-1]])
    labels: Array = np.concatenate([T, T[::-1]])
    history = trainer.fit({"x": data}, {"t": labels}, shuffle=False, accumulate=accumulate, verbose=0)
    return trainer, history


def test_a_trainer_reports_what_it_minimises() -> None:
    net = Net()
    each = net.graph.loss(net.y, net.t, "mse", reduction="none")
    net.mean(each)
    plain = Net()
    plain.weights.bind_and_write_data(net.before.copy(), to=cpu())
    plain.graph.loss(plain.y, plain.t, "mse")
    trainer, history = fitted(net.graph)
    other, expected = fitted(plain.graph)
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert trainer.evaluate({"x": X}, {"t": T})["loss"] == pytest.approx(other.evaluate({"x": X}, {"t": T})["loss"])
    assert set(history.epochs[0]) == {"loss", "learning_rate"}


def test_a_trainer_reports_each_of_several_losses() -> None:
    net = Net()
    net.graph.loss(net.y, net.t, "mse", name="near")
    net.graph.loss(net.y, net.t, "mae", name="loss", weight=0.5)
    trainer, history = fitted(net.graph)
    (epoch,) = history.epochs
    assert epoch["loss"] == pytest.approx(epoch["near"] + epoch["loss_loss"], rel=1e-6)
    found = trainer.evaluate({"x": X}, {"t": T})
    error = X @ np.array(net.weights.data).T - T
    assert found["near"] == pytest.approx(float((error**2).mean()), rel=1e-5)
    assert found["loss"] == pytest.approx(float((error**2).mean() + 0.5 * np.abs(error).mean()), rel=1e-5)


def test_a_trainer_reports_the_sum_of_a_loss_without_a_reduction() -> None:
    none, summed = Net(), Net()
    summed.weights.bind_and_write_data(none.before.copy(), to=cpu())
    none.graph.loss(none.y, none.t, "mse", reduction="none", weight=0.1)
    summed.graph.loss(summed.y, summed.t, "mse", reduction="sum", weight=0.1)
    for accumulate in (1, 2):
        with pytest.warns(UserWarning, match="sum is minimised"):
            _, history = fitted(none.graph, accumulate)
        _, expected = fitted(summed.graph, accumulate)
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)


# Layers without a gradient --------------------------------------------------------------------------------------------


def test_a_head_without_a_loss_is_named(device: mlc.Device) -> None:
    """Two heads, one label: the loss looks at the last result alone."""
    net = Net()
    net.graph.dense(net.x, 2, name="second head")
    with pytest.warns(UserWarning, match=r"'fc' will not be trained: nothing that is minimised.*graph\.loss.*updates"):
        net.training(device, mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN))


def test_layers_no_gradient_passes_are_named(device: mlc.Device) -> None:
    net = Net()
    largest = net.graph.node(mlc.ReductionLayer(mlc.ReductionType.ARG_MAX, 1), source=net.y)
    joined = net.arithmetic(ADD, largest, net.graph.dense(net.x, 1, name="trained"))
    net.graph.loss(net.arithmetic(MULTIPLY, joined, net.w), net.t, "mse")
    with pytest.warns(UserWarning, match="'fc' will not be trained: no gradient passes the layers between"):
        net.training(device)


def test_layers_left_alone_on_purpose_are_not(device: mlc.Device) -> None:
    net = Net()
    hidden = net.graph.dense(net.y, 2, name="head")
    net.graph.dense(net.x, 2, name="spare", updates=False)
    net.graph.loss(hidden, net.t, "mse")
    training = mlc.TrainingGraph([net.graph], None, sgd(RATE))
    training.add_inputs({"x": net.x}, {"t": net.t})
    training.stop_gradient([net.y])
    assert training.compile(device=device)


# Labels that layers compute -------------------------------------------------------------------------------------------

KINDS = {
    "mse": lambda y, t: ((y - t) ** 2).mean(),
    "mae": lambda y, t: (y - t).abs().mean(),
    "huber": torch.nn.functional.huber_loss,
    "softmax_cross_entropy": torch.nn.functional.cross_entropy,
    "sigmoid_cross_entropy": torch.nn.functional.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_loss_are_trained(kind: str, device: mlc.Device) -> None:
    graph = mlc.Graph()
    x = graph.input((8, 3), "x")
    a = graph.dense(x, 2, biases=False, name="a")
    b = graph.dense(x, 2, biases=False, name="b", activation="sigmoid" if "entropy" in kind else None)
    graph.loss(a, b, kind)
    training = mlc.TrainingGraph([graph], None, sgd(RATE))
    training.add_inputs({"x": x})
    training.compile(device=device)
    layers: list[Any] = [graph.layer("a"), graph.layer("b")]
    weights = [torch.tensor(np.array(layer.weights.data), dtype=torch.float64, requires_grad=True) for layer in layers]
    sides = [torch.tensor(X, dtype=torch.float64) @ w.T for w in weights]
    sides[1] = torch.sigmoid(sides[1]) if "entropy" in kind else sides[1]
    expected = KINDS[kind](*sides)
    expected.backward()
    run = training.execute({"x": X})
    assert_close(np.array(run.result.data), np.float32([expected.item()]))
    for layer, w in zip(layers, weights, strict=True):
        assert_close(np.array(layer.weights.data), (w - RATE * w.grad).detach().numpy())


def test_a_target_can_be_held(device: mlc.Device) -> None:
    graph = mlc.Graph()
    x = graph.input((8, 3), "x")
    a, b = graph.dense(x, 2, name="a"), graph.dense(x, 2, name="b")
    graph.loss(a, b, "mse")
    training = mlc.TrainingGraph([graph], None, sgd(RATE))
    training.add_inputs({"x": x})
    training.stop_gradient([b])
    training.compile(device=device)
    target: Any = graph.layer("b")
    before = np.array(target.weights.data)
    training.execute({"x": X}).wait()
    np.testing.assert_array_equal(target.weights.data, before)
