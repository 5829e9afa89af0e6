"""Samples as lists of numbers, as JSON has them: read as arrays are, or refused where they can mean two things."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.trainer.nets import points, trainer

X, Y = points(32)
PLAIN = list(zip(X.tolist(), Y.tolist(), strict=True))


@pytest.mark.parametrize(
    "samples",
    [
        PLAIN,
        [list(pair) for pair in PLAIN],
        [(tuple(x), y) for x, y in PLAIN],
        [{"x": x, "labels": y} for x, y in PLAIN],
        [({"x": x}, y) for x, y in PLAIN],
        lambda epoch: iter(PLAIN),
    ],
    ids=["pairs", "lists", "tuples", "dicts", "dicts of inputs", "generator"],
)
def test_lists_of_samples_are_read_as_arrays(samples: Any) -> None:
    wanted = trainer().fit(X, Y, shuffle=False, verbose=0)
    assert trainer().fit(samples, shuffle=False, verbose=0) == wanted
    model = trainer()
    assert model.evaluate(samples) == model.evaluate(X, Y)
    np.testing.assert_array_equal(model.predict(samples), model.predict(X))


def test_several_inputs() -> None:
    def made() -> mlc.Trainer:
        mlc.Platform.set_rng_seed_to(1)
        graph = mlc.Graph()
        a, b = graph.input((4, 3), "a"), graph.input((4, 2), "b")
        graph.dense(graph.concatenate([a, b], dimension=1), 2)
        return mlc.Trainer(graph, loss="mse", optimizer=mlc.SGDOptimizer(learning_rate=0.1))

    a, b = X[:8, :3], X[:8, :2]
    wanted = made().fit([a, b], b, shuffle=False, verbose=0)
    samples = [((first, second), second) for first, second in zip(a.tolist(), b.tolist(), strict=True)]
    assert made().fit(samples, shuffle=False, verbose=0) == wanted


def test_what_can_mean_two_things_is_refused() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((4, 3), "x"), 3)
    model = mlc.Trainer(graph, loss="mse", optimizer="adam")
    rows = X[:2, :3].tolist()
    for data in ([rows, rows], (rows, rows)):  # two batches of two, or two pairs
        with pytest.raises(mlc.DataError, match=r"(?s)nested lists may be samples of a batch.*as a tuple"):
            model.fit(data, verbose=0)
    pairs = [tuple(map(tuple, rows)), tuple(map(tuple, rows))]  # two batches, or two pairs
    with pytest.raises(mlc.DataError, match=r"samples of shape \(2, 3\)"):
        model.predict(pairs)


def test_ragged_samples_and_a_pair_of_arrays() -> None:
    with pytest.raises(mlc.DataError, match=r"(?s)samples and batches come mixed.*all samples one shape"):
        trainer().fit([*PLAIN, ([1.0, 2.0], 0)], verbose=0)
    with pytest.raises(mlc.ShapeError, match=r"(?s)batch 0 has 32 samples.*fit\(x, y\), not fit\(\(x, y\)\)"):
        trainer().fit((X, Y), verbose=0)
