"""Tensors of every type through graphs, wherever layers take them, and quantized tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import MEAN, SYNC, Array, cpu, normal, sgd, tensor

T = mlc.DataType
TYPES = [kind for kind in T if kind not in (T.INVALID, T.COUNT)]
INTEGERS = [T.INT8, T.UINT8, T.INT32, T.INT64]


def sample(kind: mlc.DataType, *shape: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if kind == T.BOOLEAN:
        return rng.random(shape) < 0.5
    if kind.is_floating:
        return rng.standard_normal(shape).astype(kind.numpy)
    return rng.integers(0 if kind == T.UINT8 else -20, 20, shape).astype(kind.numpy)


def evaluate(layer: mlc.Layer, *arrays: Array, kinds: list[mlc.DataType]) -> list[Array]:
    """A layer's results, run as training and as inference graph, which must agree."""
    described = mlc.Graph()
    sources = [mlc.Tensor(shape=a.shape, data_type=kind) for a, kind in zip(arrays, kinds, strict=True)]
    described.node(layer, sources=sources)
    results = described.result_tensors(layer)
    names = [f"x{index}" for index in range(len(arrays))]
    answers = []
    for graph in (mlc.InferenceGraph([described]), mlc.TrainingGraph([described])):
        graph.add_inputs(dict(zip(names, sources, strict=True)))
        graph.add_outputs({f"y{index}": result for index, result in enumerate(results)})
        graph.compile(device=cpu())
        graph.execute(dict(zip(names, arrays, strict=True))).wait()
        answers.append([result.data for result in results])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_array_equal(a, b)
    return answers[0]


MOVERS: list[Any] = [
    (lambda: mlc.ReshapeLayer((3, 4)), lambda x: [x.reshape(3, 4)]),
    (lambda: mlc.TransposeLayer((1, 0)), lambda x: [x.T]),
    (lambda: mlc.SplitLayer(split_count=2, dimension=1), lambda x: np.split(x, 2, 1)),
    (lambda: mlc.SliceLayer((0, 1), (4, 3)), lambda x: [x[:, 1:3]]),
]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("make", "oracle"), MOVERS, ids=["reshape", "transpose", "split", "slice"])
def test_layers_that_move_data_take_every_type(make: Any, oracle: Any, kind: mlc.DataType) -> None:
    x = sample(kind, 4, 4) if make().label == "Split" else sample(kind, 4, 3)
    for actual, expected in zip(evaluate(make(), x, kinds=[kind]), oracle(x), strict=True):
        assert actual.dtype == kind.numpy
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_concatenation_and_selection_take_every_type(kind: mlc.DataType) -> None:
    a, b = sample(kind, 2, 3), sample(kind, 2, 3, seed=1)
    (joined,) = evaluate(mlc.ConcatenationLayer(dimension=1), a, b, kinds=[kind, kind])
    assert joined.dtype == kind.numpy
    np.testing.assert_array_equal(joined, np.concatenate([a, b], 1))
    condition = sample(T.BOOLEAN, 2, 3, seed=2)
    (chosen,) = evaluate(mlc.SelectionLayer(), condition, a, b, kinds=[T.BOOLEAN, kind, kind])
    assert chosen.dtype == kind.numpy
    np.testing.assert_array_equal(chosen, np.where(condition, a, b))


@pytest.mark.parametrize("indices", [T.INT32, T.INT64], ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_gather_takes_every_type(kind: mlc.DataType, indices: mlc.DataType) -> None:
    x, places = sample(kind, 3, 4), np.array([[3, 0], [1, 1], [2, 3]], indices.numpy)
    (picked,) = evaluate(mlc.GatherLayer(1), x, places, kinds=[kind, indices])
    assert picked.dtype == kind.numpy
    np.testing.assert_array_equal(picked, np.take_along_axis(x, places.astype(np.int64), 1))


@pytest.mark.parametrize("kind", [T.FLOAT32, T.FLOAT16, T.BFLOAT16, *INTEGERS], ids=lambda kind: kind.name)
def test_arithmetic_keeps_the_type_where_it_is_allowed(kind: mlc.DataType) -> None:
    if not mlc.ArithmeticLayer.supports_data_type(kind, on=cpu()):
        with pytest.raises(mlc.DataError, match="is not supported"):
            mlc.Graph().node(
                mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[mlc.Tensor(shape=(2,), data_type=kind)] * 2
            )
        return
    a, b = sample(kind, 2, 3), sample(kind, 2, 3, seed=1)
    (total,) = evaluate(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), a, b, kinds=[kind, kind])
    assert total.dtype == kind.numpy
    assert_close(total, (a.astype(np.float64) + b.astype(np.float64)).astype(kind.numpy))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_comparison_answers_booleans(kind: mlc.DataType) -> None:
    if not mlc.ComparisonLayer.supports_data_type(kind, on=cpu()):
        pytest.skip("the layer does not take this type")
    a, b = sample(kind, 3, 5), sample(kind, 3, 5, seed=1)
    (equal,) = evaluate(mlc.ComparisonLayer(mlc.ComparisonOperation.EQUAL), a, b, kinds=[kind, kind])
    assert equal.dtype == np.bool_
    np.testing.assert_array_equal(equal, a == b)


