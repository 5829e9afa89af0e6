"""validation_split, class_weight, steps_per_epoch, and data in every form people have it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.trainer import evaluation

RNG = np.random.default_rng(1)
X = RNG.standard_normal((70, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)


def trainer(metrics: Any = ()) -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    graph.dense(graph.input((16, 4), "x"), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=metrics, learning_rate=0.05)


def test_validation_split_holds_out_the_last() -> None:
    history = trainer().fit(X, Y, epochs=2, validation_split=0.3, verbose=0)
    assert history == trainer().fit(X[:49], Y[:49], epochs=2, validation=(X[49:], Y[49:]), verbose=0)
    with pytest.raises(mlc.DataError, match="both given"):
        trainer().fit(X, Y, validation_split=0.3, validation=(X, Y))
    with pytest.raises(mlc.DataError, match=r"validation_split is 1.5 of 70 samples"):
        trainer().fit(X, Y, validation_split=1.5)
    with pytest.raises(mlc.DataError, match="needs arrays"):
        trainer().fit([(X[:16], Y[:16])], validation_split=0.5)


@pytest.mark.parametrize("weights", [{0: 2.0, 2: 0.5}, [2.0, 1.0, 0.5]])
def test_class_weights_are_sample_weights(weights: Any) -> None:
    each = np.float32([2, 1, 0.5])[Y]
    expected = trainer().fit(X, Y, sample_weight=each, verbose=0)
    assert trainer().fit(X, Y, class_weight=weights, verbose=0) == expected
    dense = trainer().fit(X, np.eye(3, dtype=np.float32)[Y], class_weight=weights, verbose=0)
    np.testing.assert_allclose(dense["loss"], expected["loss"], rtol=1e-5)
    stream = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]
    plain = trainer().fit(X, Y, sample_weight=each, shuffle=False, verbose=0)
    assert trainer().fit(stream, class_weight=weights, verbose=0) == plain
    half = np.linspace(0.5, 1, 70, dtype=np.float32)
    both = trainer().fit(X, Y, sample_weight=half * each, verbose=0)
    assert trainer().fit(X, Y, sample_weight=half, class_weight=weights, verbose=0) == both


def test_balanced_classes_and_validation_without_weights() -> None:
    counts = np.bincount(Y)
    balanced = 70 / (3 * counts)
    first = trainer().fit(X, Y, class_weight="balanced", validation=(X, Y), verbose=0)
    second = trainer().fit(X, Y, class_weight=dict(enumerate(balanced)), validation=(X, Y), verbose=0)
    assert first == second
    model = trainer()
    history = model.fit(X, Y, class_weight="balanced", validation=(X, Y), verbose=0)
    logits = torch.tensor(model.predict(X))
    plain = torch.nn.functional.cross_entropy(logits, torch.tensor(Y)).item()
    assert history["val_loss"][-1] == pytest.approx(plain, rel=1e-5)


def test_balanced_classes_beside_ignored_labels() -> None:
    """Labels that count nowhere make no class rarer."""
    known = np.where(np.arange(70) % 3 == 0, -100, Y)
    counts = np.bincount(known[known >= 0])
    balanced = dict(enumerate(counts.sum() / (3 * counts)))

    def loss_of(class_weight: Any) -> list[float]:
        mlc.Platform.set_rng_seed_to(0)
        graph = mlc.Graph()
        graph.dense(graph.input((16, X.shape[1]), "x"), 3)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, ignore_index=-100)
        return mlc.Trainer(graph, loss=loss).fit(X, known, class_weight=class_weight, verbose=0)["loss"]

    assert loss_of("balanced") == loss_of(balanced) != loss_of(None)


def test_class_weights_of_steps_and_of_yes_and_no() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((8, 5, 4), "x"), 3)
    x, y = RNG.standard_normal((8, 5, 4)).astype(np.float32), RNG.integers(0, 3, (8, 5))
    model = mlc.Trainer(graph, loss=mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1))
    logits = torch.tensor(model.predict(x)).reshape(-1, 3)
    history = model.fit(x, y, class_weight=[3, 1, 0], verbose=0)
    each = torch.nn.functional.cross_entropy(logits, torch.tensor(y).ravel(), reduction="none")
    assert history["loss"][0] == pytest.approx((each * torch.tensor([3.0, 1, 0])[y.ravel()]).mean().item(), rel=1e-5)
    graph = mlc.Graph()
    graph.dense(graph.input((8, 4), "x"), 1)
    model = mlc.Trainer(graph, loss="sigmoid_cross_entropy")
    t = RNG.integers(0, 2, 8).astype(np.float32)
    logits = torch.tensor(model.predict(x[:, 0])).ravel()
    history = model.fit(x[:, 0], t, class_weight={1: 5.0}, verbose=0)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(t), reduction="none")
    assert history["loss"][0] == pytest.approx((each * torch.tensor(1 + 4 * t)).mean().item(), rel=1e-5)


def test_a_sample_without_a_class_weighs_1() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((16, 4), "x"), 3)
    model = mlc.Trainer(graph, loss="sigmoid_cross_entropy")
    y = np.where(np.arange(16)[:, None] % 2, np.eye(3, dtype=np.float32)[Y[:16]], 0)
    logits = torch.tensor(model.predict(X[:16]))
    history = model.fit(X[:16], y, class_weight=[5.0, 4.0, 3.0], verbose=0)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y), reduction="none").mean(1)
    weights = np.where(np.arange(16) % 2, np.float32([5, 4, 3])[Y[:16]], 1)
    assert history["loss"][0] == pytest.approx((each.numpy() * weights).mean(), rel=1e-5)


def test_class_weights_that_cannot_be() -> None:
    for weights, message in (
        ({3: 1.0}, "names the class 3, the graph has 3 classes"),
        ([1, 2], "has 2 entries"),
        ("heavy", "class_weight is 'heavy'"),
        ({0: -1.0}, "class_weight of class 0 is -1.0"),
        ({"cat": 1.0}, "class_weight names no output and no class: 'cat'"),
    ):
        with pytest.raises(mlc.DataError, match=message):
            trainer().fit(X, Y, class_weight=weights)
    numbers, answers = mlc.Graph(), mlc.Graph()
    numbers.dense(numbers.input((16, 4), "x"), 1)
    with pytest.raises(mlc.DataError, match="class_weight is for classes, 'labels' has "):
        mlc.Trainer(numbers, loss="mse").fit(X, X[:, 0], class_weight="balanced")
    answers.dense(answers.input((16, 4), "x"), 3)
    with pytest.raises(mlc.DataError, match=r"a sample of 'labels' has [23] classes, not one"):
        mlc.Trainer(answers, loss="sigmoid_cross_entropy").fit(X, X[:, :3] > 0, class_weight={1: 2.0})
    with pytest.raises(mlc.DataError, match="labels that can be counted"):
        trainer().fit([(X[:16], Y[:16])], class_weight="balanced")


def test_steps_per_epoch_goes_round(tmp_path: Path) -> None:
    model = trainer()
    history = model.fit(X, Y, epochs=4, steps_per_epoch=3, verbose=0)
    assert model.step == 12
    assert model.length.steps_per_epoch == 3
    whole = trainer().fit(X, Y, epochs=3, verbose=0)  # 5 steps each
    assert history.loss.values == whole.loss.values[:12]
    one = trainer()
    one.fit(X, Y, epochs=2, steps_per_epoch=3, verbose=0)
    one.save(tmp_path / "two")
    assert trainer().fit(X, Y, epochs=4, steps_per_epoch=3, resume=tmp_path / "two", verbose=0) == history
    with pytest.raises(mlc.DataError, match="saved with steps_per_epoch 3, now it is 4"):
        trainer().fit(X, Y, epochs=4, steps_per_epoch=4, resume=tmp_path / "two")


def test_endless_data() -> None:
    def endless() -> Iterator[Any]:
        for start in itertools.cycle(range(0, 64, 16)):
            yield X[start : start + 16], Y[start : start + 16]

    expected = trainer().fit(X[:64], Y[:64], epochs=2, shuffle=False, verbose=0)
    assert trainer().fit(endless, epochs=2, steps_per_epoch=4, verbose=0) == expected
    assert trainer().fit(endless(), epochs=2, steps_per_epoch=4, verbose=0) == expected
    with pytest.raises(mlc.DataError, match="exhausted"):
        trainer().fit(itertools.islice(endless(), 3), epochs=2, steps_per_epoch=4, verbose=0)


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> Any:
        return X[number], Y[number]


class Streamed(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": torch.tensor(x), "labels": int(y)} for x, y in zip(X, Y, strict=True))


def test_data_that_never_ends_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation with a generator that goes on for ever would wait for its end without a word."""
    monkeypatch.setattr(evaluation, "_MANY_BATCHES", 5)

    def batches(count: int) -> Iterator[Any]:
        return itertools.repeat((X[:16], Y[:16]), count)

    with pytest.warns(UserWarning, match=r"evaluate: 5 batches, and more are coming.*itertools\.islice"):
        trainer().fit(X, Y, validation=lambda epoch: batches(7), verbose=0)
    with pytest.warns(UserWarning, match=r"predict: 5 batches"):
        trainer().predict(batches(7))
    trainer().evaluate(list(batches(7)))  # which says how many they are
    trainer().evaluate(batches(4))


