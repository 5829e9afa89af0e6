"""Models in a training graph: batch normalization, outputs, quantized weights, smaller batches, branches, order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import mlcompute as mlc
from mlcompute.onnx.imported import ImportedGraph
from tests.onnx.backend import run_model
from tests.onnx.exported import NETWORKS, export
from tests.onnx.test_weights import device, model_of, normal, trained

__all__ = ["device"]


def inferred(graph: ImportedGraph, x: np.ndarray, device: mlc.Device, batch: int = 0) -> np.ndarray:
    run = mlc.InferenceGraph([graph])
    run.add_inputs(graph.inputs)
    run.add_outputs(graph.outputs)
    run.compile(device=device)
    result = run.execute({next(iter(graph.inputs)): x}, batch_size=batch).result
    return np.array(result.data)


def session(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    found: Any = onnxruntime.InferenceSession(model.SerializeToString())
    return found.run(None, {model.graph.input[0].name: x})[0]


# Batch normalization --------------------------------------------------------------------------------------------------


def batch_norm(shape: tuple[int, ...]) -> onnx.ModelProto:
    node = helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "variance"], ["y"], momentum=0.75)
    channels = shape[1]
    stored = {
        "scale": normal(channels), "bias": normal(channels) + 1, "mean": normal(channels) + 2,
        "variance": np.abs(normal(channels)) + 1,
    }  # fmt: skip
    return model_of([node], stored, list(shape))


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 4, 4), (6, 3, 2, 2, 2)])
def test_batch_normalization_trains_in_one_way_whatever_the_rank(shape: tuple[int, ...], device: mlc.Device) -> None:
    model = batch_norm(shape)
    graph = mlc.onnx.load(model)
    assert set(graph.weights) == {"scale", "bias"}
    assert set(graph.statistics) == {"mean", "variance"}
    x = normal(*shape)
    old = {name: np.array(tensor.data) for name, tensor in graph.statistics.items()}
    carried = graph.inputs["x"].descriptor.shape
    trained(graph, x.reshape(carried), np.zeros(carried), device, 1)
    axes = (0, *range(2, len(shape)))
    for name, batch in (("mean", x.mean(axes)), ("variance", x.var(axes))):
        np.testing.assert_allclose(graph.statistics[name].data, 0.75 * old[name] + 0.25 * batch, rtol=1e-4)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 4), (6, 3, 2, 2, 2)])
def test_batch_normalization_can_be_frozen(shape: tuple[int, ...], device: mlc.Device) -> None:
    graph = mlc.onnx.load(batch_norm(shape), batch_norm="frozen")
    old = {name: np.array(tensor.data) for name, tensor in (graph.statistics | graph.weights).items()}
    carried = graph.inputs["x"].descriptor.shape
    losses = trained(graph, normal(*shape).reshape(carried), np.zeros(carried, np.float32), device, 1)
    expected = session(batch_norm(shape), normal(*shape))  # the loss is that of inference
    np.testing.assert_allclose(losses[0], np.mean(expected**2), rtol=1e-4)
    for name in graph.statistics:
        np.testing.assert_array_equal(graph.statistics[name].data, old[name])
    assert not np.array_equal(graph.weights["scale"].data, old["scale"])
    with pytest.raises(mlc.DataError, match="batch_norm is 'eval'"):
        mlc.onnx.load(batch_norm(shape), batch_norm="eval")


def test_fresh_batch_normalization_trains_though_its_tensors_were_merged(device: mlc.Device) -> None:
    """Means are zeros as biases are, variances are ones as scales are."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", "ones", "zeros", "zeros", "ones"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("BatchNormalization", ["r", "ones", "zeros", "zeros", "ones"], ["y"]),
    ]
    stored = {"ones": np.ones(3, np.float32), "zeros": np.zeros(3, np.float32)}
    graph = mlc.onnx.load(model_of(nodes, stored, [6, 3, 4, 4]))
    assert len(graph.weights) == 4
    assert len(graph.statistics) == 4
    trained(graph, normal(6, 3, 4, 4), normal(6, 3, 4, 4), device)
    for tensor in (graph.weights | graph.statistics).values():
        assert not np.array_equal(tensor.data, np.ones(3))
        assert not np.array_equal(tensor.data, np.zeros(3))


