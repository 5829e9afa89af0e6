"""Graphs that came from ONNX models are saved and loaded like any other: the same numbers, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.saving.description import describe, rebuild
from mlcompute.saving.plain import from_text, to_text
from tests.onnx import suite


def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(4, 2, 3, 3)).astype(np.float32) / 4,
        "scale": rng.normal(size=(4, 1, 1)).astype(np.float32),
        "head": rng.normal(size=(4, 3)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Mul", ["a", "scale"], ["b"]),
        helper.make_node("Elu", ["b"], ["c"], alpha=0.7),
        helper.make_node("ReduceMean", ["c"], ["d"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["d", "head"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 6, 6])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    graph = mlc.onnx.load(network(), batch=8)
    adam = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01))
    training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN), adam)
    training.add_inputs(graph.inputs, {"label": mlc.Tensor(shape=(8, 3))})
    training.compile(device=mlc.Device.cpu())
    rng = np.random.default_rng(1)
    data = {"x": rng.normal(size=(8, 2, 6, 6)).astype(np.float32)}, {"label": np.eye(3)[rng.integers(0, 3, 8)]}

    def losses(trained: mlc.TrainingGraph) -> list[float]:
        return [trained.execute(*data).result.data.item() for _ in range(4)]

    losses(training)
    path = tmp_path / "net.safetensors"
    mlc.save(path, training)
    never_stopped = losses(training)
    again = mlc.load(path, mlc.Device.cpu())
    assert isinstance(again, mlc.TrainingGraph)
    assert losses(again) == never_stopped
    assert {name.rsplit(".", 1)[-1] for name in mlc.Checkpoint(path).names if "/" not in name} >= {"w", "scale", "head"}


def test_a_model_applied_to_other_tensors(tmp_path: Path) -> None:
    """A backbone in a graph of one's own: trained, saved and loaded."""
    backbone = mlc.onnx.load(network(), batch=8)
    graph = mlc.Graph()
    graph.dense(backbone(2.0 * graph.input((8, 2, 6, 6), "image")), 2)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy")
    images = np.random.default_rng(1).normal(size=(11, 2, 6, 6)).astype(np.float32)
    trainer.fit(images, np.arange(11) % 2, verbose=0)
    trainer.save(tmp_path / "net.safetensors")
    np.testing.assert_array_equal(mlc.load(tmp_path / "net.safetensors").predict(images), trainer.predict(images))


def imported(case: suite.Case) -> tuple[Any, dict[str, Any]] | None:
    """A case of ONNX's suite as a graph, and its inputs; None when nothing of it is left to compute."""
    inputs = [None if array is None or isinstance(array, list) else np.asarray(array) for array in case.data[0][0]]
    names = [info.name for info in case.model.graph.input]
    given = {name: a for name, a in zip(names, inputs, strict=False) if a is not None and a.dtype != object}
    try:
        graph = mlc.onnx.load(case.model, shapes={n: a.shape for n, a in given.items()}, constants=given)
    except mlc.Error:
        return None
    return (graph, given) if graph.outputs else None


@pytest.mark.parametrize("chunk", range(4))
def test_operators_come_back(chunk: int) -> None:
    """Every seventh case of ONNX's own suite: described, rebuilt from the text alone, described again."""
    seen = 0
    for case in list(suite.all_cases())[chunk::28]:
        found = imported(case)
        if found is None:
            continue
        graph, _ = found
        try:
            text = to_text(describe(graph))
        except mlc.GraphError:  # of element types or operators a file cannot name
            continue
        rebuilt = rebuild(from_text(text), case.name)
        # Data comes later: all that may differ is whether a tensor has any.
        assert to_text(describe(rebuilt.graph)) == text.replace(',"has_data":true', ""), case.name
        seen += 1
    assert seen > 20


def test_rebuilt_operators_give_the_same_numbers(tmp_path: Path) -> None:
    device = mlc.Device(engine=Reference())
    for case in list(suite.all_cases())[::50]:
        found = imported(case)
        if found is None or not found[0].inputs:
            continue
        graph, given = found
        path = tmp_path / "one.safetensors"
        used = {tensor for node in graph.nodes for tensor in node.sources}
        run = mlc.InferenceGraph([graph])
        run.add_inputs({name: tensor for name, tensor in graph.inputs.items() if tensor in used})
        run.add_outputs(graph.outputs)
        run.compile(device=device)
        try:
            mlc.save(path, run)
        except mlc.GraphError:
            continue
        data = {
            name: given[name].reshape(tensor.descriptor.shape).astype(tensor.descriptor.data_type.numpy)
            for name, tensor in graph.inputs.items()
            if tensor in used
        }
        again = mlc.load(path)
        assert isinstance(again, mlc.InferenceGraph)
        again.compile(device=device)
        for one in (run, again):
            one.execute(data).wait()
        outputs, others = run._definition.declared.outputs, again._definition.declared.outputs.values()
        for (name, a), b in zip(outputs.items(), others, strict=True):
            np.testing.assert_array_equal(a.data, b.data, err_msg=f"{case.name}: {name}")


@pytest.mark.parametrize("word", ["1,f4", ",f4", "object", "O", "S4", "f", "<c8", "__import__('os')", 4, None])
def test_types_are_looked_up_and_never_parsed(word: Any) -> None:
    described = to_text(describe(mlc.onnx.load(network(), batch=8)))
    assert '"float32"' in described
    with pytest.raises(mlc.Error, match="no type of numbers"):
        rebuild(from_text(described.replace('"float32"', to_text(word))), "net")
