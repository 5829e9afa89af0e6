"""L-BFGS against PyTorch's, where curvature makes plain descent slow, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.remote import Remote
from tests.nets import Array, Regression, normal, values_of


def data() -> tuple[Array, Array]:
    return normal(32, 3), normal(32, 2, seed=1)


@pytest.mark.parametrize("history", [100, 3])
def test_the_way_down_is_pytorchs(history: int) -> None:
    net = Regression(batch=32)
    twin = net.torch()
    theirs = torch.optim.LBFGS(twin.parameters, max_iter=8, history_size=history, line_search_fn="strong_wolfe")
    ours = mlc.LBFGS(net.training, iterations=8, history_size=history)
    x, t = data()

    def closure() -> torch.Tensor:
        theirs.zero_grad()
        loss = twin.loss(x, t)
        loss.backward()
        return loss

    for _ in range(3):
        expected = theirs.step(closure).detach().item()
        assert ours.step({"x": x}, {"t": t}) == pytest.approx(expected, rel=1e-3)
    for parameter, wanted in zip(net.parameters, twin.parameters, strict=True):
        np.testing.assert_allclose(parameter.data, wanted.detach().numpy(), rtol=0.02, atol=0.01)


def test_a_curve_is_fitted_to_rounding_and_far_beyond_adam() -> None:
    def fitted(search: bool) -> float:
        mlc.Platform.set_rng_seed_to(4)
        graph = mlc.Graph()
        x, t = graph.input((64, 1), "x"), mlc.Tensor(shape=(64, 1))
        graph.dense(graph.dense(x, 16, activation="tanh"), 1)
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        training = mlc.TrainingGraph([graph], loss, None if search else mlc.AdamOptimizer(learning_rate=0.01))
        training.add_inputs({"x": x}, {"t": t})
        training.compile(device=mlc.Device.cpu())
        points = np.linspace(-2, 2, 64)[:, None]
        feeds = {"x": points}, {"t": np.sin(2 * points)}
        if search:
            lbfgs = mlc.LBFGS(training, iterations=50)
            return [lbfgs.step(*feeds) for _ in range(4)][-1]
        return [float(training.execute(*feeds).result.data[0]) for _ in range(200)][-1]

    assert fitted(True) < 0.1 * fitted(False)


def test_it_goes_on_from_its_state() -> None:
    x, t = data()
    whole, first, second = (Regression(batch=32) for _ in range(3))
    search = mlc.LBFGS(whole.training, iterations=4, history_size=3)
    for _ in range(4):
        search.step({"x": x}, {"t": t})
    begun, going_on = (mlc.LBFGS(net.training, iterations=4, history_size=3) for net in (first, second))
    for _ in range(2):
        begun.step({"x": x}, {"t": t})
    for parameter, value in zip(second.parameters, values_of(first.training), strict=True):
        parameter.data = value
    going_on.restore(begun.state())
    for _ in range(2):
        going_on.step({"x": x}, {"t": t})
    for a, b in zip(values_of(whole.training), values_of(second.training), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # weights go through float32 between the steps


def test_frozen_parameters_and_other_memory() -> None:
    net = Regression(batch=32, device=mlc.Device(engine=Remote()))
    net.graph.freeze("fully_connected")
    before = values_of(net.training)
    x, t = data()
    search = mlc.LBFGS(net.training)
    first = search.step({"x": x}, {"t": t})
    assert search.step({"x": x}, {"t": t}) < first
    after = values_of(net.training)
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def test_refusals() -> None:
    net = Regression(batch=32)
    with pytest.raises(TypeError, match="training must be a TrainingGraph, not Graph"):
        mlc.LBFGS(net.graph)  # type: ignore[arg-type]
    with pytest.raises(mlc.DataError, match="LBFGS: learning_rate is 0"):
        mlc.LBFGS(net.training, learning_rate=0.0)
    bare = mlc.TrainingGraph()
    bare.node(mlc.ActivationLayer.relu(), source=mlc.Tensor(shape=(2, 3)))
    bare.compile(device=mlc.Device.cpu())
    with pytest.raises(mlc.GraphError, match="LBFGS: the training graph has no loss"):
        mlc.LBFGS(bare)
    before = values_of(net.training)
    x, t = data()
    with pytest.raises(mlc.DataError, match="the loss is nan"):
        mlc.LBFGS(net.training).step({"x": x * np.float32(np.nan)}, {"t": t})
    for a, b in zip(before, values_of(net.training), strict=True):
        np.testing.assert_array_equal(a, b)


def test_random_layers_are_remarked_once() -> None:
    graph = mlc.Graph()
    x, t = graph.input((8, 3), "x"), mlc.Tensor(shape=(8, 1))
    graph.dense(graph.dropout(x, 0.5), 1)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())
    search, given = mlc.LBFGS(training, iterations=2), ({"x": np.ones((8, 3))}, {"t": np.ones((8, 1))})
    with pytest.warns(UserWarning, match="LBFGS: the graph draws random numbers"):
        search.step(*given)
    search.step(*given)
