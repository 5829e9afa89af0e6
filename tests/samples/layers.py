"""Layers: once with every argument, and once with only the needed ones where some may be left out."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlcompute as mlc
from tests.samples.sample import BARE_LAYERS, LAYERS, Sample, Slot, constant, sample_of


def slots(**tensors: mlc.Tensor | None) -> dict[str, Any]:
    """`beta=t` -> beta: t, beta_parameter: its parameter; None for both where there is no tensor."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        values[name] = tensor
        values[f"{name}_parameter"] = None if tensor is None else Slot(tensor)
    return values


def slot_lists(**lists: list[mlc.Tensor] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, tensors in lists.items():
        values[name] = tensors
        values[f"{name}_parameters"] = None if tensors is None else [Slot(tensor) for tensor in tensors]
    return values


@sample_of(mlc.ActivationLayer, LAYERS)
def activation_layer() -> Sample:
    d = mlc.ActivationDescriptor(mlc.ActivationType.LINEAR, 2.0, 3.0)
    return Sample(mlc.ActivationLayer(descriptor=d), {"descriptor": d}, [(2, 3)])


@sample_of(mlc.ArithmeticLayer, LAYERS)
def arithmetic_layer() -> Sample:
    operation = mlc.ArithmeticOperation.DIVIDE_NO_NAN
    return Sample(mlc.ArithmeticLayer(operation=operation), {"operation": operation}, [(2, 3), (2, 3)])


@sample_of(mlc.BatchNormalizationLayer, LAYERS)
def batch_normalization_layer() -> Sample:
    m, v, b, g = (constant(1, 3, 1, 1) for _ in range(4))
    made = mlc.BatchNormalizationLayer(
        feature_channel_count=3, mean=m, variance=v, beta=b, gamma=g, variance_epsilon=0.01, momentum=0.75
    )
    values = {"feature_channel_count": 3, "mean": m, "variance": v, "variance_epsilon": 0.01, "momentum": 0.75}
    return Sample(made, values | slots(beta=b, gamma=g), [(2, 3, 4, 5)])


@sample_of(mlc.BatchNormalizationLayer, BARE_LAYERS)
def batch_normalization_layer_bare() -> Sample:
    m, v = constant(3), constant(3)
    values = {"feature_channel_count": 3, "mean": m, "variance": v, "variance_epsilon": 1e-5, "momentum": 0.99}
    return Sample(mlc.BatchNormalizationLayer(3, m, v), values | slots(beta=None, gamma=None))


@sample_of(mlc.ComparisonLayer, LAYERS)
def comparison_layer() -> Sample:
    operation = mlc.ComparisonOperation.LESS_OR_EQUAL
    return Sample(mlc.ComparisonLayer(operation=operation), {"operation": operation}, [(2, 3), (2, 3)])


@sample_of(mlc.ConcatenationLayer, LAYERS)
def concatenation_layer() -> Sample:
    return Sample(mlc.ConcatenationLayer(dimension=2), {"dimension": 2}, [(2, 3, 4), (2, 3, 1)])


@sample_of(mlc.ConcatenationLayer, BARE_LAYERS)
def concatenation_layer_bare() -> Sample:
    return Sample(mlc.ConcatenationLayer(), {"dimension": 1})


@sample_of(mlc.ConvolutionLayer, LAYERS)
def convolution_layer() -> Sample:
    d = mlc.ConvolutionDescriptor((3, 2), 4, 6, group_count=2)
    w, b = constant(1, 12, 3, 2), constant(1, 6, 1, 1)
    made = mlc.ConvolutionLayer(weights=w, biases=b, descriptor=d)
    return Sample(made, {"descriptor": d} | slots(weights=w, biases=b), [(2, 4, 5, 5)])


@sample_of(mlc.ConvolutionLayer, BARE_LAYERS)
def convolution_layer_bare() -> Sample:
    d, w = mlc.ConvolutionDescriptor(), constant(1)
    return Sample(mlc.ConvolutionLayer(w, None, d), {"descriptor": d} | slots(weights=w, biases=None))


@sample_of(mlc.DropoutLayer, LAYERS)
def dropout_layer() -> Sample:
    return Sample(mlc.DropoutLayer(rate=0.25, seed=42), {"rate": 0.25, "seed": 42}, [(2, 3)])


@sample_of(mlc.EmbeddingLayer, LAYERS)
def embedding_layer() -> Sample:
    d, w = mlc.EmbeddingDescriptor(7, 3), constant(7, 3)
    made = mlc.EmbeddingLayer(descriptor=d, weights=w)
    return Sample(made, {"descriptor": d} | slots(weights=w), [np.zeros((2, 4), np.int32)])


@sample_of(mlc.FullyConnectedLayer, LAYERS)
def fully_connected_layer() -> Sample:
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=5)
    w, b = constant(5, 3), constant(5)
    made = mlc.FullyConnectedLayer(weights=w, biases=b, descriptor=d)
    return Sample(made, {"descriptor": d} | slots(weights=w, biases=b), [(2, 3)])