# Outputs --------------------------------------------------------------------------------------------------------------


def two_headed() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "a"], ["scores"]),
        helper.make_node("MatMul", ["h", "b"], ["more"]),
        helper.make_node("Relu", ["more"], ["unused"]),
    ]
    model = model_of(nodes, {"w": normal(8, 8), "a": normal(8, 3), "b": normal(8, 2)}, [6, 8])
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("scores", "more")
    )
    return model


def test_the_loss_is_put_on_the_output_and_not_on_the_last_node(device: mlc.Device) -> None:
    model = two_headed()
    del model.graph.output[1]
    graph = mlc.onnx.load(model)
    assert graph.loss_output == "scores"
    x = normal(6, 8)
    np.testing.assert_allclose(inferred(graph, x, device), session(model, x), rtol=1e-4, atol=1e-5)
    before = {name: np.array(tensor.data) for name, tensor in graph.weights.items()}
    with pytest.warns(UserWarning, match="'more' will not be trained"):
        trained(graph, x, normal(6, 3), device)
    assert not np.array_equal(graph.weights["a"].data, before["a"])


def test_several_outputs_are_chosen_by_name() -> None:
    with pytest.warns(UserWarning, match="will not be trained|the loss is put on 'scores'") as told:
        trained(mlc.onnx.load(two_headed()), normal(6, 8), normal(6, 3), mlc.Device.cpu())
    assert any("and not on 'more'" in str(warning.message) for warning in told)
    graph = mlc.onnx.load(two_headed(), output="more")
    before = {name: np.array(tensor.data) for name, tensor in graph.weights.items()}
    with pytest.warns(UserWarning, match="will not be trained") as told:
        trained(graph, normal(6, 8), normal(6, 2), mlc.Device.cpu())
    assert not any("the loss is put on" in str(warning.message) for warning in told)
    assert not np.array_equal(graph.weights["b"].data, before["b"])
    with pytest.raises(mlc.DataError, match="'h' is no floating output"):
        mlc.onnx.load(two_headed(), output="h")


# Quantized models -----------------------------------------------------------------------------------------------------


