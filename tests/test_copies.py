"""Copies of graphs, graphs that lean on others, devices that are not there."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.nets import LINK, MEAN, Regression, adam, batch_norm, dense, normal, sgd, values_of

X, T = normal(4, 3), normal(4, 2, seed=1)


def step(training: mlc.TrainingGraph) -> float:
    return float(np.array(training.execute({"x": X}, {"t": T}).result.data).item())


def same(one: mlc.Graph, other: mlc.Graph) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(values_of(one), values_of(other), strict=True))


def test_a_copy_learns_on_without_the_original(device: mlc.Device) -> None:
    net, plain = Regression(adam(), device=device), Regression(adam(), device=device)
    step(net.training)
    copied = copy.copy(net.training)
    assert (copied.layers, copied.optimizer, copied.device) == (net.graph.layers, net.training.optimizer, device)
    step(copied)
    parameters = net.parameters
    del net
    gc.collect()
    losses = [step(copied) for _ in range(3)]
    expected = [step(plain.training) for _ in range(5)]
    assert losses == expected[2:]
    for one, other in zip(parameters, plain.parameters, strict=True):
        np.testing.assert_array_equal(one.data, other.data)
    copied.layers[0].updates = False
    step(copied)


def test_a_copy_shares_weights_and_state_but_not_layers(device: mlc.Device) -> None:
    net, plain = Regression(adam(), device=device), Regression(adam(), device=device)
    copied = copy.copy(net.training)
    for training in (net.training, copied, net.training):
        assert step(training) == step(plain.training)
    assert same(net.training, plain.training)
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.compile(device=device)
    twin = copy.copy(inference)
    twin.node(mlc.ActivationLayer.relu(), source=net.y)
    assert len(twin.layers) == len(inference.layers) + 1
    results = [np.array(graph.execute({"x": X}).result.data) for graph in (inference, twin)]
    np.testing.assert_array_equal(np.maximum(results[0], 0), results[1])


def test_a_deep_copy_has_weights_of_its_own(device: mlc.Device) -> None:
    net, plain = Regression(adam(), device=device), Regression(adam(), device=device)
    step(net.training)
    step(plain.training)
    copied = copy.deepcopy(net.training)
    assert same(copied, net.training)
    assert not set(copied.layers) & set(net.training.layers)
    before = values_of(net.training)
    for _ in range(3):
        assert step(copied) == step(plain.training)
    assert same(copied, plain.training)
    assert all(np.array_equal(a, b) for a, b in zip(values_of(net.training), before, strict=True))
    assert copied.optimizer is not net.training.optimizer
    assert isinstance(copied.optimizer, mlc.AdamOptimizer)
    assert copied.optimizer.time_step == 5


def test_a_deep_copy_of_a_plain_graph(device: mlc.Device) -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(4, 3))
    y = graph.node(batch_norm(2), source=graph.node(dense(3, 2), source=x), disable_update=True)
    whole: dict[str, Any] = copy.deepcopy({"graph": graph, "x": x, "y": y})
    answers = []
    for each in ({"graph": graph, "x": x, "y": y}, whole):
        inference = mlc.InferenceGraph([each["graph"]])
        inference.add_inputs({"x": each["x"]})
        inference.compile(device=device)
        answers.append(np.array(inference.execute({"x": X}).result.data))
        assert [layer.updates for layer in each["graph"].layers] == [True, False]
    np.testing.assert_array_equal(*answers)
    with pytest.raises(mlc.GraphError, match="already part of this graph"):
        whole["graph"].node(whole["graph"].layers[0], source=whole["x"])


def test_linked_graphs_are_copied_together(device: mlc.Device) -> None:
    x = mlc.Tensor(shape=(4, 3))
    first, second = mlc.InferenceGraph(), mlc.InferenceGraph()
    second.node(mlc.ActivationLayer.relu(), source=first.node(dense(3, 3), source=x))
    first.add_inputs({"x": x})
    first.link([second])
    for graph in (first, second):
        graph.compile(device=device, options=LINK)
    with pytest.raises(mlc.GraphError, match=r"(?s)a linked graph cannot be copied by itself.*deepcopy"):
        copy.copy(first)
    one, other = copy.deepcopy([first, second])
    one.execute({"x": X})
    first.execute({"x": X})
    np.testing.assert_array_equal(other.execute({}).result.data, second.execute({}).result.data)


# Graphs that lean on others -------------------------------------------------------------------------------------------


def test_a_tensor_of_another_graph_is_refused(device: mlc.Device) -> None:
    trunk, head, x = mlc.Graph(), mlc.Graph(), mlc.Tensor(shape=(4, 3))
    hidden = trunk.node(dense(3, 5), source=x)
    head.node(dense(5, 2), source=hidden)
    said = r"(?s)FullyConnected .* reads .*computed by FullyConnected 'FullyConnected' of another graph.*link"
    inference = mlc.InferenceGraph([head])
    with pytest.raises(mlc.GraphError, match=said):
        inference.compile(device=device)
    training = mlc.TrainingGraph([head], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(4, 2))})
    with pytest.raises(mlc.GraphError, match=said):
        training.compile(device=device)
    with pytest.raises(mlc.GraphError, match=said):
        mlc.Trainer(head, loss="mse")
    both = mlc.InferenceGraph([trunk, head])
    both.add_inputs({"x": x})
    assert both.compile(device=device)
    fed = mlc.InferenceGraph([head])  # feeding it by hand is meant
    fed.add_inputs({"hidden": hidden})
    assert fed.compile(device=device)
    del trunk, both
    gc.collect()
    with pytest.raises(mlc.GraphError, match="computed by a layer of a graph that is gone"):
        inference.compile(device=device)


# Devices that are not there -------------------------------------------------------------------------------------------


def test_no_device_is_no_device() -> None:
    net = Regression(sgd())
    missing: Any = mlc.Device.ane()
    said = r"is None, which is what Device\.gpu\(\)[\s\S]*Device\.cpu\(\)"
    with pytest.raises(mlc.DeviceError, match=rf"TrainingGraph\.compile: device {said}"):
        net.training.compile(device=missing)
    with pytest.raises(mlc.DeviceError, match=rf"bind_and_write_data: to {said}"):
        net.training.bind_and_write_data({}, for_inputs={}, to=missing)
    with pytest.raises(mlc.DeviceError, match=rf"Trainer: device {said}"):
        mlc.Trainer(net.graph, loss="mse", device=missing)
    assert mlc.Trainer(net.graph, loss="mse").device.type == mlc.DeviceType.ANY
