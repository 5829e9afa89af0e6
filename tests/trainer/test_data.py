"""Data as people have it: loaders, generators that fill one array again and again, weights, and what is refused."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.trainer.nets import assert_same, everything, points, trainer

X, Y = points(48)


def batches(epoch: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, 48, 16):
        yield X[first : first + 16].copy(), np.eye(3, dtype=np.float32)[Y[first : first + 16]]


def test_a_generator_may_fill_the_same_arrays_again() -> None:
    x, y = np.empty((16, 4), np.float32), np.empty((16, 3), np.float32)

    def refilled(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for values, labels in batches():
            x[:], y[:] = values, labels
            yield x, y

    plain, reusing = trainer(), trainer()
    plain.fit(batches, epochs=3, verbose=0)
    reusing.fit(refilled, epochs=3, verbose=0)
    assert plain.history == reusing.history
    assert_same(everything(plain), everything(reusing))
    np.testing.assert_array_equal(plain.predict(batches()), reusing.predict(pair for pair in refilled(0)))


def test_predicting_what_evaluate_takes() -> None:
    model = trainer()
    wanted = model.predict(X)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=16
    )
    parts = [x for x, _ in batches()]
    for data in (loader, batches(), batches, list(batches()), parts, iter(parts), [{"x": part} for part in parts]):
        np.testing.assert_array_equal(model.predict(data), wanted)
    np.testing.assert_array_equal(model.predict([X]), wanted)
    np.testing.assert_array_equal(model.predict(list(X)), wanted)
    assert model.evaluate([X], [Y]) == model.evaluate(X, Y)


def test_validation_may_be_a_list() -> None:
    model = trainer()
    listed = model.fit(X, Y, validation=[X, Y], shuffle=False, verbose=0)["val_loss"]
    assert listed == [model.evaluate(X, Y)["loss"]]


def test_the_thread_ends_with_the_run_also_when_the_error_is_kept() -> None:
    class Fails(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            raise RuntimeError("no")

    many = np.tile(X, (500, 1)), np.tile(Y, 500)
    with pytest.raises(RuntimeError, match="no") as kept:
        trainer().fit(*many, callbacks=[Fails()], verbose=0)
    ends = time.monotonic() + 20
    while any(thread.name == "mlcompute data" for thread in threading.enumerate()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert kept.value.__traceback__ is not None


def test_weights_for_samples_against_pytorch() -> None:
    model = trainer(optimizer="sgd", learning_rate=0.1)
    weights = np.random.default_rng(0).uniform(0, 2, 48).astype(np.float32)
    before = model.evaluate(X, Y)
    parameters = [torch.tensor(array, requires_grad=True) for array in model.copy_parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    w1, b1, w2, b2 = parameters
    for first in (0, 16, 32, 0, 16, 32):
        x, y = torch.tensor(X[first : first + 16]), torch.tensor(Y[first : first + 16])
        losses = torch.nn.functional.cross_entropy(torch.tanh(x @ w1.T + b1) @ w2.T + b2, y, reduction="none")
        optimizer.zero_grad()
        (losses * torch.tensor(weights[first : first + 16])).mean().backward()
        optimizer.step()
    assert model.evaluate(X, Y, sample_weight=np.ones(48)) == before
    model.fit(X, Y, sample_weight=weights, shuffle=False, epochs=2, validation=(X, Y, weights), verbose=0)
    for found, wanted in zip(model.copy_parameters(), parameters, strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
    weighted = model.evaluate(X, Y, sample_weight=weights)["loss"]
    assert model.history["val_loss"][-1] == weighted
    assert model.evaluate(X, Y)["loss"] != weighted  # without weights each counts once
    model.fit(X, Y, verbose=0)


@pytest.mark.filterwarnings("ignore:.*their sum is minimised")
def test_the_loss_of_accumulated_batches_without_a_reduction() -> None:
    none = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.SOFTMAX_CROSS_ENTROPY, mlc.ReductionType.NONE))
    small, large = trainer(8, loss=none), trainer(40, loss="softmax_cross_entropy")
    small.fit(X[:40], Y[:40], accumulate=5, verbose=0)
    large.fit(X[:40], Y[:40], verbose=0)
    assert small.history["loss"] == pytest.approx(large.history["loss"], rel=1e-6)


class Sparse:
    """Like a matrix of scipy.sparse: NumPy makes an array with one object of it."""

    shape = X.shape

    def toarray(self) -> Any:
        raise AssertionError("nobody asked for the memory")


class Batches:
    """As Keras' Sequence: it gives batches by number, where PyTorch's datasets give samples."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[index * 16 : (index + 1) * 16], Y[index * 16 : (index + 1) * 16]


class Named(Batches):
    """Samples as dicts."""

    def __getitem__(self, index: int) -> Any:
        return {"pixels": X[index], "label": Y[index]}


def with_one(odd: Any) -> np.ndarray:
    """The points as objects, one of which is no number."""
    found = X.astype(object)
    found[3, 2] = odd
    return found


