"""Device(precision="bf16"): networks learn what they learn in float32, with half the memory for activations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from mlcompute.ops.op import Array
from tests.nets import SYNC

#: Half a unit in the last place of bfloat16, which has 8 bits.
ROUNDING = 2.0**-8


def convolutional(graph: mlc.Graph) -> mlc.Tensor:
    x = graph.input((16, 3, 8, 8), "x")
    x = graph.pool(graph.convolution(x, 8, activation="relu"))
    x = graph.normalize(graph.convolution(x, 8), "batch")
    return graph.dense(graph.flatten(x), 4)


def sequences(graph: mlc.Graph) -> mlc.Tensor:
    x = graph.input((8, 6, 16), "x")
    x = graph.normalize(x, "layer")
    x = graph.attention(x, heads=2)
    x = graph.dense(graph.lstm(x, 12, returns_sequences=False), 32, activation="gelu")
    return graph.dense(x, 4)


NETWORKS = [convolutional, sequences]


def prepared(network: Callable[[mlc.Graph], mlc.Tensor], precision: str, engine: Engine) -> mlc.TrainingGraph:
    mlc.Platform.set_rng_seed_to(3)
    graph = mlc.Graph()
    scores = network(graph)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, 0.0, scores.descriptor.shape[1])
    labels = mlc.Tensor(shape=scores.descriptor.shape)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(mlc.OptimizerDescriptor(1e-3, 1.0)))
    training.add_inputs({"x": graph.inputs["x"]} if hasattr(graph, "inputs") else {}, {"labels": labels})
    training.compile(device=mlc.Device(engine=engine, precision=precision))
    return training