@sample_of(mlc.FullyConnectedLayer, BARE_LAYERS)
def fully_connected_layer_bare() -> Sample:
    d, w = mlc.ConvolutionDescriptor(), constant(1, 1)
    return Sample(mlc.FullyConnectedLayer(w, None, d), {"descriptor": d} | slots(weights=w, biases=None))


@sample_of(mlc.GatherLayer, LAYERS)
def gather_layer() -> Sample:
    return Sample(mlc.GatherLayer(dimension=1), {"dimension": 1}, [(2, 3), np.zeros((2, 3), np.int32)])


@sample_of(mlc.GramMatrixLayer, LAYERS)
def gram_matrix_layer() -> Sample:
    return Sample(mlc.GramMatrixLayer(scale=0.25), {"scale": 0.25}, [(2, 3, 4, 5)])


@sample_of(mlc.GroupNormalizationLayer, LAYERS)
def group_normalization_layer() -> Sample:
    b, g = constant(4), constant(1, 4, 1, 1)
    made = mlc.GroupNormalizationLayer(feature_channel_count=4, group_count=2, beta=b, gamma=g, variance_epsilon=0.01)
    values = {"feature_channel_count": 4, "group_count": 2, "variance_epsilon": 0.01}
    return Sample(made, values | slots(beta=b, gamma=g), [(2, 4, 3)])


@sample_of(mlc.GroupNormalizationLayer, BARE_LAYERS)
def group_normalization_layer_bare() -> Sample:
    values = {"feature_channel_count": 4, "group_count": 4, "variance_epsilon": 1e-5}
    return Sample(mlc.GroupNormalizationLayer(4, 4), values | slots(beta=None, gamma=None))


@sample_of(mlc.InstanceNormalizationLayer, LAYERS)
def instance_normalization_layer() -> Sample:
    m, v, b, g = (constant(1, 3, 1, 1) for _ in range(4))
    made = mlc.InstanceNormalizationLayer(
        feature_channel_count=3, mean=m, variance=v, beta=b, gamma=g, variance_epsilon=0.01, momentum=0.5
    )
    values = {"feature_channel_count": 3, "mean": m, "variance": v, "variance_epsilon": 0.01, "momentum": 0.5}
    return Sample(made, values | slots(beta=b, gamma=g), [(2, 3, 4, 5)])


@sample_of(mlc.InstanceNormalizationLayer, BARE_LAYERS)
def instance_normalization_layer_bare() -> Sample:
    values = {"feature_channel_count": 3, "mean": None, "variance": None, "variance_epsilon": 1e-5, "momentum": 0.99}
    return Sample(mlc.InstanceNormalizationLayer(3), values | slots(beta=None, gamma=None))


@sample_of(mlc.LSTMLayer, LAYERS)
def lstm_layer() -> Sample:
    d = mlc.LSTMDescriptor(3, 2)
    tanh = mlc.ActivationDescriptor(mlc.ActivationType.TANH)
    gates = [mlc.ActivationDescriptor(mlc.ActivationType.HARD_SIGMOID) for _ in range(2)]
    gates += [tanh, mlc.ActivationDescriptor(mlc.ActivationType.SIGMOID)]
    out = mlc.ActivationDescriptor(mlc.ActivationType.RELU)
    w, u = [constant(2, 3) for _ in range(4)], [constant(2, 2) for _ in range(4)]
    p, b = [constant(2, 2) for _ in range(4)], [constant(2) for _ in range(4)]
    made = mlc.LSTMLayer(
        descriptor=d,
        input_weights=w,
        hidden_weights=u,
        peephole_weights=p,
        biases=b,
        gate_activations=gates,
        output_result_activation=out,
    )
    values = {"descriptor": d, "gate_activations": gates, "output_result_activation": out}
    lists = slot_lists(input_weights=w, hidden_weights=u, peephole_weights=p, biases=b)
    return Sample(made, values | lists, [(2, 4, 3)])


