"""Weights of samples: which losses take them, under which names, in which shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.graph import Node
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import ObjectiveLayer
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor
from mlcompute.trainer.output import Output, is_over_classes
from mlcompute.training import TrainingGraph

#: The name of the weights of the only loss.
ONLY = "sample_weight"


def weighable_losses(who: str, training: TrainingGraph, batch: int) -> list[Node]:
    """The losses that weights of samples belong to: loss layers, and what is minimised with a row for every sample.

    What the graph itself minimises beside them, a regularizer say, is none. DataError where a loss has no samples.
    """
    definition = definition_of(training)
    placed = {*definition.own, *(definition.learning.loss_nodes if definition.learning is not None else ())}
    nodes = training.nodes
    layers = [node for node in nodes if isinstance(node.layer, LossLayer)]
    objectives = [node for node in nodes if isinstance(node.layer, ObjectiveLayer) and not scales_a_loss(node)]
    given = [node for node in objectives if node in placed]
    if not given and placed.isdisjoint(layers):
        given = objectives  # the graph's own are all there are
    weighed = {*layers, *(node for node in given if _has_samples(node, batch))}
    for node in given:
        if node not in weighed and (node in placed or not weighed):
            raise DataError(
                f"{who}: weights need a loss for every sample, '{node.layer.label}' is made from one number for all",
                shape=node.sources[0].descriptor.shape,
                fix="leave the mean over samples out: lambda y, t: ((y - t) ** 2).mean(-1); "
                "or make the weights an input of the graph and multiply by them",
            )
    return [node for node in nodes if node in weighed]


def scales_a_loss(node: Node) -> bool:
    """Is what is minimised the result of a loss layer, times a weight?"""
    found = state_of(node.sources[0]).node
    return found is not None and isinstance(found.layer, LossLayer)


def _has_samples(node: Node, batch: int) -> bool:
    shape = node.sources[0].descriptor.shape
    return shape[0] == batch and (batch > 1 or len(shape) > 1)


def weight_names(losses: Sequence[Node], outputs: Iterable[Output]) -> dict[str, Node]:
    """What the weights of each loss are called: `sample_weight`, and of several losses as their outputs are."""
    if len(losses) == 1:
        return {ONLY: losses[0]}
    known = {output.prediction: output.name for output in outputs}
    return {known.get(node.sources[0], node.layer.label.removesuffix("_loss")): node for node in losses}


def weight_shape(node: Node, given: Any, varies: bool) -> tuple[int, ...]:
    """One weight per sample; one per label of a sample, where such are given. `varies`: of any extents."""
    layer, shape = node.layer, node.sources[0].descriptor.shape
    steps: tuple[int, ...] = shape[1:] if isinstance(layer, ObjectiveLayer) else ()
    if is_over_classes(layer):
        axis = layer.class_axis(shape)
        steps = (*shape[1:axis], *shape[axis + 1 :])
    wide = tuple(extent for extent in np.shape(given)[1:] if extent != 1)
    fits = len(wide) == len(steps) if varies else wide == tuple(extent for extent in steps if extent != 1)
    return (shape[0], *steps) if wide and fits else shape[:1]


def attach(node: Node, weights: Tensor) -> None:
    """Let a tensor that is minimised be weighed; those of loss layers the training graph finds by itself."""
    if isinstance(node.layer, ObjectiveLayer):
        node.labels = [weights]


def by_name(names: Iterable[str], given: Any) -> Mapping[str, Any]:
    """Weights by name: one array is for every loss."""
    return given if isinstance(given, Mapping) else dict.fromkeys(names, given)