@pytest.mark.parametrize("kind", [T.INT8, T.UINT8, T.BOOLEAN], ids=lambda kind: kind.name)
def test_types_a_layer_cannot_take_are_refused_while_building(kind: mlc.DataType) -> None:
    x = mlc.Tensor(shape=(2, 3), data_type=kind)
    for layer in (mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX), mlc.ActivationLayer.relu(), mlc.DropoutLayer(0.5, 0)):
        with pytest.raises(mlc.DataError, match=f"a source of type {kind.name} is not supported"):
            mlc.Graph().node(layer, source=x)
        assert not layer.supports_data_type(kind, on=cpu())
        assert layer.supports_data_type(T.FLOAT32, on=cpu())


# Half precision ----------------------------------------------------------------------------------------------------


def half_net(kind: mlc.DataType, optimizer: mlc.Optimizer) -> tuple[mlc.TrainingGraph, mlc.Tensor, mlc.Tensor]:
    x = mlc.Tensor(shape=(4, 3), data_type=kind)
    t = mlc.Tensor(shape=(4, 2), data_type=kind)
    w = mlc.Tensor(shape=(2, 3), data=normal(2, 3).astype(kind.numpy), data_type=kind)
    b = mlc.Tensor(shape=(2,), data=normal(2, seed=1).astype(kind.numpy), data_type=kind)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), optimizer)
    y = training.node(mlc.FullyConnectedLayer(w, b, d), source=x)
    training.node(mlc.ActivationLayer.tanh(), source=y)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    return training, w, y


HALVES = pytest.mark.parametrize("kind", [T.FLOAT16, T.BFLOAT16], ids=lambda kind: kind.name)


@HALVES
def test_half_precision_computes_in_single_and_rounds(kind: mlc.DataType) -> None:
    half, w16, y16 = half_net(kind, sgd(0.5, momentum_scale=0.5))
    single, w32, y32 = half_net(T.FLOAT32, sgd(0.5, momentum_scale=0.5))
    assert y16.descriptor.data_type == kind
    assert y32.descriptor.data_type == T.FLOAT32
    for step in range(5):
        x, t = normal(4, 3, seed=step).astype(kind.numpy), normal(4, 2, seed=step).astype(kind.numpy)
        loss16 = half.execute({"x": x}, {"t": t}).result.data
        loss32 = single.execute({"x": x.astype(np.float32)}, {"t": t.astype(np.float32)}).result.data
        assert loss16.dtype == kind.numpy
        assert_close(loss16, loss32.astype(kind.numpy), scale=4.0)  # of weights that were rounded after every step
    assert w16.data.dtype == kind.numpy
    assert_close(w16.data, w32.data.astype(kind.numpy), scale=4.0)
    assert [state.length for state in w16.optimizer_data] == [24], "state is kept in float32"


@HALVES
def test_half_precision_split_is_fused(kind: mlc.DataType) -> None:
    results = []
    for split in (False, True):
        training, w, _ = half_net(kind, sgd(0.5, momentum_scale=0.5))
        device = training.device
        x, t = training._definition.declared.inputs["x"], training._definition.declared.labels["t"]
        for step in range(3):
            feeds = {name: normal(4, n, seed=step).astype(kind.numpy) for name, n in (("x", 3), ("t", 2))}
            if split:
                training.bind_and_write_data(feeds, for_inputs={"x": x, "t": t}, to=device)
                training.execute_forward()
                training.execute_gradient()
                training.execute_optimizer_update()
            else:
                training.execute({"x": feeds["x"]}, {"t": feeds["t"]})
        results.append(w.data.copy())
    np.testing.assert_array_equal(results[0], results[1])


# What data may be fed ----------------------------------------------------------------------------------------------


