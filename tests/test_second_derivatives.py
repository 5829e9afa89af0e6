"""Gradients as tensors of the graph, and gradients of those, against PyTorch's create_graph=True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.lower import Lowering
from mlcompute.ops.op import Value
from tests.harness import check_gradients

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32) * 0.7


def weights(*shape: int) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, data=numbers(*shape))


def run(build: Callable[[mlc.Graph, mlc.Tensor], mlc.Tensor], x: Array) -> tuple[Array, list[Array], list[mlc.Tensor]]:
    """The loss that `build` makes of x, and its gradient with respect to every parameter."""
    graph = mlc.Graph()
    given = graph.input(x.shape, "x")
    loss = build(graph, given)
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": given})
    training.compile(device=mlc.Device.cpu())
    training.bind_and_write_data({"x": x}, for_inputs={"x": given}, to=training.device)  # type: ignore[arg-type]
    training.execute_forward()
    value = np.array(loss.data)
    training.execute_gradient()
    owners = [(slot.tensor, layer) for layer in graph.layers for slot in layer.parameters.values()]
    found = [training.gradient_data(tensor, layer) for tensor, layer in owners]
    tensors = [tensor for tensor, _ in owners]
    filled = [np.zeros(t.descriptor.shape) if a is None else np.array(a) for a, t in zip(found, tensors, strict=True)]
    return value, filled, tensors


def squared(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    zeros = mlc.Tensor(shape=x.descriptor.shape, data=np.zeros(x.descriptor.shape, np.float32))
    return graph.loss(x, zeros, "mse", reduction="sum")


def twins(tensors: list[mlc.Tensor]) -> list[torch.Tensor]:
    return [torch.tensor(np.array(t.data), dtype=torch.float64, requires_grad=True) for t in tensors]


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "soft_plus": F.softplus,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradient_penalty_of_a_dense_network(kind: str) -> None:
    x = numbers(6, 5)

    def build(graph: mlc.Graph, given: mlc.Tensor) -> mlc.Tensor:
        h = graph.dense(given, 7, activation=kind)
        score = graph.dense(graph.dense(h, 4, activation=kind), 1)
        return squared(graph, graph.gradient(score, given))

    value, found, tensors = run(build, x)
    act = ACTIVATIONS[kind]
    w1, b1, w2, b2, w3, b3 = own = twins(tensors)
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    score = act(act(given @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
    (dx,) = torch.autograd.grad(score.sum(), given, create_graph=True)
    loss = (dx**2).sum()
    np.testing.assert_allclose(value.ravel()[0], loss.item(), rtol=1e-4)
    expected = torch.autograd.grad(loss, own, allow_unused=True)
    for mine, theirs in zip(found, expected, strict=True):
        reference = np.zeros_like(mine) if theirs is None else theirs.numpy()
        np.testing.assert_allclose(mine, reference.reshape(mine.shape), rtol=1e-3, atol=1e-4)


def test_wgan_gp_with_convolutions() -> None:
    x = numbers(3, 2, 6, 6)

    def build(graph: mlc.Graph, given: mlc.Tensor) -> mlc.Tensor:
        h = graph.convolution(given, 4, kernel=3, stride=2, padding="valid", activation="tanh")
        h = graph.convolution(h, 3, kernel=2, padding="valid", activation="soft_plus")
        score = graph.dense(graph.flatten(h), 1)
        dx = graph.gradient(score, given)
        norm = graph.arithmetic("sqrt", graph.reduce(graph.multiply(dx, dx), "sum", dimensions=(1, 2, 3)))
        ones = mlc.Tensor(shape=(3, 1, 1, 1), data=np.ones((3, 1, 1, 1), np.float32))
        return graph.loss(norm, ones, "mse")

    value, found, tensors = run(build, x)
    w1, b1, w2, b2, w3, b3 = own = twins(tensors)
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    h = torch.tanh(F.conv2d(given, w1.reshape(4, 2, 3, 3), b1.ravel(), stride=2))
    h = F.softplus(F.conv2d(h, w2.reshape(3, 4, 2, 2), b2.ravel()))
    score = h.flatten(1) @ w3.reshape(1, -1).T + b3
    (dx,) = torch.autograd.grad(score.sum(), given, create_graph=True)
    loss = ((dx.flatten(1).norm(dim=1) - 1) ** 2).mean()
    np.testing.assert_allclose(value.ravel()[0], loss.item(), rtol=1e-4)
    expected = torch.autograd.grad(loss, own, allow_unused=True)
    for mine, theirs in zip(found, expected, strict=True):
        reference = np.zeros(mine.size) if theirs is None else theirs.numpy()
        np.testing.assert_allclose(mine.ravel(), reference.ravel(), rtol=1e-3, atol=1e-4)


def test_a_physics_informed_network_learns_an_oscillation() -> None:
    """u'' = -u with u(0) = 0 and u'(0) = 1: the sine."""
    t = np.linspace(0, 2, 32, dtype=np.float32).reshape(-1, 1)
    graph = mlc.Graph()
    x = graph.input((32, 1), "t")
    u = graph.dense(graph.dense(graph.dense(x, 16, activation="tanh"), 16, activation="tanh"), 1, name="u")
    du = graph.gradient(u, x)
    residual = graph.add(graph.gradient(du, x), u)
    zeros = mlc.Tensor(shape=(32, 1), data=np.zeros((32, 1), np.float32))
    graph.loss(residual, zeros, "mse", name="equation")
    for value, start, name in ((u, 0.0, "place"), (du, 1.0, "speed")):
        first = graph.slice(value, (0, 0), (1, 1))
        graph.loss(first, mlc.Tensor(shape=(1, 1), data=np.full((1, 1), start, np.float32)), "mse", name=name)
    adam = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01))
    training = mlc.TrainingGraph([graph], None, adam)
    training.add_inputs({"t": x})
    training.add_outputs({"u": u})
    training.compile(device=mlc.Device.cpu())
    for _ in range(1000):
        training.execute({"t": t})
    training.wait()
    assert np.abs(np.array(u.data) - np.sin(t)).max() < 0.02


