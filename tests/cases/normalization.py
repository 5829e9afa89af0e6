"""Cases of the four normalizations: training, inference, running statistics, ranks, and single values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name the whole world uses)

from mlcompute.enums import DataType
from mlcompute.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from mlcompute.layers.sample_normalization import GroupNormalizationLayer, LayerNormalizationLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Array, Case, Refusal, numbers

Made = Callable[[], Any]

ONE_TO_FOUR = np.array([[[[1, 2], [3, 4]]]], np.float32)
_GOLDEN = np.array([[[[-1.341635, -0.4472118], [0.4472118, 1.341635]]]], np.float32)


def _tensor(*shape: int, seed: int = 0, low: float | None = None, high: float | None = None) -> Tensor:
    return Tensor(shape=shape, data=numbers(*shape, seed=seed, low=low, high=high))


def _channels(count: int, spelling: str) -> tuple[int, ...]:
    return {"image": (1, count, 1, 1), "flat": (count,), "row": (1, count)}[spelling]


def _running(count: int, spelling: str) -> dict[str, Any]:
    shape = _channels(count, spelling)
    return {"mean": _tensor(*shape, seed=3), "variance": _tensor(*shape, seed=4, low=0.5, high=2)}


def _affine(count: int, spelling: str) -> dict[str, Any]:
    shape = _channels(count, spelling)
    return {"beta": _tensor(*shape, seed=5), "gamma": _tensor(*shape, seed=6, low=0.5, high=2)}


def _batch(count: int, spelling: str = "image", affine: bool = True, **named: Any) -> Made:
    def make() -> BatchNormalizationLayer:
        extra = _affine(count, spelling) if affine else {}
        return BatchNormalizationLayer(count, **_running(count, spelling), **extra, **named)

    return make


def _instance(count: int, spelling: str = "image", affine: bool = True, running: bool = False, **named: Any) -> Made:
    def make() -> InstanceNormalizationLayer:
        extra = {**(_affine(count, spelling) if affine else {}), **(_running(count, spelling) if running else {})}
        return InstanceNormalizationLayer(count, **extra, **named)

    return make


def _group(count: int, groups: int, spelling: str = "image", affine: bool = True, **named: Any) -> Made:
    def make() -> GroupNormalizationLayer:
        return GroupNormalizationLayer(count, groups, **(_affine(count, spelling) if affine else {}), **named)

    return make


def _layer(shape: tuple[int, ...], affine: bool = True, spelling: tuple[int, ...] | None = None, **named: Any) -> Made:
    def make() -> LayerNormalizationLayer:
        own = spelling or shape
        extra: dict[str, Any] = (
            {"beta": _tensor(*own, seed=5), "gamma": _tensor(*own, seed=6, low=0.5, high=2)} if affine else {}
        )
        return LayerNormalizationLayer(shape, **extra, **named)

    return make


# Oracles ----------------------------------------------------------------------------------------------------


def _flat(p: Any, slot: str) -> Any:
    return p[slot].reshape(-1) if slot in p else None


def _over(axes: Callable[[int], tuple[int, ...]], epsilon: float) -> Callable[..., Any]:
    """The formula itself; PyTorch's own batch_norm and instance_norm refuse single values in training."""

    def oracle(p: Any, x: Any) -> Any:
        own = axes(x.ndim)
        m = x.mean(own, keepdim=True)
        v = ((x - m) ** 2).mean(own, keepdim=True)
        y = (x - m) / torch.sqrt(v + epsilon)
        shape = (1, -1, *(1,) * (x.ndim - 2))
        y = y * p["gamma"].reshape(shape) if "gamma" in p else y
        return y + p["beta"].reshape(shape) if "beta" in p else y

    return oracle


