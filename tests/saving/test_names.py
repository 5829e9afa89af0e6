"""Names of layers and tensors: readable, unique, the same for the same graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

import mlcompute as mlc
from mlcompute.saving import layer_names_of, names_of
from tests.nets import MEAN, dense, sgd, tensor
from tests.saving.networks import OPTIMIZERS, everything, normal


def test_names_say_where_a_tensor_belongs() -> None:
    names = list(names_of(everything(OPTIMIZERS["sgd"]())).values())
    assert names[:3] == ["words", "images", "classes"]
    for name in ("embedding.weights", "lstm.input_weights_0", "multihead_attention.biases_3", "eyes.weights",
                 "batch_norm.mean", "batch_norm.gamma", "dropout_1.result", "concat.result",
                 "fully_connected.weights", "fully_connected_2.biases"):  # fmt: skip
        assert name in names, names
    assert "fully_connected_1.weights" not in names  # shared: called after its first use
    assert len(set(names)) == len(names)


def test_names_are_the_same_for_the_same_graph() -> None:
    first, second = everything(None), everything(None)
    assert list(names_of(first).values()) == list(names_of(second).values())
    assert list(layer_names_of(first).values()) == list(layer_names_of(second).values())
    before = list(names_of(first).values())
    first.compile(device=mlc.Device.cpu())
    assert list(names_of(first).values()) == before


def test_equal_labels_are_numbered_and_odd_ones_cleaned() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    x.label = "pixels"
    for label in ("block", "block", "block_1", "a/b", "", "\ud800"):
        layer = dense(3, 3)
        layer.label = label
        x = graph.node(layer, source=x)
    names = list(layer_names_of(graph).values())
    assert names == ["block", "block_1", "block_1_1", "a.b", "fully_connected", "?"]
    assert next(iter(names_of(graph).values())) == "pixels"
    assert not any("/" in name for name in names_of(graph).values())


def test_inputs_nobody_named_are_numbered() -> None:
    graph = mlc.Graph()
    a, b = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 3))
    y = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[a, b])
    assert [names_of(graph)[t] for t in (a, b, y)] == ["input", "input_1", "arithmetic.result"]


def test_several_results_and_gradients_of_the_caller_have_names() -> None:
    training, x = mlc.TrainingGraph(), mlc.Tensor(shape=(2, 4))
    first, second = training.split(x, split_count=2, dimension=1)
    gradient = training.allocate_user_gradient(second)
    names = names_of(training)
    assert [names[t] for t in (first, second)] == ["split.result", "split.result_1"]
    assert names[gradient] == "split.result_1.gradient"


def test_the_loss_of_a_training_graph_and_its_weights_have_names() -> None:
    x, t, w = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 3)), tensor(normal(2, seed=1))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN, weights=w), sgd())
    training.node(dense(3, 3), source=x)
    training.add_inputs({"x": x}, {"t": t})
    assert names_of(training)[w] == "loss.weights"


def test_many_layers_of_one_label_are_named_in_linear_time() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(1, 1))
    for _ in range(5_000):
        x = graph.node(mlc.ActivationLayer.relu(), source=x)
    names = layer_names_of(graph)
    assert list(names.values())[-1] == "activation_4999"


def test_parameters_of_imported_operators_have_no_slash_in_their_names(tmp_path: Path) -> None:
    """ONNX files are full of names like /model/fc/weight; what has a slash would be taken for optimizer state."""
    helper = onnx.helper
    weights = onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "/model/fc/weight")
    source, result = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("in/x", [4, 3]), ("/out", [4, 2]))
    )
    node = helper.make_node("MatMul", ["in/x", "/model/fc/weight"], ["/out"], name="/model/fc")
    model = helper.make_model(
        helper.make_graph([node], "net", [source], [result], [weights]), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 9
    onnx.save(model, tmp_path / "net.onnx")
    first, second = (mlc.onnx.load(tmp_path / "net.onnx") for _ in range(2))
    (kept,) = (each for each in names_of(first) if each.keeps_data)
    kept.bind_and_write_data(np.full((3, 2), 7, np.float32), to=mlc.Device.cpu())
    assert not any("/" in name for name in names_of(first).values())
    mlc.save(tmp_path / "g", first)
    assert mlc.Checkpoint(tmp_path / "g").names == [names_of(first)[kept]]
    assert mlc.restore(second, tmp_path / "g").is_exact
    assert [each.data.max() for each in names_of(second) if each.keeps_data] == [7]


def test_no_tensor_takes_the_place_of_the_metadata(tmp_path: Path) -> None:
    """A safetensors file keeps the description under this name, in one dictionary with the tensors."""
    graph, x = mlc.Graph(), tensor(normal(2, 2))
    x.label = "__metadata__"
    graph.reshape((4,), source=x)
    mlc.save(tmp_path / "g", graph)
    loaded = mlc.load(tmp_path / "g")
    (source,) = loaded.source_tensors(loaded.layers[0])
    assert source.label == "__metadata__"
    np.testing.assert_array_equal(source.data, x.data)
    assert mlc.Checkpoint(tmp_path / "g").names == ["__metadata___1"]
