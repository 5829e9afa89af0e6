"""Builders: the layers they make are PyTorch's modules when the weights are, and their mistakes are explained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

Build = Callable[[mlc.Graph, mlc.Tensor], mlc.Tensor]


def parameters_of(graph: mlc.Graph) -> dict[str, mlc.Tensor]:
    return {f"{layer.label}.{slot}": p.tensor for layer in graph.layers for slot, p in layer.parameters.items()}


def give(parameters: list[mlc.Tensor], arrays: list[torch.Tensor]) -> None:
    """Copy a module's weights into a graph's tensors, in the graph's order."""
    assert len(parameters) == len(arrays)
    for tensor, array in zip(parameters, arrays, strict=True):
        assert tensor.data is not None
        tensor.data = array.detach().numpy().reshape(tensor.descriptor.shape)


def compare(build: Build, module: torch.nn.Module, x: np.ndarray, order: Callable[[Any], list[torch.Tensor]]) -> None:
    """The same result and the same gradients of input and parameters as the module."""
    graph = mlc.Graph()
    source = graph.input(x.shape, "x")
    y = build(graph, source)
    parameters = list(parameters_of(graph).values())
    give(parameters, order(module))

    given = torch.tensor(x, requires_grad=True)
    expected = module(given)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert y.descriptor.shape == tuple(expected.shape)
    slope = np.random.default_rng(1).standard_normal(y.descriptor.shape).astype(np.float32)
    expected.backward(torch.tensor(slope))

    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": source})
    fed = training.allocate_user_gradient(y)
    training.compile(device=mlc.Device.cpu(), options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS)
    data = {"x": x, "slope": slope}
    training.bind_and_write_data(data, for_inputs={"x": source, "slope": fed}, to=mlc.Device.cpu())
    result = training.execute_forward().result
    assert result is not None
    np.testing.assert_allclose(y.data, expected.detach().numpy(), rtol=2e-4, atol=2e-5)
    training.execute_gradient().wait()
    gradient = training.gradient_tensor(source)
    assert gradient is not None
    np.testing.assert_allclose(gradient.data, given.grad, rtol=2e-3, atol=2e-4)
    gradients = order({name: p.grad for name, p in module.named_parameters()})
    for (name, tensor), wanted in zip(parameters_of(graph).items(), gradients, strict=True):
        layer = graph.layer(name.split(".")[0])
        found = training.gradient_data(tensor, layer)
        assert found is not None
        np.testing.assert_allclose(found.ravel(), wanted.numpy().ravel(), rtol=2e-3, atol=2e-4, err_msg=name)


def plain(given: Any) -> list[torch.Tensor]:
    return list(given.values() if isinstance(given, dict) else given.parameters())


def gamma_last(given: Any) -> list[torch.Tensor]:
    weight, bias = plain(given)
    return [bias, weight]


def gates(given: Any) -> list[torch.Tensor]:
    """PyTorch stacks i, f, g, o and has two biases per layer; here the second is left out (it is zero)."""
    found = given if isinstance(given, dict) else dict(given.named_parameters())
    names = sorted((name for name in found if "weight_ih" in name), key=lambda name: ("reverse" in name, name))
    lists = [[found[n.replace("weight_ih", slot)] for n in names] for slot in ("weight_ih", "weight_hh", "bias_ih")]
    return [gate for stacked in lists for tensor in stacked for gate in tensor.chunk(4)]


def projections(given: Any) -> list[torch.Tensor]:
    found = given if isinstance(given, dict) else dict(given.named_parameters())
    weights = [*found["in_proj_weight"].chunk(3), found["out_proj.weight"]]
    return [*weights, *found["in_proj_bias"].chunk(3), found["out_proj.bias"]]


def lstm(*args: Any, **options: Any) -> torch.nn.Module:
    module = torch.nn.LSTM(*args, batch_first=True, **options)
    for name, parameter in module.named_parameters():
        if "bias_hh" in name:
            torch.nn.init.zeros_(parameter)
    return module


