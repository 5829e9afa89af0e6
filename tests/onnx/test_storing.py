"""Model files: written without holding the numbers twice, in one file or in two, and read by every reader."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.onnx import storing
from tests.onnx.backend import run_graph

#: The program of a child process: it writes a model of 64 MB of weights and prints what that adds to its memory.
PROGRAM = """
    import sys, threading, time
    import mlcompute as mlc
    import onnx.checker

    def network(width, updates):
        graph = mlc.Graph()
        x = graph.input((2, width), "x")
        y = graph.dense(graph.dense(x, width, updates=updates), width, updates=updates)
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.add_outputs({"y": y})
        return inference

    def memory():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    mlc.onnx.save(network(4, True), sys.argv[1])  # imports and tables
    large = network(2896, sys.argv[2] == "trained")
    before, peak, done = memory(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], memory())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    mlc.onnx.save(large, sys.argv[1])
    done.set()
    thread.join()
    print((peak[0] - before) / (2 * 2896 * 2896 * 4))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("kind", ["trained", "constant"])
def test_saving_takes_no_second_copy_of_the_weights(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "net.onnx"), kind]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(run.stdout) < 0.5, "the weights themselves are 1, and all together must stay under 2.5"


def network() -> tuple[mlc.InferenceGraph, np.ndarray]:
    graph = mlc.Graph()
    x = graph.input((3, 40), "x")
    y = graph.dense(graph.activation(graph.dense(x, 50, updates=False), "tanh"), 30)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    inference.compile(device=mlc.Device.cpu())
    return inference, np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)


