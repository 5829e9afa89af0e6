"""Graphs that run full batches only: found out before the first step, and the last batch filled up or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.trainer.data import Batch
from mlcompute.trainer.snapshot import Snapshot
from mlcompute.trainer.steps import repeated_step
from tests.trainer.nets import assert_same, everything, points

X, Y = points()  # 70 samples in batches of 16 leave 6
WEIGHTS = np.random.default_rng(3).random(70).astype(np.float32)


def model(device: mlc.Device, *, fixed: bool = True, norm: bool = False, reduction: str = "mean") -> mlc.Trainer:
    """`fixed`: with a shape in the middle that only a full batch has, as exporters write it."""
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    h = graph.dense(graph.input((16, 4), "x"), 8, activation="tanh", name="hidden")
    if norm:
        h = graph.normalize(h)
    if fixed:
        h = graph.node(mlc.ReshapeLayer((16, 8)), source=graph.node(mlc.ReshapeLayer((1, 128)), source=h))
    h = graph.dropout(h, 0.2)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType[reduction.upper()])
    graph.dense(h, 3, name="head")
    return mlc.Trainer(graph, loss=loss, metrics=["accuracy"], optimizer="sgd", learning_rate=0.1, device=device)


def seeded_fit(trainer: mlc.Trainer, *data: Any, **options: Any) -> mlc.History:
    """The same dropout for every trainer."""
    mlc.Platform.set_rng_seed_to(7)
    return trainer.fit(*data, verbose=0, **options)


def test_a_graph_that_cannot_is_found_out_before_the_first_step(device: mlc.Device) -> None:
    trainer = model(device)
    before = everything(trainer)
    message = r"(?s)70 samples in batches of 16 leave a last batch of 6, which.*Reshape.*'pad'.*'drop'.*multiple of 16"
    with pytest.raises(mlc.ShapeError, match=message):
        trainer.fit(X, Y, verbose=0)
    with pytest.raises(mlc.ShapeError, match="batch_size is 8, which this graph cannot run"):
        trainer.fit(X, Y, batch_size=8, verbose=0)
    with pytest.raises(mlc.DataError, match="last_batch is 'fill'"):
        trainer.fit(X, Y, last_batch="fill", verbose=0)
    assert_same(everything(trainer), before)
    trainer.fit(X[:64], Y[:64], verbose=0)
    with pytest.raises(mlc.ShapeError, match=r"(?s)a batch has 6 samples, which this graph cannot run.*'pad'"):
        trainer.fit([(X[:16], Y[:16]), (X[:6], Y[:6])], verbose=0)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"sample_weight": WEIGHTS}, {"batch_size": 8}], ids=" ".join
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_filling_up_changes_no_number(reduction: str, options: dict[str, Any], device: mlc.Device) -> None:
    """Against a graph that runs small batches as they are; dropout draws the same numbers for the samples."""
    padded, small = model(device, reduction=reduction), model(device, fixed=False, reduction=reduction)
    settings: dict[str, Any] = {"epochs": 2, "validation": (X, Y), **options}
    if "batch_size" in options:  # padded from 8 to 16: other places, other random numbers
        padded, small = (without_dropout(device, fixed=fixed, reduction=reduction) for fixed in (True, False))
    found = seeded_fit(padded, X, Y, last_batch="pad", **settings)
    expected = seeded_fit(small, X, Y, **settings)
    for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    for one, other in zip(padded.copy_parameters(), small.copy_parameters(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert padded.evaluate(X, Y)["loss"] == pytest.approx(small.evaluate(X, Y)["loss"], rel=1e-4)
    np.testing.assert_allclose(padded.predict(X), small.predict(X), rtol=1e-3, atol=1e-5)


def without_dropout(device: mlc.Device, *, fixed: bool, reduction: str) -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    h = graph.dense(graph.input((16, 4), "x"), 8, activation="tanh", name="hidden")
    if fixed:
        h = graph.node(mlc.ReshapeLayer((16, 8)), source=graph.node(mlc.ReshapeLayer((1, 128)), source=h))
    graph.dense(h, 3, name="head")
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType[reduction.upper()])
    return mlc.Trainer(graph, loss=loss, metrics=["accuracy"], optimizer="sgd", learning_rate=0.1, device=device)


def test_batches_of_a_stream_are_filled_up(device: mlc.Device) -> None:
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]
    streamed, arrays = model(device), model(device)
    found = seeded_fit(streamed, batches, epochs=2, last_batch="pad")
    assert found == seeded_fit(arrays, X, Y, epochs=2, last_batch="pad", shuffle=False)
    assert_same(everything(streamed), everything(arrays))
    assert streamed.predict(batches).shape == (70, 3)


def test_the_last_batch_can_be_left_out(device: mlc.Device, tmp_path: Path) -> None:
    trainer, whole = model(device), model(device)
    history = seeded_fit(trainer, X, Y, epochs=2, last_batch="drop", shuffle=False)
    assert trainer.step == 8
    assert history == seeded_fit(whole, X[:64], Y[:64], epochs=2, shuffle=False)
    assert_same(everything(trainer), everything(whole))
    streamed = model(device)
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]
    assert seeded_fit(streamed, batches, epochs=2, last_batch="drop") == history
    with pytest.raises(mlc.DataError, match="10 samples make no batch of 16"):
        trainer.fit(X[:10], Y[:10], last_batch="drop", verbose=0)
    trainer.fit(X, Y, last_batch="drop", verbose=0)
    trainer.save(tmp_path / "run")
    with pytest.raises(mlc.DataError, match="saved with last_batch 'drop'"):
        whole.fit(X, Y, epochs=2, last_batch="pad", resume=tmp_path / "run", verbose=0)
    whole.fit(X, Y, epochs=2, last_batch="drop", resume=tmp_path / "run", verbose=0)


def test_samples_that_influence_each_other_are_not_filled_up(device: mlc.Device) -> None:
    trainer = model(device, norm=True)
    before = everything(trainer)
    for x, y in ((X, Y), (X[:65], Y[:65]), ([(X[:6], Y[:6])], None)):
        with pytest.raises(mlc.DataError, match=r"(?s)samples of a batch influence each other.*'drop'"):
            trainer.fit(x, y, last_batch="pad", verbose=0)
    assert_same(everything(trainer), before)
    trainer.fit(X, Y, last_batch="drop", validation=(X, Y), verbose=0)  # running statistics: validation is exact
    small = model(device, norm=True, fixed=False)
    small.set_weights(trainer.copy_weights())
    np.testing.assert_allclose(trainer.predict(X), small.predict(X), rtol=1e-4, atol=1e-6)
    assert trainer.evaluate(X, Y)["loss"] == pytest.approx(small.evaluate(X, Y)["loss"], rel=1e-5)


def test_losses_without_weights_are_not_filled_up(device: mlc.Device) -> None:
    graph = mlc.Graph()
    x = graph.input((16, 4), "x")
    h = graph.node(mlc.ReshapeLayer((16, 4)), source=graph.node(mlc.ReshapeLayer((1, 64)), source=x))
    for name in ("one", "two"):
        labels = mlc.Tensor(shape=(16, 3))
        labels.label = name
        graph.loss(graph.dense(h, 3, name=f"head {name}"), labels)
    graph.minimize((h**2).mean(), name="size")
    trainer = mlc.Trainer(graph, device=device)
    labels = {"one": Y, "two": Y}
    with pytest.raises(mlc.DataError, match=r"(?s)not every loss takes weights.*'drop'"):
        trainer.fit(X, labels, last_batch="pad", verbose=0)
    with pytest.raises(mlc.DataError, match="validation: a short batch cannot be filled up"):
        trainer.fit(X, labels, last_batch="drop", validation=(X, labels), verbose=0)
    trainer.fit(X, labels, last_batch="drop", verbose=0)
    assert trainer.predict(X).shape == (70, 3)


def test_a_repeated_first_step_drops_the_same(device: mlc.Device) -> None:
    trainer = model(device, fixed=False)
    batch = Batch({"x": X[:16]}, {"labels": Y[:16]}, {}, 16)
    before = Snapshot(trainer.model)
    first = repeated_step(trainer.model, [batch])
    before.restore()
    assert repeated_step(trainer.model, [batch]) == first