class SelfAttention(torch.nn.MultiheadAttention):
    """A module of one argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


CASES: dict[str, tuple[Build, torch.nn.Module, tuple[int, ...], Any]] = {
    "convolution": (
        lambda g, x: g.convolution(x, 6, 3, stride=2, padding=1, dilation=1),
        torch.nn.Conv2d(4, 6, 3, stride=2, padding=1),
        (2, 4, 9, 7),
        plain,
    ),
    "convolution same": (
        lambda g, x: g.convolution(x, 6, (3, 5), groups=2, activation="relu"),
        torch.nn.Sequential(torch.nn.Conv2d(4, 6, (3, 5), padding="same", groups=2), torch.nn.ReLU()),
        (2, 4, 9, 7),
        plain,
    ),
    "convolution valid, no biases": (
        lambda g, x: g.convolution(x, 5, 3, padding="valid", dilation=2, biases=False),
        torch.nn.Conv2d(4, 5, 3, dilation=2, bias=False),
        (2, 4, 9, 7),
        plain,
    ),
    "depthwise": (
        lambda g, x: g.depthwise_convolution(x, 2, 3, activation="tanh"),
        torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1, groups=4), torch.nn.Tanh()),
        (2, 4, 6, 5),
        plain,
    ),
    "dense": (lambda g, x: g.dense(x, 5), torch.nn.Linear(7, 5), (3, 7), plain),
    "dense on sequences": (
        lambda g, x: g.dense(x, 5, activation="gelu"),
        torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.GELU("tanh")),
        (3, 4, 7),
        plain,
    ),
    "max pool": (lambda g, x: g.pool(x), torch.nn.MaxPool2d(2), (2, 3, 7, 6), plain),
    "average pool": (
        lambda g, x: g.pool(x, 3, stride=2, kind="average", padding=1, count_includes_padding=True),
        torch.nn.AvgPool2d(3, 2, 1),
        (2, 3, 7, 6),
        plain,
    ),
    "global pool, dense": (
        lambda g, x: g.flatten(g.dense(g.global_pool(x), 5)),
        torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 5)),
        (2, 3, 7, 6),
        plain,
    ),
    "batch norm": (lambda g, x: g.normalize(x), torch.nn.BatchNorm2d(3), (4, 3, 5, 5), gamma_last),
    "layer norm": (lambda g, x: g.normalize(x, "layer"), torch.nn.LayerNorm(8), (4, 3, 8), gamma_last),
    "layer norm over two axes": (
        lambda g, x: g.normalize(x, "layer", trailing_axes=2),
        torch.nn.LayerNorm((3, 8)),
        (4, 3, 8),
        gamma_last,
    ),
    "group norm": (lambda g, x: g.normalize(x, "group", groups=2), torch.nn.GroupNorm(2, 6), (3, 6, 4, 4), gamma_last),
    "instance norm": (
        lambda g, x: g.normalize(x, "instance"),
        torch.nn.InstanceNorm2d(6, affine=True),
        (3, 6, 4, 4),
        gamma_last,
    ),
    "lstm": (lambda g, x: g.lstm(x, 5), lstm(3, 5), (2, 6, 3), gates),
    "stacked lstm in both directions": (
        lambda g, x: g.lstm(x, 4, layers=2, bidirectional=True),
        lstm(3, 4, num_layers=2, bidirectional=True),
        (2, 6, 3),
        gates,
    ),
    "attention": (lambda g, x: g.attention(x, heads=2), SelfAttention(8, 2, batch_first=True), (2, 5, 8), projections),
    "leaky relu": (
        lambda g, x: g.activation(x, "leaky_relu", negative_slope=0.3),
        torch.nn.LeakyReLU(0.3),
        (3, 4),
        plain,
    ),
    "softmax": (lambda g, x: g.softmax(x), torch.nn.Softmax(dim=1), (3, 4), plain),
    "log softmax": (
        lambda g, x: g.softmax(x, dimension=2, logarithm=True),
        torch.nn.LogSoftmax(dim=2),
        (3, 4, 5),
        plain,
    ),
    "flatten": (lambda g, x: g.flatten(x), torch.nn.Flatten(), (3, 4, 5), plain),
    "pad": (lambda g, x: g.pad(x, (1, 2, 0, 3)), torch.nn.ZeroPad2d((0, 3, 1, 2)), (2, 3, 4, 5), plain),
    "reflect": (lambda g, x: g.pad(x, 2, kind="reflect"), torch.nn.ReflectionPad2d(2), (2, 3, 4, 5), plain),
    "upsample": (
        lambda g, x: g.upsample(x, (2, 3), kind="linear", aligns_corners=True),
        torch.nn.Upsample(scale_factor=(2, 3), mode="bilinear", align_corners=True),
        (2, 3, 4, 5),
        plain,
    ),
    "upsample to a size": (
        lambda g, x: g.upsample(x, size=(8, 5)),
        torch.nn.Upsample(size=(8, 5)),
        (2, 3, 4, 5),
        plain,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_builders_against_pytorch(name: str) -> None:
    build, module, shape, order = CASES[name]
    compare(build, module, np.random.default_rng(0).standard_normal(shape).astype(np.float32), order)


def test_transposed_convolution_against_pytorch() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3, 5, 5))
    y = graph.convolution(x, 4, 3, stride=2, padding=1, transposed=True, name="up")
    module = torch.nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
    weights, biases = parameters_of(graph).values()
    weights.data = module.weight.detach().numpy().transpose(1, 0, 2, 3)  # (out, in, h, w) here
    biases.data = module.bias.detach().numpy()
    data = np.random.default_rng(0).standard_normal((2, 3, 5, 5)).astype(np.float32)
    np.testing.assert_allclose(run(graph, {"x": x}, {"x": data}, y), module(torch.tensor(data)).detach(), atol=1e-5)


def test_embedding_against_pytorch() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 5), "tokens", data_type=mlc.DataType.INT32)
    y = graph.embedding(x, 11, 4, padding_index=0, name="table")
    indices = np.random.default_rng(0).integers(0, 11, (2, 5)).astype(np.int32)
    weights = graph.layer("table").weights.data  # type: ignore[attr-defined]
    assert not weights[0].any()
    expected = torch.nn.functional.embedding(torch.tensor(indices), torch.tensor(weights), padding_idx=0)
    np.testing.assert_array_equal(run(graph, {"x": x}, {"x": indices}, y), expected.numpy())


def run(graph: mlc.Graph, inputs: dict[str, mlc.Tensor], data: dict[str, np.ndarray], wanted: mlc.Tensor) -> np.ndarray:
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs(inputs)
    inference.add_outputs({"wanted": wanted})
    inference.compile(device=mlc.Device.cpu())
    inference.execute(data).wait()
    assert wanted.data is not None
    return wanted.data


def test_lstm_of_sequences_of_different_lengths_and_its_last_output() -> None:
    graph = mlc.Graph()
    x = graph.input((3, 6, 2), "x")
    lengths = graph.input((3,), "lengths", data_type=mlc.DataType.INT32)
    y = graph.lstm(x, 5, lengths=lengths, returns_sequences=False, name="memory")
    assert y.descriptor.shape == (3, 5)
    assert [layer.label for layer in graph.layers] == ["memory", "memory_last"]
    module = lstm(2, 5)
    give(list(parameters_of(graph).values()), gates(module))
    data = np.random.default_rng(0).standard_normal((3, 6, 2)).astype(np.float32)
    found = run(graph, {"x": x, "l": lengths}, {"x": data, "l": np.int32([6, 2, 4])}, y)
    for row, length in enumerate((6, 2, 4)):
        expected = module(torch.tensor(data[row : row + 1, :length]))[0][0, -1].detach().numpy()
        np.testing.assert_allclose(found[row], expected, atol=1e-5)


def test_lstm_biases_and_states() -> None:
    graph = mlc.Graph()
    x = graph.input((3, 6, 2), "x")
    h, c = (graph.input((1, 1, 3, 5), name) for name in "hc")
    y, (h1, c1) = graph.lstm(x, 5, states=(h, c), returns_states=True, peepholes=True, name="memory")
    layer = graph.layer("memory")
    assert graph.result_tensors(layer) == [y, h1, c1]
    assert [tensor.descriptor.shape for tensor in (y, h1, c1)] == [(3, 6, 5), (1, 1, 3, 5), (1, 1, 3, 5)]
    assert [tensor.label for tensor in (y, h1, c1)] == ["memory", "memory_hidden", "memory_cell"]
    starts = [tensor.data[0] for tensor in layer.biases]  # type: ignore[attr-defined]
    assert starts == [0, 1, 0, 0]
    with pytest.raises(mlc.GraphError, match="states has 1 tensors"):
        graph.lstm(x, 5, states=[h])


def test_attention_masks_and_other_keys() -> None:
    graph = mlc.Graph()
    query, key = graph.input((2, 4, 8), "q"), graph.input((2, 6, 8), "k")
    mask = graph.input((2, 6), "mask", data_type=mlc.DataType.BOOLEAN)
    y = graph.attention(query, key, heads=2, key_mask=mask)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    give(list(parameters_of(graph).values()), projections(module))
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 8), (2, 6, 8)))
    forbidden = np.array([[False] * 6, [False] * 3 + [True] * 3])
    found = run(graph, {"q": query, "k": key, "m": mask}, {"q": q, "k": k, "m": forbidden}, y)
    keys = torch.tensor(k)
    expected = module(torch.tensor(q), keys, keys, key_padding_mask=torch.tensor(forbidden))[0]
    np.testing.assert_allclose(found, expected.detach(), atol=1e-5)


def test_weights_have_the_fans_of_their_layer() -> None:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    x = graph.input((1, 8, 6, 6), "x")
    graph.convolution(x, 64, 5, groups=2, name="conv")
    weights = graph.layer("conv").weights.data  # type: ignore[attr-defined]
    bound = (6 / (4 * 25 + 32 * 25)) ** 0.5
    assert 0.95 * bound < np.abs(weights).max() <= bound
    y = graph.dense(graph.flatten(x), 50, initializer=mlc.RandomInitializerType.XAVIER, name="fc")
    assert y.label == "fc"
    spread = graph.layer("fc").weights.data.std()  # type: ignore[attr-defined]
    assert spread == pytest.approx((2 / (288 + 50)) ** 0.5, rel=0.05)
    assert not graph.layer("fc").biases.data.any()  # type: ignore[attr-defined]


def test_what_is_built_can_be_inspected_and_mixed_with_plain_nodes() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3, 8, 8), "image")
    h = graph.convolution(x, 4, activation="relu")
    plain_node = graph.node(mlc.ActivationLayer.sigmoid(), source=h)
    both = graph.concatenate([h, plain_node], dimension=1)
    y = graph.dense(graph.flatten(graph.pool(both)), 2, updates=False)
    assert [layer.label for layer in graph.layers] == [
        "convolution1", "convolution1_relu", "Activation", "Concat", "pool1", "flatten1", "dense1",
    ]  # fmt: skip
    convolution = graph.layer("convolution1")
    assert isinstance(convolution, mlc.ConvolutionLayer)
    assert convolution.weights.label == "convolution1.weights"
    assert convolution.descriptor.padding_policy == mlc.PaddingPolicy.SAME
    assert graph.source_tensors(convolution) == [x]
    assert x.label == "image"
    assert y.descriptor.shape == (2, 2)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(2, 2))})
    training.compile(device=mlc.Device.cpu())
    data = {"x": np.ones((2, 3, 8, 8)), "t": np.ones((2, 2))}
    t = training._definition.declared.labels["t"]
    training.bind_and_write_data(data, for_inputs={"x": x, "t": t}, to=mlc.Device.cpu())
    training.execute_forward().wait()
    training.execute_gradient().wait()
    dense = graph.layer("dense1")
    assert training.gradient_data(convolution.weights, convolution) is not None
    assert training.gradient_data(dense.weights, dense) is None  # type: ignore[attr-defined]


def test_tensors_of_ones_own_are_used() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    shared = mlc.Tensor(shape=(3, 3), fill_with_data=0.5)
    shared.label = "shared"
    graph.dense(graph.dense(x, 3, weights=shared, biases=False), 3, weights=shared, biases=False)
    assert {id(tensor) for tensor in parameters_of(graph).values()} == {id(shared)}
    assert shared.label == "shared"


def test_arithmetic_reductions_slices_and_losses() -> None:
    graph = mlc.Graph()
    x, y = graph.input((2, 3), "x"), graph.input((2, 3), "y")
    a, b = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[2, 4, 6], [1, 1, 3]])
    cases: list[tuple[mlc.Tensor, np.ndarray]] = [
        (graph.add(x, y), a + b),
        (graph.subtract(x, y), a - b),
        (graph.multiply(x, y), a * b),
        (graph.divide(x, y), a / b),
        (graph.arithmetic("max", x, y), np.maximum(a, b)),
        (graph.arithmetic("sqrt", x), np.sqrt(a)),
        (graph.matmul(x, y, transposes_y=True, alpha=2.0), 2 * a @ b.T),
        (graph.reduce(x, "sum", dimensions=1), a.sum(1, keepdims=True)),
        (graph.reduce(x, "argmax", dimensions=[1]), np.float32([[2], [2]])),
        (graph.slice(x, (0, 1), (2, 3)), a[:, 1:]),
        (graph.activation(x, mlc.ActivationDescriptor(mlc.ActivationType.CLAMP, 2.0, 4.0)), a.clip(2, 4)),
        (graph.activation(x, "clamp", min_value=2, max_value=4), a.clip(2, 4)),
        (graph.dropout(x, 0.5), a),
    ]
    for tensor, expected in cases:
        np.testing.assert_allclose(run(graph, {"x": x, "y": y}, {"x": a, "y": b}, tensor), expected, rtol=1e-6)
    losses = {kind: graph.loss(x, y, kind, name=f"loss of {kind}") for kind in ("mse", "mae", "huber")}
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x}, {"y": y})
    inference.compile(device=mlc.Device.cpu())
    inference.execute({"x": a}, {"y": b}).wait()
    errors = np.abs(a - b)
    huber = np.where(errors <= 1, errors**2 / 2, errors - 0.5)
    for kind, expected in (("mse", (errors**2).mean()), ("mae", errors.mean()), ("huber", huber.mean())):
        assert losses[kind].data == pytest.approx(expected, rel=1e-6)


MISTAKES: dict[str, tuple[Callable[[mlc.Graph, mlc.Tensor], object], type[Exception], str]] = {
    "an image": (lambda g, x: g.convolution(g.flatten(x), 3), mlc.ShapeError, r"convolution: the source has shape"),
    "dense after an image": (lambda g, x: g.dense(x, 3), mlc.ShapeError, r"(?s)dense: the source is an image.*flatten"),
    "an activation": (
        lambda g, x: g.convolution(x, 3, activation="reul"),
        mlc.GraphError,
        r"(?s)activation is 'reul'.*relu, relu6",
    ),
    "softmax": (lambda g, x: g.activation(x, "softmax"), mlc.GraphError, r"graph.softmax\(x\)"),
    "padding": (lambda g, x: g.convolution(x, 3, padding="full"), mlc.GraphError, r"padding is 'full'"),
    "kind of pool": (lambda g, x: g.pool(x, kind="mean"), mlc.GraphError, r"(?s)kind is 'mean'.*max, average, l2"),
    "kind of norm": (lambda g, x: g.normalize(x, "batches"), mlc.GraphError, r"(?s)kind is 'batches'.*instance"),
    "groups": (lambda g, x: g.normalize(x, "group"), mlc.GraphError, r"(?s)groups is None.*groups=\.\.\."),
    "groups for others": (lambda g, x: g.normalize(x, groups=2), mlc.GraphError, r"groups is 2, the kind is 'batch'"),
    "groups that divide": (lambda g, x: g.convolution(x, 8, groups=4), mlc.ShapeError, "divided among 4 groups"),
    "a sequence": (lambda g, x: g.lstm(x, 3), mlc.ShapeError, r"lstm: the source has shape"),
    "an operation": (lambda g, x: g.arithmetic("plus", x, x), mlc.GraphError, "kind is 'plus'"),
    "a loss": (lambda g, x: g.loss(x, x, "cross_entropy"), mlc.GraphError, "kind is 'cross_entropy'"),
    "a reduction": (lambda g, x: g.reduce(x, "median", dimensions=1), mlc.GraphError, "kind is 'median'"),
    "constants": (lambda g, x: g.activation(x, "relu", slope=1), TypeError, "'relu'.*slope"),
    "trailing axes": (
        lambda g, x: g.normalize(x, "layer", trailing_axes=4),
        mlc.ShapeError,
        r"(?s)trailing_axes is 4, the source has 4 axes.*1 to 3",
    ),
    "one state": (lambda g, x: g.lstm(g.input((2, 5, 4)), 3, states=x), mlc.GraphError, "states has 1 tensors"),  # type: ignore
    "biases": (lambda g, x: g.convolution(x, 3, biases=np.zeros(3)), TypeError, "biases must be True, False"),  # type: ignore
    "outputs": (lambda g, x: g.dense(g.flatten(x), 0), mlc.ShapeError, r"Graph\.dense: outputs is 0"),
    "channels": (lambda g, x: g.convolution(x, 3.0), TypeError, r"Graph\.convolution: channels must be a whole"),  # type: ignore
    "no tensor": (lambda g, x: g.dense(np.ones((2, 3)), 3), TypeError, "must be a Tensor, not ndarray"),  # type: ignore
    "a layer by name": (lambda g, x: g.layer("fc9"), mlc.GraphError, "no layer is named 'fc9'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained_and_leave_no_layer(mistake: str) -> None:
    build, error, message = MISTAKES[mistake]
    graph = mlc.Graph()
    x = graph.input((2, 6, 8, 8), "x")
    with pytest.raises(error, match=message):
        build(graph, x)
    assert not [layer for layer in graph.layers if layer.label != "flatten1"]


def test_names_are_unique() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    graph.dense(x, 3, name="dense1")
    graph.dense(x, 3)
    assert [layer.label for layer in graph.layers] == ["dense1", "dense2"]
    with pytest.raises(mlc.GraphError, match="already named 'dense1'"):
        graph.dense(x, 3, name="dense1")
    with pytest.raises(TypeError, match="name must be a string, not int"):
        graph.dense(x, 3, name=3)  # type: ignore[arg-type]
    with pytest.raises(mlc.ShapeError):
        graph.convolution(x, 4)
    with pytest.raises(mlc.DataError):
        graph.dropout(x, 1.5, name="drop")
    graph.dropout(x, 0.5, name="drop")


def test_two_layers_are_built_or_none() -> None:
    graph = mlc.Graph()
    x, steps = graph.input((2, 3), "x"), graph.input((2, 5, 4), "steps")
    for name in ("a_relu", "m_last", "dense1_relu"):
        graph.dense(x, 3, name=name)
    for build in (
        lambda: graph.dense(x, 3, activation="relu", name="a"),
        lambda: graph.lstm(steps, 3, returns_sequences=False, name="m"),
    ):
        with pytest.raises(mlc.GraphError, match=r"already named '(a_relu|m_last)'"):
            build()
    assert len(graph.layers) == 3
    graph.dense(x, 3, name="a")  # the name is still free
    graph.dense(x, 3, activation="relu")  # a number whose activation has a free name, too
    assert [layer.label for layer in graph.layers[3:]] == ["a", "dense2", "dense2_relu"]


def test_what_failed_leaves_names_and_labels() -> None:
    graph = mlc.Graph()
    x, w = graph.input((2, 3), "x"), mlc.Tensor(shape=(4, 3), fill_with_data=0.5)
    label = w.label
    with pytest.raises(mlc.ShapeError, match="loss1"):
        graph.loss(x, graph.input((2, 4)), "mse")
    with pytest.raises(TypeError):
        graph.dense(x, 4, weights=w, name=7)  # type: ignore[arg-type]
    assert w.label == label
    assert graph.loss(x, graph.input((2, 3)), "mse").label == "loss1"
    graph.dense(x, 4, weights=w, name="given")
    assert w.label == "given.weights"


def test_numbers_of_numpy() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 6, 8, 8), "x")
    one = np.int64(1)
    assert graph.pad(x, one).descriptor.shape == (2, 6, 10, 10)  # type: ignore[arg-type]
    assert graph.reduce(x, "sum", dimensions=one).descriptor.shape == (2, 1, 8, 8)
    assert graph.reduce(x, "sum", dimensions=np.array([1, 3])).descriptor.shape == (2, 1, 8, 1)  # type: ignore[arg-type]


def test_half_precision_gives_half_precision_parameters() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x", data_type=mlc.DataType.FLOAT16)
    graph.dense(x, 4, name="fc")
    kinds = {tensor.descriptor.data_type for tensor in parameters_of(graph).values()}
    assert kinds == {mlc.DataType.FLOAT16}


def test_every_builder_is_documented() -> None:
    for name, method in inspect.getmembers(mlc.Graph, inspect.isfunction):
        assert name.startswith("_") or (method.__doc__ or "").strip(), name


def test_what_is_read_in_another_order_than_it_seems_is_warned_about() -> None:
    """Kernels of Keras, the weights of an encoder in its decoder, and grey images without a channel fit by chance."""
    graph = mlc.Graph()
    x = graph.input((3, 4), "x")
    code = graph.dense(x, 2, name="encoder")
    for make in (
        lambda: graph.dense(x, 5, weights=mlc.Tensor(data=np.zeros((4, 5), np.float32))),
        lambda: graph.dense(code, 4, weights=graph.layer("encoder").weights),
    ):
        with pytest.warns(UserWarning, match=r"outputs first, and not transposed\..*array\.T\.copy\(\).*x @ weights"):
            make()
    graph.dense(x, 5, weights=mlc.Tensor(data=np.zeros((5, 4), np.float32)))
    decoded = code @ graph.layer("encoder").weights
    assert decoded.shape == (3, 4)
    for build in (graph.convolution, graph.pool):
        grey = graph.input((3, 28, 28), build.__name__)
        with pytest.warns(UserWarning, match=r"read as 28 channels of length 28.*array\[:, None\]"):
            build(grey, 2)  # type: ignore[operator]
    graph.convolution(graph.input((3, 2, 28), "signal"), 2)