REFUSALS: dict[str, tuple[Any, str]] = {
    "no labels": (lambda m: m.fit(X), r"(?s)Trainer\.fit: the data has no labels.*give y"),
    "batches without labels": (lambda m: m.fit([X[:16]]), r"(?s)Trainer\.fit: the data has no labels.*give y"),
    "an iterator for two epochs": (lambda m: m.fit(batches(), epochs=2), "only once, and 2 epochs were asked for"),
    "validation for two epochs": (
        lambda m: m.fit(X, Y, epochs=2, validation=batches()),
        "validation: an iterator can be gone through only once",
    ),
    "batches of another size": (lambda m: m.fit(batches, batch_size=8), "batch_size is 8, but the data comes in"),
    "nothing to evaluate": (lambda m: m.evaluate([]), "evaluate: there are no samples"),
    "nothing to validate": (lambda m: m.fit(X, Y, validation=[]), "there are no samples"),
    "samples of many shapes": (lambda m: m.fit([[1, 2], [3]], [0, 1]), r"(?s)list cannot be read.*one shape"),
    "a gradient": (lambda m: m.fit(torch.tensor(X).requires_grad_(), Y), r"(?s)Tensor cannot be read.*float32"),
    "floating classes": (lambda m: m.fit(X, Y.astype(np.float32)), r"(?s)samples of shape \(\).*labels\.astype\(int\)"),
    "weights in batches": (
        lambda m: m.fit(lambda epoch: iter([(X[:16], Y[:16], np.ones(16))])),
        r"(?s)weights were given, the graph takes none.*a list of batches.*add_inputs",
    ),
    "empty lists": (lambda m: m.fit([], []), "there are no samples"),
    "samples on axis 1": (lambda m: m.predict(X.T), r"fix       samples lie on axis 0: array\.T; or build"),
    "too few features": (lambda m: m.predict(X[:, :2]), "fix       give samples of this shape, or build the graph's"),
    "a sparse matrix": (lambda m: m.fit(Sparse(), Y), r"data\.toarray\(\)"),
    "complex numbers": (lambda m: m.fit(X.astype(complex), Y), r"np\.stack\(\[data\.real, data\.imag\]"),
    "batches by number": (
        lambda m: m.fit(Batches()),
        r"(?s)given     'x' \(16, 4\).*fit\(lambda epoch: \(batches\[k\] for k in range\(3\)\)\)",
    ),
    "samples by other names": (
        lambda m: m.fit(Named()),
        r"(?s)given     'pixels', 'label'\n  expected  'x' \(4,\), 'labels' \(\)\n  fix       call its parts so",
    ),
    "a large batch": (lambda m: m.predict(X, batch_size=64), r"with 64 samples, or leave batch_size out$"),
    "labels of another name": (lambda m: m.fit([{"x": X[:16], "y": Y[:16]}]), r"(?s)named 'y'.*call it 'labels'"),
    "an input of another name": (lambda m: m.fit({"X": X}, Y), r"(?s)named 'X'.*call it 'x'"),
    "one name too many": (lambda m: m.predict({"x": X, "age": X}), r"(?s)named 'age'\n  expected  'x' \(16, 4\)$"),
    "text labels": (lambda m: m.fit(X, np.array(["a", "b", "c"], object)[Y]), r"np\.unique\(labels, return_inverse"),
    "text among numbers": (lambda m: m.predict(with_one("red")), r"text such as 'red' in tables: mlc\.data\.table"),
    "numbers as text": (lambda m: m.predict(X.astype(str)), r"fix       numbers as text: array\.astype\('float32'\)"),
    "a missing number": (lambda m: m.predict(with_one(None)), "None stands where a number is missing"),
    "a date": (lambda m: m.predict(with_one(datetime.date(2026, 1, 1))), "there is a date in it: tables are read by"),
    "numbers as objects": (lambda m: m.predict(X.astype(object)), r"only numbers: array\.astype\('float32'\)"),
    "weights beside batches": (lambda m: m.fit(list(batches()), sample_weight=np.ones(48)), "cannot be read"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> mlc.Trainer:
    return trainer(optimizer="sgd")


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, model: mlc.Trainer) -> None:
    before = everything(model)
    act, message = REFUSALS[name]
    with pytest.raises((mlc.DataError, mlc.ShapeError), match=message):
        act(model)
    if name != "nothing to validate":
        assert_same(everything(model), before)


def test_classes_on_the_wrong_axis() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((8, 5, 4), "steps"), 3)
    model = mlc.Trainer(graph, loss=mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=1))
    with pytest.raises(mlc.DataError, match=r"(?s)samples of shape \(5,\).*classes lie on axis 1"):
        model.fit(np.zeros((8, 5, 4)), np.zeros((8, 5), int))


def test_words_for_what_is_no_list() -> None:
    with pytest.raises(TypeError, match="callbacks must be a list, not one GradientWatch"):
        trainer().fit(X, Y, callbacks=mlc.callbacks.GradientWatch())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a schedule is no callback: LearningRateScheduler\(Cosine\(\.\.\.\)\)"):
        trainer().fit(X, Y, callbacks=[mlc.schedules.Cosine()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="shuffle must be True or False, not 'batch'"):
        trainer().fit(X, Y, shuffle="batch")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an object, not the class: Accuracy\(\)"):
        trainer(metrics=[mlc.metrics.Accuracy])
    scores = trainer(metrics=["top_2_accuracy"]).evaluate(X, Y)
    assert scores["top_2_accuracy"] > 0
    with pytest.raises(KeyError, match=r"no 'accuracy'; it has loss, top_2_accuracy; Trainer\(metrics=\[...\]\) adds"):
        scores["accuracy"]
    assert scores.get("accuracy") is None
    assert "accuracy" not in scores
