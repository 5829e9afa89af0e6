"""A graph applied again with the same weights, and parameters that belong to no layer: programs beside PyTorch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mlcompute as mlc

RNG = np.random.default_rng(7)
Z, REAL = RNG.standard_normal((8, 3)).astype(np.float32), RNG.standard_normal((8, 4)).astype(np.float32)


def _sgd(rate: float = 0.1) -> mlc.SGDOptimizer:
    return mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=rate))


def _same_weights(graph: mlc.Graph, model: nn.Module, what: str = "") -> None:
    theirs = model.state_dict()
    for name, array in mlc.to_state_dict(graph).items():
        np.testing.assert_allclose(array, theirs[name], rtol=5e-5, atol=5e-6, err_msg=f"{what} {name}")


def _load(model: nn.Module, graph: mlc.Graph) -> None:
    arrays = {name: torch.tensor(array) for name, array in mlc.to_state_dict(graph).items()}
    model.load_state_dict(arrays, strict=False)


class _Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1, self.norm, self.d2 = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d2(self.norm(self.d1(x)).relu())


def _discriminator() -> tuple[mlc.Graph, mlc.Tensor, mlc.Tensor]:
    graph = mlc.Graph()
    x = graph.input((8, 4), "real")
    h = graph.normalize(graph.dense(x, 6, name="d1"), momentum=0.9, name="norm")
    return graph, x, graph.dense(h.relu(), 1, name="d2")


def _soft_plus(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    return graph.activation(x, "soft_plus")


def test_a_gan() -> None:
    """The discriminator is applied twice in its own step, and frozen in the generator's."""
    generator = mlc.Graph()
    generator.dense(generator.input((8, 3), "z"), 4, name="g1")
    discriminator, _, _ = _discriminator()

    d_step = mlc.TrainingGraph([], None, _sgd())
    real, z = d_step.input((8, 4), "real"), d_step.input((8, 3), "z")
    d_real, d_fake = discriminator(real), discriminator(generator(z, updates=False))
    d_step.minimize(_soft_plus(d_step, -d_real) + _soft_plus(d_step, d_fake), name="d_loss")
    d_step.add_inputs({"real": real, "z": z})

    g_step = mlc.TrainingGraph([], None, _sgd())
    z = g_step.input((8, 3), "z")
    g_step.minimize(_soft_plus(g_step, -discriminator(generator(z), updates=False)), name="g_loss")
    g_step.add_inputs({"z": z})
    for step in (d_step, g_step):
        step.compile(device=mlc.Device.cpu())

    model, maker = _Discriminator(), nn.Sequential()
    maker.add_module("g1", nn.Linear(3, 4))
    _load(model, discriminator)
    _load(maker, generator)
    d_optimizer, g_optimizer = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(maker.parameters(), 0.1)
    soft_plus = nn.functional.softplus
    for _ in range(3):
        ours = d_step.execute({"real": REAL, "z": Z}).result.data.item()
        d_optimizer.zero_grad()
        model.train()
        # PyTorch's running variance is unbiased, ours is not; the means tell whether each use moves them.
        theirs = (soft_plus(-model(torch.tensor(REAL))) + soft_plus(model(maker(torch.tensor(Z)).detach()))).mean()
        theirs.backward()
        d_optimizer.step()
        np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)
        norm: Any = discriminator.layer("norm")
        np.testing.assert_allclose(norm.mean.data, model.norm.running_mean, rtol=1e-4, atol=1e-6)
        model.norm.running_var.copy_(torch.tensor(norm.variance.data))
        model.eval()
        g_optimizer.zero_grad()
        ours = g_step.execute({"z": Z}).result.data.item()
        theirs = soft_plus(-model(maker(torch.tensor(Z)))).mean()
        theirs.backward()
        g_optimizer.step()
        np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)
    _same_weights(discriminator, model)
    _same_weights(generator, maker)


