"""Every enumeration and option set of ML Compute, with its values and its debug texts."""

from __future__ import annotations

import enum

import numpy as np


class _Described(enum.IntEnum):
    """An enumeration whose values have the readable names ML Compute prints for them."""

    @property
    def debug_description(self) -> str | None:
        """The name ML Compute prints for this value; None for a sentinel."""
        return _DEBUG_TEXTS[type(self).__name__].get(self.name)


class DataType(enum.IntEnum):
    """Element type of a tensor."""

    INVALID = 0
    FLOAT32 = 1
    FLOAT16 = 3
    BOOLEAN = 4
    INT64 = 5
    INT32 = 7
    INT8 = 8
    UINT8 = 9
    COUNT = 10
    # Not in ML Compute: numbered behind its sentinel, so that its own values stay as they are.
    BFLOAT16 = 11

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype with the same memory layout; BFLOAT16's is `ml_dtypes.bfloat16`."""
        if self is DataType.BFLOAT16 and self not in _NUMPY:
            from mlcompute.ops.bfloat16 import bfloat16  # most programs need no extension types

            _NUMPY[self] = bfloat16()
        return _NUMPY[self]

    @property
    def is_floating(self) -> bool:
        """True for FLOAT32, FLOAT16 and BFLOAT16."""
        return self in (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)


class RandomInitializerType(enum.IntEnum):
    """Distribution random tensor data is drawn from."""

    INVALID = 0
    UNIFORM = 1
    GLOROT_UNIFORM = 2
    XAVIER = 3
    COUNT = 4


class DeviceType(enum.IntEnum):
    """Where a graph may run."""

    CPU = 0
    GPU = 1
    ANY = 2
    ANE = 3
    COUNT = 4


class GraphCompilationOptions(enum.IntFlag):
    """Bit set for `compile`."""

    NONE = 0x0
    DEBUG_LAYERS = 0x1
    DISABLE_LAYER_FUSION = 0x2
    LINK_GRAPHS = 0x4
    COMPUTE_ALL_GRADIENTS = 0x8


class ExecutionOptions(enum.IntFlag):
    """Bit set for the `execute` family."""

    NONE = 0x0
    SKIP_WRITING_INPUT_DATA_TO_DEVICE = 0x1
    SYNCHRONOUS = 0x2
    PROFILING = 0x4
    FORWARD_FOR_INFERENCE = 0x8
    PER_LAYER_PROFILING = 0x10


class ArithmeticOperation(_Described):
    """Elementwise operations of `ArithmeticLayer`."""

    ADD = 0
    SUBTRACT = 1
    MULTIPLY = 2
    DIVIDE = 3
    FLOOR = 4
    ROUND = 5
    CEIL = 6
    SQRT = 7
    RSQRT = 8
    SIN = 9
    COS = 10
    TAN = 11
    ASIN = 12
    ACOS = 13
    ATAN = 14
    SINH = 15
    COSH = 16
    TANH = 17
    ASINH = 18
    ACOSH = 19
    ATANH = 20
    POW = 21
    EXP = 22
    EXP2 = 23
    LOG = 24
    LOG2 = 25
    MULTIPLY_NO_NAN = 26
    DIVIDE_NO_NAN = 27
    MIN = 28
    MAX = 29
    COUNT = 30
    FLOOR_DIVIDE = 31
    REMAINDER = 32


class LossType(_Described):
    """Losses of `LossLayer`."""

    MEAN_ABSOLUTE_ERROR = 0
    MEAN_SQUARED_ERROR = 1
    SOFTMAX_CROSS_ENTROPY = 2
    SIGMOID_CROSS_ENTROPY = 3
    CATEGORICAL_CROSS_ENTROPY = 4
    HINGE = 5
    HUBER = 6
    COSINE_DISTANCE = 7
    LOG = 8
    COUNT = 9


