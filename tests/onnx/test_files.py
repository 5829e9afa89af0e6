"""External data stays inside the model's folder, sizes are checked first, and large models cost their size twice."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.onnx.types import nbytes


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


LARGE = """
import resource, sys, time
import mlcompute as mlc, onnx, mlcompute.onnx.importer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
graph = mlc.onnx.load(sys.argv[1])
seconds = time.perf_counter() - start
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, len(graph.weights))
"""


def test_a_model_of_100_megabytes_takes_seconds_and_twice_its_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes, weights, before = [], [], "x"
    for k in range(25):
        weights.append(numpy_helper.from_array(rng.standard_normal((1024, 1024)).astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("MatMul", [before, f"w{k}"], [f"y{k}"]))
        before = f"y{k}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1024])
    y = helper.make_tensor_value_info(before, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path = tmp_path / "large.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    run = subprocess.run([sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=True)
    seconds, memory, count = run.stdout.split()
    size = path.stat().st_size
    assert int(count) == 25
    assert float(seconds) < 10
    assert int(memory) < 2.1 * size, f"{int(memory) / size:.2f} times the file"
