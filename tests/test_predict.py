"""`graph.predict(x)`: answers of a graph without a loss, and results by name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.building.contents import contents_of

X = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
CPU = mlc.Device.cpu()


def _graph() -> mlc.Graph:
    graph = mlc.Graph()
    h = graph.dense(graph.input((16, 4), "x"), 5, activation="relu", name="h")
    graph.dense(graph.dropout(h, 0.5), 3, name="head")
    return graph


def _by_hand(graph: mlc.Graph) -> tuple[Any, Any]:
    state = mlc.to_state_dict(graph)
    h = np.maximum(X @ state["h.weight"].T + state["h.bias"], 0)
    return h, h @ state["head.weight"].T + state["head.bias"]


def test_answers_in_one_call(tmp_path: Path) -> None:
    graph = _graph()
    h, y = _by_hand(graph)
    np.testing.assert_allclose(graph.predict(X, device=CPU), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(graph.predict(X, outputs="h", device=CPU), h, rtol=1e-5, atol=1e-6)
    both = graph.predict({"x": X}, outputs=["h", graph.nodes[-1].results[0]], batch_size=7, device=CPU)
    assert {name: array.shape for name, array in both.items()} == {"h": (50, 5), "head": (50, 3)}
    assert len(contents_of(graph).predictors) == 3
    named = graph.predict(X, outputs={"code": "h", "scores": graph.nodes[-1].results[0]}, device=CPU)
    assert np.array_equal(named["code"], both["h"])
    assert np.array_equal(named["scores"], both["head"])
    assert list(graph.predict(X, outputs={"code": "h"}, device=CPU)) == ["code"]
    for copied in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert np.array_equal(copied.predict(X, device=CPU), graph.predict(X, device=CPU))
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", device=CPU)
    trainer.fit(X, X[:, :3].argmax(1), verbose=0)
    assert np.array_equal(graph.predict(X, device=CPU), trainer.predict(X))  # the weights as they are now
    assert np.array_equal(trainer.training.predict(X), trainer.predict(X))
    mlc.save(tmp_path / "net.safetensors", trainer.training)
    assert np.array_equal(mlc.load(tmp_path / "net.safetensors").predict(X, device=CPU), trainer.predict(X))


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_samples_along_another_axis_are_not_joined_along_the_first(batch: int) -> None:
    graph = mlc.Graph()
    h = graph.dense(graph.input((batch, 4, 6), "x"), 3)
    turned, rows = h.transpose((1, 0, 2)), h.reshape((batch * 4, 3))
    back = turned.transpose((1, 0, 2))
    x = np.random.default_rng(0).standard_normal((8, 4, 6)).astype(np.float32)
    expected = graph.predict(x, outputs=h, device=CPU)
    assert np.array_equal(graph.predict(x, outputs=back, device=CPU), expected)
    assert np.array_equal(graph.predict(x, outputs=rows, device=CPU), expected.reshape(-1, 3))
    for samples in {8, 7, 1} - {batch}:
        with pytest.raises(mlc.DataError, match="first axis does not count the samples"):
            graph.predict(x[:samples], outputs=turned, device=CPU)
    if batch == 4:
        whole = graph.predict(x[:4], outputs=turned, device=CPU)  # one whole batch needs no joining
        assert np.array_equal(whole, expected[:4].transpose(1, 0, 2))


def test_what_the_graph_minimises_is_not_asked_for() -> None:
    graph = mlc.Graph()
    x, t = graph.input((16, 4), "x"), graph.input((16, 3), "t")
    y = graph.dense(x, 3, activation="sigmoid", name="y")
    graph.minimize((y - t) ** 2)
    assert graph.predict(X, outputs=y, device=CPU).shape == (50, 3)  # t need not be fed
    assert np.array_equal(graph.predict(X, outputs="y", device=CPU), graph.predict(X, outputs=y, device=CPU))
    with pytest.raises(mlc.GraphError, match=r"a graph whose loss is an expression\?"):
        graph.predict(X)


def test_refusals() -> None:
    with pytest.raises(mlc.GraphError, match="there is no output 'tail'"):
        _graph().predict(X, outputs="tail")
    with pytest.raises(mlc.GraphError, match=r"Graph\.predict: the graph has no layers"):
        mlc.Graph().predict(X)
    with pytest.raises(mlc.DataError, match=r"Graph.predict: 'x': samples of shape \(3,\)"):
        _graph().predict(X[:, :3], device=CPU)
    with pytest.raises(mlc.DataError, match=r"(?s)loss is None.*graph.predict\(x\)"):
        mlc.Trainer(_graph())


def test_outputs_of_one_name() -> None:
    """Graphs that are put together may name layers alike: none of them is left out, nor taken for the other."""
    inner = _graph()
    outer = mlc.InferenceGraph([inner])
    first = inner.nodes[-1].results[0]
    second = outer.dense(first, 2, name="head")
    with pytest.raises(mlc.GraphError, match=r"(?s)two of the outputs are called 'head'.*outputs={name: tensor"):
        outer.predict(X, outputs=[first, second], device=CPU)
    with pytest.raises(mlc.GraphError, match="several outputs are called 'head'"):
        outer.predict(X, outputs="head", device=CPU)
    found = outer.predict(X, outputs={"one": first, "two": second}, device=CPU)
    assert (found["one"].shape, found["two"].shape) == ((50, 3), (50, 2))


def test_a_graph_applied_with_outputs_by_name() -> None:
    network, graph = _graph(), mlc.Graph()
    x = graph.input((16, 4), "x")
    h, y = network(x, outputs=["h", "head"])
    assert (h.shape, y.shape) == ((16, 5), (16, 3))
    found = graph.predict(X, outputs=[h, y], device=CPU)
    expected = _by_hand(network)
    np.testing.assert_allclose(found[h.label], expected[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(mlc.GraphError, match="there is no output 'tail'"):
        network(x, outputs="tail")


def test_the_name_of_a_layer_with_an_activation_is_that_of_both() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((10, 4), "x"), 1, activation="sigmoid", name="p")
    trainer = mlc.Trainer(graph, loss={"p": "log"}, device=CPU)
    assert (trainer.predict(X) > 0).all()
    assert (trainer.predict(X) < 1).all()
