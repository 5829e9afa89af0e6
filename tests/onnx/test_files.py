"""External data stays inside the model's folder, sizes are checked first, and large models cost their size twice."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.onnx.files import read_model
from mlcompute.onnx.types import nbytes
from mlcompute.onnx.wire import without_large_data
from tests.onnx.cost import cost_of, needs_peak


def model_with(tensor: TensorProto) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def external(location: str, **entries: object) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "model"
    (inside / "deep").mkdir(parents=True)
    numbers = np.array([9, 1, 2, 3], np.float32).tobytes()
    for path in (inside / "w.bin", inside / "deep" / "w.bin", tmp_path / "secret.bin", inside / "twice.bin"):
        path.write_bytes(numbers)
    os.symlink(tmp_path / "secret.bin", inside / "link.bin")
    os.symlink(tmp_path, inside / "way")
    os.link(inside / "twice.bin", inside / "other.bin")
    os.mkfifo(inside / "pipe.bin")
    return inside


def load(folder: Path, tensor: TensorProto) -> mlc.onnx.ImportedGraph:
    path = folder / "m.onnx"
    path.write_bytes(model_with(tensor).SerializeToString())
    return mlc.onnx.load(path)


@pytest.mark.parametrize("location", ["w.bin", "deep/w.bin", "./w.bin"])
def test_data_beside_the_model(folder: Path, location: str) -> None:
    graph = load(folder, external(location, offset=4, length=12))
    np.testing.assert_array_equal(graph.weights["w"].data, [1, 2, 3])


@pytest.mark.parametrize(
    ("location", "entries", "says"),
    [
        ("../secret.bin", {}, "not inside the model's folder"),
        ("deep/../../secret.bin", {}, "not inside the model's folder"),
        ("/etc/passwd", {}, "not inside the model's folder"),
        ("C:\\x", {}, "not inside the model's folder"),
        ("", {}, "not inside the model's folder"),
        ("link.bin", {}, "cannot be read"),
        ("way/secret.bin", {}, "cannot be read"),
        ("other.bin", {}, "not a plain file with one name"),
        ("pipe.bin", {}, "not a plain file with one name"),
        ("deep", {}, "not a plain file"),
        ("missing.bin", {}, "cannot be read"),
        ("w.bin", {"offset": 8}, "which ends earlier"),
        ("w.bin", {"offset": -4}, "12 bytes are needed"),
        ("w.bin", {"offset": 2**63}, "which ends earlier"),
        ("w.bin", {"length": 11}, "12 bytes are needed"),
        ("w.bin", {"length": "x"}, "whole numbers"),
    ],
)
def test_refused(folder: Path, location: str, entries: dict[str, object], says: str) -> None:
    with pytest.raises(mlc.onnx.ModelError, match=says):
        load(folder, external(location, **entries))


def test_a_model_without_a_folder_has_no_external_data(folder: Path) -> None:
    with pytest.raises(mlc.Error, match="was not read from a file"):
        mlc.onnx.load(model_with(external("w.bin")).SerializeToString())


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    huge = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**31, 2**31, 4], raw_data=b"0123")
    with pytest.raises(mlc.Error, match="more elements than any memory"):
        mlc.onnx.load(model_with(huge))
    short = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], raw_data=b"0123")
    with pytest.raises(mlc.Error, match="has 4 bytes of data, 12 are needed"):
        mlc.onnx.load(model_with(short))
    fields = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**20], float_data=[1.0])
    with pytest.raises(mlc.Error, match="has 1 numbers of data, 1048576 are needed"):
        mlc.onnx.load(model_with(fields))
    with pytest.raises(mlc.Error, match="takes 12 bytes, 8 are allowed"):
        mlc.onnx.load(model_with(numpy_helper.from_array(np.ones(3, np.float32), "w")), memory_limit=8)


@pytest.mark.parametrize(
    ("shape", "bits", "expected"),
    [((), 32, 4), ((3, 5), 4, 8), ((0, 2**62), 8, 0), ((7,), 2, 2), ((2**40, 2), 1, 2**38)],
)
def test_nbytes(shape: tuple[int, ...], bits: int, expected: int) -> None:
    assert nbytes(shape, bits, "w") == expected


@pytest.mark.parametrize("shape", [(-1,), (2**40, 2**40), (2**62,)])
def test_nbytes_refuses(shape: tuple[int, ...]) -> None:
    with pytest.raises(mlc.DataError, match=r"^w: "):
        nbytes(shape, 8, "w")


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x08"])
def test_no_model(data: bytes) -> None:
    with pytest.raises(mlc.DataError, match=r"onnx\.load: the given bytes"):
        mlc.onnx.load(data)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(mlc.DataError, match=r"cannot be read"):
        mlc.onnx.load(tmp_path / "missing.onnx")
    graph = mlc.Graph()
    graph.dense(graph.input((2, 3), "x"), 1)
    mlc.save(tmp_path / "net.safetensors", graph)
    with pytest.raises(mlc.DataError, match=r"(?s)is not an ONNX model.*fix     a checkpoint is read by mlc\.load"):
        mlc.onnx.load(tmp_path / "net.safetensors")


def test_everything_that_stands_in_the_way_is_listed() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("NonMaxSuppression", ["x", "x"], ["a"], name="first"),
        helper.make_node("Frobnicate", ["a"], ["b"], name="second", domain="org.example"),
        helper.make_node("Relu", ["x"], ["c"], name="fine"),
        helper.make_node("Reshape", ["c", "x"], ["y"], name="third"),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("org.example", 1)],
    )
    with pytest.raises(mlc.onnx.ModelError) as caught:
        mlc.onnx.load(model, batch=2)
    error = caught.value
    found = [(problem.operator, problem.node) for problem in error.problems]
    assert found == [("NonMaxSuppression", "first"), ("org.example.Frobnicate", "second"), ("Reshape", "third")]
    assert "3 things in this model cannot be imported" in str(error)
    assert "the shape of its result depends on computed numbers" in str(error)
    assert "constants={name: array}" in error.fix
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_unfixed_extents_are_named() -> None:
    model = model_with(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    with pytest.raises(mlc.Error, match="give batch="):
        mlc.onnx.load(model)
    assert mlc.onnx.load(model, batch=7).shapes["x"] == (7, 3)
    assert mlc.onnx.load(model, dimensions={"N": 5}).shapes["y"] == (5, 3)
    assert mlc.onnx.load(model, shapes={"x": (4, 3)}).shapes["y"] == (4, 3)


# Memory -------------------------------------------------------------------------------------------------------------


@needs_peak
@pytest.mark.parametrize("megabytes", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("from_bytes", [False, True])
def test_an_import_takes_seconds_and_less_than_twice_the_file(tmp_path: Path, megabytes: int, from_bytes: bool) -> None:
    rng = np.random.default_rng(0)
    nodes, weights, before = [], [], "x"
    for k in range(megabytes // 4):
        weights.append(numpy_helper.from_array(rng.standard_normal((1024, 1024)).astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("MatMul", [before, f"w{k}"], [f"y{k}"]))
        before = f"y{k}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1024])
    y = helper.make_tensor_value_info(before, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path = tmp_path / "large.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    last = numpy_helper.to_array(weights[-1])
    given = path.read_bytes() if from_bytes else path
    mlc.onnx.load(model_with(numpy_helper.from_array(last[:1, :3], "w")))  # what is loaded on first use is not counted

    def call() -> str:
        tensor = mlc.onnx.load(given).weights[f"w{len(nodes) - 1}"]
        return str(np.array_equal(np.asarray(tensor.data), last))

    cost = cost_of(call)
    assert cost.answer == "True"
    assert cost.seconds < 5
    assert cost.bytes < 2 * path.stat().st_size, f"{cost.bytes / path.stat().st_size:.2f} times the file"


def test_large_tensors_are_read_from_where_they_lie(tmp_path: Path) -> None:
    """Raw data is found by walking over the file; a file of another make is parsed whole, with the same result."""
    array = np.arange(3000, dtype=np.float32).reshape(500, 2, 3)
    data = model_with(numpy_helper.from_array(array, "w")).SerializeToString()
    small, places = without_large_data(data)
    assert list(places.values()) == [(data.index(array.tobytes()), array.nbytes)]
    assert len(small) < len(data) - array.nbytes + 8
    twice = data + data  # allowed: what is repeated is merged
    assert without_large_data(twice) == (twice, {})
    for damaged in (data[:-1], data[: len(data) // 2], b"", b"\xff" * 30, data[:1]):
        assert without_large_data(damaged) == (damaged, {})
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    for given in (data, path, onnx.ModelProto.FromString(data)):
        np.testing.assert_array_equal(np.asarray(mlc.onnx.load(given).weights["w"].data), array)
    file = read_model(path)
    path.write_bytes(data[:200])
    with pytest.raises(mlc.DataError, match="changed while it was read"):
        file.raw(0)
