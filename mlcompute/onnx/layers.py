"""Which operators become one of ML Compute's own layers: those that behave otherwise in training than in inference.

Everything else becomes an `OperatorLayer`, which says the same in ops. A batch normalization with its own layer uses
the batch's statistics in a training graph and keeps the running ones, as in the network the model came from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.layers.layer import Layer
from mlcompute.layers.normalization import BatchNormalizationLayer
from mlcompute.onnx.operands import Derived, Known, Operand, Source, Use, Weight
from mlcompute.ops.op import FLOAT32, Shape
from mlcompute.tensor import Tensor


def layer_for(use: Use, outputs: list[tuple[int, Shape, np.dtype[Any]]], batch_norm: str) -> Layer | None:
    """The layer that says the same as an operator; None when none does."""
    if use.row.name == "BatchNormalization" and not use.row.domain and batch_norm == "train":
        return _batch_normalization(use, outputs)
    return None


def _batch_normalization(use: Use, outputs: list[tuple[int, Shape, np.dtype[Any]]]) -> Layer | None:
    """Of any rank: a tensor carries more than eight axes folded behind the channels, and statistics are the same."""
    x, scale, bias, mean, variance = map(_stored, use.operands)
    if not isinstance(x, Source) or x.dtype != FLOAT32 or len(outputs) != 1 or len(use.sources()) != 1:
        return None
    if use.attributes.get("training_mode") or (use.version < 7 and not use.attributes.get("is_test")):
        return None  # the model itself says what happens, in inference too
    if not isinstance(mean, Weight) or not isinstance(variance, Weight):
        return None
    if not _is_given(scale, 1.0) or not _is_given(bias, 0.0):
        return None
    tensors = [slot.tensor for slot in (scale, bias, mean, variance) if isinstance(slot, Weight)]
    if len(set(tensors)) < len(tensors):  # a statistic that is written must not be a weight as well
        return None
    return BatchNormalizationLayer(
        x.shape[1], mean.tensor, variance.tensor, _tensor(bias), _tensor(scale),
        variance_epsilon=use.attributes.get("epsilon", 1e-5), momentum=use.attributes.get("momentum", 0.9),
    )  # fmt: skip


def _stored(slot: Operand | None) -> Operand | None:
    """The tensor of the file, also where the model writes it with another shape."""
    if isinstance(slot, Derived) and slot.use.row.name == "Reshape":
        return slot.use.operands[0]
    return slot


def _is_given(slot: Operand | None, default: float) -> bool:
    """Can the layer have it: a tensor, or nothing where it changes nothing."""
    return isinstance(slot, Weight) or (isinstance(slot, Known) and bool(np.all(slot.array == default)))


def _tensor(slot: Operand | None) -> Tensor | None:
    return slot.tensor if isinstance(slot, Weight) else None
