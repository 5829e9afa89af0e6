"""What no descriptor accepts, and the words it says so with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

A, C, P, L, E = (
    mlc.ActivationDescriptor,
    mlc.ConvolutionDescriptor,
    mlc.PoolingDescriptor,
    mlc.LossDescriptor,
    mlc.EmbeddingDescriptor,
)
S, M, Y, D, O = (
    mlc.LSTMDescriptor,
    mlc.MultiheadAttentionDescriptor,
    mlc.YOLOLossDescriptor,
    mlc.TensorDescriptor,
    mlc.OptimizerDescriptor,
)
T, MAX, MSE, MEAN = mlc.ActivationType, mlc.PoolingType.MAX, mlc.LossType.MEAN_SQUARED_ERROR, mlc.ReductionType.MEAN
SIZED = mlc.PaddingPolicy.USE_PADDING_SIZE


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: A("relu"), TypeError, "must be a ActivationType"),
        (lambda: A(T.COUNT), mlc.DataError, "activation_type is"),
        (lambda: A(99), mlc.DataError, "activation_type is 99"),
        (lambda: A(mlc.LossType.HINGE), mlc.DataError, "activation_type is"),
        (lambda: A(T.RELU, "1"), TypeError, "a must be a number"),
        (lambda: A(T.CELU, 0), mlc.DataError, "CELU divides by a"),
        (lambda: A(T.CLAMP, 2, 1), mlc.DataError, "least value a above"),
        (lambda: A(T.RELU, exact=True), mlc.DataError, "exact is for GELU"),
        (lambda: mlc.ActivationLayer.soft_plus(0), mlc.DataError, "beta is 0"),
        (lambda: C(0), mlc.ShapeError, "kernel_sizes is 0"),
        (lambda: C((1, 2, 3)), mlc.ShapeError, "kernel_sizes has 3 entries"),
        (lambda: C(1.5), TypeError, "kernel_sizes must be a whole number"),
        (lambda: C(strides=(1, 0)), mlc.ShapeError, "strides is 0"),
        (lambda: C(dilation_rates=0), mlc.ShapeError, "dilation_rates is 0"),
        (lambda: C(input_feature_channel_count=0), mlc.ShapeError, "input_feature_channel_count is 0"),
        (lambda: C(1, 4, 6, group_count=4), mlc.ShapeError, "cannot be divided among 4 groups"),
        (lambda: C(1, 4, 4, mlc.ConvolutionType.DEPTHWISE, 2), mlc.ShapeError, "has 4 groups, not 2"),
        (lambda: C(padding_policy=SIZED), mlc.ShapeError, "needs padding_sizes"),
        (lambda: C(padding_policy=SIZED, padding_sizes=-1), mlc.ShapeError, "padding_sizes is -1"),
        (lambda: C(kernel_width=2), mlc.ShapeError, "twice or in part"),
        (lambda: C(3, kernel_width=2, kernel_height=2), mlc.ShapeError, "twice or in part"),
        (lambda: C.depthwise_convolution(1, 2, 0), mlc.ShapeError, "channel_multiplier is 0"),
        (lambda: P(mlc.PoolingType.COUNT, 2), mlc.DataError, "pooling_type is"),
        (lambda: P(MAX, 0), mlc.ShapeError, "kernel_sizes is 0"),
        (lambda: P.max_pooling(2, 1, SIZED), mlc.ShapeError, "needs padding_sizes"),
        (lambda: L(mlc.LossType.COUNT, MEAN), mlc.DataError, "loss_type is"),
        (lambda: L(MSE, mlc.ReductionType.MAX), mlc.DataError, "cannot be reduced with MAX"),
        (lambda: L(MSE, MEAN, math.nan), mlc.DataError, "weight is nan"),
        (lambda: L(MSE, MEAN, label_smoothing=1.5), mlc.DataError, "label_smoothing is 1.5"),
        (lambda: L(MSE, MEAN, class_count=0), mlc.ShapeError, "class_count is 0"),
        (lambda: L(MSE, MEAN, epsilon=-1), mlc.DataError, "epsilon is -1"),
        (lambda: L(MSE, MEAN, delta=0), mlc.DataError, "delta is 0"),
        (lambda: E(0, 3), mlc.ShapeError, "embedding_count is 0"),
        (lambda: E(7, 0), mlc.ShapeError, "embedding_dimension is 0"),
        (lambda: E(7, 3, 7), mlc.DataError, "padding_index is 7, the table has 7 rows"),
        (lambda: E(7, 3, maximum_norm=-1), mlc.DataError, "maximum_norm is -1"),
        (lambda: E(7, 3, p_norm=0), mlc.DataError, "p_norm is 0"),
        (lambda: S(0, 1), mlc.ShapeError, "input_size is 0"),
        (lambda: S(1, 0), mlc.ShapeError, "hidden_size is 0"),
        (lambda: S(1, 1, 0), mlc.ShapeError, "layer_count is 0"),
        (lambda: S(1, 1, dropout=1), mlc.DataError, "dropout is 1"),
        (lambda: S(1, 1, batch_first=False), mlc.ShapeError, "batch_first=False is not supported"),
        (lambda: S(1, 1, result_mode=2), mlc.DataError, "result_mode is 2"),
        (lambda: M(0, 1), mlc.ShapeError, "model_dimension is 0"),
        (lambda: M(8, 3), mlc.ShapeError, "3 heads cannot share evenly"),
        (lambda: M(8, 2, value_dimension=3), mlc.ShapeError, "value_dimension is 3"),
        (lambda: M(8, 2, dropout=-0.5), mlc.DataError, "dropout is -0.5"),
        (lambda: mlc.MatMulDescriptor("1"), TypeError, "alpha must be a number"),
        (lambda: Y([1.0, 2.0, 3.0], 1), mlc.ShapeError, "anchor_boxes has 3 numbers, 1 anchors need 2"),
        (lambda: Y([1.0, 0.0], 1), mlc.DataError, "must be a positive number"),
        (lambda: Y([1.0, 1.0], 0), mlc.ShapeError, "anchor_box_count is 0"),
        (lambda: D(()), mlc.ShapeError, "0 axes"),
        (lambda: D([1] * 9), mlc.ShapeError, "9 axes"),
        (lambda: D((2, 0)), mlc.ShapeError, "at least 1"),
        (lambda: D((2, -1)), mlc.ShapeError, "at least 1"),
        (lambda: D((2, 1.5)), mlc.ShapeError, "whole numbers"),
        (lambda: D(7), mlc.ShapeError, "shape is 7"),
        (lambda: D((2**31, 2**31, 2)), mlc.ShapeError, "more elements than any memory"),
        (lambda: D(), mlc.ShapeError, "no shape was given"),
        (lambda: D((1,), width=2), mlc.ShapeError, "not both"),
        (lambda: D((1,), data_type=mlc.DataType.INVALID), mlc.DataError, "is not a data type"),
        (lambda: D((1,), data_type=mlc.DataType.COUNT), mlc.DataError, "is not a data type"),
        (lambda: D((1,), data_type=6), mlc.DataError, "6 is not a data type"),
        (lambda: D((1,), data_type="int64"), mlc.DataError, "'int64' is not a data type"),
        (lambda: D((2, 3), sequence_lengths=[3, 1]), mlc.ShapeError, "three axes"),
        (lambda: D((2, 3, 1), sequence_lengths=[2, 1]), mlc.ShapeError, "do not fit 3 steps"),
        (lambda: D((2, 3, 1), sequence_lengths=[3, 0]), mlc.ShapeError, "do not fit 3 steps"),
        (lambda: D((2, 3, 1), sequence_lengths=[3, 1.5]), mlc.ShapeError, "sequence_lengths must be whole numbers"),
        (lambda: D((2, 3, 1), sequence_lengths=[1, 3], sorted_sequences=True), mlc.ShapeError, "descending"),
        (lambda: D((2, 3, 1), sorted_sequences=True), mlc.ShapeError, "without sequence_lengths"),
        (
            lambda: D.convolution_weights(input_feature_channel_count=-2, output_feature_channel_count=-2),
            mlc.ShapeError,
            "at least 1",
        ),
        (lambda: D.convolution_biases(feature_channel_count=0), mlc.ShapeError, "at least 1"),
        (lambda: O(learning_rate=math.nan), mlc.DataError, "learning_rate is nan"),
        (lambda: O(learning_rate="fast"), TypeError, "learning_rate"),
        (lambda: O(learning_rate=1, gradient_clip_min=2), mlc.DataError, "gradient_clip_min 2 is greater"),
        (lambda: O(learning_rate=1, maximum_clipping_norm=0), mlc.DataError, "maximum_clipping_norm is 0"),
        (lambda: O(learning_rate=1, custom_global_norm=-1), mlc.DataError, "custom_global_norm is -1"),
        (lambda: O(learning_rate=1, regularization_type=7), mlc.DataError, "regularization_type is 7"),
    ],
)
def test_refusals(build: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build()


@pytest.mark.parametrize(
    ("given", "name"),
    [("int64", "INT64"), ("bool", "BOOLEAN"), (np.float16, "FLOAT16"), (np.dtype("uint8"), "UINT8"), (6, "FLOAT32")],
    ids=str,
)
def test_the_data_type_that_was_meant_is_named(given: Any, name: str) -> None:
    with pytest.raises(mlc.DataError) as caught:
        mlc.Tensor(shape=(2,), data_type=given)
    assert caught.value.fix == f"say mlc.DataType.{name}"
