"""Losses and metrics over sequences (n, length, classes): classes are where the network puts them, or it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.reference import Reference
from mlcompute.trainer.metrics import Accuracy, TopKAccuracy
from tests.nets import MEAN, NONE, SUM, Array, adam, normal, sgd

ENGINES = pytest.mark.parametrize("engine", [Cpu(2), Reference()], ids=["cpu", "reference"])
N, T, C, M = 6, 5, 4, 3


def device(engine: Any) -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=engine)


def classes(seed: int = 0, n: int = N) -> Array:
    return np.random.default_rng(seed).integers(0, C, (n, T))


def one_hot(numbers: Array) -> Array:
    return np.eye(C, dtype=np.float32)[numbers]


def layers_over_sequences(graph: mlc.Graph, x: mlc.Tensor) -> dict[str, mlc.Tensor]:
    """What ends in (n, length, classes), by many ways."""
    ids = mlc.Tensor(shape=(N, T), data=np.zeros((N, T), np.int32), data_type=mlc.DataType.INT32)
    h = graph.dense(x, C)
    flat = graph.dense(graph.reshape((N * T, M), source=x), C)
    table = mlc.Tensor(shape=(1, C, 2), data=normal(1, C, 2))
    return {
        "dense": h,
        "lstm": graph.lstm(x, C),
        "attention": graph.attention(h, heads=2),
        "embedding": graph.embedding(ids, 7, C),
        "activation": graph.activation(h, "relu"),
        "norm": graph.normalize(h, "layer"),
        "sum": graph.add(h, graph.input((1, 1, C), "bias")),
        "input plus dense": graph.add(graph.input((N, T, C), "other"), h),
        "dropout": graph.dropout(h),
        "dense over all tokens, reshaped": graph.reshape((N, T, C), source=flat),
        "tied weights": graph.matmul(graph.dense(x, 2), table, transposes_y=True),
        "slice": graph.slice(graph.dense(x, C + 1), (0, 0, 0), (N, T, C)),
    }


def test_the_class_axis_of_sequences_is_the_last() -> None:
    graph = mlc.Graph()
    x = graph.input((N, T, M), "x")
    for name, y in layers_over_sequences(graph, x).items():
        t = graph.input((N, T, C), f"labels of {name}")
        loss = graph.loss(y, t, reduction="none", name=f"loss of {name}")
        assert loss.descriptor.shape == (N, T, 1), name
        assert graph.softmax(y).descriptor.shape == (N, T, C)
        assert graph.layers[-1].dimension == 2, name  # type: ignore[attr-defined]


def test_the_class_axis_of_everything_else_is_the_first_after_the_samples() -> None:
    graph = mlc.Graph()
    image = graph.convolution(graph.input((N, 3, 6, 6), "image"), C, kernel=3)
    h, w = image.descriptor.shape[2:]
    steps = graph.dense(graph.input((N, T, M), "x"), C)
    cases = {
        "vector": (graph.dense(graph.input((N, M), "v"), C), (N, 1)),
        "image": (image, (N, 1, h, w)),
        "image without a network": (graph.input((N, C, 2, 2), "raw"), (N, 1, 2, 2)),
        "image as a row of pixels": (graph.reshape((N, C, h * w), source=image), (N, 1, h * w)),
        "transposed sequence": (graph.transpose((0, 2, 1), source=steps), (N, 1, T)),
        "softmax over time": (graph.softmax(steps, dimension=1), (N, 1, C)),
        "one step": (graph.input((N, 1, C), "step"), (N, 1, 1)),
        "one pixel": (graph.input((N, C, 1), "pixel"), (N, 1, 1)),
    }
    for name, (y, expected) in cases.items():
        kind = "categorical_cross_entropy"
        t = graph.input(y.descriptor.shape, f"labels of {name}")
        assert graph.loss(y, t, kind, reduction="none").descriptor.shape == expected, name


def test_sequences_of_the_original_are_declared_as_such() -> None:
    graph = mlc.Graph()
    y = mlc.Tensor(sequence_length=T, feature_channel_count=C, batch_size=N)
    assert graph.loss(y, graph.input((N, T, C), "t"), reduction="none").descriptor.shape == (N, T, 1)


def test_refused_where_nobody_can_tell() -> None:
    graph = mlc.Graph()
    raw, t = graph.input((N, T, C), "raw"), graph.input((N, T, C), "t")
    with pytest.raises(mlc.ShapeError, match=r"(?s)on axis 1 or on axis 2\?.*class_axis=-1 for sequences"):
        graph.loss(raw, t)
    with pytest.raises(mlc.ShapeError, match=r"(?s)along axis 1 or axis 2 of \(6, 5, 4\)\?.*dimension=2 for sequences"):
        graph.softmax(raw)
    mixed = graph.reshape((N, C, T), source=graph.dense(graph.input((N, T, M), "x"), C))
    with pytest.raises(mlc.ShapeError, match="on axis 1 or on axis 2"):
        graph.loss(mixed, graph.input((N, C, T), "u"))
    assert graph.loss(raw, t, class_axis=-1, reduction="none").descriptor.shape == (N, T, 1)
    assert graph.loss(raw, t, class_axis=1, reduction="none").descriptor.shape == (N, 1, C)
    training = mlc.TrainingGraph([], mlc.LossLayer.softmax_cross_entropy(MEAN), sgd())
    training.node(mlc.ActivationLayer.relu(), source=raw)
    training.add_inputs({"raw": raw}, {"t": t})
    with pytest.raises(mlc.ShapeError, match="on axis 1 or on axis 2"):
        training.compile(device=device(Reference()))


@ENGINES
@pytest.mark.filterwarnings("ignore:Loss 'Loss' has 30 elements")  # without a reduction: their sum is meant
@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
def test_a_training_graph_over_sequences(engine: Any, reduction: mlc.ReductionType) -> None:
    """Losses, and the weights after some steps, are PyTorch's."""
    graph = mlc.Graph()
    x = graph.input((N, T, M), "x")
    graph.dense(x, C, name="head")
    training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(reduction), sgd(0.1))
    t = mlc.Tensor(shape=(N, T, C))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=device(engine))
    head: Any = graph.layer("head")
    w, b = (torch.tensor(np.array(p.data), requires_grad=True) for p in (head.weights, head.biases))
    given, numbers = normal(N, T, M), classes()
    how = {MEAN: "mean", SUM: "sum", NONE: "none"}[reduction]
    for _ in range(3):
        y = torch.tensor(given) @ w.T + b
        loss = F.cross_entropy(y.movedim(-1, 1), torch.tensor(numbers), reduction=how)
        found = training.execute({"x": given}, {"t": one_hot(numbers)}).result.data
        np.testing.assert_allclose(found.ravel(), loss.detach().numpy().ravel(), rtol=1e-4)
        for leaf, gradient in zip((w, b), torch.autograd.grad(loss.sum(), (w, b)), strict=True):
            leaf.data -= 0.1 * gradient
    np.testing.assert_allclose(head.weights.data, w.detach().numpy(), rtol=1e-4, atol=1e-6)


