"""Builders for normalization and dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from mlcompute.building.builder import build, chosen, expect_channels_second, expect_rank, filled
from mlcompute.building.choices import NormalizationName
from mlcompute.building.shared_weights import SharedWeights, Weights
from mlcompute.errors import GraphError, ShapeError
from mlcompute.layers.arguments import whole
from mlcompute.layers.dropout import DropoutLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from mlcompute.layers.sample_normalization import (
    GroupNormalizationLayer,
    LayerNormalizationLayer,
    RMSNormalizationLayer,
)
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_KINDS: dict[str, NormalizationName] = {kind: kind for kind in get_args(NormalizationName)}


def normalize(
    self: Graph,
    x: Tensor,
    kind: NormalizationName = "batch",
    *,
    groups: int | None = None,
    trailing_axes: int = 1,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    scale: bool = True,
    shift: bool = True,
    running: bool = False,
    across_group: bool = False,
    weights: Weights | None = None,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """gamma (x - mean) / sqrt(variance + epsilon) + beta.   x   ->   like x

    kind           "batch": per channel (axis 1) over the batch, with running statistics for inference;
                   "instance": per sample and channel; "group": per sample and group of channels;
                   "layer": per sample over the trailing axes; "rms": the same without mean and beta
    groups         for "group"; it must divide the channels
    trailing_axes  for "layer" and "rms": over how many axes at the end
    momentum       weight of the old running value, as in Keras; PyTorch's momentum is 1 minus this one
    scale, shift   train gamma (from 1) and beta (from 0)?
    running        for "instance": keep running statistics too and use them in inference
    across_group   for "batch", in a group of processes: by the statistics of the whole batch, not of each slice of it;
                   two exchanges more in each pass. By itself a process has the whole batch, and it changes nothing
    weights        a layer of the same kind, whose tensors, running statistics too, are shared; or some of them by slot:
                   {"gamma": tensor}. Every use that is trained moves the statistics

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> x = graph.normalize(graph.input((8, 6, 4, 4), "x"), "group", groups=3)
    >>> graph.layer("group_norm1").group_count
    3
    """
    who = f"{type(self).__name__}.normalize"
    kind = chosen(who, "kind", _KINDS, kind)
    shape = expect_rank(self, "normalize", x, range(2, 16), "at least two axes, channels on axis 1").descriptor.shape
    if (groups is not None) != (kind == "group"):
        raise GraphError(
            f"{who}: groups is {groups}, the kind is {kind!r}",
            fix="give groups=... with kind='group' and with no other",
        )
    if across_group and kind != "batch":
        raise GraphError(
            f"{who}: across_group is True, the kind is {kind!r}",
            fix="leave across_group out: only kind='batch' normalizes over samples",
        )
    axes = whole(who, "trailing_axes", trailing_axes, 1)
    over_trailing = kind in ("layer", "rms")
    if over_trailing and axes >= len(shape):
        raise ShapeError(
            f"{who}: trailing_axes is {axes}, the source has {len(shape)} axes and the first counts samples",
            expected=f"1 to {len(shape) - 1}",
            source=f"{shape} '{x.label}'",
        )
    if not over_trailing:
        expect_channels_second(who, x, "kind='layer' or 'rms' normalizes the features of every step; or ")
    normalized = shape[-axes:] if over_trailing else shape[1:2]
    shared = SharedWeights(who, weights)
    beta = shared.one("beta", filled(0.0, *normalized, like=x)) if shift and kind != "rms" else None
    gamma = shared.one("gamma", filled(1.0, *normalized, like=x)) if scale else None
    mean = variance = None
    if kind == "batch" or (kind == "instance" and running):
        mean = shared.one("mean", filled(0.0, shape[1], like=x))
        variance = shared.one("variance", filled(1.0, shape[1], like=x))
    shared.expect_all_taken()
    layer: Layer
    if kind == "layer":
        layer = LayerNormalizationLayer(normalized, beta, gamma, epsilon)
    elif kind == "rms":
        layer = RMSNormalizationLayer(normalized, gamma, epsilon)
    elif kind == "group":
        assert groups is not None
        layer = GroupNormalizationLayer(shape[1], groups, beta, gamma, epsilon)
    elif kind == "batch":
        assert mean is not None
        assert variance is not None
        layer = BatchNormalizationLayer(shape[1], mean, variance, beta, gamma, epsilon, momentum, across_group)
    else:
        layer = InstanceNormalizationLayer(shape[1], mean, variance, beta, gamma, epsilon, momentum)
    return build(self, layer, [x], name, f"{kind}_norm", updates=updates)


def dropout(self: Graph, x: Tensor, rate: float = 0.5, *, seed: int = 0, name: str = "") -> Tensor:
    """In training every element is zeroed with probability `rate`, the others divided by 1 - rate.

    x   ->   like x. In inference graphs it does nothing.

    seed  0 takes the platform's; another number repeats the same masks in every run of the program
    """
    return build(self, DropoutLayer(rate, seed), [x], name, "dropout")
