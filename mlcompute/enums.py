"""Every enumeration and option set of ML Compute, with its values and its debug texts."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.foreign_names import respelled


class _Spelled(enum.EnumMeta):
    """Enumerations whose AttributeError says the right name: SAME for PaddingPolicy.same."""

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there

        def __getattr__(cls, name: str) -> object:
            members = vars(cls).get("_member_map_", {})
            if name in members:  # Python 3.10 finds members in this way
                return members[name]
            sized = "USE_PADDING_SIZE and padding_sizes=(y, x)" if (cls.__name__, name) == _SIZED else ""
            found = sized or respelled(name, members)
            raise AttributeError(f"{cls.__name__} has no value {name!r}{found and f': use {found}'}")


#: Swift's PaddingPolicy.sized(y:x:).
_SIZED = "PaddingPolicy", "sized"


class _Described(enum.IntEnum, metaclass=_Spelled):
    """An enumeration whose values have the readable names ML Compute prints for them."""

    @property
    def debug_description(self) -> str | None:
        """The name ML Compute prints for this value; None for a sentinel."""
        if self.name in ("INVALID", "COUNT"):
            return None
        own = _DEBUG_TEXTS.get(type(self).__name__, {})
        return own.get(self.name, self.name.replace("_", " ").title())


class DataType(enum.IntEnum, metaclass=_Spelled):
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


class RandomInitializerType(enum.IntEnum, metaclass=_Spelled):
    """Distribution random tensor data is drawn from."""

    INVALID = 0
    UNIFORM = 1
    GLOROT_UNIFORM = 2
    XAVIER = 3
    COUNT = 4


class DeviceType(enum.IntEnum, metaclass=_Spelled):
    """Where a graph may run."""

    CPU = 0
    GPU = 1
    ANY = 2
    ANE = 3
    COUNT = 4


class GraphCompilationOptions(enum.IntFlag, metaclass=_Spelled):
    """Bit set for `compile`.

    DEFER_SINGLE_PASSES (not in ML Compute): passes run one by one are built when the first of them is called, not by
    `compile`, which takes less time then.
    """

    NONE = 0x0
    DEBUG_LAYERS = 0x1
    DISABLE_LAYER_FUSION = 0x2
    LINK_GRAPHS = 0x4
    COMPUTE_ALL_GRADIENTS = 0x8
    DEFER_SINGLE_PASSES = 0x10000


class ExecutionOptions(enum.IntFlag, metaclass=_Spelled):
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
    """How a convolution combines channels."""

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
    """How `PoolingLayer` reduces a window to one number."""

    MAX = 1
    AVERAGE = 2
    L2_NORM = 3
    COUNT = 4


class ReductionType(_Described):
    """How `ReductionLayer`, losses and scatter combine elements."""

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


class RegularizationType(enum.IntEnum, metaclass=_Spelled):
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
    """What an LSTM layer returns."""

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
    kind: np.dtype(kind.name.lower())
    for kind in (DataType.FLOAT32, DataType.FLOAT16, DataType.INT64, DataType.INT32, DataType.INT8, DataType.UINT8)
} | {DataType.BOOLEAN: np.dtype(np.bool_)}

#: Names that ML Compute prints otherwise than as "Hard Sigmoid" for HARD_SIGMOID.
_DEBUG_TEXTS: dict[str, dict[str, str]] = {
    "ArithmeticOperation": {
        "MULTIPLY_NO_NAN": "MultiplyNoNaN",
        "DIVIDE_NO_NAN": "DivideNoNaN",
        "MIN": "ElementwiseMin",
        "MAX": "ElementwiseMax",
        "FLOOR_DIVIDE": "FloorDivide",
    },
    "LossType": {"MEAN_ABSOLUTE_ERROR": "Absolute Error"},
    "ActivationType": {
        **{name: name for name in ("ELU", "SELU", "CELU", "GELU")},
        "RELU": "ReLU",
        "RELUN": "ReLUN",
        "HARD_SWISH": "HardSwish",
        "SILU": "SiLU",
    },
    "ReductionType": {"L1_NORM": "L1Norm"},
    "LSTMResultMode": {"OUTPUT_AND_STATES": "Output and States"},
    "ComparisonOperation": {
        "LESS_OR_EQUAL": "Less or Equal",
        "GREATER_OR_EQUAL": "Greater or Equal",
        **{f"LOGICAL_{name}": f"Logical {name}" for name in ("AND", "OR", "NOT", "NAND", "NOR", "XOR")},
    },
}


def debug_description(value: object) -> str | None:
    """The name ML Compute prints for an enumeration value; None for anything it has no name for."""
    return value.debug_description if isinstance(value, _Described) else None