@ENGINES
def test_trainer_over_sequences(engine: Any) -> None:
    """Integer class labels (n, length), loss, accuracy and top-2 accuracy as PyTorch's; a short last batch, too."""
    count = 2 * N + 2
    x, y = normal(count, T, M), classes(n=count)
    graph = mlc.Graph()
    steps = graph.input((N, T, M), "steps")
    graph.dense(steps, C, name="head")
    trainer = mlc.Trainer(
        graph,
        loss="softmax_cross_entropy",
        metrics=["accuracy", "top_2_accuracy"],
        optimizer=sgd(1e-9),
        device=device(engine),
    )
    head: Any = graph.layer("head")
    logits = torch.tensor(x) @ torch.tensor(np.array(head.weights.data)).T + torch.tensor(np.array(head.biases.data))
    right = torch.tensor(y)
    expected = {
        "loss": F.cross_entropy(logits.movedim(-1, 1), right).item(),
        "accuracy": (logits.argmax(-1) == right).double().mean().item(),
        "top_2_accuracy": (logits.topk(2, -1).indices == right[..., None]).any(-1).double().mean().item(),
    }
    assert trainer.evaluate(x, y) == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate(x, one_hot(y)) == pytest.approx(expected, rel=1e-5)
    history = trainer.fit(x, y, verbose=0, shuffle=False)
    assert {name: history.epochs[0][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    prediction = trainer.predict(x)
    assert prediction.shape == (count, T, C)
    np.testing.assert_allclose(prediction, logits.numpy(), rtol=1e-4, atol=1e-5)


def test_as_many_steps_as_classes() -> None:
    """Where the shapes tell nothing: integer class labels (n, c) of sequences (n, c, c)."""
    graph = mlc.Graph()
    graph.dense(graph.input((N, C, M), "steps"), C, name="head")
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], optimizer=sgd(1e-9))
    x, y = normal(N, C, M), np.random.default_rng(0).integers(0, C, (N, C))
    logits = trainer.predict(x)
    found = trainer.evaluate(x, y)
    assert found["loss"] == pytest.approx(F.cross_entropy(torch.tensor(logits).mT, torch.tensor(y)).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).mean())


