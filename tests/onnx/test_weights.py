"""Which stored tensors of a model are trained: what was a parameter is, and what was a constant is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.onnx.imported import ImportedGraph
from tests.onnx.exported import NETWORKS, Llama, Shared, export, ids

ENGINES = {"cpu": mlc.Device.cpu, "reference": lambda: mlc.Device(engine=Reference())}


@pytest.fixture(params=list(ENGINES))
def device(request: pytest.FixtureRequest) -> mlc.Device:
    make: Callable[[], mlc.Device] = ENGINES[request.param]
    return make()


def model_of(nodes: list[onnx.NodeProto], stored: dict[str, object], shape: list[object]) -> onnx.ModelProto:
    """A model from x to y."""
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape).astype(np.float32)


def trained(graph: ImportedGraph, x: object, label: np.ndarray, device: mlc.Device, steps: int = 3) -> list[float]:
    """Some steps with weight decay, which shrinks whatever is taken for a weight."""
    optimizer = mlc.SGDOptimizer(
        mlc.OptimizerDescriptor(
            learning_rate=0.05, regularization_type=mlc.RegularizationType.L2, regularization_scale=0.1
        )
    )
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), optimizer)
    training.add_inputs(graph.inputs, {"label": mlc.Tensor(shape=label.shape)})
    training.compile(device=device)
    name = next(iter(graph.inputs))
    return [training.execute({name: x}, {"label": label}).result.data.item() for _ in range(steps)]


# Networks of PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(NETWORKS))
def test_as_many_numbers_are_trained_as_the_network_had_parameters(name: str) -> None:
    network, x = NETWORKS[name]()
    graph = mlc.onnx.load(export(network, x), batch=4)
    parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert sum(math.prod(t.descriptor.shape) for t in graph.weights.values()) == parameters
    assert not graph.unreached
    assert all(judgement.reason for judgement in graph.judgements.values())


def test_rotary_tables_masks_and_scales_survive_training_with_weight_decay(device: mlc.Device) -> None:
    network = Llama()
    graph = mlc.onnx.load(export(network, ids()), batch=4)
    before = {name: np.array(tensor.data) for name, tensor in graph.weights.items()}
    losses = trained(graph, ids().numpy(), normal(4, 8, 20), device)
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]
    for name, tensor in graph.weights.items():
        assert not np.array_equal(tensor.data, before[name]), name
    reasons = {judgement.reason for judgement in graph.judgements.values() if not judgement.trained}
    assert {"it holds infinities", "one number"} <= reasons


def test_fresh_copies_of_a_layer_are_separate_again(device: mlc.Device) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    network = torch.nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
    x = torch.randn(4, 8, 16)
    model = export(network, x)
    assert len(model.graph.initializer) < 15  # the exporter has merged them
    graph = mlc.onnx.load(model, batch=4)
    assert len(graph.weights) == len(list(network.parameters())) == 60
    assert not graph.tied
    named = {name for name in graph.weights if not name.startswith("onnx::")}
    assert named <= {name for name, _ in network.named_parameters()}
    trained(graph, x.numpy(), normal(4, 8, 16), device)
    first, second = (graph.weights[f"layers.{k}.norm1.bias"].data for k in (0, 1))
    assert not np.array_equal(first, second)
    report = mlc.onnx.doctor(model, batch=4)
    assert "48 weights were stored with equal ones and are separate again" in report.notes or report.copies


def test_a_module_that_is_used_twice_stays_one_module() -> None:
    network = Shared()
    report = mlc.onnx.doctor(export(network, torch.randn(4, 4)), batch=4)
    assert len(report.weights) == len(list(network.parameters()))
    assert set(report.tied) == {"a.weight", "a.bias", "norm.weight", "norm.bias"} & set(report.tied)
    assert "a.weight" in report.tied
    assert "tied: one weight in several places" in str(report)


def test_a_module_that_is_used_twice_for_sequences_stays_one_module() -> None:
    """PyTorch's exporter has folded the transpose of its matrix once for every use."""
    graph = mlc.onnx.load(export(Shared(), torch.randn(4, 3, 4)), batch=4)
    assert sum(math.prod(t.descriptor.shape) for t in graph.weights.values()) == 38
    (matrix,) = (name for name in graph.tied if "MatMul" in name)
    assert len(graph.tied[matrix]) == 2