class ActivationType(_Described):
    """Functions of `ActivationLayer`."""

    NONE = 0
    RELU = 1
    LINEAR = 2
    SIGMOID = 3
    HARD_SIGMOID = 4
    TANH = 5
    ABSOLUTE = 6
    SOFT_PLUS = 7
    SOFT_SIGN = 8
    ELU = 9
    RELUN = 10
    LOG_SIGMOID = 11
    SELU = 12
    CELU = 13
    HARD_SHRINK = 14
    SOFT_SHRINK = 15
    TANH_SHRINK = 16
    THRESHOLD = 17
    GELU = 18
    HARD_SWISH = 19
    CLAMP = 20
    COUNT = 21
    # Not in ML Compute: numbered behind its sentinel, so that its own values stay as they are.
    SILU = 22
    MISH = 23


class ConvolutionType(_Described):
    """How a convolution joins channels."""

    STANDARD = 0
    TRANSPOSED = 1
    DEPTHWISE = 2


class PaddingPolicy(_Described):
    """How a convolution or pooling treats the border."""

    SAME = 0
    VALID = 1
    USE_PADDING_SIZE = 2


class PaddingType(_Described):
    """What `PaddingLayer` puts around its source."""

    ZERO = 0
    REFLECT = 1
    SYMMETRIC = 2
    CONSTANT = 3


class PoolingType(_Described):
    """How `PoolingLayer` joins a window."""

    MAX = 1
    AVERAGE = 2
    L2_NORM = 3
    COUNT = 4


class ReductionType(_Described):
    """How `ReductionLayer`, losses and scatter join elements."""

    NONE = 0
    SUM = 1
    MEAN = 2
    MAX = 3
    MIN = 4
    ARG_MAX = 5
    ARG_MIN = 6
    L1_NORM = 7
    ANY = 8
    ALL = 9
    COUNT = 10


class RegularizationType(enum.IntEnum):
    """Penalty an optimizer adds to the gradient."""

    NONE = 0
    L1 = 1
    L2 = 2


class SampleMode(_Described):
    """How `UpsampleLayer` fills the new pixels."""

    NEAREST = 0
    LINEAR = 1


class SoftmaxOperation(_Described):
    """Which of the two `SoftmaxLayer` computes."""

    SOFTMAX = 0
    LOG_SOFTMAX = 1


class LSTMResultMode(_Described):
    """What an LSTM layer answers."""

    OUTPUT = 0
    OUTPUT_AND_STATES = 1


class ComparisonOperation(_Described):
    """Elementwise operations of `ComparisonLayer`."""

    EQUAL = 0
    NOT_EQUAL = 1
    LESS = 2
    GREATER = 3
    LESS_OR_EQUAL = 4
    GREATER_OR_EQUAL = 5
    LOGICAL_AND = 6
    LOGICAL_OR = 7
    LOGICAL_NOT = 8
    LOGICAL_NAND = 9
    LOGICAL_NOR = 10
    LOGICAL_XOR = 11
    COUNT = 12


class GradientClippingType(_Described):
    """How an optimizer limits gradients."""

    BY_VALUE = 0
    BY_NORM = 1
    BY_GLOBAL_NORM = 2


_NUMPY: dict[DataType, np.dtype[np.generic]] = {
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.BOOLEAN: np.dtype(np.bool_),
    DataType.INT64: np.dtype(np.int64),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT8: np.dtype(np.int8),
    DataType.UINT8: np.dtype(np.uint8),
}