def test_sequences_are_learned() -> None:
    """Each token's class is one of its features: over time instead of classes this could not be learned."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, C, (64, T))
    x = one_hot(y) + generator.normal(0, 0.1, (64, T, C)).astype(np.float32)
    graph = mlc.Graph()
    graph.dense(graph.lstm(graph.input((16, T, C), "x"), 16), C)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=adam(0.02), metrics=["accuracy"])
    trainer.fit(x, y, epochs=20, verbose=0)
    assert trainer.evaluate(x, y)["accuracy"] > 0.98


def test_other_losses_find_the_classes_too() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((N, T, M), "x"), C)
    trainer = mlc.Trainer(graph, loss="mse", metrics=["categorical_accuracy"], optimizer=sgd(1e-9))
    x, y = normal(N, T, M), classes()
    accuracy = (trainer.predict(x).argmax(-1) == y).mean()
    assert trainer.evaluate(x, one_hot(y))["categorical_accuracy"] == pytest.approx(accuracy)
    graph = mlc.Graph()
    graph.node(mlc.ActivationLayer.relu(), source=graph.input((N, T, C), "x"))
    with pytest.raises(mlc.DataError, match=r"(?s)are the classes of a prediction.*Accuracy\(class_axis=-1\)"):
        mlc.Trainer(graph, loss="mse", metrics=["categorical_accuracy"], optimizer=sgd())


def test_metrics_by_themselves() -> None:
    y, t = normal(N, T, C), one_hot(classes())
    accuracy = (y.argmax(-1) == t.argmax(-1)).mean()
    turned = y.transpose(0, 2, 1), t.transpose(0, 2, 1)
    for metric, given, expected in (
        (Accuracy(class_axis=-1), (y, t), accuracy),
        (Accuracy(class_axis=1), turned, accuracy),
        (TopKAccuracy(1, class_axis=2), (y, t), accuracy),
        (TopKAccuracy(C, class_axis=1), turned, 1.0),
    ):
        metric.update(*given)
        assert metric.result() == pytest.approx(expected)
    for metric in (Accuracy(), TopKAccuracy(2), Accuracy(class_axis=3), Accuracy(class_axis=0)):
        with pytest.raises(mlc.DataError, match="class_axis=-1"):
            metric.update(y, t)


def test_labels_to_be_ignored_say_how() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((N, T, M), "x"), C)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy")
    y = classes()
    y[:, -1] = -100
    with pytest.raises(mlc.DataError, match=r"(?s)go from -100 to.*to be left out: LossLayer.*ignore_index=-100\)"):
        trainer.fit(normal(N, T, M), y)


@ENGINES
def test_saved_graphs_keep_the_class_axis(engine: Any, tmp_path: Path) -> None:
    for said in (None, -1, 1):
        graph = mlc.Graph()
        x = graph.input((N, T, M), "x")
        graph.dense(x, C)
        loss = mlc.LossLayer.softmax_cross_entropy(MEAN, class_axis=said)
        training = mlc.TrainingGraph([graph], loss, sgd(0.1))
        training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(N, T, C))})
        training.compile(device=device(engine))
        mlc.save(tmp_path / "graph.safetensors", training)
        loaded = mlc.load(tmp_path / "graph.safetensors", device(engine))
        assert isinstance(loaded, mlc.TrainingGraph)
        data: Any = ({"x": normal(N, T, M)}, {"t": one_hot(classes())})
        for _ in range(2):
            np.testing.assert_array_equal(loaded.execute(*data).result.data, training.execute(*data).result.data)


def test_files_from_before_there_was_a_class_axis_keep_their_meaning() -> None:
    from mlcompute.saving.construction import constructed, described

    for kind, expected in ((mlc.LossType.SOFTMAX_CROSS_ENTROPY, 1), (mlc.LossType.MEAN_SQUARED_ERROR, None)):
        plain = described(mlc.LossDescriptor(kind, MEAN), "a loss", {})
        assert plain.pop("class_axis") is None
        old: Any = constructed(plain, {}, mlc.LossDescriptor)
        assert old.class_axis == expected


def imported(operators: list[tuple[str, list[str], dict[str, Any]]], shape: tuple[int, ...]) -> mlc.Graph:
    """An ONNX model with weights w (3, 4) and k (4, 3, 1), each operator after the other."""
    import onnx
    from onnx import helper, numpy_helper

    nodes = [
        helper.make_node(name, [f"v{i}", *more], [f"v{i + 1}"], **attributes)
        for i, (name, more, attributes) in enumerate(operators)
    ]
    weights = [numpy_helper.from_array(normal(M, C), "w"), numpy_helper.from_array(normal(C, M, 1), "k")]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, extents)
        for name, extents in (("v0", shape), (f"v{len(nodes)}", None))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return mlc.onnx.load(model.SerializeToString())


@pytest.mark.parametrize(
    ("operators", "shape", "expected"),
    [
        ([("MatMul", ["w"], {})], (N, T, M), (N, T, 1)),
        ([("MatMul", ["w"], {}), ("Relu", [], {}), ("Softmax", [], {"axis": -1})], (N, T, M), (N, T, 1)),
        ([("Conv", ["k"], {})], (N, M, T), (N, 1, T)),
        ([("MatMul", ["w"], {}), ("Transpose", [], {"perm": [0, 2, 1]})], (N, T, M), None),
        ([("Relu", [], {})], (N, T, C), None),
    ],
)
def test_imported_models(operators: Any, shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    pytest.importorskip("onnx")
    graph = imported(operators, shape)
    y = graph.result_tensors(graph.layers[-1])[0]
    t = mlc.Tensor(y.descriptor)
    if expected is None:
        with pytest.raises(mlc.ShapeError, match="on axis 1 or on axis 2"):
            graph.loss(y, t)
    else:
        assert graph.loss(y, t, reduction="none").descriptor.shape == expected
