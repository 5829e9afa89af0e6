"""Checkpoints of a Trainer from before one rule named layers everywhere: labels as they were, `Loss`, `Loss 2`.

`tests/data/trainer/old-names.safetensors` was written by `write` below with the code from then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc

FILE = Path(__file__).parents[1] / "data" / "trainer" / "old-names.safetensors"
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.stack([X.sum(axis=1), X.prod(axis=1)], axis=1)


def made() -> mlc.Trainer:
    """Layers and losses nobody named, two of a kind."""
    graph = mlc.Graph()
    x, y = graph.input((4, 3), "x"), graph.input((4, 2), "y")
    d = [mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=n) for n in (3, 2)]
    h = x
    for descriptor in d:
        n = descriptor.output_feature_channel_count
        weights = np.cos(np.arange(3 * n, dtype=np.float32)).reshape(n, 3)
        h = graph.node(mlc.FullyConnectedLayer(mlc.Tensor(shape=(n, 3), data=weights), None, descriptor), source=h)
    for loss in (mlc.LossLayer.mean_squared_error, mlc.LossLayer.mean_absolute_error):
        graph.node(loss(mlc.ReductionType.MEAN), source=h, loss_labels=[y])
    sgd = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.05), momentum_scale=0.5)
    return mlc.Trainer(graph, optimizer=sgd, device=mlc.Device.cpu())


def fit(trainer: mlc.Trainer, *more: mlc.callbacks.Callback, **options: object) -> mlc.History:
    callbacks = [mlc.callbacks.ExponentialMovingAverage(0.9), mlc.callbacks.GradientWatch(every=1), *more]
    settings = {"epochs": 3, "shuffle_seed": 0, "validation": ({"x": X}, {"y": Y}), "verbose": 0, **options}
    return trainer.fit({"x": X}, {"y": Y}, callbacks=callbacks, **settings)  # type: ignore[arg-type]


def write(folder: Path) -> None:
    """After the third of six steps: in the middle of an epoch, with averaged weights beside the trained ones."""

    class Middle(mlc.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == 2:
                self.trainer.save_when_settled(folder / "old-names.safetensors")

    fit(made(), Middle())


def test_the_file_has_old_names() -> None:
    with mlc.Checkpoint(FILE) as file:
        assert "trained weights/FullyConnected.weights" in file.arrays
        assert set(file.progress["trainer"]["terms"]) == {"Loss", "Loss 2"}


def test_a_run_goes_on_from_it() -> None:
    whole, resumed = made(), made()
    expected, found = fit(whole), fit(resumed, resume=FILE)
    for ours, theirs in zip(whole.copy_weights(), resumed.copy_weights(), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-6)
    for ours, theirs in zip(expected.epochs, found.epochs, strict=True):
        assert ours.keys() == theirs.keys() >= {"loss", "loss_loss", "loss_1", "val_loss_loss", "val_loss_1"}
        np.testing.assert_allclose(list(theirs.values()), [ours[name] for name in theirs], rtol=1e-5)
    assert found.gradient_norms.keys() == {"fully_connected", "fully_connected_1", "total"}
    assert all(len(curve.values) == 6 for curve in found.gradient_norms.values())
