"""Values, flags and debug texts of the enumerations."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

import mlcompute as mlc
from tests.inventory import ENUMS, Value

DESCRIBED = [kind for kind in ENUMS.values() if kind.debug_function]
TEXTS = [pytest.param(value, id=f"{value.owner}.{value.python}") for kind in DESCRIBED for value in kind.members]


def test_thirteen_enumerations_have_texts() -> None:
    assert len(DESCRIBED) == 13


@pytest.mark.parametrize("value", TEXTS)
def test_debug_text(value: Value) -> None:
    found = getattr(mlc, value.owner)[value.python]
    assert found.debug_description == value.text
    assert mlc.debug_description(found) == value.text
    assert (value.text is None) == value.sentinel


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (mlc.LossType.MEAN_ABSOLUTE_ERROR, "Absolute Error"),
        (mlc.ArithmeticOperation.MIN, "ElementwiseMin"),
        (mlc.ArithmeticOperation.MAX, "ElementwiseMax"),
        (mlc.ArithmeticOperation.MULTIPLY_NO_NAN, "MultiplyNoNaN"),
        (mlc.ActivationType.HARD_SWISH, "HardSwish"),
        (mlc.ActivationType.HARD_SIGMOID, "Hard Sigmoid"),
        (mlc.PoolingType.L2_NORM, "L2 Norm"),
        (mlc.ReductionType.L1_NORM, "L1Norm"),
        (mlc.PaddingPolicy.USE_PADDING_SIZE, "Use Padding Size"),
        (mlc.PaddingType.SYMMETRIC, "Symmetric"),
        (mlc.ConvolutionType.DEPTHWISE, "Depthwise"),
        (mlc.SoftmaxOperation.LOG_SOFTMAX, "Log Softmax"),
        (mlc.SampleMode.LINEAR, "Linear"),
        (mlc.LSTMResultMode.OUTPUT_AND_STATES, "Output and States"),
        (mlc.ComparisonOperation.LOGICAL_NAND, "Logical NAND"),
        (mlc.GradientClippingType.BY_GLOBAL_NORM, "By Global Norm"),
    ],
)
def test_texts_that_are_not_the_names(value: mlc.ActivationType, text: str) -> None:
    assert value.debug_description == text


NAMELESS = [None, 3, "Add", mlc.DataType.INT8, mlc.DeviceType.CPU, mlc.ExecutionOptions.NONE, mlc.RegularizationType.L1]


@pytest.mark.parametrize("value", NAMELESS)
def test_what_has_no_text(value: object) -> None:
    assert mlc.debug_description(value) is None


def test_values_are_plain_numbers_too() -> None:
    assert mlc.PoolingType.MAX == 1
    assert mlc.PoolingType(2) is mlc.PoolingType.AVERAGE
    assert [int(kind) for kind in mlc.DataType] == [0, 1, 3, 4, 5, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("gap", [2, 6, 12])
def test_gaps_are_no_data_types(gap: int) -> None:
    with pytest.raises(ValueError, match="is not a valid DataType"):
        mlc.DataType(gap)


def test_flags_combine() -> None:
    both = mlc.ExecutionOptions.SYNCHRONOUS | mlc.ExecutionOptions.PROFILING
    assert both == 0x6
    assert mlc.ExecutionOptions.PROFILING in both
    assert mlc.ExecutionOptions.PER_LAYER_PROFILING not in both
    assert mlc.GraphCompilationOptions(0xC) == (
        mlc.GraphCompilationOptions.LINK_GRAPHS | mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS
    )
    assert not mlc.GraphCompilationOptions.NONE


@pytest.mark.parametrize(
    ("kind", "dtype", "floating"),
    [
        (mlc.DataType.FLOAT32, np.float32, True),
        (mlc.DataType.FLOAT16, np.float16, True),
        (mlc.DataType.BFLOAT16, ml_dtypes.bfloat16, True),
        (mlc.DataType.BOOLEAN, np.bool_, False),
        (mlc.DataType.INT64, np.int64, False),
        (mlc.DataType.INT32, np.int32, False),
        (mlc.DataType.INT8, np.int8, False),
        (mlc.DataType.UINT8, np.uint8, False),
    ],
)
def test_data_types_and_numpy(kind: mlc.DataType, dtype: type, floating: bool) -> None:
    assert kind.numpy == np.dtype(dtype)
    assert kind.is_floating is floating


@pytest.mark.parametrize("kind", ENUMS.values(), ids=ENUMS)
def test_values_survive_pickling(kind: object) -> None:
    for value in kind.type:  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(value)) is value