@sample_of(mlc.LSTMLayer, BARE_LAYERS)
def lstm_layer_bare() -> Sample:
    d = mlc.LSTMDescriptor(3, 2)
    sigmoid, tanh = mlc.ActivationType.SIGMOID, mlc.ActivationType.TANH
    w, u = [constant(2, 3) for _ in range(4)], [constant(2, 2) for _ in range(4)]
    values = {
        "descriptor": d,
        "gate_activations": [mlc.ActivationDescriptor(kind) for kind in (sigmoid, sigmoid, tanh, sigmoid)],
        "output_result_activation": mlc.ActivationDescriptor(tanh),
    }
    lists = slot_lists(input_weights=w, hidden_weights=u, peephole_weights=None, biases=None)
    return Sample(mlc.LSTMLayer(d, w, u), values | lists)


@sample_of(mlc.LayerNormalizationLayer, LAYERS)
def layer_normalization_layer() -> Sample:
    b, g = constant(4, 5), constant(20)
    made = mlc.LayerNormalizationLayer(normalized_shape=(4, 5), beta=b, gamma=g, variance_epsilon=0.01)
    values = {"normalized_shape": [4, 5], "variance_epsilon": 0.01}
    return Sample(made, values | slots(beta=b, gamma=g), [(2, 3, 4, 5)])


@sample_of(mlc.LayerNormalizationLayer, BARE_LAYERS)
def layer_normalization_layer_bare() -> Sample:
    values = {"normalized_shape": [5], "variance_epsilon": 1e-5}
    return Sample(mlc.LayerNormalizationLayer([5]), values | slots(beta=None, gamma=None))


@sample_of(mlc.LossLayer, LAYERS)
def loss_layer() -> Sample:
    d, w = mlc.LossDescriptor(mlc.LossType.HUBER, mlc.ReductionType.MEAN, delta=2.0), constant(2, 3)
    return Sample(mlc.LossLayer(descriptor=d, weights=w), {"descriptor": d, "weights": w}, [(2, 3)], [(2, 3)])


@sample_of(mlc.LossLayer, BARE_LAYERS)
def loss_layer_bare() -> Sample:
    d = mlc.LossDescriptor(mlc.LossType.HINGE, mlc.ReductionType.SUM)
    return Sample(mlc.LossLayer(d), {"descriptor": d, "weights": None})


@sample_of(mlc.MatMulLayer, LAYERS)
def matmul_layer() -> Sample:
    d = mlc.MatMulDescriptor(0.5, transposes_y=True)
    return Sample(mlc.MatMulLayer(descriptor=d), {"descriptor": d}, [(2, 3), (4, 3)])


@sample_of(mlc.MultiheadAttentionLayer, LAYERS)
def multihead_attention_layer() -> Sample:
    d = mlc.MultiheadAttentionDescriptor(4, 2, 6, 8, has_attention_biases=True)
    w = [constant(6, 4), constant(6, 4), constant(8, 4), constant(4, 8)]
    b = [constant(6), constant(6), constant(8), constant(4)]
    a = [constant(6), constant(8)]
    made = mlc.MultiheadAttentionLayer(descriptor=d, weights=w, biases=b, attention_biases=a)
    values = {"descriptor": d, "attention_biases": a} | slot_lists(weights=w, biases=b)
    return Sample(made, values, [(2, 3, 4), (2, 5, 4), (2, 5, 4)])


@sample_of(mlc.MultiheadAttentionLayer, BARE_LAYERS)
def multihead_attention_layer_bare() -> Sample:
    d = mlc.MultiheadAttentionDescriptor(4, 2, has_biases=False)
    w = [constant(4, 4) for _ in range(4)]
    values = {"descriptor": d, "attention_biases": None} | slot_lists(weights=w, biases=None)
    return Sample(mlc.MultiheadAttentionLayer(d, w), values)


@sample_of(mlc.PaddingLayer, LAYERS)
def padding_layer() -> Sample:
    made = mlc.PaddingLayer.constant_padding(padding=[1, 2, 3, 4], constant_value=7)
    values = {
        "padding_type": mlc.PaddingType.CONSTANT,
        "padding_top": 1,
        "padding_bottom": 2,
        "padding_left": 3,
        "padding_right": 4,
        "constant_value": 7.0,
    }
    return Sample(made, values, [(2, 3, 4, 5)])


@sample_of(mlc.PoolingLayer, LAYERS)
def pooling_layer() -> Sample:
    d = mlc.PoolingDescriptor(mlc.PoolingType.AVERAGE, (3, 2), (2, 1))
    return Sample(mlc.PoolingLayer(descriptor=d), {"descriptor": d}, [(2, 3, 4, 5)])


@sample_of(mlc.ReductionLayer, LAYERS)
def reduction_layer() -> Sample:
    kind = mlc.ReductionType.MEAN
    made = mlc.ReductionLayer(reduction_type=kind, dimensions=[1, 2])
    return Sample(made, {"reduction_type": kind, "dimension": 1, "dimensions": [1, 2]}, [(2, 3, 4)])


