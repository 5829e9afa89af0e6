"""Real checkpoints, small enough to be read a million times."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mlcompute as mlc
from mlcompute.enums import ActivationType
from tests.nets import MEAN, batch_norm, dense, tensor
from tests.saving.files import parts
from tests.saving.networks import lstm, settings, small


def activation() -> mlc.Graph:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(1, 4))
    graph.node(mlc.ActivationLayer(mlc.ActivationDescriptor(ActivationType.CLAMP, 1.0, 2.0)), source=x)
    return graph


def pieces() -> mlc.Graph:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(4, 2), data_type=mlc.DataType.INT32)
    first, _ = graph.split(x, split_count=2, dimension=0)
    graph.concatenate([first, graph.reshape((2, 2), source=first)], dimension=1)
    return graph


def image() -> mlc.Graph:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(1, 2, 4, 4))
    d = mlc.ConvolutionDescriptor((3, 3), 2, 3)
    weights = tensor(np.zeros((3, 2, 3, 3), np.float32))
    y = graph.node(mlc.ConvolutionLayer(weights, tensor(np.zeros(3, np.float32)), d), source=x)
    y = graph.node(batch_norm(3), source=y)
    graph.node(mlc.PoolingLayer(mlc.PoolingDescriptor(mlc.PoolingType.MAX, (2, 2), (2, 2))), source=y)
    return graph


def sequence() -> mlc.Graph:
    graph = mlc.Graph()
    words = mlc.Tensor(shape=(2, 3), data_type=mlc.DataType.INT32)
    table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 2), tensor(np.zeros((4, 2), np.float32)))
    h = graph.node(lstm(2, 2), source=graph.node(table, source=words))
    graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, dimension=1), source=h)
    return graph


def answering() -> mlc.InferenceGraph:
    x = mlc.Tensor(shape=(2, 3))
    inference = mlc.InferenceGraph([])
    y = inference.node(dense(3, 2, seed=1), source=x)
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    return inference


def classifier() -> mlc.TrainingGraph:
    """Two parts, a loss with weights, a frozen gradient."""
    x, t = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 2))
    part = mlc.Graph()
    y = part.node(mlc.DropoutLayer(0.5, 3), source=part.node(dense(3, 2, seed=2), source=x))
    optimizer = mlc.SGDOptimizer(settings(), momentum_scale=0.9)
    training = mlc.TrainingGraph([part], mlc.LossLayer.softmax_cross_entropy(MEAN), optimizer)
    training.add_inputs({"x": x}, {"t": t})
    training.add_outputs({"y": y})
    return training


def operators() -> mlc.Graph:
    """A graph that keeps operators of ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node
    nodes = [
        node("Clip", ["x", "low", "high"], ["a"]),
        node("Gemm", ["a", "w"], ["b"]),
        node("LpNormalization", ["b"], ["y"]),
    ]
    stored = [numpy_helper.from_array(np.float32(k), name) for k, name in enumerate(("low", "high"))]
    stored.append(numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "operators", [x], [y], stored)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return mlc.onnx.load(model)


GRAPHS: tuple[Callable[[], mlc.Graph], ...] = (
    lambda: small(1.0, 3), activation, pieces, image, sequence, answering, classifier, operators,
)  # fmt: skip


@functools.cache
def checkpoints() -> list[bytes]:
    """A file of every graph."""
    files = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        for make in GRAPHS:
            mlc.save(path, make(), progress={"epoch": 2, "history": [0.5, None]}, arrays={"average": [1.0, 2.0]})
            files.append(path.read_bytes())
    return files


def texts(key: str) -> list[str]:
    """One of the metadata texts, from every file."""
    return [parts(file)[0]["__metadata__"][f"mlcompute.{key}"] for file in checkpoints()]
