"""copy.deepcopy, pickle, joblib and other processes: weights, optimizer state and time step travel, programs do not."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest

import mlcompute as mlc

RNG = np.random.default_rng(2)
X = RNG.standard_normal((32, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def trainer() -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    graph.dense(graph.dropout(graph.dense(graph.input((16, 4), "x"), 8, activation="relu"), 0.2), 3, name="head")
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.02)


def predicted(model: mlc.Trainer) -> Any:
    """In another process."""
    return model.predict(X)


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle])
def test_trainers(way: Any) -> None:
    model = trainer()
    history = model.fit(X, Y, epochs=3, verbose=0)
    other = way(model)
    assert np.array_equal(other.predict(X), model.predict(X))
    assert other.history == history
    for one in (model, other):
        one.fit(X, Y, verbose=0)
    assert other.optimizer.time_step == model.optimizer.time_step
    before = model.predict(X)
    other.fit(X, Y, epochs=1, verbose=0)
    assert np.array_equal(model.predict(X), before)
    model.fit(X, Y, sample_weight=np.ones(32), verbose=0)
    assert np.isfinite(way(model).evaluate(X, Y)["loss"])


def test_several_outputs() -> None:
    graph = mlc.Graph()
    hidden = graph.dense(graph.input((16, 4), "x"), 8)
    outputs = {"a": graph.dense(hidden, 3), "b": graph.dense(hidden, 1)}
    losses: Any = {"a": "softmax_cross_entropy", "b": "mse"}
    model = mlc.Trainer(graph, outputs=outputs, loss=losses, metrics={"a": ["f1"], "b": ["mae"]})
    labels = {"a": Y, "b": X[:, :1]}
    model.fit(X, labels, verbose=0)
    other = through_pickle(model)
    assert other.evaluate(X, labels) == model.evaluate(X, labels)
    assert other.predict(X).keys() == {"a", "b"}


def test_optimizer_state_travels() -> None:
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    graph.dense(graph.input((16, 4), "x"), 3)
    model = mlc.Trainer(graph, loss="softmax_cross_entropy", learning_rate=0.02)
    model.fit(X, Y, epochs=2, shuffle_seed=0, verbose=0)
    other = through_pickle(model)
    assert model.fit(X, Y, epochs=2, shuffle_seed=1, verbose=0) == other.fit(
        X, Y, epochs=2, shuffle_seed=1, verbose=0
    )


def test_graphs_are_compiled_where_they_arrive() -> None:
    model = trainer()
    state = mlc.Platform.rng_state()
    for graph in (model.training, model.inference, mlc.InferenceGraph([model.training])):
        arrived = through_pickle(graph)
        assert type(arrived) is type(graph)
        assert arrived.device is None
        assert np.array_equal(arrived.layer("head").weights.data, graph.layer("head").weights.data)
    arrived = through_pickle(model.training)
    with pytest.raises(mlc.ExecutionError, match="not compiled"):
        arrived.execute({"x": X[:16]})
    arrived.compile(device=mlc.Device.cpu())
    assert mlc.Platform.rng_state() == state, "the process's random stream is left alone"


def test_joblib_and_other_processes(tmp_path: Path) -> None:
    model = trainer()
    model.fit(X, Y, epochs=1, verbose=0)
    joblib.dump(model, tmp_path / "model")
    assert np.array_equal(joblib.load(tmp_path / "model").predict(X), model.predict(X))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert np.array_equal(pool.apply(predicted, (model,)), model.predict(X))


def test_tensors_and_their_like() -> None:
    weights = mlc.Tensor(shape=(2, 3), fill_with_data=2.0)
    weights.label = "w"
    arrived = through_pickle(weights)
    assert arrived.label == "w"
    assert np.array_equal(arrived.data, weights.data)
    graph = mlc.Graph()
    x = graph.input((4, 5, 3), "x", varies=[1])
    assert through_pickle(x).varies == (1,)
    with pytest.raises(TypeError, match="has no values to pickle: pickle the graph"):
        pickle.dumps(graph.dense(x, 2))


def test_what_cannot_travel_says_so() -> None:
    model = trainer()

    class Copying(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            with pytest.raises(TypeError, match="it is training"):
                pickle.dumps(self.trainer)

    model.fit(X, Y, callbacks=[Copying()], verbose=0)


def test_a_device_says_what_to_do_instead() -> None:
    with pytest.raises(TypeError, match=r"a Device cannot be pickled.*mlc\.Device\.cpu\(\)"):
        pickle.dumps(mlc.Device.cpu())