@sample_of(mlc.ReductionLayer, BARE_LAYERS)
def reduction_layer_bare() -> Sample:
    kind = mlc.ReductionType.ARG_MAX
    made = mlc.ReductionLayer(reduction_type=kind, dimension=2)
    return Sample(made, {"reduction_type": kind, "dimension": 2, "dimensions": [2]})


@sample_of(mlc.ReshapeLayer, LAYERS)
def reshape_layer() -> Sample:
    return Sample(mlc.ReshapeLayer(shape=(2, -1)), {"shape": [2, -1]}, [(2, 3, 4)])


@sample_of(mlc.ScatterLayer, LAYERS)
def scatter_layer() -> Sample:
    made = mlc.ScatterLayer(dimension=1, reduction_type=mlc.ReductionType.SUM)
    values = {"dimension": 1, "reduction_type": mlc.ReductionType.SUM}
    return Sample(made, values, [(2, 3), np.zeros((2, 3), np.int32), (2, 5)])


@sample_of(mlc.SelectionLayer, LAYERS)
def selection_layer() -> Sample:
    return Sample(mlc.SelectionLayer(), {}, [np.zeros((2, 3), bool), (2, 3), (2, 3)])


@sample_of(mlc.SliceLayer, LAYERS)
def slice_layer() -> Sample:
    made = mlc.SliceLayer(start=(0, 1), end=(2, 5), stride=(1, 2))
    return Sample(made, {"start": [0, 1], "end": [2, 5], "stride": [1, 2]}, [(2, 6)])


@sample_of(mlc.SliceLayer, BARE_LAYERS)
def slice_layer_bare() -> Sample:
    return Sample(mlc.SliceLayer([0, 1], [2, 5]), {"start": [0, 1], "end": [2, 5], "stride": [1, 1]})


@sample_of(mlc.SoftmaxLayer, LAYERS)
def softmax_layer() -> Sample:
    operation = mlc.SoftmaxOperation.LOG_SOFTMAX
    made = mlc.SoftmaxLayer(operation=operation, dimension=2)
    return Sample(made, {"operation": operation, "dimension": 2}, [(2, 3, 4)])


@sample_of(mlc.SoftmaxLayer, BARE_LAYERS)
def softmax_layer_bare() -> Sample:
    operation = mlc.SoftmaxOperation.SOFTMAX
    return Sample(mlc.SoftmaxLayer(operation=operation), {"operation": operation, "dimension": 1})


@sample_of(mlc.SplitLayer, LAYERS)
def split_layer() -> Sample:
    made = mlc.SplitLayer(split_section_lengths=(1, 3), dimension=1)
    return Sample(made, {"dimension": 1, "split_count": 2, "split_section_lengths": [1, 3]}, [(2, 4)])


@sample_of(mlc.SplitLayer, BARE_LAYERS)
def split_layer_bare() -> Sample:
    made = mlc.SplitLayer(split_count=3, dimension=0)
    return Sample(made, {"dimension": 0, "split_count": 3, "split_section_lengths": None})


@sample_of(mlc.TransposeLayer, LAYERS)
def transpose_layer() -> Sample:
    return Sample(mlc.TransposeLayer(dimensions=(0, 2, 1)), {"dimensions": [0, 2, 1]}, [(2, 3, 4)])


@sample_of(mlc.UpsampleLayer, LAYERS)
def upsample_layer() -> Sample:
    made = mlc.UpsampleLayer(shape=(8, 6), sample_mode=mlc.SampleMode.LINEAR, aligns_corners=True)
    values = {"shape": [8, 6], "sample_mode": mlc.SampleMode.LINEAR, "aligns_corners": True}
    return Sample(made, values, [(2, 3, 4, 3)])


@sample_of(mlc.UpsampleLayer, BARE_LAYERS)
def upsample_layer_bare() -> Sample:
    values = {"shape": [6], "sample_mode": mlc.SampleMode.NEAREST, "aligns_corners": False}
    return Sample(mlc.UpsampleLayer(shape=[6]), values)


@sample_of(mlc.YOLOLossLayer, LAYERS)
def yolo_loss_layer() -> Sample:
    d = mlc.YOLOLossDescriptor([1.0, 2.0, 3.0, 4.0], 2)
    d.scale_class_loss = 3.0
    made = mlc.YOLOLossLayer(descriptor=d)
    return Sample(made, {"yolo_loss_descriptor": d}, [(2, 12, 3, 3)], [(2, 12, 3, 3)])