def _batch_axes(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _instance_axes(rank: int) -> tuple[int, ...]:
    return tuple(range(2, rank))


def _batch_training(epsilon: float = 1e-5) -> Callable[..., Any]:
    return lambda p, x: F.batch_norm(x, None, None, _flat(p, "gamma"), _flat(p, "beta"), True, 0.0, epsilon)


def _from_running(epsilon: float = 1e-5) -> Callable[..., Any]:
    def oracle(p: Any, x: Any) -> Any:
        mean, variance = _flat(p, "mean"), _flat(p, "variance")
        return F.batch_norm(x, mean, variance, _flat(p, "gamma"), _flat(p, "beta"), False, 0.0, epsilon)

    return oracle


def _instance_own(epsilon: float = 1e-5) -> Callable[..., Any]:
    return lambda p, x: F.instance_norm(x, None, None, _flat(p, "gamma"), _flat(p, "beta"), True, 0.0, epsilon)


def _updates(axes: Callable[[int], tuple[int, ...]], momentum: float) -> Callable[..., dict[str, Any]]:
    """Running statistics after one training pass: biased variance, instances averaged over the batch."""

    def updates(p: Any, x: Any) -> dict[str, Any]:
        x = np.asarray(torch.as_tensor(x).detach(), np.float64)
        own = axes(x.ndim)
        batch = {"mean": x.mean(own, keepdims=True), "variance": x.var(own, keepdims=True)}
        new = {}
        for slot, values in batch.items():
            old = np.asarray(torch.as_tensor(p[slot]).detach(), np.float64)
            new[slot] = momentum * old + (1 - momentum) * values.mean(0).reshape(old.shape)
        return new

    return updates


def _grouped(groups: int, epsilon: float = 1e-5) -> Callable[..., Any]:
    return lambda p, x: F.group_norm(x, groups, _flat(p, "gamma"), _flat(p, "beta"), epsilon)


def _trailing(shape: tuple[int, ...], epsilon: float = 1e-5) -> Callable[..., Any]:
    def oracle(p: Any, x: Any) -> Any:
        gamma, beta = (p[slot].reshape(shape) if slot in p else None for slot in ("gamma", "beta"))
        return F.layer_norm(x, shape, gamma, beta, epsilon)

    return oracle


# Cases ------------------------------------------------------------------------------------------------------

_BATCH_SHAPES: list[tuple[int, ...]] = [(4, 3), (5, 3, 7), (3, 3, 4, 5), (1, 3, 2, 3), (2, 3, 1, 1), (7, 1, 3, 1)]
_INSTANCE_SHAPES: list[tuple[int, ...]] = [(3, 2, 7), (3, 2, 4, 5), (1, 2, 3, 3), (2, 1, 1, 5)]
_GROUP_SHAPES: list[tuple[int, ...]] = [(3, 6), (2, 6, 5), (3, 6, 3, 5), (1, 6, 1, 1), (2, 6, 1, 3)]
_LAYER_SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 5), (5,)),
    ((1, 5), (5,)),
    ((2, 3, 5), (5,)),
    ((2, 3, 5), (3, 5)),
    ((2, 3, 4, 5), (5,)),
    ((2, 3, 4, 5), (4, 5)),
    ((2, 3, 4, 5), (3, 4, 5)),
    ((2, 1, 1, 7), (1, 7)),
]
_OFFSET = (numbers(4, 3, 2, 5) + 100).astype(np.float32)
_MIXES = "training mixes the samples"
_HALF = numbers(4, 3, 2, 2).astype(np.float16)
_ROUNDED = "differences vanish in float16, and gradients of float32 parameters come from float16 ones"


def _array(values: Any) -> Array:
    return np.array(values, np.float32)


def _constant(*shape: int) -> Array:
    return np.full(shape, 2.5, np.float32)


def _filled(cls: type[Any], *counts: int, **slots: float) -> Made:
    """A layer of one channel whose tensors hold the given numbers."""

    def make() -> Any:
        return cls(*counts, **{slot: Tensor(shape=(1, 1, 1, 1), fill_with_data=value) for slot, value in slots.items()})

    return make


