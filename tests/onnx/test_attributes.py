"""Attributes and numbers that ONNX's own cases leave out, as onnxruntime computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.onnx.backend import run_model

onnxruntime.set_default_logger_severity(4)


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def of_one_node(
    kind: str, x: Array, stored: list[Any], version: int = 18, outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """A model of one operator on x and stored operands; None is an operand that is not there."""
    names = ["x", *("" if array is None else f"w{k}" for k, array in enumerate(stored))]
    arrays = [numpy_helper.from_array(np.asarray(a), f"w{k}") for k, a in enumerate(stored) if a is not None]
    results = [f"y{k}" for k in range(outputs)]
    given = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    graph = helper.make_graph(
        [helper.make_node(kind, names, results, **attributes)], "one", [given],
        [onnx.ValueInfoProto(name=name) for name in results], arrays,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


def check(kind: str, x: Array, stored: list[Any], version: int = 18, outputs: int = 1, **attributes: Any) -> None:
    model = of_one_node(kind, x, stored, version, outputs, **attributes)
    wanted = onnxruntime.InferenceSession(onnx.shape_inference.infer_shapes(model).SerializeToString()).run(
        None, {"x": x}
    )
    for device in (mlc.Device(engine=Reference()), mlc.Device.cpu()):
        found, _ = run_model(model, [x], device)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", [9, 11, 22])
@pytest.mark.parametrize(("kernel", "stride", "extent"), [(3, 2, 10), (5, 2, 10), (4, 3, 15), (4, 3, 14)])
@pytest.mark.parametrize("padding", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
def test_a_transposed_convolution_of_a_given_size(
    padding: str, kernel: int, stride: int, extent: int, version: int
) -> None:
    """An odd number of elements is cut off: one more at the beginning, unless the padding is SAME_UPPER."""
    given = {"strides": [stride], "output_shape": [extent], "auto_pad": padding}
    check("ConvTranspose", normal(2, 2, 5), [normal(2, 3, kernel)], version, **given)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(
    ("kind", "names", "alpha", "beta"),
    [
        ("LSTM", ["Sigmoid", "Elu", "ScaledTanh"], [0.7, 1.2], [0.8]),
        ("LSTM", ["HardSigmoid", "Tanh", "LeakyRelu"], [0.3, 0.1], [0.4]),
        ("GRU", ["Tanh", "HardSigmoid"], [0.3], [0.4]),
        ("GRU", ["LeakyRelu", "Affine"], [0.1, 0.5], [0.2]),
        ("RNN", ["Elu"], [0.7], None),
    ],
)
def test_activations_take_their_numbers_one_after_the_other(
    kind: str, names: list[str], alpha: list[float], beta: list[float] | None, direction: str
) -> None:
    """The second number may belong to the third activation; and the other direction takes its own."""
    gates, times = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if direction == "bidirectional" else 1
    given: dict[str, Any] = {
        "activations": names * times,
        "activation_alpha": [a + k for k in range(times) for a in alpha],
    }
    if beta:
        given["activation_beta"] = beta * times
    stored = [0.4 * normal(times, 3 * gates, 2), 0.3 * normal(times, 3 * gates, 3)]
    check(kind, normal(4, 2, 2), stored, 22, 2, hidden_size=3, direction=direction, **given)


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(-100, -(2**63), -1), (-(2**63), -(2**63), -2), (-6, -100, -1), (100, -100, -2), (100, 0, -1), (-100, 100, 2)],
)
def test_slices_that_start_before_the_first_element(start: int, end: int, step: int) -> None:
    check("Slice", normal(3, 5), [np.array([start]), np.array([end]), np.array([1]), np.array([step])], 13)


@pytest.mark.parametrize("pads", [[2, -1], [-2, 3], [7, -2], [-1, -1], [4, 6]])
def test_what_is_cut_off_is_not_repeated(pads: list[int]) -> None:
    check("Pad", normal(5), [np.array(pads)], 19, mode="wrap")
