"""RotaryEmbedding of ONNX 1.19: what is read answers as ONNX's own evaluator does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlcompute as mlc


@pytest.mark.parametrize(("shape", "heads"), [((2, 3, 5, 8), 0), ((2, 5, 24), 3)])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("width", "positions"), [(0, True), (4, False)])
def test_values(
    shape: tuple[int, ...], heads: int, interleaved: int, width: int, positions: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    tables = {
        name: rng.standard_normal((50 if positions else 2, *(() if positions else (5,)), (width or 8) // 2))
        for name in ("cos", "sin")
    }
    stored = [numpy_helper.from_array(table.astype(np.float32), name) for name, table in tables.items()]
    if positions:
        stored.append(numpy_helper.from_array(rng.integers(50, size=(2, 5)), "positions"))
    node = helper.make_node(
        "RotaryEmbedding", ["x", *(one.name for one in stored)], ["y"],
        interleaved=interleaved, rotary_embedding_dim=width, num_heads=heads,
    )  # fmt: skip
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([node], "rotary", [x], [y], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "rotary.onnx")
    data = rng.standard_normal(shape).astype(np.float32)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": data})
    found = mlc.onnx.load(tmp_path / "rotary.onnx").predict(data, device=mlc.Device.cpu())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
