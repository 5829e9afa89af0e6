"""The gradient of every operator that trains agrees with finite differences in float64, on ONNX's own examples."""

from __future__ import annotations

import functools
from collections import defaultdict

import numpy as np
import pytest
from onnx import TensorProto, helper

import mlcompute as mlc
from mlcompute.onnx.rows import ROWS, load_rows
from mlcompute.ops.op import Array
from tests.onnx.numeric import check_gradients
from tests.onnx.suite import BY_NAME, Case, all_cases

load_rows()
#: Every operator that has gradients; `Gradient` itself, loops and sequences are taken apart before this table.
TRAINED = sorted(f"{domain}:{name}" if domain else name for (domain, name), row in ROWS.items() if row.trains)

#: Examples on a jump, or where infinities meet: the difference quotient says nothing.
SKIPPED = ("fullymasked", "nan_robustness", "structural_empty", "padded_kv_bf16", "local_window", "edge_cases")


def _example(name: str, shape: tuple[int, ...], result: tuple[int, ...], **attributes: object) -> Case:
    """A model of one operator on random numbers; only its gradient is asked for."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, result)
    node = helper.make_node(name, ["x"], ["y"], **attributes)
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)])
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return Case(name, "node", model, [([data], [])], 1e-3, 1e-7)


#: Operators ONNX's suite has no example of with floating numbers.
EXTRA = {
    "GlobalLpPool": _example("GlobalLpPool", (2, 3, 4, 5), (2, 3, 1, 1), p=3),
    "ai.onnx.ml:Normalizer": _example("Normalizer", (3, 5), (3, 5), domain="ai.onnx.ml", norm="L2"),
    "ai.onnx.ml:Scaler": _example("Scaler", (3, 5), (3, 5), domain="ai.onnx.ml", offset=[0.5], scale=[2.0] * 5),
    "Trilu": _example("Trilu", (2, 4, 5), (2, 4, 5), upper=0),
}


def inputs_of(case: Case) -> dict[str, Array]:
    stored = {tensor.name for tensor in case.model.graph.initializer}
    names = [info.name for info in case.model.graph.input if info.name not in stored]
    pairs = zip(names, case.data[0][0], strict=False)
    return {name: np.asarray(array) for name, array in pairs if array is not None and not isinstance(array, list)}


@functools.cache
def examples() -> dict[str, list[Case]]:
    """Operator -> cases that use it, smallest first: fewest nodes, then fewest elements."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in all_cases():
        if case.name in BY_NAME or any(word in case.name for word in SKIPPED):
            continue
        for key in {(node.domain, node.op_type) for node in case.model.graph.node}:
            found[":".join(filter(None, key))].append(case)
    for cases in found.values():
        cases.sort(key=lambda case: (len(case.model.graph.node), sum(a.size for a in inputs_of(case).values())))
    found.update({name: [case] for name, case in EXTRA.items()})
    return found


def checked(case: Case) -> int:
    """How many gradients of a case agree; fails when one does not."""
    given = inputs_of(case)
    try:
        graph = mlc.onnx.load(case.model, shapes={n: a.shape for n, a in given.items()}, constants=given)
    except mlc.Error:
        return 0
    agreed, problems = check_gradients(graph, given)
    assert not problems, f"{case.name}: {problems}"
    return agreed


@pytest.mark.parametrize("operator", TRAINED)
def test_gradient(operator: str) -> None:
    agreed = 0
    for tried, case in enumerate(examples()[operator]):
        if tried >= 4 and agreed:
            break
        agreed += checked(case)
    assert agreed, f"no example of {operator} has a gradient"


@pytest.mark.slow
def test_gradients_of_all_cases() -> None:
    agreed = 0
    for case in all_cases():
        if case.name not in BY_NAME and not any(word in case.name for word in SKIPPED):
            agreed += checked(case)
    assert agreed > 2000


def test_a_masked_row_of_attention_has_a_finite_gradient() -> None:
    name = "test_attention_23_boolmask_fullymasked_row_nan_robustness"
    case = next(case for case in all_cases() if case.name == name)
    assert checked(case) >= 3
