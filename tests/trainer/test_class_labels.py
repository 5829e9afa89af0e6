"""A Trainer feeds integer class labels as they are; dense ones still train, and labels may be ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

import mlcompute as mlc

RNG = np.random.default_rng(5)
X = RNG.standard_normal((40, 6)).astype(np.float32)
Y = RNG.integers(0, 4, 40)
HOT = np.eye(4, dtype=np.float32)[Y]
WEIGHTS = RNG.standard_normal((4, 6)).astype(np.float32)


def trainer(**options: Any) -> mlc.Trainer:
    graph = mlc.Graph()
    graph.dense(graph.input((16, 6), "x"), 4, weights=mlc.Tensor(shape=(4, 6), data=WEIGHTS), name="head")
    loss: Any = "softmax_cross_entropy"
    if options:
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, **options)
    return mlc.Trainer(graph, loss=loss, metrics=["accuracy", "mae"], learning_rate=0.05)


def label_shape(made: mlc.Trainer) -> tuple[int, ...]:
    return made.model.feed.labels["labels"].descriptor.shape


class Fed(mlc.callbacks.Callback):
    """The labels of every batch."""

    def __init__(self) -> None:
        self.labels: list[np.ndarray[Any, Any]] = []

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        assert self.trainer is not None
        self.labels += [each.labels["labels"] for each in self.trainer.batches]


def test_integer_labels_are_fed_as_they_are() -> None:
    made, fed = trainer(), Fed()
    made.fit(X, Y, epochs=1, shuffle=False, callbacks=[fed], verbose=0)
    assert label_shape(made) == (16,)
    assert [array.dtype.kind for array in fed.labels] == ["i"] * 3
    np.testing.assert_array_equal(np.concatenate(fed.labels), Y)


@pytest.mark.parametrize("as_stream", [False, True])
def test_dense_labels_train_alike_before_and_after(as_stream: bool) -> None:
    def given(y: Any) -> tuple[Any, ...]:
        return ([(X[i : i + 16], y[i : i + 16]) for i in range(0, 40, 16)],) if as_stream else (X, y)

    by_index, dense, mixed = trainer(), trainer(), trainer()
    first = by_index.fit(*given(Y), epochs=2, shuffle=False, verbose=0)
    second = dense.fit(*given(HOT), epochs=2, shuffle=False, verbose=0)
    assert label_shape(dense) == (16, 4)
    mixed.fit(*given(Y), epochs=1, shuffle=False, verbose=0)
    third = mixed.fit(*given(HOT), epochs=1, shuffle=False, verbose=0)
    for history in (second, third):
        assert history["loss"][-1] == pytest.approx(first["loss"][-1], rel=1e-5)
        assert history["mae"][-1] == pytest.approx(first["mae"][-1], rel=1e-5)
        assert history["accuracy"][-1] == first["accuracy"][-1]
    # Integer labels still train: they become one-hot where the graph takes dense labels already.
    fourth, fifth = (one.fit(*given(Y), epochs=1, shuffle=False, verbose=0) for one in (by_index, mixed))
    assert fourth["loss"][0] == pytest.approx(fifth["loss"][0], rel=1e-5)
    assert dense.evaluate(X, Y)["loss"] == pytest.approx(dense.evaluate(X, HOT)["loss"], rel=1e-6)


@pytest.mark.parametrize("last_batch", ["smaller", "pad"])
def test_ignored_labels(last_batch: Any) -> None:
    made = trainer(ignore_index=-100)
    y = Y.copy()
    y[::3] = -100
    history = made.fit(X, y, epochs=1, shuffle=False, last_batch=last_batch, validation=(X, y), verbose=0)
    w = torch.tensor(WEIGHTS, requires_grad=True)
    b = torch.zeros(4, requires_grad=True)
    adam = torch.optim.Adam([w, b], lr=0.05, eps=1e-8)
    losses = []
    for i in range(0, 40, 16):
        adam.zero_grad()
        loss = F.cross_entropy(torch.tensor(X[i : i + 16]) @ w.T + b, torch.tensor(y[i : i + 16]))
        losses.append(loss.item())
        torch.autograd.backward(loss)
        adam.step()
    np.testing.assert_allclose(history.loss.values, losses, rtol=1e-4)
    right = (X @ w.detach().numpy().T + b.detach().numpy()).argmax(1) == y
    assert history["val_accuracy"][0] == pytest.approx(right.sum() / (y >= 0).sum())


def test_labels_that_are_no_class() -> None:
    with pytest.raises(mlc.DataError, match=r"(?s)go from 0 to 7, the graph has 4 classes.*ignore_index=-100"):
        trainer().fit(X, np.where(Y == 1, 7, Y), verbose=0)
    with pytest.raises(mlc.DataError, match=r"(?s)0 to 3, or -100, which is ignored"):
        trainer(ignore_index=-100).fit(X, np.where(Y == 1, -1, Y), verbose=0)
    with pytest.raises(mlc.DataError, match="a mean divides by class weights"):
        weights = mlc.Tensor(shape=(4,), data=np.ones(4, np.float32))
        trainer(class_weights=weights).fit(X, Y, last_batch="pad", verbose=0)


ONE_PER_OUTPUT = (
    r"(?s)expected  shape \(40, 4\).*for every output.*'softmax_cross_entropy'.*np\.eye\(4\)\[labels\].*\(40, 4\)"
)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "sigmoid_cross_entropy", "hinge", "cosine_distance"])
@pytest.mark.parametrize("y", [Y, Y[:, None], Y.astype(np.float32), Y > 1, Y.astype(np.uint8)])
def test_only_losses_over_classes_take_class_labels(loss: Any, y: Any) -> None:
    """PyTorch and Keras repeat such labels, or refuse them; one-hot they never are."""
    made = trainer_with(loss)
    before = made.copy_parameters()
    for call in (
        lambda: made.fit(X, y, verbose=0),
        lambda: made.evaluate(X, y),
        lambda: made.fit(X, HOT, validation=(X, y), verbose=0),
        lambda: made.fit(X, {"labels": y}, verbose=0),
    ):
        with pytest.raises(mlc.DataError, match=ONE_PER_OUTPUT):
            call()
    for was, now in zip(before, made.copy_parameters(), strict=True):
        np.testing.assert_array_equal(was, now)
    with pytest.raises(mlc.DataError, match=r"(?s)batch 0.*for every output"):
        made.fit([(X[:16], y[:16])], verbose=0)
    assert np.isfinite(made.fit(X, HOT, verbose=0)["loss"][0])


def trainer_with(loss: Any) -> mlc.Trainer:
    graph = mlc.Graph()
    y = graph.dense(graph.input((16, 6), "x"), 4, weights=mlc.Tensor(shape=(4, 6), data=WEIGHTS), name="head")
    if loss == "cosine_distance":  # which is for vectors of length 1
        y / (y * y).sum(1, keepdims=True).sqrt()
    return mlc.Trainer(graph, loss=loss)


def test_class_labels_of_several_outputs() -> None:
    graph = mlc.Graph()
    x = graph.input((16, 6), "x")
    graph.dense(x, 4, name="kind")
    graph.dense(x, 4, name="box")
    made = mlc.Trainer(graph, loss={"kind": "softmax_cross_entropy", "box": "mse"})
    with pytest.raises(mlc.DataError, match=r"(?s)'box'.*for every output"):
        made.fit(X, {"kind": Y, "box": Y}, verbose=0)
    made.fit(X, {"kind": Y, "box": HOT}, verbose=0)


def test_class_labels_of_pixels_for_numbers() -> None:
    graph = mlc.Graph()
    graph.convolution(graph.input((4, 2, 5, 5), "x"), 3, kernel=1)
    x, y = RNG.standard_normal((4, 2, 5, 5)).astype(np.float32), RNG.integers(0, 3, (4, 5, 5))
    with pytest.raises(mlc.DataError, match=r"(?s)np\.moveaxis\(np\.eye\(3\)\[labels\], -1, 1\).*\(4, 3, 5, 5\)"):
        mlc.Trainer(graph, loss="mse").fit(x, y, verbose=0)


def test_a_graph_with_a_loss_of_its_own() -> None:
    graph = mlc.Graph()
    words = graph.input((4, 6), "words", data_type=mlc.DataType.INT32)
    following = graph.input((4, 6), "following", data_type=mlc.DataType.INT32)
    graph.cross_entropy(graph.dense(graph.embedding(words, 30, 8), 30), following, ignore_index=0)
    made = mlc.Trainer(graph, learning_rate=0.05, metrics=["accuracy"])
    given = RNG.integers(1, 30, (8, 6))
    history = made.fit({"words": given}, {"following": (given * 7) % 30}, epochs=30, verbose=0)
    assert history["loss"][-1] < history["loss"][0] / 4
    assert history["accuracy"][-1] > 0.9


def counted(batch: int, **options: Any) -> mlc.Trainer:
    """Two losses of the same labels, which divide by what those count for."""
    graph = mlc.Graph()
    x, y = graph.input((batch, 6), "x"), graph.input((batch,), "y", data_type=mlc.DataType.INT64)
    h = graph.dense(x, 4, weights=mlc.Tensor(shape=(4, 6), data=WEIGHTS), name="head")
    rarity = mlc.Tensor(data=np.array([1, 2, 3, 0.5], np.float32))
    graph.cross_entropy(h, y, ignore_index=-100, class_weights=rarity, name="one")
    graph.cross_entropy(2 * h, y, ignore_index=-100, class_weights=rarity, name="two")
    return mlc.Trainer(graph, optimizer="sgd", learning_rate=0.5, **options)


def test_means_over_batches_count_labels_as_one_large_batch_does() -> None:
    y = np.where(np.arange(40) % 16 < 9, -100, Y)  # batches of 8 have 0, 1, 7 or 8 that count
    large, small = counted(32), counted(8)
    data = {"x": X, "y": y}
    assert small.evaluate(data)["loss"] == pytest.approx(counted(40).evaluate(data)["loss"], rel=1e-5)
    expected = large.fit(data, epochs=2, shuffle=False, verbose=0)
    found = small.fit(data, epochs=2, shuffle=False, accumulate=4, verbose=0)
    for name in ("loss", "one", "two"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
    np.testing.assert_allclose(small.copy_parameters()[0], large.copy_parameters()[0], rtol=1e-4, atol=1e-6)
    ignored = {"x": X[:16], "y": np.full(16, -100)}
    assert small.fit(ignored, accumulate=2, verbose=0)["loss"] == [0]
    assert small.evaluate(ignored)["loss"] == 0


def test_terms_that_divide_by_different_things_still_add_up() -> None:
    def build(batch: int) -> mlc.Trainer:
        graph = mlc.Graph()
        x, y = graph.input((batch, 6), "x"), graph.input((batch,), "y", data_type=mlc.DataType.INT64)
        h = graph.dense(x, 4, weights=mlc.Tensor(shape=(4, 6), data=WEIGHTS))
        graph.cross_entropy(h, y, ignore_index=-100, name="classes")
        graph.minimize(h**2, name="size")
        return mlc.Trainer(graph, optimizer="sgd")

    data = {"x": X, "y": np.where(np.arange(40) % 16 < 9, -100, Y)}
    one, several = build(40).evaluate(data), build(8).evaluate(data)
    assert several == {name: pytest.approx(value, rel=1e-5) for name, value in one.items()}
    assert several["loss"] == pytest.approx(several["classes"] + several["size"], rel=1e-6)
    with pytest.raises(mlc.GraphError, match=r"(?s)ignore labels or weigh classes, beside others.*another number"):
        build(8).fit(data, accumulate=2, verbose=0)


def test_gradients_that_cannot_be_accumulated() -> None:
    graph = mlc.Graph()
    words = graph.input((4, 7), "words", data_type=mlc.DataType.INT32)
    graph.cross_entropy(graph.dense(graph.embedding(words[:, :-1], 9, 8), 9), words[:, 1:], ignore_index=0)
    made, given = mlc.Trainer(graph), {"words": RNG.integers(0, 9, (8, 7))}
    with pytest.raises(mlc.GraphError, match=r"(?s)where labels are computed in the graph.*sum"):
        made.fit(given, accumulate=2, verbose=0)
    made.fit(given, verbose=0)
    root = mlc.Graph()
    root.dense(root.input((8, 6), "x"), 4)
    made = mlc.Trainer(root, loss=lambda y, t: ((y - t) ** 2).mean().sqrt())
    with pytest.raises(mlc.GraphError, match="neither a sum nor a mean over the samples"):
        made.fit(X, HOT, accumulate=2, verbose=0)


def test_a_run_stopped_within_an_epoch_goes_on_counting_labels(tmp_path: Path) -> None:
    data = {"x": X, "y": np.where(np.arange(40) % 16 < 9, -100, Y)}
    saved = mlc.callbacks.ModelCheckpoint(tmp_path / "{epoch}", save_freq=3)
    expected = counted(8).fit(data, epochs=1, shuffle=False, callbacks=[saved], verbose=0)
    again = mlc.callbacks.ModelCheckpoint(tmp_path / "again", save_freq=3)
    found = counted(8).fit(data, shuffle=False, callbacks=[again], resume=tmp_path / "1", verbose=0)
    assert found == expected
