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


def test_truncated_backpropagation_as_in_pytorch() -> None:
    """A character model: the state goes on from piece to piece, gradients do not; from the same weights."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 7, (2, 21)).astype(np.int32)
    pieces = [(text[:, k : k + 5], text[:, k + 1 : k + 6]) for k in range(0, 20, 5)]
    gru, head = torch.nn.GRU(7, 6, batch_first=True), torch.nn.Linear(6, 7)
    mine, x, h0 = mlc.Graph(), mlc.Tensor(shape=(2, 5, 7)), mlc.Tensor(shape=(1, 1, 2, 6))
    labels = mlc.Tensor(shape=(2, 5), data_type=mlc.DataType.INT32)
    y = mine.gru(x, 6, state=h0, returns_states=True, name="gru")
    last = mine.result_tensors(mine.layer("gru"))[1]
    mine.cross_entropy(mine.dense(y, 7, name="head"), labels)
    for name, module in {"gru": gru, "head": head}.items():
        mlc.from_state_dict(mine, {f"{name}.{k}": v for k, v in module.state_dict().items()}, strict=False)
    training = mlc.TrainingGraph([mine], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.5)))
    training.add_inputs({"x": x, "h0": h0}, {"labels": labels})
    training.add_outputs({"last": last})
    training.compile(device=mlc.Device())

    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.5)
    state, expected_state = np.zeros((1, 1, 2, 6), np.float32), torch.zeros(1, 2, 6)
    for given, wanted in pieces:
        optimizer.zero_grad()
        scores, expected_state = gru(torch.eye(7)[torch.tensor(given).long()], expected_state)
        expected = torch.nn.functional.cross_entropy(head(scores).flatten(0, 1), torch.tensor(wanted).long().flatten())
        expected.backward()
        optimizer.step()
        expected_state = expected_state.detach()

        run = training.execute({"x": np.eye(7, dtype=np.float32)[given], "h0": state}, {"labels": wanted})
        run.wait()
        state = np.array(last.data)
        assert_close(np.array(run.result.data).reshape(()), expected.detach().numpy(), 8)
        assert_close(state[0], expected_state.numpy(), 8)
    for name, value in mlc.to_state_dict(mine).items():
        part, _, key = name.partition(".")
        assert_close(value, {"gru": gru, "head": head}[part].state_dict()[key].numpy(), 8, name)
