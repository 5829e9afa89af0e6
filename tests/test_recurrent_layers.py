"""GRU and simple recurrent layers in graphs: PyTorch's weights, ONNX and back, states carried on between batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute import onnx
from tests.harness import assert_close


def network(kind: str, x: np.ndarray[Any, Any], **options: Any) -> tuple[mlc.Graph, mlc.Tensor]:
    graph = mlc.Graph()
    make = graph.gru if kind == "GRU" else graph.rnn
    tensor = graph.input(x.shape, "x")
    return graph, make(tensor, 5, layers=2, bidirectional=True, name="r", **options)


def inference_of(graph: mlc.Graph) -> mlc.InferenceGraph:
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": graph.nodes[0].sources[0]})
    inference.compile(device=mlc.Device())
    return inference


def inferred(graph: mlc.Graph, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(inference_of(graph).execute({"x": x}).wait().result.data)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_weights_of_pytorch(kind: str) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(3, 5, 2, batch_first=True, bidirectional=True)
    x = np.random.default_rng(0).standard_normal((4, 6, 3)).astype(np.float32)
    graph, _ = network(kind, x)
    mlc.from_state_dict(graph, {f"r.{name}": value for name, value in module.state_dict().items()})
    assert_close(inferred(graph, x), module(torch.tensor(x))[0].detach().numpy(), 4)
    back = mlc.to_state_dict(graph)
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(back[f"r.{name}"], value.numpy())


@pytest.mark.parametrize(("kind", "operator"), [("GRU", "GRU"), ("RNN", "RNN")])
def test_onnx_and_back(kind: str, operator: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 6, 3)).astype(np.float32)
    graph, _ = network(kind, x)
    expected = inferred(graph, x)
    onnx.save(inference_of(graph), tmp_path / "r.onnx")
    import onnx as onnx_package
    import onnxruntime

    written = onnx_package.load(tmp_path / "r.onnx")
    assert sum(node.op_type == operator for node in written.graph.node) == 4
    session = onnxruntime.InferenceSession(tmp_path / "r.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    assert_close(found, expected, 4)
    assert_close(inferred(onnx.load(tmp_path / "r.onnx", batch=4), x), expected, 4)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float32)
    graph, _ = network(kind, x, **({"activation": "relu"} if kind == "RNN" else {}))
    mlc.save(tmp_path / "r.mlc", graph)
    np.testing.assert_array_equal(inferred(mlc.load(tmp_path / "r.mlc"), x), inferred(graph, x))
