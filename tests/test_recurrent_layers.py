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


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_states_as_in_pytorch(kind: str, tmp_path: Path) -> None:
    """A decoder starts from the last states of an encoder, which losses reach through them alone; saved; in ONNX."""
    torch.manual_seed(0)
    modules = {name: getattr(torch.nn, kind)(3, 5, 2, batch_first=True) for name in ("encoder", "decoder")}
    rng = np.random.default_rng(0)
    read, written = (rng.standard_normal((4, steps, 3)).astype(np.float32) for steps in (6, 2))
    graph = mlc.Graph()
    x, z = graph.input(read.shape, "read"), graph.input(written.shape, "written")
    tensors: list[mlc.Tensor] = []
    if kind == "LSTM":
        _, states = graph.lstm(x, 5, layers=2, returns_states=True, name="encoder")
        y, (h, c) = graph.lstm(z, 5, layers=2, states=states, returns_states=True, name="decoder")
        tensors = [y, h, c]
    else:
        make = graph.gru if kind == "GRU" else graph.rnn
        _, state = make(x, 5, layers=2, returns_states=True, name="encoder")
        tensors = [*make(z, 5, layers=2, state=state, returns_states=True, name="decoder")]
    outputs = dict(zip("yhc", tensors, strict=False))
    weights = {f"{name}.{key}": v for name, module in modules.items() for key, v in module.state_dict().items()}
    mlc.from_state_dict(graph, weights)
    training = mlc.TrainingGraph([graph], None, mlc.SGDOptimizer(learning_rate=0.5))
    for name, tensor in outputs.items():
        training.minimize((tensor * tensor).mean(), name=f"{name}_square")
    training.add_outputs(outputs)
    training.compile(device=mlc.Device())
    trained = [(key, p) for module in modules.values() for key, p in module.named_parameters()]
    # An LSTM here has one bias per gate: of PyTorch's two one is trained.
    optimizer = torch.optim.SGD([p for key, p in trained if kind != "LSTM" or "bias_hh" not in key], lr=0.5)
    for _ in range(3):
        training.execute({"read": read, "written": written}).wait()
        found = [np.array(tensor.data) for tensor in tensors]
        y, last = modules["decoder"](torch.tensor(written), modules["encoder"](torch.tensor(read))[1])
        expected = [y, *(last if kind == "LSTM" else [last])]
        for one, other in zip(found, expected, strict=True):
            assert_close(one.reshape(other.shape), other.detach().numpy(), 8)
        optimizer.zero_grad()
        torch.stack([tensor.square().mean() for tensor in expected]).sum().backward()
        optimizer.step()
    for name, value in mlc.to_state_dict(graph).items():
        part, _, key = name.partition(".")
        if kind != "LSTM" or "bias" not in key:
            assert_close(value, modules[part].state_dict()[key].numpy(), 8, name)

    import onnxruntime

    mlc.save(tmp_path / "states.mlc", graph)
    inference = mlc.InferenceGraph([mlc.load(tmp_path / "states.mlc")])
    layer = inference.layer("decoder")
    outputs = dict(zip("yhc", inference.result_tensors(layer), strict=False))
    inference.add_outputs(outputs)
    inference.compile(device=mlc.Device())
    inference.execute({"read": read, "written": written}).wait()
    found = [np.array(tensor.data) for tensor in outputs.values()]
    onnx.save(inference, tmp_path / "states.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "states.onnx")
    given = {one.name: {6: read, 2: written}[one.shape[1]] for one in session.get_inputs()}
    imported = onnx.load(tmp_path / "states.onnx", batch=4)
    again = mlc.InferenceGraph([imported])
    again.add_inputs(imported.inputs)
    again.add_outputs(imported.outputs)
    again.compile(device=mlc.Device())
    again.execute(given).wait()
    for one, other, name in zip(session.run(None, given), found, imported.order, strict=True):
        assert_close(one, other, 4)
        assert_close(np.array(imported.outputs[name].data), other, 4)


def test_truncated_backpropagation_as_in_pytorch() -> None:
    """A character model: the state goes on from piece to piece, gradients do not; from the same weights."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 7, (2, 21)).astype(np.int32)
    pieces = [(text[:, k : k + 5], text[:, k + 1 : k + 6]) for k in range(0, 20, 5)]
    gru, head = torch.nn.GRU(7, 6, batch_first=True), torch.nn.Linear(6, 7)
    mine, x, h0 = mlc.Graph(), mlc.Tensor(shape=(2, 5, 7)), mlc.Tensor(shape=(1, 1, 2, 6))
    labels = mlc.Tensor(shape=(2, 5), data_type=mlc.DataType.INT32)
    y, last = mine.gru(x, 6, state=h0, returns_states=True, name="gru")
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