CASES: list[Case] = [
    *(
        Case(f"batch {shape} training", _batch(shape[1]), [shape], _batch_training(), training=True, batches=False,
             updates=_updates(_batch_axes, 0.99), note=_MIXES)
        for shape in _BATCH_SHAPES
    ),
    *(
        Case(f"batch {shape} inference", _batch(shape[1]), [shape], _from_running(), training=False)
        for shape in [*_BATCH_SHAPES, (1, 3)]
    ),
    *(
        Case(f"batch spelled {spelling}, {mode}", _batch(3, spelling), [(4, 3, 2, 2)], oracle, training=training,
             batches=not training, updates=_updates(_batch_axes, 0.99) if training else None)
        for spelling in ("flat", "row")
        for mode, training, oracle in (("training", True, _batch_training()), ("inference", False, _from_running()))
    ),
    *(
        Case(f"batch momentum {momentum}", _batch(3, momentum=momentum), [(4, 3, 2, 2)], _batch_training(),
             training=True, batches=False, updates=_updates(_batch_axes, momentum), note=_MIXES)
        for momentum in (0, 0.5, 1)
    ),
    Case("batch without beta and gamma, training", _batch(3, affine=False), [(4, 3, 2, 2)], _batch_training(),
         training=True, batches=False, updates=_updates(_batch_axes, 0.99), note=_MIXES),
    Case("batch without beta and gamma, inference", _batch(3, affine=False), [(4, 3, 2, 2)], _from_running(),
         training=False),
    Case("batch epsilon 0.1, training", _batch(3, variance_epsilon=0.1), [(4, 3, 2, 2)], _batch_training(0.1),
         training=True, batches=False, note=_MIXES),
    Case("batch epsilon 0.1, inference", _batch(3, variance_epsilon=0.1), [(4, 3, 2, 2)], _from_running(0.1),
         training=False),
    Case("batch of a single value per channel", _batch(3), [(1, 3)], _over(_batch_axes, 1e-5), training=True,
         batches=False, updates=_updates(_batch_axes, 0.99), smooth=False,
         note="variance 0: differences see only rounding"),
    Case("batch of a single value per channel, image", _batch(3), [(1, 3, 1, 1)], _over(_batch_axes, 1e-5),
         training=True, batches=False, updates=_updates(_batch_axes, 0.99), smooth=False,
         note="variance 0: differences see only rounding"),
    Case("batch of a constant", _batch(3), [_constant(4, 3, 2)], _over(_batch_axes, 1e-5), training=True,
         batches=False, smooth=False, note="variance 0: the root is at its steepest"),
    Case("batch far from zero", _batch(3), [_OFFSET], _batch_training(), training=True, batches=False, scale=20.0,
         note="a mean of 100 costs two of seven digits"),
    Case("batch float16, inference", _batch(3), [_HALF], _from_running(), training=False, smooth=False,
         scale=25.0, note=_ROUNDED),
    Case("batch float16, training", _batch(3), [_HALF], _batch_training(), training=True, batches=False, smooth=False,
         scale=25.0, note=_ROUNDED),
    Case("golden batch inference", _filled(BatchNormalizationLayer, 1, mean=1, variance=4, beta=0.5, gamma=2),
         [ONE_TO_FOUR], training=False, expect=_array([[[[0.5, 1.499999], [2.499998, 3.499996]]]])),
    Case("batch with nan, inference", _batch(1, affine=False), [_array([[math.nan], [math.inf]])], training=False,
         expect=_array([[math.nan], [math.inf]]), smooth=False, note="not finite"),
    *(
        Case(f"instance {shape}", _instance(shape[1]), [shape], _instance_own()) for shape in _INSTANCE_SHAPES
    ),
    *(
        Case(f"instance {shape} with running statistics, training", _instance(shape[1], running=True), [shape],
             _instance_own(), training=True, updates=_updates(_instance_axes, 0.99))
        for shape in _INSTANCE_SHAPES
    ),
    *(
        Case(f"instance {shape} with running statistics, inference", _instance(shape[1], running=True), [shape],
             _from_running(), training=False)
        for shape in _INSTANCE_SHAPES
    ),
    Case("instance spelled flat, training", _instance(2, "flat", running=True, momentum=0.25), [(3, 2, 5)],
         _instance_own(), training=True, updates=_updates(_instance_axes, 0.25)),
    Case("instance spelled row, inference", _instance(2, "row", running=True), [(3, 2, 5)], _from_running(),
         training=False),
    Case("instance without beta and gamma", _instance(2, affine=False), [(3, 2, 5)], _instance_own()),
    Case("instance epsilon 0.1", _instance(2, variance_epsilon=0.1), [(3, 2, 5)], _instance_own(0.1)),
    Case("instance of one pixel", _instance(2), [(3, 2, 1, 1)], _over(_instance_axes, 1e-5), smooth=False,
         note="variance 0: differences see only rounding"),
    Case("golden instance", _filled(InstanceNormalizationLayer, 1, beta=0, gamma=1), [ONE_TO_FOUR], expect=_GOLDEN),
    *(
        Case(f"group {shape} in {groups}", _group(6, groups), [shape], _grouped(groups),
             smooth=math.prod(shape[1:]) > 2 * groups, scale=1 if math.prod(shape[1:]) > 2 * groups else 100,
             note="two values in a group: too steep where they nearly agree, and the gradient is what cancels least")
        for shape in _GROUP_SHAPES
        for groups in (1, 2, 3, 6)
        if math.prod(shape[1:]) > groups
    ),
    Case("group of single values", _group(6, 6), [(2, 6, 1, 1)], _over(_instance_axes, 1e-5), smooth=False,
         note="variance 0: differences see only rounding"),
    Case("group spelled flat", _group(6, 3, "flat"), [(2, 6, 5)], _grouped(3)),
    Case("group without beta and gamma", _group(6, 3, affine=False), [(2, 6, 5)], _grouped(3)),
    Case("group epsilon 0.1", _group(6, 2, variance_epsilon=0.1), [(2, 6, 5)], _grouped(2, 0.1)),
    Case("golden group", _filled(GroupNormalizationLayer, 1, 1, beta=0, gamma=1), [ONE_TO_FOUR], expect=_GOLDEN),
    *(
        Case(f"layer {shape} over {trailing}", _layer(trailing), [shape], _trailing(trailing))
        for shape, trailing in _LAYER_SHAPES
    ),
    Case("layer over everything", _layer((3, 5)), [(3, 5)], _trailing((3, 5)), batches=False),
    Case("layer of a vector", _layer((5,)), [(5,)], _trailing((5,)), batches=False),
    Case("layer of single values", _layer((1,)), [(3, 1)], _trailing((1,)), smooth=False,
         note="variance 0: differences see only rounding"),
    Case("layer spelled as an image", _layer((4,), spelling=(1, 4, 1, 1)), [(3, 4)], _trailing((4,))),
    Case("layer spelled flat", _layer((3, 4), spelling=(12,)), [(2, 3, 4)], _trailing((3, 4))),
    Case("layer without beta and gamma", _layer((5,), affine=False), [(3, 5)], _trailing((5,))),
    Case("layer epsilon 0.1", _layer((5,), variance_epsilon=0.1), [(3, 5)], _trailing((5,), 0.1)),
    Case("layer of a constant", _layer((4,)), [_constant(3, 4)], _trailing((4,)), smooth=False,
         note="variance 0: the root is at its steepest"),
]  # fmt: skip


