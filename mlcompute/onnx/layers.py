"""Which operators become one of ML Compute's own layers: those that behave otherwise in training than in inference.

Everything else becomes an `OperatorLayer`, which says the same in ops. A batch normalization with its own layer uses
the batch's statistics in a training graph and keeps the running ones, as in the network the model came from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.layers.layer import Layer
from mlcompute.layers.normalization import BatchNormalizationLayer
from mlcompute.onnx.operands import Source, Use, Weight
from mlcompute.ops.op import FLOAT32, Shape


def layer_for(use: Use, outputs: list[tuple[int, Shape, np.dtype[Any]]]) -> Layer | None:
    """The layer that says the same as an operator; None when none does."""
    if use.row.name == "BatchNormalization" and not use.row.domain:
        return _batch_normalization(use, outputs)
    return None


def _batch_normalization(use: Use, outputs: list[tuple[int, Shape, np.dtype[Any]]]) -> Layer | None:
    x, *slots = use.operands
    if not isinstance(x, Source) or len(x.shape) != 4 or x.dtype != FLOAT32 or len(outputs) != 1:
        return None
    if use.attributes.get("training_mode") or use.version < 7 or len(use.sources()) != 1:
        return None
    weights = [slot for slot in slots if isinstance(slot, Weight)]
    if len(weights) != 4:
        return None
    scale, bias, mean, variance = (slot.tensor for slot in weights)
    if len({scale, bias, mean, variance}) < 4:  # a statistic that is written must not be a weight as well
        return None
    return BatchNormalizationLayer(
        x.shape[1], mean, variance, bias, scale,
        variance_epsilon=use.attributes.get("epsilon", 1e-5), momentum=use.attributes.get("momentum", 0.9),
    )  # fmt: skip