def test_weights_are_stored_once_and_names_are_numbered(tmp_path: Path) -> None:
    graph, x, score = _discriminator()
    other = graph.input((8, 4), "other")
    again = graph(other)
    assert again.graph is graph
    assert [layer.label for layer in graph.layers] == [
        "d1", "norm", "relu1", "d2", "d1_1", "norm_1", "relu1_1", "d2_1"
    ]  # fmt: skip
    third = graph(other, outputs=graph.nodes[0].results[0], name="third")
    assert (third.label, third.shape) == ("third_d1", (8, 6))
    training = mlc.TrainingGraph([graph], None, _sgd())
    training.minimize(score + again, name="loss")
    training.add_inputs({"x": x, "other": other})
    training.compile(device=mlc.Device.cpu())
    mlc.save(tmp_path / "twice.safetensors", training)
    from safetensors.numpy import load_file

    kept = [name for name in load_file(tmp_path / "twice.safetensors") if "weights" in name and "optim" not in name]
    assert len(kept) == 2, kept
    loaded: Any = mlc.load(tmp_path / "twice.safetensors")
    loaded.compile(device=mlc.Device.cpu())
    for _ in range(2):
        data = {"x": REAL, "other": REAL[::-1].copy()}
        assert np.array_equal(loaded.execute(data).result.data, training.execute(data).result.data)
    copied = copy.deepcopy(graph)
    assert copied.layer("d1").weights is copied.layer("d1_1").weights  # type: ignore[attr-defined]


def test_a_use_that_is_not_trained_gives_the_weights_no_gradient() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 3), "x")
    w = graph.parameter((3, 1), data=np.ones((3, 1)), name="w")
    y = graph.dense(x, 3, name="layer", biases=False) @ w
    y = y + graph(graph.input((4, 3), "other"), outputs=y, updates=False)
    training = mlc.TrainingGraph([graph], None, _sgd())
    training.minimize(y, name="loss")
    training.add_inputs({tensor.label: tensor for tensor in graph.input_tensors})
    training.compile(device=mlc.Device.cpu())
    layer: Any = graph.layer("layer")
    linear = nn.Linear(3, 3, bias=False)
    linear.weight.data = torch.tensor(layer.weights.data)
    free = nn.Parameter(torch.ones(3, 1))
    a, b = RNG.standard_normal((2, 4, 3)).astype(np.float32)
    training.execute({"x": a, "other": b}).wait()
    loss = (linear(torch.tensor(a)) @ free + (torch.tensor(b) @ linear.weight.detach().T @ free.detach())).mean()
    loss.backward()
    np.testing.assert_allclose(layer.weights.data, linear.weight.data - 0.1 * linear.weight.grad, rtol=1e-5)
    np.testing.assert_allclose(w.data, free.data - 0.1 * free.grad, rtol=1e-5)


def test_a_parameter_that_is_given_gets_its_gradient_from_constant_layers() -> None:
    network = mlc.Graph()
    w = network.parameter((3, 2), data=np.ones((3, 2)), name="w")
    network.dense(network.input((4, 3), "x") @ w, 2, name="layer")
    training = mlc.TrainingGraph(optimizer=_sgd())
    image = training.parameter(data=REAL[:4, :3], name="image")
    training.minimize(network(image, updates=False) ** 2)
    training.minimize(training.dense(image, 1, updates=False, name="other"))
    training.compile(device=mlc.Device.cpu())
    state = {name: torch.tensor(array) for name, array in mlc.to_state_dict(training).items()}
    expected = torch.tensor(REAL[:4, :3], requires_grad=True)
    y = expected @ state["w"] @ state["layer.weight"].T + state["layer.bias"]
    ((y**2).mean() + (expected @ state["other.weight"].T + state["other.bias"]).mean()).backward()
    training.execute({}).wait()
    np.testing.assert_allclose(image.data, expected.data - 0.1 * expected.grad, rtol=1e-5, atol=1e-6)
    for name in state.keys() - {"image"}:
        np.testing.assert_array_equal(mlc.to_state_dict(training)[name], state[name])