def reader(kind: mlc.DataType) -> mlc.InferenceGraph:
    x = mlc.Tensor(shape=(2, 3), data_type=kind)
    graph = mlc.InferenceGraph()
    graph.node(mlc.ReshapeLayer((6,)), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=cpu())
    return graph


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (T.FLOAT32, np.arange(6.0).reshape(2, 3)),
        (T.FLOAT32, np.arange(6, dtype=np.int64).reshape(2, 3)),
        (T.FLOAT32, np.arange(6, dtype=">f4").reshape(2, 3)),
        (T.FLOAT32, np.arange(6, dtype=np.float16)),
        (T.FLOAT32, [[0, 1, 2], [3, 4, 5]]),
        (T.FLOAT32, np.arange(12, dtype=np.float32)[::2] / 2),
        (T.FLOAT32, np.arange(6, dtype=np.float32)[::-1][::-1]),
        (T.FLOAT32, np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))),
        (T.FLOAT32, np.arange(6, dtype=np.float32).tobytes()),
        (T.FLOAT16, np.arange(6, dtype=np.float32)),
        (T.FLOAT16, np.arange(6).astype(T.BFLOAT16.numpy)),
        (T.BFLOAT16, np.arange(6, dtype=np.float16)),
        (T.BFLOAT16, np.arange(6).astype(T.BFLOAT16.numpy).tobytes()),
        (T.BFLOAT16, mlc.TensorData(np.arange(6).astype(T.BFLOAT16.numpy))),
        (T.INT32, np.arange(6)),
        (T.INT8, np.arange(6, dtype=np.int64)),
        (T.UINT8, np.arange(6, dtype=np.uint32)),
        (T.UINT8, [0, 1, 2, 3, 4, 5]),
        (T.INT64, [0, 1, 2, 3, 4, 5]),
        (T.INT64, memoryview(np.arange(6, dtype=np.int64).tobytes())),
    ],
)
def test_data_that_means_the_same_numbers(kind: mlc.DataType, data: Any) -> None:
    for options in (SYNC, mlc.ExecutionOptions.NONE):
        result = reader(kind).execute({"x": data}, options=options).result.data
        assert result.dtype == kind.numpy
        np.testing.assert_array_equal(result, np.arange(6))


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        (T.INT32, np.arange(6.0), "float64 data for a int32 tensor"),
        (T.INT64, np.arange(6).astype(T.BFLOAT16.numpy), "bfloat16 data for a int64 tensor"),
        (T.BOOLEAN, np.arange(6), "int64 data for a bool tensor"),
        (T.INT8, np.arange(6) * 100, "do not fit into int8"),
        (T.UINT8, np.arange(6), "int64 data for a uint8 tensor"),
        (T.UINT8, np.arange(6, dtype=np.uint32) * 60, "do not fit into uint8"),
        (T.FLOAT32, np.arange(6) * 1j, "complex128 cannot be used"),
        (T.FLOAT32, np.array([object()] * 6), "object cannot be used"),
        (T.FLOAT32, np.array(["1"] * 6), "cannot be used"),
        (T.FLOAT32, np.zeros((3, 2), np.float32), "does not fit the tensor"),
        (T.FLOAT32, np.float32(1), "1 elements were given, 6 are needed"),
        (T.FLOAT32, np.zeros(0, np.float32), "0 elements were given"),
        (T.FLOAT32, np.zeros((0, 3), np.float32), "0 rows were given"),
        (T.FLOAT32, bytes(23), "5 elements were given, 6 are needed"),
        (T.FLOAT32, None, "cannot be used"),
        (T.FLOAT32, [[1, 2], [3]], "cannot be read as an array"),
    ],
)
def test_data_that_does_not(kind: mlc.DataType, data: Any, says: str) -> None:
    with pytest.raises(mlc.DataError, match=says) as refused:
        reader(kind).execute({"x": data})
    assert "InferenceGraph.execute: 'x'" in str(refused.value)


def test_torch_tensors_are_arrays_too() -> None:
    import torch

    result = reader(T.FLOAT32).execute({"x": torch.arange(6.0).reshape(2, 3)}).result.data
    np.testing.assert_array_equal(result, np.arange(6))


# Quantization ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [T.INT8, T.UINT8, T.INT32], ids=lambda kind: kind.name)
def test_quantized_and_back(kind: mlc.DataType) -> None:
    x = tensor(np.float32([-1.25, -0.5, 0.0, 0.124, 0.125, 0.375, 100.0, -100.0]))
    q = x.quantized(kind, scale=0.25, bias=3)
    info = np.iinfo(kind.numpy)
    expected = np.clip(np.rint(x.data.astype(np.float64) / 0.25) + 3, info.min, info.max)
    assert q.descriptor.data_type == kind
    np.testing.assert_array_equal(q.data, expected)
    back = q.dequantized(T.FLOAT32, scale=0.25, bias=3)
    np.testing.assert_array_equal(back.data, (expected - 3) * 0.25)
    alias = q.dequantized(T.FLOAT32, scale=tensor(np.float32([0.25])), zero_point=tensor(np.float32([3])))
    np.testing.assert_array_equal(alias.data, back.data)


