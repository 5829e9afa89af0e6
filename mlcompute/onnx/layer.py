"""OperatorLayer: a layer for any operator of the table, described in ops like every other layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import CompileError, Error
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.onnx.operands import Known, Scope, Source, Use, Weight, known_now
from mlcompute.onnx.types import carried, descriptor_of, folded_shape, unfolded_shape
from mlcompute.ops.op import Array, Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter

#: Operators that put features on axis 1, and operators that leave them where they are.
_FEATURES_FIRST = {"BatchNormalization", "Conv", "ConvTranspose", "InstanceNormalization"}
_FEATURES_STAY = (
    {"Add", "Cast", "Clip", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity"}
    | {"LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "Mul", "Neg", "Pow", "Relu", "Selu", "Sigmoid"}
    | {"Softmax", "Softplus", "Sqrt", "Sub", "Tanh"}
)


class OperatorLayer(Layer):
    """One ONNX operator. Its forward pass is the row of the operator table; the gradient follows from the ops.

    Made by `mlc.onnx.load`. `operator` and `attributes` say what it is; weights keep the model's names.
    """

    default_label = "operator"
    source_types = ALL_TYPES
    source_count = (1, 1 << 30)
    batch_axes = None

    def __init__(self, use: Use, outputs: Sequence[tuple[int, Shape, np.dtype[Any]]], label: str = "") -> None:
        super().__init__()
        self.use = use
        self.outputs = list(outputs)
        self.sources = use.sources()
        if label:
            self.label = label
        self._weights = use.weights
        self._parameters = {tensor: TensorParameter(tensor) for tensor, trained in self._weights.items() if trained}

    @property
    def operator(self) -> str:
        """The operator's name, with its domain when it is not ONNX's own."""
        row = self.use.row
        return f"{row.domain}.{row.name}" if row.domain else row.name

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.use.attributes)

    @property
    def who(self) -> str:
        return f"{self.operator} '{self.label}'"

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {tensor.label: parameter for tensor, parameter in self._parameters.items()}

    @property
    def statistics(self) -> dict[str, Tensor]:
        return {tensor.label: tensor for tensor, trained in self._weights.items() if not trained}

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        for given, expected in zip(sources, self.sources, strict=True):
            self.expect(
                given.shape == folded_shape(expected.shape),
                f"was imported for a source of shape {folded_shape(expected.shape)}, not {given.shape}",
                fix="import the model again with the shapes you need",
            )
        return [descriptor_of(shape, dtype) for _, shape, dtype in self.outputs]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        if self.operator in _FEATURES_FIRST:
            return 1
        if self.operator == "MatMul" and len(sources) == 1:  # by a matrix of weights
            return len(result) - 1
        return super().feature_axis(known, sources, result) if self.operator in _FEATURES_STAY else None

    def forward(self, run: Forward, *sources: Value) -> list[Value]:
        trace = sources[0].trace
        fed = {id(source.tensor): value for source, value in zip(self.sources, sources, strict=True)}

        def source(operand: Source) -> Value:
            value = fed[id(operand.tensor)]
            return ops.reshape(value, unfolded_shape(operand.shape, value.shape))

        def weight(operand: Weight) -> Value:
            return run.read(operand.tensor, operand.shape)

        def uniform(like: Value, shape: Shape) -> Value:
            return run.uniform(like, shape, 0)

        # Layers compute half precision in float32; checks of the mathematics run everything in float64.
        float_type = np.dtype(np.float64) if any(v.dtype == np.float64 for v in sources) else np.dtype(np.float32)
        pairs = zip(self.sources, sources, strict=True)
        changed = [(s.shape[0], v.shape[0]) for s, v in pairs if s.shape and v.shape[0] != folded_shape(s.shape)[0]]
        scope = Scope(trace, source, weight, training=run.training, uniform=uniform, float_type=float_type)
        if any(value.shape != folded_shape(s.shape) for s, value in zip(self.sources, sources, strict=True)):
            scope.batch = changed[0] if changed else (1, 1)
            scope.shape_now = functools.partial(_shape_now, run)
        try:
            answers = self.use.describe(scope)
        except Error as error:
            error.add_fact("node", self.who)
            raise
        found = []
        for index, shape, _ in self.outputs:
            answer = answers[index]
            if not isinstance(answer, Value):
                if answer is None:
                    raise CompileError(f"{self.who}: result {index} is missing")
                answer = trace.constant(answer, carried(answer.dtype))
            target = folded_shape(answer.shape if len(answer.shape) == len(shape) else shape)
            found.append(ops.reshape(answer, target))
        return found


def array_now(known: Known, run: Forward) -> Array:
    """The numbers of a constant in the batch that is described."""
    return known_now(known, functools.partial(_shape_now, run), {})


def _shape_now(run: Forward, source: Source) -> Shape:
    """The shape a tensor of the model has in the batch that is described."""
    return unfolded_shape(source.shape, run.shape_of(source.tensor))
