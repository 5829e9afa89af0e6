"""Descriptors: what they answer, their defaults, copies, equality, texts, and what they refuse."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.inventory import CLASSES
from tests.samples import DESCRIPTORS, check

each_descriptor = pytest.mark.parametrize("name", DESCRIPTORS)

SAME, VALID, SIZED = mlc.PaddingPolicy.SAME, mlc.PaddingPolicy.VALID, mlc.PaddingPolicy.USE_PADDING_SIZE
#: The least each descriptor can be made with, and what the properties left out then are.
LEAST: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ActivationDescriptor": (
        lambda: mlc.ActivationDescriptor(mlc.ActivationType.SIGMOID),
        {"a": 1.0, "b": 1.0, "c": 1.0},
    ),
    "ConvolutionDescriptor": (
        lambda: mlc.ConvolutionDescriptor(),
        {
            "convolution_type": mlc.ConvolutionType.STANDARD,
            "kernel_sizes": (1, 1),
            "input_feature_channel_count": 1,
            "output_feature_channel_count": 1,
            "group_count": 1,
            "strides": (1, 1),
            "dilation_rates": (1, 1),
            "padding_policy": SAME,
            "padding_size_in_x": 0,
            "padding_size_in_y": 0,
            "is_convolution_transpose": False,
            "uses_depthwise_convolution": False,
        },
    ),
    "EmbeddingDescriptor": (
        lambda: mlc.EmbeddingDescriptor(embedding_count=7, embedding_dimension=3),
        {"padding_index": None, "maximum_norm": None, "p_norm": 2.0, "scales_gradient_by_frequency": False},
    ),
    "LSTMDescriptor": (
        lambda: mlc.LSTMDescriptor(3, 5),
        {
            "layer_count": 1,
            "uses_biases": True,
            "batch_first": True,
            "is_bidirectional": False,
            "returns_sequences": True,
            "dropout": 0.0,
            "result_mode": mlc.LSTMResultMode.OUTPUT,
        },
    ),
    "LossDescriptor": (
        lambda: mlc.LossDescriptor(loss_type=mlc.LossType.LOG, reduction_type=mlc.ReductionType.NONE),
        {"weight": 1.0, "label_smoothing": 0.0, "class_count": 1, "epsilon": 1e-7, "delta": 1.0},
    ),
    "MatMulDescriptor": (lambda: mlc.MatMulDescriptor(), {"alpha": 1.0, "transposes_x": False, "transposes_y": False}),
    "MultiheadAttentionDescriptor": (
        lambda: mlc.MultiheadAttentionDescriptor(8, 2),
        {
            "key_dimension": 8,
            "value_dimension": 8,
            "dropout": 0.0,
            "has_biases": True,
            "has_attention_biases": False,
            "adds_zero_attention": False,
        },
    ),
    "PoolingDescriptor": (
        lambda: mlc.PoolingDescriptor(mlc.PoolingType.MAX, 3),
        {
            "kernel_sizes": (3, 3),
            "strides": (1, 1),
            "dilation_rates": (1, 1),
            "padding_policy": SAME,
            "padding_size_in_x": 0,
            "padding_size_in_y": 0,
            "count_includes_padding": False,
        },
    ),
    "YOLOLossDescriptor": (lambda: mlc.YOLOLossDescriptor([1.0, 1.0], 1), {"should_rescore": True}),
    "TensorDescriptor": (
        lambda: mlc.TensorDescriptor((2, 3)),
        {
            "data_type": mlc.DataType.FLOAT32,
            "sequence_lengths": None,
            "sorted_sequences": False,
            "batch_size_per_sequence_step": None,
        },
    ),
    "OptimizerDescriptor": (
        lambda: mlc.OptimizerDescriptor(learning_rate=0.1),
        {
            "gradient_rescale": 1.0,
            "applies_gradient_clipping": False,
            "gradient_clipping_type": mlc.GradientClippingType.BY_VALUE,
            "gradient_clip_max": 1.0,
            "gradient_clip_min": -1.0,
            "maximum_clipping_norm": 1.0,
            "custom_global_norm": 0.0,
            "regularization_type": mlc.RegularizationType.NONE,
            "regularization_scale": 0.0,
            "average_decay": 0.0,
            "lookahead_steps": 0,
            "lookahead_scale": 0.5,
        },
    ),
}

#: Properties that ML Compute does not have.
OURS = {"OptimizerDescriptor": {"average_decay", "lookahead_steps", "lookahead_scale"}}


# The same for all ---------------------------------------------------------------------------------------------------


@each_descriptor
def test_properties_give_back_what_was_given(name: str) -> None:
    sample = DESCRIPTORS[name]()
    listed = {member.python for member in CLASSES[name].members if member.kind == "property"}
    assert set(sample.values) == listed | OURS.get(name, set())
    for attribute, expected in sample.values.items():
        check(getattr(sample.made, attribute), expected, f"{name}.{attribute}")


@each_descriptor
def test_defaults(name: str) -> None:
    build, defaults = LEAST[name]
    made = build()
    for attribute, expected in defaults.items():
        check(getattr(made, attribute), expected, f"{name}.{attribute}")


@each_descriptor
def test_read_only(name: str) -> None:
    made = DESCRIPTORS[name]().made
    for member in CLASSES[name].members:
        if member.kind != "property":
            continue
        value = getattr(made, member.python)
        if member.setter:
            setattr(made, member.python, value)
        else:
            with pytest.raises(AttributeError):
                setattr(made, member.python, value)


@each_descriptor
def test_copies_are_equal_and_independent(name: str) -> None:
    made, other = DESCRIPTORS[name]().made, LEAST[name][0]()
    copies = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    if any(member.python == "copy" for member in CLASSES[name].members):
        copies.append(made.copy())
    for copied in copies:
        assert copied is not made
        assert type(copied) is type(made)
        assert copied == made
        assert copied != other
        assert made != name
        assert repr(copied) == repr(made)


@each_descriptor
def test_equal_ones_hash_alike(name: str) -> None:
    made, again = DESCRIPTORS[name]().made, DESCRIPTORS[name]().made
    assert made == again
    if name == "YOLOLossDescriptor":
        with pytest.raises(TypeError, match="unhashable"):
            hash(made)  # it can be changed
    else:
        assert hash(made) == hash(again)


@each_descriptor
def test_the_text_tells_them_apart(name: str) -> None:
    made, other = repr(DESCRIPTORS[name]().made), repr(LEAST[name][0]())
    assert made != other
    assert "0x" not in made
    if name != "TensorDescriptor":
        assert made.startswith(f"{name}(")


#: The descriptors of the samples, made with NumPy numbers, plain numbers for enumerations and numbers for truth.
ODD: dict[str, Callable[[], Any]] = {
    "MatMulDescriptor": lambda: mlc.MatMulDescriptor(np.float32(0.5), 1, np.True_),
    "EmbeddingDescriptor": lambda: mlc.EmbeddingDescriptor(
        np.int64(7), np.int32(3), np.int8(2), np.float32(1), math.inf, 1
    ),
    "LSTMDescriptor": lambda: mlc.LSTMDescriptor(
        np.int64(3), np.int64(5), np.int64(2), 0, 1, 1, 0, np.float32(0.25), 1
    ),
    "LossDescriptor": lambda: mlc.LossDescriptor(2, 1, 2, np.float32(0.125), np.int64(10), np.float64(1e-3), 4),
    "MultiheadAttentionDescriptor": lambda: mlc.MultiheadAttentionDescriptor(
        np.int64(8), np.int64(2), np.int64(6), np.int64(4), np.float32(0.25), 0, 1, 1
    ),
    "OptimizerDescriptor": lambda: mlc.OptimizerDescriptor(
        learning_rate=np.float32(0.5),
        gradient_rescale=np.float64(0.25),
        applies_gradient_clipping=1,
        gradient_clipping_type=2,
        gradient_clip_max=3,
        gradient_clip_min=-2,
        maximum_clipping_norm=4,
        custom_global_norm=5,
        regularization_type=2,
        regularization_scale=np.float16(0.125),
        average_decay=np.float32(0.5),
        lookahead_steps=np.int64(3),
        lookahead_scale=np.float64(0.75),
    ),
    "TensorDescriptor": lambda: mlc.TensorDescriptor(
        np.array([2, 3, 4]), data_type=3, sequence_lengths=np.array([3, 1]), sorted_sequences=1
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_numbers_are_kept_as_plain_python(name: str) -> None:
    made = ODD[name]()
    for attribute, expected in DESCRIPTORS[name]().values.items():
        check(getattr(made, attribute), expected, f"{name}.{attribute}")


# Activations --------------------------------------------------------------------------------------------------------


SPELLED = {(kind.debug_description or "").replace(" ", "").lower(): kind for kind in mlc.ActivationType}
IMPLIED = [member for member in CLASSES["ActivationLayer"].members if member.implied]


@pytest.mark.parametrize("member", IMPLIED, ids=lambda member: member.selector)
def test_what_the_short_spellings_of_activations_imply(member: Any) -> None:
    descriptor = getattr(mlc.ActivationLayer, member.python)().descriptor
    assert descriptor.activation_type is SPELLED[member.implied["activation_type"].lower()]
    assert descriptor.a == member.implied["a"]
    if member.implied["b"] is not None:
        assert descriptor.b == member.implied["b"]


T = mlc.ActivationType


@pytest.mark.parametrize(
    ("layer", "kind", "a", "b"),
    [
        (mlc.ActivationLayer.leaky_relu(negative_slope=0.25), T.RELU, 0.25, 1.0),
        (mlc.ActivationLayer.linear(scale=2, bias=3), T.LINEAR, 2.0, 3.0),
        (mlc.ActivationLayer.sigmoid(), T.SIGMOID, 1.0, 1.0),
        (mlc.ActivationLayer.absolute(), T.ABSOLUTE, 1.0, 1.0),
        (mlc.ActivationLayer.soft_plus(beta=4), T.SOFT_PLUS, 0.25, 4.0),
        (mlc.ActivationLayer.soft_sign(), T.SOFT_SIGN, 1.0, 1.0),
        (mlc.ActivationLayer.elu(a=2), T.ELU, 2.0, 1.0),
        (mlc.ActivationLayer.relun(a=0.5, b=3), T.RELUN, 0.5, 3.0),
        (mlc.ActivationLayer.log_sigmoid(), T.LOG_SIGMOID, 1.0, 1.0),
        (mlc.ActivationLayer.selu(), T.SELU, 1.0, 1.0),
        (mlc.ActivationLayer.celu(a=2), T.CELU, 2.0, 1.0),
        (mlc.ActivationLayer.hard_shrink(a=0.25), T.HARD_SHRINK, 0.25, 1.0),
        (mlc.ActivationLayer.soft_shrink(a=0.25), T.SOFT_SHRINK, 0.25, 1.0),
        (mlc.ActivationLayer.threshold(threshold=0.5, replacement=-1), T.THRESHOLD, 0.5, -1.0),
        (mlc.ActivationLayer.hard_swish(), T.HARD_SWISH, 1.0, 1.0),
        (mlc.ActivationLayer.clamp(min_value=-1, max_value=2), T.CLAMP, -1.0, 2.0),
    ],
)
def test_the_long_spellings_of_activations(layer: mlc.ActivationLayer, kind: T, a: float, b: float) -> None:
    d = layer.descriptor
    assert (d.activation_type, d.a, d.b, d.c) == (kind, a, b, 1.0)


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        (T.NONE, 1, 1),
        (T.RELU, 0, 1),
        (T.LINEAR, 1, 0),
        (T.HARD_SIGMOID, 0.2, 0.5),
        (T.HARD_SHRINK, 0.5, 1),
        (T.SOFT_SHRINK, 0.5, 1),
        (T.TANH, 1, 1),
    ],
)
def test_defaults_depend_on_the_type(kind: T, a: float, b: float) -> None:
    d = mlc.ActivationDescriptor(activation_type=kind)
    assert (d.a, d.b, d.c) == (a, b, 1)
    assert mlc.ActivationDescriptor(activation_type=kind, a=5).a == 5
    assert mlc.ActivationDescriptor(activation_type=kind, a=5).b == b
    assert mlc.ActivationDescriptor(activation_type=kind, a=5, b=6).b == 6


def test_the_exact_gelu_is_another_function() -> None:
    assert mlc.ActivationLayer.gelu(exact=True).descriptor.exact is True
    assert mlc.ActivationLayer.gelu().descriptor.exact is False
    assert mlc.ActivationLayer.gelu(exact=True).descriptor != mlc.ActivationLayer.gelu().descriptor


# Windows ------------------------------------------------------------------------------------------------------------


def test_the_kernel_by_width_and_height() -> None:
    d = mlc.ConvolutionDescriptor(
        kernel_width=5, kernel_height=3, input_feature_channel_count=4, output_feature_channel_count=8
    )
    assert d == mlc.ConvolutionDescriptor((3, 5), 4, 8)
    assert (d.kernel_width, d.kernel_height) == (5, 3)


@pytest.mark.parametrize("sizes", [2, [2], (2, 2), np.array([2, 2])])
def test_one_number_stands_for_both_axes(sizes: Any) -> None:
    d = mlc.ConvolutionDescriptor(
        kernel_sizes=sizes,
        input_feature_channel_count=1,
        output_feature_channel_count=1,
        strides=sizes,
        dilation_rates=sizes,
        padding_policy=SIZED,
        padding_sizes=sizes,
        group_count=1,
    )
    assert (d.kernel_sizes, d.strides, d.dilation_rates, d.padding_sizes) == ((2, 2),) * 4


def test_transposed_convolutions() -> None:
    short = mlc.ConvolutionDescriptor.convolution_transpose(
        kernel_width=2, kernel_height=3, input_feature_channel_count=4, output_feature_channel_count=6
    )
    assert short.is_convolution_transpose
    assert short.convolution_type is mlc.ConvolutionType.TRANSPOSED
    assert (short.kernel_sizes, short.group_count, short.padding_policy) == ((3, 2), 1, SAME)
    full = mlc.ConvolutionDescriptor.convolution_transpose(
        kernel_sizes=(3, 2),
        input_feature_channel_count=4,
        output_feature_channel_count=6,
        group_count=2,
        strides=(2, 3),
        dilation_rates=(1, 2),
        padding_policy=SIZED,
        padding_sizes=(1, 0),
    )
    assert (full.group_count, full.strides, full.dilation_rates, full.padding_sizes) == (2, (2, 3), (1, 2), (1, 0))
    assert not full.uses_depthwise_convolution


def test_depthwise_convolutions() -> None:
    short = mlc.ConvolutionDescriptor.depthwise_convolution(
        kernel_width=2, kernel_height=3, input_feature_channel_count=4, channel_multiplier=2
    )
    assert short.uses_depthwise_convolution
    assert (short.output_feature_channel_count, short.group_count) == (8, 4)
    full = mlc.ConvolutionDescriptor.depthwise_convolution(
        kernel_sizes=(3, 2),
        input_feature_channel_count=4,
        channel_multiplier=1,
        strides=(2, 1),
        dilation_rates=(1, 2),
        padding_policy=VALID,
        padding_sizes=None,
    )
    assert (full.strides, full.dilation_rates, full.padding_policy) == ((2, 1), (1, 2), VALID)
    assert full.convolution_type is mlc.ConvolutionType.DEPTHWISE
    assert mlc.ConvolutionDescriptor(1, 4, 8, mlc.ConvolutionType.DEPTHWISE).group_count == 4


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (mlc.PoolingDescriptor.max_pooling, mlc.PoolingType.MAX),
        (mlc.PoolingDescriptor.average_pooling, mlc.PoolingType.AVERAGE),
        (mlc.PoolingDescriptor.l2_norm_pooling, mlc.PoolingType.L2_NORM),
    ],
)
def test_spellings_of_pooling(factory: Callable[..., mlc.PoolingDescriptor], kind: mlc.PoolingType) -> None:
    more = {"count_includes_padding": True} if kind == mlc.PoolingType.AVERAGE else {}
    short = factory(kernel_sizes=(3, 2), strides=(2, 1), padding_policy=VALID, padding_sizes=None, **more)
    full = factory(
        kernel_sizes=(3, 2), strides=(2, 1), dilation_rates=(1, 2), padding_policy=SIZED, padding_sizes=(1, 0), **more
    )
    for d in (short, full):
        assert d.pooling_type is kind
        assert (d.kernel_sizes, d.strides) == ((3, 2), (2, 1))
        assert d.count_includes_padding is (kind == mlc.PoolingType.AVERAGE)
    assert (short.dilation_rates, short.padding_policy) == ((1, 1), VALID)
    assert (full.dilation_rates, full.padding_policy, full.padding_sizes) == ((1, 2), SIZED, (1, 0))


def test_square_pooling() -> None:
    d = mlc.PoolingDescriptor.pooling(pooling_type=mlc.PoolingType.AVERAGE, kernel_size=3, stride=2)
    assert d == mlc.PoolingDescriptor(mlc.PoolingType.AVERAGE, (3, 3), (2, 2), padding_policy=SAME)


# Losses -------------------------------------------------------------------------------------------------------------


MEAN = mlc.ReductionType.MEAN
LOSSES = {
    "softmax_cross_entropy": (mlc.LossType.SOFTMAX_CROSS_ENTROPY, {"label_smoothing": 0.25, "class_count": 3}),
    "categorical_cross_entropy": (mlc.LossType.CATEGORICAL_CROSS_ENTROPY, {"label_smoothing": 0.25, "class_count": 3}),
    "sigmoid_cross_entropy": (mlc.LossType.SIGMOID_CROSS_ENTROPY, {"label_smoothing": 0.25}),
    "log": (mlc.LossType.LOG, {"epsilon": 0.5}),
    "huber_loss": (mlc.LossType.HUBER, {"delta": 2.0}),
    "mean_absolute_error": (mlc.LossType.MEAN_ABSOLUTE_ERROR, {}),
    "mean_squared_error": (mlc.LossType.MEAN_SQUARED_ERROR, {}),
    "hinge_loss": (mlc.LossType.HINGE, {}),
    "cosine_distance": (mlc.LossType.COSINE_DISTANCE, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_spellings_of_losses(name: str) -> None:
    kind, settings = LOSSES[name]
    factory = getattr(mlc.LossLayer, name)
    layer = factory(reduction_type=MEAN, **settings, weight=2.0)
    assert layer.descriptor == mlc.LossDescriptor(kind, MEAN, 2.0, **settings)
    assert layer.weights is None
    weights = mlc.Tensor(shape=(4,), fill_with_data=1)
    weighted = factory(reduction_type=MEAN, **settings, weights=weights)
    assert weighted.weights is weights
    assert weighted.descriptor == mlc.LossDescriptor(kind, MEAN, **settings)
    assert factory(MEAN).descriptor == mlc.LossDescriptor(kind, MEAN)


# Tensors ------------------------------------------------------------------------------------------------------------


def test_image_descriptors() -> None:
    d = mlc.TensorDescriptor(width=5, height=6, feature_channel_count=7, batch_size=8)
    assert (d.shape, d.dimension_count) == ((8, 7, 6, 5), 4)
    half = mlc.TensorDescriptor(
        width=5, height=6, feature_channel_count=7, batch_size=8, data_type=mlc.DataType.FLOAT16
    )
    assert half.data_type is mlc.DataType.FLOAT16
    assert repr(half) == "float16[8, 7, 6, 5]"


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("FLOAT32", 4), ("FLOAT16", 2), ("BFLOAT16", 2), ("BOOLEAN", 1), ("INT64", 8), ("INT32", 4), ("INT8", 1),
        ("UINT8", 1),
    ],
)
def test_sizes_of_elements(kind: str, size: int) -> None:
    d = mlc.TensorDescriptor((2, 3, 4, 5), data_type=mlc.DataType[kind])
    assert d.tensor_allocation_size_in_bytes == 120 * size
    assert d.stride == (60 * size, 20 * size, 5 * size, size)
    assert d.element_count == 120
    assert d.stride == np.zeros(d.shape, d.data_type.numpy).strides


def test_sequence_descriptors() -> None:
    d = mlc.TensorDescriptor((3, 3, 2), sequence_lengths=[3, 2, 1], sorted_sequences=True)
    assert d.batch_size_per_sequence_step == (3, 2, 1)
    unsorted = mlc.TensorDescriptor((3, 4, 2), sequence_lengths=(1, 4, 2), data_type=mlc.DataType.FLOAT16)
    assert unsorted.batch_size_per_sequence_step == (3, 2, 1, 1)
    assert unsorted.sorted_sequences is False
    assert unsorted != mlc.TensorDescriptor((3, 4, 2), data_type=mlc.DataType.FLOAT16)


def test_weights_and_biases() -> None:
    w = mlc.TensorDescriptor.convolution_weights(
        width=3, height=2, input_feature_channel_count=4, output_feature_channel_count=5, data_type=mlc.DataType.FLOAT16
    )
    assert w == mlc.TensorDescriptor((1, 20, 2, 3), data_type=mlc.DataType.FLOAT16)
    ones = mlc.TensorDescriptor.convolution_weights(
        input_feature_channel_count=4, output_feature_channel_count=5, data_type=mlc.DataType.FLOAT32
    )
    assert ones.shape == (1, 20, 1, 1)
    b = mlc.TensorDescriptor.convolution_biases(feature_channel_count=5, data_type=mlc.DataType.FLOAT16)
    assert b == mlc.TensorDescriptor((1, 5, 1, 1), data_type=mlc.DataType.FLOAT16)


def test_no_more_than_eight_axes() -> None:
    assert mlc.TensorDescriptor.max_tensor_dimensions == 8
    assert mlc.TensorDescriptor(range(1, 9)).dimension_count == mlc.TensorDescriptor.max_tensor_dimensions