def quantized() -> onnx.ModelProto:
    """Weights of 8 bits, and activations that are rounded between the layers."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["w"], axis=1),
        helper.make_node("MatMul", ["xd", "w"], ["h"]),
        helper.make_node("Add", ["h", "bias"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "s", "zero"], ["aq"]),
        helper.make_node("DequantizeLinear", ["aq", "s", "zero"], ["y"]),
    ]
    stored = {
        "s": np.float32(0.05), "z": np.uint8(128), "zero": np.uint8(0), "bias": normal(5),
        "wq": np.random.default_rng(0).integers(-100, 100, (8, 5)).astype(np.int8),
        "ws": np.linspace(0.01, 0.02, 5, dtype=np.float32), "wz": np.zeros(5, np.int8),
    }  # fmt: skip
    return model_of(nodes, stored, [6, 8])


def test_a_quantized_model_says_that_it_cannot_be_trained() -> None:
    with pytest.warns(UserWarning, match=r"no weight of this model can be trained: 1 tensors of weights are quantized"):
        graph = mlc.onnx.load(quantized())
    assert set(graph.weights) == {"bias"} == set(graph.unreached)
    assert "QuantizeLinear" in graph.unreached["bias"]
    report = mlc.onnx.doctor(quantized())
    assert report.quantized == ["wq"]
    assert "none can be trained" in str(report)
    assert "dequantize=True" in str(report)


def test_a_quantized_model_can_be_read_as_a_floating_one(device: mlc.Device) -> None:
    graph = mlc.onnx.load(quantized(), dequantize=True)
    assert set(graph.weights) == {"wq", "bias"}
    assert not graph.unreached
    x = normal(6, 8)
    ours, theirs = inferred(graph, x, device), session(quantized(), x)
    np.testing.assert_allclose(ours, theirs, atol=0.05 * 8)
    assert ours.min() >= 0  # the range of the rounded values is what makes it an activation
    before = np.array(graph.weights["wq"].data)
    losses = trained(graph, x, np.abs(normal(6, 5)), device, 10)
    assert losses[-1] < losses[0]
    assert not np.array_equal(graph.weights["wq"].data, before)


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_products_of_whole_numbers_are_not_dequantized(is_dynamic: bool, device: mlc.Device) -> None:
    """As onnxruntime quantizes dynamically: of values that are not rounded any more they would be other products."""
    scale = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"])
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "s", "z"]) if is_dynamic else scale,
        helper.make_node("MatMulInteger", ["xq", "wq", "z"], ["h"]),
        helper.make_node("Cast", ["h"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    stored = {"wq": np.random.default_rng(0).integers(-100, 100, (8, 5)).astype(np.int8)}
    model = model_of(nodes, stored if is_dynamic else {**stored, "s": np.float32(0.05), "z": np.uint8(128)}, [6, 8])
    with pytest.warns(UserWarning, match="train the floating-point model"):
        graph, x = mlc.onnx.load(model), normal(6, 8)
    with pytest.raises(UserWarning, match="no weight of this model"):  # as the filter of these tests asks for
        mlc.onnx.load(model)
    np.testing.assert_allclose(inferred(graph, x, device), session(model, x), rtol=1e-4)
    assert any("train the floating-point model" in note and "dequantize" not in note for note in graph.notes)
    with pytest.raises(mlc.onnx.ModelError, match="train the floating-point model it was made from"):
        mlc.onnx.load(model, dequantize=True)


def test_dynamic_quantization_of_a_computed_value(device: mlc.Device) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("DynamicQuantizeLinear", ["r"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    model, x = model_of(nodes, {}, [6, 8]), normal(6, 8)
    (ours,), _ = run_model(model, [x], device)
    np.testing.assert_allclose(ours, session(model, x), rtol=1e-5)


# Smaller batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_smaller_batch_of_a_model_with_an_open_one(name: str, device: mlc.Device) -> None:
    network, x = NETWORKS[name]()
    model = export(network, x)
    assert mlc.onnx.doctor(model, batch=4).fixed_batch == ""
    graph = mlc.onnx.load(model, batch=4)
    with torch.no_grad():
        expected = network(x[:3]).numpy()
    np.testing.assert_allclose(inferred(graph, x.numpy()[:3], device, 3), expected, rtol=1e-3, atol=1e-4)


def test_what_stands_in_the_way_of_a_smaller_batch_is_named() -> None:
    network, x = NETWORKS["lstm"]()
    report = mlc.onnx.doctor(export(network, x, open_batch=False))
    assert report.healthy
    assert report.fixed_batch.startswith("LSTM '/cells/LSTM'")
    assert "a smaller (last) batch does not run: LSTM" in str(report)


def test_an_axis_that_is_taken_apart_does_not_guess_where_the_samples_are() -> None:
    """(8, 4, 2) with time first becomes (32, 2) and back: a quarter less could be meant on either axis."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["t", "flat"], ["f"]),
        helper.make_node("Relu", ["f"], ["r"]),
        helper.make_node("Reshape", ["r", "whole"], ["y"]),
    ]
    model = model_of(nodes, {"flat": np.array([32, 2]), "whole": np.array([8, 4, 2])}, [4, 8, 2])
    report = mlc.onnx.doctor(model)
    assert report.fixed_batch.startswith("Reshape 'y': Reshape: its shape (8, 4, 2) was written down")


# The rest -----------------------------------------------------------------------------------------------------------


def test_nodes_in_any_order() -> None:
    model = two_headed()
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes[::-1])
    x = normal(6, 8)
    (ours, _), _ = run_model(model, [x], mlc.Device.cpu())
    np.testing.assert_allclose(ours, session(two_headed(), x), rtol=1e-4, atol=1e-5)
    # What goes in a circle has no order.
    model.graph.node.append(helper.make_node("Add", ["p", "x"], ["q"]))
    model.graph.node.append(helper.make_node("Add", ["q", "x"], ["p"]))
    with pytest.raises(mlc.onnx.ModelError, match="is not defined"):
        mlc.onnx.load(model)


