"""Imported models that move the batch to another axis run smaller batches; numbers written down are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc

RNG = np.random.default_rng(0)
WEIGHTS = numpy_helper.from_array(RNG.standard_normal((4, 4)).astype(np.float32), "w")
#: After the samples have moved to axis 1: steps of one long list, and back.
LISTED = [-1, 4]


def model(path: Path, back: list[int]) -> Any:
    named = (("to", LISTED), ("back", back))
    shapes = [numpy_helper.from_array(np.array(shape, np.int64), name) for name, shape in named]
    nodes = [
        helper.make_node("Transpose", ["x"], ["moved"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["moved", "to"], ["listed"]),
        helper.make_node("MatMul", ["listed", "w"], ["product"]),
        helper.make_node("Reshape", ["product", "back"], ["steps"]),
        helper.make_node("Transpose", ["steps"], ["y"], perm=[1, 0, 2]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 5, 4]) for name in "xy")
    onnx.save(helper.make_model(helper.make_graph(nodes, "moved", [x], [y], [WEIGHTS, *shapes])), path)
    graph: Any = mlc.onnx.load(path, batch=8)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs(dict(graph.inputs))
    inference.compile(device=mlc.Device.cpu())
    return inference


def test_smaller_and_larger_batches(tmp_path: Path) -> None:
    graph = model(tmp_path / "model.onnx", [5, -1, 4])
    x = RNG.standard_normal((11, 5, 4)).astype(np.float32)
    expected = x @ numpy_helper.to_array(WEIGHTS)
    for count in (8, 3, 1, 11):
        found = graph.execute({"x": x[:count]}, batch_size=count).result.data
        np.testing.assert_allclose(found, expected[:count], rtol=1e-5, atol=1e-5)


def test_a_number_that_is_written_down_is_named(tmp_path: Path) -> None:
    graph = model(tmp_path / "model.onnx", [5, 8, 4])
    assert graph.execute({"x": np.ones((8, 5, 4), np.float32)}).result.data.shape == (8, 5, 4)
    with pytest.raises(mlc.Error, match=r"(?s)shape \(5, 8, 4\) was written down.*Reshape 'steps'.*symbolic batch"):
        graph.execute({"x": np.ones((3, 5, 4), np.float32)}, batch_size=3)


def test_statistics_that_are_repeated_for_every_sample() -> None:
    """As PyTorch writes instance normalization with running statistics: over the channels of all samples."""
    stored = {name: RNG.uniform(0.5, 2.0, 3).astype(np.float32) for name in ("scale", "bias", "mean", "variance")}
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Shape", ["x"], ["whole"]),
        *(helper.make_node("Tile", [name, "n"], [f"{name}s"]) for name in stored),
        helper.make_node("Reshape", ["x", "to"], ["listed"]),
        helper.make_node("BatchNormalization", ["listed", *(f"{name}s" for name in stored)], ["normal"], epsilon=0.0),
        helper.make_node("Reshape", ["normal", "whole"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, 4]) for name in "xy")
    weights = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    weights.append(numpy_helper.from_array(np.array([1, -1, 4]), "to"))
    graph = mlc.onnx.load(helper.make_model(helper.make_graph(nodes, "instances", [x], [y], weights)), batch=4)
    assert set(graph.weights) == {"scale", "bias"}
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs(dict(graph.inputs))
    inference.compile(device=mlc.Device.cpu())
    data = RNG.standard_normal((4, 3, 4)).astype(np.float32)
    scale, bias, mean, variance = (array[:, None] for array in stored.values())
    expected = (data - mean) / np.sqrt(variance) * scale + bias
    for count in (4, 2, 1):
        found = inference.execute({"x": data[:count]}, batch_size=count).result.data
        np.testing.assert_allclose(found, expected[:count], rtol=1e-5, atol=1e-5)
