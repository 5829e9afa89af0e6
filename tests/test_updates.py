"""layer.updates: training a layer or leaving it alone, and changing one's mind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.nets import MEAN, Array, batch_norm, dense, normal, sgd

X, T = normal(8, 3), normal(8, 2, seed=1)


class Net:
    """dense, batch norm, dense; the first two frozen."""

    def __init__(self, device: mlc.Device) -> None:
        self.graph = mlc.Graph()
        self.x, self.t = mlc.Tensor(shape=X.shape), mlc.Tensor(shape=T.shape)
        self.first, self.norm, self.last = dense(3, 4), batch_norm(4), dense(4, 2, seed=2)
        y = self.graph.node(self.first, source=self.x, disable_update=True)
        y = self.graph.node(self.norm, source=y, disable_update=True)
        self.y = self.graph.node(self.last, source=y)
        self.training = mlc.TrainingGraph([self.graph], mlc.LossLayer.mean_squared_error(MEAN), sgd())
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.training.compile(device=device)

    def step(self) -> Array:
        return np.array(self.training.execute({"x": X}, {"t": T}).result.data)

    def values(self) -> dict[str, Array]:
        tensors: dict[str, Any] = {
            "first": self.first.weights,
            "gamma": self.norm.gamma,
            "mean": self.norm.mean,
            "variance": self.norm.variance,
            "last": self.last.weights,
        }
        return {name: np.array(tensor.data) for name, tensor in tensors.items()}

    def changed(self) -> set[str]:
        before = self.values()
        self.step()
        after = self.values()
        return {name for name in before if not np.array_equal(before[name], after[name])}


def test_frozen_layers_stay_and_can_be_trained_again(device: mlc.Device) -> None:
    net = Net(device)
    assert [layer.updates for layer in net.graph.layers] == [False, False, True]
    assert net.changed() == {"last"}
    net.first.updates = True
    assert net.changed() == {"first", "last"}
    net.norm.updates = True
    assert net.changed() == {"first", "gamma", "mean", "variance", "last"}
    net.first.updates = net.norm.updates = False
    assert net.changed() == {"last"}


def test_a_frozen_norm_trains_on_what_inference_uses(device: mlc.Device) -> None:
    net = Net(device)
    inference = mlc.InferenceGraph([net.training])
    inference.add_inputs({"x": net.x}, {"t": net.t})
    inference.compile(device=device)
    evaluated = np.array(inference.execute({"x": X}, {"t": T}).result.data)
    np.testing.assert_allclose(net.step(), evaluated, rtol=1e-6)


def test_a_layer_without_a_graph_has_nothing_to_set() -> None:
    layer = dense(3, 2)
    assert layer.updates
    with pytest.raises(mlc.GraphError, match="part of no graph"):
        layer.updates = False


def test_frozen_embeddings_keep_their_table(device: mlc.Device) -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(4, 2), data_type=mlc.DataType.INT32)
    weights = mlc.Tensor(shape=(5, 3), data=10 * np.abs(normal(5, 3)))
    descriptor = mlc.EmbeddingDescriptor(embedding_count=5, embedding_dimension=3, maximum_norm=1.0)
    graph.node(mlc.EmbeddingLayer(descriptor, weights), source=x, disable_update=True)
    before = np.array(weights.data)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=device)
    rows = np.array(inference.execute({"x": np.int32([[0, 1], [2, 3], [4, 0], [1, 2]])}).result.data)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(weights.data, before)
