"""ML Compute's training graphs for Python.

Describe a network as a graph of layers, wrap it in a `TrainingGraph` or `InferenceGraph`, compile it for a `Device`,
then run forward, gradient and optimizer update in one call or one by one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlcompute import onnx
from mlcompute.building.expressions import concatenate, cross_entropy, maximum, minimum, stack, where
from mlcompute.device import Device
from mlcompute.enums import (
    ActivationType,
    ArithmeticOperation,
    ComparisonOperation,
    ConvolutionType,
    DataType,
    DeviceType,
    ExecutionOptions,
    GradientClippingType,
    GraphCompilationOptions,
    LossType,
    LSTMResultMode,
    PaddingPolicy,
    PaddingType,
    PoolingType,
    RandomInitializerType,
    ReductionType,
    RegularizationType,
    SampleMode,
    SoftmaxOperation,
    debug_description,
)
from mlcompute.errors import (
    CompileError,
    DataError,
    DeviceError,
    Error,
    ExecutionError,
    FileError,
    GraphError,
    ProcessError,
    ShapeError,
)
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.foreign_names import advice_for_attribute, answer_foreign_keywords
from mlcompute.graph import Graph
from mlcompute.layers.activation import ActivationDescriptor, ActivationLayer
from mlcompute.layers.arithmetic import ArithmeticLayer
from mlcompute.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from mlcompute.layers.cast import CastLayer
from mlcompute.layers.comparison import ComparisonLayer
from mlcompute.layers.concatenation import ConcatenationLayer
from mlcompute.layers.convolution import ConvolutionDescriptor, ConvolutionLayer
from mlcompute.layers.cosine_similarity import CosineSimilarityLayer
from mlcompute.layers.ctc_loss import CTCLossLayer
from mlcompute.layers.dropout import DropoutLayer
from mlcompute.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from mlcompute.layers.fully_connected import FullyConnectedLayer
from mlcompute.layers.gradient import GradientLayer
from mlcompute.layers.gram_matrix import GramMatrixLayer
from mlcompute.layers.gru import GRUDescriptor, GRULayer, RNNDescriptor, RNNLayer
from mlcompute.layers.indexing import GatherLayer, ScatterLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.layers.lstm import LSTMDescriptor, LSTMLayer
from mlcompute.layers.matmul import MatMulDescriptor, MatMulLayer
from mlcompute.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from mlcompute.layers.objective import ObjectiveLayer
from mlcompute.layers.ordering import CumulativeSumLayer, SortLayer, TopKLayer
from mlcompute.layers.padding import PaddingLayer
from mlcompute.layers.parameter import ParameterLayer
from mlcompute.layers.pixel_shuffle import PixelShuffleLayer, PixelUnshuffleLayer
from mlcompute.layers.pooling import PoolingDescriptor, PoolingLayer
from mlcompute.layers.prelu import PReLULayer
from mlcompute.layers.random import RandomNormalLayer, RandomUniformLayer
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.rotary import RotaryEmbeddingLayer
from mlcompute.layers.sample_normalization import (
    GroupNormalizationLayer,
    LayerNormalizationLayer,
    RMSNormalizationLayer,
)
from mlcompute.layers.selection import SelectionLayer
from mlcompute.layers.shaping import ReshapeLayer, SliceLayer, TransposeLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.layers.split import SplitLayer
from mlcompute.layers.stop_gradient import StopGradientLayer
from mlcompute.layers.upsample import UpsampleLayer
from mlcompute.layers.yolo_loss import YOLOLossDescriptor, YOLOLossLayer
from mlcompute.platform import Platform
from mlcompute.tensor import Tensor, TensorDescriptor, TensorOptimizerDeviceData, TensorParameter
from mlcompute.tensor_data import TensorData

if TYPE_CHECKING:
    from mlcompute import data, debug, initializers
    from mlcompute.debug.gradients import GradientReport, check_gradients
    from mlcompute.generation import NextToken, generate
    from mlcompute.group import Group
    from mlcompute.inference import InferenceGraph
    from mlcompute.optimizers import (
        AdadeltaOptimizer,
        AdafactorOptimizer,
        AdagradOptimizer,
        AdamOptimizer,
        AdamWOptimizer,
        LAMBOptimizer,
        LionOptimizer,
        MuonOptimizer,
        NAdamOptimizer,
        Optimizer,
        OptimizerDescriptor,
        ParameterGroup,
        RAdamOptimizer,
        RMSPropOptimizer,
        SGDOptimizer,
    )
    from mlcompute.optimizers.lbfgs import LBFGS
    from mlcompute.runs import Evaluation, Run
    from mlcompute.saving import Checkpoint, RestoreReport, load, restore, save
    from mlcompute.saving.custom import register
    from mlcompute.saving.state_dict import from_state_dict, to_state_dict
    from mlcompute.seeing.report import report
    from mlcompute.trainer import History, Trainer, callbacks, metrics, schedules
    from mlcompute.training import TrainingGraph

__version__ = "0.1.0"

__all__ = [
    "LBFGS", "ActivationDescriptor", "ActivationLayer", "ActivationType", "AdadeltaOptimizer", "AdafactorOptimizer",
    "AdagradOptimizer", "AdamOptimizer", "AdamWOptimizer", "ArithmeticLayer", "ArithmeticOperation",
    "BatchNormalizationLayer", "CTCLossLayer", "CastLayer", "Checkpoint", "ComparisonLayer", "ComparisonOperation",
    "CompileError", "ConcatenationLayer", "ConvolutionDescriptor", "ConvolutionLayer", "ConvolutionType",
    "CosineSimilarityLayer", "CumulativeSumLayer", "DataError", "DataType", "Device", "DeviceError", "DeviceType",
    "DropoutLayer", "EmbeddingDescriptor", "EmbeddingLayer", "Error", "Evaluation", "Execution", "ExecutionError",
    "ExecutionOptions", "FileError", "FullyConnectedLayer", "GRUDescriptor", "GRULayer", "GatherLayer",
    "GradientClippingType", "GradientLayer", "GradientReport", "GramMatrixLayer", "Graph", "GraphCompilationOptions",
    "GraphCompletionHandler", "GraphError", "Group", "GroupNormalizationLayer", "History", "InferenceGraph",
    "InstanceNormalizationLayer", "LAMBOptimizer", "LSTMDescriptor", "LSTMLayer", "LSTMResultMode", "Layer",
    "LayerNormalizationLayer", "LionOptimizer", "LossDescriptor", "LossLayer", "LossType", "MatMulDescriptor",
    "MatMulLayer", "MultiheadAttentionDescriptor", "MultiheadAttentionLayer", "MuonOptimizer", "NAdamOptimizer",
    "NextToken", "ObjectiveLayer", "Optimizer", "OptimizerDescriptor", "PReLULayer", "PaddingLayer", "PaddingPolicy",
    "PaddingType", "ParameterGroup", "ParameterLayer", "PixelShuffleLayer", "PixelUnshuffleLayer", "Platform",
    "PoolingDescriptor", "PoolingLayer", "PoolingType", "ProcessError", "RAdamOptimizer", "RMSNormalizationLayer",
    "RMSPropOptimizer", "RNNDescriptor", "RNNLayer", "RandomInitializerType", "RandomNormalLayer", "RandomUniformLayer",
    "ReductionLayer", "ReductionType", "RegularizationType", "ReshapeLayer", "RestoreReport", "RotaryEmbeddingLayer",
    "Run", "SGDOptimizer", "SampleMode", "ScatterLayer", "SelectionLayer", "ShapeError", "SliceLayer", "SoftmaxLayer",
    "SoftmaxOperation", "SortLayer", "SplitLayer", "StopGradientLayer", "Tensor", "TensorData", "TensorDescriptor",
    "TensorOptimizerDeviceData", "TensorParameter", "TopKLayer", "Trainer", "TrainingGraph", "TransposeLayer",
    "UpsampleLayer", "YOLOLossDescriptor", "YOLOLossLayer", "callbacks", "check_gradients", "concatenate",
    "cross_entropy", "data", "debug", "debug_description", "from_state_dict", "generate", "initializers", "load",
    "maximum", "metrics", "minimum", "onnx", "register", "report", "restore", "save", "schedules", "stack",
    "to_state_dict", "where",
]  # fmt: skip

#: Names that are imported at their first use, by module: `import mlcompute` stays quick for those who do without them,
#: and describing a network needs neither the compiler nor what runs it.
_MODULES = {
    "mlcompute.data": "data",
    "mlcompute.debug": "debug",
    "mlcompute.debug.gradients": "GradientReport check_gradients",
    "mlcompute.generation": "NextToken generate",
    "mlcompute.group": "Group",
    "mlcompute.inference": "InferenceGraph",
    "mlcompute.initializers": "initializers",
    "mlcompute.optimizers": "AdadeltaOptimizer AdafactorOptimizer AdagradOptimizer AdamOptimizer AdamWOptimizer "
    "LAMBOptimizer LionOptimizer MuonOptimizer NAdamOptimizer Optimizer OptimizerDescriptor ParameterGroup "
    "RAdamOptimizer RMSPropOptimizer SGDOptimizer",
    "mlcompute.optimizers.lbfgs": "LBFGS",
    "mlcompute.runs": "Evaluation Run",
    "mlcompute.saving": "Checkpoint RestoreReport load restore save",
    "mlcompute.saving.custom": "register",
    "mlcompute.saving.state_dict": "from_state_dict to_state_dict",
    "mlcompute.seeing.report": "report",
    "mlcompute.trainer": "History Trainer callbacks metrics schedules",
    "mlcompute.training": "TrainingGraph",
}
_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'mlcompute' has no attribute {name!r}{advice_for_attribute(name)}")
    module = importlib.import_module(_LATER[name])
    value = globals()[name] = module if module.__name__ == f"mlcompute.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


answer_foreign_keywords(
    [value for name, value in globals().items() if name in __all__ and value is not Execution],  # one per step
    [
        name
        for name, value in vars(Graph).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith(("mlcompute.building", "mlcompute.graph"))
    ],
)
answer_foreign_keywords(
    [Tensor],
    [name for name, value in vars(Tensor).items() if getattr(value, "__module__", "") == "mlcompute.tensor_operators"],
)
