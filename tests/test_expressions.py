"""Arithmetic on graph tensors: the same line of code gives what it gives in PyTorch, values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

ROW = np.arange(6, dtype=np.float64) / 3

#: Both libraries take these lines as they are: x, y (4, 6) and w (6, 3); m is mlcompute or PyTorch.
SAME: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "0.5 * x + y": lambda m, x, y, w: 0.5 * x + y,
    "1 - x": lambda m, x, y, w: 1 - x,
    "-x": lambda m, x, y, w: -x,
    "x / y": lambda m, x, y, w: x / (y * y + 1),
    "x / 3": lambda m, x, y, w: x / 3,
    "2 / x": lambda m, x, y, w: 2 / (x * x + 1),
    "x ** 2": lambda m, x, y, w: x**2,
    "2 ** x": lambda m, x, y, w: 2**x,
    "x ** y": lambda m, x, y, w: (x * x + 0.5) ** y,
    "abs(x)": lambda m, x, y, w: abs(x),
    "x % 3": lambda m, x, y, w: x % 3,
    "x % y": lambda m, x, y, w: x % y,
    "x @ w": lambda m, x, y, w: x @ w,
    "x @ w[:, 0]": lambda m, x, y, w: x @ w[:, 0],
    "x[:, 1:]": lambda m, x, y, w: x[:, 1:],
    "x[:, -1]": lambda m, x, y, w: x[:, -1],
    "x[..., None]": lambda m, x, y, w: x[..., None],
    "x[:, ::2]": lambda m, x, y, w: x[:, ::2],
    "x[1:3, -3:-1]": lambda m, x, y, w: x[1:3, -3:-1],
    "x[None, 2]": lambda m, x, y, w: x[None, 2],
    "x.mean(-1)": lambda m, x, y, w: x.mean(-1),
    "x.sum((0, 1))": lambda m, x, y, w: x.sum((0, 1)),
    "x.mean()": lambda m, x, y, w: x.mean(),
    "x.var": lambda m, x, y, w: x.var(1, correction=0),
    "x.var with a correction": lambda m, x, y, w: x.var(-1, correction=1),
    "x.reshape": lambda m, x, y, w: x.reshape(4, 2, -1),
    "x.reshape of a tuple": lambda m, x, y, w: x.reshape((-1, 3)),
    "x.flatten": lambda m, x, y, w: x.reshape(4, 2, 3).flatten(1),
    "x.T": lambda m, x, y, w: x.T,
    "x.transpose": lambda m, x, y, w: x.reshape(4, 2, 3).transpose(1, 2),
    "x.transpose(-1, 0)": lambda m, x, y, w: x.reshape(4, 2, 3).transpose(-1, 0),
    "x.softmax": lambda m, x, y, w: x.softmax(-1),
    "x.log_softmax": lambda m, x, y, w: x.log_softmax(-1),
    "functions": lambda m, x, y, w: (x.exp() + (x * x + 1).log() + (y * y + 1).sqrt()) * x.sigmoid() * y.tanh(),
    "relu and clip": lambda m, x, y, w: x.relu() + y.clip(-0.5, 0.5) + y.clip(0.1),
    "where": lambda m, x, y, w: m.where(x > y, x * 2, y),
    "where with a number": lambda m, x, y, w: m.where(x <= 0.1, x, 0.0),
    "comparisons": lambda m, x, y, w: m.where(((x < y) & (x > -1)) | ~(0 < y), x, y),  # noqa: SIM300  (the number may stand on the left)
    "x[:, [4, 0, 2]]": lambda m, x, y, w: x[:, [4, 0, 2]],
    "x[..., [-1, 1, 1]]": lambda m, x, y, w: x[None, ..., [-1, 1, 1]],
    "chunk": lambda m, x, y, w: x.chunk(2, 1)[1] * 2,
    "split": lambda m, x, y, w: x.split([1, 5], -1)[1] * 2,
    "stack": lambda m, x, y, w: m.stack([x, y, x], -1),
    "gather and argmax": lambda m, x, y, w: x.gather(1, y.argmax(1)[:, None]),
    "detach": lambda m, x, y, w: x.detach() * y,
    "squared error": lambda m, x, y, w: ((x - y) ** 2).mean(),
}


def test_the_same_lines_as_in_pytorch() -> None:
    rng = np.random.default_rng(3)
    shapes = {"x": (4, 6), "y": (4, 6), "w": (6, 3)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    theirs = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    expected = {name: line(torch, *theirs.values()) for name, line in SAME.items()}
    sum((0.1 * number * value.sum() for number, value in enumerate(expected.values())), torch.tensor(0.0)).backward()
    graph = mlc.TrainingGraph()
    ours = {name: graph.input(array.shape, name) for name, array in arrays.items()}
    results = {name: line(mlc, *ours.values()) for name, line in SAME.items()}
    graph.add_inputs(ours)
    graph.add_outputs(results)
    for number, result in enumerate(results.values()):
        graph.minimize(0.1 * number * result.sum())
    graph.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=mlc.Device.cpu())
    graph.bind_and_write_data(arrays, for_inputs=ours, to=mlc.Device.cpu())
    graph.execute_forward().wait()
    graph.execute_gradient().wait()
    for name, result in results.items():
        assert result.shape == (tuple(expected[name].shape) or (1,)), name
        wanted = expected[name].detach().numpy().reshape(result.shape)
        np.testing.assert_allclose(result.data, wanted, rtol=2e-5, atol=2e-6, err_msg=name)
    for name, tensor in ours.items():
        gradient = graph.gradient_tensor(tensor)
        assert gradient is not None
        np.testing.assert_allclose(gradient.data, theirs[name].grad, rtol=1e-4, atol=1e-4, err_msg=name)


def _inputs() -> tuple[mlc.Graph, mlc.Tensor, mlc.Tensor]:
    graph = mlc.Graph()
    return graph, graph.input((4, 6), "x"), graph.input((4, 6), "y")


def test_arrays_and_tensors_with_data_are_operands() -> None:
    graph, x, _ = _inputs()
    weights = mlc.Tensor(shape=(6, 2), fill_with_data=0.5)
    results = {
        "right": x * ROW, "left": ROW * x, "number": np.float32(2) * x, "zero-d": np.array(3) - x,
        "matmul": x @ weights, "rows": np.ones((1, 4), np.int64) @ x,
        "max": mlc.maximum(ROW, x), "compared": mlc.where(ROW > x, 1, 0),  # noqa: SIM300  (an array on the left)
    }  # fmt: skip
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs(results)
    inference.compile(device=mlc.Device.cpu())
    array = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    inference.execute({"x": array}).wait()
    row = ROW.astype(np.float32)
    expected = {
        "right": array * row, "left": row * array, "number": 2 * array, "zero-d": 3 - array,
        "matmul": array @ np.full((6, 2), 0.5, np.float32), "rows": array.sum(0, keepdims=True),
        "max": np.maximum(row, array), "compared": np.where(row > array, 1, 0),
    }  # fmt: skip
    for name, result in results.items():
        np.testing.assert_allclose(result.data, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert [layer.label for layer in graph.layers][:3] == ["multiply1", "multiply2", "multiply3"]
    assert graph.nodes[0].sources[-1].label == "multiply1.constant"


def test_constants_go_with_batches_of_any_size() -> None:
    graph, x, _ = _inputs()
    y = mlc.where(x > 0, 0.5 * x[:, 1:].sum(-1, keepdims=True) + ROW, 1 - x.reshape(4, 2, -1).flatten())[:, -1]
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu())
    array = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    whole = inference.execute({"x": array}).result.data
    assert y.shape == (4,)
    assert np.array_equal(inference.execute({"x": array[:2]}, batch_size=2).result.data, whole[:2])


def test_constants_cost_nothing() -> None:
    """What layers by hand compute in one loop, expressions do too, and a number is no tensor in memory."""
    sizes = []
    for by_hand in (True, False):
        graph = mlc.Graph()
        x = graph.input((64, 1000), "x")
        if by_hand:
            y = graph.activation(graph.activation(x, "linear", scale=0.5, bias=1.0), "tanh")
        else:
            y = (0.5 * x + 1.0).tanh()
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.add_outputs({"y": y})
        inference.compile(device=mlc.Device.cpu())
        program = inference.programs["inference 64"]
        sizes.append((len(program.steps), inference.device_memory_size, len(program.persistent)))
    assert sizes[0] == sizes[1]


def test_saved_loaded_and_exported(tmp_path: Path) -> None:
    graph, x, y = _inputs()
    result = mlc.where(x > 0.5, (1 - x) ** 2 / (y * y + ROW), -x).mean(-1)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x, "y": y})
    inference.add_outputs({"result": result})
    inference.compile(device=mlc.Device.cpu())
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((4, 6)).astype(np.float32), "y": rng.standard_normal((4, 6)).astype(np.float32)}
    inference.execute(data).wait()
    mlc.save(tmp_path / "graph.mlc", inference)
    loaded = mlc.load(tmp_path / "graph.mlc")
    loaded.compile(device=mlc.Device.cpu())
    out = np.empty(4, np.float32)
    loaded.execute(data, outputs_data={"result": out}).wait()
    assert np.array_equal(out, result.data)
    mlc.onnx.save(inference, tmp_path / "graph.onnx")
    back = mlc.onnx.load(tmp_path / "graph.onnx", batch=4)
    again = mlc.InferenceGraph([back])
    again.add_inputs(back.inputs)
    again.add_outputs(back.outputs)
    again.compile(device=mlc.Device.cpu())
    again.execute(data).wait()
    np.testing.assert_allclose(back.outputs["result"].data, result.data, rtol=1e-6)


def test_which_graph_an_expression_is_added_to() -> None:
    graph, x, _ = _inputs()
    bare = mlc.Tensor(shape=(4, 6))
    assert [x.graph, (x + bare).graph, bare.graph] == [graph] * 3
    training = mlc.TrainingGraph([graph])
    label = training.input((4, 6), "label")
    assert [(x - label).graph, (label - x).graph] == [training] * 2
    second = mlc.Graph()
    other = second.input((4, 6), "other")
    with pytest.raises(mlc.GraphError, match="the operands belong to 2 graphs"):
        x + other
    with training:
        assert (x + other).graph is training
    copied = copy.deepcopy(graph)
    assert all(tensor.graph is copied for node in copied.nodes for tensor in (*node.sources, *node.results))


def test_the_maximum_and_its_place_of_pytorch() -> None:
    """q.max(1)[0] is all the largest values there, and the largest of the first sample here."""
    with mlc.Graph() as graph:
        x = graph.input((4, 6), "x")
    for make, meant in (
        (lambda: x.max(1)[0], r"max\(axis\)\[0\] is max\(axis\) alone"),
        (lambda: x.max(1)[1], r"max\(axis\)\[1\] is argmax\(axis\)"),
        (lambda: x.min(1)[1], r"min\(axis\)\[1\] is \(-x\)\.argmax\(axis\)"),
    ):
        with pytest.warns(UserWarning, match=meant):
            make()
    assert [one.shape for one in (x.max()[0], x.max(1)[:1], x.max(1)[2], x.sum(1)[0])] == [(1,)] * 4


def test_backwards_and_lists_of_indices() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 3, 5), "x")
    array = np.arange(60, dtype=np.float32).reshape(4, 3, 5)
    keys: list[Any] = [np.s_[:, ::-1], np.s_[..., 3:0:-2], np.s_[:, 1, ::-1], np.s_[:, [True, False, True]]]
    inference = mlc.InferenceGraph([graph])
    outputs = [x[key] for key in keys]
    inference.add_outputs({str(number): output for number, output in enumerate(outputs)})
    inference.compile(device=mlc.Device.cpu())
    inference.execute({"x": array[:3]}, batch_size=3).wait()
    for output, key in zip(outputs, keys, strict=True):
        np.testing.assert_array_equal(output.data, array[:3][key])
    varying = mlc.Graph()
    with pytest.raises(mlc.ShapeError, match="a run may have another number of elements"):
        varying.input((4, 3), "x", varies=[1])[:, ::-1]
    with pytest.raises(mlc.ShapeError, match=r"(?s)100 pieces along axis 1.*at most 64.*x.gather"):
        varying.input((4, 100), "y")[:, list(range(99, -1, -1))]


REFUSED: dict[str, tuple[Callable[[mlc.Tensor], object], type[Exception], str]] = {
    "no graph": (lambda x: mlc.Tensor(shape=(4, 6)) * 2, mlc.GraphError, "belongs to no graph"),
    "a list": (lambda x: x / [1, 2], TypeError, "unsupported operand"),
    "a string": (lambda x: x * "2", TypeError, "can't multiply|unsupported operand"),
    "a truth": (lambda x: bool(x > 0), mlc.GraphError, "whether it is true is known only when the graph runs"),
    "a chain": (lambda x: 0 < x < 1, mlc.GraphError, "whether it is true"),
    "a loop": (lambda x: list(x), TypeError, "not iterable"),  # type: ignore[call-overload]
    "samples backwards": (lambda x: x[::-1], mlc.ShapeError, "the step along axis 0 is -1, and a run may have another"),
    "two lists": (lambda x: x[[0, 1], [0, 1]], mlc.ShapeError, "a list of indices beside other indices"),
    "outside, in a list": (lambda x: x[:, [0, 6]], mlc.ShapeError, "index 6 along axis 1, which has 6"),
    "a mask": (lambda x: x[np.ones((4, 6), bool)], TypeError, "mlc.where chooses by a condition"),
    "bits": (lambda x: x & 3, TypeError, "& of the tensor 'x', which is FLOAT32: it is for BOOLEAN"),
    "bits of one": (lambda x: ~x, TypeError, r"compare first, as in \(x > 0\)"),
    "nothing": (lambda x: x + None, TypeError, r"unsupported operand type\(s\) for \+"),  # type: ignore[operator]
    "nothing left": (lambda x: x[:, 3:3], mlc.ShapeError, "nothing is left of axis 1"),
    "outside": (lambda x: x[:, 6], mlc.ShapeError, "index 6 along axis 1, which has 6"),
    "too many": (lambda x: x[0, 0, 0], mlc.ShapeError, "3 indices, the tensor has 2 axes"),
    "a tensor": (lambda x: x[:, x], TypeError, r"x.gather\(axis, indices\) picks elements"),  # type: ignore[index]
    "a word": (lambda x: x["a"], TypeError, "a str cannot be an index"),  # type: ignore[index]
    "an axis": (lambda x: x.mean(2), mlc.ShapeError, "dimension is 2, the source has 2 axes"),
    "PyTorch's word for an axis": (lambda x: x.mean(dim=1), TypeError, r"^mean\(\) got .* 'dim': use axis="),  # type: ignore[call-arg]
    "a function of NumPy": (lambda x: np.exp(x), mlc.DataError, r"has no data(?s:.*)x.exp\(\)"),  # type: ignore[arg-type]
    "a reduction of NumPy": (lambda x: np.mean(x), mlc.DataError, r"has no data(?s:.*)x.exp\(\)"),  # type: ignore[arg-type]
    "two dots": (lambda x: x[..., 0, ...], mlc.ShapeError, "more than once"),
    "transpose(0, 1)": (lambda x: x.transpose(0, 1), mlc.ShapeError, "write x.T"),
    "T of three axes": (lambda x: x[..., None].T, mlc.ShapeError, "x.transpose\\(-1, -2\\)"),
    "split of a number": (lambda x: x.split(2, 1), TypeError, "x.chunk\\(2, axis\\)"),  # type: ignore[arg-type]
    "clip without bounds": (lambda x: x.clip(), mlc.ShapeError, "neither low nor high"),
    "unlike shapes": (lambda x: x + np.ones(5), mlc.ShapeError, "have no common shape"),
    "an array of words": (lambda x: x + np.array(["a", "b"]), mlc.DataError, "an array of <U1 beside"),
    "variance of the batch": (lambda x: x.var(0, correction=1), mlc.ShapeError, "a correction of 1"),
    "integers to minimise": (lambda x: x.graph.minimize(x > 0), mlc.DataError, "through which no gradient passes"),  # type: ignore[union-attr]
    "a weight of words": (lambda x: x.graph.minimize(x, weight="1"), TypeError, "weight must be a number"),  # type: ignore[union-attr,arg-type]
    "no tensor": (lambda x: x.graph.minimize(1.0), TypeError, "needs a Tensor"),  # type: ignore[union-attr,arg-type]
    "an empty weight": (lambda x: x.graph.minimize(x, weight=x), mlc.DataError, "has no data"),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    graph, x, _ = _inputs()
    wrong, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says):
        wrong(x)
    assert not any(layer.label.startswith(("add", "split", "objective")) for layer in graph.layers)


def _answer(f: Callable[..., mlc.Tensor], *arrays: Any) -> tuple[Any, str]:
    """What an expression of inputs gives, and its printed program."""
    graph = mlc.Graph()
    inputs = [
        graph.input(array.shape, f"a{k}", data_type=mlc.DataType[array.dtype.name.upper()])
        for k, array in enumerate(arrays)
    ]
    f(*inputs)
    inference = mlc.InferenceGraph([graph])
    inference.compile(device=mlc.Device.cpu())
    result = inference.execute({x.label: array for x, array in zip(inputs, arrays, strict=True)}).result.data
    return result, "".join(map(str, inference.programs.values()))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64"])
def test_quotients_and_remainders_are_those_of_numpy(dtype: str) -> None:
    rng = np.random.default_rng(0)
    large = 2**62 if dtype == "int64" else 2**31 - 1 if dtype == "int32" else 100
    x, y = ((large * rng.uniform(-1, 1, (4, 50))).astype(dtype) for _ in range(2))
    y[0], y[1] = (scale * rng.uniform(-1, 1, 50) for scale in (7, large**0.5))
    y[2] = x[2] + np.asarray(1, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        for ours, theirs in ((lambda a, b: a // b, np.floor_divide), (lambda a, b: a % b, np.remainder)):
            found, program = _answer(ours, x, y)
            np.testing.assert_array_equal(found, theirs(x, y))
            if "engine     cpu" in str(mlc.Platform.describe()):
                assert "NumPy" not in program
            by, of = np.asarray(3, dtype), np.asarray(9, dtype)
            np.testing.assert_array_equal(_answer(lambda a, f=ours: f(a, 3), x)[0], theirs(x, by))
            np.testing.assert_array_equal(_answer(lambda a, f=ours: f(9, a), y)[0], theirs(of, y))


def test_products_with_a_vector() -> None:
    rng = np.random.default_rng(3)
    x, v = rng.standard_normal((2, 4, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    left = rng.standard_normal(4).astype(np.float32)
    for f, given in ((lambda a: a @ v, x), (lambda a: left @ a, x), (lambda a: a @ v, x[0]), (lambda a: v @ a.T, x[0])):
        found, _ = _answer(f, given)
        assert found.shape == f(given).shape
        np.testing.assert_allclose(found, f(given), rtol=1e-5, atol=1e-6)
    assert _answer(lambda a: a @ v, v)[0] == pytest.approx([v @ v])
    graph = mlc.Graph()
    with pytest.raises(mlc.ShapeError):
        graph.input((4, 2), "x") @ v
    assert not graph.layers


def test_a_tensor_takes_the_shape_of_its_data() -> None:
    tensor = mlc.Tensor(data=np.ones((2, 3)))
    assert (tensor.shape, tensor.descriptor.data_type) == ((2, 3), mlc.DataType.FLOAT32)
    assert mlc.Tensor(data=[1, 2], data_type=mlc.DataType.INT64).shape == (2,)
    memory = np.zeros(3, np.float32)
    shared = mlc.Tensor(shared_data=memory)
    memory += 1
    assert shared.data.tolist() == [1, 1, 1]
    with pytest.raises(mlc.DataError, match="float has no shape to be taken over"):
        mlc.Tensor(data=1.0)
    with pytest.raises(mlc.ShapeError, match="the shape comes from nowhere"):
        mlc.Tensor()


def test_inputs_are_declared_once() -> None:
    training = mlc.TrainingGraph(optimizer=mlc.SGDOptimizer(learning_rate=0.1))
    x, t = training.input((4, 3), "x"), training.input((4, 2), "t")
    training.minimize((training.dense(x, 2, name="y") - t) ** 2)
    training.compile(device=mlc.Device.cpu())
    a, b = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    first = training.execute({"x": a, "t": b}).result.data.item()
    assert training.execute({"x": a}, {"t": b}).result.data.item() < first
    with pytest.raises(mlc.DataError, match=r"'u' is not a declared name(.|\n)*x, t"):
        training.execute({"x": a, "u": b})
    training.add_inputs({"x": x}, {"t": t})  # it may still be said
    assert training.execute({"x": a}, {"t": b}).result.data.item() < first
    trainer = mlc.Trainer(training, outputs={"y": training.nodes[0].results[0]})
    assert trainer.fit(a, b, verbose=0)["loss"][0] < first


def test_types_that_meet_become_the_wider_one() -> None:
    """Masks and whole numbers in arithmetic, as in PyTorch; `==` with a number compares, with a tensor it does not."""
    graph = mlc.Graph()
    x, t = graph.input((4, 3), "x"), graph.input((4, 3), "t", data_type=mlc.DataType.INT64)
    mask = t != -100
    outputs = {
        "masked mean": (x * mask).sum() / mask.sum(),
        "share": mask.mean(),
        "difference": x - t,
        "half": t / 2,
        "more": 0.5 + t,
        "larger": mlc.where(x > t, x, t),
        "ones": mlc.where(t == 1, 1.0, 0.0),
        "array": x * (t == np.int64([1, 2, 0])),
    }
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((4, 3)).astype(np.float32), "t": rng.integers(-1, 3, (4, 3))}
    data["t"][1] = -100
    inference = mlc.InferenceGraph([graph])
    inference.add_outputs(outputs)
    inference.compile(device=mlc.Device())
    inference.execute(data)
    a, b = torch.tensor(data["x"]), torch.tensor(data["t"])
    m = b != -100
    expected = [(a * m).sum() / m.sum(), m.float().mean(), a - b, b / 2, 0.5 + b, torch.where(a > b, a, b.float())]
    expected += [(b == 1).float(), a * (b == torch.tensor([1, 2, 0]))]
    for (name, found), value in zip(outputs.items(), expected, strict=True):
        np.testing.assert_allclose(np.array(found.data).reshape(value.shape), value, rtol=1e-6, err_msg=name)
    assert [t, x].index(x) == 1
    assert x != "x"
    assert x != None  # noqa: E711
    assert x in ["x", None, (), x]
    with pytest.raises(TypeError, match=r"not bool; `x == y` asks whether two tensors are the same, x.equal\(y\)"):
        mlc.where(x == t, x, 0.0)  # type: ignore[arg-type]
    before = graph.node_count
    with pytest.raises(mlc.ShapeError):
        x[:2] * mask[:3]
    assert graph.node_count == before + 2


def test_a_constant_mask_chooses(tmp_path: Path) -> None:
    """As torch.where with a mask that is an array: contrastive losses leave out the diagonal with one."""
    graph = mlc.Graph()
    x = graph.input((3, 4), "x")
    mask = np.array([True, False, False, True])
    y = mlc.where(mask, -1.0, x)
    graph.where(~mask[None], y, np.arange(4), name="again")
    assert graph.layers[-1].label == "again"
    data = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    expected = np.where(~mask, data, np.arange(4)).astype(np.float32)
    np.testing.assert_array_equal(graph.predict(data), expected)
    mlc.save(tmp_path / "masks", graph)
    np.testing.assert_array_equal(mlc.load(tmp_path / "masks").predict(data), expected)
    with pytest.raises(mlc.DataError, match=r"(?s)the condition is an array of float64.*mask > 0"):
        mlc.where(np.eye(3), x, 0.0)
    with pytest.raises(TypeError, match="the condition must be a Tensor or an array of booleans, not list"):
        mlc.where([True], x, 0.0)  # type: ignore[arg-type]


def test_what_is_no_operand_is_refused_by_name() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    for other in ("a", [1, 2, 3], None, True):
        with pytest.raises(TypeError, match=r"Tensor\.equal: needs a Tensor, a number or an array, not "):
            x.equal(other)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"Tensor\.not_equal: needs a Tensor"):
            x.not_equal(other)  # type: ignore[arg-type]
    assert (x == "a") is False
    for join in (mlc.concatenate, mlc.stack):
        with pytest.raises(TypeError, match=rf"{join.__name__}: needs a list of Tensors, not one Tensor"):
            join(x, 0)  # type: ignore[arg-type]
    assert graph.nodes == []
