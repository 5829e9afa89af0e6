"""BFLOAT16 in ONNX models: what layers of bfloat16 are written as, and what such models are read as."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from tests.cases.case import bfloat16_twins
from tests.onnx.test_export import exported, inference_of, referenced
from tests.test_layers import FAMILIES

B = mlc.DataType.BFLOAT16
#: One unit in the last place.
UNIT = 2.0**-7


def close(actual: object, wanted: object, what: str) -> None:
    a, b = np.asarray(actual), np.asarray(wanted)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=UNIT, atol=UNIT, err_msg=what)


def test_layers_there_and_back() -> None:
    """ONNX's own evaluator gives what the layers give; so does the model that is read again."""
    checked = 0
    for family in FAMILIES:
        for case in bfloat16_twins(family.CASES):
            if case.labels or "random" in family.__name__:
                continue
            arrays = case.arrays()
            run, outputs = inference_of(case, arrays)
            run.compile(device=mlc.Device(engine=Reference()))
            run.execute({f"x{k}": array for k, array in enumerate(arrays)}, options=mlc.ExecutionOptions.SYNCHRONOUS)
            model = exported(run)
            onnx.checker.check_model(model, full_check=True)
            feeds = {info.name: arrays[int(info.name[1:])] for info in model.graph.input}
            judged = referenced(model, list(outputs), feeds)
            graph = mlc.onnx.load(model, shapes={name: array.shape for name, array in feeds.items()})
            again = mlc.InferenceGraph([graph])
            again.add_inputs(graph.inputs)
            again.add_outputs(graph.outputs)
            again.compile(device=mlc.Device(engine=Reference()))
            again.execute(feeds, options=mlc.ExecutionOptions.SYNCHRONOUS)
            for (name, tensor), judgement in zip(outputs.items(), judged, strict=True):
                close(judgement, tensor.data, f"{case.name} in ONNX")
                close(graph.outputs[name].data, tensor.data, f"{case.name}, read again")
            checked += 1
    assert checked > 25


def test_weights_train_and_stay(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((4, 3)) / 2).astype(B.numpy)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    borders = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n", k]) for name, k in (("x", 4), ("y", 3))]
    graph_message = helper.make_graph([node], "g", borders[:1], borders[1:], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph_message, opset_imports=[helper.make_opsetid("", 18)])
    graph = mlc.onnx.load(model, batch=8)
    assert graph.weights["w"].descriptor == mlc.TensorDescriptor((4, 3), data_type=B)
    np.testing.assert_array_equal(graph.weights["w"].data, w)
    assert not any("bfloat16" in note for note in graph.notes), "nothing to say: it is computed as the model has it"
    x = rng.standard_normal((64, 4)).astype(B.numpy)
    y = x.astype(np.float32) @ np.float32([[1, 0, 2], [0, -1, 0], [0.5, 0, 0], [0, 0, 1]])
    trainer = mlc.Trainer(graph, loss="mean_squared_error", learning_rate=0.05)
    first = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, epochs=20, verbose=0)
    assert trainer.evaluate(x, y)["loss"] < 0.1 * first
    path = tmp_path / "trained.onnx"
    mlc.onnx.save(graph, str(path))
    stored = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    assert stored["w"].data_type == TensorProto.BFLOAT16
    np.testing.assert_array_equal(numpy_helper.to_array(stored["w"]), graph.weights["w"].data)
    mlc.save(tmp_path / "net.safetensors", graph)
    np.testing.assert_array_equal(
        trainer.predict(x), mlc.Trainer(mlc.load(tmp_path / "net.safetensors"), loss="mean_squared_error").predict(x)
    )


@pytest.mark.parametrize("kind", [mlc.DataType.FLOAT16, B], ids=lambda kind: kind.name)
def test_constants_of_operators_are_saved(kind: mlc.DataType, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.full(1, 1.5, kind.numpy), "c")),
        helper.make_node("Mul", ["x", "c"], ["y"]),
    ]
    number = helper.np_dtype_to_tensor_dtype(kind.numpy)
    borders = [helper.make_tensor_value_info(name, number, [2, 4]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", borders[:1], borders[1:]), opset_imports=[helper.make_opsetid("", 18)]
    )
    graph = mlc.onnx.load(model)
    mlc.save(tmp_path / "net.safetensors", graph)
    loaded = mlc.load(tmp_path / "net.safetensors")
    run = mlc.InferenceGraph([loaded])
    x = next(tensor for tensor in loaded.input_tensors)
    run.add_inputs({"x": x})
    run.compile(device=mlc.Device.cpu())
    found = run.execute({"x": np.ones((2, 4), kind.numpy)}).result.data
    close(found, np.full((2, 4), 1.5, kind.numpy), "a constant")