WINDOW = {"strides": (1, 1), "dilations": (1, 1), "padding": (0, 1, 1, 0)}
OPS: dict[str, tuple[Callable[..., Value], list[tuple[int, ...]]]] = {
    "matmul": (lambda a, b: ops.tanh(ops.matmul(a, b)), [(3, 4), (4, 2)]),
    "softmax": (lambda x: ops.softmax(x, 1) * x, [(3, 4)]),
    "log_softmax": (lambda x: ops.log_softmax(x, 0) * x, [(3, 4)]),
    "normalize": (lambda x, w: ops.normalize(x, (1,), 1e-3)[0] * w, [(3, 5), (3, 5)]),
    "convolution": (lambda x, w: ops.sigmoid(ops.convolution(x, w, groups=1, **WINDOW)), [(2, 2, 4, 4), (3, 2, 2, 2)]),
    "max_pool": (lambda x: ops.exp(ops.max_pool(x, (2, 2), **WINDOW)), [(1, 2, 4, 4)]),
    "sum_pool": (lambda x: ops.sin(ops.sum_pool(x, (2, 2), **WINDOW)), [(1, 2, 4, 4)]),
    "attention": (lambda q, k, v: ops.attention(q, k, v, scale=0.5), [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)]),
    "take": (lambda x: ops.cos(ops.take(x, x.trace.constant(np.array([0, 2, 0])), 0)), [(3, 2)]),
    "gather": (lambda x: ops.sin(ops.gather(x, x.trace.constant(np.array([[0, 2]])), 1)), [(2, 3)]),
    "concatenate": (lambda a, b: ops.pow_(ops.concatenate([a, b], 1), 3.0), [(2, 3), (2, 1)]),
    "pad and slice": (lambda x: ops.exp(ops.slice_axis(ops.pad(x, (1, 0), (0, 1), 2.0), 0, 1, 3)), [(2, 3)]),
    "reductions": (lambda x: ops.sqrt(ops.sum_(x * x, (1,)) + 1.0) * ops.max_(x, (1,)), [(3, 4)]),
    "division": (lambda a, b: a / (b * b + 1.0), [(3, 4), (1, 4)]),
    "activations": (lambda x: ops.softplus(x) + ops.erf(x) * ops.atan(x) + ops.log1p(x * x), [(3, 4)]),
    "cross entropy": (lambda x: ops.softmax_cross_entropy(x, x.trace.constant(np.array([[0], [3]])), 1)[0], [(2, 4)]),
}


def once(fn: Callable[..., Value]) -> Callable[..., list[Value]]:
    """The gradients of a function of values, as the compiler makes them where they are differentiated again."""

    def described(*values: Value) -> list[Value]:
        return Lowering(training=True, trace=values[0].trace).gradient(mlc.GradientLayer(), fn(*values), values)

    return described


@pytest.mark.parametrize("name", OPS)
def test_second_derivatives_agree_with_differences(name: str) -> None:
    fn, shapes = OPS[name]
    rng = np.random.default_rng(4)
    check_gradients(once(fn), *(rng.standard_normal(shape) for shape in shapes))


