"""Any tensor as a loss: minimize, weights that change, losses as functions, several of them in a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

RNG = np.random.default_rng(5)
X, T = RNG.standard_normal((8, 4)).astype(np.float32), RNG.standard_normal((8, 3)).astype(np.float32)


def _sgd(rate: float = 0.1) -> mlc.SGDOptimizer:
    return mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=rate))


def _network(graph: mlc.Graph, x: mlc.Tensor) -> tuple[mlc.Tensor, mlc.Tensor]:
    hidden = graph.dense(x, 5, name="hidden")
    return graph.dense(hidden.tanh(), 3, name="head"), hidden


class _Theirs(torch.nn.Module):
    def __init__(self, graph: mlc.Graph) -> None:
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
        self.load_state_dict({name: torch.tensor(array) for name, array in mlc.to_state_dict(graph).items()})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden(x)
        return self.head(hidden.tanh()), hidden


def _trained_alike(graph: mlc.Graph, model: torch.nn.Module) -> None:
    theirs = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, array in mlc.to_state_dict(graph).items():
        np.testing.assert_allclose(array, theirs[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_several_losses_with_weights_that_change() -> None:
    graph = mlc.Graph()
    x, t = graph.input((8, 4), "x"), graph.input((8, 3), "t")
    y, hidden = _network(graph, x)
    graph.minimize((y - t) ** 2, name="error")
    graph.minimize(abs(hidden).sum(-1), weight=0.01, name="size")
    training = mlc.TrainingGraph([graph], None, _sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())
    model = _Theirs(graph)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = training.programs["fused 8"]
    for step, weight in enumerate((0.01, 0.01, 0.5, 0.0)):
        layer: Any = training.layer("size")
        layer.weight = weight
        result = training.execute({"x": X}, {"t": T}).result.data
        optimizer.zero_grad()
        predicted, inner = model(torch.tensor(X))
        error, size = ((predicted - torch.tensor(T)) ** 2).mean(), weight * inner.abs().sum(-1).mean()
        (error + size).backward()
        optimizer.step()
        np.testing.assert_allclose(result, (error + size).item(), rtol=1e-5, err_msg=str(step))
        losses = {name: float(np.asarray(tensor.data).item()) for name, tensor in training.losses.items()}
        assert losses.keys() == {"error", "size"}
        np.testing.assert_allclose([losses["error"], losses["size"]], [error.item(), size.item()], rtol=1e-5)
    assert layer.weight == 0.0
    assert training.programs["fused 8"] is program  # nothing was compiled again
    _trained_alike(graph, model)


@pytest.mark.parametrize("engine", ["reference", "remote"])
def test_a_weight_reaches_other_memory(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_ENGINE", engine)
    graph = mlc.Graph()
    x = graph.input((2, 1), "x")
    graph.minimize(x * graph.parameter((1,), data=[1.0], name="p"), weight=2.0, name="loss")
    training = mlc.TrainingGraph([graph], None, _sgd(1e-9))
    training.add_inputs({"x": x})
    training.compile(device=mlc.Device.cpu())
    assert training.execute({"x": np.ones((2, 1))}).result.data.item() == 2.0
    layer: Any = graph.layer("loss")
    layer.weight = 5.0
    assert training.execute({"x": np.ones((2, 1))}).result.data.item() == 5.0


def test_a_shared_weight_and_refusals() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    beta = mlc.Tensor(shape=(1,), fill_with_data=0.5)
    first, second = graph.minimize(x.exp(), weight=beta), graph.minimize(x, weight=beta)
    assert [node.sources[1] for node in graph.nodes[-2:]] == [beta, beta]
    assert (first.shape, second.shape) == ((1,), (1,))
    layer: Any = graph.layer("objective1")
    layer.weight = 0.25
    assert beta.data == [0.25]
    with pytest.raises(TypeError, match="weight must be a number"):
        layer.weight = "much"
    with pytest.raises(mlc.GraphError, match="no weight that could be set"):
        mlc.ObjectiveLayer().weight = 1.0


def test_a_loss_as_a_function_of_tensors(tmp_path: Path) -> None:
    graph = mlc.Graph()
    x = graph.input((8, 4), "x")
    _network(graph, x)
    t = mlc.Tensor(shape=(8, 3))
    training = mlc.TrainingGraph([graph], lambda y, t: ((y - t) ** 2).mean(), _sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())
    model = _Theirs(graph)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = training.execute({"x": X}, {"t": T}).result.data.item()
        optimizer.zero_grad()
        theirs = ((model(torch.tensor(X))[0] - torch.tensor(T)) ** 2).mean()
        theirs.backward()
        optimizer.step()
        np.testing.assert_allclose(loss, theirs.item(), rtol=1e-5)
    _trained_alike(graph, model)
    assert list(training.losses) == ["loss"]
    assert len(graph.layers) == 3  # the loss is the training graph's, not the network's
    inference = mlc.InferenceGraph([training])  # without labels: the prediction
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu())
    predicted = inference.execute({"x": X}).result.data
    np.testing.assert_allclose(predicted, model(torch.tensor(X))[0].detach(), rtol=1e-4, atol=1e-5)
    mlc.save(tmp_path / "training.safetensors", training)
    loaded: Any = mlc.load(tmp_path / "training.safetensors")
    loaded.compile(device=mlc.Device.cpu())
    ours = training.execute({"x": X}, {"t": T}).result.data
    assert np.array_equal(loaded.execute({"x": X}, {"t": T}).result.data, ours)


def test_functions_that_are_no_losses() -> None:
    graph = mlc.Graph()
    x = graph.input((8, 4), "x")
    _network(graph, x)
    with pytest.raises(TypeError, match="must be a LossLayer or a function of tensors, not ABCMeta"):
        mlc.TrainingGraph([graph], mlc.LossLayer)  # type: ignore[arg-type]
    training = mlc.TrainingGraph([graph], lambda y, t: 3.0, _sgd())  # type: ignore[arg-type,return-value]
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(8, 3))})
    with pytest.raises(TypeError, match="the loss function must return a Tensor, not float"):
        training.compile(device=mlc.Device.cpu())
    training = mlc.TrainingGraph([graph], lambda y: (y**2).mean(), _sgd())  # without labels
    training.add_inputs({"x": x})
    training.compile(device=mlc.Device.cpu())
    assert training.execute({"x": X}).result.data.shape == (1,)


# Trainer --------------------------------------------------------------------------------------------------------------


def _classes() -> np.ndarray[Any, Any]:
    return X[:, :3].argmax(1)


def test_a_trainer_with_a_function() -> None:
    def fit(loss: Any) -> tuple[dict[str, float], np.ndarray[Any, Any]]:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        _network(graph, graph.input((4, 4), "x"))
        trainer = mlc.Trainer(graph, loss=loss, optimizer="sgd", metrics=["mae"], device=mlc.Device.cpu())
        trainer.fit(X[:7], T[:7], epochs=2, shuffle=False, verbose=0)
        return dict(trainer.evaluate(X[:7], T[:7])), trainer.predict(X[:7])

    named, predicted = fit("mse")
    ours, same = fit(lambda y, t: ((y - t) ** 2).mean())
    assert same.shape == (7, 3)
    np.testing.assert_allclose(same, predicted, rtol=1e-5, atol=1e-6)
    assert ours.keys() == named.keys()
    np.testing.assert_allclose(list(ours.values()), list(named.values()), rtol=1e-5)


def test_several_outputs_with_names() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 4), "x")
    y, _ = _network(graph, x)
    graph.dense(y, 3, name="numbers")
    trainer = mlc.Trainer(
        graph,
        loss={"head": "softmax_cross_entropy", "numbers": lambda y, t: abs(y - t).mean()},
        loss_weights={"numbers": 0.5},
        metrics={"head": ["accuracy"], "numbers": ["mae"]},
        learning_rate=0.02,
        device=mlc.Device.cpu(),
    )
    labels = {"head": _classes(), "numbers": T}
    history = trainer.fit(X, labels, epochs=30, validation=(X, labels), verbose=0)
    logged = {"loss", "head_loss", "numbers_loss", "head_accuracy", "numbers_mae"}
    assert logged <= set(history.history)
    assert history["loss"][-1] < history["loss"][0]
    np.testing.assert_allclose(history["loss"], np.add(history["head_loss"], history["numbers_loss"]), rtol=1e-5)
    scores = trainer.evaluate(X, labels)
    assert logged == set(scores)
    np.testing.assert_allclose(scores["numbers_loss"], 0.5 * scores["numbers_mae"], rtol=1e-5)
    predicted = trainer.predict(X)
    assert {name: array.shape for name, array in predicted.items()} == {"head": (8, 3), "numbers": (8, 3)}
    assert (predicted["head"].argmax(1) == labels["head"]).mean() == pytest.approx(scores["head_accuracy"])
    assert dict(trainer.loss_weights) == {"numbers": 0.5}
    trainer.loss_weights["numbers"] = 2.0
    np.testing.assert_allclose(trainer.evaluate(X, labels)["numbers_loss"], 2.0 * scores["numbers_mae"], rtol=1e-5)
    with pytest.raises(mlc.DataError, match="no weight of 'head' to be changed"):
        trainer.loss_weights["head"] = 1.0


def test_a_graph_that_minimises_by_itself() -> None:
    graph = mlc.Graph()
    x, t = graph.input((4, 4), "x"), graph.input((4, 3), "t")
    y, hidden = _network(graph, x)
    graph.minimize((y - t) ** 2, name="error")
    graph.minimize(hidden**2, weight=0.1, name="size")
    trainer = mlc.Trainer(graph, inputs={"x": x}, outputs={"y": y, "hidden": hidden}, device=mlc.Device.cpu())
    history = trainer.fit(X, {"t": T}, epochs=2, verbose=0)
    assert {"error", "size"} <= set(history.history)
    assert trainer.predict(X)["hidden"].shape == (8, 5)


def test_trainers_refuse() -> None:
    graph = mlc.Graph()
    _network(graph, graph.input((4, 4), "x"))

    def trainer(**arguments: Any) -> mlc.Trainer:
        return mlc.Trainer(graph, device=mlc.Device.cpu(), **arguments)

    with pytest.raises(mlc.GraphError, match="there is no output 'tail'"):
        trainer(loss={"tail": "mse"})
    with pytest.raises(mlc.DataError, match="loss_weights has 'tail', loss does not"):
        trainer(loss={"head": "mse"}, loss_weights={"tail": 1.0})
    with pytest.raises(mlc.DataError, match="the loss of 'head' is 'mes'"):
        trainer(loss={"head": "mes"})
    with pytest.raises(mlc.DataError, match="loss_weights are for several losses"):
        trainer(loss="mse", loss_weights={"head": 1.0})
    with pytest.raises(mlc.DataError, match="metric 'mae' of which output"):
        trainer(loss={"head": "mse", "hidden": "mse"}, metrics=["mae"])
    with pytest.raises(mlc.DataError, match="'tail' is not the name of the output"):
        trainer(loss={"head": "mse"}, metrics={"tail": ["mae"]})
    with pytest.raises(mlc.DataError, match="a function of tensors, or one of"):
        trainer(loss=3)
