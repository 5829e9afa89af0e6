"""What a mean over several batches divides by: their samples, or what their labels count for.

A loss that ignores labels, or weighs classes, divides by what the labels of its batch count for: a batch of padding
says less about the mean of all than a full one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlcompute.enums import ReductionType
from mlcompute.layers.loss import LossLayer
from mlcompute.tensor import Tensor
from mlcompute.trainer.label_tensors import are_indices
from mlcompute.trainer.metrics import Array

if TYPE_CHECKING:
    from mlcompute.graph import Node


class LabelCount(NamedTuple):
    """Labels that a mean divides by.

    ignored        the integer class label that does not count; None: all count
    class_weights  what a label of each class counts for; None: 1
    """

    labels: Tensor
    ignored: int | None
    class_weights: Tensor | None

    def of(self, labels: Array) -> float:
        """What these count for together."""
        counted = labels if self.ignored is None else labels[labels != self.ignored]
        if self.class_weights is None:
            return float(counted.size)
        # A label that is no class at all is refused by the run.
        return float(np.asarray(self.class_weights.data).ravel().take(counted, mode="clip").sum(dtype=np.float64))


def label_count(node: Node) -> LabelCount | None:
    """What the mean that a node computes divides by; None: by samples, or it is no mean."""
    layer = node.layer
    if not isinstance(layer, LossLayer) or layer.descriptor.reduction_type != ReductionType.MEAN:
        return None
    ignored, weights = layer.descriptor.ignore_index, layer.class_weights
    is_counted = (ignored is not None or weights is not None) and are_indices(node.labels[0], node.sources[0])
    return LabelCount(node.labels[0], ignored, weights) if is_counted else None


def label_counts(nodes: Iterable[Node]) -> dict[Tensor, frozenset[LabelCount | None]]:
    """For every result that is a mean, what it, or the means it is made of, divide by; None stands for samples."""
    found: dict[Tensor, frozenset[LabelCount | None]] = {}
    for node in nodes:
        read: frozenset[LabelCount | None] = frozenset().union(*(found.get(one, ()) for one in node.sources))
        if isinstance(node.layer, LossLayer) or not read:
            read = frozenset({label_count(node)})
        found.update(dict.fromkeys(node.results, read))
    return found