def test_triplets() -> None:
    encoder = mlc.Graph()
    anchor = encoder.input((8, 4), "anchor")
    a = encoder.dense(anchor, 2, name="encode")
    positive, negative = encoder.input((8, 4), "positive"), encoder.input((8, 4), "negative")
    p, n = (encoder(one, outputs=a) for one in (positive, negative))
    encoder.minimize((((a - p) ** 2).sum(-1).sqrt() - ((a - n) ** 2).sum(-1).sqrt() + 1.0).relu(), name="triplet")
    training = mlc.TrainingGraph([encoder], None, _sgd())
    training.add_inputs({"anchor": anchor, "positive": positive, "negative": negative})
    training.compile(device=mlc.Device.cpu())
    data = dict(zip(("anchor", "positive", "negative"), RNG.standard_normal((3, 8, 4)).astype(np.float32), strict=True))
    model = nn.Sequential()
    model.add_module("encode", nn.Linear(4, 2))
    ours = mlc.to_state_dict(encoder)
    model.load_state_dict({name: torch.tensor(ours[name]) for name in ("encode.weight", "encode.bias")})
    loss = nn.TripletMarginLoss(eps=0.0)(*(model(torch.tensor(array)) for array in data.values()))
    np.testing.assert_allclose(training.execute(data).result.data, loss.item(), rtol=1e-5)


def test_another_batch_size_and_several_inputs() -> None:
    graph = mlc.Graph()
    image, scale = graph.input((4, 2, 3, 3), "image"), graph.input((4, 1), "scale")
    first = graph.dense(graph.flatten(image)[:, 1:], 5, name="fc") * scale
    second = graph.dropout(first, 0.5)
    other = mlc.Graph()
    one, two = graph(other.input((6, 2, 3, 3), "image"), other.input((6, 1), "scale"), outputs=[first, second])
    assert (one.shape, two.shape, two.graph) == ((6, 5), (6, 5), other)
    assert other.layer("fc").weights is graph.layer("fc").weights  # type: ignore[attr-defined]


def test_dropout_draws_numbers_of_its_own() -> None:
    graph = mlc.TrainingGraph()
    x = graph.input((4, 50), "x")
    network = mlc.Graph()
    network.dropout(network.input((4, 50), "x"), 0.5)
    first, second = network(x), network(x)
    graph.minimize(first + second)
    graph.add_inputs({"x": x})
    graph.add_outputs({"first": first, "second": second})
    graph.compile(device=mlc.Device.cpu())
    graph.execute({"x": np.ones((4, 50))}).wait()
    assert not np.array_equal(first.data, second.data)


def test_refusals() -> None:
    graph, x, _ = _discriminator()
    count = graph.node_count
    for wrong, error, says in (
        (lambda: graph(REAL), TypeError, "needs Tensors of a graph, not ndarray"),
        (lambda: graph(x, x), mlc.GraphError, "2 tensors were given for 1 inputs"),
        (lambda: graph(x, outputs=x), mlc.GraphError, "there is no output Tensor"),
        (lambda: mlc.Graph()(x), mlc.GraphError, "no layers to apply"),
        (lambda: graph(mlc.Tensor(shape=(8, 4))), mlc.GraphError, "belongs to no graph"),
        (lambda: graph(graph.input((8, 5), "wide")), mlc.ShapeError, "input_feature_channel_count is 4"),
        (lambda: graph.parameter(), mlc.ShapeError, "neither shape nor data"),
    ):
        with pytest.raises(error, match=says):
            wrong()
        assert graph.node_count == count
    assert graph(x).label == "d2_1"  # what failed took no names


# Parameters -----------------------------------------------------------------------------------------------------------


