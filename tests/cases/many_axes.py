"""Cases of five to eight axes, for layers of every family."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

import mlcompute as mlc
from mlcompute.enums import (
    ArithmeticOperation,
    ComparisonOperation,
    LossType,
    PaddingType,
    ReductionType,
    SoftmaxOperation,
)
from mlcompute.layers.embedding import EmbeddingDescriptor
from mlcompute.layers.loss import LossDescriptor
from mlcompute.layers.matmul import MatMulDescriptor
from tests.cases.case import Array, Case, Refusal, numbers


def _tensor(*shape: int, seed: int = 0) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, data=numbers(*shape, seed=seed))


def _positive(*shape: int) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, data=numbers(*shape, low=0.5, high=2.0))


def _dense() -> mlc.FullyConnectedLayer:
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=4)
    return mlc.FullyConnectedLayer(_tensor(4, 3), _tensor(4), sizes)


def _batch_norm() -> mlc.BatchNormalizationLayer:
    return mlc.BatchNormalizationLayer(3, _tensor(3), _positive(3), _tensor(3, seed=1), _tensor(3, seed=2))


def _batch_normalized(p: Any, x: Any) -> Any:
    return torch.nn.functional.batch_norm(x, None, None, p["gamma"], p["beta"], training=True)


def _embedding() -> mlc.EmbeddingLayer:
    return mlc.EmbeddingLayer(EmbeddingDescriptor(6, 3), _tensor(6, 3))


def _places(*shape: int, below: int) -> Array:
    return np.random.default_rng(shape).integers(0, below, shape).astype(np.int32)


_A = ArithmeticOperation
_SLICED = partial(mlc.SliceLayer, [0, 1, 0, 1, 0, 0], [2, 3, 2, 4, 1, 2], [1, 1, 1, 2, 1, 1])

CASES: list[Case] = [
    Case(
        "reshape to eight",
        partial(mlc.ReshapeLayer, [2, 1, 2, 1, 3, 1, 2, 1]),
        [(2, 12)],
        lambda p, x: x.reshape(2, 1, 2, 1, 3, 1, 2, 1),
    ),
    Case(
        "transpose six",
        partial(mlc.TransposeLayer, [0, 5, 1, 4, 2, 3]),
        [(2, 3, 2, 4, 1, 2)],
        lambda p, x: x.permute(0, 5, 1, 4, 2, 3),
    ),
    Case("slice six", _SLICED, [(2, 3, 2, 4, 1, 2)], lambda p, x: x[:, 1:, :, 1::2]),
    Case(
        "split five", partial(mlc.SplitLayer, split_count=2, dimension=3), [(2, 3, 2, 4, 2)], lambda p, x: x.split(2, 3)
    ),
    Case(
        "concatenate five",
        partial(mlc.ConcatenationLayer, 4),
        [(2, 3, 2, 1, 2), (2, 3, 2, 1, 3)],
        lambda p, x, y: torch.cat((x, y), 4),
    ),
    Case(
        "add, repeated",
        partial(mlc.ArithmeticLayer, _A.ADD),
        [(2, 3, 1, 4, 1, 2), (2, 1, 5, 1, 3, 2)],
        lambda p, x, y: x + y,
    ),
    Case(
        "multiply eight",
        partial(mlc.ArithmeticLayer, _A.MULTIPLY),
        [(2, 1, 2, 1, 2, 1, 2, 3), (2, 2, 1, 2, 1, 2, 1, 3)],
        lambda p, x, y: x * y,
    ),
    Case(
        "compare",
        partial(mlc.ComparisonLayer, ComparisonOperation.LESS),
        [(2, 3, 1, 2, 2), (2, 1, 2, 1, 2)],
        lambda p, x, y: x < y,
    ),
    Case(
        "select",
        mlc.SelectionLayer,
        [numbers(2, 1, 2, 1, 3) > 0, (2, 3, 1, 2, 3), (2, 3, 2, 2, 1)],
        lambda p, c, x, y: torch.where(c, x, y),
    ),
    Case(
        "reduce two of six",
        partial(mlc.ReductionLayer, ReductionType.MEAN, dimensions=[2, 4]),
        [(2, 3, 2, 4, 3, 2)],
        lambda p, x: x.mean((2, 4), keepdim=True),
    ),
    Case(
        "largest of five",
        partial(mlc.ReductionLayer, ReductionType.MAX, 3),
        [(2, 3, 2, 4, 3)],
        lambda p, x: x.amax(3, keepdim=True),
    ),
    Case(
        "index in five",
        partial(mlc.ReductionLayer, ReductionType.ARG_MAX, 4),
        [(2, 3, 2, 1, 3)],
        lambda p, x: x.argmax(4, keepdim=True).double(),
    ),
    Case(
        "softmax of five",
        partial(mlc.SoftmaxLayer, SoftmaxOperation.SOFTMAX, 2),
        [(2, 3, 4, 2, 3)],
        lambda p, x: x.softmax(2),
    ),
    Case(
        "matmul of five",
        partial(mlc.MatMulLayer, MatMulDescriptor(transposes_y=True)),
        [(2, 1, 3, 2, 4), (2, 2, 1, 5, 4)],
        lambda p, x, y: x @ y.mT,
    ),
    Case("dense on five", _dense, [(2, 2, 1, 2, 3)], lambda p, x: x @ p["weights"].T + p["biases"]),
    Case(
        "batch normalization of volumes",
        _batch_norm,
        [(2, 3, 2, 3, 2)],
        _batch_normalized,
        training=True,
        batches=False,
    ),
    Case(
        "instance normalization of volumes",
        partial(mlc.InstanceNormalizationLayer, 3),
        [(2, 3, 2, 3, 2)],
        lambda p, x: torch.nn.functional.instance_norm(x),
    ),
    Case(
        "group normalization of volumes",
        partial(mlc.GroupNormalizationLayer, 4, 2),
        [(2, 4, 2, 3, 2)],
        lambda p, x: torch.nn.functional.group_norm(x, 2),
    ),
    Case(
        "layer normalization of five",
        partial(mlc.LayerNormalizationLayer, [2, 3, 2]),
        [(2, 4, 2, 3, 2)],
        lambda p, x: torch.nn.functional.layer_norm(x, (2, 3, 2)),
    ),
    Case(
        "embedding of four",
        _embedding,
        [_places(2, 3, 1, 2, below=6)],
        lambda p, i: torch.nn.functional.embedding(i.long(), p["weights"]),
    ),
    Case(
        "gather in five",
        partial(mlc.GatherLayer, 3),
        [(2, 3, 2, 4, 2), _places(2, 3, 2, 2, 2, below=4)],
        lambda p, x, i: torch.gather(x, 3, i.long()),
    ),
    Case(
        "scatter in five",
        partial(mlc.ScatterLayer, 3, ReductionType.SUM),
        [(2, 3, 2, 2, 2), _places(2, 3, 2, 2, 2, below=4), (2, 3, 2, 4, 2)],
        lambda p, x, i, b: torch.scatter_add(b, 3, i.long(), x),
    ),
    Case(
        "pad volumes",
        partial(mlc.PaddingLayer, PaddingType.REFLECT, [1, 0, 1, 1]),
        [(2, 2, 2, 3, 3)],
        lambda p, x: torch.nn.functional.pad(x.flatten(0, 1), (1, 1, 1, 0), mode="reflect").unflatten(0, (2, 2)),
    ),
    Case(
        "squared error of five",
        partial(mlc.LossLayer, LossDescriptor(LossType.MEAN_SQUARED_ERROR, ReductionType.MEAN)),
        [(2, 3, 2, 1, 2)],
        lambda p, x, t: torch.nn.functional.mse_loss(x, t).reshape(1),
        labels=[(2, 3, 2, 1, 2)],
        batches=False,
    ),
    Case("dropout of six", partial(mlc.DropoutLayer, 0.5, 3), [(2, 3, 1, 2, 2, 2)]),
]

REFUSALS: list[Refusal] = [
    Refusal("nine axes", lambda: mlc.TensorDescriptor([1] * 9), "9 axes in"),
    Refusal("embedding of eight", _embedding, "the result would have one axis more", [np.ones([1] * 8, np.int32)]),
]
