"""Operators whose numbers between integers matter: ONNX's own evaluator judges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from tests.devices.native import only_native
from tests.onnx.backend import run_model

rng = np.random.default_rng(5)
GEMM = [rng.integers(-9, 9, shape) for shape in ((3, 5), (5, 4), (3, 4))]
IMAGE = rng.integers(0, 100, (1, 1, 4, 4))
SCALES = helper.make_tensor("scales", TensorProto.FLOAT, [4], [1, 1, 0.6, 1.7])
INTEGERS = (np.int8, np.int32, np.int64)

CASES: list[tuple[str, list[Any], dict[str, Any], tuple[Any, ...]]] = [
    ("Gemm", GEMM, {"alpha": 0.5, "beta": 0.25}, INTEGERS[1:]),
    ("Gemm", GEMM, {"alpha": 2.0}, INTEGERS[1:]),
    ("MatMul", GEMM[:2], {}, INTEGERS[1:]),
    ("Shrink", [np.arange(-5, 6)], {"bias": 1.5, "lambd": 2.5}, INTEGERS),
    ("ReduceL2", GEMM[:1], {"keepdims": 1}, INTEGERS[1:]),
    ("ArgMax", GEMM[:1], {"axis": 1}, INTEGERS),
    ("Resize", [IMAGE], {"mode": "linear"}, (*INTEGERS, np.uint8)),
    ("Resize", [IMAGE], {"mode": "cubic"}, (*INTEGERS, np.uint8)),
]


@pytest.mark.parametrize(
    ("kind", "arrays", "attributes", "dtype"),
    [(kind, arrays, attributes, dtype) for kind, arrays, attributes, types in CASES for dtype in types],
)
def test_agrees_with_the_evaluator(kind: str, arrays: list[Any], attributes: dict[str, Any], dtype: Any) -> None:
    feeds = {f"x{i}": array.astype(dtype) for i, array in enumerate(arrays)}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info(name, element, array.shape) for name, array in feeds.items()]
    result = TensorProto.INT64 if kind == "ArgMax" else element
    names = [*feeds, "", "scales"] if kind == "Resize" else list(feeds)
    node = helper.make_node(kind, names, ["y"], **attributes)
    stored = [SCALES] if kind == "Resize" else []
    graph = helper.make_graph([node], "one", inputs, [helper.make_tensor_value_info("y", result, None)], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    with only_native():
        (found,), _ = run_model(model, list(feeds.values()), mlc.Device(engine=Cpu(2)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