def test_a_parameter_trains_saves_and_exports(tmp_path: Path) -> None:
    graph = mlc.Graph()
    x = graph.input((8, 4), "x")
    scale = graph.parameter((4,), 1.0, name="scale")
    table = graph.parameter((4, 3), name="table")
    y = (x * scale) @ table
    graph.parameter((2,), 0.0, name="unused", updates=False)
    t = mlc.Tensor(shape=(8, 3))
    training = mlc.TrainingGraph([graph], lambda y, t: ((y - t) ** 2).mean(), _sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.table = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4, 3))
            self.unused = nn.Parameter(torch.zeros(2))

    model = Model()
    assert set(mlc.to_state_dict(graph)) == {"scale", "table", "unused"}
    _load(model, graph)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = RNG.standard_normal((8, 3)).astype(np.float32)
    for _ in range(3):
        ours = training.execute({"x": REAL}, {"t": labels}).result.data.item()
        optimizer.zero_grad()
        loss = (((torch.tensor(REAL) * model.scale) @ model.table - torch.tensor(labels)) ** 2).mean()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
    _same_weights(graph, model)
    assert y.shape == (8, 3)
    mlc.save(tmp_path / "p.safetensors", training)
    loaded: Any = mlc.load(tmp_path / "p.safetensors")
    assert np.array_equal(loaded.layer("scale").value.data, scale.data)
    assert loaded.layer("unused").updates is False
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu())
    expected = inference.execute({"x": REAL}).result.data
    mlc.onnx.save(inference, tmp_path / "p.onnx")
    back = mlc.onnx.load(tmp_path / "p.onnx", batch=8)
    assert {"scale", "table"} <= set(back.weights)
    again = mlc.InferenceGraph([back])
    again.add_inputs(back.inputs)
    again.compile(device=mlc.Device.cpu())
    np.testing.assert_allclose(again.execute({"x": REAL}).result.data, expected, rtol=1e-5, atol=1e-6)
    graph.freeze("scale*")
    before = scale.data
    training.execute({"x": REAL}, {"t": labels}).wait()
    assert np.array_equal(scale.data, before)


def test_a_trainer_knows_parameters() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 4), "x")
    weights = graph.parameter((3, 4), name="shared")
    graph.dense(x, 3, weights=weights, name="head")
    trainer = mlc.Trainer(graph, loss="mse", device=mlc.Device.cpu())
    assert set(trainer.parameter_names.values()) == {"shared.value", "head.biases"}
    trainer.fit(REAL, RNG.standard_normal((8, 3)), epochs=1, verbose=0)
    assert "shared" in str(graph.summary())


def test_existing_tensors_as_weights() -> None:
    graph = mlc.Graph()
    a, b = graph.input((2, 5, 4), "a"), graph.input((2, 5, 4), "b")
    graph.lstm(a, 3, name="lstm")
    graph.gru(a, 3, name="gru")
    graph.attention(a, heads=2, name="attention")
    graph.normalize(a, name="norm")
    pairs = {
        "lstm": graph.lstm(b, 3, weights=graph.layer("lstm"), name="lstm2"),
        "gru": graph.gru(b, 3, weights=graph.layer("gru"), name="gru2"),
        "attention": graph.attention(b, heads=2, weights=graph.layer("attention"), name="attention2"),
        "norm": graph.normalize(b, weights=graph.layer("norm"), name="norm2"),
    }
    for name in pairs:
        first, second = graph.layer(name), graph.layer(f"{name}2")
        assert [p.tensor for p in first.parameters.values()] == [p.tensor for p in second.parameters.values()], name
        assert first.statistics == second.statistics
    assert graph.layer("norm").mean.label == "norm.mean"
    inference = mlc.InferenceGraph([graph])
    outputs = {name: graph.result_tensors(graph.layer(name))[0] for name in pairs}
    inference.add_inputs({"a": a, "b": b})
    inference.add_outputs({**outputs, **{f"{name}2": tensor for name, tensor in pairs.items()}})
    inference.compile(device=mlc.Device.cpu())
    array = RNG.standard_normal((2, 5, 4)).astype(np.float32)
    inference.execute({"a": array, "b": array}).wait()
    for name, tensor in pairs.items():
        np.testing.assert_allclose(tensor.data, outputs[name].data, rtol=1e-6, err_msg=name)
    gamma = graph.layer("norm").gamma
    graph.normalize(b, "layer", trailing_axes=1, weights={"gamma": mlc.Tensor(shape=(4,), fill_with_data=2.0)})
    with pytest.raises(mlc.GraphError, match="weights has 'gama', the layer does not"):
        graph.normalize(b, weights={"gama": gamma})
    with pytest.raises(mlc.GraphError, match="weights has 'biases_0', the layer does not"):
        graph.lstm(b, 3, biases=False, weights=graph.layer("lstm"))
    with pytest.raises(TypeError, match="weights must be a layer, or tensors by slot, not Tensor"):
        graph.lstm(b, 3, weights=gamma)
