"""Loss functions are given labels as the user gives them: integers stay integers, of their own shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

RNG = np.random.default_rng(5)
X = RNG.standard_normal((12, 5)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 12)
SOME = np.where(np.arange(12) % 4 == 1, -100, CLASSES)
ONE_HOT = np.eye(3, dtype=np.float32)[CLASSES]


def _picked(y: Any, t: Any) -> Any:
    return -y.log_softmax(-1).gather(1, t[:, None])


def _margin(y: Any, t: Any) -> Any:
    where = mlc.where if isinstance(t, mlc.Tensor) else torch.where
    right = y.gather(1, where(t != -100, t, 0)[:, None])
    return where(t != -100, (y - right + 1).relu().sum(-1), 0.0)


def _same_class(y: Any, t: Any) -> Any:
    """Contrastive: samples of one class are to lie together. Labels are no numbers of outputs."""
    alike = t[:, None].equal(t[None]) if isinstance(t, mlc.Tensor) else t[:, None] == t[None]
    where = mlc.where if isinstance(t, mlc.Tensor) else torch.where
    return where(alike, -(y @ y.T), y @ y.T)


def _mixed(y: Any, t: Any) -> Any:
    """A cross entropy, and something else of the same labels."""
    if isinstance(t, mlc.Tensor):
        return mlc.cross_entropy(y, t) + mlc.where(t == 1, y[:, 0], 0.0).mean()
    return torch.nn.functional.cross_entropy(y, t) + torch.where(t == 1, y[:, 0], 0.0).mean()


def _pairs(y: Any, t: Any) -> Any:
    """Labels of another shape than the prediction."""
    return (y - t.reshape(6, -1)[:, :3]) ** 2


def _dense(y: Any, t: Any) -> Any:
    return -(t * y.log_softmax(-1)).sum(-1)


LOSSES: list[tuple[Callable[..., Any], Any]] = [
    (_picked, CLASSES),
    (_margin, SOME),
    (_same_class, 100 * CLASSES),
    (_mixed, CLASSES),
    (_pairs, RNG.integers(-3, 9, (12, 2, 4))),
    (_dense, ONE_HOT),
    (_dense, ONE_HOT.astype(int)),
]


def _graph() -> mlc.Graph:
    graph = mlc.Graph()
    graph.dense(graph.input((6, 5), "x"), 3, name="head")
    return graph


def _theirs(graph: mlc.Graph, function: Callable[..., Any], labels: Any) -> list[float]:
    head = graph.layer("head")
    w, b = (torch.tensor(np.array(tensor.data), requires_grad=True) for tensor in (head.weights, head.biases))
    losses = []
    for first in range(0, 12, 6):
        loss = function(torch.tensor(X[first : first + 6]) @ w.T + b, torch.tensor(labels[first : first + 6])).mean()
        for p, dp in zip((w, b), torch.autograd.grad(loss, (w, b)), strict=True):
            with torch.no_grad():
                p -= 0.1 * dp
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("function", "labels"), LOSSES, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("named", [False, True], ids=["one", "by output"])
def test_numbers_are_those_of_pytorch(function: Callable[..., Any], labels: Any, named: bool) -> None:
    graph = _graph()
    expected = _theirs(graph, function, labels)
    loss, y = ({"head": function}, {"head": labels}) if named else (function, labels)
    trainer = mlc.Trainer(graph, loss=loss, optimizer=mlc.SGDOptimizer(learning_rate=0.1))
    history = trainer.fit(X, y, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(history["loss"], [np.mean(expected)], rtol=2e-5)


def test_every_batch_is_seen_as_it_is() -> None:
    """Batches of a stream, and labels of another kind later."""
    trainer = mlc.Trainer(_graph(), loss=lambda y, t: _dense(y, t) if len(t.shape) == 2 else _picked(y, t))
    batches = [(X[:6], CLASSES[:6]), (X[6:], CLASSES[6:])]
    assert trainer.evaluate(batches)["loss"] == pytest.approx(trainer.evaluate(X, ONE_HOT)["loss"], rel=1e-5)
    assert trainer.evaluate(X, CLASSES)["loss"] == pytest.approx(trainer.evaluate(X, ONE_HOT)["loss"], rel=1e-5)
    trainer.fit(batches, epochs=2, validation=(X, ONE_HOT), verbose=0)


def test_labels_of_a_shape_nobody_can_guess() -> None:
    with pytest.raises(mlc.ShapeError, match=r"neither labels of shape \(6, 3\) nor .*\n(.*\n)*.*graph.minimize"):
        mlc.Trainer(_graph(), loss=lambda y, t: (y - t[:, 3:6]) ** 2)


@pytest.mark.parametrize("named", [False, True], ids=["one", "by output"])
def test_labels_a_function_cannot_take_are_refused(named: bool) -> None:
    trainer = mlc.Trainer(_graph(), loss={"head": _dense} if named else _dense)
    labels = {"head": CLASSES} if named else CLASSES
    with pytest.raises(mlc.DataError, match=r"cannot take '\w+' of shape \(6,\), INT64\n(.*\n)*.*is one-hot"):
        trainer.fit(X, labels, verbose=0)
    assert trainer.fit(X, {"head": ONE_HOT} if named else ONE_HOT, verbose=0)["loss"]  # and nothing has happened
