"""Axes that vary are exported as symbols: ONNX Runtime runs one file at several sizes and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import mlcompute as mlc

RNG = np.random.default_rng(0)


def _words(graph: mlc.Graph) -> Any:
    words = graph.input((4, 10, 8), "words", varies=[1])
    y = graph.attention(graph.dense(words, 16, activation="relu"), heads=2)
    graph.dense(graph.normalize(y, "layer"), 3)
    return lambda n, size: {"words": RNG.standard_normal((n, 7 + size, 8)).astype(np.float32)}


def _recurrent(graph: mlc.Graph) -> Any:
    words = graph.input((4, 6, 8), "words", varies=[1])
    graph.dense(graph.gru(words, 5, returns_sequences=False), 3)
    return lambda n, size: {"words": RNG.standard_normal((n, 3 + size, 8)).astype(np.float32)}


def _image(graph: mlc.Graph) -> Any:
    image = graph.input((2, 3, 16, 16), "image", varies=[2, 3])
    y = graph.convolution(image, 4, kernel=3, activation="relu")
    y = graph.normalize(graph.convolution(y, 4, kernel=3)) + y
    y.mean((2, 3)).softmax(-1)
    return lambda n, size: {"image": RNG.standard_normal((n, 3, 16 + 2 * size, 16 + 4 * size)).astype(np.float32)}


def _two(graph: mlc.Graph) -> Any:
    x, y = graph.input((4, 10, 8), "x", varies=[1]), graph.input((4, 10, 8), "y", varies=[1])
    graph.dense(x * y, 3)
    return lambda n, size: {name: RNG.standard_normal((n, 5 + size, 8)).astype(np.float32) for name in "xy"}


@pytest.mark.parametrize("build", [_words, _recurrent, _image, _two])
def test_one_file_runs_at_several_sizes(build: Any, tmp_path: Path) -> None:
    graph = mlc.Graph()
    data = build(graph)
    inference = mlc.InferenceGraph([graph])
    inference.compile(device=mlc.Device.cpu())
    mlc.onnx.save(inference, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    facts = {entry.key: entry.value for entry in model.metadata_props}
    for value in model.graph.input:
        axes = next(tensor for tensor in graph.input_tensors if tensor.label == value.name).varies
        symbols = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        assert symbols[0] == "batch"
        assert all(symbols[axis] for axis in axes), facts
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for n, size in ((4, 3), (4, 0), (2, 5), (1, 2)):
        given = data(n, size)
        (found,) = session.run(None, given)
        expected = inference.execute(given, batch_size=n).result.data
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _angles(graph: mlc.Graph) -> str:
    graph.dense(graph.rotary(graph.input((4, 10, 8), "words", varies=[1])), 3)  # a table with a row per position
    return "words_1"


def _rounded(graph: mlc.Graph) -> str:
    graph.upsample(graph.pool(graph.input((4, 2, 10, 7), "image", varies=[2])), 2)  # 10 of 11 pixels
    return "image_2"


@pytest.mark.parametrize("build", [_angles, _rounded])
def test_what_cannot_vary_stays_and_says_so(build: Any, tmp_path: Path) -> None:
    graph = mlc.Graph()
    symbol = build(graph)
    inference = mlc.InferenceGraph([graph])
    inference.compile(device=mlc.Device.cpu())
    mlc.onnx.save(inference, tmp_path / "model.onnx")
    facts = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert facts["batch"] == "any"
    assert facts[symbol].startswith("10: ")