def _bad(cls: type[Any], *given: Any, **named: Any) -> Made:
    """A layer whose keyword tensors are described by their shapes."""

    def make() -> Any:
        return cls(*given, **{name: _tensor(*v) if isinstance(v, tuple) else v for name, v in named.items()})

    return make


def _ones_int32() -> Tensor:
    return Tensor(shape=(3,), data=np.ones(3, np.int32), data_type=DataType.INT32)


_B, _I, _G, _L = (
    BatchNormalizationLayer, InstanceNormalizationLayer, GroupNormalizationLayer, LayerNormalizationLayer,
)  # fmt: skip
_STATS: dict[str, Any] = {"mean": (3,), "variance": (3,)}

REFUSALS: list[Refusal] = [
    *(
        Refusal(f"{slot} of the wrong size", _bad(_B, 3, **{**_STATS, slot: (4,)}), f"{slot} needs 3 elements")
        for slot in ("mean", "variance", "beta", "gamma")
    ),
    *(
        Refusal(f"batch without {slot}", _bad(_B, 3, **{**_STATS, slot: None}), f"{slot} must be a Tensor",
                error=TypeError)
        for slot in ("mean", "variance")
    ),
    Refusal("beta that is an array", _bad(_B, 3, **_STATS, beta=np.ones(3)), "beta must be a Tensor", error=TypeError),
    Refusal(
        "gamma of integers",
        lambda: _B(3, _tensor(3), _tensor(3), gamma=_ones_int32()),
        "gamma must be of a floating type",
    ),
    Refusal("no channels", _bad(_B, 0, **_STATS), "feature_channel_count is 0"),
    Refusal("negative epsilon", _bad(_B, 3, **_STATS, variance_epsilon=-1e-5), "variance_epsilon is -1e-05"),
    Refusal("momentum above 1", _bad(_B, 3, **_STATS, momentum=1.5), "momentum is 1.5"),
    Refusal("momentum below 0", _bad(_B, 3, **_STATS, momentum=-0.1), "momentum is -0.1"),
    Refusal("nan as momentum", _bad(_B, 3, **_STATS, momentum=math.nan), "momentum is nan"),
    Refusal("batch of other channels", _batch(3), "feature_channel_count is 3, the source has 4 channels", [(2, 4, 5)]),
    Refusal("batch of a vector", _batch(3), "the source has 1 axes", [(3,)]),
    Refusal("batch of integers", _batch(3), "a source of type INT32 is not supported", [np.ones((2, 3), np.int32)]),
    Refusal("batch of two sources", _batch(3), "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
    Refusal("mean alone", _bad(_I, 3, mean=(3,)), "mean is given alone"),
    Refusal("variance alone", _bad(_I, 3, variance=(3,)), "variance is given alone"),
    Refusal("instance momentum", _bad(_I, 3, momentum=2), "momentum is 2"),
    Refusal("instance gamma of the wrong size", _bad(_I, 3, gamma=(1, 2, 1, 1)), "gamma needs 3 elements"),
    Refusal("instance of other channels", _instance(3), "feature_channel_count is 3", [(2, 4, 5, 5)]),
    Refusal("instance without space", _instance(3), "the source has 2 axes", [(2, 3)]),
    Refusal("groups that do not divide", _bad(_G, 6, 4), "6 channels cannot be divided into 4 equal groups"),
    Refusal("no groups", _bad(_G, 6, 0), "group_count is 0"),
    Refusal("group beta of the wrong size", _bad(_G, 6, 2, beta=(2,)), "beta needs 6 elements"),
    Refusal("group of other channels", _group(6, 2), "feature_channel_count is 6", [(2, 4, 5, 5)]),
    Refusal("layer without shape", _bad(_L, ()), "normalized_shape has 0 axes"),
    Refusal("layer of nine axes", _bad(_L, [1] * 9), "normalized_shape has 9 axes"),
    Refusal("layer of an empty axis", _bad(_L, [3, 0]), "normalized_shape[1] is 0"),
    Refusal("layer with a number as shape", _bad(_L, 4), "normalized_shape must be a list", error=TypeError),
    Refusal("layer gamma of the wrong size", _bad(_L, [4], gamma=(5,)), "gamma needs 4 elements"),
    Refusal("layer of another shape", _layer((4, 5)), "normalized_shape is (4, 5), the source is (5, 4)", [(5, 4)]),
    Refusal("layer of a shorter source", _layer((4, 5)), "normalized_shape is (4, 5), the source is (5,)", [(5,)]),
]  # fmt: skip
