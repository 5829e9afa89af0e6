"""The doctor says what would become of a model, and the operator table is complete."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.onnx.rows import ROWS, load_rows
from tests.onnx.backend import run_model
from tests.onnx.mutants import small_network


def test_a_healthy_model() -> None:
    report = mlc.onnx.doctor(small_network(), batch=4)
    assert report.healthy
    assert report.inputs == {"x": (4, 3, 8, 8)}
    assert set(report.weights) == {"w", "b", "s", "w2"}
    assert report.weight_bytes == 4 * (4 * 27 + 4 + 4 + 5 * 64)
    assert report.inference_memory is not None
    assert report.training_memory is not None
    assert report.training_memory > report.inference_memory > 0
    text = str(report)
    assert "imports" in text.splitlines()[0]
    assert "memory at batch 4" in text
    assert any(line.split()[:4] == ["Conv", "1", "yes", "yes"] for line in text.splitlines())


def test_memory_grows_with_the_batch() -> None:
    small, large = (mlc.onnx.doctor(small_network(), batch=batch) for batch in (2, 32))
    assert small.training_memory is not None
    assert large.training_memory is not None
    assert large.training_memory > 8 * small.training_memory


def test_an_ill_model() -> None:
    model = small_network()
    model.graph.node[2].op_type = "NonMaxSuppression"
    report = mlc.onnx.doctor(model, batch=4)
    assert not report.healthy
    assert [problem.operator for problem in report.problems] == ["NonMaxSuppression"]
    assert report.training_memory is None
    assert "obstacles" in str(report)
    (use,) = [use for use in report.operators if use.name == "NonMaxSuppression"]
    assert not use.imports


def test_double_is_noted() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)
    weight = numpy_helper.from_array(np.ones(3), "w")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert mlc.onnx.doctor(model).notes == ["double is computed in float32: 'w', 'x'"]


def _one(node: onnx.NodeProto, shape: list[object] | None, version: int = 18, **stored: np.ndarray) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    arrays = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    sets = [helper.make_opsetid("", version), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y], arrays), opset_imports=sets)


def test_an_obstacle_says_what_to_do() -> None:
    fused = _one(helper.make_node("FusedMatMul", ["x", "x"], ["y"], domain="com.microsoft"), [3, 3])
    (said,) = map(str, mlc.onnx.doctor(fused).problems)
    assert said == (
        "com.microsoft.FusedMatMul 'y': there is no such operator in the operator table; "
        "save the model before onnxruntime optimizes its graph, or quantize it in the format QDQ"
    )
    (said,) = map(str, mlc.onnx.doctor(_one(helper.make_node("Mine", ["x"], ["y"]), [3])).problems)
    assert said.endswith("define it as a function of the model, or export it as standard operators")
    with pytest.raises(mlc.onnx.ModelError, match=r"input 'x': its rank is not known; give shapes=\{'x': \(\.\.\)\}"):
        mlc.onnx.load(_one(helper.make_node("Relu", ["x"], ["y"]), None))


def test_what_programs_disagree_about_is_noted() -> None:
    relu = _one(helper.make_node("Relu", ["x"], ["y"]), [3], version=999)
    assert "operator set 999 is newer than" in mlc.onnx.doctor(relu).notes[0]
    given = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    resize = helper.make_node("Resize", ["x", "", "scales"], ["y"], **given)
    for scale, count in ((1.7, 1), (1.6, 0), (2.2, 0)):
        scales = np.array([1, 1, 1, scale], np.float32)
        notes = mlc.onnx.load(_one(resize, [1, 1, 1, 5], scales=scales)).notes
        assert len(notes) == count
        assert all("PyTorch and onnxruntime round the size down first" in note for note in notes)


def test_batch_statistics_in_predictions_are_noted() -> None:
    ones = {name: np.ones(3, np.float32) for name in ("scale", "bias", "mean", "var")}
    for mode, count in ((1, 1), (0, 0)):
        node = helper.make_node("BatchNormalization", ["x", *ones], ["y"], training_mode=mode)
        for batch_norm in ("train", "frozen"):
            notes = mlc.onnx.load(_one(node, [4, 3], **ones), batch_norm=batch_norm).notes
            assert len(notes) == count
            assert all("the statistics of each batch, in predictions" in note for note in notes)


def test_the_table_has_every_operator() -> None:
    table = mlc.onnx.operator_table()
    named = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]}
    for schema in onnx.defs.get_all_schemas():
        if schema.deprecated or schema.domain == "ai.onnx.ml":
            continue
        name = f"{schema.domain}.{schema.name}" if schema.domain else schema.name
        assert name in named, name


@pytest.mark.parametrize("operator", ["Conv", "LSTM", "Attention", "Loop", "ai.onnx.preview.training.Gradient"])
def test_rows_that_matter(operator: str) -> None:
    (line,) = [line for line in mlc.onnx.operator_table().splitlines() if line.startswith(f"| {operator} |")]
    assert line.split(" | ")[1:3] == ["yes", "yes"]


def test_no_operator_of_the_table_is_unknown_to_onnx() -> None:
    load_rows()
    known = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas_with_history()}
    assert set(ROWS) <= known


def test_a_smaller_batch_runs_on_the_same_graph() -> None:
    graph = mlc.onnx.load(small_network(), batch=8)
    run = mlc.InferenceGraph([graph])
    run.add_inputs(graph.inputs)
    run.add_outputs(graph.outputs)
    run.compile(device=mlc.Device.cpu())
    x = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    run.execute({"x": x}).wait()
    whole = np.array(graph.outputs["y"].data)
    run.execute({"x": x[:3]}, batch_size=3).wait()
    np.testing.assert_allclose(np.array(graph.outputs["y"].data), whole[:3], rtol=1e-5, atol=1e-6)


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing mlcompute.onnx.x binds x in the package: a file of a function's name would hide the function."""
    files = {path.stem for path in Path(mlc.onnx.__file__).parent.glob("*.py")}
    assert not files & set(mlc.onnx.__all__)


@pytest.mark.parametrize(
    ("name", "given"),
    [("Scaler", {"offset": [0.5, 1.0, 2.0], "scale": [2.0] * 3}), ("Scaler", {"offset": [1.0], "scale": [3.0]})]
    + [("Normalizer", {"norm": norm}) for norm in ("MAX", "L1", "L2")],
)
def test_what_scikit_learn_puts_before_a_network(name: str, given: dict[str, object]) -> None:
    model = _one(helper.make_node(name, ["x"], ["y"], domain="ai.onnx.ml", **given), [3, 3])
    model.opset_import[1].domain, model.ir_version = "ai.onnx.ml", 8
    x = np.float32([[1, -2, 3], [0, 0, 0], [-1, -2, -3]])
    (ours,), _ = run_model(model, [x], mlc.Device.cpu())
    (theirs,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