def test_quantized_per_channel() -> None:
    x = tensor(normal(2, 3, 4))
    scale, bias = np.float32([0.1, 0.2, 0.05]), np.float32([0, 1, -2])
    q = x.quantized(T.INT8, scale=tensor(scale), bias=tensor(bias), axis=1)
    expected = np.clip(np.rint(x.data.astype(np.float64) / scale[:, None]) + bias[:, None], -128, 127)
    np.testing.assert_array_equal(q.data, expected)
    back = q.dequantized(T.FLOAT32, scale=tensor(scale), bias=tensor(bias), axis=1)
    assert np.abs(back.data - x.data).max() <= 0.1 + 1e-6


def test_quantized_data_moves_through_graphs() -> None:
    """INT8 weights of a table picked by index, then dequantized by the caller."""
    table = normal(5, 3)
    q = tensor(table).quantized(T.INT8, scale=0.02, bias=0)
    places = mlc.Tensor(shape=(2, 3), data_type=T.INT32)
    graph = mlc.InferenceGraph()
    y = graph.gather(0, source=q, indices=places)
    graph.add_inputs({"i": places})
    graph.compile(device=cpu())
    picks = np.int32([[4, 0, 1], [2, 2, 3]])
    result = graph.execute({"i": picks}).result
    assert result.of is y
    assert result.data.dtype == np.int8
    back = mlc.Tensor(shape=(2, 3), data=result.data, data_type=T.INT8).dequantized(T.FLOAT32, scale=0.02, bias=0)
    expected = np.take_along_axis(table, picks.astype(np.int64), 0)
    assert np.abs(back.data - expected).max() <= 0.0101


def test_what_cannot_be_quantized() -> None:
    x = tensor(normal(3))
    with pytest.raises(mlc.DataError, match="is not a quantized type"):
        x.quantized(T.FLOAT16, scale=1.0, bias=0)
    with pytest.raises(mlc.DataError, match="the result is FLOAT32"):
        x.dequantized(T.FLOAT16, scale=1.0, bias=0)
    with pytest.raises(mlc.DataError, match="the tensor is FLOAT32"):
        x.dequantized(T.FLOAT32, scale=1.0, bias=0)
    with pytest.raises(mlc.DataError, match="positive"):
        x.quantized(T.INT8, scale=0.0, bias=0)
    with pytest.raises(mlc.ShapeError, match="name the axis"):
        x.quantized(T.INT8, scale=tensor(normal(3)), bias=0)
    with pytest.raises(mlc.DataError, match="has no data"):
        mlc.Tensor(shape=(3,)).quantized(T.INT8, scale=1.0, bias=0)


def test_adam_on_half_precision_parameters_moves_by_the_learning_rate() -> None:
    """In float16 the second moment of a gradient of 0.005 would vanish; with float32 state every step is about lr."""
    w = mlc.Tensor(shape=(1, 1), data=np.zeros((1, 1), np.float16), data_type=T.FLOAT16)
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=1, output_feature_channel_count=1)
    x = mlc.Tensor(shape=(1, 1), data_type=T.FLOAT16)
    graph = mlc.TrainingGraph([], optimizer=mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=2.0**-10)))
    y = graph.node(mlc.FullyConnectedLayer(w, None, sizes), source=x)
    gradient = graph.allocate_user_gradient(y)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    for _ in range(64):
        graph.bind_and_write_data(
            {"x": np.ones((1, 1), np.float16), "g": np.full((1, 1), 0.005, np.float16)},
            for_inputs={"x": x, "g": gradient},
            to=graph.device,
        )
        graph.execute_forward()
        graph.execute_gradient()
        graph.execute_optimizer_update()
    assert w.data.item() == pytest.approx(-64 * 2.0**-10, rel=2e-3)


def test_what_only_floats_have_says_how_to_get_them() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 3), "x", data_type=mlc.DataType.INT32)
    for call in (x.sum, x.max, lambda: abs(x), lambda: x**2, x.exp, lambda: x @ x):
        with pytest.raises(mlc.DataError, match=r"(?s)INT32.*fix .*graph\.cast\(x, mlc\.DataType\.FLOAT32\)"):
            call()
    assert len(graph.nodes) == 0
