"""One optimizer in two training graphs: state belongs to the optimizer and the tensor, as in PyTorch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.optimizers.memory import memory_of
from tests.harness import assert_close
from tests.nets import MEAN, Array, adam, cpu, dense, normal, sgd

X, T = normal(4, 3), normal(4, 2, seed=1)
MAKERS: dict[str, Callable[[], mlc.Optimizer]] = {
    "adam": lambda: adam(0.05),
    "momentum": lambda: sgd(0.05, momentum_scale=0.9),
    "rmsprop": lambda: mlc.RMSPropOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)),
}


class Graphs:
    """A dense layer, and training graphs over it."""

    def __init__(self, optimizer: mlc.Optimizer, device: mlc.Device) -> None:
        self.optimizer, self.device = optimizer, device
        self.graph, self.layer = mlc.Graph(), dense(3, 2)
        self.x, self.t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
        self.y = self.graph.node(self.layer, source=self.x)

    def training(self, loss: Callable[[mlc.ReductionType], mlc.LossLayer]) -> mlc.TrainingGraph:
        training = mlc.TrainingGraph([self.graph], loss(MEAN), self.optimizer)
        training.add_inputs({"x": self.x}, {"t": self.t})
        training.compile(device=self.device)
        return training

    @property
    def weights(self) -> Array:
        assert self.layer.biases is not None
        return np.concatenate([np.array(self.layer.weights.data).ravel(), np.array(self.layer.biases.data).ravel()])


def step(training: mlc.TrainingGraph) -> None:
    training.execute({"x": X}, {"t": T}).wait()


@pytest.mark.parametrize("kind", MAKERS)
def test_graphs_over_the_same_weights_share_state_and_clock(kind: str, device: mlc.Device) -> None:
    """Alternating between two graphs is the same as one optimizer in one graph whose loss alternates."""
    one, other = Graphs(MAKERS[kind](), device), Graphs(MAKERS[kind](), device)
    first, second = (one.training(mlc.LossLayer.mean_squared_error) for _ in range(2))
    alone = other.training(mlc.LossLayer.mean_squared_error)
    for _ in range(3):
        step(first)
        step(second)
        step(alone)
        step(alone)
    np.testing.assert_array_equal(one.weights, other.weights)


def test_adam_in_two_graphs_is_pytorchs(device: mlc.Device) -> None:
    graphs = Graphs(mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.05), epsilon=0.0), device)
    squared, absolute = map(graphs.training, (mlc.LossLayer.mean_squared_error, mlc.LossLayer.mean_absolute_error))
    assert graphs.layer.biases is not None
    w = torch.tensor(np.array(graphs.layer.weights.data), dtype=torch.float64, requires_grad=True)
    b = torch.tensor(np.array(graphs.layer.biases.data), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([w, b], lr=0.05, eps=0.0)
    for number in range(6):
        error = torch.tensor(X, dtype=torch.float64) @ w.T + b - torch.tensor(T)
        optimizer.zero_grad()
        (error.abs().mean() if number % 2 else (error**2).mean()).backward()
        optimizer.step()
        step(absolute if number % 2 else squared)
    assert_close(graphs.weights, torch.cat([w.detach().ravel(), b.detach().ravel()]).numpy())
    assert isinstance(graphs.optimizer, mlc.AdamOptimizer)
    assert graphs.optimizer.time_step == 7


def test_state_outlives_the_graph(device: mlc.Device) -> None:
    one, other = Graphs(adam(0.05), device), Graphs(adam(0.05), device)
    alone = other.training(mlc.LossLayer.mean_squared_error)
    for _ in range(3):
        training = one.training(mlc.LossLayer.mean_squared_error)
        step(training)
        del training
        step(alone)
    np.testing.assert_array_equal(one.weights, other.weights)


def test_disjoint_weights_have_a_clock_each(device: mlc.Device) -> None:
    """The second graph is made when the first has trained already: its first update is number 1."""
    optimizer = adam(0.05)
    one, other, fresh = Graphs(optimizer, device), Graphs(optimizer, device), Graphs(adam(0.05), device)
    first = one.training(mlc.LossLayer.mean_squared_error)
    for _ in range(5):
        step(first)
    second, alone = (graphs.training(mlc.LossLayer.mean_squared_error) for graphs in (other, fresh))
    for _ in range(3):
        step(second)
        step(first)
        step(alone)
    np.testing.assert_array_equal(other.weights, fresh.weights)


def head_and_trunk(optimizer: mlc.Optimizer, device: mlc.Device) -> tuple[mlc.TrainingGraph, mlc.TrainingGraph]:
    """Two heads on one trunk, each with a graph of its own."""
    trunk = mlc.Graph()
    x = mlc.Tensor(shape=(4, 3))
    hidden = trunk.node(dense(3, 5), source=x)
    graphs = []
    for seed in (5, 6):
        head, t = mlc.Graph(), mlc.Tensor(shape=(4, 2))
        head.node(dense(5, 2, seed=seed), source=hidden)
        training = mlc.TrainingGraph([trunk, head], mlc.LossLayer.mean_squared_error(MEAN), optimizer)
        training.add_inputs({"x": x}, {"t": t})
        graphs.append(training)
    graphs[0].compile(device=device)
    return graphs[0], graphs[1]


def test_sets_that_overlap_in_part_are_refused(device: mlc.Device) -> None:
    first, second = head_and_trunk(adam(), device)
    with pytest.raises(mlc.GraphError, match=r"(?s)counts its updates.*both.*here only.*there only.*of its own"):
        second.compile(device=device)
    step(first)  # goes on as if nothing had been


def test_rules_that_do_not_count_may_overlap(device: mlc.Device) -> None:
    first, second = head_and_trunk(sgd(0.1, momentum_scale=0.9), device)
    assert second.compile(device=device)
    step(first)
    step(second)


def test_a_graph_alone_may_change_what_it_updates(device: mlc.Device) -> None:
    graphs = Graphs(adam(), device)
    training = graphs.training(mlc.LossLayer.mean_squared_error)
    step(training)
    assert graphs.layer.biases_parameter is not None
    graphs.layer.biases_parameter.is_updatable = False
    step(training)
    graphs.layer.biases_parameter.is_updatable = True
    step(training)
    assert isinstance(graphs.optimizer, mlc.AdamOptimizer)
    assert graphs.optimizer.time_step == 4


def test_a_copy_of_an_optimizer_remembers_no_weights(device: mlc.Device) -> None:
    graphs = Graphs(adam(0.05), device)
    step(graphs.training(mlc.LossLayer.mean_squared_error))
    for copied in (copy.copy(graphs.optimizer), copy.deepcopy(graphs.optimizer)):
        assert copied == graphs.optimizer
        assert not memory_of(copied).buffers


def test_an_optimizer_keeps_no_weights_alive() -> None:
    import weakref

    optimizer = adam()
    graphs = Graphs(optimizer, cpu())
    step(graphs.training(mlc.LossLayer.mean_squared_error))
    weights = weakref.ref(graphs.layer.weights)
    gc.disable()
    try:
        del graphs
        assert weights() is None
    finally:
        gc.enable()
    assert not memory_of(optimizer).buffers


def test_a_checkpoint_restores_what_is_shared(tmp_path: Path, device: mlc.Device) -> None:
    one = Graphs(adam(0.05), device)
    first, second = (one.training(mlc.LossLayer.mean_squared_error) for _ in range(2))
    step(first)
    step(second)
    path = tmp_path / "saved.safetensors"
    mlc.save(path, first)
    step(first)
    expected = one.weights
    mlc.restore(second, path, exact=True)
    step(first)
    np.testing.assert_array_equal(one.weights, expected)
