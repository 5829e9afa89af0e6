"""Descriptors, every argument different from its default."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import mlcompute as mlc
from tests.samples.sample import DESCRIPTORS, Sample, sample_of


@sample_of(mlc.ActivationDescriptor, DESCRIPTORS)
def activation_descriptor() -> Sample:
    kind = mlc.ActivationType.THRESHOLD
    made = mlc.ActivationDescriptor(activation_type=kind, a=1, b=np.float32(0.5), c=-3)
    return Sample(made, {"activation_type": kind, "a": 1.0, "b": 0.5, "c": -3.0})


@sample_of(mlc.ConvolutionDescriptor, DESCRIPTORS)
def convolution_descriptor() -> Sample:
    made = mlc.ConvolutionDescriptor(
        convolution_type=mlc.ConvolutionType.TRANSPOSED,
        kernel_sizes=(3, 5),
        input_feature_channel_count=4,
        output_feature_channel_count=6,
        group_count=2,
        strides=(2, 1),
        dilation_rates=(1, 3),
        padding_policy=mlc.PaddingPolicy.USE_PADDING_SIZE,
        padding_sizes=(1, 2),
    )
    values = {
        "convolution_type": mlc.ConvolutionType.TRANSPOSED,
        "input_feature_channel_count": 4,
        "output_feature_channel_count": 6,
        "group_count": 2,
        "is_convolution_transpose": True,
        "uses_depthwise_convolution": False,
    }
    return Sample(made, values | _windows((3, 5), (2, 1), (1, 3), (1, 2)))


def _windows(
    kernel: tuple[int, int], strides: tuple[int, int], dilations: tuple[int, int], padding: tuple[int, int]
) -> dict[str, Any]:
    """Answers of the properties convolution and pooling share; pairs are (y, x)."""
    return {
        "kernel_sizes": kernel,
        "kernel_height": kernel[0],
        "kernel_width": kernel[1],
        "strides": strides,
        "stride_in_y": strides[0],
        "stride_in_x": strides[1],
        "dilation_rates": dilations,
        "dilation_rate_in_y": dilations[0],
        "dilation_rate_in_x": dilations[1],
        "padding_policy": mlc.PaddingPolicy.USE_PADDING_SIZE,
        "padding_size_in_y": padding[0],
        "padding_size_in_x": padding[1],
    }


@sample_of(mlc.EmbeddingDescriptor, DESCRIPTORS)
def embedding_descriptor() -> Sample:
    values = {
        "embedding_count": 7,
        "embedding_dimension": 3,
        "padding_index": 2,
        "maximum_norm": 1.0,
        "p_norm": math.inf,
        "scales_gradient_by_frequency": True,
    }
    return Sample(mlc.EmbeddingDescriptor(**values), values)


@sample_of(mlc.LSTMDescriptor, DESCRIPTORS)
def lstm_descriptor() -> Sample:
    values = {
        "input_size": 3,
        "hidden_size": 5,
        "layer_count": 2,
        "uses_biases": False,
        "batch_first": True,
        "is_bidirectional": True,
        "returns_sequences": False,
        "dropout": 0.25,
        "result_mode": mlc.LSTMResultMode.OUTPUT_AND_STATES,
    }
    return Sample(mlc.LSTMDescriptor(**values), values)


@sample_of(mlc.LossDescriptor, DESCRIPTORS)
def loss_descriptor() -> Sample:
    values = {
        "loss_type": mlc.LossType.SOFTMAX_CROSS_ENTROPY,
        "reduction_type": mlc.ReductionType.SUM,
        "weight": 2.0,
        "label_smoothing": 0.125,
        "class_count": 10,
        "epsilon": 1e-3,
        "delta": 4.0,
    }
    return Sample(mlc.LossDescriptor(**values), values)


@sample_of(mlc.MatMulDescriptor, DESCRIPTORS)
def matmul_descriptor() -> Sample:
    values = {"alpha": 0.5, "transposes_x": True, "transposes_y": True}
    return Sample(mlc.MatMulDescriptor(**values), values)


@sample_of(mlc.MultiheadAttentionDescriptor, DESCRIPTORS)
def multihead_attention_descriptor() -> Sample:
    values = {
        "model_dimension": 8,
        "head_count": 2,
        "key_dimension": 6,
        "value_dimension": 4,
        "dropout": 0.25,
        "has_biases": False,
        "has_attention_biases": True,
        "adds_zero_attention": True,
    }
    return Sample(mlc.MultiheadAttentionDescriptor(**values), values)


@sample_of(mlc.PoolingDescriptor, DESCRIPTORS)
def pooling_descriptor() -> Sample:
    made = mlc.PoolingDescriptor(
        pooling_type=mlc.PoolingType.AVERAGE,
        kernel_sizes=(3, 5),
        strides=(2, 1),
        dilation_rates=(1, 3),
        padding_policy=mlc.PaddingPolicy.USE_PADDING_SIZE,
        padding_sizes=(1, 2),
        count_includes_padding=True,
    )
    values = {"pooling_type": mlc.PoolingType.AVERAGE, "count_includes_padding": True}
    return Sample(made, values | _windows((3, 5), (2, 1), (1, 3), (1, 2)))


@sample_of(mlc.YOLOLossDescriptor, DESCRIPTORS)
def yolo_loss_descriptor() -> Sample:
    made = mlc.YOLOLossDescriptor(anchor_boxes=[1.0, 2.0, 3.0, 4.0], anchor_box_count=2)
    values: dict[str, Any] = {
        "anchor_box_count": 2,
        "anchor_boxes": np.float32([1, 2, 3, 4]).tobytes(),
        "should_rescore": True,
        "scale_spatial_position_loss": 10.0,
        "scale_spatial_size_loss": 10.0,
        "scale_no_object_confidence_loss": 5.0,
        "scale_object_confidence_loss": 100.0,
        "scale_class_loss": 2.0,
        "minimum_iou_for_object_presence": 0.7,
        "maximum_iou_for_object_absence": 0.3,
    }
    return Sample(made, values)


@sample_of(mlc.TensorDescriptor, DESCRIPTORS)
def tensor_descriptor() -> Sample:
    made = mlc.TensorDescriptor(
        (2, 3, 4), data_type=mlc.DataType.FLOAT16, sequence_lengths=[3, 1], sorted_sequences=True
    )
    values = {
        "data_type": mlc.DataType.FLOAT16,
        "dimension_count": 3,
        "shape": (2, 3, 4),
        "stride": (24, 8, 2),
        "tensor_allocation_size_in_bytes": 48,
        "sequence_lengths": (3, 1),
        "sorted_sequences": True,
        "batch_size_per_sequence_step": (2, 1, 1),
        "max_tensor_dimensions": 8,
    }
    return Sample(made, values)


@sample_of(mlc.OptimizerDescriptor, DESCRIPTORS)
def optimizer_descriptor() -> Sample:
    values = optimizer_values()
    return Sample(mlc.OptimizerDescriptor(**values), values)


def optimizer_values() -> dict[str, Any]:
    return {
        "learning_rate": 0.5,
        "gradient_rescale": 0.25,
        "applies_gradient_clipping": True,
        "gradient_clipping_type": mlc.GradientClippingType.BY_GLOBAL_NORM,
        "gradient_clip_max": 3.0,
        "gradient_clip_min": -2.0,
        "maximum_clipping_norm": 4.0,
        "custom_global_norm": 5.0,
        "regularization_type": mlc.RegularizationType.L2,
        "regularization_scale": 0.125,
        "average_decay": 0.5,
        "lookahead_steps": 3,
        "lookahead_scale": 0.75,
    }