@pytest.mark.parametrize("kind", ["Gather", "GatherND"])
def test_tables_that_are_looked_up(kind: str) -> None:
    """A codebook is trained however it is looked up; a schedule of noise is not."""
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64), helper.make_node(kind, ["t", "i"], ["y"])]
    assert list(mlc.onnx.load(model_of(nodes, {"t": normal(9, 4)}, [3, 1])).weights) == ["t"]
    assert list(mlc.onnx.load(model_of(nodes, {"t": normal(9)}, [3, 1])).weights) == ["t"]
    schedule = mlc.onnx.load(model_of(nodes, {"t": np.linspace(1e-4, 0.02, 9, dtype=np.float32)}, [3, 1]))
    assert not schedule.weights
    assert schedule.judgements["t"].reason == "its numbers only rise or only fall: a schedule"


def test_a_tied_embedding_stays_tied_or_is_told(device: mlc.Device) -> None:
    table = normal(9, 4)
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "i"], ["e"]),
        helper.make_node("Gemm", ["e", "table"], ["y"], transB=1),
    ]
    graph = mlc.onnx.load(model_of(nodes, {"table": table}, [3]))
    assert list(graph.weights) == ["table"]
    assert [label.split()[0] for label in graph.tied["table"]] == ["Gather", "Gemm"]
    # Stored again by an exporter that has folded the transpose, under a name it made up.
    nodes[2] = helper.make_node("MatMul", ["e", "val_5"], ["y"])
    model = model_of(nodes, {"table": table, "val_5": np.ascontiguousarray(table.T)}, [3])
    graph = mlc.onnx.load(model)
    assert list(graph.weights) == ["table"]
    assert [label.split()[0] for label in graph.tied["table"]] == ["Gather", "MatMul"]
    assert str(graph.judgements["val_5"]) == "weight: 'table' transposed: one weight"
    again = mlc.onnx.load(mlc.onnx.to_model(graph), batch=3)
    for one in (graph, again):
        trained(one, np.float32([1, 4, 4]), normal(3, 9), device)
    np.testing.assert_array_equal(again.weights["table"].data, graph.weights["table"].data)
    apart = mlc.onnx.load(model, trainable="val_5")
    assert list(apart.weights) == ["val_5"]
    nodes[2] = helper.make_node("MatMul", ["e", "head"], ["y"])
    graph = mlc.onnx.load(model_of(nodes, {"table": table, "head": np.ascontiguousarray(table.T)}, [3]))
    assert set(graph.weights) == {"table", "head"}
    assert "'head' is 'table' transposed: here they are trained apart" in graph.notes


# Models by hand -----------------------------------------------------------------------------------------------------


def _after(node: str, *operands: str) -> list[onnx.NodeProto]:
    """A product, then one more operator on its result and a stored tensor."""
    return [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node(node, ["r", *operands], ["y"])]  # fmt: skip


def _after_product(node: str, *operands: str) -> list[onnx.NodeProto]:
    return [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(node, ["h", *operands], ["y"])]


#: Rows (x, y, 1) of an image of 4 x 2.
GRID = np.stack([np.tile(np.linspace(-1, 1, 4), 2), np.repeat([-1.0, 1.0], 4), np.ones(8)], 1).astype(np.float32)
SINE = np.sin(np.outer(np.arange(6), 0.5 ** np.arange(8))).astype(np.float32)
COSINE = np.cos(np.outer(np.arange(6), 0.5 ** np.arange(8))).astype(np.float32)
TRIANGLE = np.triu(np.ones((6, 8), np.float32), 1)

