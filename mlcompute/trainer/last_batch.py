"""Short last batches of graphs that need full batches: padded without effect on results, or left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from mlcompute.enums import ReductionType
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.tensor import Tensor
from mlcompute.trainer.arrays import Arrays
from mlcompute.trainer.data import Batch, Data
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.model import Model
from mlcompute.trainer.predictor import Predictor

#: What may become of a batch that is smaller than the others.
LastBatch = Literal["smaller", "pad", "drop"]
CHOICES: tuple[LastBatch, ...] = get_args(LastBatch)


def checked_choice(who: str, given: Any) -> LastBatch:
    """One of the choices."""
    if given not in CHOICES:
        raise DataError(f"{who}: last_batch is {given!r}", expected=", ".join(map(repr, CHOICES)))
    chosen: LastBatch = given
    return chosen


def short_batch(data: Data, size: int, full: int) -> Batch | None:
    """Samples as many as the smallest batch of an epoch has, where it is known and not full."""
    if not isinstance(data, Arrays):
        return None
    rows = data.count % size or size
    return data.first(rows) if rows < full else None


def expect_small_batches(who: str, model: Model, data: Data, size: int) -> None:
    """Refuse before the first step what could only fail with the last one of an epoch."""
    full = model.feed.batch
    if not isinstance(data, Arrays):
        return
    for rows in sorted({data.count % size, min(size, data.count)} - {0, full}, reverse=True):
        is_last = rows == data.count % size
        what = f"{data.count} samples in batches of {size} leave a last batch of {rows}"
        expect_runs(who, model, rows, what if is_last else f"batch_size is {rows}")


def expect_runs(who: str, model: Model, rows: int, what: str) -> None:
    """ShapeError where the training graph cannot run so many samples."""
    reason = model.refusal(rows, trains=True)
    if reason:
        full = model.feed.batch
        raise ShapeError(
            f"{who}: {what}, which this graph cannot run",
            reason=reason,
            fix="last_batch='pad' fills it up without counting the filling, last_batch='drop' leaves it out; "
            f"or give a multiple of {full} samples in batches of {full}",
        )


def expect_weights(who: str, model: Model) -> None:
    """Let every loss take a weight per sample: the filling gets 0. Refused where a loss has no place for it."""
    with contextlib.suppress(DataError):  # what cannot be weighed is refused below
        model.weigh_samples(who=who)
    weighed = model.weighed_losses()
    are_weighed = all(loss in weighed for loss in model.loss_layers)
    # Where a loss divides by what labels count for, labels of the filling must not count: they have to be ignored.
    counts = model.divides_by_labels and (len(model.loss_layers) > 1 or model.output.ignore_index is None)
    if not are_weighed or counts or not model.minimises_losses:
        raise DataError(
            f"{who}: a short batch cannot be filled up, because not every loss takes weights for its samples, "
            "layers go on computing with a loss, or a mean divides by class weights",
            fix="last_batch='drop' leaves it out; or declare weights for each loss: "
            "TrainingGraph.add_inputs(inputs, labels, label weights)",
        )


def padded(batch: Batch, model: Predictor, size: int, *, differently: bool = False, with_weights: bool = True) -> Batch:
    """The batch with its samples repeated up to `size`. Repeated ones weigh nothing, the others as before.

    A mean loss divides by all samples, the filling included; the weights make up for it. Where it divides by the labels
    that count, those of the filling are ignored.

    differently   other samples as filling, to see whether it matters
    """
    feed, rows = model.feed, batch.rows
    picked = np.zeros(size - rows, np.int64) if differently else np.arange(size - rows) % rows

    def filled(tensor: Tensor, array: Array) -> Array:
        if not feed.counts_samples(tensor):  # the same data for every batch
            return array
        extent = tensor.descriptor.shape[0]
        samples = array.reshape(rows, extent // feed.batch, *array.shape[1:])
        filling = samples[picked]
        if differently and rows == 1:
            filling = (filling / 2 if is_floating(filling.dtype) else np.zeros_like(filling)).astype(filling.dtype)
        whole: Array = np.concatenate([samples, filling]).reshape(size * samples.shape[1], *array.shape[1:])
        return whole

    inputs, labels = (
        {name: filled(tensors[name], array) for name, array in part.items()}
        for tensors, part in ((feed.inputs, batch.inputs), (feed.labels, batch.labels))
    )
    for name, array in labels.items():
        ignored = feed.classes.get(name, (0, None))[1]
        if ignored is not None and feed.counts_samples(feed.labels[name]):
            array[len(array) // size * rows :] = ignored
    weights: dict[str, Array] = {}
    if with_weights and isinstance(model, Model):
        is_mean = model.reduction == ReductionType.MEAN and not model.divides_by_labels
        factor = np.float32(size / rows if is_mean else 1.0)
        for name, array in weights_of(batch, model).items():
            weights[name] = filled(feed.weights[name], array) * factor
            weights[name][len(array) :] = 0
    return Batch(inputs, labels, weights, rows, size - rows)


def weights_of(batch: Batch, model: Model) -> dict[str, Array]:
    """The weights of a batch; where the loss takes some and none were given, every sample weighs 1."""
    feed = model.feed
    if batch.weights or not feed.weighs_alike:
        return batch.weights
    found: dict[str, Array] = {}
    for name, tensor in feed.weights.items():
        rows, *extents = tensor.descriptor.shape
        if feed.varies and extents:  # a weight for every step: as many as there are labels
            label = next((one for one in batch.labels if feed.weighed.get(one) == name), next(iter(batch.labels)))
            axis = feed.class_axes.get(label, 1)
            shape = batch.labels[label].shape
            extents = [*shape[1:axis], *shape[axis + 1 :]]
        found[name] = np.ones((batch.rows * (rows // feed.batch), *extents), np.float32)
    return found


def expect_independent_samples(who: str, way_out: str, run: Callable[[bool], list[Any]]) -> None:
    """Refuse to fill a batch up where the filling changes what becomes of the samples: batch normalization, say.

    run  what becomes of them with one filling (False) and with another (True)
    """
    one, other = run(False), run(True)
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True)):
        raise DataError(
            f"{who}: a short batch cannot be filled up: the samples of a batch influence each other in this graph",
            fix=way_out,
        )