def test_the_file_is_the_message(tmp_path: Path) -> None:
    inference, x = network()
    path = tmp_path / "net.onnx"
    mlc.onnx.save(inference, path)
    stored, message = onnx.load(path), mlc.onnx.to_model(inference)
    assert stored == message
    onnx.checker.check_model(stored, full_check=True)
    (y,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(y, inference.execute({"x": x}).result.data, rtol=1e-5, atol=1e-6)
    assert [path] == list(tmp_path.iterdir())


def test_numbers_in_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "LARGEST_MESSAGE", 1000)
    inference, x = network()
    path = tmp_path / "net.onnx"
    mlc.onnx.save(inference, path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data"]
    expected = inference.execute({"x": x}).result.data
    (y,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    again = mlc.onnx.load(path, batch=3)
    assert {tuple(t.descriptor.shape) for t in again.weights.values()} == {(30, 50), (30,)}
    for left in onnx.load(path).graph.initializer:
        assert numpy_helper.to_array(left).dtype == np.float32


# Shapes and types of the model stay those of the model --------------------------------------------------------------


def volumes(kind: int) -> onnx.ModelProto:
    """A convolution over volumes: five axes, which tensors carry as four."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    w = np.random.default_rng(0).standard_normal((4, 2, 3, 3, 3)).astype(dtype)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 6),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("MaxPool", ["b"], ["y"], kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
            helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
        ],
        "volumes",
        [helper.make_tensor_value_info("x", kind, ["n", 2, 4, 4, 4])],
        [helper.make_tensor_value_info("y", kind, None), helper.make_tensor_value_info("total", kind, [])],
        [numpy_helper.from_array(w, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def described(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    infos = (*model.graph.input, *model.graph.output)
    return {i.name: (i.type.tensor_type.elem_type, len(i.type.tensor_type.shape.dim)) for i in infos}


def test_five_axes_stay_five() -> None:
    graph = mlc.onnx.load(volumes(TensorProto.FLOAT), batch=2)
    model = mlc.onnx.to_model(graph)
    assert described(model) == {"x": (1, 5), "y": (1, 5), "total": (1, 0)}
    assert [(t.name, list(t.dims)) for t in model.graph.initializer] == [("w", [4, 2, 3, 3, 3])]
    x = np.random.default_rng(1).standard_normal((2, 2, 4, 4, 4)).astype(np.float32)
    run = [onnxruntime.InferenceSession(m.SerializeToString()) for m in (volumes(TensorProto.FLOAT), model)]
    for a, b in zip(*(session.run(["y", "total"], {"x": x}) for session in run), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_double_stays_double_and_the_lost_digits_are_said() -> None:
    graph = mlc.onnx.load(volumes(TensorProto.DOUBLE), batch=2)
    assert graph.notes == ["double is computed in float32: 'w', 'x'"]
    with pytest.warns(UserWarning, match="'x', 'y', 'total': float64 in the model, which computes in float32"):
        model = mlc.onnx.to_model(graph)
    assert described(model) == {"x": (11, 5), "y": (11, 5), "total": (11, 0)}
    assert "float64 in the model" in {entry.key: entry.value for entry in model.metadata_props}["notes"]
    x = np.random.default_rng(1).standard_normal((2, 2, 4, 4, 4))
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": x})
    assert y.dtype == np.float64


@pytest.mark.parametrize("opset", [18, 19, 21])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("axes", [None, [2, 3]])
def test_resize_by_scales(opset: int, mode: str, axes: list[int] | None) -> None:
    scales = np.float32([2, 1.5] if axes else [1, 1, 2, 1.5])
    more = {"axes": axes} if axes else {}
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode, **more)],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(scales, "scales")],
    )
    original = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = mlc.onnx.to_model(mlc.onnx.load(original, batch=2))
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    a, b = (onnxruntime.InferenceSession(m.SerializeToString()).run(["y"], {"x": x})[0] for m in (original, model))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.4, 2.2, 0.7])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_by_a_scale_with_no_exact_float(mode: str, scale: float) -> None:
    """5 scaled by 1.4 is 7, and element 11 of 5 scaled by 2.2 lies on element 5: as PyTorch and onnxruntime compute."""
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode, **how)],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 5, 10])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32([1, 1, scale, scale]), "scales")],
    )
    original = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    imported = mlc.onnx.load(original, batch=2)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 10)).astype(np.float32)
    (ours,) = run_graph(imported, {"x": x}, mlc.Device.cpu())
    model = mlc.onnx.to_model(imported)
    for m in (original, model):
        (y,) = onnxruntime.InferenceSession(m.SerializeToString()).run(["y"], {"x": x})
        assert y.shape[2:] == (round(5 * scale - 0.1), round(10 * scale))
        np.testing.assert_allclose(ours, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "rule", "sizes"),
    [
        ("asymmetric", "round_prefer_ceil", (9, 2)),
        ("asymmetric", "round_prefer_floor", (9, 38)),
        ("asymmetric", "floor", (10, 5)),
        ("align_corners", "floor", (38, 29)),
        ("align_corners", "ceil", (29, 23)),
        ("align_corners", "round_prefer_floor", (29, 4)),
        ("half_pixel", "round_prefer_ceil", (1, 19)),
    ],
)
def test_resize_to_a_size_picks_the_elements_onnxruntime_picks(how: str, rule: str, sizes: tuple[int, int]) -> None:
    """Positions in the middle between two elements, and on one, although the scale is not exact: 7 to 2 elements."""
    given = {"coordinate_transformation_mode": how, "nearest_mode": rule}
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest", **given)],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 5, 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.int64([2, 1, *sizes]), "sizes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    x = np.arange(70, dtype=np.float32).reshape(2, 1, 5, 7)
    (ours,) = run_graph(mlc.onnx.load(model, batch=2), {"x": x}, mlc.Device.cpu())
    (theirs,) = onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": x})
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("scales", [[0.2, 0.25], [0.3, 0.4]])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_to_one_pixel_takes_the_first(mode: str, scales: list[float]) -> None:
    """The specification: a length of 1 lies on element 0."""
    how = {"coordinate_transformation_mode": "pytorch_half_pixel"}
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode, **how)],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 5, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32([1, 1, *scales]), "scales")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    (ours,) = run_graph(mlc.onnx.load(model, batch=2), {"x": x}, mlc.Device.cpu())
    (theirs,) = onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": x})
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(ours, x[:, :, :1, :1], rtol=1e-6)
