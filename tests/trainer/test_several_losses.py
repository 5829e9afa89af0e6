"""Losses by output and losses as functions: integer labels, weights of samples and classes, beside `minimize`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.runtime.definition import definition_of

RNG = np.random.default_rng(2)
X = RNG.standard_normal((12, 4)).astype(np.float32)
KINDS, BOXES = RNG.integers(3, size=12), RNG.standard_normal((12, 2)).astype(np.float32)
WEIGHTS = RNG.random(12).astype(np.float32)
LABELS = {"kind": KINDS, "box": BOXES}


def _graph(*heads: str) -> mlc.Graph:
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    x = graph.input((6, 4), "x")
    for name in heads or ("kind", "box"):
        graph.dense(x, 3 if name == "kind" else 2, name=name)
    return graph


def _trainer(loss: Any, graph: mlc.Graph | None = None, **options: Any) -> mlc.Trainer:
    options = {"optimizer": "sgd", "learning_rate": 0.1, "device": mlc.Device.cpu(), **options}
    return mlc.Trainer(graph or _graph(), loss=loss, **options)


def _theirs(by_kind: Any = None, weights: Any = None, steps: int = 4, extra: Any = None) -> list[float]:
    """Losses of the same steps in PyTorch: cross entropy and squared error, weighed, divided by their number."""
    graph = _graph()
    ours = {name: torch.tensor(value, requires_grad=True) for name, value in mlc.to_state_dict(graph).items()}
    losses = []
    for step in range(steps):
        rows = slice(0, 6) if step % 2 == 0 else slice(6, 12)
        x, kinds, boxes = torch.tensor(X[rows]), torch.tensor(KINDS[rows]), torch.tensor(BOXES[rows])
        one = torch.ones(6) if weights is None else torch.tensor(weights[rows])
        kind = x @ ours["kind.weight"].T + ours["kind.bias"]
        box = x @ ours["box.weight"].T + ours["box.bias"]
        classes = one if by_kind is None else one * torch.tensor(by_kind)[kinds]
        loss = (torch.nn.functional.cross_entropy(kind, kinds, reduction="none") * classes).mean()
        loss = loss + ((box - boxes) ** 2 * one[:, None]).mean()
        if extra is not None:
            loss = loss + extra(ours)
        gradients = torch.autograd.grad(loss, list(ours.values()))
        with torch.no_grad():
            for value, gradient in zip(ours.values(), gradients, strict=True):
                value -= 0.1 * gradient
        losses.append(loss.item())
    return [sum(losses[i : i + 2]) / 2 for i in range(0, steps, 2)]


FORMS: dict[str, dict[str, Any]] = {
    "names": {"kind": "softmax_cross_entropy", "box": "mse"},
    "functions": {"kind": lambda y, t: mlc.cross_entropy(y, t), "box": lambda y, t: (y - t) ** 2},
    "per sample": {
        "kind": lambda y, t: -y.log_softmax(-1).gather(1, t[:, None])[:, 0], "box": lambda y, t: ((y - t) ** 2).mean(-1)
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighed", ["nothing", "samples", "classes", "both"])
def test_numbers_are_those_of_pytorch(form: str, weighed: str) -> None:
    trainer = _trainer(FORMS[form])
    assert trainer.model.feed.labels["kind"].shape == (6,)  # never one-hot
    options: dict[str, Any] = {"sample_weight": WEIGHTS} if weighed in ("samples", "both") else {}
    if weighed in ("classes", "both"):
        options["class_weight"] = {"kind": {0: 2.0, 1: 0.5}}
    history = trainer.fit(X, LABELS, epochs=2, shuffle=False, verbose=0, **options)
    by_kind = [2.0, 0.5, 1.0] if "class_weight" in options else None
    expected = _theirs(by_kind, WEIGHTS if "sample_weight" in options else None)
    np.testing.assert_allclose(history["loss"], expected, rtol=2e-5)


def test_a_dense_label_takes_the_place_of_integers() -> None:
    one_hot = np.eye(3, dtype=np.float32)[KINDS]
    for form in ("names", "functions"):
        trainer = _trainer(FORMS[form])
        trainer.fit(X, LABELS, sample_weight=WEIGHTS, shuffle=False, verbose=0)
        before = trainer.evaluate(X, LABELS, sample_weight=WEIGHTS)
        scores = trainer.evaluate(X, {"kind": one_hot, "box": BOXES}, sample_weight=WEIGHTS)
        np.testing.assert_allclose(list(scores.values()), list(before.values()), rtol=1e-5)
        assert trainer.model.feed.labels["kind"].descriptor.shape == (6, 3)


def test_weights_by_output_and_of_other_samples_are_1() -> None:
    trainer = _trainer(FORMS["names"])
    plain = trainer.evaluate(X, LABELS)
    ones = trainer.evaluate(X, LABELS, sample_weight={"kind": np.full(12, 2.0)})
    assert ones["kind_loss"] == pytest.approx(2 * plain["kind_loss"], rel=1e-5)
    assert ones["box_loss"] == pytest.approx(plain["box_loss"], rel=1e-5)
    with pytest.raises(mlc.DataError, match="there is no weight named 'kinds'"):
        trainer.fit(X, LABELS, sample_weight={"kinds": WEIGHTS}, verbose=0)
    with pytest.raises(mlc.DataError, match=r"class_weight of which output\?"):
        trainer.fit(X, LABELS, class_weight={0: 2.0}, verbose=0)


def test_a_loss_of_all_samples_cannot_be_weighed() -> None:
    trainer = _trainer(lambda y, t: ((y - t) ** 2).mean(), _graph("box"))
    with pytest.raises(mlc.DataError, match=r"weights need a loss for every sample, 'loss' .*\n.*\n.*leave the mean"):
        trainer.fit(X, BOXES, sample_weight=WEIGHTS, verbose=0)
    assert trainer.fit(X, BOXES, verbose=0)["loss"]  # and nothing has happened


def test_beside_what_the_graph_minimises() -> None:
    graph = _graph()
    weights = graph.layer("kind").parameters["weights"].tensor
    with graph:
        graph.minimize((weights**2).sum(), weight=0.3, name="decay")
    trainer = _trainer(FORMS["names"], graph)
    history = trainer.fit(X, LABELS, epochs=2, shuffle=False, verbose=0, sample_weight=WEIGHTS)
    expected = _theirs(None, WEIGHTS, extra=lambda ours: 0.3 * (ours["kind.weight"] ** 2).sum())
    np.testing.assert_allclose(history["loss"], expected, rtol=2e-5)
    assert {"decay", "kind_loss", "box_loss"} <= set(history.history)
    with pytest.raises(mlc.GraphError, match=r"its own loss.*\n.*loss=\{name: loss\}"):
        _trainer("mse", graph)


def test_labels_in_the_form_a_function_takes() -> None:
    graph = _graph("kind")
    ignored = np.where(np.arange(12) % 3 == 0, -100, KINDS)
    trainer = _trainer({"kind": lambda y, t: mlc.cross_entropy(y, t, ignore_index=-100)}, graph)
    logits = trainer.predict(X)
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits[:6]), torch.tensor(ignored[:6]))
    assert trainer.evaluate(X[:6], {"kind": ignored[:6]})["loss"] == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(mlc.GraphError, match=r"adds layers to the graph(.|\n)*mlc.cross_entropy"):
        _trainer(lambda y, t: graph.cross_entropy(y, t), graph)
    assert len(graph.layers) == 1
    assert _trainer({"kind": lambda y: y**2}, graph).fit(X, verbose=0)["loss"]  # without labels


def test_short_batches_are_filled_where_functions_give_a_loss_per_sample() -> None:
    trainer = _trainer(FORMS["per sample"])
    history = trainer.fit(X[:8], {name: part[:8] for name, part in LABELS.items()}, last_batch="pad", verbose=0)
    same = _trainer(FORMS["per sample"])
    plain = same.fit(X[:8], {name: part[:8] for name, part in LABELS.items()}, verbose=0)
    np.testing.assert_allclose(history["loss"], plain["loss"], rtol=1e-5)


def test_weights_travel(tmp_path: Path) -> None:
    trainer = _trainer(FORMS["per sample"])
    trainer.fit(X, LABELS, sample_weight=WEIGHTS, verbose=0)
    copied = copy.deepcopy(trainer)
    mlc.save(tmp_path / "run.safetensors", trainer.training)
    loaded: Any = mlc.load(tmp_path / "run.safetensors")
    read = mlc.Trainer(loaded, outputs=None)
    weights = dict.fromkeys(("kind", "box"), WEIGHTS)
    expected = trainer.evaluate(X, LABELS, sample_weight=weights)["loss"]
    assert copied.evaluate(X, LABELS, sample_weight=weights)["loss"] == expected
    assert read.evaluate(X, LABELS, sample_weight=weights)["loss"] == expected


def test_any_tensor_is_a_loss() -> None:
    """As `minimize` before it; `predict` wants only what its outputs are computed from, and takes all as well."""
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(20, 3)).astype(np.float32), rng.normal(size=(20, 2)).astype(np.float32)

    def trained(as_loss: bool) -> tuple[mlc.Trainer, list[float]]:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        y = graph.dense(graph.input((8, 3), "x"), 2, name="y")
        error = ((y - graph.input((8, 2), "t")) ** 2).sum(-1)
        if not as_loss:
            graph.minimize(error)
        given = error if as_loss else None
        trainer = mlc.Trainer(graph, loss=given, outputs={"y": y}, device=mlc.Device.cpu())
        return trainer, trainer.fit({"x": x, "t": t}, epochs=3, verbose=0)["loss"]

    trainer, losses = trained(True)
    assert losses == trained(False)[1]
    expected = trainer.predict({"x": x, "t": t})
    assert expected.shape == (20, 2)
    for given in (x, {"x": x}, {"x": x[:5]}):
        found = trainer.predict(given)
        np.testing.assert_array_equal(found, expected[: len(found)])
    assert trainer.evaluate({"x": x, "t": t})["loss"] == pytest.approx(((expected - t) ** 2).sum(-1).mean(), rel=1e-5)
    with pytest.raises(mlc.DataError, match="'t'"):
        trainer.evaluate({"x": x})
    elsewhere = mlc.Graph()
    other = elsewhere.dense(elsewhere.input((8, 3)), 1)
    with pytest.raises(mlc.Error, match="of another graph"):
        mlc.Trainer(trainer.model.training.graph_objects[0], loss=other)


def test_a_tensor_made_of_losses_is_a_loss() -> None:
    """`loss=` may name what the graph would minimise by itself: one of its losses, or what is computed from them."""
    x, t = X, KINDS

    def trained(regularized: bool, given: bool) -> tuple[mlc.Trainer, Any]:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        y = graph.dense(graph.input((8, X.shape[1]), "x"), 3, name="y")
        error = graph.cross_entropy(y, graph.input((8,), "t", data_type=mlc.DataType.INT64))
        if regularized:
            error = error + 0.1 * (y**2).mean()
        trainer = mlc.Trainer(graph, loss=error if given else None, metrics=["accuracy"], device=mlc.Device.cpu())
        return trainer, trainer.fit({"x": x, "t": t}, epochs=2, verbose=0)

    for regularized in (False, True):
        trainer, history = trained(regularized, True)
        assert history == trained(regularized, False)[1]
        prediction = torch.tensor(trainer.predict(x))
        expected = (
            torch.nn.functional.cross_entropy(prediction, torch.tensor(t)) + 0.1 * regularized * (prediction**2).mean()
        )
        scores = trainer.evaluate(x, t)
        assert scores["loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert scores["accuracy"] == (prediction.numpy().argmax(1) == t).mean()
    graph = mlc.Graph()
    y = graph.dense(graph.input((8, 3), "x"), 3)
    first, second = (graph.loss(y, np.full((8, 3), value, np.float32), "mse") for value in (0, 1))
    for loss, other in ((second, first), ((y**2).mean(), first)):
        with pytest.raises(mlc.GraphError, match=f"its own loss, Loss '{other.label}'"):
            mlc.Trainer(graph, loss=loss)


@pytest.mark.parametrize("box", ["mse", lambda y, t: ((y - t) ** 2).mean(-1)], ids=["layer", "function"])
def test_a_loaded_model_predicts_every_output(box: Any, tmp_path: Path) -> None:
    graph = mlc.Graph()
    code = graph.dense(graph.input((6, 4), "x"), 5, name="code")
    graph.dense(code, 3, name="kind")
    graph.dense(code, 2, name="box")
    for outputs in (None, {"code": code}):
        trainer = _trainer({"kind": "softmax_cross_entropy", "box": box}, graph, outputs=outputs)
        trainer.fit(X, LABELS, verbose=0)
        expected = trainer.predict(X)
        assert list(expected) == [*(outputs or {}), "kind", "box"]
        for path, saved in ((tmp_path / "run", trainer.save), (tmp_path / "net", None)):
            if saved is None:
                mlc.save(path, trainer.inference)
            else:
                saved(path)
            predicted = [mlc.load(path).predict(X)]
            if saved is not None:
                again = mlc.Trainer(mlc.load(path), metrics={"kind": ["accuracy"]}, device=mlc.Device.cpu())
                predicted.append(again.predict(X))
                assert again.evaluate(X, LABELS)["loss"] == trainer.evaluate(X, LABELS)["loss"]
            for found in predicted:
                assert list(found) == list(expected)
                for name, array in expected.items():
                    np.testing.assert_array_equal(found[name], array)


def test_a_loaded_model_with_an_expression_as_its_loss_predicts(tmp_path: Path) -> None:
    graph = _graph("box")
    trainer = _trainer(lambda y, t: ((y - t) ** 2).mean(-1), graph, metrics=["mae"])
    trainer.fit(X, BOXES, verbose=0)
    trainer.save(tmp_path / "run")
    np.testing.assert_array_equal(mlc.load(tmp_path / "run").predict(X), trainer.predict(X))
    again = mlc.Trainer(mlc.load(tmp_path / "run"), metrics=["mae"], device=mlc.Device.cpu())
    assert again.evaluate(X, BOXES) == trainer.evaluate(X, BOXES)

    with_target = _graph("box")
    target = with_target.input((6, 2), "target")
    y = with_target.result_tensors(with_target.layers[0])[0]
    trainer = _trainer(((y - target) ** 2).mean(), with_target, outputs={"y": y})
    trainer.fit({"x": X, "target": BOXES}, verbose=0)
    trainer.save(tmp_path / "run")
    np.testing.assert_array_equal(mlc.load(tmp_path / "run").predict(X), trainer.predict(X))


def test_names_of_predictions_change_no_graph(tmp_path: Path) -> None:
    """A file of a version that did not store them is of the same graph."""
    trainer = _trainer({"kind": "softmax_cross_entropy", "box": "mse"})
    mlc.save(tmp_path / "run", trainer.training)
    named = mlc.Checkpoint(tmp_path / "run")
    assert list(named.description["predictions"]) == ["kind", "box"]
    definition_of(trainer.training).declared.predictions = {}
    mlc.save(tmp_path / "old", trainer.training)
    old = mlc.Checkpoint(tmp_path / "old")
    assert "predictions" not in old.description
    assert named.facts["graph_hash"] == old.facts["graph_hash"]


def test_a_weighed_loss_is_logged_once() -> None:
    losses = {"kind": "softmax_cross_entropy", "box": "huber"}
    history = _trainer(losses, loss_weights={"box": 0.5}).fit(X, LABELS, verbose=0)
    assert sorted(history.history) == ["box_loss", "kind_loss", "learning_rate", "loss"]
    assert history["loss"][0] == pytest.approx(history["kind_loss"][0] + history["box_loss"][0])


def test_metrics_are_of_the_only_output_that_is_compared() -> None:
    graph = mlc.Graph()
    code = graph.dense(graph.input((6, 4), "x"), 5, activation="tanh")
    outputs = {"code": code, "scores": graph.dense(code, 3)}
    trainer = _trainer("softmax_cross_entropy", graph, outputs=outputs, metrics=["accuracy"])
    trainer.fit(X, KINDS, verbose=0)
    right = (trainer.predict(X)["scores"].argmax(1) == KINDS).mean()
    assert trainer.evaluate(X, KINDS)["accuracy"] == pytest.approx(right)
    with pytest.raises(mlc.DataError, match="of which output"):
        _trainer({"kind": "mse", "box": "mse"}, metrics=["mae"])
