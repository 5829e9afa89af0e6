"""Integer class labels in any graph: never a one-hot array, ignored and weighed labels, labels that are no class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

import mlcompute as mlc
from mlcompute import DataType

INT64 = DataType.INT64
RNG = np.random.default_rng(3)
X = RNG.standard_normal((8, 6)).astype(np.float32)
CLASSES = RNG.integers(0, 4, 8)


def network(**options: Any) -> tuple[mlc.TrainingGraph, mlc.Tensor]:
    """A dense layer of 4 classes and a cross entropy; compiled, and its loss."""
    graph = mlc.Graph()
    x, t = graph.input((8, 6), "x"), graph.input((8,), "t", data_type=INT64)
    loss = graph.cross_entropy(graph.dense(x, 4, name="head"), t, **options)
    training = mlc.TrainingGraph([graph], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device())
    return training, loss


def weights_of(training: mlc.TrainingGraph) -> np.ndarray[Any, Any]:
    return np.array(training.layer("head").weights.data)  # type: ignore[attr-defined]


def assert_loss(found: mlc.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None
    np.testing.assert_allclose(np.array(found.data), np.array([expected.item()]), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 2}, {"class_weights": [1.0, 2.0, 0.5, 0.1]}, {"label_smoothing": 0.1, "ignore_index": -1}],
    ids=str,
)
def test_training_is_that_of_torch(options: dict[str, Any]) -> None:
    training, _ = network(**options)
    head = training.layer("head")
    w = torch.tensor(np.array(head.weights.data), requires_grad=True)  # type: ignore[attr-defined]
    b = torch.tensor(np.array(head.biases.data), requires_grad=True)  # type: ignore[attr-defined]
    given = dict(options)
    if "class_weights" in given:
        given["weight"] = torch.tensor(given.pop("class_weights"))
    for _ in range(5):
        found = training.execute({"x": X}, {"t": CLASSES}).result
        loss = F.cross_entropy(torch.tensor(X) @ w.T + b, torch.tensor(CLASSES), **given)
        assert_loss(found, loss)
        with torch.no_grad():
            for p, dp in zip((w, b), torch.autograd.grad(loss, (w, b)), strict=True):
                p -= 0.1 * dp
    np.testing.assert_allclose(weights_of(training), w.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_no_array_with_an_element_per_class_is_made() -> None:
    training, _ = network()
    training.execute({"x": X}, {"t": CLASSES})
    program = training.programs["fused 8"]
    made = [step for step in program.steps if any(value.shape == (8, 4) for value in step.results)]
    # The logits, and their gradient in the same memory: where no probabilities are kept, that is all.
    forward = {"matmul", "matmul_epilogue", "add", "fused_elementwise"}
    assert {step.op.name for step in made} <= {*forward, "softmax_cross_entropy_gradient"}
    gradient = made[-1].results[0]
    assert made[-1].op.name == "softmax_cross_entropy_gradient"
    assert program.plan.placements[gradient].offset == program.plan.placements[made[-1].inputs[0]].offset


@pytest.mark.parametrize("label", [-1, 4, 1 << 30])
def test_a_label_that_is_no_class_changes_nothing(label: int) -> None:
    training, _ = network()
    training.execute({"x": X}, {"t": CLASSES})
    before = weights_of(training)
    wrong = CLASSES.copy()
    wrong[5] = label
    with pytest.raises(mlc.ExecutionError, match=f"layer 'loss1': .*label {label}.*valid are 0 to 3.*ignore_index"):
        training.execute({"x": X}, {"t": wrong}).wait()
    np.testing.assert_array_equal(weights_of(training), before)
    training.execute({"x": X}, {"t": CLASSES}).wait()
    assert not np.array_equal(weights_of(training), before)


def test_a_batch_in_which_every_label_is_ignored_changes_nothing() -> None:
    training, _ = network(ignore_index=-100)
    before = weights_of(training)
    result = training.execute({"x": X}, {"t": np.full(8, -100)}).result
    assert np.array(result.data) == 0.0  # type: ignore[union-attr]
    np.testing.assert_array_equal(weights_of(training), before)


def test_labels_that_layers_compute_or_that_are_part_of_the_graph() -> None:
    graph = mlc.Graph()
    x, words = graph.input((2, 6), "x"), graph.input((2, 5), "words", data_type=INT64)
    logits = graph.dense(x, 4, name="head")
    last = graph.slice(words, (0, 4), (2, 5))  # the last word of every sequence
    computed = graph.cross_entropy(logits, last, name="computed")
    fixed = graph.cross_entropy(logits, mlc.Tensor(shape=(2,), data=np.array([3, 0]), data_type=INT64), name="fixed")
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": x, "words": words})
    training.add_outputs({"logits": logits})
    training.compile(device=mlc.Device())
    given = np.array([[0, 1, 2, 3, 1], [3, 2, 1, 0, 2]])
    training.execute({"x": X[:2], "words": given}).wait()
    found = torch.tensor(np.array(logits.data))
    for loss, labels in ((computed, [1, 2]), (fixed, [3, 0])):
        expected = F.cross_entropy(found, torch.tensor(labels))
        assert_loss(loss, expected)


def test_a_loss_given_to_the_training_graph_takes_them_too() -> None:
    graph = mlc.Graph()
    x, t = graph.input((4, 3, 5, 5), "x"), graph.input((4, 5, 5), "t", data_type=DataType.UINT8)
    y = graph.convolution(x, 7, kernel=1)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, ignore_index=255)
    training = mlc.TrainingGraph([graph], loss, None)
    training.add_inputs({"x": x}, {"t": t})
    training.add_outputs({"y": y})
    training.compile(device=mlc.Device())
    classes = RNG.integers(0, 7, (4, 5, 5)).astype(np.uint8)
    classes[:, 0] = 255
    found = training.execute({"x": RNG.standard_normal((4, 3, 5, 5)).astype(np.float32)}, {"t": classes}).result
    expected = F.cross_entropy(torch.tensor(np.array(y.data)), torch.tensor(classes.astype(np.int64)), ignore_index=255)
    assert_loss(found, expected)


def test_saved_and_loaded(tmp_path: Path) -> None:
    training, _ = network(ignore_index=-100, class_weights=[1.0, 2.0, 3.0, 4.0], name="loss")
    mlc.save(tmp_path / "graph.mlc", training)
    loaded = mlc.load(tmp_path / "graph.mlc")
    assert isinstance(loaded, mlc.TrainingGraph)
    loaded.compile(device=mlc.Device())
    layer = loaded.layer("loss")
    assert isinstance(layer, mlc.LossLayer)
    assert layer.descriptor.ignore_index == -100
    np.testing.assert_array_equal(layer.class_weights.data, [1.0, 2.0, 3.0, 4.0])  # type: ignore[union-attr]
    one, other = (graph.execute({"x": X}, {"t": CLASSES}).result for graph in (training, loaded))
    np.testing.assert_array_equal(np.array(one.data), np.array(other.data))  # type: ignore[union-attr]


def test_a_loss_layer_takes_class_weights_as_numbers() -> None:
    layer = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_weights=[1, 2, 0.5])
    np.testing.assert_array_equal(layer.class_weights.data, np.float32([1.0, 2.0, 0.5]))  # type: ignore[union-attr]


def test_class_weights_must_be_one_number_per_class() -> None:
    graph = mlc.Graph()
    x, t = graph.input((8, 4), "x"), graph.input((8,), "t", data_type=INT64)
    with pytest.raises(mlc.DataError, match=r"class_weights are float64 of shape \(1, 4\)"):
        graph.cross_entropy(x, t, class_weights=np.ones((1, 4)))
    assert graph.layers == []


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 1}, {"class_weights": [1.0, 2.0, 0.5, 0.1]}, {"label_smoothing": 0.1}, {"class_axis": -1}],
    ids=str,
)
def test_a_training_step_exported_to_onnx(options: dict[str, Any]) -> None:
    pytest.importorskip("onnx")
    from tests.onnx.backend import run_model

    training, _ = network(**options)
    model = mlc.onnx.to_model(training)
    kinds = {node.op_type for node in model.graph.node}
    assert ("SoftmaxCrossEntropyLoss" in kinds) == ("label_smoothing" not in options)
    result = training.execute({"x": X}, {"t": CLASSES}).result
    outputs, _ = run_model(model, [X, CLASSES, np.float32(0.1), np.int64(1)], mlc.Device.cpu())
    found = dict(zip([info.name for info in model.graph.output], outputs, strict=True))
    np.testing.assert_allclose(found["loss"], np.array(result.data), rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(found["head.weights_new"], weights_of(training), rtol=1e-5, atol=1e-6)


def test_an_array_of_labels_is_a_constant(tmp_path: Path) -> None:
    graph = mlc.Graph()
    logits = graph.dense(graph.input((8, 6), "x"), 4, name="head")
    graph.cross_entropy(logits, CLASSES, name="constant")
    graph.loss(logits, np.ones((8, 4)), "mse")
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": graph.input_tensors[0]})
    mlc.save(tmp_path / "graph.mlc", training)
    y = torch.tensor(X) @ torch.tensor(weights_of(training)).T
    expected = F.cross_entropy(y, torch.tensor(CLASSES)) + ((y - 1) ** 2).mean()
    for one in (training, mlc.load(tmp_path / "graph.mlc")):
        one.compile(device=mlc.Device())
        assert_loss(one.execute({"x": X}).result, expected)
    assert graph.nodes[1].labels[0].label == "constant.constant"
    with pytest.raises(TypeError, match="labels must be a Tensor or an array, not list"):
        graph.cross_entropy(logits, [1, 2, 3])  # type: ignore[arg-type]


def test_weights_of_labels_are_an_input_like_any_other(tmp_path: Path) -> None:
    """Fed by name, in a training graph and in a Trainer, whose last batch is smaller; and no part of the state."""
    rng = np.random.default_rng(0)
    x, classes = rng.normal(size=(7, 6)).astype(np.float32), rng.integers(0, 3, 7)
    weights = rng.random(7).astype(np.float32)
    data = {"x": x, "labels": classes, "weights": weights}
    graph = mlc.Graph()
    labels = graph.input((4,), "labels", data_type=DataType.INT64)
    y = graph.dense(graph.input((4, 6), "x"), 3, name="out")
    graph.cross_entropy(y, labels, weights=graph.input((4,), "weights"))
    assert list(mlc.to_state_dict(graph)) == ["out.weight", "out.bias"]
    w, b = (torch.tensor(array) for array in mlc.to_state_dict(graph).values())
    losses = F.cross_entropy(F.linear(torch.from_numpy(x), w, b), torch.from_numpy(classes), reduction="none").numpy()

    training = mlc.TrainingGraph([graph], optimizer=mlc.SGDOptimizer(learning_rate=0.1))
    training.compile(device=mlc.Device.cpu())
    found = mlc.Trainer(graph, outputs={"y": y}).evaluate(data)["loss"]
    assert found == pytest.approx((losses * weights).mean(), rel=1e-5)
    found = training.execute({name: array[:4] for name, array in data.items()}).result.data.item()
    assert found == pytest.approx((losses * weights)[:4].mean(), rel=1e-5)
    mlc.save(tmp_path / "a.safetensors", training)
    for trained in (training, mlc.load(tmp_path / "a.safetensors")):
        assert mlc.Trainer(trained).evaluate(data) == mlc.Trainer(graph).evaluate(data)
