"""Metrics over a whole data set against scikit-learn, whatever the batches, the form of labels and of predictions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

import mlcompute as mlc
from mlcompute.trainer.metrics import metrics_from

RNG = np.random.default_rng(3)
AVERAGES = ["macro", "micro", "weighted", None]
COUNTED: dict[str, tuple[Callable[..., mlc.metrics.Metric], Callable[..., Any]]] = {
    "precision": (mlc.metrics.Precision, sk.precision_score),
    "recall": (mlc.metrics.Recall, sk.recall_score),
    "f1": (mlc.metrics.F1, sk.f1_score),
    "iou": (mlc.metrics.IoU, sk.jaccard_score),
}


def counted(metric: Any, prediction: np.ndarray, labels: np.ndarray, size: int = 7) -> Any:
    metric.reset()
    for first in range(0, len(prediction), size):
        if first == 2 * size:  # through a checkpoint
            state = metric.state()
            metric.reset()
            metric.restore(state)
        metric.update(prediction[first : first + size], labels[first : first + size])
    return metric


def quietly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns where it divides by nothing
        return function(*arguments, **options)


def dense(classes: np.ndarray, many: int, axis: int = 1) -> np.ndarray:
    return np.moveaxis(np.eye(many, dtype=np.float32)[classes], -1, axis)


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("average", AVERAGES)
def test_classes(kind: str, average: Any) -> None:
    make, oracle = COUNTED[kind]
    scores = RNG.standard_normal((60, 5)).astype(np.float32)
    scores[:, 3] = -9  # never predicted
    classes = RNG.integers(0, 4, 60)
    classes[classes == 2] = 3  # class 2 never occurs, class 4 neither
    scores[:, 4] = -10
    for labels in (classes, dense(classes, 5)):
        metric = counted(make(average=average), scores, labels)
        each = quietly(oracle, classes, scores.argmax(1), average=None, labels=range(5))
        np.testing.assert_allclose(np.nan_to_num(metric.per_class()), each)
        assert np.isnan(metric.per_class()[4])
        if average is None:
            assert metric.logs().keys() == {f"{kind}_{index}" for index in range(5)}
        else:
            expected = quietly(oracle, classes, scores.argmax(1), average=average)
            assert metric.logs() == {kind: pytest.approx(expected)}


@pytest.mark.parametrize("kind", COUNTED)
def test_images_and_ignored_pixels(kind: str) -> None:
    make, oracle = COUNTED[kind]
    scores = RNG.standard_normal((12, 3, 4, 5)).astype(np.float32)
    classes = RNG.integers(0, 3, (12, 4, 5))
    ignored = RNG.random(classes.shape) < 0.3
    marked = np.where(ignored, 255, classes)
    metric = counted(make(ignore_index=255), scores, marked, size=5)
    expected = oracle(classes[~ignored], scores.argmax(1)[~ignored], average="macro")
    assert metric.result() == pytest.approx(expected)
    last = np.moveaxis(scores, 1, -1)
    assert counted(make(ignore_index=255, class_axis=-1), last, marked).result() == pytest.approx(expected)
    accuracy = counted(mlc.metrics.Accuracy(ignore_index=255), scores, marked).result()
    assert accuracy == pytest.approx(sk.accuracy_score(classes[~ignored], scores.argmax(1)[~ignored]))
    top = counted(mlc.metrics.TopKAccuracy(2, ignore_index=255), scores, marked).result()
    flat = last[~ignored]
    assert top == pytest.approx(sk.top_k_accuracy_score(classes[~ignored], flat, k=2, labels=range(3)))


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("average", AVERAGES)
def test_yes_or_no(kind: str, average: Any) -> None:
    make, oracle = COUNTED[kind]
    for shape in ((40,), (40, 1)):
        p, t = RNG.random(shape).astype(np.float32), RNG.integers(0, 2, shape).astype(np.float32)
        expected = oracle(t.ravel() > 0.5, p.ravel() > 0.5)
        assert counted(make(average=average), p, t).logs() == {kind: pytest.approx(expected)}
        assert counted(make(threshold=0.8), p, t).result() == pytest.approx(oracle(t.ravel() > 0.5, p.ravel() > 0.8))
    p, t = RNG.random((40, 3)).astype(np.float32), RNG.integers(0, 2, (40, 3))
    metric = counted(make(average=average, per_output=True), p, t)
    expected = oracle(t, p > 0.5, average=average)
    np.testing.assert_allclose(list(metric.logs().values()), np.atleast_1d(expected))
    np.testing.assert_allclose(metric.per_class(), oracle(t, p > 0.5, average=None))


def test_nothing_to_find_is_zero() -> None:
    metric = counted(mlc.metrics.Recall(), np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32))
    assert metric.result() == 0.0
    assert math.isnan(mlc.metrics.F1().result())
    assert math.isnan(mlc.metrics.AUC().result())
    assert math.isnan(mlc.metrics.R2().result())


def test_confusion_matrices() -> None:
    scores, classes = RNG.standard_normal((50, 4)).astype(np.float32), RNG.integers(0, 4, 50)
    found = counted(mlc.metrics.ConfusionMatrix(), scores, classes)
    assert np.array_equal(found.matrix, sk.confusion_matrix(classes, scores.argmax(1), labels=range(4)))
    assert found.logs() == {}
    p, t = RNG.random((50, 3)).astype(np.float32), RNG.integers(0, 2, (50, 3))
    several = counted(mlc.metrics.ConfusionMatrix(per_output=True), p, t)
    assert np.array_equal(several.matrix, sk.multilabel_confusion_matrix(t, p > 0.5))
    one = counted(mlc.metrics.ConfusionMatrix(), p[:, :1], t[:, :1])
    assert np.array_equal(one.matrix, sk.confusion_matrix(t[:, 0], p[:, 0] > 0.5))


@pytest.mark.parametrize("average", AVERAGES)
def test_areas(average: Any) -> None:
    logits = RNG.standard_normal((80, 4)).astype(np.float32)
    classes = RNG.integers(0, 4, 80)
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    roc = np.atleast_1d(sk.roc_auc_score(classes, shares, average=average, multi_class="ovr"))
    for given, from_logits in ((logits, True), (shares.astype(np.float64), False)):
        for labels in (classes, dense(classes, 4)):
            metric = counted(mlc.metrics.AUC(average=average, from_logits=from_logits), given, labels)
            np.testing.assert_allclose(list(metric.logs().values()), roc)
    p, t = RNG.integers(0, 9, (60, 3)).astype(np.float32), RNG.integers(0, 2, (60, 3))  # ties
    for curve, oracle in (("roc", sk.roc_auc_score), ("pr", sk.average_precision_score)):
        metric = counted(mlc.metrics.AUC(curve=curve, average=average, per_output=True), p, t)
        np.testing.assert_allclose(list(metric.logs().values()), np.atleast_1d(oracle(t, p, average=average)))


def test_a_class_without_samples_has_no_area() -> None:
    shares = np.float32([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.4, 0.1]])
    metric = counted(mlc.metrics.AUC(from_logits=False), shares, np.array([0, 1, 0]))
    assert metric.result() == 1.0
    assert np.isnan(metric.per_class()[2])


def test_perplexity() -> None:
    logits, tokens = RNG.standard_normal((10, 6, 8)).astype(np.float32), RNG.integers(0, 8, (10, 6))
    tokens[:, 4:] = -100
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(-1, keepdims=True)
    seen = tokens >= 0
    expected = math.exp(sk.log_loss(tokens[seen], shares[seen], labels=range(8)))
    options: dict[str, Any] = {"class_axis": -1, "ignore_index": -100}
    assert counted(mlc.metrics.Perplexity(from_logits=True, **options), logits, tokens, 3).result() == pytest.approx(
        expected
    )
    assert counted(mlc.metrics.Perplexity(from_logits=False, **options), shares, tokens).result() == pytest.approx(
        expected
    )


@pytest.mark.parametrize(("average", "name"), [("macro", "uniform_average"), ("weighted", "variance_weighted")])
def test_r2(average: Any, name: str) -> None:
    labels = RNG.standard_normal((50, 3)) + np.array([1e6, 0, 5])
    prediction = labels + RNG.standard_normal((50, 3)) * [0.1, 1, 3]
    metric = counted(mlc.metrics.R2(average=average), prediction, labels)
    assert metric.result() == pytest.approx(sk.r2_score(labels, prediction, multioutput=name), rel=1e-9)
    np.testing.assert_allclose(metric.per_class(), sk.r2_score(labels, prediction, multioutput="raw_values"), rtol=1e-9)
    alike = np.ones((4, 1))
    assert counted(mlc.metrics.R2(), alike, alike).result() == 1.0
    assert counted(mlc.metrics.R2(), alike + 1, alike).result() == 0.0


def test_errors_of_numbers() -> None:
    labels, prediction = RNG.standard_normal((2, 33, 2))
    assert counted(mlc.metrics.RootMeanSquaredError(), prediction, labels).result() == pytest.approx(
        sk.root_mean_squared_error(labels.ravel(), prediction.ravel())
    )
    mae = counted(mlc.metrics.MeanAbsoluteError(), prediction, labels).result()
    assert mae == pytest.approx(sk.mean_absolute_error(labels, prediction))


def digits() -> tuple[mlc.Graph, np.ndarray, np.ndarray]:
    graph = mlc.Graph()
    graph.dense(graph.input((16, 6), "x"), 4)
    x = RNG.standard_normal((70, 6)).astype(np.float32)
    return graph, x, x[:, :4].argmax(1)


NAMES: list[Any] = ["accuracy", "precision", "recall", "f1", "iou", "auc", "average_precision", "confusion_matrix"]
NAMES += ["perplexity", "top_2_accuracy"]


def test_in_a_trainer(tmp_path: Path) -> None:
    graph, x, y = digits()
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=NAMES, learning_rate=0.05)
    history = trainer.fit(x, y, epochs=3, validation=(x, y), verbose=0)
    scores = trainer.evaluate(x, y)
    logits = trainer.predict(x)
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    assert scores["f1"] == pytest.approx(sk.f1_score(y, logits.argmax(1), average="macro"))
    assert scores["auc"] == pytest.approx(sk.roc_auc_score(y, shares, multi_class="ovr"))
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]), rel=1e-5)
    assert scores.confusion_matrix is not None
    assert np.array_equal(scores.confusion_matrix, sk.confusion_matrix(y, logits.argmax(1)))
    np.testing.assert_allclose(scores.per_class["recall"], sk.recall_score(y, logits.argmax(1), average=None))
    assert history["val_f1"][-1] == scores["f1"]
    assert "confusion_matrix" not in history.history


def test_a_checkpoint_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    path = str(tmp_path / "middle.safetensors")

    class Stop(mlc.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == 8:
                self.trainer.save_when_settled(path)

    class Save(Stop):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            if self.trainer.step == 7:
                self.trainer.save_when_settled(path)

    def run(callbacks: list[Any], resume: str | None) -> mlc.History:
        mlc.Platform.set_rng_seed_to(0)
        graph, _, _ = digits()
        trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=NAMES, learning_rate=0.05)
        return trainer.fit(x, y, epochs=2, callbacks=callbacks, resume=resume, verbose=0)

    _, x, y = digits()
    whole = run([Save()], None)
    assert run([], path).epochs[-1] == whole.epochs[-1]


def test_probabilities_in_a_trainer() -> None:
    graph = mlc.Graph()
    graph.softmax(graph.dense(graph.input((16, 6), "x"), 4))
    _, x, y = digits()
    trainer = mlc.Trainer(graph, loss="categorical_cross_entropy", metrics=["auc", "perplexity"])
    scores = trainer.evaluate(x, y)
    assert scores["auc"] == pytest.approx(sk.roc_auc_score(y, trainer.predict(x), multi_class="ovr"), abs=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]), rel=1e-5)


def test_yes_or_no_in_a_trainer() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((16, 6), "x"), 3)
    x, y = RNG.standard_normal((50, 6)).astype(np.float32), RNG.integers(0, 2, (50, 3)).astype(np.float32)
    trainer = mlc.Trainer(graph, loss="sigmoid_cross_entropy", metrics=["f1", "auc"])
    scores, logits = trainer.evaluate(x, y), trainer.predict(x)
    assert scores["f1"] == pytest.approx(quietly(sk.f1_score, y, logits > 0, average="macro"))
    assert scores["auc"] == pytest.approx(sk.roc_auc_score(y, logits))


def test_refusals() -> None:
    with pytest.raises(mlc.DataError, match="average is 'mean'"):
        mlc.metrics.F1(average="mean")  # type: ignore[arg-type]
    with pytest.raises(mlc.DataError, match="curve is 'lift'"):
        mlc.metrics.AUC(curve="lift")  # type: ignore[arg-type]
    with pytest.raises(mlc.DataError, match="logits or probabilities"):
        mlc.metrics.Perplexity().update(np.zeros((2, 3)), np.array([0, 1]))
    with pytest.raises(mlc.DataError, match="labels go from 0 to 7"):
        mlc.metrics.F1().update(np.zeros((2, 3)), np.array([0, 7]))
    with pytest.raises(mlc.DataError, match="integer class labels"):
        mlc.metrics.F1().update(np.zeros((2, 3)), np.array([0.0, 1.0]))
    with pytest.raises(mlc.DataError, match="no metric named 'f2'"):
        metrics_from(["f2"])
    with pytest.raises(mlc.DataError, match="is no number"):
        mlc.metrics.ConfusionMatrix().result()
    with pytest.raises(TypeError, match="needs values"):
        mlc.metrics.Metric("mine").update(np.zeros((2, 1)), np.zeros((2, 1)))