CONSTANTS = {
    "a mask of infinities": (_after("Add", "t"), np.where(TRIANGLE > 0, -np.inf, 0).astype(np.float32), "infinities"),
    "a mask of large numbers": (_after("Add", "t"), -1e9 * TRIANGLE, "mask"),
    "a mask of zeros and ones": (_after("Mul", "t"), TRIANGLE, "whole numbers"),
    "a scale": (_after("Mul", "t"), np.array([0.125], np.float32), "one number"),
    "strides": (_after("Mul", "t"), np.array([8, 8, 8, 16, 16, 16, 32, 32], np.float32), "whole numbers"),
    "a window": (_after("Mul", "t"), np.hanning(8).astype(np.float32), "window"),
    "a table without a name": (_after("Add", "onnx::Add_12"), normal(6, 8), "no name says weight"),
    "a table that is multiplied": (_after("Mul", "t"), normal(6, 8), "no name says weight"),
    "a limit": (_after("Max", "t"), normal(8), "operand of Max on data"),
    "a name": (_after("Mul", "attention_mask"), normal(8), "its name says so"),
    "a mean of the input": (
        [helper.make_node("Sub", ["x", "t"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])],
        normal(8), "an input of the model",
    ),
    "a scale of the input": (
        [helper.make_node("Sub", ["x", "mu"], ["c"]), helper.make_node("Mul", ["c", "t"], ["h"]),
         helper.make_node("MatMul", ["h", "w"], ["y"])],
        normal(8), "an input of the model",
    ),
    "a scale nobody has": (_after("LayerNormalization", "val_2"), np.ones(8, np.float32), "has no scale"),
    "a number that is added": (_after_product("Add", "val_2"), np.float32(1.5), "one number"),
    "a number with an axis that is added": (_after_product("Add", "val_2"), np.float32([1.5]), "one number"),
    "the places of a soft maximum": (_after("MatMul", "t"), np.linspace(-1, 1, 8, dtype=np.float32)[:, None], "steps"),
    "a grid of coordinates": (_after("MatMul", "t"), GRID, "coordinates"),
    "coordinates per channel": (_after("Mul", "t"), np.linspace(0, 3, 8, dtype=np.float32), "coordinates"),
    "slopes of ALiBi": (_after("Mul", "unsqueeze_1"), np.float32([2.0 ** -(k + 1) for k in range(8)]), "slopes"),
    "slopes of heads that are no power of two": (
        _after("Mul", "unsqueeze_1"), np.float32([2.0**-k for k in (1, 2, 3, 4, 5, 6, 0.5, 1.5)]), "slopes",
    ),
    "a start state": (
        [helper.make_node("RNN", ["x3", "wr", "rr", "", "", "t"], ["", "y"], hidden_size=2),],
        normal(1, 6, 2), "is no weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONSTANTS))
def test_a_constant_is_not_trained(name: str) -> None:
    nodes, array, reason = CONSTANTS[name]
    stored = {"w": normal(8, 8), nodes[-1].input[-1] if "of the input" not in name else "t": array}
    if name == "a scale of the input":
        stored["mu"] = normal(8) + 1
    if name == "a start state":
        nodes = [helper.make_node("Unsqueeze", ["x", "axes"], ["x3"]), *nodes]
        stored = {"t": array, "axes": np.array([0]), "wr": normal(1, 2, 8), "rr": normal(1, 2, 2)}
    graph = mlc.onnx.load(model_of(nodes, stored, [6, 8]))
    tensor = next(key for key in stored if key not in ("w", "axes", "wr", "rr", "mu"))
    assert tensor not in graph.weights
    assert reason in graph.judgements[tensor].reason
    assert set(graph.weights) == set(stored) - {tensor, "axes", "mu"}


def test_sines_and_cosines_are_known_by_their_squares() -> None:
    more = [helper.make_node("Mul", ["r", "u"], ["z"]), helper.make_node("Add", ["y", "z"], ["o"])]
    nodes = [*_after("Mul", "t"), *more]
    model = model_of(nodes, {"w": normal(8, 8), "t": SINE, "u": COSINE}, [6, 8])
    model.graph.output[0].name = "o"
    # Named as weights are, so that nothing but the numbers can tell.
    for old, new in (("t", "t.weight"), ("u", "u.weight")):
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
        for tensor in model.graph.initializer:
            tensor.name = new if tensor.name == old else tensor.name
    graph = mlc.onnx.load(model)
    assert list(graph.weights) == ["w"]
    assert graph.judgements["t.weight"].reason == "its numbers are sines and cosines"


WEIGHTS = {
    "a factor of an Einsum": (
        [helper.make_node("MatMul", ["x", "w"], ["h"]),
         helper.make_node("Einsum", ["h", "t"], ["y"], equation="ij,jk")], normal(8, 8) / 2,
    ),
    "a bias": (_after("Add", "t"), normal(8)),
    "a bias of one number": (
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["i"]),
         helper.make_node("Add", ["i", "onnx::Add_7"], ["y"])], np.float32([0.25]),
    ),
    "a scale of few levels": (_after("Mul", "t"), np.float32([-3, -1, 1, 3, 3, -1, 1, 3]) / 7),
    "a bias of zeros": (_after("Add", "t"), np.zeros(8, np.float32)),
    "a scale per channel": (_after("Mul", "t"), np.ones(8, np.float32)),
    "positions with a name": (_after("Add", "pos_embed"), normal(6, 8)),
    "fresh positions": (_after("Add", "onnx::Add_3"), np.zeros((6, 8), np.float32)),
    "a scale with a name": (_after("Mul", "layer.alpha"), np.array([0.1], np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_a_weight_is_trained(name: str, device: mlc.Device) -> None:
    nodes, array = WEIGHTS[name]
    tensor = nodes[-1].input[-1]
    graph = mlc.onnx.load(model_of(nodes, {"w": normal(8, 8), tensor: array}, [6, 8]))
    assert set(graph.weights) == {"w", tensor}
    trained(graph, normal(6, 8), normal(6, 8), device)
    assert not np.array_equal(graph.weights[tensor].data, array)


def test_constant_nodes_are_never_trained() -> None:
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(normal(8, 8), "c"))
    nodes = [constant, helper.make_node("MatMul", ["x", "c"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    model = model_of(nodes, {"w": normal(8, 8)}, [6, 8])
    graph = mlc.onnx.load(model)
    assert list(graph.weights) == ["w"]
    assert str(graph.judgements["c"]) == "constant: a Constant node"
    assert set(mlc.onnx.load(model, trainable=["c", "w"]).weights) == {"c", "w"}


def test_the_caller_says_what_is_trained() -> None:
    model = model_of(_after("Add", "t"), {"w": normal(8, 8), "t": np.full((6, 8), -np.inf, np.float32)}, [6, 8])
    assert list(mlc.onnx.load(model).weights) == ["w"]
    assert list(mlc.onnx.load(model, trainable="t").weights) == ["t"]
    assert set(mlc.onnx.load(model, trainable="*").weights) == {"w", "t"}
    assert list(mlc.onnx.load(model, trainable=lambda name: False if name == "w" else None).weights) == []
    report = mlc.onnx.doctor(model, trainable="t")
    assert report.judgements["w"].reason == report.judgements["t"].reason == "trainable= says so"
    with pytest.raises(mlc.DataError, match="no floating tensor of the model is named like 'head"):
        mlc.onnx.load(model, trainable=["w", "head.*"])


def test_the_doctor_lists_the_guess() -> None:
    text = str(mlc.onnx.doctor(model_of(_after("Mul", "t"), {"w": normal(8, 8), "t": TRIANGLE}, [6, 8])))
    assert "    w: operand 1 of MatMul 'h'" in text.splitlines()
    assert "    t: whole numbers: a mask, strides or positions" in text.splitlines()


def body(*nodes: onnx.NodeProto, inputs: tuple[str, ...] = (), outputs: tuple[str, ...], **stored: object) -> object:
    """The body of a loop or a branch."""
    arrays = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    given, results = ([onnx.ValueInfoProto(name=name) for name in names] for names in (inputs, outputs))
    return helper.make_graph(nodes, "body", given, results, arrays)


def test_what_the_body_of_a_loop_stores_is_one_weight(device: mlc.Device) -> None:
    turn = [helper.make_node("MatMul", ["v", "w"], ["a"]), helper.make_node("Add", ["a", "b"], ["c"]),
            helper.make_node("Tanh", ["c"], ["t"]), helper.make_node("Mul", ["t", "half"], ["o"]),
            helper.make_node("Identity", ["going"], ["go"])]  # fmt: skip
    stored = {"w": normal(8, 8) / 2, "b": normal(8), "half": np.float32(0.5)}
    inner = body(*turn, inputs=("turn", "going", "v"), outputs=("go", "o"), **stored)
    model = model_of([helper.make_node("Loop", ["three", "", "x"], ["y"], body=inner)], {"three": np.array(3)}, [6, 8])
    graph, x = mlc.onnx.load(model), normal(6, 8)
    assert set(graph.weights) == {"w", "b"}
    assert graph.judgements["half"].reason == "one number"
    assert set(mlc.onnx.load(model, trainable="b").weights) == {"b"}
    tensors = [torch.tensor(stored[name], requires_grad=True) for name in ("w", "b")]
    y = torch.tensor(x)
    for _ in range(3):
        y = torch.tanh(y @ tensors[0] + tensors[1]) * 0.5
    ((y - 1) ** 2).mean().backward()
    training = mlc.TrainingGraph(
        [graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN),
        mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=1.0)),
    )  # fmt: skip
    training.add_inputs(graph.inputs, {"label": mlc.Tensor(shape=(6, 8))})
    training.compile(device=device)
    training.execute({"x": x}, {"label": np.ones((6, 8))}).wait()
    for name, tensor in zip(("w", "b"), tensors, strict=True):
        after = (tensor - tensor.grad).detach().numpy()
        np.testing.assert_allclose(graph.weights[name].data.reshape(after.shape), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("condition", [True, False])
def test_branches_may_call_their_weights_alike(condition: bool) -> None:
    branches = {
        f"{which}_branch": body(helper.make_node("MatMul", ["h", "w"], [which]), outputs=(which,), w=normal(8, 8) + k)
        for k, which in enumerate(("then", "else"))
    }
    second = body(helper.make_node("MatMul", ["x", "w"], ["o"]), outputs=("o",), w=normal(8, 8) + 2)
    nodes = [helper.make_node("If", ["yes"], ["h"], then_branch=second, else_branch=second),
             helper.make_node("If", ["condition"], ["y"], **branches)]  # fmt: skip
    graph = mlc.onnx.load(model_of(nodes, {"yes": np.array(True), "condition": np.array(condition)}, [6, 8]))
    assert set(graph.weights) == {"w", "w_2"}
    np.testing.assert_array_equal(graph.weights["w"].data, normal(8, 8) + 2)
    np.testing.assert_array_equal(graph.weights["w_2"].data, normal(8, 8) + (not condition))


# Merged tensors by hand ---------------------------------------------------------------------------------------------


def test_zeros_that_two_layers_share_are_two_biases(device: mlc.Device) -> None:
    nodes = [helper.make_node("Gemm", ["x", "a", "zeros"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
             helper.make_node("Gemm", ["r", "b", "zeros"], ["y"])]  # fmt: skip
    stored = {"a": normal(8, 8), "b": normal(8, 8) + 1, "zeros": np.zeros(8, np.float32)}
    graph = mlc.onnx.load(model_of(nodes, stored, [6, 8]))
    assert len(graph.weights) == 4
    trained(graph, normal(6, 8), normal(6, 8), device)
    (copy,) = graph.copies
    assert not np.array_equal(graph.weights["zeros"].data, graph.weights[copy].data)


def test_zeros_of_one_layer_used_twice_are_one_bias() -> None:
    nodes = [helper.make_node("Gemm", ["x", "a", "zeros"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
             helper.make_node("Gemm", ["r", "a", "zeros"], ["y"])]  # fmt: skip
    graph = mlc.onnx.load(model_of(nodes, {"a": normal(8, 8), "zeros": np.zeros(8, np.float32)}, [6, 8]))
    assert set(graph.weights) == {"a", "zeros"} == set(graph.tied)


def test_copies_of_a_layer_are_known_by_their_names() -> None:
    nodes = [
        helper.make_node("Identity", ["layers.0.weight"], ["layers.1.weight"]),
        helper.make_node("Identity", ["layers.0.weight"], ["head.weight"]),
        helper.make_node("MatMul", ["x", "layers.0.weight"], ["h"]),
        helper.make_node("MatMul", ["h", "layers.1.weight"], ["i"]),
        helper.make_node("MatMul", ["i", "head.weight"], ["y"]),
    ]
    graph = mlc.onnx.load(model_of(nodes, {"layers.0.weight": normal(8, 8)}, [6, 8]))
    assert graph.copies == {"layers.1.weight": "layers.0.weight"}
    assert list(graph.tied) == ["layers.0.weight"]  # with the head: nothing says that those were two


@pytest.mark.parametrize("behind", [False, True])
def test_zeros_of_very_many_layers(behind: bool) -> None:
    """However many uses a tensor has: all are separate, and judging them takes no longer than there are uses."""
    nodes, before, count = [], "x", 300
    for k in range(count):
        bias = f"layers.{k}.bias" if behind else "zeros"
        nodes.append(helper.make_node("Gemm", [before, f"layers.{k}.weight", bias], [f"h{k}"]))
        before = f"h{k}"
    if behind:
        nodes = [helper.make_node("Identity", ["zeros"], [f"layers.{k}.bias"]) for k in range(count)] + nodes
    stored = {"zeros": np.zeros(8, np.float32)} | {f"layers.{k}.weight": normal(8, 8) + k for k in range(count)}
    model = model_of([*nodes, helper.make_node("Relu", [before], ["y"])], stored, [6, 8])
    graph = mlc.onnx.load(model)
    assert len(graph.weights) == 2 * count