_DEBUG_TEXTS: dict[str, dict[str, str]] = {
    "ArithmeticOperation": {
        "ADD": "Add",
        "SUBTRACT": "Subtract",
        "MULTIPLY": "Multiply",
        "DIVIDE": "Divide",
        "FLOOR": "Floor",
        "ROUND": "Round",
        "CEIL": "Ceil",
        "SQRT": "Sqrt",
        "RSQRT": "Rsqrt",
        "SIN": "Sin",
        "COS": "Cos",
        "TAN": "Tan",
        "ASIN": "Asin",
        "ACOS": "Acos",
        "ATAN": "Atan",
        "SINH": "Sinh",
        "COSH": "Cosh",
        "TANH": "Tanh",
        "ASINH": "Asinh",
        "ACOSH": "Acosh",
        "ATANH": "Atanh",
        "POW": "Pow",
        "EXP": "Exp",
        "EXP2": "Exp2",
        "LOG": "Log",
        "LOG2": "Log2",
        "MULTIPLY_NO_NAN": "MultiplyNoNaN",
        "DIVIDE_NO_NAN": "DivideNoNaN",
        "MIN": "ElementwiseMin",
        "MAX": "ElementwiseMax",
        "FLOOR_DIVIDE": "FloorDivide",
        "REMAINDER": "Remainder",
    },
    "LossType": {
        "MEAN_ABSOLUTE_ERROR": "Absolute Error",
        "MEAN_SQUARED_ERROR": "Mean Squared Error",
        "SOFTMAX_CROSS_ENTROPY": "Softmax Cross Entropy",
        "SIGMOID_CROSS_ENTROPY": "Sigmoid Cross Entropy",
        "CATEGORICAL_CROSS_ENTROPY": "Categorical Cross Entropy",
        "HINGE": "Hinge",
        "HUBER": "Huber",
        "COSINE_DISTANCE": "Cosine Distance",
        "LOG": "Log",
    },
    "ActivationType": {
        "NONE": "None",
        "RELU": "ReLU",
        "LINEAR": "Linear",
        "SIGMOID": "Sigmoid",
        "HARD_SIGMOID": "Hard Sigmoid",
        "TANH": "Tanh",
        "ABSOLUTE": "Absolute",
        "SOFT_PLUS": "Soft Plus",
        "SOFT_SIGN": "Soft Sign",
        "ELU": "ELU",
        "RELUN": "ReLUN",
        "LOG_SIGMOID": "Log Sigmoid",
        "SELU": "SELU",
        "CELU": "CELU",
        "HARD_SHRINK": "Hard Shrink",
        "SOFT_SHRINK": "Soft Shrink",
        "TANH_SHRINK": "Tanh Shrink",
        "THRESHOLD": "Threshold",
        "GELU": "GELU",
        "HARD_SWISH": "HardSwish",
        "CLAMP": "Clamp",
        "SILU": "SiLU",
        "MISH": "Mish",
    },
    "ConvolutionType": {
        "STANDARD": "Standard",
        "TRANSPOSED": "Transposed",
        "DEPTHWISE": "Depthwise",
    },
    "PaddingPolicy": {
        "SAME": "Same",
        "VALID": "Valid",
        "USE_PADDING_SIZE": "Use Padding Size",
    },
    "PaddingType": {
        "ZERO": "Zero",
        "REFLECT": "Reflect",
        "SYMMETRIC": "Symmetric",
        "CONSTANT": "Constant",
    },
    "PoolingType": {
        "MAX": "Max",
        "AVERAGE": "Average",
        "L2_NORM": "L2 Norm",
    },
    "ReductionType": {
        "NONE": "None",
        "SUM": "Sum",
        "MEAN": "Mean",
        "MAX": "Max",
        "MIN": "Min",
        "ARG_MAX": "Arg Max",
        "ARG_MIN": "Arg Min",
        "L1_NORM": "L1Norm",
        "ANY": "Any",
        "ALL": "All",
    },
    "SampleMode": {
        "NEAREST": "Nearest",
        "LINEAR": "Linear",
    },
    "SoftmaxOperation": {
        "SOFTMAX": "Softmax",
        "LOG_SOFTMAX": "Log Softmax",
    },
    "LSTMResultMode": {
        "OUTPUT": "Output",
        "OUTPUT_AND_STATES": "Output and States",
    },
    "ComparisonOperation": {
        "EQUAL": "Equal",
        "NOT_EQUAL": "Not Equal",
        "LESS": "Less",
        "GREATER": "Greater",
        "LESS_OR_EQUAL": "Less or Equal",
        "GREATER_OR_EQUAL": "Greater or Equal",
        "LOGICAL_AND": "Logical AND",
        "LOGICAL_OR": "Logical OR",
        "LOGICAL_NOT": "Logical NOT",
        "LOGICAL_NAND": "Logical NAND",
        "LOGICAL_NOR": "Logical NOR",
        "LOGICAL_XOR": "Logical XOR",
    },
    "GradientClippingType": {
        "BY_VALUE": "By Value",
        "BY_NORM": "By Norm",
        "BY_GLOBAL_NORM": "By Global Norm",
    },
}


def debug_description(value: object) -> str | None:
    """The name ML Compute prints for an enumeration value; None for anything it has no name for."""
    return value.debug_description if isinstance(value, _Described) else None
