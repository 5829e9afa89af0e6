"""Graphs the tests of seeing share."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc
from tests.nets import Array, adam, cpu, dense, normal

#: A label that tries everything a label could do to a page.
HOSTILE = "</script><script>window.stolen=1</script><img src=x onerror=window.stolen=1>\"'&\x00\ud800"


def labelled(layer: mlc.Layer, label: str) -> mlc.Layer:
    layer.label = label
    return layer


def chain(length: int, width: int = 4, batch: int = 2) -> mlc.Graph:
    """Alternating dense and ReLU layers, with a residual connection every fourth layer."""
    graph = mlc.Graph()
    x = start = mlc.Tensor(shape=(batch, width))
    for index in range(length):
        if index % 4 == 3:
            x = start = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, start])
        else:
            layer = dense(width, width, seed=index) if index % 2 == 0 else mlc.ActivationLayer.relu()
            x = graph.node(layer, source=x)
    return graph


class Classifier:
    """Convolution, batch normalisation, ReLU, pooling, dropout, dense; compiled for training."""

    def __init__(self, batch: int = 4, dropout: float = 0.25, label: str = "conv") -> None:
        mlc.Platform.set_rng_seed_to(3)
        graph = self.graph = mlc.Graph()
        self.x, self.t = mlc.Tensor(shape=(batch, 1, 8, 8)), mlc.Tensor(shape=(batch, 3))
        sizes = mlc.ConvolutionDescriptor(
            kernel_sizes=(3, 3), input_feature_channel_count=1, output_feature_channel_count=4
        )
        weights = mlc.Tensor(shape=(1, 4, 3, 3), data=normal(1, 4, 3, 3, seed=1))
        biases = mlc.Tensor(shape=(4,), fill_with_data=0.0)
        y = graph.node(labelled(mlc.ConvolutionLayer(weights, biases, sizes), label), source=self.x)
        mean, variance, beta, gamma = (mlc.Tensor(shape=(4,), fill_with_data=v) for v in (0.0, 1.0, 0.0, 1.0))
        y = graph.node(labelled(mlc.BatchNormalizationLayer(4, mean, variance, beta, gamma), "norm"), source=y)
        y = graph.node(labelled(mlc.ActivationLayer.relu(), "relu"), source=y)
        pooling = mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID)
        y = graph.node(labelled(mlc.PoolingLayer(pooling), "pool"), source=y)
        y = graph.reshape((batch, 64), source=y)
        y = graph.node(labelled(mlc.DropoutLayer(dropout, 0), "dropout"), source=y)
        graph.node(labelled(dense(64, 3), "fc"), source=y)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
        self.training = mlc.TrainingGraph([graph], loss, adam())
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.training.compile(device=cpu())
        rng = np.random.default_rng(0)
        self.inputs: dict[str, Array] = {"x": rng.standard_normal((batch, 1, 8, 8)).astype(np.float32)}
        self.labels: dict[str, Array] = {"t": np.eye(3, dtype=np.float32)[rng.integers(0, 3, batch)]}

    def step(self) -> float:
        return float(self.training.execute(self.inputs, self.labels).result.data.item())