def branching() -> onnx.ModelProto:
    """A branch that depends on the numbers of the input."""

    def branch(kind: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node(kind, ["x"], [f"{kind}_y"])], kind, [],
            [helper.make_tensor_value_info(f"{kind}_y", TensorProto.FLOAT, None)],
        )  # fmt: skip

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["condition"]),
        helper.make_node("Identity", ["condition"], ["same"]),
        helper.make_node("If", ["same"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    return model_of(nodes, {"zero": np.float32(0)}, [6, 8])


def test_the_advice_for_a_branch_works() -> None:
    with pytest.raises(mlc.onnx.ModelError, match="give the numbers of 'same' with constants=") as failure:
        mlc.onnx.load(branching())
    assert failure.value.problems[0].needs == "same"
    x = normal(6, 8)
    for answer, expected in ((True, np.maximum(x, 0)), (False, -x)):
        graph = mlc.onnx.load(branching(), constants={"same": answer})
        np.testing.assert_allclose(inferred(graph, x, mlc.Device.cpu()), expected)
    with pytest.raises(mlc.DataError, match="the model has no value 'sane'"):
        mlc.onnx.load(branching(), constants={"sane": True})


def test_the_command_line_can_say_what_python_can(tmp_path: Path) -> None:
    model = branching()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"
    path = tmp_path / "branching.onnx"
    path.write_bytes(model.SerializeToString())

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "mlcompute", *words], capture_output=True, text=True, check=False)

    assert "give dimensions={'width': ..}" in run("doctor", str(path)).stdout
    given = ("--dimension", "width=8", "--constant", "same=true")
    answer = run("doctor", str(path), *given, "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["inputs"] == {"x": [6, 8]}
    assert run("inspect", str(path), "--shape", "x=6,8", "--constant", "same=false").returncode == 0
    assert run("convert", str(path), str(tmp_path / "out.onnx"), *given).returncode == 0
    assert "is not a whole number" in run("doctor", str(path), "--dimension", "width=wide").stderr
    wrong = run("inspect", str(tmp_path / "out.onnx"), "--trainable", "head.*")
    assert "no floating tensor of the model is named like 'head.*'" in wrong.stderr + wrong.stdout


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_round_trip_keeps_the_weights_and_any_batch(name: str, tmp_path: Path) -> None:
    network, x = NETWORKS[name]()
    graph = mlc.onnx.load(export(network, x), batch=4)
    run = mlc.InferenceGraph([graph])
    run.add_inputs(graph.inputs)
    run.add_outputs(graph.outputs)
    run.compile(device=mlc.Device.cpu())
    mlc.onnx.save(run, tmp_path / "model.onnx")
    back = mlc.onnx.load(tmp_path / "model.onnx", batch=4)
    assert {name: tensor.descriptor.shape for name, tensor in back.weights.items()} == {
        name: tensor.descriptor.shape for name, tensor in graph.weights.items()
    }
    with torch.no_grad():
        expected = network(x[:3]).numpy()
    theirs = session(onnx.load(tmp_path / "model.onnx"), x.numpy()[:3])
    np.testing.assert_allclose(theirs, expected, rtol=1e-3, atol=1e-4)


def test_a_saved_graph_still_runs_smaller_batches(tmp_path: Path) -> None:
    network, x = NETWORKS["lstm"]()
    graph = mlc.onnx.load(export(network, x), batch=4)
    run = mlc.InferenceGraph([graph])
    run.add_inputs(graph.inputs)
    run.add_outputs(graph.outputs)
    run.compile(device=mlc.Device.cpu())
    mlc.save(tmp_path / "model.safetensors", run)
    loaded = mlc.load(tmp_path / "model.safetensors")
    assert isinstance(loaded, mlc.InferenceGraph)
    loaded.compile(device=mlc.Device.cpu())
    with torch.no_grad():
        expected = network(x[:3]).numpy()
    result = loaded.execute({"x0": x.numpy()[:3]}, batch_size=3).result.data
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)
