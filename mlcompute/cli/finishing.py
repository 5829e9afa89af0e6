"""After training: evaluation of a classifier, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc


def evaluated(run: mlc.Run, trainer: mlc.Trainer, data: mlc.data.Dataset) -> mlc.Evaluation | None:
    """Confusion matrix and mistakes of a classifier on what it has not learned from, kept in the run's folder."""
    if data.validation is None:
        return None
    found = mlc.Evaluation.of(trainer, data.validation)
    if found is not None:
        found.save(run.evaluation)
    return found


def write_report(
    path: Path, run: mlc.Run, trainer: mlc.Trainer, data: mlc.data.Dataset, evaluation: mlc.Evaluation | None
) -> None:
    """The page about a run, with the time of its steps."""
    profile, feed = None, trainer.model.feed
    if len(data) >= feed.batch and len(feed.inputs) == len(feed.labels) == 1:
        x, y = data.batch(np.arange(feed.batch))
        name, tensor = next(iter(feed.labels.items()))
        profile = trainer.training.profile({next(iter(feed.inputs)): x}, {name: _labels(y, tensor)})
    title = f"{run.name} on {data.name}"
    mlc.report(path, trainer.training, trainer.history, profile, title=title, run=run, evaluation=evaluation)


def _labels(y: Any, tensor: mlc.Tensor) -> Any:
    shape = tensor.descriptor.shape
    y = np.asarray(y)
    return np.eye(shape[-1], dtype=np.float32)[y] if y.ndim == 1 and len(shape) == 2 and y.dtype.kind in "iu" else y
