"""Metrics by hand, against PyTorch, and the same whatever the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.trainer.metrics import metrics_from
from tests.trainer.nets import points, trainer

RNG = np.random.default_rng(0)


def counted(metric: mlc.metrics.Metric, prediction: np.ndarray, labels: np.ndarray, size: int = 7) -> float:
    metric.reset()
    for first in range(0, len(prediction), size):
        metric.update(prediction[first : first + size], labels[first : first + size])
    return metric.result()


@pytest.mark.parametrize("shape", [(50, 6), (20, 6, 3, 2)])
def test_accuracies_against_pytorch(shape: tuple[int, ...]) -> None:
    prediction = RNG.standard_normal(shape).astype(np.float32)
    classes = RNG.integers(0, 6, (shape[0], *shape[2:]))
    labels = np.moveaxis(np.eye(6, dtype=np.float32)[classes], -1, 1)
    for k in (1, 3, 6):
        found = torch.tensor(prediction).topk(k, dim=1).indices == torch.tensor(classes).unsqueeze(1)
        assert counted(mlc.metrics.TopKAccuracy(k), prediction, labels) == pytest.approx(
            found.any(1).float().mean().item()
        )
    expected = (prediction.argmax(1) == classes).mean()
    assert counted(mlc.metrics.Accuracy(), prediction, labels) == pytest.approx(expected)


def test_equal_scores_and_nan_are_no_help() -> None:
    labels = np.eye(4, dtype=np.float32)
    constant = np.zeros((4, 4), np.float32)
    assert counted(mlc.metrics.TopKAccuracy(2), constant, labels) == 0.5
    assert counted(mlc.metrics.TopKAccuracy(4), np.full((4, 4), np.nan, np.float32), labels) == 0.0


def test_thresholds() -> None:
    prediction = np.float32([[0.4], [0.6], [-1.0], [2.0]])
    labels = np.float32([[1], [1], [0], [0]])
    assert counted(mlc.metrics.Accuracy(threshold=0.5), prediction, labels) == 0.5
    assert counted(mlc.metrics.Accuracy(threshold=0.0), prediction, labels) == 0.75
    assert mlc.metrics.Accuracy().name == "accuracy"


def test_errors() -> None:
    prediction, labels = RNG.standard_normal((2, 30, 4))
    assert counted(mlc.metrics.MeanAbsoluteError(), prediction, labels) == pytest.approx(
        np.abs(prediction - labels).mean()
    )
    squared = np.square(prediction - labels).mean()
    assert counted(mlc.metrics.MeanSquaredError(), prediction, labels) == pytest.approx(squared)


def test_functions_that_want_the_labels_first_are_refused() -> None:
    def spread(y_true: Any, y_pred: Any) -> Any:
        return abs(y_true - y_pred).mean()

    graph = mlc.Graph()
    graph.dense(graph.input((4, 2), "x"), 1)
    with pytest.raises(mlc.DataError, match=r"metrics: spread takes \(y_true, y_pred\), and would be called with"):
        mlc.Trainer(graph, loss="mse", metrics=[spread])
    with pytest.raises(mlc.DataError, match=r"loss: <lambda> takes \(target, y\)"):
        mlc.Trainer(graph, loss=lambda target, y: (y - target) ** 2)
    assert mlc.Trainer(graph, loss="mse", metrics=[lambda y, t: spread(t, y)]).metrics[0].name == "<lambda>"


def test_what_is_no_number_is_refused() -> None:
    for nothing in (None, "high"):
        with pytest.raises(TypeError, match="metric '<lambda>': must give a number, or one per sample, not"):
            metrics_from([lambda y, t, nothing=nothing: nothing])[0].update(np.zeros((4, 1)), np.zeros((4, 1)))


def test_functions_of_ones_own() -> None:
    def largest(prediction: Any, labels: Any) -> Any:
        return np.abs(prediction - labels).max(axis=1)

    def mean(prediction: Any, labels: Any) -> float:
        return float(prediction.mean())

    prediction, labels = RNG.standard_normal((2, 30, 4))
    per_sample, whole = metrics_from([largest, mlc.metrics.Mean(mean, "average")])
    assert (per_sample.name, whole.name) == ("largest", "average")
    assert counted(per_sample, prediction, labels) == pytest.approx(np.abs(prediction - labels).max(axis=1).mean())
    assert counted(whole, prediction, labels) == pytest.approx(prediction.mean())
    wrong = mlc.metrics.Mean(lambda prediction, labels: prediction, "all")
    with pytest.raises(mlc.DataError, match=r"metric 'all': values of shape \(7, 4\) for 7 samples"):
        counted(wrong, prediction, labels)
    assert np.isnan(mlc.metrics.Accuracy().result())


def test_names() -> None:
    names = ["accuracy", "top_3_accuracy", "top_5_accuracy", "mae", "mse", "mean_absolute_error", "mean_squared_error"]
    assert [metric.name for metric in metrics_from(names)] == names


class Extremes(mlc.metrics.Metric):
    """As the guide says: where the whole is no mean, `reset`, `update` and `result`. What they set may be anything."""

    def __init__(self) -> None:
        super().__init__("extremes")
        self.function = np.max  # no checkpoint keeps it

    def reset(self) -> None:
        self.largest, self.seen, self.parts, self.by_class = -np.inf, 0, [], {}

    def update(self, prediction: np.ndarray, labels: np.ndarray) -> None:
        self.largest = max(self.largest, self.function(prediction))
        self.seen += len(labels)
        self.parts.append(labels.copy())
        self.by_class["0"] = self.by_class.get("0", 0) + int((labels == 0).sum())

    def result(self) -> float:
        assert self.seen == sum(map(len, self.parts))
        return float(self.largest) + self.by_class["0"]


def test_a_metric_with_an_update_of_its_own_is_trained_with_and_resumed(tmp_path: Path) -> None:
    x, y = points(64)

    class Stops(mlc.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == 3:
                self.trainer.save(tmp_path / "middle")
                self.trainer.stop_training = True

    whole = trainer(metrics=[Extremes()]).fit(x, y, epochs=2, validation=(x, y), verbose=0)
    assert whole["val_extremes"][-1] > (y == 0).sum() - 10
    trainer(metrics=[Extremes()]).fit(x, y, epochs=2, validation=(x, y), callbacks=[Stops()], verbose=0)
    resumed = trainer(metrics=[Extremes()])
    assert resumed.fit(x, y, epochs=2, validation=(x, y), resume=tmp_path / "middle", verbose=0) == whole
