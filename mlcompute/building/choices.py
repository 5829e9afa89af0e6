"""String choices of builders and trainers, as types for type checkers and editors. Tests compare them with tables."""

from __future__ import annotations

from typing import Literal

#: An activation without constants, or with the usual ones.
ActivationName = Literal[
    "absolute", "celu", "elu", "gelu", "hard_shrink", "hard_sigmoid", "hard_swish", "hard_tanh", "leaky_relu",
    "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_plus", "soft_shrink", "soft_sign", "tanh",
    "tanh_shrink",
]  # fmt: skip
#: Also those that take constants.
AnyActivationName = Literal[ActivationName, "clamp", "linear", "relun", "threshold"]
#: Of one tensor or two.
ArithmeticName = Literal[
    "add", "subtract", "multiply", "divide", "floor", "round", "ceil", "sqrt", "rsqrt", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "pow", "exp", "exp2", "log", "log2",
    "multiply_no_nan", "divide_no_nan", "min", "max", "floor_divide", "remainder",
]  # fmt: skip
ComparisonName = Literal[
    "equal", "not_equal", "less", "greater", "less_or_equal", "greater_or_equal", "logical_and", "logical_or",
    "logical_not", "logical_nand", "logical_nor", "logical_xor",
]  # fmt: skip
#: Zeros around images.
PaddingName = Literal["same", "valid"]
PoolingName = Literal["max", "average", "l2"]
#: What pixels beyond the border are.
BorderName = Literal["zero", "constant", "reflect", "symmetric"]
#: How new pixels are filled.
SampleName = Literal["nearest", "linear"]
LossName = Literal[
    "softmax_cross_entropy", "sigmoid_cross_entropy", "categorical_cross_entropy", "mean_squared_error", "mse",
    "mean_absolute_error", "mae", "huber", "hinge", "log", "cosine_distance",
]  # fmt: skip
LossReduction = Literal["mean", "sum", "none"]
NormalizationName = Literal["batch", "layer", "instance", "group", "rms"]
RecurrentActivation = Literal["tanh", "relu"]
ReductionName = Literal["sum", "mean", "max", "min", "argmax", "argmin", "l1_norm", "any", "all"]
OptimizerName = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamw", "lamb", "lion", "muon", "nadam", "radam", "rmsprop", "sgd"
]
