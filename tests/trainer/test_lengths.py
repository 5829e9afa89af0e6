"""Batches of different lengths in Trainer: streams, and lists of samples in buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

RNG = np.random.default_rng(5)
LENGTHS = [3, 7, 7, 3, 7, 7, 7, 3, 3, 7, 7]
X = [RNG.standard_normal((length, 4)).astype(np.float32) for length in LENGTHS]
TAGS = [RNG.integers(0, 3, length) for length in LENGTHS]
CLASSES = RNG.integers(0, 3, len(X))


def tagger(ignore_index: int | None = None, **options: Any) -> mlc.Trainer:
    """A class for every step."""
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    graph.dense(graph.lstm(graph.input((4, 5, 4), "x", varies=[1]), 6), 3)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1, ignore_index=ignore_index)
    return mlc.Trainer(graph, loss=loss, learning_rate=0.02, **options)


def classifier() -> mlc.Trainer:
    """A class for every sequence."""
    graph = mlc.Graph()
    steps = graph.lstm(graph.input((4, 5, 4), "x", varies=[1]), 6)
    mean = graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, dimension=1), source=steps)
    graph.dense(graph.reshape(shape=(4, -1), source=mean), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.02)


def test_lists_of_samples() -> None:
    model = tagger(metrics=["accuracy", "f1"])
    history = model.fit(X, TAGS, epochs=12, validation=(X, TAGS), verbose=0)
    assert history["loss"][-1] < history["loss"][0]
    assert model.length.steps_per_epoch == 1 + 2  # 4 and 7 samples of two lengths, in batches of 4
    predictions = model.predict(X)
    assert [one.shape for one in predictions] == [(length, 3) for length in LENGTHS]
    for sample, prediction in zip(X[:2], predictions[:2], strict=True):
        np.testing.assert_allclose(model.predict(sample[None])[0], prediction, rtol=1e-5, atol=1e-6)
    right = np.concatenate([p.argmax(-1) == t for p, t in zip(predictions, TAGS, strict=True)])
    scores = model.evaluate(X, TAGS)
    per_sample = [np.mean(p.argmax(-1) == t) for p, t in zip(predictions, TAGS, strict=True)]
    assert scores["accuracy"] == pytest.approx(np.mean(per_sample))
    assert right.mean() > 0.5


def objects(parts: list[Any]) -> np.ndarray:
    """As NumPy and pandas keep lists of several lengths."""
    found = np.empty(len(parts), object)
    found[:] = parts
    return found


PLAIN = [one.tolist() for one in X], [one.tolist() for one in TAGS]
PAIRS = list(zip(*PLAIN, strict=True))


@pytest.mark.parametrize(
    "data",
    [
        (list(zip(X, TAGS, strict=True)),),
        (PAIRS,),
        ([list(pair) for pair in PAIRS],),
        ([{"x": x, "labels": y} for x, y in PAIRS],),
        ([({"x": x}, y) for x, y in PAIRS],),
        ({"x": PLAIN[0], "labels": PLAIN[1]},),
        (objects(PLAIN[0]), objects(PLAIN[1])),
        ({"x": objects(X)}, objects(TAGS)),
    ],
    ids=["pairs", "plain pairs", "lists", "dicts", "dicts of inputs", "one dict", "objects", "arrays as objects"],
)
def test_samples_of_several_lengths_in_every_form(data: Any) -> None:
    wanted = tagger().fit(X, TAGS, epochs=2, verbose=0)
    model = tagger()
    assert model.fit(*data, epochs=2, verbose=0) == wanted
    assert model.evaluate(*data) == model.evaluate(X, TAGS)
    x = {"x": data[0]["x"]} if isinstance(data[0], dict) else data[0]
    for one, other in zip(model.predict(x), model.predict(X), strict=True):
        np.testing.assert_array_equal(one, other)


def test_metrics_and_losses_of_padded_samples_do_not_depend_on_the_padding() -> None:
    """Every step that is no padding counts once, however long the samples of its batch are."""
    model = tagger(-100, metrics=["accuracy", "perplexity"])
    given = [np.pad(tags.astype(int), (0, 3 * (k % 2)), constant_values=-100) for k, tags in enumerate(TAGS)]
    x = [np.pad(one, ((0, 3 * (k % 2)), (0, 0))) for k, one in enumerate(X)]
    scores = model.evaluate(x, given)
    predictions = [one[: len(tags)].astype(np.float64) for one, tags in zip(model.predict(x), TAGS, strict=True)]
    right = np.concatenate([p.argmax(-1) == t for p, t in zip(predictions, TAGS, strict=True)])
    logs = np.concatenate([p - np.log(np.exp(p).sum(-1, keepdims=True)) for p in predictions])
    mean = -logs[np.arange(len(logs)), np.concatenate(TAGS).astype(int)].mean()
    assert scores["accuracy"] == pytest.approx(right.mean())
    assert scores["loss"] == pytest.approx(mean, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(np.exp(mean), rel=1e-5)


def test_a_class_for_every_sequence() -> None:
    model = classifier()
    history = model.fit(X, CLASSES, epochs=6, verbose=0)
    assert history["accuracy"][-1] >= history["accuracy"][0]
    assert model.predict(X).shape == (11, 3)


def test_streams_of_batches_and_losses_against_pytorch() -> None:
    model = tagger()
    batches = [(np.stack([X[i] for i in g]), np.stack([TAGS[i] for i in g])) for g in ([0, 3], [1, 4, 5], [2, 6, 9])]
    predictions = [model.predict(x) for x, _ in batches]
    logits = [torch.tensor(p).reshape(-1, 3) for p in predictions]
    losses = [
        torch.nn.functional.cross_entropy(p, torch.tensor(y).ravel()).item()
        for p, (_, y) in zip(logits, batches, strict=True)
    ]
    expected = np.average(losses, weights=[2, 3, 3])
    assert model.evaluate(batches)["loss"] == pytest.approx(expected, rel=1e-5)
    assert model.fit(batches, epochs=2, verbose=0).loss.values[0] == pytest.approx(losses[0], rel=1e-5)


def test_shuffled_and_resumed(tmp_path: Path) -> None:
    whole = tagger().fit(X, TAGS, epochs=4, verbose=0)
    first = tagger()
    first.fit(X, TAGS, epochs=2, verbose=0)
    first.save(tmp_path / "half")
    assert tagger().fit(X, TAGS, epochs=4, resume=tmp_path / "half", verbose=0) == whole
    assert tagger().fit(X, TAGS, epochs=4, shuffle_seed=9, verbose=0) != whole


def test_weights_per_step() -> None:
    weights = [RNG.random(length).astype(np.float32) for length in LENGTHS]
    one = tagger()
    one.fit(X, TAGS, class_weight=[1, 2, 3], verbose=0)
    assert np.isfinite(one.evaluate(X, TAGS)["loss"])
    batches = [(X[i][None], TAGS[i][None], weights[i][None]) for i in range(3)]
    two = tagger()
    assert np.isfinite(two.fit(batches, verbose=0)["loss"][0])


def test_refusals() -> None:
    with pytest.raises(mlc.DataError, match="different numbers of samples"):
        tagger().fit(X, TAGS[:-1])
    with pytest.raises(mlc.DataError, match=r"samples of shape \(3, 5\)"):
        tagger().fit([np.zeros((2, 3, 5), np.float32)], verbose=0)
    graph = mlc.Graph()
    graph.dense(graph.input((4, 5, 4), "x"), 3)
    with pytest.raises(mlc.DataError, match="give all samples one shape"):
        mlc.Trainer(graph, loss="mse").fit(X, X)
    with pytest.raises(mlc.DataError, match="'x': the rows of sample 1 have different lengths"):
        tagger().predict([[[1.0] * 4], [[1.0] * 4, [1.0]]])
    with pytest.raises(mlc.DataError, match="samples have different parts"):
        tagger().fit([(X[0], TAGS[0]), (X[1],)])
    with pytest.raises(mlc.DataError, match=r"(?s)shapes \(3, 4\) and \(7, 4\) cannot be one batch.*as a list: fit"):
        tagger().fit(iter(zip(X, TAGS, strict=True)), verbose=0)
