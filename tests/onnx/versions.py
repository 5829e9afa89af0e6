"""Examples of operators as they were in older versions of the standard.

An example of today, of one node, is said in an older version: what was an attribute then becomes one again, and the
version is written down. Whether that is a model is decided by ONNX's checker, what it means by onnxruntime.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.defs
from onnx import helper, numpy_helper

from mlcompute.ops.op import Array
from tests.onnx.suite import Case
from tests.onnx.test_gradients import examples, inputs_of

OLDEST = 9
NEWEST = onnx.defs.onnx_opset_version()
#: Operator -> the version up to which operands were attributes, and their names by number.
WERE_ATTRIBUTES: dict[str, tuple[int, dict[int, str]]] = {
    **dict.fromkeys(("Squeeze", "Unsqueeze", "ReduceSum"), (12, {1: "axes"})),
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
         "ReduceProd", "ReduceSumSquare"), (17, {1: "axes"}),
    ),
    "Slice": (9, {1: "starts", 2: "ends", 3: "axes"}),
    "Clip": (10, {1: "min", 2: "max"}),
    "Pad": (10, {1: "pads", 2: "value"}),
    "Split": (12, {1: "split"}),
    "TopK": (9, {1: "k"}),
    "Dropout": (11, {1: "ratio"}),
    "DFT": (19, {2: "axis"}),
}  # fmt: skip
#: Attributes that say what older versions did anyway.
IMPLIED: dict[str, Any] = {
    "antialias": 0, "coordinate_transformation_mode": "output_half_pixel", "keepdims": 1, "mode": "DCR",
    "num_outputs": None,
}  # fmt: skip


@functools.cache
def versions_of(name: str) -> list[int]:
    """The versions from the oldest that is imported to the newest in which an operator changed."""
    history = {s.since_version for s in onnx.defs.get_all_schemas_with_history() if not s.domain and s.name == name}
    started = max((version for version in history if version <= OLDEST), default=0)
    found = {max(version, OLDEST) for version in history if version >= started}
    return sorted(v for v in found if not onnx.defs.get_schema(name, v, "").deprecated)


def in_version(case: Case, version: int) -> tuple[onnx.ModelProto, dict[str, Array]] | None:
    """A case of one node in another version of the standard, and its inputs; None when it cannot be said so."""
    if len(case.model.graph.node) != 1 or not case.data:
        return None
    given = inputs_of(case)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    node = model.graph.node[0]
    last, attributes = WERE_ATTRIBUTES.get(node.op_type, (0, {}))
    if version <= last and not _move(node, attributes, given):
        return None
    schema = onnx.defs.get_schema(node.op_type, version, "")
    for attribute in list(node.attribute):
        if attribute.name not in schema.attributes:
            said = attribute.s.decode() if attribute.type == attribute.STRING else attribute.i
            if IMPLIED.get(attribute.name, attribute) not in (None, said):
                return None
            node.attribute.remove(attribute)
    for info in list(model.graph.input):
        if info.name not in node.input:
            model.graph.input.remove(info)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", version))
    model.ir_version = 8
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:  # types or operands the version does not know
        return None
    return model, {name: array for name, array in given.items() if name in node.input}


def _move(node: Any, attributes: dict[int, str], given: dict[str, Array]) -> bool:
    """Operands become attributes; False when one has no numbers to move."""
    for index, name in attributes.items():
        if index >= len(node.input) or not node.input[index]:
            continue
        array = given.get(node.input[index])
        if array is None or (array.ndim > 0 and array.size == 0):
            return False
        is_list = name in ("axes", "starts", "ends", "pads", "split")
        numbers = np.atleast_1d(array).tolist()
        node.attribute.append(helper.make_attribute(name, numbers if is_list else numbers[0]))
    kept = [name for index, name in enumerate(node.input) if index not in attributes]
    if node.op_type == "Slice" and len(node.input) > 4:
        if np.any(given[node.input[4]] != 1):
            return False
        kept = kept[:1]
    del node.input[:]
    node.input.extend(kept)
    return True


def examples_in(name: str, version: int) -> Iterator[tuple[Case, onnx.ModelProto, dict[str, Array]]]:
    """Examples of an operator that can be said in a version, smallest first."""
    written = _written(name, version)
    if written is not None:
        yield written, written.model, inputs_of(written)
    for case in examples().get(name, []):
        found = in_version(case, version)
        if found is not None:
            yield case, *found


def _written(name: str, version: int) -> Case | None:
    """Forms today's examples cannot be turned back into."""
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)
    scales = np.array([1, 1, 2, 1.5], np.float32)
    if (name, version) == ("Resize", 10):
        return _case(helper.make_node(name, ["x", "scales"], ["y"], mode="linear"), version, x=x, scales=scales)
    if (name, version) == ("Resize", 11):
        node = helper.make_node(name, ["x", "roi", "scales"], ["y"], mode="linear")
        return _case(node, version, x=x, roi=np.zeros(0, np.float32), scales=scales)
    if (name, version) == ("MeanVarianceNormalization", 13):
        return _case(helper.make_node(name, ["x"], ["y"], axes=[0, 2, 3]), version, x=x)
    return None


def _case(node: onnx.NodeProto, version: int, **arrays: Array) -> Case:
    """A model of one node; x is its input and the rest is stored. Other programs say what it gives."""
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, arrays["x"].shape)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items() if name != "x"]
    graph = helper.make_graph([node], "g", [given], [y], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    return Case(f"{node.op_type} {version}", "node", model, [([arrays["x"]], [])], 1e-3, 1e-6)