def test_datasets_of_samples() -> None:
    expected = trainer().fit(X, Y, epochs=2, verbose=0)
    assert trainer().fit(Pairs(), epochs=2, verbose=0) == expected
    in_order = trainer().fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert trainer().fit(Streamed(), epochs=2, verbose=0) == in_order
    listed = list(zip(X, Y, strict=True))
    assert trainer().fit(listed, epochs=2, verbose=0) == expected, "a list of samples is shuffled like a dataset"
    assert trainer().fit(listed, epochs=2, shuffle=False, verbose=0) == in_order
    model = trainer()
    np.testing.assert_array_equal(model.predict(listed), model.predict(X))
    eights = trainer().fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert trainer().fit(Streamed(), batch_size=8, verbose=0) == eights
    assert trainer().fit(zip(X, Y, strict=True), batch_size=8, verbose=0) == eights
    loader = torch.utils.data.DataLoader(Streamed(), batch_size=16)
    assert trainer().fit(loader, epochs=2, verbose=0) == in_order
    with pytest.raises(mlc.DataError, match="comes in batches"):
        trainer().fit([(X[:16], Y[:16])], batch_size=8)


def test_lists_of_samples_and_batches_with_several_inputs() -> None:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    sources = [graph.input((16, 1), "a"), graph.input((16, 3), "b")]
    graph.dense(graph.concatenate(sources, dimension=1), 3)
    model = mlc.Trainer(graph, loss="softmax_cross_entropy")
    inputs = (X[:, :1], X[:, 1:])
    expected = model.predict(inputs)
    np.testing.assert_array_equal(model.predict([(pair, y) for *pair, y in zip(*inputs, Y, strict=True)]), expected)
    batches = [((X[i : i + 16, :1], X[i : i + 16, 1:]), Y[i : i + 16]) for i in range(0, 70, 16)]
    np.testing.assert_array_equal(model.predict(batches), expected)


def test_dicts_of_everything() -> None:
    in_order = trainer().fit(X, Y, shuffle=False, verbose=0)
    assert trainer().fit({"x": X, "labels": Y}, shuffle=False, verbose=0) == in_order
    batches = [{"x": X[i : i + 16], "labels": Y[i : i + 16]} for i in range(0, 70, 16)]
    assert trainer().fit(batches, verbose=0) == in_order
    model = trainer(["accuracy"])
    assert model.evaluate(batches) == model.evaluate(X, Y)
    assert np.array_equal(model.predict(batches), model.predict(X))
    with pytest.raises(mlc.DataError, match="no input named 'token_type_ids'"):
        trainer().fit([{"x": X[:16], "labels": Y[:16], "token_type_ids": Y[:16]}])