def test_of_several_and_of_parameters() -> None:
    graph = mlc.Graph()
    a, b = graph.input((2, 3), "a"), graph.input((2, 3), "b")
    w = weights(4, 3)
    y = graph.dense(graph.multiply(a, b), 4, weights=w, biases=False)
    da, db, dw = graph.gradient(y, [a, b, w])
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"a": a, "b": b})
    inference.add_outputs({"da": da, "db": db, "dw": dw})
    inference.compile(device=mlc.Device.cpu())
    one, two = numbers(2, 3), numbers(2, 3)
    inference.execute({"a": one, "b": two}).wait()
    total = np.array(w.data).sum(0)
    np.testing.assert_allclose(np.array(da.data), two * total, rtol=1e-5)
    np.testing.assert_allclose(np.array(db.data), one * total, rtol=1e-5)
    np.testing.assert_allclose(np.array(dw.data), np.tile((one * two).sum(0), (4, 1)), rtol=1e-5)


def test_an_op_that_cannot_be_differentiated_twice_is_named() -> None:
    spelled = mlc.Tensor(shape=(2, 1), data=np.ones((2, 1), np.int32), data_type=mlc.DataType.INT32)
    for build, says in (
        (lambda g, x: g.lstm(x, 3, name="memory"), "layer 'memory': lstm_gradient has no derivative"),
        (lambda g, x: g.ctc_loss(x, spelled, name="ctc"), "layer 'ctc': the gradient of ctc_loss has no derivative"),
    ):
        graph = mlc.Graph()
        x = graph.input((2, 3, 4), "x")
        squared(graph, graph.gradient(build(graph, x), x))
        training = mlc.TrainingGraph([graph])
        training.add_inputs({"x": x})
        with pytest.raises(mlc.CompileError, match=says):
            training.compile(device=mlc.Device.cpu())


def test_refusals() -> None:
    graph = mlc.Graph()
    x, other = graph.input((2, 3), "x"), graph.input((2, 3), "other")
    y = graph.dense(x, 4)
    squared(graph, graph.gradient(y, other))
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": x, "other": other})
    with pytest.raises(mlc.CompileError, match="'gradient1': what is differentiated does not depend on tensor 0"):
        training.compile(device=mlc.Device.cpu())
    with pytest.raises(mlc.DataError, match="INT32 is not supported"):
        mlc.Graph().gradient(y, mlc.Tensor(shape=(2,), data_type=mlc.DataType.INT32))


def test_saved_and_loaded(tmp_path: Any) -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    u = graph.dense(graph.dense(x, 4, activation="tanh"), 1)
    squared(graph, graph.gradient(u, x))
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": x})
    training.compile(device=mlc.Device.cpu())
    mlc.save(tmp_path / "graph.mlc", training)
    loaded = mlc.load(tmp_path / "graph.mlc")
    assert isinstance(loaded, mlc.TrainingGraph)
    loaded.compile(device=mlc.Device.cpu())
    given = numbers(2, 3)
    one, two = (np.array(each.execute({"x": given}).result.data) for each in (training, loaded))  # type: ignore[union-attr]
    np.testing.assert_array_equal(one, two)


def test_the_library_checks_them_too() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    u = graph.dense(graph.dense(x, 4, activation="tanh"), 1)
    squared(graph, graph.gradient(u, x))
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": x})
    training.compile(device=mlc.Device.cpu())
    report = mlc.check_gradients(training, {"x": numbers(2, 3)})
    assert report, str(report)


def test_a_smaller_batch() -> None:
    graph = mlc.Graph()
    x = graph.input((6, 3), "x")
    u = graph.dense(graph.dense(x, 4, activation="tanh"), 1)
    dx = graph.gradient(u, x)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"dx": dx})
    inference.compile(device=mlc.Device.cpu())
    given = numbers(6, 3)
    all_, few = np.zeros((6, 3), np.float32), np.zeros((2, 3), np.float32)
    inference.execute({"x": given}, outputs_data={"dx": all_}).wait()
    inference.execute({"x": given[:2]}, outputs_data={"dx": few}, batch_size=2).wait()
    np.testing.assert_allclose(few, all_[:2], rtol=1e-5)


def test_a_gradient_of_ones_that_nothing_else_reads() -> None:
    """It is a view of a constant that no kernel knows."""
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    ones = graph.gradient(x, x)
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": x})
    training.add_outputs({"ones": ones})
    training.compile(device=mlc.Device.cpu())
    for options in (mlc.ExecutionOptions.NONE, mlc.ExecutionOptions.FORWARD_FOR_INFERENCE):
        found = np.zeros((2, 3), np.float32)
        training.execute({"x": numbers(2, 3)}, outputs_data={"ones": found}, options=options).wait()
        np.testing.assert_array_equal(found, 1.0)
